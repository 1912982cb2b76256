"""Rows 37 to 43 of the fault matrix but 40: overflow, divergence, schedules, losses, parameters, determinism.

Each guard has a control."""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, vector_batch
from rigs.faults.runs import batches, fails, fit, mlp, refused, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim, rng, scaler
from purestep.errors import NonFiniteError, StateError, StepContractError
from purestep.model import template
from purestep.step import gradient, update
from purestep.torch_ext import global_rng

# --- row 37 -----------------------------------------------------------------------------------------------------------


def halves(min_scale: float = 1.0) -> ps.Program:
    """fp16 with a schedule that counts updates; the scale grows after every second one."""
    tx = optim.adamw(lambda count: 0.01 / (count + 1))
    scales = scaler.dynamic(4096.0, growth_interval=2, min_scale=min_scale)
    line, objective = nn.Linear(4, 3), ps.supervised(nn.CrossEntropyLoss())
    return ps.program(line, objective, tx, precision="16-mixed", scaler=scales)


def large() -> Any:
    """A batch whose scaled gradients fp16 cannot hold, though the unscaled ones are small."""
    x, y = vector_batch(8, 9)
    return 100 * x, y


@pytest.mark.row("F37")
def test_row_37_fp16_overflow_under_the_scaler() -> None:
    program = halves()
    state, _ = program.train_step(program.init(), vector_batch(8))
    bad, measured = program.train_step(state, large())
    for field in ("params", "opt_state", "updates"):  # weights, moments and the schedule's count
        assert_trees_close(getattr(bad, field), getattr(state, field), exact=True)
    assert (state.scaler.scale.item(), bad.scaler.scale.item()) == (4096.0, 2048.0)
    assert (float(measured["applied"]), int(bad.step) - int(bad.updates)) == (0.0, 1)  # counted
    for seed in (1, 2):
        bad, _ = program.train_step(bad, vector_batch(8, seed))
    assert (bad.scaler.scale.item(), int(bad.updates)) == (4096.0, 3)  # and grown again


@pytest.mark.row("F37")
def test_row_37_at_the_smallest_scale_it_is_an_error() -> None:
    program = halves(min_scale=1024.0)
    train = [*batches(2), *[(torch.full((8, 4), torch.inf), torch.zeros(8, dtype=torch.int64))] * 5]
    error = refused(NonFiniteError, r"^epoch 1, batch 6: ", lambda: fit(program.init(), train, program, epochs=1))
    assert int(error.result.state.updates) == 2  # type: ignore[attr-defined]


def test_row_37_fails_where_no_scale_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    real = scaler.dynamic

    def endless(*scales: float, **options: Any) -> scaler.Scaler:
        return real(*scales, **options)._replace(exhausted=lambda state, finite: torch.zeros_like(finite))

    monkeypatch.setattr(scaler, "dynamic", endless)
    fails(test_row_37_at_the_smallest_scale_it_is_an_error)


def test_row_37_fails_where_every_norm_is_taken_for_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update.optim, "global_norm", lambda grads: torch.zeros(()))
    fails(test_row_37_fp16_overflow_under_the_scaler)


# --- row 38 -----------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Weights times inputs: the gradient of their sum is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def scaled(objective: Callable[[Tensor], Tensor], tx: optim.Transform) -> ps.Program:
    def loss(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(objective(model(batch)), torch.ones(()), {})

    return ps.program(Scale(), loss, tx)


@pytest.mark.row("F38")
def test_row_38_a_rate_of_a_thousand_diverges_and_is_found() -> None:
    program = scaled(lambda out: out.square().sum(), optim.sgd(1e3))
    train = [torch.ones(4)] * 30
    error = refused(NonFiniteError, "not finite.*learning rate", lambda: fit(program.init(), train, program, epochs=1))
    found = error.result.state  # type: ignore[attr-defined]
    assert bool(torch.isfinite(found.params["w"]).all())
    assert int(found.updates) > 1


@pytest.mark.row("F38")
@pytest.mark.parametrize("clipped", [False, True])
def test_row_38_finite_gradients_of_infinite_norm(clipped: bool) -> None:
    sgd = optim.sgd(0.1)
    program = scaled(torch.sum, optim.chain(optim.clip_by_global_norm(1.0), sgd) if clipped else sgd)
    state, batch = program.init(), torch.full((4,), 1e30)
    assert bool(torch.isfinite(program.bind(state)(batch).sum()))
    error = refused(NonFiniteError, "^epoch 1, batch 1: ", lambda: fit(state, [batch], program, epochs=1))
    assert_trees_close(error.result.state, state, exact=True)  # type: ignore[attr-defined]


def test_row_38_fails_where_every_norm_is_taken_for_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update.optim, "global_norm", lambda grads: torch.zeros(()))
    fails(lambda: test_row_38_finite_gradients_of_infinite_norm(False))


# --- row 39 -----------------------------------------------------------------------------------------------------------

AT_ONCE: dict[str, tuple[Any, str]] = {
    "None": (None, "returned a NoneType for count 0"),
    "complex": (1j, "returned a complex for count 0"),
    "text": ("fast", "returned a str for count 0"),
    "a great integer": (10**50, "returned a number that float32 cannot hold for count 0"),
    "a vector": (torch.ones(2), r"returned a torch.float32 tensor of shape \[2\] for count 0"),
    "a complex tensor": (torch.tensor(1j), r"returned a torch.complex64 tensor of shape \[\] for count 0"),
}
LATER: dict[str, Any] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-0.5": -0.5}


@pytest.mark.row("F39")
@pytest.mark.parametrize("kind", AT_ONCE)
def test_row_39_a_schedule_that_gives_no_number(kind: str) -> None:
    def my_rate(count: Any) -> Any:
        return AT_ONCE[kind][0]

    refused(StepContractError, f"my_rate: the schedule {AT_ONCE[kind][1]}", lambda: mlp(optim.sgd(my_rate)).init())


@pytest.mark.row("F39")
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_row_39_a_schedule_that_leaves_its_range(kind: str, at: int, nonfinite: Any) -> None:
    program = mlp(optim.adamw(lambda count: torch.where(count == at, LATER[kind], 0.1)), nonfinite=nonfinite)
    run = lambda: fit(program.init(), batches(4), program, epochs=1)  # noqa: E731
    error = refused(StepContractError, rf"^schedule, epoch 1, batch {at + 1}: lr is {kind} at call {at + 1}", run)
    expected = program.init()
    for batch in batches(at):
        expected, _ = program.train_step(expected, batch)
    if nonfinite == "raise":  # the state is frozen there; with "skip" later calls have been made
        assert_trees_close(error.result.state, expected, exact=True)  # type: ignore[attr-defined]
    assert_trees_close(error.result.state.params, expected.params, exact=True)  # type: ignore[attr-defined]


@pytest.mark.row("F39")
def test_row_39_past_its_end() -> None:
    table = [0.1, 0.2, 0.3]

    def my_table(count: Any) -> float:
        return table[int(count)]

    program = mlp(optim.sgd(my_table))
    assert fit(program.init(), batches(3), program, epochs=1).history["lr"] == pytest.approx([0.3])
    message = "my_table: the schedule raised IndexError: list index out of range for count 3"
    refused(StepContractError, message, lambda: fit(program.init(), batches(4), program, epochs=1))


@pytest.mark.row("F39")
@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, None, 1j, "fast"])
def test_row_39_a_rate_that_is_no_number(rate: Any) -> None:
    found = (
        "must be a finite number of at least 0"
        if isinstance(rate, float)
        else f"is a {type(rate).__name__}, not a number"
    )
    refused(ps.errors.ConfigError, rf"learning_rate={re.escape(repr(rate))} {found}", lambda: optim.sgd(rate))


@pytest.mark.row("F39")
def test_row_39_whole_numbers_are_numbers() -> None:
    whole, same_rate = mlp(optim.sgd(lambda count: 1)), mlp(optim.sgd(1.0))
    same(fit(whole.init(), batches(2), whole, epochs=1), fit(whole.init(), batches(2), same_rate, epochs=1))


def test_row_39_fails_where_any_rate_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purestep.step.update._usable", lambda rates: None)
    for kind in LATER:
        fails(lambda kind=kind: test_row_39_a_schedule_that_leaves_its_range(kind, 2, "raise"), NonFiniteError)


def test_row_39_fails_where_nobody_asks_what_a_schedule_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purestep.optim.numerics._checked_rate", lambda schedule, step: schedule(step))
    raised = TypeError, RuntimeError, UserWarning, OverflowError
    for kind in AT_ONCE:
        fails(lambda kind=kind: test_row_39_a_schedule_that_gives_no_number(kind), *raised)
    fails(test_row_39_past_its_end, IndexError)


# --- row 41 -----------------------------------------------------------------------------------------------------------


def of(mean: Any) -> ps.Loss:
    return ps.Loss(mean, torch.tensor(8.0), {})


LOSSES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "not a scalar": (
        r"the loss has shape \[8, 3\] and dtype torch.float32; a floating scalar is needed .*loss.mean\(\)",
        of,
    ),
    "one number in a vector": (r"the loss has shape \[1\] and dtype torch.float32", lambda out: of(out.mean()[None])),
    "complex": (
        r"the loss has shape \[\] and dtype torch.complex64.*loss.real",
        lambda out: of(out.mean().to(torch.complex64)),
    ),
    "an integer": (r"the loss has shape \[\] and dtype torch.int64", lambda out: of(out.argmax())),
    "a bool": (r"the loss has shape \[\] and dtype torch.bool", lambda out: of(out.mean() > 0)),
    "a float": (r"the loss is a float, not a tensor", lambda out: of(out.mean().item())),
    "None": (r"the loss is a NoneType, not a tensor", lambda out: of(None)),
    "nothing": (r"the objective returned a NoneType, not a Loss", lambda out: None),
    "a tensor": (r"the objective returned a \w*Tensor, not a Loss", lambda out: out.mean()),
    "a pair": (r"the objective returned a tuple, not a Loss", lambda out: (out.mean(), {})),
}


@pytest.mark.row("F41")
@pytest.mark.parametrize("kind", LOSSES)
def test_row_41_a_loss_that_is_no_floating_scalar(kind: str) -> None:
    message, objective = LOSSES[kind]
    program = mlp(objective=lambda model, batch: objective(model(batch[0])))
    state = program.init()
    before = ps.clone(state)
    refused(StepContractError, f"^objective: {message}", lambda: fit(state, batches(2), program, epochs=1))
    assert_trees_close(state, before, exact=True)


def test_row_41_fails_where_torch_is_left_to_complain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "check_loss", lambda loss, device: loss)
    raw = (RuntimeError, AttributeError, TypeError, StepContractError, UserWarning)
    for kind in LOSSES:
        fails(lambda kind=kind: test_row_41_a_loss_that_is_no_floating_scalar(kind), *raw)


# --- row 42 -----------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A weight, and another tensor beside it."""

    def __init__(self, other: Tensor, parameter: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 3))
        if parameter:
            self.other = nn.Parameter(other, requires_grad=False)
        else:
            self.register_buffer("other", other)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.other.abs().sum()


OTHERS: dict[str, tuple[Tensor, str]] = {
    "int64": (torch.ones(3, dtype=torch.int64), r"register_buffer\('other'"),
    "bool": (torch.ones(3, dtype=torch.bool), r"register_buffer\('other'"),
}


def of_table(module: nn.Module) -> ps.Program:
    return ps.program(module, ps.supervised(nn.CrossEntropyLoss()), optim.adamw(0.1))


@pytest.mark.row("F42")
@pytest.mark.parametrize("kind", OTHERS)
def test_row_42_parameters_that_are_no_floats(kind: str) -> None:
    other, cure = OTHERS[kind]
    message = rf"^other: the parameter has dtype torch.{kind}; floating point is needed.*{cure}"
    refused(StateError, message, lambda: of_table(Table(other)))


@pytest.mark.row("F42")
@pytest.mark.parametrize(
    ("kind", "parameter"), [(torch.int64, False), (torch.complex64, False), (torch.complex64, True)]
)
def test_row_42_as_buffers_they_are_static_leaves_and_complex_ones_may_be_parameters(
    kind: torch.dtype, parameter: bool
) -> None:
    program = of_table(Table(torch.ones(3, dtype=kind), parameter=parameter))
    found = fit(program.init(), batches(3), program, epochs=1).state
    assert_trees_close((found.buffers, found.frozen), (program.init().buffers, program.init().frozen), exact=True)
    assert int(found.updates) == 3


def test_row_42_fails_where_dtypes_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_check_tensor", lambda name, value: None)
    for kind in OTHERS:
        fails(lambda kind=kind: test_row_42_parameters_that_are_no_floats(kind))


# --- row 43 -----------------------------------------------------------------------------------------------------------


def drawing() -> Any:
    """A run with dropout and shuffling."""
    net = ps.program(tiny_convnet(), ps.supervised(nn.CrossEntropyLoss()), optim.adamw(0.01), ema=0.9)
    data = DataLoader(TensorDataset(*image_batch(24)), batch_size=4, shuffle=True)
    # Without fit's looks, which find a step that draws from the caller's generator before its results differ.
    return fit(net.init(seed=3), {"train": data, "val": [image_batch(5, 1)]}, net, epochs=2, check_every=None)


@pytest.mark.row("F43")
def test_row_43_determinism_itself() -> None:
    first = drawing()
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()
    torch.rand(3)  # the caller's numbers are the caller's business
    again = drawing()
    same(again, first)
    other = mlp()
    fit(other.init(seed=9), batches(3), other, epochs=2)
    torch.set_rng_state(before[0])
    same(drawing(), first)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()) == before[1:]


def test_row_43_fails_where_the_callers_generator_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "scoped", lambda *seed: contextlib.nullcontext())
    monkeypatch.setattr(global_rng, "seed_with_restore", lambda *seed: lambda: None)  # for as long as a run takes
    fails(test_row_43_determinism_itself)
