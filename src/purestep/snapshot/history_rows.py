"""A history that grows by one row at a time, and the file with its earlier rows.

A manifest contains the last rows of a history. The rows before them are in ``rows-1.jsonl`` in the directory of the
snapshots, one JSON object per line. Every save appends only the new rows, and the manifest stores how many bytes of the
file belong to the snapshot, and their digest. So a save costs the same after 20,000 rows. A history of less than 32
rows has no such file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..errors import Corrupt
from ..files import sync_directory
from ..state import is_count
from . import digest

BLOCK = 16  # rows; a manifest contains at least this number, and less than twice this number
_NAME = re.compile(r"rows-(\d{1,9})\.jsonl")


class Table(Mapping[str, list[Any]]):
    """An immutable table of JSON values, as a mapping from a column's name to its list.

    `with_row` takes constant time: the longer table shares the rows of the shorter one.

    Example:
        >>> short = Table({"epoch": [1], "loss": [0.5]})
        >>> long = short.with_row({"epoch": 2, "accuracy": 0.9})
        >>> short, long
        ({'epoch': [1], 'loss': [0.5]}, {'epoch': [1, 2], 'loss': [0.5, None], 'accuracy': [None, 0.9]})
        >>> long.last("loss", 1), long.count
        ([None], 2)
    """

    __slots__ = ("_names", "_rows", "count")

    def __init__(self, columns: Mapping[str, list[Any]] | None = None) -> None:
        columns = columns or {}
        self.count: int = max(map(len, columns.values()), default=0)  # rows
        self._names: dict[str, None] = dict.fromkeys(columns)
        self._rows: list[Mapping[str, Any]] = [
            {name: column[index] for name, column in columns.items() if index < len(column)}
            for index in range(self.count)
        ]

    def with_row(self, row: Mapping[str, Any]) -> Table:
        """The table with one more row. A missing value is None."""
        longer = Table()
        # If two tables are made from one, only the first can append to its list.
        is_last = self.count and len(self._rows) == self.count
        longer._rows = self._rows if is_last else self._rows[: self.count]
        longer._rows.append(dict(row))
        longer._names = self._names if row.keys() <= self._names.keys() else self._names | dict.fromkeys(row)
        longer.count = self.count + 1
        return longer

    def last(self, name: str, count: int) -> list[Any]:
        """The last ``count`` entries of a column, or an empty list if the column does not exist."""
        rows = self._rows[max(self.count - count, 0) : self.count]
        return [row.get(name) for row in rows] if name in self._names else []

    def rows(self, start: int, stop: int) -> list[Mapping[str, Any]]:
        """The rows from ``start`` to ``stop``; missing values have no key."""
        return self._rows[start : min(stop, self.count)]

    def columns(self, start: int) -> dict[str, list[Any]]:
        """The columns from row ``start`` on."""
        rows = self._rows[start : self.count]
        return {name: [row.get(name) for row in rows] for name in self._names}

    def grew_from(self, rows: list[Mapping[str, Any]] | None) -> bool:
        """True if the table stores its rows in this list."""
        return self._rows is rows

    @property
    def memory(self) -> list[Mapping[str, Any]]:
        """The list with the rows of this table and of longer ones."""
        return self._rows

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._names:
            raise KeyError(name)
        return [row.get(name) for row in self._rows[: self.count]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return repr(dict(self))


class Earlier(NamedTuple):
    """The earlier rows of a table: the first ``size`` bytes of a file."""

    file: str  # name, in the directory of the snapshots
    rows: int
    size: int  # bytes from the start of the file
    crc32: int  # of these bytes

    @classmethod
    def of(cls, entry: Any) -> Earlier:
        """Parse an entry of a manifest.

        Raises:
            ValueError, TypeError, KeyError: the entry is invalid.
        """
        found = cls(entry["file"], entry["rows"], entry["size"], entry["crc32"])
        if not _NAME.fullmatch(found.file) or not all(map(is_count, found[1:])):
            raise ValueError(f"{entry!r} where a file of rows was expected")
        return found


class RowsFile:
    """Writes the earlier rows of a growing table. Only one thread may use it."""

    def __init__(self) -> None:
        self._known: list[Mapping[str, Any]] | None = None
        self._written = Earlier("", 0, 0, 0)

    def write(self, root: Path, table: Table) -> Earlier | None:
        """Write all rows but the last ones to the disk and flush; None if there are no earlier rows.

        Raises:
            Corrupt: the file reads back other bytes.
            OSError: the file cannot be written.
        """
        stop = (table.count // BLOCK - 1) * BLOCK
        if stop <= 0:
            return None
        written = self._written
        if not table.grew_from(self._known) or written.rows > stop or not _is_whole(root, written):
            written = Earlier(_free(root), 0, 0, 0)
        data = b"".join(json.dumps(row).encode() + b"\n" for row in table.rows(written.rows, stop))
        with open(root / written.file, "r+b" if written.size else "w+b") as file:
            file.seek(written.size)
            file.truncate()  # drop the bytes of a failed save
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(written.size)
            if file.read() != data:
                raise Corrupt("reads back as damaged", where=file.name, hint="check the disk")
        if not written.size:
            sync_directory(root)
        self._known = table.memory
        size = written.size + len(data)
        self._written = Earlier(written.file, stop, size, digest.of_bytes(data, written.crc32))
        return self._written


def _is_whole(root: Path, written: Earlier) -> bool:
    try:
        return bool(written.file) and os.stat(root / written.file).st_size >= written.size
    except OSError:
        return False


def _numbers(root: Path) -> dict[int, str]:
    found = ((_NAME.fullmatch(name), name) for name in os.listdir(root))
    return {int(match[1]): name for match, name in found if match}


def _free(root: Path) -> str:
    return f"rows-{max(_numbers(root), default=0) + 1}.jsonl"


def unused(root: Path, used: set[str]) -> list[Path]:
    """The files of rows that no snapshot uses."""
    return [root / name for name in _numbers(root).values() if name not in used]


def read(root: Path, earlier: Earlier) -> list[dict[str, Any]]:
    """Read the earlier rows.

    Raises:
        Corrupt: the file is missing or damaged.
    """
    path = root / earlier.file
    try:
        if path.is_symlink():
            raise ValueError("a symbolic link, which is not followed")
        with path.open("rb") as file:
            data = file.read(earlier.size)
        if len(data) != earlier.size or digest.of_bytes(data) != earlier.crc32:
            raise ValueError("not what was written (its digest differs)")
        rows = [json.loads(line) for line in data.splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise Corrupt(str(error), where=str(path)) from error
    if len(rows) != earlier.rows or not all(isinstance(row, dict) for row in rows):
        raise Corrupt(f"does not hold {earlier.rows} rows", where=str(path))
    return cast("list[dict[str, Any]]", rows)


def joined(rows: list[dict[str, Any]], columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns of the earlier rows followed by the later columns, which have every name.

    Example:
        >>> joined([{"epoch": 1}], {"epoch": [2], "loss": [0.5]})
        {'epoch': [1, 2], 'loss': [None, 0.5]}
    """
    return {name: [*(row.get(name) for row in rows), *column] for name, column in columns.items()}


def placed(loop: Any, keys: list[str], columns: Mapping[str, list[Any]]) -> Any:
    """A copy of a JSON value with these columns at a path.

    Example:
        >>> placed({"record": {"history": None, "epoch": 1}}, ["record", "history"], {"loss": [0.5]})
        {'record': {'history': {'loss': [0.5]}, 'epoch': 1}}
    """
    if not keys:
        return dict(columns)
    key: Any = int(keys[0]) if isinstance(loop, list) else keys[0]
    made = cast("Any", loop).copy()
    made[key] = placed(made[key], keys[1:], columns)
    return made


def found(loop: Any, keys: list[str]) -> Any:
    """The value at a path of a JSON value."""
    for key in keys:
        loop = loop[int(key) if isinstance(loop, list) else key]
    return loop
