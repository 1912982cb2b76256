"""The history of a run as one JSON list, to which a row is appended in place."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from ..events import EpochEnd, Event, FitEnd, FitStart
from ..files import failpoint, sync_file, write_bytes
from .output import finite, is_stream, open_stream, set_aside

Row: TypeAlias = dict[str, Any]

_END = b"\n]\n"
_SYNCED = 1.0  # seconds between two flushes to the disk: a row a millisecond would wait for each of them


class History:
    """One JSON list with a row an epoch; see `history_json`."""

    writes_files = True
    wants = (FitStart, EpochEnd, FitEnd)

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._size: int | None = None  # bytes of the file that holds the rows before the last; None: none does
        self._synced = -math.inf  # reading of the clock at the last flush

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            self._size = None
            self._rows = self._kept(event)
        elif isinstance(event, EpochEnd):
            self._rows.append({key: finite(value) for key, value in event.record.items()})
            self._append()
        elif isinstance(event, FitEnd):
            self._end(_as_rows(event.history))

    def _kept(self, event: FitStart) -> list[Row]:
        if is_stream(self.path):
            return []
        if not event.resumed:
            set_aside(self.path)
            return []
        if event.history:
            return _as_rows(event.history)
        try:
            stored = _parse(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError):
            stored = None
        if not isinstance(stored, list) or not all(isinstance(row, dict) for row in cast("list[Any]", stored)):
            set_aside(self.path)
            return []
        rows = cast("list[Row]", stored)
        return [row for row in rows if _number(row.get("epoch")) <= event.epoch]

    def _append(self) -> None:
        """Write the last row, over the bracket that closes the list."""
        if is_stream(self.path):
            return  # one document, at the end
        before, self._size = self._size, None
        if before is None or not self.path.is_file() or self.path.stat().st_size != before:
            self._write()
            return
        row = b",\n" + _indented(self._rows[-1]) + _END
        with self.path.open("r+b", buffering=0) as file:
            start = before - len(_END)
            try:
                failpoint("files.write")
                file.seek(start)
                if file.write(row) != len(row):
                    raise OSError("the row was written in part")  # the next write would say why
            except BaseException:
                file.truncate(start)
                file.seek(start)
                file.write(_END)  # into room that the file has had
                raise
            if time.monotonic() - self._synced >= _SYNCED:
                os.fsync(file.fileno())
                self._synced = time.monotonic()
        self._size = start + len(row)

    def _end(self, rows: list[Row]) -> None:
        # The history of the run came through its snapshots, so it is right even where this file was lost.
        is_whole = self._size is not None and self.path.is_file() and self.path.stat().st_size == self._size
        if is_stream(self.path):
            with open_stream(self.path) as stream:
                stream.write(_document(rows).decode())
        elif rows != self._rows or not is_whole:
            self._rows = rows
            self._write()
        else:
            sync_file(self.path)

    def _write(self) -> None:
        data = _document(self._rows)
        write_bytes(self.path, data)
        self._size, self._synced = len(data), time.monotonic()

    def close(self) -> None:
        """Nothing is held open."""


def _document(rows: list[Row]) -> bytes:
    return b"[\n" + b",\n".join(map(_indented, rows)) + _END if rows else b"[]\n"


def _indented(row: Row) -> bytes:
    return ("  " + json.dumps(row, allow_nan=False)).encode()


def _parse(text: str) -> Any:
    """The rows of a file; of one that a killed run has left torn, those that are whole.

    Raises:
        ValueError: no JSON, and no row a line either.
    """
    try:
        return json.loads(text)
    except ValueError:
        rows: list[Any] = []
        for line in text.splitlines()[1:]:
            try:
                rows.append(json.loads(line.rstrip(",")))
            except ValueError:
                break
        if not rows:
            raise
        return rows


def _as_rows(history: Mapping[str, list[Any]]) -> list[Row]:
    return [
        {key: finite(values[index]) for key, values in history.items() if index < len(values)}
        for index in range(max(map(len, history.values()), default=0))
    ]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.inf


def history_json(path: Path | str) -> History:
    """``training_history.json``: a list of ``{"epoch": 1, "train_loss": ..., "val_loss": ..., "lr": ...}``.

    The first row writes the file whole (to a temporary file, flushed, renamed). Every further row is appended in place,
    so that a row costs the same after 10,000 others; the file is valid JSON after each of them. It is flushed to the
    disk once a second and at the end of the run, whatever ends it, where it is also held against the run's whole
    history. What is not a finite number is null.

    Args:
        path: of the file. A fresh run moves one that is there to ``training_history.1.json`` and so on. A pipe or
            device (``/dev/stdout``) gets the whole list at the end of the run.

    Example:
        >>> import tempfile
        >>> sink = history_json(Path(tempfile.mkdtemp(), "training_history.json"))
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": 0.5}, improved=True, stopping=None))
        >>> json.loads(sink.path.read_text())
        [{'epoch': 1, 'train_loss': 0.5}]
    """
    return History(Path(path))
