"""The manifest of one snapshot: its contents, the checksums of its files, and the comparison with a template.

``manifest.json`` lists every leaf, and every other file with its CRC-32, and contains everything that is no tensor:
Python leaves, the loop's state, metrics and notes. ``manifest.sha256`` contains its digest in the format of
``sha256sum -c``. A directory without both files is no snapshot.

The values are in files of orbax; if several processes wrote them, in folders ``part-0``, ``part-1``, ..., and the
manifest lists the rows of each leaf that each part contains. Leaves that are not cut are in ``part-0``. A history is in
``history.npy``, which is read without orbax.

This is format 3. Format 2 was that of several processes, format 1 that of one: both had a checksum for each leaf in
place of the files with values, and the history in the loop's state.
"""

# pyright: reportUnnecessaryIsInstance=false
# Users may pass values of other types than the annotations.

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from ..errors import Corrupt, Mismatch, SnapshotError, first_line
from ..files import LIMIT, parsed_json, read_regular, regular
from ..state import nearest
from . import history as history_
from . import staging

FORMAT = 3
NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"
_DEEP = 100  # levels of JSON
# errors of the process, not of the file
_OWN_ERRORS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)
_SMALL = 1 << 10  # bytes of a leaf, which orbax may store compressed, in a node of its index
_BLOCK = 1 << 22  # bytes of a file to read at a time

Count = Annotated[int, Field(strict=True, ge=0)]


class Piece(NamedTuple):
    """Rows ``[first, end)`` of a leaf, which one part of the snapshot contains. A scalar counts as one row."""

    part: Count
    first: Count
    end: Count
    crc32: int | None = None  # of the bytes in C order; only in format 2


class Leaf(NamedTuple):
    """One leaf of the stored tree."""

    dtype: str  # "float32", "bfloat16", ... or "python.int", ...
    shape: tuple[Count, ...]  # whole
    value: Any = None  # of a Python leaf
    pieces: tuple[Piece, ...] = ()  # in the order of rows; empty if one array contains the leaf
    crc32: int | None = None  # of the bytes in C order; only in formats 1 and 2

    def text(self) -> str:
        """``float32 [3, 2]``, or ``Python int``."""
        return f"Python {self.dtype[7:]}" if self.is_python else f"{self.dtype} {list(self.shape)}"

    @property
    def is_python(self) -> bool:
        """True for a Python number or text."""
        return self.dtype.startswith("python.")

    @property
    def is_stored(self) -> bool:
        """True if orbax stores its values."""
        return not self.is_python and 0 not in self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the values of a tensor."""
        return staging.DTYPES[self.dtype].itemsize * math.prod(self.shape)

    def stored_shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape of the array that contains a piece."""
        return (piece.end - piece.first, *self.shape[1:]) if self.pieces else self.shape

    @property
    def rows(self) -> int:
        """The number of rows. A scalar counts as one."""
        return self.shape[0] if self.shape else 1


class File(NamedTuple):
    """One file of a step."""

    size: Count  # bytes
    crc32: int | None  # None for files with values of formats 1 and 2


class Manifest(BaseModel, frozen=True):
    """The contents of one snapshot."""

    format: Count
    step: Count
    leaves: dict[str, Leaf]
    loop: Any
    history: history_.Columns | None
    metrics: dict[str, float]
    meta: Any
    monitor: tuple[str, Literal["min", "max"]] | None  # the metric that decided which snapshot is best
    environment: dict[str, Any]  # versions, thread count, device
    files: dict[str, File] = {}  # by path relative to the step's directory
    parts: Annotated[int, Field(strict=True, ge=1)] = 1  # folders with values
    earlier: dict[str, Any] = {}  # rows of the history in a file of the directory; only in formats 1 and 2

    def stored(self, part: int) -> dict[str, Piece]:
        """The rows of each leaf that a part contains, by path."""
        found: dict[str, Piece] = {}
        for path, leaf in self.leaves.items():
            if leaf.is_stored and not leaf.pieces and part == 0:
                found[path] = Piece(0, 0, leaf.rows, leaf.crc32)
            for piece in leaf.pieces:
                if piece.part == part:
                    found[path] = piece
        return found

    @model_validator(mode="after")
    def _check_leaves(self) -> Manifest:
        for path, leaf in self.leaves.items():
            if leaf.is_python:
                if type(leaf.value) is not staging.SCALARS.get(leaf.dtype[7:]):
                    raise ValueError(f"{path}: {leaf.value!r} as {leaf.text()}")
            elif leaf.dtype not in staging.DTYPES:
                raise ValueError(f"{path}: dtype {leaf.dtype!r}")
            row = 0  # the pieces contain every row once
            for piece in leaf.pieces:
                if piece.first != row or piece.end <= row or piece.part >= self.parts:
                    raise ValueError(f"{path}: {leaf.text()} in the pieces {leaf.pieces}")
                row = piece.end
            if leaf.pieces and row != leaf.rows:
                raise ValueError(f"{path}: {leaf.text()} in the pieces {leaf.pieces}")
        return self


# --- leaves -------------------------------------------------------------------------------------------------------


def describe(kinds: Mapping[str, staging.Kind]) -> dict[str, Leaf]:
    """A `Leaf` for each leaf of a tree."""
    return {
        path: Leaf(staging.NAMES[kind[0]], tuple(kind[1]))
        if isinstance(kind, tuple)
        else Leaf(f"python.{type(kind).__name__}", (), value=kind)
        for path, kind in kinds.items()
    }


_WHOLE = (
    "pass a template (in fit, a state) like the saved one; for its weights alone: "
    'ps.Snapshots(directory).restore(template, only="params")'
)
_SHOWN = 10  # leaves of a Mismatch
_PART = "pass a template whose leaves fit the saved ones, or only= prefixes of leaves that fit"


def compare(stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], *, where: str, is_part: bool) -> None:
    """Compare the stored leaves with those of a template; ``is_part``: the caller has chosen some of them.

    Raises:
        Mismatch: leaves differ; the message has a line for each of the first ten (stored, expected, the nearest name),
            and the fields of the others.
    """
    missing = [path for path in wanted if path not in stored]
    extra = [path for path in stored if path not in wanted]
    lines = [
        f"{path}: {stored[path].text()} in the snapshot, {leaf.text()} in the template"
        for path, leaf in wanted.items()
        if path in stored and (stored[path].dtype, stored[path].shape) != (leaf.dtype, leaf.shape)
    ]
    lines += [f"{path}: {wanted[path].text()} in the template only{near}" for path, near in _nearest(missing, extra)]
    lines += [f"{path}: {stored[path].text()} in the snapshot only{near}" for path, near in _nearest(extra, missing)]
    if lines:
        count = f"{len(lines)} leaves differ" if len(lines) > 1 else "1 leaf differs"
        tops = dict.fromkeys(line.partition(":")[0].split("/")[0] for line in lines[_SHOWN:])
        more = [f"and {len(lines) - _SHOWN} more, of {', '.join(tops)}"] if tops else []
        text = "\n  ".join([f"{count} from the template", *lines[:_SHOWN], *more])
        raise Mismatch(text, where=where, hint=_PART if is_part else _WHOLE)


def _nearest(names: list[str], candidates: list[str]) -> list[tuple[str, str]]:
    def near(name: str) -> str:
        found = nearest(name, candidates)
        return f" (nearest name: {found})" if found else ""

    # Comparing thousands of names with thousands takes minutes; 20 lines show the pattern.
    return [(name, near(name) if index < 20 else "") for index, name in enumerate(names)]


def select(paths: Collection[str], prefix: str | None, *, where: str) -> set[str]:
    """The paths below a prefix; all paths for None.

    A prefix ends at a "/" or a "." of the path: ``params/layers.1`` selects ``params/layers.1.weight`` but not
    ``params/layers.10.weight``. It may end with a slash.

    Raises:
        Mismatch: no leaf is below the prefix.
    """
    if prefix is None:
        return set(paths)
    name = prefix.removesuffix("/")
    below = {path for path in paths if path == name or path.startswith((f"{name}/", f"{name}."))}
    if not below:
        tops = ", ".join(sorted({path.split("/")[0] for path in paths}))
        raise Mismatch(f"no leaf is under {prefix!r}", where=where, hint=f"pass only= some of: {tops}")
    return below


def as_json(value: Any, *, where: str) -> Any:
    """Copy ``value`` as JSON values: dict with text keys, list, text, numbers, bool, None.

    Tuples become lists. NaN and infinities stay.

    Raises:
        SnapshotError: JSON would lose or change an entry; the message names it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if where.count("/") > _DEEP:
        raise SnapshotError(
            f"more than {_DEEP} levels", where=where[:40], hint="pass no dict or list that contains itself"
        )
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        for key in items:
            if not isinstance(key, str):
                raise SnapshotError(f"the key {key!r} must be text", where=where, hint=f"{str(key)!r}")
        return {key: as_json(entry, where=f"{where}/{key}") for key, entry in items.items()}
    if isinstance(value, list | tuple):
        entries = cast("list[Any]", value)
        return [as_json(entry, where=f"{where}/{index}") for index, entry in enumerate(entries)]
    hint = "pass float(x), int(x), str(x) or a list of these; put tensors into the state"
    raise SnapshotError(f"a {type(value).__qualname__} cannot be stored in JSON", where=where, hint=hint)


def as_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert numbers, 0-d tensors and `Mean`s to floats.

    Raises:
        SnapshotError: a value is no number.
    """
    found: dict[str, float] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        text = f"a {type(metrics).__qualname__} is not a mapping"
        raise SnapshotError(text, where="metrics", hint='metrics={"val_loss": 0.5}')
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            text = f"{name} is a {type(value).__qualname__}, not a number"
            raise SnapshotError(text, where="metrics", hint=f"metrics={{{name!r}: float(value)}}") from error
    return found


# --- the file -----------------------------------------------------------------------------------------------------


def write(folder: Path, manifest: Manifest) -> None:
    """Write both files into a directory that has no final name yet. The caller flushes it."""
    record = dict(manifest) | {
        "library": "purestep",
        "leaves": {path: _leaf_record(leaf) for path, leaf in manifest.leaves.items()},
        "files": {name: file._asdict() for name, file in manifest.files.items()},
    }
    del record["earlier"]
    data = (json.dumps(record, indent=1) + "\n").encode()
    if len(data) > LIMIT:
        raise ValueError(f"the manifest would have {len(data):,} bytes, more than the {LIMIT:,} that are read")
    for name, text in ((NAME, data), (DIGEST_NAME, f"{hashlib.sha256(data).hexdigest()}  {NAME}\n".encode())):
        with open(folder / name, "xb", opener=regular) as file:
            file.write(text)


def _leaf_record(leaf: Leaf) -> dict[str, Any]:
    record: dict[str, Any] = {"dtype": leaf.dtype, "shape": leaf.shape}
    if leaf.is_python:
        record["value"] = leaf.value
    if leaf.pieces:
        record["pieces"] = [piece[:3] for piece in leaf.pieces]
    return record


def inventory(folder: Path, *, below: str = "") -> dict[str, File]:
    """Every file of a step with size and checksum, except the two files of the manifest.

    Args:
        folder: the directory of the step.
        below: only the files below this directory of it.

    Raises:
        Corrupt: the folder contains a symbolic link, a pipe or a device.
    """
    return {name: File(size, _crc32(folder / name)) for name, size in _sizes(folder, below).items()}


def _crc32(path: Path) -> int:
    found = 0
    with open(path, "rb", opener=regular) as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def _sizes(folder: Path, below: str = "") -> dict[str, int]:
    """The size in bytes of every file below a directory of ``folder``, by path relative to ``folder``.

    Raises:
        Corrupt: the folder contains a symbolic link, a pipe or a device.
    """
    found: dict[str, int] = {}
    waiting = [folder / below]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise Corrupt(
                        "the path is neither a file nor a directory; links are not followed", where=entry.path
                    )
                else:
                    found[os.path.relpath(entry.path, folder)] = entry.stat(follow_symlinks=False).st_size
    return {name: size for name, size in sorted(found.items()) if name not in (NAME, DIGEST_NAME)}


def read(folder: Path) -> Manifest:
    """Read the manifest of a step's directory; check its digest and the presence and size of every file.

    Raises:
        Corrupt: a file is missing or damaged; the message names it.
        Mismatch: a newer release wrote the snapshot.
    """
    if folder.is_symlink():
        raise Corrupt("the path is a symbolic link, which is not followed", where=str(folder))
    record = _parse(folder / NAME, folder / DIGEST_NAME)
    if isinstance(record.get("format"), int) and record["format"] > FORMAT:
        raise Mismatch(
            f"format {record['format']}, written by a newer purestep; this one reads up to {FORMAT}",
            where=str(folder / NAME),
            hint="update your checkout of purestep, and install it again: pip install -e .",
        )
    try:
        manifest = Manifest.model_validate({"history": None} | record)
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(map(str, first["loc"]))
        raise Corrupt(f"the file is not a manifest: {place}: {first['msg']}"[:500], where=str(folder / NAME)) from error
    if str(manifest.step) != folder.name and not folder.name.startswith((".", f"{manifest.step}.")):
        raise Corrupt(f"the manifest is of step {manifest.step}, not of {folder.name}", where=str(folder))
    _check_sizes(folder, manifest)
    return manifest


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check the files before orbax reads them: its errors for missing files are long or late. A manifest claims no more
    than there is: values are not compressed."""
    try:
        present = _sizes(folder)
        count = sum(entry.name.startswith("part-") for entry in os.scandir(folder))
    except (OSError, MemoryError) as error:
        raise unreadable(folder, error) from error
    for name, file in manifest.files.items():
        if present.get(name) != file.size:
            found = f"{present[name]:,} bytes" if name in present else "missing"
            raise Corrupt(f"{found} where {file.size:,} bytes were written", where=str(folder / name))
    claimed = sum(leaf.nbytes for leaf in manifest.leaves.values() if leaf.is_stored and leaf.nbytes > _SMALL)
    if claimed > (size := sum(present.values())):
        raise Corrupt(f"{claimed:,} bytes of values in files of {size:,} bytes", where=str(folder / NAME))
    if manifest.parts > max(count, 1):
        raise Corrupt(f"{manifest.parts:,} parts in {count} folders", where=str(folder / NAME))


def check_files(folder: Path, manifest: Manifest, part: int) -> None:
    """Read the files of one part, and for part 0 those of no part, and compare their checksums.

    Raises:
        Corrupt: a file is damaged; the message names it.
    """
    for name, file in manifest.files.items():
        top = name.partition("/")[0]
        belongs = int(top[5:]) if manifest.parts > 1 and top.startswith("part-") and top[5:].isdecimal() else 0
        if belongs == part and file.crc32 is not None:
            try:
                found = _crc32(folder / name)
            except (OSError, MemoryError) as error:
                raise unreadable(folder / name, error) from error
            if found != file.crc32:
                raise Corrupt("the file is not what was written (its checksum differs)", where=str(folder / name))


def read_history(folder: Path, manifest: Manifest) -> dict[str, list[Any]] | None:
    """The columns of the history; None if the snapshot has none.

    Raises:
        Corrupt: the rows are missing or damaged.
    """
    if manifest.format < FORMAT:
        return history_.of_old_format(folder.parent, manifest.loop, manifest.earlier)
    if manifest.history is None:
        return None
    return history_.read(folder / "part-0" if manifest.parts > 1 else folder, manifest.history)


def unreadable(where: Path, error: Exception) -> SnapshotError:
    """The exception for an error while reading: `Corrupt` if the files are damaged, else `SnapshotError`.

    A process without memory, file descriptors, threads or permissions cannot read an intact snapshot either, so such an
    error does not mark the snapshot as damaged.
    """
    found = f"cannot be read: {first_line(error)}"
    own = isinstance(error, MemoryError) or getattr(error, "errno", None) in _OWN_ERRORS or "new thread" in found
    if own:
        return SnapshotError(
            found, where=str(where), hint="give this process more memory, file descriptors or permissions"
        )
    return Corrupt(found, where=str(where))


def _parse(path: Path, digest_path: Path) -> dict[str, Any]:
    try:
        data, digest = (read_regular(file, LIMIT) for file in (path, digest_path))
        if digest.split()[:1] != [hashlib.sha256(data).hexdigest().encode()]:
            raise Corrupt(f"the manifest does not have the digest in {digest_path.name}", where=str(path))
        record = parsed_json(data)
    except FileNotFoundError as error:
        raise Corrupt("the file is missing: the snapshot is incomplete", where=str(error.filename)) from None
    except (OSError, ValueError, MemoryError) as error:
        if isinstance(error, Corrupt):
            raise
        raise unreadable(path, error) from error
    if not isinstance(record, dict):
        raise Corrupt("the file is not a manifest", where=str(path))
    return cast("dict[str, Any]", record)


def check_values(path: str, leaf: Leaf, piece: Piece, values: np.ndarray[Any, Any] | None, *, where: str) -> None:
    """Compare stored values with the rows of their leaf. Their bits are those of files that were checked before.

    Raises:
        Corrupt: the values are missing or have another type or shape; in formats 1 and 2, or another checksum.
    """
    if values is None:
        raise Corrupt(f"the values of {path} are missing", where=where)
    shape = leaf.stored_shape(piece)
    if values.dtype != staging.carrier(leaf.dtype) or values.shape != shape:
        found = f"{values.dtype} {list(values.shape)}"
        raise Corrupt(f"{path} is {found} where {leaf.dtype} {list(shape)} was written", where=where)
    if leaf.dtype == "bool" and values.view(np.uint8).max(initial=0) > 1:
        raise Corrupt(f"{path} has other bytes than those of True and False", where=where)
    if piece.crc32 is not None and zlib.crc32(np.ascontiguousarray(values).tobytes()) != piece.crc32:
        raise Corrupt(f"the values of {path} are not the saved ones (their checksum differs)", where=where)
