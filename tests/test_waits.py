"""Steps and loops that wait for no device: what the host reads of tensors, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

import purestep as ps
from purestep import schedules
from purestep.loop import ledger
from purestep.loop.looks import Looks


class Counted(TorchDispatchMode):
    """Counts what waits for a device: numbers that are read, and copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        if func is torch.ops.aten._to_copy.default:
            self.copies += args[0].device != found.device
        return found


def deep(layers: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    return ps.program(model, ps.supervised(nn.MSELoss()), ps.optim.adamw(1e-3), **options)


BATCH = torch.ones(2, 4), torch.ones(2, 4)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_eager_step_reads_nothing_where_that_would_wait(accumulate: int, nonfinite: str) -> None:
    """A tensor on the meta device has no number to read: whoever asks for one gets an error."""
    program = deep(2, accumulate=accumulate, ema=0.9, nonfinite=nonfinite)
    there = torch.device("meta")
    state = ps.tree.map(lambda leaf: leaf, program.init())
    state = ps.tree.map(lambda leaf: leaf.to(there), state)._replace(key=state.key)
    for _ in range(4):
        state, _ = program.train_step(state, ps.tree.map(lambda leaf: leaf.to(there), BATCH))
    assert state.key.tolist() == [0, 4]


def test_a_window_that_is_kept_open_without_a_read_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    program = deep(2, accumulate=3, ema=0.9)
    state = other = program.init()
    for _ in range(7):
        state, metrics = program.train_step(state, BATCH)
        with monkeypatch.context() as patch:
            patch.setattr("purestep.modes.may_read", lambda value: False)
            other, expected = program.train_step(other, BATCH)
        for left, right in zip(ps.tree.leaves((state, metrics)), ps.tree.leaves((other, expected)), strict=True):
            assert torch.equal(left, right) or (left.isnan() & right.isnan()).all()


@pytest.mark.parametrize("made", [
    lambda: schedules.from_torch_scheduler(LambdaLR, 1.0, steps=10, lr_lambda=lambda t: 0.5**t),
    lambda: schedules.from_torch_scheduler(OneCycleLR, 1.0, steps=10, max_lr=1.0, total_steps=20),
    lambda: schedules.join([schedules.constant(1.0), schedules.from_torch_scheduler(
        LambdaLR, 1.0, steps=10, lr_lambda=lambda t: 0.5**t)], [3]),
])  # fmt: skip
def test_a_table_goes_to_a_device_once(made: Any) -> None:
    schedule, count = made(), torch.zeros((), dtype=torch.int64, device="meta")
    schedule(count)
    with Counted() as counted:
        schedule(count)
    assert counted.copies == 0


def test_looks_read_as_often_whatever_the_number_of_leaves() -> None:
    """But for the comparison of what may have been changed in place, leaf by leaf."""
    reads = list[int]()
    for layers in (2, 12):
        program = deep(layers)
        reach: Any = Looks(program, 0, compiled=False)._reach
        state = program.init()
        with Counted() as counted:
            reach._collect({name: torch.ones_like(leaf) for name, leaf in state.params.items()})
            reach.check(state, {"loss": ps.Mean(torch.ones(()), torch.ones(()))})
        assert reach._reached == set(state.params)
        reads.append(counted.reads)
    assert reads[0] == reads[1]


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_window_is_read_at_once_and_only_where_one_is_open(calls: int) -> None:
    program = deep(6, accumulate=3)
    state = program.init()
    for _ in range(calls):
        state, _ = program.train_step(state, BATCH)
    with Counted() as counted:
        ledger._check_windows(state)
    assert counted.reads == (2 if calls % 3 else 1)
    spoilt = state._replace(accum=state.accum._replace(weight=torch.full((), torch.nan)))
    with pytest.raises(ps.errors.NonFiniteError, match="accumulation window that is open"):
        ledger._check_windows(spoilt)
    grads = {name: torch.full_like(leaf, torch.inf) for name, leaf in state.accum.grads.items()}
    spoilt = state._replace(accum=state.accum._replace(weight=torch.ones(()), grads=grads))
    with pytest.raises(ps.errors.NonFiniteError, match="accumulation window that is open"):
        ledger._check_windows(spoilt)


def test_all_flags_of_a_tree_are_read_at_once() -> None:
    state = deep(1).init()
    pair = {"one": state, "two": state._replace(halted=torch.tensor(5))}
    assert ledger.halts(pair) == [("two", 5)]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_eager_step_on_cuda_does_not_wait(accumulate: int) -> None:
    rate = schedules.from_torch_scheduler(LambdaLR, 1.0, steps=10, lr_lambda=lambda t: 0.5**t)
    program = ps.program(nn.Linear(4, 4), ps.supervised(nn.MSELoss()), ps.optim.adamw(rate), accumulate=accumulate)
    state, batch = program.init(device="cuda"), ps.to_device(BATCH, torch.ones((), device="cuda"))
    state, _ = program.train_step(state, batch)
    before: Tensor = torch.cuda.get_rng_state()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            state, _ = program.train_step(state, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cuda.get_rng_state(), before)
