"""Files of rows by step: CSV and JSON lines.

A file belongs to one run. A fresh run renames an existing file. A resumed run keeps the rows up to its position, so
that every step is there exactly once. A pipe or device gets every row once.
"""

from __future__ import annotations

import csv as csv_format
import io
import json
from abc import ABC, abstractmethod
from itertools import count
from pathlib import Path
from typing import Any, TextIO, cast

from ..events import EpochEnd, Event, FitEnd, FitStart, Logged
from ..files import write_bytes
from .json_history import Row
from .output import finite, is_stream, open_stream, set_aside


class Rows(ABC):
    """Rows by step, appended as they come; see `csv` and `jsonl`.

    A row is ``{"kind": "step" or "epoch", "step": updates so far, "epoch": from 1, ...}``: kind "step" every
    ``log_every`` updates (means since the last such row, and speed), kind "epoch" for every row of the history. Rows
    that a run went back behind are removed.
    """

    writes_files = True
    wants = (FitStart, Logged, EpochEnd, FitEnd)

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # a callback may call os.chdir
        self._file: TextIO | None = None
        self._last: dict[str, int] = {}  # kind -> step of its last row in this run
        self._whole = True  # False after a failed write, which may leave part of a row

    @abstractmethod
    def _parse(self, text: str) -> list[Row]:
        """Return the complete rows of a file."""

    @abstractmethod
    def _text(self, rows: list[Row]) -> str:
        """Return the text of a file with these rows."""

    @abstractmethod
    def _line(self, row: Row) -> str | None:
        """Return one more row as text; None if the whole file must be rewritten."""

    def _streamed(self, row: Row) -> str:
        """Return one more row as text for a pipe, which cannot be rewritten."""
        return self._line(row) or self._text([row])

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            self._begin(event)
        elif isinstance(event, Logged):
            more = {"steps_per_second": event.steps_per_second, "wait_fraction": event.wait_fraction}
            head = {"kind": "step", "step": event.updates, "epoch": event.epoch + 1}
            self._add({**head, **event.values, **more})
        elif isinstance(event, EpochEnd):
            self._add({"kind": "epoch", "step": event.updates, **event.record})
        elif isinstance(event, FitEnd):
            self.close()

    def close(self) -> None:
        """Close the file; the next row opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _begin(self, event: FitStart) -> None:
        self.close()
        self._last = {}
        if is_stream(self.path):
            return
        if not event.resumed:
            set_aside(self.path)
            self._write([])
            return
        rows = self._read()
        if not rows:
            set_aside(self.path)  # not written by this sink
        # If the run was killed between a row of the history and its snapshot, the row comes again. The step does not
        # identify it: two rows have the same step if the window between them was dropped.
        epochs = count(1)
        known = max(map(len, event.history.values()), default=0)
        kept = [row for row in rows if row["step"] <= event.updates]
        self._write([row for row in kept if row["kind"] != "epoch" or next(epochs) <= known])

    def _add(self, row: Row) -> None:
        kind, step = row["kind"], row["step"]
        if is_stream(self.path):
            self._append(self._streamed(row))
            return
        last = self._last.get(kind, -1)
        # The run went back, so later rows are void. Two rows of the history may have the same step, two lines may not.
        if step < last or (step == last and kind == "step"):
            self._write([old for old in self._read() if old["step"] < step or (step == last and old["kind"] != kind)])
        line = self._line(row) if self._whole else None
        if line is None:
            self._write([*self._read(), row])
        else:
            self._append(line)
        self._last[kind] = step

    def _append(self, line: str) -> None:
        self._whole = False
        if self._file is None:
            self._file = open_stream(self.path) if is_stream(self.path) else self._opened()
        self._file.write(line)
        self._file.flush()
        self._whole = True

    def _opened(self) -> TextIO:
        return self.path.open("a", encoding="utf-8", newline="")

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        rows = self._parse(self.path.read_text(encoding="utf-8", errors="replace"))
        return [row for row in rows if isinstance(row.get("step"), int) and isinstance(row.get("kind"), str)]

    def _write(self, rows: list[Row]) -> None:
        try:
            self.close()
        finally:
            write_bytes(self.path, self._text(rows).encode())
        self._whole = True


class _JsonLines(Rows):
    def _parse(self, text: str) -> list[Row]:
        rows: list[Row] = []
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # part of a row, from a killed run
            if isinstance(row, dict):
                rows.append(cast(Row, row))
        return rows

    def _text(self, rows: list[Row]) -> str:
        return "".join(map(self._line, rows))

    def _line(self, row: Row) -> str:
        return json.dumps({key: finite(value) for key, value in row.items()}, allow_nan=False) + "\n"


class _Csv(Rows):
    _columns: tuple[str, ...] = ()

    def _parse(self, text: str) -> list[Row]:
        rows: list[Row] = []
        for row in csv_format.DictReader(io.StringIO(text)):
            whole = None not in row and None not in row.values()
            if whole and all(row.get(key, "").isdecimal() for key in ("step", "epoch")):
                rows.append({**row, "step": int(row["step"]), "epoch": int(row["epoch"])})
        return rows

    def _text(self, rows: list[Row]) -> str:
        self._columns = tuple(dict.fromkeys(["kind", "step", "epoch", *(key for row in rows for key in row)]))
        return self._joined(list(self._columns)) + "".join(self._cells(row) for row in rows)

    def _line(self, row: Row) -> str | None:
        return self._cells(row) if set(row) <= set(self._columns) else None

    def _streamed(self, row: Row) -> str:
        line = self._line(row)
        if line is not None:
            return line
        self._columns = tuple(dict.fromkeys(["kind", "step", "epoch", *self._columns, *row]))
        return self._joined(list(self._columns)) + self._cells(row)

    def _cells(self, row: Row) -> str:
        return self._joined(["" if row.get(key) is None else row[key] for key in self._columns])

    def _joined(self, cells: list[Any]) -> str:
        out = io.StringIO()
        csv_format.writer(out, lineterminator="\n").writerow(cells)
        return out.getvalue()


def csv(path: Path | str) -> Rows:
    """Write rows by step as CSV, with an empty cell for a missing value. A new column rewrites the file.

    There are two kinds of rows, by ``row["kind"]``: see `Rows`.

    Args:
        path: of the file. A fresh run renames an existing one (``metrics.1.csv``). To a pipe or device
            (``/dev/stdout``), a new column writes a new line of names.

    Example:
        >>> import tempfile
        >>> sink = csv(Path(tempfile.mkdtemp(), "metrics.csv"))
        >>> sink(Logged(0, 50, {"train_loss": 0.5}, steps_per_second=8.0, wait_fraction=0.25))
        >>> sink.close()
        >>> print(sink.path.read_text(), end="")
        kind,step,epoch,train_loss,steps_per_second,wait_fraction
        step,50,1,0.5,8.0,0.25
    """
    return _Csv(Path(path))


def jsonl(path: Path | str) -> Rows:
    """Write rows by step, one JSON object per line. A number that is not finite becomes null.

    There are two kinds of rows, by ``row["kind"]``: see `Rows`.

    Args:
        path: of the file, or of a pipe or device (``/dev/stdout``). A fresh run renames an existing file
            (``metrics.1.jsonl``).

    Example:
        >>> import math, tempfile
        >>> sink = jsonl(Path(tempfile.mkdtemp(), "metrics.jsonl"))
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": math.nan}, improved=True, stopping=None))
        >>> sink.close()
        >>> print(sink.path.read_text(), end="")
        {"kind": "epoch", "step": 10, "epoch": 1, "train_loss": null}
    """
    return _JsonLines(Path(path))
