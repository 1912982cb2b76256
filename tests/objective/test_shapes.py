"""Outputs and targets that torch's losses would broadcast, or refuse in their own words, are errors with the cure."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import purestep as ps
from purestep.errors import StepContractError

CE, BCE, MSE = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()

# criterion, outputs, targets, the cure
WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "mse column": (MSE, torch.ones(32, 1), torch.ones(32), "forward=lambda model, x: model(x).squeeze(-1)"),
    "mse row": (MSE, torch.ones(32), torch.ones(32, 1), "prepare=lambda batch: (batch[0], batch[1].squeeze(-1))"),
    "mse of one": (MSE, torch.ones(4, 3), torch.ones(1, 3), "targets.expand_as(outputs)"),
    "mse folded": (MSE, torch.ones(4, 6), torch.ones(4, 2, 3), "give both one shape"),
    "l1": (nn.L1Loss(), torch.ones(8, 1), torch.ones(8), ".squeeze(-1)"),
    "a function": (functional.smooth_l1_loss, torch.ones(8, 1), torch.ones(8), ".squeeze(-1)"),
    "a partial": (partial(functional.mse_loss), torch.ones(8, 1), torch.ones(8), ".squeeze(-1)"),
    "kl": (nn.KLDivLoss(), torch.ones(8, 1), torch.ones(8), ".squeeze(-1)"),
    "bce column": (BCE, torch.ones(8, 1), torch.ones(8), "model(x).squeeze(-1)"),
    "one class": (CE, torch.ones(8, 1), torch.zeros(8, dtype=torch.int64), "nn.BCEWithLogitsLoss()"),
    "one class floats": (CE, torch.ones(8, 1), torch.zeros(8), "nn.BCEWithLogitsLoss()"),
    "a tuple": (MSE, (torch.ones(8), torch.ones(8)), torch.ones(8), "forward=lambda model, x: model(x)[0])"),
    "a tuple of scores": (CE, (torch.ones(8, 3), None), torch.zeros(8).long(), "forward=lambda model, x: model(x)[0])"),
    "a tuple for margins": (nn.MultiMarginLoss(), (torch.ones(8, 3),), torch.zeros(8).long(), "model(x)[0])"),
    "a dict": (CE, {"h": torch.ones(1), "logits": torch.ones(8, 3)}, torch.zeros(8).long(), 'model(x)["logits"])'),
    "a dict of others": (MSE, {"out": torch.ones(8)}, torch.ones(8), 'model(**x)["out"] if'),
    "an empty dict": (MSE, {}, torch.ones(8), 'model(x)["logits"])'),
    "an object": (CE, SimpleNamespace(logits=torch.ones(8, 3)), torch.zeros(8).long(), "model(x).logits)"),
    "bce whole": (BCE, torch.ones(8), torch.ones(8).long(), "prepare=lambda batch: (batch[0], batch[1].float())"),
    "bce bools": (nn.BCELoss(), torch.ones(8), torch.ones(8).bool(), "batch[1].float()"),
    "f.bce whole": (functional.binary_cross_entropy, torch.ones(8), torch.ones(8).long(), "batch[1].float()"),
    "huber whole": (nn.HuberLoss(), torch.ones(8), torch.ones(8).long(), "batch[1].float()"),
    "ce floats": (CE, torch.ones(8, 3), torch.zeros(8), "prepare=lambda batch: (batch[0], batch[1].long())"),
    "f.nll floats": (functional.nll_loss, torch.ones(8, 3), torch.zeros(8), "batch[1].long()"),
    "ce floats of images": (CE, torch.ones(2, 3, 4, 4), torch.zeros(2, 4, 4), "batch[1].long()"),
}


def run(criterion: Any, outputs: Any, targets: Any) -> ps.Loss:
    return ps.supervised(criterion)(lambda x: outputs, (torch.ones(8, 1), targets))


@pytest.mark.parametrize("case", WRONG)
def test_the_error_shows_the_line_to_write(case: str):
    criterion, outputs, targets, cure = WRONG[case]
    with pytest.raises(StepContractError) as caught:
        run(criterion, outputs, targets)
    assert cure in caught.value.hint
    named = getattr(criterion, "func", criterion)
    assert caught.value.where == getattr(named, "__name__", type(named).__name__)


def test_a_column_against_a_row_is_refused_in_a_run_and_its_cure_trains():
    x, y = torch.randn(32, 4), torch.randn(32)
    refused = ps.program(nn.Linear(4, 1), ps.supervised(MSE), ps.optim.sgd(0.1))
    with pytest.raises(StepContractError, match=r"outputs \[32, 1\].*targets \[32\]"):
        ps.fit(refused.init(), [(x, y)], refused, epochs=1, progress=False)
    with pytest.raises(StepContractError, match="MSELoss"):
        ps.evaluate(refused.init(), [(x, y)], refused.eval_step)  # type: ignore[arg-type]
    cured = ps.supervised(MSE, forward=lambda model, x: model(x).squeeze(-1))
    program = ps.program(nn.Linear(4, 1), cured, ps.optim.sgd(0.1))
    _, metrics = program.train_step(program.init(), (x, y))
    assert float(metrics["loss"]) > 0


@pytest.mark.parametrize(
    ("criterion", "outputs", "targets"),
    [
        (MSE, torch.ones(8, 1), torch.ones(8, 1)),
        (MSE, torch.ones(8, 1), torch.ones(8, 1).long()),
        (CE, torch.ones(8, 3), torch.ones(8, 3) / 3),
        (CE, torch.ones(3), torch.tensor(1)),
        (CE, torch.ones(3), torch.ones(3) / 3),
        (CE, torch.ones(8, 3), torch.zeros(8, dtype=torch.uint8)),
        (lambda outputs, targets: (outputs - targets).square().mean(), torch.ones(8, 1), torch.ones(8)),
        (lambda outputs, targets: outputs["a"].mean(), {"a": torch.ones(8)}, torch.ones(8)),
    ],
)
def test_others_are_left_to_the_loss(criterion: Any, outputs: Any, targets: Any):
    assert torch.isfinite(run(criterion, outputs, targets).mean)


class MaskedMSE(nn.MSELoss):
    """Squeezes the outputs itself."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input.squeeze(-1), target)


class ReducedMSE(nn.MSELoss):
    """Reduces after torch."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target).mean()


class SeqCE(nn.CrossEntropyLoss):
    """Takes the classes in the last dimension."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input.movedim(-1, 1), target)


class PlainMSE(nn.MSELoss):
    """Has torch's forward."""


@pytest.mark.parametrize(
    ("criterion", "outputs", "targets", "weight"),
    [
        (MaskedMSE(), torch.ones(4, 1), torch.ones(4), 4),
        (ReducedMSE(reduction="none"), torch.ones(4, 3), torch.ones(4, 3), 12),
        (SeqCE(), torch.ones(4, 1, 3), torch.tensor([[0], [1], [-100], [2]]), 3),
        (partial(SeqCE()), torch.ones(4, 1, 3), torch.zeros(4, 1).long(), 4),
    ],
)
def test_a_subclass_with_its_own_forward_has_the_weight_of_its_class_and_takes_any_shape(
    criterion: Any, outputs: Any, targets: Any, weight: int
):
    loss = run(criterion, outputs, targets)
    assert torch.equal(loss.mean, criterion(outputs, targets))
    assert loss.weight == weight


def test_a_subclass_with_the_forward_of_torch_is_checked_as_torchs_own():
    with pytest.raises(StepContractError, match=r"PlainMSE: outputs \[4, 1\] and targets \[4\]"):
        run(PlainMSE(), torch.ones(4, 1), torch.ones(4))


@pytest.mark.compile
def test_a_compiled_step_refuses_with_the_cure_too():
    program = ps.program(nn.LSTM(4, 2), ps.supervised(MSE), ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step, backend="eager")
    with pytest.raises(StepContractError, match=r"MSELoss: the model returned a tuple.*model\(x\)\[0\]"):
        step(program.init(), (torch.ones(8, 4), torch.ones(8, 2)))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("criterion", "targets"), [(CE, torch.zeros(8).long()), (CE, torch.ones(8, 3)), (BCE, torch.ones(8, 3))]
)
def test_the_checks_are_read_by_torch_compile(criterion: Any, targets: torch.Tensor):
    net, objective = nn.Linear(4, 3), ps.supervised(criterion)
    x = torch.ones(8, 4)
    compiled = torch.compile(lambda: objective(net, (x, targets)).mean, backend="eager", fullgraph=True)
    assert torch.equal(compiled(), criterion(net(x), targets))
