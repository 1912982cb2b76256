"""The history of a run as one JSON list."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from ..events import EpochEnd, Event, FitEnd, FitStart
from ..files import local_path, read_json, write_bytes
from .output import OutputFile, finite

Row: TypeAlias = dict[str, Any]


class History(OutputFile):
    """One JSON list with a row per epoch; see `history_json`."""

    wants = (FitStart, EpochEnd, FitEnd)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines: list[str] = []  # a row each, as JSON

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            self._lines = _lines(event.history)
            if not event.resumed or not self.path.is_file() or stored_history(self.path) is None:
                self.set_aside()
        elif isinstance(event, EpochEnd):
            self._lines.append(_line(event.record))
            self._write()
        elif isinstance(event, FitEnd):
            self._lines = _lines(event.history)
            self._write()

    def _write(self) -> None:
        text = "[\n" + ",\n".join(self._lines) + "\n]\n" if self._lines else "[]\n"
        write_bytes(self.path, text.encode())


def _line(row: Mapping[str, Any]) -> str:
    return "  " + json.dumps({key: finite(value) for key, value in row.items()}, allow_nan=False)


def _lines(history: Mapping[str, list[Any]]) -> list[str]:
    return [_line(row) for row in rows_of(history)]


def rows_of(history: Mapping[str, list[Any]]) -> list[Row]:
    """Return the rows of the columns of a history."""
    count = max(map(len, history.values()), default=0)
    return [{name: column[at] for name, column in history.items() if at < len(column)} for at in range(count)]


def stored_history(path: Path) -> list[Row] | None:
    """Return the rows of a file of `history_json`; None if it is no list of rows.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        found = read_json(path)
    except ValueError:
        return None
    is_history = isinstance(found, list) and all(isinstance(row, dict) for row in cast("list[Any]", found))
    return cast("list[Row]", found) if is_history else None


def history_json(path: Path | str) -> History:
    """Write ``training_history.json``: a list of ``{"epoch": 1, "train_loss": ..., "val_loss": ..., "lr": ...}``.

    Example:
        >>> import tempfile
        >>> sink = history_json(Path(tempfile.mkdtemp(), "training_history.json"))
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": 0.5}, improved=True, stopping=None))
        >>> json.loads(sink.path.read_text())
        [{'epoch': 1, 'train_loss': 0.5}]

    Every row writes the whole file, in the sink's thread: a temporary file, flushed and renamed, so that a reader finds
    valid JSON at any time. A resumed run begins with the rows of its snapshot. A number that is not finite is null.

    Args:
        path: of a regular file. A fresh run renames an existing one to ``training_history.1.json`` and so on; a resumed
            run does so with a file that is no list of rows.

    Raises:
        WriteFailed: the path is a directory, a pipe, a socket or a device.
    """
    return History(local_path("sinks.history_json", path=path))
