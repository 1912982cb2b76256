"""The line about a long run of short eager steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.loop import eager_hint


def trained(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, seconds: float, compiler: bool = True, **fields: Any
) -> list[str]:
    """The lines of a run of 300 steps of so many seconds each, with half a minute between those that are timed."""
    looks = [0.0]

    def clock() -> float:
        looks.append(looks[-1] + (seconds if len(looks) % 2 == 0 else 30.0))
        return looks[-1]

    monkeypatch.setattr(eager_hint, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(eager_hint, "has_compiler", lambda: compiler)
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batches = [(torch.ones(2, 2), torch.ones(2, 1))] * 100
    with caplog.at_level("WARNING", logger="purestep"):
        ps.fit(program.init(), batches, program, epochs=3, progress=False, **fields)
    return [record.getMessage() for record in caplog.records if "eager mode" in record.getMessage()]


def test_a_long_run_of_short_steps_is_told_once(monkeypatch: Any, caplog: Any) -> None:
    (line,) = trained(monkeypatch, caplog, 1e-3)
    assert "1.0 ms" in line
    assert "compile=True" in line


@pytest.mark.parametrize("fields", [{"compile": False}, {"compiler": False}, {"detect_anomaly": True}])
def test_who_has_chosen_or_cannot_is_not_told(monkeypatch: Any, caplog: Any, fields: dict[str, Any]) -> None:
    assert trained(monkeypatch, caplog, 1e-3, **fields) == []


def test_long_steps_gain_little(monkeypatch: Any, caplog: Any) -> None:
    assert trained(monkeypatch, caplog, 0.05) == []
