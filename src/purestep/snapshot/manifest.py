"""The manifest of one snapshot: its contents, its digests, and the comparison with a template.

``manifest.json`` lists every leaf and every file with its digest, and contains everything that is no tensor: Python
leaves, the loop's state, metrics and notes. ``manifest.sha256`` contains its digest in the format of ``sha256sum -c``.
A directory without both files is no snapshot.

A snapshot that several processes wrote has format 2: the values are in folders ``part-0``, ``part-1``, ..., and the
manifest lists the rows of each leaf that each part contains. Leaves that are not cut are in ``part-0``.
"""

# pyright: reportUnnecessaryIsInstance=false
# Users may pass values of other types than the annotations.

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from ..errors import Corrupt, Mismatch, SnapshotError
from ..state import is_count
from . import digest, staging
from .history_rows import Earlier, Table

FORMAT = 2
"""The newest format; format 1 is that of one part."""
NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"
_DEEP = 100  # levels of JSON
# errors of the process, not of the file
_OWN_ERRORS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)
_LIMIT = 1 << 28  # bytes; a million leaves with a long history need less


class Piece(NamedTuple):
    """Rows ``[first, end)`` of a leaf, which one part of the snapshot contains. A scalar counts as one row."""

    part: int
    first: int
    end: int
    crc32: int


class Leaf(NamedTuple):
    """One leaf of the stored tree."""

    dtype: str  # "float32", "bfloat16", ... or "python.int", ...
    shape: tuple[int, ...]  # whole
    crc32: int | None = None  # of the bytes in C order; None without elements, in pieces, and for Python leaves
    value: Any = None  # of a Python leaf
    pieces: tuple[Piece, ...] = ()  # in the order of rows; empty if one array contains the leaf

    def rows(self, first: int, end: int) -> Leaf:
        """The leaf of some rows, without digest."""
        return Leaf(self.dtype, (end - first, *self.shape[1:]))

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


class File(NamedTuple):
    """One file of a step."""

    size: int  # bytes
    crc32: int | None  # None for files with values, which have one digest for each leaf


class Manifest(NamedTuple):
    """The contents of one snapshot."""

    step: int
    leaves: dict[str, Leaf]
    loop: Any
    metrics: dict[str, float]
    meta: Any
    monitor: tuple[str, str] | None  # (metric, "min" or "max") that decided which snapshot is best
    environment: dict[str, Any]  # versions, thread count, device
    files: dict[str, File]  # by path relative to the step's directory
    earlier: Mapping[str, Earlier] = MappingProxyType({})  # by path in ``loop``: earlier rows in a file
    parts: int = 1  # folders with values

    def stored(self, part: int) -> dict[str, Leaf]:
        """The arrays of one part by path, as leaves of their shapes."""
        found: dict[str, Leaf] = {}
        for path, leaf in self.leaves.items():
            if leaf.is_stored and not leaf.pieces and part == 0:
                found[path] = leaf
            for piece in leaf.pieces:
                if piece.part == part:
                    found[path] = leaf.rows(piece.first, piece.end)._replace(crc32=piece.crc32)
        return found


# --- leaves -------------------------------------------------------------------------------------------------------


def describe(leaves: list[tuple[str, Any]]) -> dict[str, Leaf]:
    """A `Leaf` for each leaf of a tree, without digests.

    Raises:
        StateError: a leaf cannot be stored.
        SnapshotError: two leaves have one path.
    """
    found: dict[str, Leaf] = {}
    for path, leaf in leaves:
        staging.check(path, leaf)
        if path in found:
            raise SnapshotError("two leaves have this path", where=path, hint="use keys without '/', all of one type")
        if isinstance(leaf, Tensor):
            found[path] = Leaf(staging.NAMES[leaf.dtype], tuple(leaf.shape))
        else:
            found[path] = Leaf(f"python.{type(leaf).__name__}", (), value=leaf)
    return found


_WHOLE = 'pass a template like the saved state; for its weights alone, call restore(template, only="params")'
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
        found = difflib.get_close_matches(name, candidates, n=1)
        return f" (nearest name: {found[0]})" if found else ""

    # Comparing thousands of names with thousands takes minutes; 20 lines show the pattern.
    return [(name, near(name) if index < 20 else "") for index, name in enumerate(names)]


def select(paths: list[str], only: set[str] | None, *, where: str) -> set[str]:
    """The paths below one of the prefixes; all paths for None.

    A prefix ends at a "/" or a "." of the path: ``params/layers.1`` selects ``params/layers.1.weight`` but not
    ``params/layers.10.weight``. It may end with a slash.

    Raises:
        Mismatch: no leaf is below a prefix.
    """
    if only is None:
        return set(paths)
    found: set[str] = set()
    for prefix in only:
        name = prefix.removesuffix("/")
        below = {path for path in paths if path == name or path.startswith((f"{name}/", f"{name}."))}
        if not below:
            tops = ", ".join(sorted({path.split("/")[0] for path in paths}))
            raise Mismatch(f"no leaf is under {prefix!r}", where=where, hint=f"pass only= some of: {tops}")
        found |= below
    return found


def as_json(value: Any, *, where: str, tables: dict[str, Table] | None = None) -> Any:
    """Copy ``value`` as JSON values: dict with text keys, list, text, numbers, bool, None.

    Tuples become lists. NaN and infinities stay. If ``tables`` is a dict, a `Table` is moved into it, under its path.

    Raises:
        SnapshotError: JSON would lose or change an entry; the message names it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if where.count("/") > _DEEP:
        raise SnapshotError(
            f"more than {_DEEP} levels", where=where[:40], hint="pass no dict or list that contains itself"
        )
    if isinstance(value, Table) and tables is not None:
        tables[where] = value
        return None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        for key in items:
            if not isinstance(key, str):
                raise SnapshotError(f"the key {key!r} is no text", where=where, hint=f"{str(key)!r}")
        return {key: as_json(entry, where=f"{where}/{key}", tables=tables) for key, entry in items.items()}
    if isinstance(value, list | tuple):
        entries = cast("list[Any]", value)
        return [as_json(entry, where=f"{where}/{index}", tables=tables) for index, entry in enumerate(entries)]
    hint = "pass float(x), int(x), str(x) or a list of these; put tensors into the state"
    raise SnapshotError(f"a {type(value).__qualname__} cannot be stored in JSON", where=where, hint=hint)


def as_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert numbers, 0-d tensors and `Mean`s to floats.

    Raises:
        SnapshotError: a value is no number.
    """
    found: dict[str, float] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        text = f"a {type(metrics).__qualname__} is no mapping"
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
    record = manifest._asdict() | {
        "format": 1 if manifest.parts == 1 else FORMAT,
        "library": "purestep",
        "leaves": {path: _leaf_record(leaf) for path, leaf in manifest.leaves.items()},
        "files": {name: file._asdict() for name, file in manifest.files.items()},
        "earlier": {path: earlier._asdict() for path, earlier in manifest.earlier.items()},
    }
    if manifest.parts == 1:
        del record["parts"]
    data = (json.dumps(record, indent=1) + "\n").encode()
    (folder / NAME).write_bytes(data)
    (folder / DIGEST_NAME).write_bytes(f"{hashlib.sha256(data).hexdigest()}  {NAME}\n".encode())


def _leaf_record(leaf: Leaf) -> dict[str, Any]:
    record = leaf._asdict()
    if not leaf.pieces:
        del record["pieces"]
    return record


def inventory(folder: Path) -> dict[str, File]:
    """Every file below ``folder`` with size and digest, except the two files of the manifest.

    Raises:
        Corrupt: the folder contains a symbolic link, a pipe or a device.
    """
    return {name: File(size, _file_digest(folder / name)) for name, size in _sizes(folder).items()}


def _file_digest(path: Path) -> int | None:
    # orbax stores values in ocdbt.process_0/d; the other files are small and contain their positions.
    return None if path.match("ocdbt.process_*/d/*") else digest.of_file(path)


def _sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of every file, by path relative to ``folder``.

    Raises:
        Corrupt: the folder contains a symbolic link, a pipe or a device.
    """
    found: dict[str, int] = {}
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise Corrupt("neither a file nor a directory; links are not followed", where=entry.path)
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
        raise Corrupt("a symbolic link, which is not followed", where=str(folder))
    record = _parse(folder / NAME, folder / DIGEST_NAME)
    if isinstance(record.get("format"), int) and record["format"] > FORMAT:
        raise Mismatch(
            f"format {record['format']}, written by a newer purestep; this one reads up to {FORMAT}",
            where=str(folder / NAME),
            hint="update your checkout of purestep, and install it again: pip install -e .",
        )
    manifest = _from_record(record, where=str(folder / NAME))
    if str(manifest.step) != folder.name and not folder.name.startswith((".", f"{manifest.step}.")):
        raise Corrupt(f"the manifest is of step {manifest.step}, not of {folder.name}", where=str(folder))
    try:
        _check_files(folder, manifest.files)
    except (OSError, MemoryError) as error:
        raise unreadable(folder, error) from error
    return manifest


def unreadable(where: Path, error: Exception) -> SnapshotError:
    """The exception for an error while reading: `Corrupt` if the files are damaged, else `SnapshotError`.

    A process without memory, file descriptors, threads or permissions cannot read an intact snapshot either, so such an
    error does not mark the snapshot as damaged.
    """
    text = str(error).strip().splitlines()
    found = f"cannot be read: {type(error).__name__}: {text[0][:300] if text else ''}"
    own = isinstance(error, MemoryError) or getattr(error, "errno", None) in _OWN_ERRORS or "new thread" in found
    if own:
        return SnapshotError(
            found, where=str(where), hint="give this process more memory, file descriptors or permissions"
        )
    return Corrupt(found, where=str(where))


def _check_files(folder: Path, files: dict[str, File]) -> None:
    """Check the files before orbax reads them: its errors for damaged files are long, late or missing."""
    present = _sizes(folder)
    for name, file in files.items():
        if present.get(name) != file.size:
            found = f"{present[name]:,} bytes" if name in present else "missing"
            raise Corrupt(f"{found} where {file.size:,} bytes were written", where=str(folder / name))
        if file.crc32 is not None and _file_digest(folder / name) != file.crc32:
            raise Corrupt("not what was written (its digest differs)", where=str(folder / name))


def _parse(path: Path, digest_path: Path) -> dict[str, Any]:
    try:
        for file in (path, digest_path):
            if file.is_symlink() or file.stat().st_size > _LIMIT:
                raise Corrupt("is a link, or too large for a manifest", where=str(file))
        data = path.read_bytes()
        if digest_path.read_bytes().split()[:1] != [hashlib.sha256(data).hexdigest().encode()]:
            raise Corrupt(f"does not have the digest in {digest_path.name}", where=str(path))
        record = json.loads(data)
    except FileNotFoundError as error:
        raise Corrupt("missing: the snapshot is incomplete", where=str(error.filename)) from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, Corrupt):
            raise
        raise unreadable(path, error) from error
    if not isinstance(record, dict):
        raise Corrupt("not a manifest", where=str(path))
    return cast("dict[str, Any]", record)


def _from_record(record: dict[str, Any], *, where: str) -> Manifest:
    try:
        monitor = record["monitor"]
        parts = _integer(record.get("parts", 1))
        return Manifest(
            step=_integer(record["step"]),
            leaves={path: _leaf(entry, parts) for path, entry in record["leaves"].items()},
            loop=record["loop"],
            metrics={name: float(value) for name, value in record["metrics"].items()},
            meta=record["meta"],
            monitor=None if monitor is None else (str(monitor[0]), str(monitor[1])),
            environment=dict(record["environment"]),
            files=parsed_files(record["files"]),
            earlier={path: Earlier.of(entry) for path, entry in record.get("earlier", {}).items()},
            parts=parts,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise Corrupt(f"not a manifest: {type(error).__name__}: {error}", where=where) from error


def parsed_files(record: Mapping[str, Any]) -> dict[str, File]:
    """The files of a record of a manifest or a part.

    Raises:
        KeyError, TypeError, ValueError: the record is invalid.
    """
    return {name: _file(entry) for name, entry in record.items()}


def _file(entry: Any) -> File:
    return File(_integer(entry["size"]), None if entry["crc32"] is None else _integer(entry["crc32"]))


def _leaf(entry: Any, parts: int) -> Leaf:
    leaf = Leaf(
        dtype=entry["dtype"],
        shape=tuple(_integer(size) for size in entry["shape"]),
        crc32=None if entry["crc32"] is None else _integer(entry["crc32"]),
        value=entry["value"],
        pieces=tuple(Piece(*map(_integer, piece)) for piece in entry.get("pieces", ())),
    )
    if leaf.is_python:
        if type(leaf.value) is not staging.SCALARS[leaf.dtype[7:]]:
            raise ValueError(f"{leaf.value!r} as {leaf.text()}")
    elif leaf.dtype not in staging.DTYPES or (leaf.is_stored and (leaf.crc32 is None) == (not leaf.pieces)):
        raise ValueError(f"dtype {leaf.dtype!r} with digest {leaf.crc32}")
    _check_pieces(leaf, parts)
    return leaf


def _check_pieces(leaf: Leaf, parts: int) -> None:
    """Raise ValueError unless the pieces contain every row once."""
    row = 0
    for piece in leaf.pieces:
        if piece.first != row or piece.end <= row or piece.part >= parts:
            raise ValueError(f"{leaf.text()} in the pieces {leaf.pieces}")
        row = piece.end
    if leaf.pieces and row != (leaf.shape[0] if leaf.shape else 1):
        raise ValueError(f"{leaf.text()} in the pieces {leaf.pieces}")


def _integer(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r} where a count was expected")
    return value


def check_values(path: str, leaf: Leaf, values: np.ndarray[Any, Any] | None, *, where: str) -> None:
    """Compare stored values with their `Leaf`.

    Raises:
        Corrupt: the values are missing, have another type or shape, or another digest.
    """
    if values is None:
        raise Corrupt(f"the values of {path} are missing", where=where)
    if values.dtype != staging.carrier(leaf.dtype) or values.shape != leaf.shape:
        found = f"{values.dtype} {list(values.shape)}"
        raise Corrupt(f"{path} is {found} where {leaf.text()} was written", where=where)
    if digest.of_values(values) != leaf.crc32:
        raise Corrupt(f"the values of {path} are not the saved ones (their digest differs)", where=where)
