"""A mean teacher: a callback of `fit` moves the teacher after each update. Compiled and eager runs equal a loop by
hand, and so does a run that starts from the compiler's cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.compile.cpu import aot

DECAY, RATE, EPOCHS = 0.8, 0.2, 2
DRAW = torch.Generator().manual_seed(1)
BATCHES = [(torch.rand(8, 4, generator=DRAW), torch.randint(0, 3, (8,), generator=DRAW)) for _ in range(5)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(student: Any, teacher: Any, weights: Tensor, batch: Any) -> Tensor:
    x, y = batch
    with torch.no_grad():
        aim = teacher(x + 0.1).softmax(-1)
    scores = student(x)
    return nn.functional.cross_entropy(scores, y, weight=weights) + nn.functional.mse_loss(scores.softmax(-1), aim)


@torch.no_grad()
def follow(teacher: nn.Module, params: dict[str, Tensor]) -> None:
    for name, weight in teacher.named_parameters():
        weight.mul_(DECAY).add_(params[name], alpha=1 - DECAY)


def by_hand() -> list[float]:
    student, weights = network(), torch.ones(3)
    teacher, optimizer = copy.deepcopy(student), torch.optim.SGD(student.parameters(), lr=RATE)
    history = list[float]()
    for _ in range(EPOCHS):
        losses = list[float]()
        for batch in BATCHES:
            loss = loss_of(student, teacher, weights, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(teacher, dict(student.named_parameters()))
            weights[0] += 0.5  # class weights change too
            losses.append(loss.item())
        history.append(sum(losses) / len(losses))
    return history


def trained(**settings: Any) -> list[float]:
    student, weights = network(), torch.ones(3)
    teacher = copy.deepcopy(student).requires_grad_(False).eval()

    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(loss_of(model, teacher, weights, batch), len(batch[1]))

    def callback(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd):
            follow(teacher, event.state.params)
            weights[0] += 0.5

    program = ps.program(student, objective, ps.optim.sgd(RATE))
    settings = {"epochs": EPOCHS, "progress": False, "device": "cpu", **settings}
    return ps.fit(program.init(), BATCHES, program, callbacks=[callback], **settings).history["train_loss"]


WAYS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "eager, not donated": {"compile": False, "donate": False},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "compiled, not donated": {"compile": {"backend": "aot_eager"}, "donate": False},
}


@pytest.mark.compile
@pytest.mark.parametrize("way", WAYS)
def test_the_teacher_follows(way: str) -> None:
    assert trained(**WAYS[way]) == pytest.approx(by_hand(), rel=1e-5)


@pytest.mark.compile
@pytest.mark.usefixtures("no_fallback")
def test_the_teacher_follows_in_code_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs with one cache; the second one compiles nothing."""
    true, built = aot.build, list[Any]()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aot, "build", lambda *args: (built.append(args), true(*args))[1])
    for _ in range(2):
        assert trained(compile=True) == pytest.approx(by_hand(), rel=1e-4)
        built.append("a run")
    *first, _, _ = built
    assert first
    assert "a run" not in first


def test_a_teacher_in_train_mode_is_refused() -> None:
    """It has statistics that the step would write."""
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(loss_of(model, teacher, torch.ones(3), batch), len(batch[1]))

    program = ps.program(network(), objective, ps.optim.sgd(RATE))
    with pytest.raises(ps.errors.StepContractError, match=r"teacher\.py:\d+: the step writes a tensor.*\.eval\(\)"):
        ps.fit(program.init(), BATCHES, program, epochs=1, progress=False)
