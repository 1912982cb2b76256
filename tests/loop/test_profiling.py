"""`fit(profile=(10, 13))`: which updates are in the trace, where it lies, and that its failures are no failures."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError

BATCHES = [(torch.ones(4, 2), torch.ones(4, 1))] * 6
MARK = "purestep::mark"


class Marked(nn.Linear):
    """A forward pass that leaves its number in the trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function(MARK):
            return super().forward(x)


def fitted(tmp_path: Path | None = None, *, program: Any = None, **fields: Any) -> ps.FitResult:
    torch.manual_seed(0)
    program = program or ps.program(Marked(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    fields = {"epochs": 2, "progress": False, "compile": False, "device": "cpu", "snapshots": tmp_path, **fields}
    return ps.fit(program.init(), BATCHES, program, **fields)


def marks(path: Path) -> int:
    """Forward passes in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name") == MARK and event.get("ph") == "X" for event in events)


def test_the_updates_of_the_window_are_in_a_trace_beside_the_snapshots(tmp_path: Path) -> None:
    plain = fitted()
    result = fitted(tmp_path, profile=(7, 10))
    assert [path.name for path in tmp_path.glob("trace*")] == ["trace_7-9.json.gz"]
    assert marks(tmp_path / "trace_7-9.json.gz") == 3
    assert result.history == plain.history


@pytest.mark.parametrize("window", [(0, 2, "named"), [0, 2, "named"], "0:2:named"])
def test_a_directory_can_be_named(window: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fitted(profile=window, check_every=None)
    assert marks(tmp_path / "named" / "trace_0-1.json.gz") == 2


@pytest.mark.parametrize("window", [(0, 2), (0, 2, "named")])
def test_a_callback_that_changes_the_working_directory_does_not_move_the_trace(
    window: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    def move(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd) and event.updates == 1:
            monkeypatch.chdir(tmp_path / "other")

    fitted(profile=window, check_every=None, callbacks=[move])
    assert marks(Path(tmp_path, *window[2:], "trace_0-1.json.gz")) == 2


def test_a_resumed_run_has_a_window_of_its_own_under_its_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fitted(tmp_path / "run", epochs=1)
    fitted(tmp_path / "run", epochs=2, profile="3:5", check_every=None)
    assert marks(tmp_path / "run" / "trace_9-10.json.gz") == 2
    fitted(profile=(3, 5))
    assert (tmp_path / "trace_3-4.json.gz").exists()


def test_an_update_has_all_its_micro_batches(tmp_path: Path) -> None:
    program = ps.program(Marked(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1), accumulate=4)
    fitted(tmp_path, program=program, profile=(2, 4))  # the flush of an epoch closes a window of two
    assert marks(tmp_path / "trace_2-3.json.gz") == 4 + 2


def test_a_run_that_ends_inside_the_window_writes_what_there_is(tmp_path: Path) -> None:
    fitted(tmp_path, profile=(10, 1000))
    assert marks(tmp_path / "trace_10-999.json.gz") == 2

    def fail(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd) and event.updates == 8:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(tmp_path / "failed", profile=(5, 1000), callbacks=[fail])
    assert marks(tmp_path / "failed" / "trace_5-999.json.gz") == 3
    fitted(tmp_path / "early", profile=(100, 1000))
    assert list((tmp_path / "early").glob("trace*")) == []


def test_no_failure_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING), torch.profiler.profile() as own:
        assert fitted(profile=(1, 2)).epochs == 2
    assert "not profiled: RuntimeError: another profiler is active" in caplog.text
    assert any(event.key == MARK for event in own.key_averages()), "the user's own profiler went on"
    caplog.clear()
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert fitted(profile=(1, 2, str(tmp_path / "file"))).epochs == 2
    assert "not profiled: FileExistsError" in caplog.text
    caplog.clear()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no space")

    monkeypatch.setattr(torch.profiler.profile, "step", broken)
    with caplog.at_level(logging.WARNING):
        assert fitted(profile=(1, 2, str(tmp_path))).epochs == 2
    assert caplog.text.count("not profiled") == 1
    assert not torch.autograd._profiler_enabled()


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fitted(profile=(0, 1), fast_dev_run=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", [(3, 3), (5, 2), (-1, 2), (1,), 10, "ten", (1, 2, 3), (1, 2, "a", "b"), (1.5, 2)])
def test_other_windows_are_refused(window: Any) -> None:
    with pytest.raises(ConfigError, match=r"profile=.*such as \(10, 13\).*cure: profile=\(10, 13\)"):
        ps.FitConfig(epochs=1, profile=window)


def test_a_window_is_stored_as_json() -> None:
    for window in ((10, 13), (0, 2, "traces")):
        config = ps.FitConfig(epochs=1, profile=window)
        assert ps.FitConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert config.profile == window
