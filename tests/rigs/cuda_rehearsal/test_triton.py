"""Compiled steps through inductor, Triton and ptxas: launches of each, and a replay that is one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers import Recurrent
from torch import nn

import purestep as ps

from .counting import counted
from .emulation import emulated
from .programs import PROGRAMS


class Compiled(NamedTuple):
    """Launches of a compiled step, at most."""

    triton: int
    products: int
    others: int  # the seed of a generator, fused attention
    copies: int = 0  # on the device


COMPILED = {
    "mlp": Compiled(14, 5, 1),
    "gpt": Compiled(48, 15, 5),
    "16-mixed": Compiled(23, 5, 1),
    "accumulate": Compiled(18, 5, 1),
    "hugging face": Compiled(42, 15, 6, copies=1),
}


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_over_short_sequences_compile(layer: Any):
    program = ps.program(
        Recurrent(layer(4, 8, num_layers=2, batch_first=True)), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1)
    )
    with emulated():
        state = program.init(device="cuda")
    step = ps.compile_step(program.train_step, donate=True)
    batch = torch.zeros(6, 3, 4, device="cuda"), torch.zeros(6, dtype=torch.long, device="cuda")
    seen, _ = counted(step, state, batch, warm=1)
    assert (step.graphs, seen.syncs) == (1, 0)


@pytest.mark.parametrize("name", COMPILED)
def test_a_step_through_triton_and_ptxas_stays_in_its_budget_and_is_replayed_by_one_launch(name: str):
    program, batch = PROGRAMS[name]()
    assert program.init is not None
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=True)
    with emulated():  # how often a parameter was missed is read, and tells apart what may share a buffer
        state = program.init(device="cuda")
    seen, state = counted(step, state, batch, warm=1)
    assert seen.syncs == 0
    assert all(copy.startswith("D->D") for copy in seen.copies)
    assert len(seen.copies) <= COMPILED[name].copies
    assert 0 < seen.triton <= COMPILED[name].triton
    assert 0 < seen.products <= COMPILED[name].products
    assert seen.kernels <= COMPILED[name].others
    replay, _ = counted(step, state, batch)
    leaves = len(batch)
    assert (replay.replays, replay.triton, replay.products, replay.syncs) == (1, 0, 0, 0)
    assert replay.kernels <= 2  # torch hands a graph the seed and the offset of its generator
    assert len(replay.copies) <= leaves + 1  # the batch in, the metrics out
    assert all(copy.startswith("D->D") for copy in replay.copies)
    assert step.graphs == 1
