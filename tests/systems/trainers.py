"""Batches, a classifier, a run, and a program whose scores are given, for the tests of several systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers import tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import metrics, optim

Batch = tuple[Tensor, Tensor]


def batches(*sizes: int) -> list[Batch]:
    return [vector_batch(size, seed) for seed, size in enumerate(sizes)]


def classifier(tx: Any = None, **fields: Any) -> ps.Program:
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    return ps.program(tiny_mlp(), objective, tx or optim.sgd(0.1), **fields)


def fit(program: ps.Program, loaders: Any, **fields: Any) -> ps.FitResult:
    assert program.init is not None
    return ps.fit(program.init(device="cpu"), loaders, program, progress=False, **fields)


def scripted(*, calls: int = 1, **values: Sequence[float]) -> ps.Program:
    """A program whose evaluations come to these values, one an epoch of so many calls."""

    def train_step(state: Any, batch: Any) -> Any:
        return {"calls": state["calls"] + 1}, {"loss": ps.Mean(torch.ones(()), torch.ones(()))}

    def eval_step(state: Any, batch: Any) -> ps.Metrics:
        epoch = int(state["calls"]) // calls - 1
        return {name: ps.Mean(torch.tensor(column[epoch]), torch.ones(())) for name, column in values.items()}

    return ps.Program(train_step, eval_step=eval_step, init=lambda seed=0, device=None: {"calls": torch.tensor(0)})
