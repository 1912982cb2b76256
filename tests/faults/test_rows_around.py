"""Rows 52 to 55 of the fault matrix: monitors, sinks, callbacks, the clock. Each guard has a control."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.faults.runs import RUN, Told, at, batches, fails, fit, mlp, same
from torch import Tensor

import purestep as ps
from purestep import events, sinks, stopping
from purestep.errors import ConfigError, NotFound, StateError
from purestep.loop import callbacks, policy
from purestep.sinks import row_files
from purestep.snapshot import snapshots as snapshots_
from purestep.types import Mean, Program

# --- row 52 -----------------------------------------------------------------------------------------------------------

NAN = math.nan


def play(values: list[float], **fields: Any) -> Any:
    """A run whose ``val_loss`` follows a script, an epoch a value."""

    def train_step(state: dict[str, Tensor], batch: Tensor) -> Any:
        return {"epoch": state["epoch"] + 1}, {}

    def eval_step(state: dict[str, Tensor], batch: Tensor) -> Any:
        return {"loss": Mean(torch.tensor(values)[state["epoch"] - 1], torch.ones(()))}

    one = [torch.ones(1)]
    state = {"epoch": torch.zeros((), dtype=torch.int64)}
    program = Program(train_step, eval_step=eval_step)
    return fit(state, {"train": one, "val": one}, program, **{"epochs": len(values), **fields})


@pytest.mark.row("F52", "B5")
@pytest.mark.parametrize(
    ("values", "best"),
    [([NAN, 3, 2], 3), ([3, NAN, 4], 1), ([NAN, NAN, NAN], None), ([math.inf, NAN, 5], 3), ([3, -math.inf, 4], 1)],
)
def test_row_52_nan_is_never_the_best(values: list[float], best: int | None, tmp_path: Path) -> None:
    with ps.Snapshots(tmp_path, keep=1) as snapshots:
        result = play(values, snapshots=snapshots)
        kept = snapshots.best()
    assert (result.best and result.best["epoch"]) == best == kept
    text = json.dumps(result.history, allow_nan=False)  # an error where a nan is in it
    assert text.count("null") == sum(not math.isfinite(value) for value in values)
    stopped = play([*values, 9, 9, 9], early_stopping=2)  # and it counts as no improvement
    assert stopped.stop_reason == "early_stopping"


@pytest.mark.row("F52", "B8")
def test_row_52_an_unknown_monitor_lists_what_there_is() -> None:
    program = mlp()
    known = r"\['grad_norm', 'lr', 'train_loss', 'val_loss'\]"
    message = rf"monitor='eval_loss' is not among the metrics: {known}.*cure: monitor='val_loss'"
    with pytest.raises(ConfigError, match=message):
        fit(program.init(), {"train": batches(1), "val": batches(1)}, program, epochs=3, monitor="eval_loss")


def test_row_52_fails_where_nan_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    better = lambda value, best, *, mode, min_delta=0.0: best is None or not value >= best - min_delta  # noqa: E731
    monkeypatch.setattr(stopping, "_is_better", better)
    fails(lambda: test_row_52_nan_is_never_the_best([3, NAN, 4], 1, tmp_path))


def test_row_52_fails_where_the_monitor_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.Monitor, "check", lambda self, loop, loaders: None)
    fails(test_row_52_an_unknown_monitor_lists_what_there_is)


# --- row 53 -----------------------------------------------------------------------------------------------------------


def raises(event: Any) -> None:
    raise ConnectionError("no such host")


def full(event: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.row("F53")
def test_row_53_sinks_that_raise_block_or_find_the_disk_full(caplog: pytest.LogCaptureFixture) -> None:
    program, release = mlp(), threading.Event()

    def blocks(event: Any) -> None:
        release.wait(60)

    expected = fit(program.init(), batches(3), program, epochs=4, log_every=1)
    blocked = sinks.guarded(blocks, capacity=4, patience=0.05)
    given = [sinks.guarded(raises), sinks.guarded(full), blocked]
    began = time.monotonic()
    try:
        with caplog.at_level(logging.WARNING, "purestep"):
            result = fit(program.init(), batches(3), program, epochs=4, log_every=1, sinks=given)
        assert time.monotonic() - began < 30  # against the 60 that every event would take
    finally:
        release.set()
    same(result, expected)
    assert caplog.text.count("no such host") == caplog.text.count("No space left") == 1  # said once a kind
    assert given[0].failures["ConnectionError"] == given[1].failures["OSError"] >= 16  # and counted
    assert blocked.dropped >= 8  # all but the rows of the history, which are kept, and what was taken at first
    assert "sink blocks: too slow, events are dropped; training goes on" in caplog.text


def test_row_53_fails_where_a_sink_is_called_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks.Guarded, "_deliver", lambda self, event: self.sink(event))
    monkeypatch.setattr(sinks.Guarded, "_foreground", True, raising=False)
    monkeypatch.setattr(sinks.Guarded, "__call__", lambda self, event: self.sink(event))
    fails(lambda: test_row_53_sinks_that_raise_block_or_find_the_disk_full(caplog), OSError)


# --- row 54 -----------------------------------------------------------------------------------------------------------


# The hook, the n-th time it is called, and the calls of the step that are saved.
HOOKS = [
    (events.FitStart, 1, 0),
    (events.StepEnd, 5, 5),
    (events.Logged, 5, 5),
    (events.EvalStepEnd, 3, 6),
    (events.EvalEnd, 2, 6),
    (events.EpochEnd, 2, 6),
    (events.Saved, 2, 6),
]


@pytest.mark.row("F54", "B15")
@pytest.mark.parametrize(("kind", "number", "done"), HOOKS, ids=[hook[0].__name__ for hook in HOOKS])
def test_row_54_a_callback_raises(kind: type, number: int, done: int, tmp_path: Path) -> None:
    program, sink, heard = mlp(), Told(), []
    loaders = {"train": batches(3), "val": batches(2)}
    expected = fit(program.init(), loaders, program, epochs=4, log_every=1)

    def broken(event: Any) -> None:
        raise KeyError("of the callback's own")

    def also_broken(event: Any) -> None:
        if isinstance(event, events.FitEnd):
            raise ValueError("at the end")

    def last(event: Any) -> None:
        heard.extend([event] if isinstance(event, events.FitEnd) else [])

    settings: dict[str, Any] = {"epochs": 4, "log_every": 1, "snapshots": tmp_path}
    given = [at(kind, number, broken), also_broken, last]
    with pytest.raises(KeyError, match="of the callback's own") as caught:
        fit(program.init(), loaders, program, callbacks=given, sinks=[sink], **settings)
    notes = "\n".join(caught.value.__notes__)
    assert f"in callback at.<locals>.callback at {kind.__name__}" in notes  # the callback and its hook
    assert "a callback failed at FitEnd: ValueError: at the end" in notes  # nothing is lost
    assert (len(heard), sink.closed) == (1, 1)  # the others hear the end, and are closed
    assert heard[0].error is sink.events[-1].error is caught.value
    if done:
        assert ps.Snapshots(tmp_path, writer=False, strict=True).latest() == done
    same(fit(program.init(), loaders, program, **settings), expected)  # the lock is free, and it goes on


@pytest.mark.row("F54")
def test_row_54_several_that_raise_at_the_end() -> None:
    def broken(event: Any) -> None:
        raise KeyError("first")

    def late(event: Any) -> None:
        raise ValueError("second")

    program, given = mlp(), [at(events.FitEnd, 1, broken), at(events.FitEnd, 1, late)]
    with pytest.raises(ExceptionGroup, match="callbacks failed at FitEnd") as caught:
        fit(program.init(), batches(1), program, epochs=1, callbacks=given)
    assert [str(error) for error in caught.value.exceptions] == ["'first'", "second"]
    with pytest.raises(KeyError, match="first"):
        fit(program.init(), batches(1), program, epochs=1, callbacks=[at(events.FitEnd, 1, broken)])


@pytest.mark.row("F54", "B53")
def test_row_54_only_a_returned_state_counts() -> None:
    program = mlp()

    def swaps(event: Any) -> None:
        event.state._replace(params={})  # a new state, which it does not return

    def writes(event: Any) -> None:
        event.state.params["2.bias"].zero_()

    expected = fit(program.init(), batches(3), program, epochs=2)
    same(fit(program.init(), batches(3), program, epochs=2, callbacks=[at(events.StepEnd, 2, swaps)]), expected)
    with pytest.raises(StateError, match="^params/2.bias: a callback wrote into the state of its event"):
        fit(program.init(), batches(3), program, epochs=2, callbacks=[at(events.StepEnd, 2, writes)])


@pytest.mark.parametrize(
    ("write", "where"),
    [
        (lambda state: state.params.update({"2.bias": torch.zeros(3)}), "params/2.bias"),
        (lambda state: state.params.pop("2.bias"), "params/2.bias"),
        (lambda state: state.buffers.update(seen=torch.zeros(1)), "buffers/seen"),
    ],
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_row_54_an_entry_that_is_assigned_is_found(write: Callable[[Any], Any], where: str, compiled: bool) -> None:
    program = ps.compile_program(mlp(), backend="aot_eager", donate=True) if compiled else mlp()
    callback = at(events.StepEnd, 2, lambda event: write(event.state))
    with pytest.raises(StateError, match=f"^{where}: a callback assigned an entry") as caught:
        fit(program.init(), batches(3), program, epochs=1, callbacks=[callback])
    assert f"event.state._replace({where.partition('/')[0]}=" in caught.value.hint


@pytest.mark.parametrize(
    ("write", "where"),
    [
        (lambda state: state.params["2.bias"].zero_(), "params/0.bias"),  # all weights lie in one vector
        (lambda state: state.ema.params["2.bias"].zero_(), "ema/params/0.bias"),
        (lambda state: state.step.add_(1), "step"),
        (lambda state: state.key.add_(1), "key"),
    ],
)
@pytest.mark.parametrize("donate", [True, False])
def test_row_54_what_is_written_into_a_packed_state_is_found(
    write: Callable[[Any], Any], where: str, donate: bool
) -> None:
    program = ps.compile_program(mlp(ema=0.9), backend="aot_eager", donate=donate)
    callback = at(events.StepEnd, 2, lambda event: write(event.state))
    with pytest.raises(StateError, match=f"^{where}{'' if where == 'key' else ' or one of 3 more'}: a callback wrote"):
        fit(program.init(), batches(3), program, epochs=1, callbacks=[callback])


def test_row_54_fails_where_nobody_knows_where_a_packed_state_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks.live_state, "memory", lambda state: [])
    writes = lambda state: state.params["2.bias"].zero_()  # noqa: E731  # as in the table above
    fails(lambda: test_row_54_what_is_written_into_a_packed_state_is_found(writes, "params/0.bias", True))


def test_row_54_a_callback_gives_the_state_away() -> None:
    program = mlp()
    step = ps.compile_program(program, backend="aot_eager", donate=True)

    def gives(event: Any) -> None:
        step.train_step(event.state, batches(1)[0])

    ends: list[Any] = []
    given = [at(events.StepEnd, 1, gives), at(events.FitEnd, 1, ends.append)]
    with pytest.raises(StateError, match="this state in call 2") as caught:
        fit(program.init(), batches(3), step, epochs=1, callbacks=given)
    assert "in callback" in str(caught.value.__notes__)
    assert [str(end.state) for end in ends] == ["TrainState(donated)"]  # it is told the end all the same


def test_row_54_fails_where_nobody_looks_whether_a_state_was_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks.live_state, "check_alive", lambda state: None)
    monkeypatch.setattr(callbacks.purity, "version", lambda leaf: 0)  # of what is written in C, which nobody counts
    fails(test_row_54_a_callback_gives_the_state_away, AttributeError)  # the error has no note of the callback


def test_row_54_fails_where_nothing_is_saved_on_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN, "_save_on_error", lambda run, error: None)
    fails(lambda: test_row_54_a_callback_raises(events.StepEnd, 5, 5, tmp_path), NotFound)


def test_row_54_fails_where_an_unscored_epoch_is_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RUN._answered

    def early(run: Any, state: Any, loop: Any, event: Any) -> Any:
        run.state, run.loop = state, loop
        return real(run, state, loop, event)

    monkeypatch.setattr(RUN, "_answered", early)
    fails(lambda: test_row_54_a_callback_raises(events.EvalEnd, 2, 6, tmp_path))


def test_row_54_fails_where_nobody_looks_at_what_callbacks_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks.purity, "version", lambda leaf: 0)
    fails(test_row_54_only_a_returned_state_counts)


# --- row 55 -----------------------------------------------------------------------------------------------------------


def steps_in(path: Path) -> list[tuple[str, int]]:
    if path.suffix == ".csv":
        with path.open() as file:
            found: list[Any] = list(csv.DictReader(file))
    else:
        found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["kind"], int(float(row["step"]))) for row in found]


@pytest.mark.row("F55")
def test_row_55_the_clock_goes_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, ticks, speeds = mlp(), iter(range(10**9, 0, -1000)), []
    expected = fit(program.init(), batches(3), program, epochs=3)
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))

    def listen(event: Any) -> None:
        speeds.extend([event.steps_per_second] if isinstance(event, events.Logged) else [])

    given: dict[str, Any] = {"log_every": 1, "callbacks": [listen], "max_time": 600}
    with ps.Snapshots(tmp_path, every_epochs=None, every_seconds=1e-9) as snapshots:
        result = fit(program.init(), batches(3), program, epochs=3, snapshots=snapshots, **given)
    same(result, expected)
    assert len(speeds) == 9
    assert min(speeds) > 0
    for age, step in enumerate((7, 8, 9)):  # as though the newest were the oldest
        os.utime(tmp_path / str(step), (10**6 - age, 10**6 - age))
    assert ps.Snapshots(tmp_path, writer=False).steps() == [7, 8, 9]
    assert ps.Snapshots(tmp_path, writer=False).restore(program.init()).step == 9


@pytest.mark.row("F55")
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_row_55_a_resumed_run_has_no_row_twice_and_misses_none(kind: str, tmp_path: Path) -> None:
    program, make = mlp(), getattr(sinks, kind)

    def run(path: Path, **given: Any) -> Any:
        loaders = {"train": batches(3), "val": batches(1)}
        return fit(program.init(), loaders, program, epochs=3, log_every=1, sinks=[make(path)], **given)

    run(tmp_path / f"whole.{kind}")
    cut = tmp_path / f"cut.{kind}"

    class Killed(BaseException):
        """Nothing is saved on the way out, as if by SIGKILL: `signals.is_at_once` takes it for a second signal."""

    def killed(event: Any) -> None:
        error = Killed()
        vars(error)["at_once"] = True
        raise error

    for update in (2, 4):  # the second time with two rows that no snapshot knows of
        with pytest.raises(Killed):
            run(cut, snapshots=tmp_path / "run", callbacks=[at(events.StepEnd, update, killed)])
    run(cut, snapshots=tmp_path / "run")
    assert steps_in(cut) == steps_in(tmp_path / f"whole.{kind}")
    assert len(set(steps_in(cut))) == len(steps_in(cut)) == 12


def test_row_55_fails_where_intervals_follow_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(snapshots_, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    fails(lambda: test_row_55_the_clock_goes_backwards(tmp_path, monkeypatch), OSError)


def test_row_55_fails_where_rows_are_appended_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files.RowFile, "_begin", lambda self, event: None)
    fails(lambda: test_row_55_a_resumed_run_has_no_row_twice_and_misses_none("jsonl", tmp_path))
