"""Files of rows by step: CSV and JSON lines.

A file belongs to one run. A fresh run renames an existing file. A resumed run keeps the rows up to its position, so
that every step is there exactly once.
"""

from __future__ import annotations

import csv as csv_format
import io
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

from ..events import EpochEnd, Event, FitStart, Logged
from ..files import local_path, parsed_json, read_regular, regular, write_bytes
from .json_history import Row
from .output import OutputFile, finite

_LARGEST = 1 << 27  # bytes of a file: a million rows
_log = logging.getLogger("purestep")


class RowFile(OutputFile):
    """Rows by step, appended as they come; see `csv` and `jsonl`.

    A row is ``{"kind": "step" or "epoch", "step": updates so far, "epoch": from 1, ...}``: kind "step" every
    ``log_every`` updates (means since the last such row, and speed), kind "epoch" for every row of the history.
    """

    wants = (FitStart, Logged, EpochEnd)

    @abstractmethod
    def _parse(self, text: str) -> Iterator[Row]:
        """Yield the complete rows of a text."""

    @abstractmethod
    def _text(self, rows: list[Row]) -> str:
        """Return the text of a file with these rows."""

    @abstractmethod
    def _line(self, row: Row) -> str | None:
        """Return one more row as text; None if the whole file must be rewritten."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            self._begin(event)
        elif isinstance(event, Logged):
            more = {"steps_per_second": event.steps_per_second, "wait_fraction": event.wait_fraction}
            head = {"kind": "step", "step": event.updates, "epoch": event.epoch + 1}
            self._add({**head, **event.values, **more})
        elif isinstance(event, EpochEnd):
            self._add({"kind": "epoch", "step": event.updates, **event.record})

    def _begin(self, event: FitStart) -> None:
        rows: list[Row] = []
        try:
            rows = self._read() if event.resumed else []
        except (OSError, ValueError) as error:
            _log.warning("%s: cannot be read, so it is renamed and a new file is begun: %s", self.path, error)
        if not rows:
            self.set_aside()  # of another run, not written by this sink, or not readable
        # If the run was killed between a row of the history and its snapshot, the row comes again. The step does not
        # identify it: two rows have the same step if the window between them was dropped.
        epochs = count(1)
        known = max(map(len, event.history.values()), default=0)
        kept = [row for row in rows if row["step"] <= event.updates]
        self._write([row for row in kept if row["kind"] != "epoch" or next(epochs) <= known])

    def _add(self, row: Row) -> None:
        line = self._line(row)
        if line is None:
            self._write([*self._read(), row])
            return
        data = line.encode()
        with open(self.path, "ab", buffering=0, opener=regular) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError("the row was written in part")  # the next row would raise the reason
            except BaseException:
                file.truncate(size)
                raise

    def _read(self) -> list[Row]:
        return _rows(self.path, self._parse) if self.path.exists() else []

    def _write(self, rows: list[Row]) -> None:
        write_bytes(self.path, self._text(rows).encode())


class _JsonLines(RowFile):
    def _parse(self, text: str) -> Iterator[Row]:
        return _jsonl_rows(text)

    def _text(self, rows: list[Row]) -> str:
        return "".join(map(self._line, rows))

    def _line(self, row: Row) -> str:
        return json.dumps({key: finite(value) for key, value in row.items()}, allow_nan=False) + "\n"


class _Csv(RowFile):
    _columns: tuple[str, ...] = ()

    def _parse(self, text: str) -> Iterator[Row]:
        return _csv_rows(text)

    def _text(self, rows: list[Row]) -> str:
        self._columns = tuple(dict.fromkeys(["kind", "step", "epoch", *(key for row in rows for key in row)]))
        return _joined(list(self._columns)) + "".join(map(self._cells, rows))

    def _line(self, row: Row) -> str | None:
        return self._cells(row) if set(row) <= set(self._columns) else None

    def _cells(self, row: Row) -> str:
        return _joined(["" if row.get(key) is None else row[key] for key in self._columns])


def stored_rows(path: Path) -> list[Row] | None:
    """Return the rows of a file of `csv` or `jsonl`, which may be written meanwhile; None for a file of another kind.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    parse = READERS.get(path.suffix)
    return None if parse is None else _rows(path, parse)


def _rows(path: Path, parse: Callable[[str], Iterator[Row]]) -> list[Row]:
    text = read_regular(path, _LARGEST).decode(errors="replace")
    try:
        return [row for row in parse(text) if type(row.get("step")) is int and isinstance(row.get("kind"), str)]
    except csv_format.Error as error:
        raise ValueError(f"no CSV: {error}") from error


def _jsonl_rows(text: str) -> Iterator[Row]:
    for line in io.StringIO(text):
        try:
            row = parsed_json(line)
        except ValueError:
            continue  # part of a row: it is being written, or the run was killed
        if isinstance(row, dict):
            yield cast(Row, row)


def _csv_rows(text: str) -> Iterator[Row]:
    for row in csv_format.DictReader(io.StringIO(text)):
        if None not in row and None not in row.values():  # else it is part of a row
            yield {name: _value(cell) for name, cell in row.items()}


def _value(cell: str) -> Any:
    """The value of a cell: a number if it is one, None if it is empty."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell or None


READERS: dict[str, Callable[[str], Iterator[Row]]] = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
"""Suffix -> the rows of a file's text. A resumed run and the report choose by it."""


def _joined(cells: list[Any]) -> str:
    out = io.StringIO()
    csv_format.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def csv(path: Path | str) -> RowFile:
    """Write rows by step as CSV, with an empty cell for a missing value. A new column rewrites the file.

    Example:
        >>> import tempfile
        >>> sink = csv(Path(tempfile.mkdtemp(), "metrics.csv"))
        >>> sink(Logged(0, 50, {"train_loss": 0.5}, steps_per_second=8.0, wait_fraction=0.25))
        >>> sink.close()
        >>> print(sink.path.read_text(), end="")
        kind,step,epoch,train_loss,steps_per_second,wait_fraction
        step,50,1,0.5,8.0,0.25

    There are two kinds of rows, by ``row["kind"]``: see `RowFile`.

    Args:
        path: of a regular file. A fresh run renames an existing one (``metrics.1.csv``).

    Raises:
        WriteFailed: the path is a directory, a pipe, a socket or a device.
    """
    return _Csv(local_path("sinks.csv", path=path))


def jsonl(path: Path | str) -> RowFile:
    """Write rows by step, one JSON object per line. A number that is not finite becomes null.

    Example:
        >>> import math, tempfile
        >>> sink = jsonl(Path(tempfile.mkdtemp(), "metrics.jsonl"))
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": math.nan}, improved=True, stopping=None))
        >>> sink.close()
        >>> print(sink.path.read_text(), end="")
        {"kind": "epoch", "step": 10, "epoch": 1, "train_loss": null}

    There are two kinds of rows, by ``row["kind"]``: see `RowFile`.

    Args:
        path: of a regular file. A fresh run renames an existing one (``metrics.1.jsonl``).

    Raises:
        WriteFailed: the path is a directory, a pipe, a socket or a device.
    """
    return _JsonLines(local_path("sinks.jsonl", path=path))
