"""What a run reports: lines, bars and files, resumed and fresh, and sinks that fail, hang and fall behind."""

from __future__ import annotations

import csv as csv_format
import dataclasses
import io
import json
import math
import os
import random
import re
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import purestep as ps
from purestep.errors import WriteFailed
from purestep.events import EpochEnd, EvalEnd, Event, FitEnd, FitStart, Logged, Position, Saved, StepEnd
from purestep.loop.inputs import ready_sinks
from purestep.sinks import (
    ProgressBar,
    csv,
    guarded,
    history_json,
    jsonl,
    progress,
    row_files,
    tensorboard,
)

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


def test_a_resumed_run_names_its_directory_and_a_finished_one_does_not_resume():
    stream = io.StringIO()
    sink = progress(stream)
    sink(dataclasses.replace(start(epoch=1, updates=4, resumed=True), directory=Path("/home/me/runs/a")))
    sink(dataclasses.replace(start(epoch=3, updates=12, resumed=True), directory=Path("runs/b")))
    assert stream.getvalue().splitlines() == ["resumed after epoch 1, update 4 of runs/a"]


def test_each_group_shows_its_learning_rate():
    stream = io.StringIO()
    sink = progress(stream)
    sink(start())
    sink(epoch_end(1, **{"lr/slow": 1e-4, "lr/fast": 1e-2}))
    (line,) = stream.getvalue().splitlines()
    assert "lr/slow 1.0e-04  lr/fast 1.0e-02" in line
    assert "  lr 3.0e-04" not in line


def test_a_run_says_that_its_first_calls_compile():
    stream = io.StringIO()
    progress(stream)(dataclasses.replace(start(), compiled=True))
    assert stream.getvalue().startswith("the first calls compile the step")


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
    assert stream.getvalue().splitlines() == ["epoch 1  update 4  near 0.000", "stopped in epoch 1: steps"]


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


def redrawn(sink: ProgressBar) -> None:
    """What the bar shows at this moment, without waiting for its thread."""
    if sink._bar is not None:  # pyright: ignore[reportPrivateUsage]
        sink._bar.refresh()  # pyright: ignore[reportPrivateUsage]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal(monkeypatch)
    stream = Terminal()
    sink = progress(stream)
    places = [Position("train", 0, 0), Position("train", 0, 2, 2), Position("val", 0, 7, 2), Position("train", 1, 0, 2)]
    for event, place in zip([start(), logged(1), logged(2), epoch_end(1)], places, strict=True):
        sink(dataclasses.replace(event, position=lambda: places[0]) if isinstance(event, FitStart) else event)
        places[0] = place
        redrawn(sink)
    sink(fit_end({}))
    text = plain(stream)
    assert re.search(r"epoch 1/3 ━+.*━+ 2/4 \S+ loss 1.000  lr 3.0e-04  12.3 steps/s", text)
    assert re.search(r"^val ━+ +7/\? +loss 0.500", text, re.MULTILINE)
    assert "epoch 1/3  train_loss 1.000  val_loss 0.101" in text
    assert stream.getvalue().endswith("\x1b[2K")  # the bar is wiped, the lines stay
    assert sys.stdout is sys.__stdout__ or not hasattr(sys.stdout, "rich_proxied_file")


def test_a_bar_that_is_kept_holds_no_run():
    sink, held = progress(io.StringIO()), torch.zeros(1)
    gone = weakref.ref(held)
    sink(dataclasses.replace(start(), position=lambda held=held: Position("train", 0, int(held))))
    sink(fit_end({}))
    del held
    assert gone() is None


def plain(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")


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
    shown = set(re.findall(r"^(epoch \d/\d|val) +[━╸╺]+ +(\d+)/", plain(stream), re.MULTILINE))
    for epoch in ("epoch 1/2", "epoch 2/2"):
        assert {count for name, count in shown if name == epoch} - {"0"} == set("12345")
    assert {count for name, count in shown if name == "val"} == set("123")


def test_the_bar_asks_a_run_where_it_is_and_adds_nothing_to_a_step():
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    seen: list[Event] = []
    ps.fit(program.init(), {"train": [batch] * 5, "val": [batch]}, program, epochs=2, sinks=[seen.append])
    assert {type(event) for event in seen} == {FitStart, EvalEnd, EpochEnd, FitEnd}
    first = seen[0]
    assert isinstance(first, FitStart)
    assert first.position() == Position("train", 2, 0, 10)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 160])
def test_the_bar_keeps_to_the_width(monkeypatch: pytest.MonkeyPatch, width: int):
    terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    sink = progress(stream)
    sink(dataclasses.replace(start(), position=lambda: Position("train", 0, 2, 2)))
    stream.truncate(0)
    sink(Logged(0, 2, {"train_loss": 0.123, "train_accuracy": 0.981, "grad_norm": 1.5, "lr": 3e-4}, 12.34, 0.25))
    redrawn(sink)
    lines = plain(stream).replace("\0", "").splitlines()
    sink.close()
    assert max(map(len, lines)) <= width
    shown = re.findall(r"(loss|accuracy|lr|steps/s)", lines[-1])
    assert len(shown) == len(set(shown)) == {30: 0, 40: 0, 60: 1, 80: 3, 100: 3, 160: 4}[width]
    assert shown[:1] == ["loss"][: len(shown)]
    assert "epoch 1/3 ━" in lines[-1] or width == 30


@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_a_printed_line_keeps_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int):
    terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    sink = progress(stream)
    sink(start())
    sink(epoch_end(1, val_accuracy=0.9812))
    sink.close()
    (line,) = [line for line in plain(stream).splitlines() if "train_loss" in line]
    shown = re.findall(r"  ([a-z_]+) [\d.]+", line)
    assert len(line) <= width
    assert (
        shown == ["train_loss", "val_loss", "val_accuracy", "lr"][: {30: 1, 60: 2, 80: 4, 100: 4}[width]] or width == 60
    )


def test_the_remaining_time_begins_afresh_in_every_epoch(monkeypatch: pytest.MonkeyPatch):
    terminal(monkeypatch)
    place = [Position("train", 0, 0)]
    stream = Terminal()
    sink = progress(stream)
    sink(dataclasses.replace(start(), position=lambda: place[0]))
    for found in (Position("train", 0, 2), Position("train", 0, 4)):
        place[0] = found
        redrawn(sink)
    bar = sink._bar  # pyright: ignore[reportPrivateUsage]
    assert bar is not None
    assert bar.tasks[0].finished
    place[0] = Position("train", 1, 0)
    sink(epoch_end(1))
    assert not bar.tasks[0].finished
    place[0] = Position("train", 1, 2)
    redrawn(sink)
    sink.close()
    assert "epoch 2/3 ━━━━━━━━━━╺━━━━━━━━━ 2/4" in plain(stream)


def test_a_printed_line_has_less_than_120_characters_and_no_number_twice():
    stream = io.StringIO()
    sink = progress(stream)
    sink(start())
    many = {f"val_class{i}[{j}]": 0.5 for i in range(4) for j in range(3)} | {f"val_class{i}": 0.5 for i in range(4)}
    more = {f"train_a_rather_long_name_{i}": 0.5 for i in range(6)}
    record = {"epoch": 1, "step": 4, "train_loss": 0.5, **more, **many, "val_loss": 0.25, "lr": 1e-3, "grad_norm": 2.0}
    sink(EpochEnd(STATE, 1, 4, record, True, None, 512.3))
    line = stream.getvalue().removesuffix("\n")
    assert len(line) < 120
    assert line.startswith("epoch 1/3  train_loss 0.500  val_loss 0.250  val_class0 0.500")
    assert line.endswith("  lr 1.0e-03  512 steps/s")
    assert "[" not in line
    names = re.findall(r"  ([a-z_0-9]+) ", line)
    assert len(names) == len(set(names))


def test_the_speed_of_a_row_leaves_evaluations_out():
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    found: list[tuple[float, float]] = []
    begun = [time.monotonic()]

    def slow_evaluation(event: Event) -> None:
        if isinstance(event, ps.events.EvalStepEnd):
            time.sleep(0.05)
        elif isinstance(event, EpochEnd):
            found.append((event.steps_per_second, 4 / (time.monotonic() - begun[0])))
            begun[0] = time.monotonic()

    loaders = {"train": [batch] * 4, "val": [batch] * 4}
    ps.fit(program.init(), loaders, program, epochs=2, sinks=[], callbacks=[slow_evaluation], log_every=3)
    assert all(speed > with_evaluation for speed, with_evaluation in found)


def test_a_bar_draws_no_number_of_the_callers(monkeypatch: pytest.MonkeyPatch):
    """rich draws one as it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich" or name.endswith(".live_bar")]:
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


@pytest.mark.row("B48")
def test_a_resumed_history_goes_on_where_the_snapshot_was(tmp_path: Path):
    first = history_json(tmp_path / "h.json")
    first(start())
    for epoch in (1, 2, 3):
        first(epoch_end(epoch))
    again = history_json(tmp_path / "h.json")
    again(dataclasses.replace(start(epoch=2, updates=8, resumed=True), history={"epoch": [1, 2], "train_loss": [1, 2]}))
    again(epoch_end(3, train_loss=9.0))
    rows = json.loads(again.path.read_text())
    assert [(row["epoch"], row["train_loss"]) for row in rows] == [(1, 1), (2, 2), (3, 9.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["h.json"]


@pytest.mark.row("B48")
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


def test_a_row_encodes_no_other_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    encoded: list[int] = []
    real = json.dumps
    monkeypatch.setattr(json, "dumps", lambda *args, **kw: encoded.append(1) or real(*args, **kw))
    sink = history_json(tmp_path / "h.json")
    sink(start())
    for epoch in range(1, 101):
        sink(epoch_end(epoch))
    assert len(encoded) == 100
    assert [row["epoch"] for row in json.loads(sink.path.read_text())] == list(range(1, 101))


def test_a_history_that_could_not_be_written_is_whole_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sink = history_json(tmp_path / "h.json")
    sink(start())
    sink(epoch_end(1))
    with monkeypatch.context() as patched:

        def full(path: Path, mode: str, **options: Any) -> Any:
            if mode == "xb":
                return open(path, mode, **options)
            path.write_bytes(b"[\n  {")
            raise OSError(28, "No space left on device")

        patched.setattr("purestep.files.atomic.open", full, raising=False)
        with pytest.raises(WriteFailed, match="No space left"):
            sink(epoch_end(2))
    assert [row["epoch"] for row in json.loads(sink.path.read_text())] == [1]
    sink(epoch_end(3))
    assert [row["epoch"] for row in json.loads(sink.path.read_text())] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["h.json"]


def test_the_history_is_whole_after_a_failed_run(tmp_path: Path):
    """The sink is slow, and the run ends by an error: what waits is written first."""
    sink = history_json(tmp_path / "h.json")
    real = sink._write  # pyright: ignore[reportPrivateUsage]
    sink._write = lambda: (time.sleep(0.002), real())[1]  # type: ignore[method-assign]
    batch = (torch.ones(2, 1), torch.ones(2, 1))
    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(1e-3))

    def fail(event: Event) -> None:
        if isinstance(event, StepEnd) and event.updates == 41:
            raise RuntimeError("planted")

    safe = guarded(sink, capacity=1, patience=0.05)
    with pytest.raises(RuntimeError, match="planted"):
        ps.fit(program.init(), [batch], program, epochs=100, sinks=[safe], callbacks=[fail])
    assert [row["epoch"] for row in json.loads(sink.path.read_text())] == list(range(1, 41))
    assert safe.dropped == 0


# Only regular files.


@pytest.mark.parametrize("make", [csv, jsonl, history_json])
@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a directory"])
def test_only_a_regular_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], kind: str
):
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    path = Path("place")
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    said = kind if kind == "a directory" else "a FIFO, a socket or a device"
    with pytest.raises(
        WriteFailed, match=rf"place: the path is {said}, and a sink writes a regular file.*cure: pass the path"
    ):
        make(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["place"]


@pytest.mark.parametrize("target", ["victim", "/dev/stdout"])  # which may be a file
@pytest.mark.parametrize("make", [csv, jsonl, history_json])
def test_a_link_is_refused(tmp_path: Path, make: Callable[..., Any], target: str):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "rows").symlink_to(tmp_path / target)
    with pytest.raises(WriteFailed, match="is a link, and a sink writes a regular file"):
        make(tmp_path / "rows")


@pytest.mark.parametrize("make", [csv, jsonl])
def test_a_file_that_becomes_a_link_is_not_written_through(tmp_path: Path, make: Callable[..., Any]):
    sink = make(tmp_path / "rows")
    event = Logged(0, 50, {"train_loss": 0.5}, steps_per_second=8.0, wait_fraction=0.25)
    sink(event)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "rows").unlink()
    (tmp_path / "rows").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="is a link, which is not followed"):
        sink(event)
    assert (tmp_path / "victim").read_text() == "precious"


def test_names_of_metrics_do_not_act_on_the_terminal():
    stream = io.StringIO()
    sink = progress(stream)
    sink(EpochEnd(None, 1, 10, {"epoch": 1, "val_\x1b[2J": 0.5}, improved=True, stopping=None))
    assert stream.getvalue() == "epoch 1  val_\\x1b[2J 0.500\n"


def test_nothing_is_renamed_over_a_pipe(tmp_path: Path):
    path = tmp_path / "weights.pt"
    os.mkfifo(path)
    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    with pytest.raises(WriteFailed, match="is a FIFO, a socket or a device and cannot be replaced"):
        ps.export_weights(path, program, program.init())
    assert stat.S_ISFIFO(path.stat().st_mode)


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
def test_rows_of_a_file_are_read_by_the_sinks_that_write_them(
    tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any]
):
    sink = make(tmp_path / f"metrics.{make.__name__}")
    for event in [start(), logged(2), logged(4, grad_norm=0.1 + 0.2), epoch_end(1, val_accuracy=1e-7)]:
        sink(event)
    text = sink.path.read_text()
    sink.path.write_text(text + text.splitlines()[-1][:9])  # a row that is being written
    rows = row_files.stored_rows(sink.path)
    assert rows is not None
    assert keys(rows) == [("step", 2), ("step", 4), ("epoch", 4)]
    assert (rows[0].get("grad_norm"), rows[1]["grad_norm"], rows[2]["val_accuracy"]) == (None, 0.1 + 0.2, 1e-7)
    sink(dataclasses.replace(start(updates=4, resumed=True), history={"epoch": [1]}))
    assert sink.path.read_text() == text


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
def test_a_resumed_run_never_appends_to_a_file_that_it_cannot_read(
    tmp_path: Path,
    make: Callable[..., Any],
    read: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    sink = make(tmp_path / "metrics.txt")
    for event in [start(), *map(logged, range(2, 7))]:
        sink(event)
    text = sink.path.read_text()
    monkeypatch.setattr(row_files, "_LARGEST", len(text) - 1)
    sink = make(tmp_path / "metrics.txt")
    sink(start(updates=4, resumed=True))
    sink(logged(5))
    assert keys(read(tmp_path / "metrics.txt")) == [("step", 5)]
    assert (tmp_path / "metrics.1.txt").read_text() == text
    assert "metrics.txt: cannot be read, so it is renamed" in caplog.text


@FORMATS
def test_rows_stay_whole_after_a_failed_write(
    tmp_path: Path, make: Callable[..., Any], read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    sink = make(tmp_path / "metrics")
    sink(start())
    sink(logged(2))
    sink(logged(3))

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            return self.file.write(data[:5])

    with monkeypatch.context() as patched:
        full = lambda path, *args, **kw: Full(open(path, *args, **kw))  # noqa: E731, SIM115
        patched.setattr("purestep.sinks.row_files.open", full, raising=False)
        with pytest.raises(OSError, match="in part"):
            sink(logged(4))
    assert keys(read(tmp_path / "metrics")) == [("step", 2), ("step", 3)]
    sink(logged(5))
    assert keys(read(tmp_path / "metrics")) == [("step", 2), ("step", 3), ("step", 5)]


# TensorBoard.


@pytest.mark.parametrize("make", [csv, jsonl, history_json, tensorboard])
def test_a_relative_path_stays_where_it_was_when_the_working_directory_changes(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if make is tensorboard:
        pytest.importorskip("tensorboard")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    sink = make("out")
    monkeypatch.chdir("other")
    for event in (start(), logged(4), epoch_end(1)):
        sink(event)
    sink.close()
    assert list((tmp_path / "other").iterdir()) == []
    assert (tmp_path / "out").exists()


def test_tensorboard_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from purestep.errors import ConfigError

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed \(cure: pip install 'purestep\[tensorboard"):
        tensorboard(tmp_path)


@pytest.fixture
def shown() -> Callable[[Path], dict[str, list[tuple[int, float]]]]:
    """TensorBoard's own reader: the steps and values of each tag."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
        found = accumulator.EventAccumulator(str(directory))
        found.Reload()
        return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    return read


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
@pytest.mark.parametrize(("resumed", "last"), [(True, 8), (False, 3)])
def test_tensorboard_shows_every_step_once_after_a_kill(resumed: bool, last: int, tmp_path: Path, shown: Any):
    """The last snapshot is of update 5; or there is none, and the same call of `fit` begins a fresh run."""
    killed = tensorboard(tmp_path)
    twice = [epoch_end(1, val_accuracy=None), epoch_end(1)]  # two rows of one update
    for event in [start(), *map(logged, range(1, 5)), *twice, logged(5), logged(6)]:
        killed(event)
    killed.close()
    again = tensorboard(tmp_path)
    first = start(updates=5, epoch=1, resumed=True) if resumed else start()
    for event in [first, *map(logged, range(6 if resumed else 1, last + 1)), epoch_end(2), fit_end({})]:
        again(event)
    found = shown(tmp_path)
    steps = list(range(1, last + 1))
    assert found["train/loss"] == [(step, pytest.approx(1 / step)) for step in steps]
    assert [step for step, _ in found["train/lr"]] == [step for step, _ in found["train/steps_per_second"]] == steps
    rows = [(4, pytest.approx(0.1011)), (8, pytest.approx(0.1011))]
    assert found["epoch/val_loss"] == (rows if resumed else rows[1:])
    assert [step for step, _ in found["epoch/train_loss"]] == [step for step, _ in found["epoch/val_loss"]]
    assert "epoch/val_accuracy" not in found


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_shows_the_mean_of_a_window_and_that_of_an_epoch_apart(tmp_path: Path, shown: Any):
    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.01))
    batches = [(torch.full((2, 1), float(i)), torch.zeros(2, 1)) for i in range(4)]
    kw = {"log_every": 2, "evaluate_every": 2, "sinks": [tensorboard(tmp_path)]}
    result = ps.fit(program.init(), (batches, batches), program, epochs=2, **kw)
    found = shown(tmp_path)
    assert not {tag.rpartition("/")[2] for tag in found} & {"epoch", "step"}
    assert {tag.partition("/")[0] for tag in found} == {"train", "epoch"}
    for tag, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), tag
    assert [step for step, _ in found["epoch/val_loss"]] == result.history["step"]
    assert [value for _, value in found["epoch/val_loss"]] == pytest.approx(result.history["val_loss"])


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
        "sink sink failed at Saved with OSError: disk full; training goes on; this is logged once"
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


def test_rows_are_not_dropped_and_files_are_waited_for(tmp_path: Path):
    class Slow:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def __call__(self, event: Event) -> None:
            time.sleep(0.01)
            self.seen.append(type(event))

    slow, file = Slow(), Slow()
    file.writes_files = True  # type: ignore[attr-defined]
    for sink in (slow, file):
        safe = guarded(sink, capacity=100 if sink is file else 1, patience=0.05)
        for event in [start(), *(event for n in range(1, 11) for event in (Saved(n, tmp_path), epoch_end(n)))]:
            safe(event)
        safe.close()
    assert file.seen.count(Saved) == file.seen.count(EpochEnd) == 10
    for _ in range(500):
        if slow.seen.count(EpochEnd) == 10:
            break
        time.sleep(0.01)
    assert slow.seen.count(EpochEnd) == 10
    assert slow.seen.count(Saved) < 10


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
    def chosen(directory: Path | None, *, progress: bool) -> list[str]:
        snapshots = None if directory is None else ps.Snapshots(directory)
        found = ready_sinks(None, snapshots, ps.FitConfig(epochs=1, progress=progress), None)
        return [type(sink.sink).__name__ for sink in found]

    assert chosen(tmp_path, progress=True) == ["RunRecord", "ProgressBar", "History"]
    assert chosen(None, progress=False) == []
    for sink in ready_sinks(None, ps.Snapshots(tmp_path), ps.FitConfig(epochs=1, progress=False), None):
        for event in [start(), epoch_end(1)]:
            sink(event)
        sink.close()
    assert json.loads((tmp_path / "training_history.json").read_text())[0]["epoch"] == 1
