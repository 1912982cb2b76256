"""What the rows of the fault matrix about data, numbers, state and surroundings share: small runs, and controls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import nn

import purestep as ps
from purestep import optim
from purestep.errors import PurestepError
from purestep.types import Program

fit = partial(ps.fit, progress=False)
RUN: Any = importlib.import_module("purestep.loop.fit")._Run


def mlp(tx: optim.Transform | None = None, objective: Any = None, **options: Any) -> Program:
    objective = objective or ps.supervised(nn.CrossEntropyLoss())
    return ps.program(tiny_mlp(), objective, tx or optim.sgd(0.1, momentum=0.9), **options)


def batches(count: int, rows: int = 8) -> list[Any]:
    return [vector_batch(rows, seed) for seed in range(count)]


def poisoned(count: int, *where: int) -> list[Any]:
    """Batches of which some have an input that is not finite."""
    found = batches(count)
    for index in where:
        found[index] = (found[index][0] * torch.nan, found[index][1])
    return found


class Told:
    """A sink that knows how it was treated."""

    foreground = True

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.closed = 0

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def refused(kind: type[PurestepError], match: str, run: Callable[[], Any]) -> PurestepError:
    """The error, which says where and how to cure it."""
    with pytest.raises(kind, match=match) as caught:
        run()
    assert caught.value.where
    return caught.value


def same(found: Any, expected: Any) -> None:
    """Every bit of the state, every number of the history, the best epoch and why the run ended."""
    assert_trees_close(ps.clone(found.state), ps.clone(expected.state), exact=True)
    assert found.history == expected.history
    assert (found.best, found.epochs, found.stop_reason) == (expected.best, expected.epochs, expected.stop_reason)


def fails(test: Callable[[], Any], *raw: type[Exception]) -> None:
    """The control of a row: its guard is switched off, and so its test must fail.

    Args:
        test: of the row.
        raw: what may come up in its place where the guard turns another library's error into one of ours.
    """
    with pytest.raises((AssertionError, pytest.fail.Exception, *raw)):
        test()


def at(kind: type, number: int, act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A callback that does something at the n-th event of a kind, from 1."""
    seen = 0

    def callback(event: Any) -> Any:
        nonlocal seen
        seen += isinstance(event, kind)
        return act(event) if isinstance(event, kind) and seen == number else None

    return callback
