"""What a run reports: lines, bars and files, resumed and fresh, and sinks that fail, hang and fall behind."""

from __future__ import annotations

import csv as csv_format
import dataclasses
import io
import json
import math
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import purestep as ps
from purestep.events import EpochEnd, EvalEnd, Event, FitEnd, FitStart, Logged, Position, Saved, StepEnd
from purestep.sinks import Progress, csv, default_sinks, guarded, history_json, jsonl, progress, tensorboard

STATE = torch.zeros(1)


def start(*, updates: int = 0, epoch: int = 0, resumed: bool = False, epochs: int | None = 3) -> FitStart:
    return FitStart(STATE, epoch, updates, epochs, None, 4, None, resumed)


def step(updates: int) -> StepEnd:
    return StepEnd(STATE, {}, (STATE,), 0, updates - 1, updates)


def logged(updates: int, **values: float) -> Logged:
    return Logged(0, updates, {"train_loss": 1 / updates, "lr": 3e-4, **values}, 12.34, 0.25)


def epoch_end(epoch: int, *, stopping: str | None = None, **values: float | None) -> EpochEnd:
    record = {"epoch": epoch, "train_loss": 1 / epoch, "val_loss": 0.1011, "lr": 3e-4, **values}
    return EpochEnd(STATE, epoch, 4 * epoch, record, True, stopping)


def fit_end(history: dict[str, list[Any]]) -> FitEnd:
    return FitEnd(STATE, "epochs", history, None)


# The terminal.


def test_a_line_an_epoch_where_there_is_no_terminal():
    stream = io.StringIO()
    sink = progress(stream)
    for event in [start(), step(1), logged(1), epoch_end(1, val_accuracy=0.9812), epoch_end(2, val_loss=math.nan)]:
        sink(event)
    assert stream.getvalue().splitlines() == [
        "epoch 1/3  train_loss 1.000  val_loss 0.101  val_accuracy 0.981  lr 3.0e-04  12.3 steps/s",
        "epoch 2/3  train_loss 0.500  val_loss nan  lr 3.0e-04  12.3 steps/s",
    ]


def test_resuming_and_stopping_early_are_said():
    stream = io.StringIO()
    sink = progress(stream)
    sink(start(epoch=1, updates=4, resumed=True))
    sink(epoch_end(2, stopping="val_loss did not improve"))
    sink(epoch_end(3, stopping="epochs"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "resumed after epoch 1, update 4"
    assert lines[2] == "stopped after epoch 2: val_loss did not improve"
    assert len(lines) == 4


def test_inside_of_an_epoch_its_own_number_is_told():
    stream = io.StringIO()
    sink = progress(stream)
    sink(start(epochs=None))
    sink(EpochEnd(STATE, 0, 4, {"epoch": 1, "step": 4, "near": 0.0}, True, "steps"))
    assert stream.getvalue().splitlines() == ["epoch 1  step 4  near 0.000", "stopped in epoch 1: steps"]


def test_a_long_epoch_is_not_silent(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    sink = progress(stream)
    sink(start(epochs=None))
    for update in range(1, 5):
        now[0] += 25
        sink(logged(update))
    assert stream.getvalue() == "epoch 1  update 3  train_loss 0.333  lr 3.0e-04  12.3 steps/s\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def redrawn(sink: Progress) -> None:
    """What the bar shows at this moment, without waiting for its thread."""
    if sink._bar is not None:  # pyright: ignore[reportPrivateUsage]
        sink._bar.refresh()  # pyright: ignore[reportPrivateUsage]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal(monkeypatch)
    now = [time.monotonic()]
    monkeypatch.setattr("purestep.sinks.bar.time.monotonic", lambda: now[0])
    stream = Terminal()
    sink = progress(stream)
    places = [Position("train", 0, 0), Position("train", 0, 2), Position("val", 0, 7), Position("train", 1, 0)]
    for event, place in zip([start(), logged(1), logged(2), epoch_end(1)], places, strict=True):
        now[0] += 1
        sink(dataclasses.replace(event, position=lambda: places[0]) if isinstance(event, FitStart) else event)
        places[0] = place
        redrawn(sink)
    sink(fit_end({}))
    text = stream.getvalue()
    assert "2/4" in text
    assert "7/?" in text
    assert "train_loss 1.000  lr 3.0e-04  12.3 steps/s" in text
    assert "epoch 1/3  train_loss 1.000  val_loss 0.101" in text
    assert text.endswith("\x1b[2K")  # the bar is wiped, the lines stay
    assert sys.stdout is sys.__stdout__ or not hasattr(sys.stdout, "rich_proxied_file")


def test_the_bar_moves_with_a_run(monkeypatch: pytest.MonkeyPatch):
    terminal(monkeypatch)
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    stream = Terminal()
    sink = progress(stream)

    def at_every_event(event: Event) -> None:
        redrawn(sink)

    loaders = {"train": [batch] * 5, "val": [batch] * 3}
    ps.fit(program.init(), loaders, program, epochs=2, sinks=[sink], callbacks=[at_every_event])
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    shown = dict.fromkeys(re.findall(r"^(epoch \d/\d|val) +\S+ (\d+)/[\d?]", plain.replace("\r", "\n"), re.MULTILINE))
    assert {name for name, _ in shown} == {"epoch 1/2", "epoch 2/2", "val"}
    assert all(
        [count for name, count in shown if name == epoch] == list("012345") for epoch in ("epoch 1/2", "epoch 2/2")
    )
    assert [count for name, count in shown if name == "val"] == list("123")


def test_the_bar_asks_a_run_where_it_is_and_adds_nothing_to_a_step():
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    seen: list[Event] = []
    ps.fit(program.init(), {"train": [batch] * 5, "val": [batch]}, program, epochs=2, sinks=[seen.append])
    assert {type(event) for event in seen} == {FitStart, EvalEnd, EpochEnd, FitEnd}
    first = seen[0]
    assert isinstance(first, FitStart)
    assert first.position() == Position("train", 2, 0)


def test_a_bar_draws_no_number_of_the_callers(monkeypatch: pytest.MonkeyPatch):
    """rich draws one as it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    before = random.getstate()
    sink = progress(Terminal())
    sink(start())
    sink.close()
    assert "rich.style" in sys.modules
    assert random.getstate() == before


# The history.


def test_the_history_is_a_list_of_rows_without_nan(tmp_path: Path):
    sink = history_json(tmp_path / "runs" / "training_history.json")
    sink(start())
    sink(epoch_end(1, val_loss=math.nan))
    sink(epoch_end(2, val_loss=math.inf))
    text = sink.path.read_text()
    assert "NaN" not in text
    assert json.loads(text) == [
        {"epoch": 1, "train_loss": 1.0, "val_loss": None, "lr": 3e-4},
        {"epoch": 2, "train_loss": 0.5, "val_loss": None, "lr": 3e-4},
    ]


def test_the_end_of_the_run_sets_the_history_right(tmp_path: Path):
    sink = history_json(tmp_path / "h.json")
    sink(start(epoch=1, updates=4, resumed=True))  # the file of the interrupted run is lost
    sink(epoch_end(2))
    sink(fit_end({"epoch": [1, 2], "val_loss": [None, 0.5], "train_loss": [math.nan, 0.25]}))
    assert json.loads(sink.path.read_text()) == [
        {"epoch": 1, "val_loss": None, "train_loss": None},
        {"epoch": 2, "val_loss": 0.5, "train_loss": 0.25},
    ]


def test_a_resumed_history_goes_on_where_the_snapshot_was(tmp_path: Path):
    first = history_json(tmp_path / "h.json")
    first(start())
    for epoch in (1, 2, 3):
        first(epoch_end(epoch))
    again = history_json(tmp_path / "h.json")
    again(start(epoch=2, updates=8, resumed=True))
    again(epoch_end(3, train_loss=9.0))
    rows = json.loads(again.path.read_text())
    assert [(row["epoch"], row["train_loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["h.json"]


@pytest.mark.parametrize("content", ['[{"epoch": 1}]', '{"foreign": 1}', "[{", ""])
def test_a_fresh_run_moves_a_history_aside(tmp_path: Path, content: str):
    path = tmp_path / "h.json"
    for _ in range(2):
        path.write_text(content)
        sink = history_json(path)
        sink(start())
        sink(epoch_end(1))
        assert len(json.loads(path.read_text())) == 1
    assert (tmp_path / "h.1.json").read_text() == (tmp_path / "h.2.json").read_text() == content


@pytest.mark.parametrize("content", ['{"foreign": 1}', "[{", "[1]"])
def test_a_resumed_run_moves_a_file_aside_that_is_no_history(tmp_path: Path, content: str):
    path = tmp_path / "h.json"
    path.write_text(content)
    sink = history_json(path)
    sink(start(epoch=1, updates=4, resumed=True))
    sink(epoch_end(2))
    assert [row["epoch"] for row in json.loads(path.read_text())] == [2]
    assert (tmp_path / "h.1.json").read_text() == content


# Rows by step.


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv_format.DictReader(file))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FORMATS = pytest.mark.parametrize(("make", "read"), [(csv, read_csv), (jsonl, read_jsonl)])


def keys(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["kind"], int(row["step"])) for row in rows]


@FORMATS
def test_rows_by_step(tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any]):
    sink = make(tmp_path / "metrics")
    for event in [start(), logged(2), logged(4, grad_norm=math.inf), epoch_end(1, val_accuracy=0.5), logged(6)]:
        sink(event)
    rows = read(tmp_path / "metrics")  # while the run goes on
    sink.close()
    assert keys(rows) == [("step", 2), ("step", 4), ("epoch", 4), ("step", 6)]
    assert [int(row["epoch"]) for row in rows] == [1, 1, 1, 1]
    assert float(rows[0]["train_loss"]) == 0.5
    assert float(rows[2]["val_accuracy"]) == 0.5
    assert rows[0].get("val_accuracy") in ("", None)
    assert rows[1]["grad_norm"] in ("inf", None)


@FORMATS
@pytest.mark.parametrize("torn", [False, True])
def test_a_resumed_run_has_no_row_twice_and_misses_none(
    tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any], torn: bool
):
    def run(sink: Any, first: FitStart, events: list[Event]) -> None:
        for event in [first, *events]:
            sink(event)
        sink.close()

    events = [logged(2), logged(4), epoch_end(1), logged(6), logged(8), epoch_end(2)]
    run(make(tmp_path / "whole"), start(), events)
    run(make(tmp_path / "cut"), start(), events[:5])  # killed after update 8; its last snapshot is of update 5
    if torn:
        with (tmp_path / "cut").open("a") as file:
            file.write('{"kind": "step", "st' if make is jsonl else "step,9")
    run(make(tmp_path / "cut"), start(updates=5, epoch=1, resumed=True), events[2:])
    assert keys(read(tmp_path / "cut")) == keys(read(tmp_path / "whole"))
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "cut"}


@FORMATS
@pytest.mark.parametrize("done", [0, 1, 2])
def test_rows_of_one_step_are_told_apart_after_a_resume(
    tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any], done: int
):
    """Behind an evaluation inside the epoch came batches of a window that was dropped, so no further update."""
    events = [epoch_end(1, val_loss=0.5), epoch_end(1, val_loss=0.25), epoch_end(2, val_loss=0.125)]
    sink = make(tmp_path / "metrics")
    for event in [start(), *events[: max(done, 1)]]:  # killed before the first row was in a snapshot, or after
        sink(event)
    sink.close()
    sink = make(tmp_path / "metrics")
    for event in [dataclasses.replace(start(updates=4, resumed=True), history={"epoch": [1] * done}), *events[done:]]:
        sink(event)
    sink.close()
    assert [float(row["val_loss"]) for row in read(tmp_path / "metrics")] == [0.5, 0.25, 0.125]


@FORMATS
def test_a_fresh_run_moves_rows_aside(tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any]):
    for _ in range(3):
        sink = make(tmp_path / "metrics.txt")
        sink(start())
        sink(logged(2))
        sink.close()
    assert keys(read(tmp_path / "metrics.txt")) == [("step", 2)]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.txt", "metrics.1.txt", "metrics.2.txt"}


@FORMATS
def test_a_resumed_run_never_appends_to_a_foreign_file(
    tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any]
):
    (tmp_path / "metrics.txt").write_text("a,b\n1,2\n")
    sink = make(tmp_path / "metrics.txt")
    sink(start(updates=4, resumed=True))
    sink(logged(6))
    sink.close()
    assert keys(read(tmp_path / "metrics.txt")) == [("step", 6)]
    assert (tmp_path / "metrics.1.txt").read_text() == "a,b\n1,2\n"


@FORMATS
def test_rows_go_on_whole_after_a_failed_write(
    tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    sink = make(tmp_path / "metrics")
    sink(start())
    sink(logged(2))
    sink(logged(3))
    real = sink._file

    class Full:
        def write(self, text: str) -> None:
            real.write(text[:5])
            real.flush()
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            real.close()

    sink._file = Full()
    with pytest.raises(OSError, match="No space left"):
        sink(logged(4))
    sink(logged(5))
    sink(logged(6))
    sink.close()
    assert keys(read(tmp_path / "metrics")) == [("step", 2), ("step", 3), ("step", 5), ("step", 6)]


# TensorBoard.


def test_tensorboard_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from purestep.errors import ConfigError

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed \(cure: pip install 'purestep\[tensorboard"):
        tensorboard(tmp_path)


def test_tensorboard_gets_scalars_and_strikes_out_what_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    class Writer:
        def __init__(self, directory: str, purge_step: int | None) -> None:
            calls.append((directory, purge_step))

        def add_scalar(self, tag: str, value: float, at: int) -> None:
            calls.append((tag, value, at))

        def close(self) -> None:
            calls.append("closed")

    module = type(sys)("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    sink = tensorboard(tmp_path)
    for event in [start(updates=8, resumed=True), logged(9), epoch_end(3, val_accuracy=None), fit_end({})]:
        sink(event)
    assert calls[0] == (str(tmp_path), 9)
    assert ("lr", 3e-4, 9) in calls
    assert ("val_loss", 0.1011, 12) in calls
    assert "val_accuracy" not in [call[0] for call in calls]
    assert calls[-1] == "closed"


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_itself_takes_what_it_is_given(tmp_path: Path):
    pytest.importorskip("tensorboard")
    sink = tensorboard(tmp_path)
    for event in [start(), logged(2), epoch_end(1), fit_end({})]:
        sink(event)
    assert list(tmp_path.iterdir())


# The guard.


def test_a_failing_sink_is_told_once_a_kind_and_counted(caplog: pytest.LogCaptureFixture):
    seen: list[int] = []

    def sink(event: Saved) -> None:
        seen.append(event.step)
        if event.step % 2:
            raise OSError("disk full")
        if event.step == 6:
            raise ValueError("other")

    safe = guarded(sink)
    for number in range(8):
        safe(Saved(number, Path("x")))
    safe.close()
    assert seen == list(range(8))
    assert safe.failures == {"OSError": 4, "ValueError": 1}
    told = [record.message for record in caplog.records]
    assert [message for message in told if "disk full" in message] == [
        "sink sink failed at Saved with OSError: disk full; training goes on, said once"
    ]
    assert told[-1] == "sink sink: 5 events lost in all"
    assert len(told) == 3


def test_a_hanging_sink_holds_nobody_up(caplog: pytest.LogCaptureFixture):
    release = threading.Event()
    safe = guarded(lambda event: release.wait(60), capacity=3, patience=0.1)
    began = time.monotonic()
    for number in range(50):
        safe(Saved(number, Path("x")))
    safe.close()
    assert time.monotonic() - began < 20  # against the 60 of a single event
    assert safe.dropped >= 46
    assert [record.message for record in caplog.records if "events are dropped" in record.message] != []
    assert any("still busy after 0.1 s" in record.message for record in caplog.records)
    release.set()


def test_events_arrive_in_order_and_without_tensors():
    seen: list[Any] = []
    safe = guarded(seen.append)
    events = [start(), step(1), step(2), epoch_end(1), fit_end({"epoch": [1]})]
    for event in events:
        safe(event)
    safe.close()
    assert [type(event) for event in seen] == [type(event) for event in events]
    assert {event.state for event in seen} == {None}
    assert seen[1].batch is None
    assert seen[4].history == {"epoch": [1]}
    assert events[1].batch is not None


def test_a_sink_sees_what_it_wants_and_is_closed():
    class Sink:
        wants = (Saved,)
        closed = 0

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def __call__(self, event: Any) -> None:
            self.seen.append(event)

        def close(self) -> None:
            self.closed += 1

    sink = Sink()
    safe = guarded(sink)
    assert guarded(safe) is safe
    threads = threading.active_count()
    safe(step(1))
    assert threading.active_count() == threads
    safe(Saved(1, Path("x")))
    safe.close()
    safe.close()
    assert [type(event) for event in sink.seen] == [Saved]
    assert sink.closed >= 1


def test_a_sink_of_the_foreground_runs_in_the_calling_thread():
    threads: list[Any] = []

    def sink(event: Any) -> None:
        threads.append(threading.current_thread())
        raise RuntimeError("shown")

    sink.foreground = True  # pyright: ignore[reportFunctionMemberAccess]
    safe = guarded(sink)
    safe(Saved(1, Path("x")))
    assert threads == [threading.current_thread()]
    assert safe.failures == {"RuntimeError": 1}


def test_a_failing_close_is_told(caplog: pytest.LogCaptureFixture):
    class Sink:
        def __call__(self, event: Any) -> None: ...

        def close(self) -> None:
            raise OSError("flush failed")

    for safe in (guarded(Sink()), guarded(Sink())):
        if caplog.records:
            safe(Saved(1, Path("x")))
        safe.close()
    assert sum("failed at close with OSError: flush failed" in record.message for record in caplog.records) == 2


def test_the_sinks_of_a_run_that_names_none(tmp_path: Path):
    assert [type(sink).__name__ for sink in default_sinks(tmp_path)] == ["Progress", "History"]
    assert default_sinks(None, progress=False) == []
    sinks = default_sinks(tmp_path, progress=False)
    for sink in map(guarded, sinks):
        for event in [start(), epoch_end(1)]:
            sink(event)
        sink.close()
    assert json.loads((tmp_path / "training_history.json").read_text())[0]["epoch"] == 1
