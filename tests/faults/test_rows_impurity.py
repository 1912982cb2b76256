"""Rows 36, 40 and 45 to 48 of the fault matrix: numbers that go wrong, steps that are no pure functions, memory that
was given away. Each guard has a control: without it the same fault goes unseen."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from rigs.faults.plants import CHANGES, PLANTS, Plant, Step, batch, changed, clean, fresh, later
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import purestep as ps
from purestep import optim, testing
from purestep.diagnostics import purity
from purestep.errors import StepContractError
from purestep.types import Program

fit = partial(ps.fit, progress=False)
AOT = {"backend": "aot_eager"}


def train(step: Step, count: int = 4, **fields: Any) -> ps.FitResult:
    return fit(fresh(), [batch() for _ in range(count)], Program(step), epochs=1, **fields)


def mlp(**options: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1), **options)


# --- row 45: impure steps ---------------------------------------------------------------------------------------------


def named(plant: Plant, place: str) -> str:
    where = f"{place}, {plant.where}" if plant.where else place
    return f"^train_step, {where}: {plant.what}"


@pytest.mark.row("F45")
@pytest.mark.parametrize("kind", PLANTS)
def test_row_45_impure_steps(kind: str) -> None:
    plant = PLANTS[kind]
    with pytest.raises(StepContractError, match=named(plant, "epoch 1, batch 1")) as caught:
        train(plant.make())
    assert caught.value.hint
    with pytest.raises(StepContractError, match=rf"^{plant.where or 'step'}: {plant.what}"):
        testing.assert_pure(plant.make(), fresh(), batch())


@pytest.mark.parametrize("kind", ["add_ on a parameter", "a counter", "graphs in a list", "the clock"])
def test_row_45_without_the_look_nobody_would_know(kind: str) -> None:
    assert train(PLANTS[kind].make(), check_every=None).epochs == 1


@pytest.mark.parametrize("write", [lambda x: x.data.fill_(7), lambda x: x.numpy().fill(7)])
def test_row_45_what_versions_do_not_show_the_fingerprint_does(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write into what the step does not read, so that its results do not show it either."""
    step = changed(lambda call: write(call.batch["extra"]))
    with pytest.raises(StepContractError, match="batch/extra: the step writes its arguments, past autograd"):
        train(step())
    monkeypatch.setattr(purity, "fingerprint", lambda leaf, weights: None)
    monkeypatch.setattr(purity, "check_outside", lambda call: None)  # would see the first one
    train(step())


def test_row_45_the_second_call_is_looked_at_too() -> None:
    with pytest.raises(StepContractError, match=r"^train_step, epoch 1, batch 2, state/w: the step writes"):
        train(later())


def from_call(number: int) -> Step:
    def step(state: Any, given: Any) -> Any:
        if state["opt"][1] >= number - 1:
            given["x"].mul_(2)
        return clean(state, given)

    return step


@pytest.mark.parametrize(
    ("begins", "every", "found"), [(3, 0, None), (3, 1, 3), (3, 4, 6), (7, 4, 10), (7, None, None)]
)
def test_row_45_later_calls_are_looked_at_where_that_is_asked_for(begins: int, every: Any, found: Any) -> None:
    """Every call that is looked at leads to ``every`` more until the next."""
    if found is None:
        assert train(from_call(begins), 12, check_every=every).epochs == 1
        return
    with pytest.raises(StepContractError, match=rf"^train_step, epoch 1, batch {found}, batch/x: the step writes"):
        train(from_call(begins), 12, check_every=every)


def test_row_45_after_the_looks_a_step_is_called_once_a_batch() -> None:
    calls: list[int] = []

    def step(state: Any, given: Any) -> Any:
        calls.append(int(state["opt"][1]))
        return clean(state, given)

    train(step, 9)
    assert [calls.count(number) for number in range(9)] == [3, 2, 1, 1, 1, 1, 1, 1, 1]
    calls.clear()
    train(step, 9, check_every=None)
    assert calls == list(range(9))


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["add_ on a parameter", "a write through numpy", "numpy's generator", "a counter"])
def test_row_45_a_compiled_step_is_looked_at_in_eager(kind: str) -> None:
    """A graph shows nothing of what its Python does: a counter is a constant of it."""
    plant = PLANTS[kind]
    with pytest.raises(StepContractError, match=named(plant, "epoch 1, batch 1")):
        train(plant.make(), compile=AOT)


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


class Reader(nn.Module):
    """Dropout and norms behind weights that start at 0: no gradient reaches what lies before them until they move."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny_convnet()
        with torch.random.fork_rng(devices=[]):
            self.last = nn.Linear(3, 3)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(x))


def two_at_once() -> tuple[Program, Any]:
    """A step of one's own over two programs, as a GAN has."""
    one, other = mlp(), mlp(ema=0.9)

    def step(state: Any, given: Any) -> Any:
        left, metrics = one.train_step(state[0], given)
        right, _ = other.train_step(state[1], (given[0] + 1, given[1]))
        return (left, right), metrics

    return Program(step), (one.init(), other.init())


def reader(**options: Any) -> Callable[[], tuple[Program, Any]]:
    def make() -> tuple[Program, Any]:
        objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})
        program = ps.program(Reader(), objective, optim.adamw(0.01), **options)
        return program, program.init()

    return make


CLEAN: dict[str, Callable[[], tuple[Program, Any]]] = {
    "norms, dropout, zeros": reader(ema=0.9),
    "functorch": reader(engine="func"),
    "windows": reader(accumulate=2, tail="carry"),
    "parts": reader(microbatches=2),
    "float16": reader(precision="16-mixed"),
    "two programs": two_at_once,
}


@pytest.mark.parametrize("case", CLEAN)
def test_row_45_no_false_alarms(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Clean steps pass without a word, to the bits that they end in without a look."""
    make = vector_batch if case == "two programs" else image_batch
    batches = [make(8, seed) for seed in range(5)]
    before = generators()
    ends: list[Any] = []
    for every in (None, 0, 1):
        program, state = CLEAN[case]()
        with caplog.at_level(logging.WARNING, "purestep"):
            ends.append(fit(state, batches, program, epochs=2, check_every=every).state)
    assert generators() == before
    advice = ("the average holds", "precision=")  # a run too short for its average; float16 on a CPU
    assert [text for text in map(logging.LogRecord.getMessage, caplog.records) if not text.startswith(advice)] == []
    for end in ends[1:]:
        assert_trees_close(end, ends[0], exact=True)


@pytest.mark.compile
def test_row_45_looks_leave_no_trace_in_a_donated_run() -> None:
    program, state = reader(ema=0.9)()
    batches = [image_batch(8, seed) for seed in range(4)]
    ends = [fit(state, batches, program, epochs=1, compile=AOT, check_every=every).state for every in (None, 0, 1)]
    for end in ends[1:]:
        assert_trees_close(end, ends[0], exact=True)


# --- row 46: a state of another kind ----------------------------------------------------------------------------------


@pytest.mark.row("F46")
@pytest.mark.parametrize("kind", CHANGES)
def test_row_46_steps_that_change_the_kind_of_their_state(kind: str) -> None:
    plant = CHANGES[kind]
    message = f"{plant.where}: the step changes its state: .*{plant.what}"
    with pytest.raises(StepContractError, match=f"^train_step, epoch 1, batch 1, {message}"):
        train(plant.make())
    with pytest.raises(StepContractError, match=f"^{message}"):
        testing.assert_pure(plant.make(), fresh(), batch())
    with pytest.raises(StepContractError, match=f"^train_step, up to epoch 1, batch 1, {message}"):
        train(plant.make(), check_every=None)


def changes_at(number: int) -> Step:
    def step(state: Any, given: Any) -> Any:
        new, metrics = clean(state, given)
        return ({**new, "w": new["w"].double()} if state["opt"][1] == number - 1 else new), metrics

    return step


@pytest.mark.parametrize(("begins", "found"), [(3, 4), (64, 64), (65, 128)])
def test_row_46_a_state_that_changes_later_is_found_within_64_calls(begins: int, found: int) -> None:
    """It stays float64 from there on."""
    with pytest.raises(StepContractError, match=rf"up to epoch 1, batch {found}, state/w: .* became .*float64"):
        train(changes_at(begins), 200)


@pytest.mark.compile
def test_row_46_a_compiled_step_is_held_to_it_while_its_graph_is_made() -> None:
    step = CHANGES["a dtype"].make()
    with pytest.raises(
        StepContractError, match=r"^w: the leaf goes in as \[4\] torch.float32 and comes out as \[4\] .*float64"
    ):
        train(step, compile=AOT, check_every=None)


# --- row 47: what a step returns --------------------------------------------------------------------------------------

ONE = ps.Mean(torch.ones(()), torch.ones(()))


def elsewhere() -> torch.Tensor:
    """A number on a device that this machine need not have."""
    with FakeTensorMode():
        return torch.ones((), device="cuda:0")


ANSWERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "nothing": (lambda s, b: None, "returned a NoneType"),
    "the state alone": (lambda s, b: s, "returned a dict"),
    "three things": (lambda s, b: (s, {}, 1), "returned a tuple of 3"),
    "the other order": (lambda s, b: ({}, torch.ones(1)), "returned a "),
    "a metric that is a float": (lambda s, b: (s, {"loss": 1.0}), "metric 'loss' is a float.*ps.Mean"),
    "a metric that is a tensor": (lambda s, b: (s, {"loss": torch.ones(())}), "metric 'loss' is a Tensor"),
    "a weight elsewhere": (
        lambda s, b: (s, {"loss": ONE, "hits": ps.Mean(torch.ones(()), elsewhere())}),
        r"metrics are on several devices: the total of 'loss' on cpu, the weight of 'hits' on cuda:0.*total\.device",
    ),
    "a metric elsewhere": (
        lambda s, b: (s, {"loss": ONE, "hits": ps.Mean(elsewhere(), elsewhere())}),
        "metrics are on several devices: the total of 'loss' on cpu, the total of 'hits' on cuda:0",
    ),
}


@pytest.mark.row("F47")
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("every", [0, None])
def test_row_47_what_a_step_must_return(answer: str, every: int | None) -> None:
    step, message = ANSWERS[answer]
    with pytest.raises(StepContractError, match=rf"^train_step: (the step )?{message}") as caught:
        train(step, check_every=every)
    assert caught.value.hint


@pytest.mark.compile
def test_row_47_a_compiled_step_returns_its_metrics_on_one_device() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": ONE, "hits": ps.Mean(torch.ones(()), torch.ones((), device="meta"))}

    with pytest.raises(StepContractError, match=r"^train_step: .*'loss' on cpu, the weight of 'hits' on meta \(cure: "):
        train(step, compile=AOT, check_every=None)


@pytest.mark.slow
def test_row_47_memory_is_flat_over_1000_steps() -> None:
    """Tensors that are alive, counted at every 200th step; the control keeps one a step."""

    def growth(step: Step, steps: int) -> int:
        counts: list[int] = []

        def count(event: Any) -> None:
            if isinstance(event, ps.events.StepEnd) and event.updates % 200 == 0:
                gc.collect()
                counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

        train(step, steps, callbacks=[count], log_every=200, check_every=None)
        return counts[-1] - counts[0]

    assert growth(clean, 1000) <= 0
    assert growth(PLANTS["graphs in a list"].make(), 400) >= 200


# --- row 40: a loss that the parameters do not reach ------------------------------------------------------------------


def objective(cut: Callable[[Tensor], Any]) -> Callable[[Any, Any], ps.Loss]:
    def loss(model: Any, given: Any) -> ps.Loss:
        return ps.Loss(cut(nn.functional.cross_entropy(model(given[0]), given[1])), 8, {})

    return loss


CUTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "detach": (lambda loss: loss.detach(), "does not depend on the parameters: every gradient would be zero"),
    "item": (lambda loss: torch.tensor(loss.item()), "does not depend on the parameters"),
    "a constant": (lambda loss: torch.ones(()), "does not depend on the parameters"),
    "no_grad": (torch.no_grad()(lambda loss: loss * 1), "does not depend on the parameters"),
    "a float": (lambda loss: loss.item(), "the loss is a float, not a tensor"),
    "times 0": (
        lambda loss: loss * 0 + 1,
        r"epoch 1, batch 2: the gradient is exactly 0 of every parameter: 0.weight, 0.bias, 2.weight, 2.bias",
    ),
}


@pytest.mark.row("F40")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("compiled", [False, pytest.param(AOT, marks=pytest.mark.compile)])
def test_row_40_a_loss_that_does_not_depend_on_the_parameters(cut: str, compiled: Any) -> None:
    change, message = CUTS[cut]
    program = ps.program(tiny_mlp(), objective(change), optim.sgd(0.1))
    state = program.init()
    if cut == "no_grad":  # also the forward pass
        program = ps.program(tiny_mlp(), torch.no_grad()(objective(change)), optim.sgd(0.1))
    with pytest.raises(StepContractError, match=message) as caught:
        fit(state, [vector_batch(8, seed) for seed in range(3)], program, epochs=1, compile=compiled)
    assert caught.value.hint
    assert_trees_close(state, program.init(), exact=True)


class Cut(nn.Module):
    """Its first layer is cut off; another is frozen, and a third is not used."""

    def __init__(self, *, cut: bool = True) -> None:
        super().__init__()
        self.cut = cut
        self.first, self.spare, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.spare.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.spare(self.first(x))
        return self.last(hidden.detach() if self.cut else hidden)


@pytest.mark.parametrize("cut", [True, False])
def test_row_40_parameters_that_no_gradient_reaches_are_named_once(cut: bool, caplog: pytest.LogCaptureFixture) -> None:
    program = ps.program(Cut(cut=cut), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    with caplog.at_level(logging.WARNING, "purestep"):
        fit(program.init(), [vector_batch(8, seed) for seed in range(5)], program, epochs=2)
    said = [record.getMessage() for record in caplog.records]
    expected = "no gradient reaches 2 of 4 parameters: first.weight, first.bias (take out .detach()"
    assert [text[: len(expected)] for text in said] == ([expected] if cut else [])


# --- row 48: memory that was given away -------------------------------------------------------------------------------


class Breaks:
    """A backend whose graphs do their work and then fail, at the n-th call of all of them."""

    def __init__(self, at: int, kind: type[BaseException] = RuntimeError) -> None:
        self.at, self.kind, self.calls = at, kind, 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            found = graph(*tensors)
            self.calls += 1
            if self.calls == self.at:
                raise self.kind("the device is gone")
            return found

        return run


def donated(at: int, kind: type[BaseException] = RuntimeError, **fields: Any) -> tuple[BaseException, list[Any]]:
    """What a run raises whose graph fails at that call, and the states that its callbacks saw."""
    program, seen = mlp(ema=0.9), []

    def look(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd):
            seen.append(event.state)

    options = {"backend": Breaks(at, kind)}
    with pytest.raises(kind, match="the device is gone") as caught:
        fit(program.init(), steps_of(3), program, epochs=4, compile=options, callbacks=[look], **fields)
    return caught.value, seen


def steps_of(count: int) -> list[Any]:
    return [vector_batch(8, seed) for seed in range(count)]


def after(calls: int) -> Any:
    """The state after so many calls, from the same kernels."""
    program = mlp(ema=0.9)
    step = ps.compile_step(program.train_step, backend="eager")
    state = program.init()
    for call in range(calls):
        state, _ = step(state, steps_of(3)[call % 3])
    return state


@pytest.mark.compile
@pytest.mark.row("F48")
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_row_48_a_donated_step_that_fails_half_way(kind: type[BaseException], tmp_path: Any) -> None:
    """The fifth of three an epoch: the directory of the snapshots is named."""
    sources: list[tuple[dict[str, Any], str]] = [
        ({"snapshots": tmp_path}, f"goes on from the last snapshot in {tmp_path}"),
        ({}, "no snapshot has an earlier one"),
    ]
    for fields, told in sources:
        error, seen = donated(5, kind, monitor="train_loss", **fields)
        note = next(note for note in error.__notes__ if "donated" in note)
        assert note.startswith("the state was donated at step 5, which failed")
        assert told in note
        for state in seen:  # numbers that belong to no step cannot be read
            with pytest.raises(ps.errors.StateError, match=r"this state in call \d"):
                _ = state.params
        assert error.result.state is None
        assert len(error.result.history.get("epoch", [])) == 1
        assert int(error.result.best_state.step) == 3


@pytest.mark.compile
@pytest.mark.row("F48")
@pytest.mark.parametrize("donate", [True, "init"])
def test_row_48_the_first_call_fails_half_way(donate: Any) -> None:
    """It has written a copy of the state; with "init" the state itself, which is plain and cannot say so."""
    error, _ = donated(1, donate=donate)
    assert any("donated" in note for note in error.__notes__) == (donate == "init")


@pytest.mark.compile
def test_row_48_nothing_is_lost_before_the_first_donation_and_the_rescue_saves_no_dead_state(tmp_path: Any) -> None:
    error, _ = donated(1)
    assert not any("donated" in note for note in error.__notes__)
    with ps.Snapshots(tmp_path, every_steps=2) as snapshots:
        error, _ = donated(6, snapshots=snapshots)
        snapshots.wait()
        assert snapshots.steps() == [2, 3, 4]
    assert error.result.state is None


@pytest.mark.compile
def test_row_48_a_run_goes_on_from_there(tmp_path: Any) -> None:
    donated(8, snapshots=tmp_path)
    program = mlp(ema=0.9)
    options = {"backend": "eager"}
    result = fit(program.init(), steps_of(3), program, epochs=4, compile=options, snapshots=tmp_path)
    assert_trees_close(ps.clone(result.state), after(12), exact=True)


@pytest.mark.compile
def test_row_48_an_error_before_the_graph_runs_costs_nothing(tmp_path: Any) -> None:
    """A batch that the step cannot take fails while its graph is made: the state is whole, and saved."""
    program = mlp()
    train = [*steps_of(2), (torch.ones(8, 5), torch.zeros(8).long())]
    options = {"backend": "eager"}
    with pytest.raises(StepContractError, match=r"a Linear: .*\[8, 5\]") as caught:
        fit(program.init(), train, program, epochs=1, compile=options, snapshots=tmp_path)
    assert caught.value.__notes__ == ["in train_step, epoch 1, batch 3"]
    assert ps.Snapshots(tmp_path, writer=False).latest() == 2


@pytest.mark.compile
@pytest.mark.parametrize("point", ["loop.batch=raise:EIO@5", "loop.step=raise:EIO@5"])
def test_row_48_failpoints_on_both_sides_of_a_donated_step(
    point: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rigs.faults.failpoints.hits", Counter())
    monkeypatch.setenv("PURESTEP_FAILPOINT", point)
    program = mlp(ema=0.9)
    options = {"backend": "eager"}
    with pytest.raises(OSError, match="failpoint loop") as caught:
        fit(program.init(), steps_of(3), program, epochs=4, compile=options, snapshots=tmp_path)
    before = point.startswith("loop.batch")
    saved = ps.Snapshots(tmp_path, writer=False).latest()
    assert saved == (4 if before else 3)  # before the step the state is whole, and saved
    assert any("donated at step 5" in note for note in getattr(caught.value, "__notes__", [])) != before
    monkeypatch.delenv("PURESTEP_FAILPOINT")
    result = fit(program.init(), steps_of(3), program, epochs=4, compile=options, snapshots=tmp_path)
    assert_trees_close(ps.clone(result.state), after(12), exact=True)
