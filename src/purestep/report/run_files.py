"""Read what a run has left in its directory. Takes no lock and writes nothing, so a live run is not disturbed."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from .. import snapshot, stopping
from ..errors import ConfigError, NotFound, SnapshotError
from ..files import Holder, lock_holder
from ..sinks import json_history, row_files
from ..snapshot import RunInfo, StoredStep

Row = json_history.Row
_HISTORY = "training_history.json"
_SUFFIXES = "|".join(map(re.escape, row_files.READERS))
_ASIDE = re.compile(rf".*\.\d+({_SUFFIXES})|rows-\d+\.jsonl")  # of earlier runs; rows that belong to snapshots


class StoredRun(NamedTuple):
    """A run, as its directory shows it."""

    directory: Path
    state: str  # "running", "ended", "interrupted", "failed", "killed" or "unknown"
    how: str  # the state in a sentence
    info: RunInfo | None
    snapshots: list[StoredStep]
    best_step: int | None  # the snapshot of the best row, if it is kept
    monitor: tuple[str, str] | None  # metric and mode
    history: list[Row]  # one row per epoch or evaluation
    lines: list[Row]  # one row every `log_every` updates, from a CSV or JSON lines file
    best: int | None  # index in `history`
    size: int  # bytes of the directory
    set_aside: list[str]  # names of damaged and archived snapshots
    problems: list[str]

    @property
    def newest(self) -> StoredStep | None:
        """The newest intact snapshot."""
        return next((found for found in reversed(self.snapshots) if found.problem is None), None)


def read_run(path: Path | str, *, verify: bool = False) -> StoredRun:
    """Read a run.

    Args:
        path: the directory of its snapshots.
        verify: read every value of every snapshot and compare the digests, which takes as long as restoring them all.

    Raises:
        NotFound: there is no such directory, or nothing of a run in it.
    """
    directory = Path(path).absolute()
    if not directory.is_dir():
        what = "is a file, not the directory of a run" if directory.exists() else "no such directory"
        raise NotFound(what, where=str(path), hint="pass the directory of a run's snapshots")
    holder, info = lock_holder(directory), snapshot.read_run_info(directory)
    found = snapshot.stored_steps(directory)
    problems = [summary.problem for summary in found if summary.problem is not None]
    if verify:
        intact = [summary.step for summary in found if summary.problem is None]
        problems += [text for step in intact if (text := snapshot.verify(directory, step)) is not None]
    newest = next((summary for summary in reversed(found) if summary.problem is None), None)
    history, lines = _history(directory, newest, problems), _lines(directory, problems)
    history = history or [row for row in lines if row["kind"] == "epoch"]
    if not found and not history and not lines and info is None and holder is None:
        raise NotFound(
            "no snapshots of a run in it", where=str(path), hint="pass the directory that fit(snapshots=...) names"
        )
    monitor = _monitor(newest, info, history)
    state, how = _state(holder, info)
    return StoredRun(
        directory=directory,
        state=state,
        how=how,
        info=info,
        snapshots=found,
        best_step=_best_step(found, monitor),
        monitor=monitor,
        history=history,
        lines=[row for row in lines if row["kind"] == "step"],
        best=_best(history, monitor),
        size=snapshot.size_of(directory),
        set_aside=snapshot.set_aside(directory),
        problems=problems,
    )


# --- state ------------------------------------------------------------------------------------------------------------


def _state(holder: Holder | None, info: RunInfo | None) -> tuple[str, str]:
    ended = info is not None and info.ended is not None
    if info is not None and holder is not None:
        last = datetime.fromisoformat(info.ended or info.started).astimezone()
        if datetime.fromisoformat(holder.since) > last:
            info, ended = None, False  # a newer run holds the lock, and has not written its record yet
    if holder is not None and not ended:
        who = f"process {holder.pid} on {holder.host}, since {when(holder.since)}"
        if holder.alive:
            return "running", f"running: {who}"
        if holder.alive is None:
            return "unknown", f"running, or killed: {who}, which cannot be seen from this machine"
        return "killed", f"killed, or ended without its last steps: {who}; fit goes on from the newest snapshot"
    if info is None:
        return "unknown", "not running; how it ended is not recorded"
    if info.ended is None:
        return "killed", f"did not end normally; started {when(info.started)}; fit goes on from the newest snapshot"
    at = f"at {when(info.ended)}"
    if info.reason == "interrupted":
        return "interrupted", f"interrupted {at} by a signal; fit goes on from the newest snapshot"
    if info.error is not None:
        return "failed", f"failed {at}: {info.error}"
    return "ended", f"ended {at}: {_REASONS.get(str(info.reason), str(info.reason))}"


_REASONS = {
    "epochs": "all epochs are done",
    "steps": "all steps are done",
    "max_time": "its time was over (max_time)",
    "early_stopping": "early stopping",
}


def when(moment: str | float) -> str:
    """A time as ``2026-01-31 12:30``, in this machine's time zone, from ISO 8601 or seconds."""
    try:
        at = datetime.fromisoformat(moment) if isinstance(moment, str) else datetime.fromtimestamp(moment)
        return at.astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # a file's time may be set to any number
        return "at an unknown time"


def age(seconds: float) -> str:
    """The time since a moment, in words.

    Example:
        >>> age(time.time() - 90), age(time.time() - 3 * 86400)
        ('90 s ago', '3 days ago')
    """
    passed = max(time.time() - seconds, 0.0)
    for name, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * size:
            return f"{passed / size:.0f} {name} ago"
    return f"{passed:.0f} s ago"


def number_text(value: Any) -> str:
    """A cell of a table: four digits, "" for None.

    Example:
        >>> number_text(0.123456), number_text(12), number_text(None)
        ('0.1235', '12', '')
    """
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# --- rows -------------------------------------------------------------------------------------------------------------


def _history(directory: Path, newest: StoredStep | None, problems: list[str]) -> list[Row]:
    """The longer one of the history in the newest snapshot and that in ``training_history.json``."""
    stored = _stored_history(directory, newest, problems)
    try:
        written = json_history.stored_history(directory / _HISTORY)
    except FileNotFoundError:
        return stored
    except OSError as error:
        problems.append(f"{directory / _HISTORY}: {error}")
        return stored
    if written is None:
        problems.append(f"{directory / _HISTORY}: not a list of rows")
    return max(stored, written or [], key=len)


def _stored_history(directory: Path, newest: StoredStep | None, problems: list[str]) -> list[Row]:
    if newest is None:
        return []
    try:
        return json_history.rows_of(snapshot.read_history(directory, newest.step))
    except (SnapshotError, OSError) as error:
        if (directory / str(newest.step)).exists():  # otherwise its writer has deleted it in the meantime
            problems.append(" ".join(str(error).split()))
        return []


def _lines(directory: Path, problems: list[str]) -> list[Row]:
    """The rows of `sinks.csv` and `sinks.jsonl` in the directory: of the file with the most rows."""
    longest: list[Row] = []
    for path in sorted(directory.iterdir()):
        if _ASIDE.fullmatch(path.name) or not path.is_file():
            continue
        try:
            rows = row_files.stored_rows(path) or []
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
            continue
        longest = max(longest, rows, key=len)
    return longest


# --- best -------------------------------------------------------------------------------------------------------------


def _monitor(newest: StoredStep | None, info: RunInfo | None, history: list[Row]) -> tuple[str, str] | None:
    if newest is not None and newest.monitor is not None:
        return newest.monitor
    settings = {} if info is None else info.settings
    metric = settings.get("monitor") or ("val_loss" if any("val_loss" in row for row in history) else None)
    if not isinstance(metric, str):
        return None
    try:
        return metric, str(settings.get("mode") or stopping.default_mode(metric))
    except ConfigError:
        return None


def _best(history: Sequence[Mapping[str, Any]], monitor: tuple[str, str] | None) -> int | None:
    if monitor is None:
        return None
    sign = 1.0 if monitor[1] == "min" else -1.0
    known = [(sign * value, at) for at, row in enumerate(history) if (value := finite(row.get(monitor[0]))) is not None]
    return min(known)[1] if known else None


def _best_step(found: list[StoredStep], monitor: tuple[str, str] | None) -> int | None:
    if monitor is None:
        return None
    at = _best([summary.metrics for summary in found], monitor)
    return None if at is None else found[at].step


def finite(value: Any) -> float | None:
    """The number as a float; None for everything else."""
    try:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number else None
    except OverflowError:  # an int of more than 300 digits
        return None


# --- facts ------------------------------------------------------------------------------------------------------------


def facts(run: StoredRun, *, verified: bool = False) -> dict[str, str]:
    """The facts of a run as texts by name. ``verified``: every digest was compared."""
    intact = [summary for summary in run.snapshots if summary.problem is None]
    found = {"state": run.how}
    if run.newest is None:
        found["newest"] = "no snapshot yet" if not run.snapshots else "every snapshot is damaged"
    else:
        found["newest"] = f"snapshot {run.newest.step}, {age(run.newest.saved)}"
    if run.monitor is not None and run.best is not None:
        metric, row = run.monitor[0], run.history[run.best]
        metrics = next((summary.metrics for summary in run.snapshots if summary.step == run.best_step), {})
        kept = f"snapshot {run.best_step}" if metrics.get(metric) == row.get(metric) else "not kept as a snapshot"
        place = f"epoch {row.get('epoch')}, update {row.get('step')}"
        found["best"] = f"{metric} {number_text(row.get(metric))} at {place}, {kept}"
    steps = ", ".join(str(summary.step) for summary in intact[-8:])
    more = "..., " if len(intact) > 8 else ""
    aside = f"; set aside: {', '.join(run.set_aside)}" if run.set_aside else ""
    found["snapshots"] = f"{len(intact)}{': ' if intact else ''}{more}{steps}{aside}"
    found["size"] = decimal(run.size)
    if run.problems:
        found["whole"] = "\n".join(["no:", *run.problems])
    elif not run.snapshots:
        found["whole"] = "nothing to check"
    else:
        found["whole"] = (
            "yes: every digest agrees" if verified else "yes, by files and sizes (--verify reads every digest)"
        )
    return found
