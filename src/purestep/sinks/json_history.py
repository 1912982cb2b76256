"""The history of a run as one JSON list. A row is appended in place."""

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
_SYNCED = 1.0  # seconds between two flushes to the disk, for which a row would wait


class History:
    """One JSON list with a row per epoch; see `history_json`."""

    writes_files = True
    wants = (FitStart, EpochEnd, FitEnd)

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # a callback may call os.chdir
        self._rows: list[Row] = []
        self._size: int | None = None  # bytes of the file without the last row; None if there is no such file
        self._synced = -math.inf  # time.monotonic() at the last flush

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
        """Write the last row over the bracket that closes the list."""
        if is_stream(self.path):
            return  # it gets one document, at the end
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
                    raise OSError("the row was written in part")  # the next write would raise the reason
            except BaseException:
                file.truncate(start)
                file.seek(start)
                file.write(_END)  # needs no new disk space
                raise
            if time.monotonic() - self._synced >= _SYNCED:
                os.fsync(file.fileno())
                self._synced = time.monotonic()
        self._size = start + len(row)

    def _end(self, rows: list[Row]) -> None:
        # A resumed run has its history from a snapshot, so it is complete even if this file was lost.
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
        """Do nothing: no file stays open."""


def _document(rows: list[Row]) -> bytes:
    return b"[\n" + b",\n".join(map(_indented, rows)) + _END if rows else b"[]\n"


def _indented(row: Row) -> bytes:
    return ("  " + json.dumps(row, allow_nan=False)).encode()


def _parse(text: str) -> Any:
    """Return the rows of a file. A killed run may leave part of a row at its end, which is ignored.

    Raises:
        ValueError: it is neither JSON nor rows on lines.
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
    """Write ``training_history.json``: a list of ``{"epoch": 1, "train_loss": ..., "val_loss": ..., "lr": ...}``.

    The first row writes the whole file (a temporary file, flushed and renamed). Every further row is appended in place,
    so that it costs the same after 10,000 others, and leaves valid JSON. The file is flushed to the disk once a second
    and at the end of the run, which also compares it with the history. A number that is not finite becomes null.

    Args:
        path: of the file. A fresh run renames an existing one to ``training_history.1.json`` and so on. A pipe or
            device (``/dev/stdout``) gets the whole list at the end of the run.

    Example:
        >>> import tempfile
        >>> sink = history_json(Path(tempfile.mkdtemp(), "training_history.json"))
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": 0.5}, improved=True, stopping=None))
        >>> json.loads(sink.path.read_text())
        [{'epoch': 1, 'train_loss': 0.5}]
    """
    return History(Path(path))
