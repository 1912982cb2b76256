"""The history of a run in a snapshot: one float64 array, whose columns the manifest names.

A value that is missing is NaN in the array, and None in a column.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from ..errors import Corrupt, SnapshotError
from ..files import LIMIT, read_regular

NAME = "history.npy"
_LARGEST = 1 << 28  # bytes of the array: 33 million numbers

Columns = dict[str, Literal["int", "float"]]


def columns(history: Mapping[str, Any] | None) -> Columns | None:
    """The names of the columns, and whether all values of each one are whole numbers; None without columns.

    Raises:
        SnapshotError: a column is no list of numbers and None, or not as long as the others, or has a whole number
            above 2**53, which a float64 rounds.
    """
    if not history:
        return None
    found: Columns = {}
    for name, column in history.items():
        kinds = set(map(type, column)) - {type(None)}
        are_numbers = all(issubclass(kind, int | float) and kind is not bool for kind in kinds)
        is_exact = int not in kinds or all(type(value) is not int or abs(value) <= 1 << 53 for value in column)
        if not (are_numbers and is_exact) or len(column) != len(next(iter(history.values()))):
            hint = "pass columns of one length, of floats, ints up to 2**53 and None"
            raise SnapshotError("the column must hold numbers", where=f"history/{name}", hint=hint)
        found[name] = "int" if kinds == {int} else "float"
    return found


def write(folder: Path, history: Mapping[str, Any]) -> None:
    """Write the columns as an array [rows, columns]."""
    np.save(folder / NAME, np.array(list(history.values()), np.float64).T, allow_pickle=False)  # None is NaN there


def read(folder: Path, columns: Columns) -> dict[str, list[Any]]:
    """The columns by name.

    Raises:
        Corrupt: the file is missing or damaged, or has another number of columns.
    """
    path = folder / NAME
    try:
        data = read_regular(path, _LARGEST)
        file = io.BytesIO(data)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not an array of this format")
        shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(file)
        values = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if is_transposed else "C")
    except (OSError, ValueError, MemoryError, EOFError, RecursionError) as error:
        raise Corrupt(f"the file cannot be read: {error}"[:300], where=str(path)) from error
    if values.dtype != np.float64 or values.ndim != 2 or values.shape[1] != len(columns):
        raise Corrupt(f"{values.dtype} {list(values.shape)} for {len(columns)} columns", where=str(path))
    kinds = [int if kind == "int" else float for kind in columns.values()]
    return {
        name: [None if value != value else kind(value) for value in column]
        for name, kind, column in zip(columns, kinds, values.T.tolist(), strict=True)
    }


def of_old_format(root: Path, loop: Any, earlier: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """The history in a loop's state of formats 1 and 2, in which `fit` stored it there.

    A manifest contained the last rows. Rows before them were in a file of the directory, one JSON object per line.

    Raises:
        Corrupt: the file is missing or damaged.
    """
    record = loop.get("record") if isinstance(loop, dict) else None
    last = cast("dict[str, Any]", record).get("history") if isinstance(record, dict) else None
    if not isinstance(last, dict):
        return None
    found = cast("dict[str, list[Any]]", last)
    if not all(type(column) is list for column in found.values()):
        raise Corrupt("the columns of the history must be lists", where=str(root))
    entry = earlier.get("loop/record/history")
    if entry is None:
        return found
    try:
        path = root / f"rows-{int(entry['file'].removeprefix('rows-').removesuffix('.jsonl'))}.jsonl"
        data = read_regular(path, LIMIT)[: int(entry["size"])]
        if zlib.crc32(data) != entry["crc32"]:
            raise ValueError(f"{path.name} is not what was written (its checksum differs)")
        rows = [json.loads(line) for line in data.splitlines()]
        return {name: [*(row.get(name) for row in rows), *column] for name, column in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"earlier rows of the history: {error}"[:300], where=str(root)) from error
