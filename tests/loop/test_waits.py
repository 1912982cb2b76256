"""Steps and loops that wait for no device: what the host reads of tensors, and how often."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

import purestep as ps
from purestep import schedules
from purestep.loop import nonfinite_steps as halted
from purestep.loop.purity_check import PurityCheck
from purestep.step import Accum, accumulation, counting, train_step, update
from purestep.torch_ext import tracing


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
            patch.setattr("purestep.torch_ext.tracing.may_read", lambda value: False)
            other, expected = program.train_step(other, BATCH)
        assert_same(state, other)
        for left, right in zip(ps.tree.leaves(metrics), ps.tree.leaves(expected), strict=True):
            assert torch.equal(left, right) or (left.isnan() & right.isnan()).all()


class Branches:
    """Counts what eager steps compute, which are not let read where a window stands, as on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = self.closed = 0
        shut = SimpleNamespace(**{**vars(tracing), "may_read": lambda value: False, "may_branch": lambda value: False})
        for module in (accumulation, update):
            monkeypatch.setattr(module, "tracing", shut)
        keep_open, close = accumulation._keep_open, accumulation.close
        monkeypatch.setattr(accumulation, "_keep_open", lambda *given: self._count(keep_open, given, opened=1))
        for module in (accumulation, train_step):
            monkeypatch.setattr(module, "close", lambda *given: self._count(close, given, closed=1))

    def _count(self, function: Any, given: Any, *, opened: int = 0, closed: int = 0) -> Any:
        self.opened, self.closed = self.opened + opened, self.closed + closed
        return function(*given)


def by_hand(program: Any, state: Any, batches: Any) -> Any:
    """Calls of a train step, which on the CPU reads where the window stands."""
    for batch in batches:
        state, _ = program.train_step(state, batch)
    return state


def assert_same(found: Any, expected: Any) -> None:
    assert type(found.accum) is Accum
    for (path, left), (_, right) in zip(ps.tree.with_paths(found), ps.tree.with_paths(expected), strict=True):
        if path.startswith("ema/"):  # averaged by other operations where the host may not read
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(left, right), path


def batches(count: int, *, spoilt: int = -1) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(count)]
    return [(x * torch.nan, y) if place == spoilt else (x, y) for place, (x, y) in enumerate(made)]


@pytest.mark.parametrize("done", [0, 1, 2])  # micro-batches of the window that the state comes with
def test_run_epoch_computes_a_window_once(monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    program, data = deep(2, accumulate=3, ema=0.9), batches(9)
    start = by_hand(program, program.init(), data[:done])
    expected = by_hand(program, start, data[done:])
    seen = Branches(monkeypatch)
    found, _ = ps.run_epoch(start, data[done:], program.train_step)
    assert (seen.opened, seen.closed) == (6 - done, 3)
    assert_same(found, expected)
    reads = list[int]()
    for count in (3, 6):
        with Counted() as counted:
            by_hand(program._replace(train_step=counting(program.train_step)), start, data[:count])
        reads.append(counted.reads)
    assert reads == [1, 1]


@pytest.mark.parametrize("tail", ["carry", "step", "drop"])
def test_fit_computes_a_window_once(monkeypatch: pytest.MonkeyPatch, tail: str) -> None:
    program, data = deep(2, accumulate=3, tail=tail), batches(8)
    states = [program.init()]
    for _ in range(2):
        state = by_hand(program, states[-1], data)
        states.append(state if state.accum.left == 3 else program.flush(state)[0])
    seen, shown = Branches(monkeypatch), list[Any]()
    quiet: Any = {"progress": False, "check_every": None, "compile": False}
    callbacks = [lambda event: shown.append(event.state) if isinstance(event, ps.events.StepEnd) else None]
    result = ps.fit(states[0], {"train": data}, program, epochs=2, callbacks=callbacks, donate=False, **quiet)
    flushes = 0 if tail == "carry" else 2
    closed = 5 if tail == "carry" else 4
    assert (seen.opened, seen.closed) == (16 - closed, closed + flushes)
    assert_same(result.state, states[2])
    assert {type(state.accum) for state in shown} == {Accum}


def test_a_callback_moves_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    program, data = deep(2, accumulate=3, tail="carry"), batches(9)

    def moved(state: Any) -> Any:
        return state._replace(accum=state.accum._replace(left=torch.tensor(1)))

    expected = by_hand(program, moved(by_hand(program, program.init(), data[:3])), data[3:])
    seen, answered = Branches(monkeypatch), list[Any]()

    def answers(event: Any) -> Any:
        if isinstance(event, ps.events.StepEnd) and not answered:
            answered.append(event)
            return moved(event.state)
        return None

    quiet: Any = {"progress": False, "check_every": None, "compile": False, "log_every": 0}
    result = ps.fit(program.init(), {"train": data}, program, epochs=1, callbacks=[answers], donate=False, **quiet)
    assert_same(result.state, expected)
    assert (seen.opened, seen.closed) == (6, 3)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_window_that_halted_goes_on_where_it_stood(monkeypatch: pytest.MonkeyPatch, spoilt: int) -> None:
    """While a state is halted its window does not move; a count on the host does."""
    program, clean = deep(2, accumulate=3, nonfinite="raise"), batches(9)
    bad = batches(9, spoilt=spoilt)[:5]
    halted = by_hand(program, program.init(), bad)
    assert halted.halted
    alive = halted._replace(halted=torch.zeros_like(halted.halted))
    expected = by_hand(program, alive, clean)
    Branches(monkeypatch)
    step = counting(program.train_step)
    state = by_hand(program._replace(train_step=step), program.init(), bad)
    assert_same(state, halted)
    again = state._replace(halted=torch.zeros_like(state.halted))
    assert_same(by_hand(program._replace(train_step=step), again, clean), expected)


def test_a_step_that_somebody_wrapped_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program, data = deep(2, accumulate=3), batches(6)
    expected = by_hand(program, program.init(), [batch for batch in data for _ in range(2)])

    @functools.wraps(program.train_step)
    def twice(state: Any, batch: Any) -> Any:
        state, _ = program.train_step(state, batch)
        return program.train_step(state, batch)

    seen = Branches(monkeypatch)
    found, _ = ps.run_epoch(program.init(), data, twice)
    assert_same(found, expected)
    assert seen.opened == seen.closed == 12  # both, which is dear and right


@pytest.mark.parametrize("made", [
    lambda: schedules.from_torch_scheduler(LambdaLR, 1.0, steps=10, lr_lambda=lambda t: 0.5**t),
    lambda: schedules.from_torch_scheduler(OneCycleLR, 1.0, steps=10, max_lr=1.0, total_steps=20, cycle_momentum=False),
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
        reach: Any = PurityCheck(program, 0, compiled=False)._reach
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
        halted.halt_spoilt(state)
    assert counted.reads == (2 if calls % 3 else 1)
    spoilt = state._replace(accum=state.accum._replace(weight=torch.full((), torch.nan)))
    assert int(halted.halt_spoilt(spoilt).halted) == calls
    grads = {name: torch.full_like(leaf, torch.inf) for name, leaf in state.accum.grads.items()}
    spoilt = state._replace(accum=state.accum._replace(weight=torch.ones(()), grads=grads))
    assert int(halted.halt_spoilt(spoilt).halted) == calls


def test_all_flags_of_a_tree_are_read_at_once() -> None:
    state = deep(1).init()
    pair = {"one": state, "two": state._replace(halted=torch.tensor(5))}
    assert halted.halts(pair) == [("two", 5)]


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
