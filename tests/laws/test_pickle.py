"""A state is a value: pickled, it is the same state in another process."""

from __future__ import annotations

import pickle
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep import optim

BATCH = torch.linspace(-1.0, 1.0, 24).reshape(6, 4), torch.linspace(0.0, 1.0, 12).reshape(6, 2)


def program() -> ps.Program:
    torch.manual_seed(0)
    injected = optim.inject(optim.adamw)(learning_rate=0.1)
    tx = optim.partition({"one": injected, "two": optim.sgd(0.1, momentum=0.9)}, [("weight$", "one"), ("", "two")])
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    average = ps.ema.average(0.9, warmup=True)
    return ps.program(net, ps.supervised(nn.MSELoss()), tx, ema=average, scaler=ps.scaler.dynamic(), accumulate=2)


def trained(state: ps.TrainState) -> list[Tensor]:
    made = program()
    for _ in range(3):
        state, _ = made.train_step(state, BATCH)
    return ps.tree.leaves(state)


def in_another_process(state: ps.TrainState, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put([leaf.numpy() for leaf in trained(state)])


@pytest.fixture
def state() -> ps.TrainState:
    made = program()
    assert made.init is not None
    return made.train_step(made.init(seed=3), BATCH)[0]


def test_a_state_is_pickled_with_all_of_its_parts(state: ps.TrainState):
    back = pickle.loads(pickle.dumps(state))
    assert type(back) is ps.TrainState
    assert ps.tree.signature(back) == ps.tree.signature(state)
    assert all(torch.equal(a, b) for a, b in zip(trained(state), trained(back), strict=True))


def test_a_state_goes_to_a_process_that_is_spawned(state: ps.TrainState):
    context = get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=in_another_process, args=(state, queue))
    process.start()
    found = [torch.from_numpy(value) for value in queue.get()]
    process.join()
    assert process.exitcode == 0
    assert all(torch.equal(a, b) for a, b in zip(trained(state), found, strict=True))


def test_an_ensembles_state_is_pickled():
    state = ps.ensemble(program(), 2).init()  # type: ignore[misc]
    back = pickle.loads(pickle.dumps(state))
    assert all(torch.equal(a, b) for a, b in zip(ps.tree.leaves(state), ps.tree.leaves(back), strict=True))
