"""The contents of a directory of snapshots, without a template: no values are restored, no lock, no writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SnapshotError
from . import directory, reader
from . import manifest as manifests


class StoredStep(NamedTuple):
    """One step of a directory."""

    step: int
    saved: float  # seconds since the epoch
    size: int  # bytes of its files
    metrics: Mapping[str, float]
    monitor: tuple[str, str] | None
    environment: Mapping[str, Any]
    problem: str | None  # why it cannot be restored, in one line; the fields above are empty then


def stored_steps(root: Path) -> list[StoredStep]:
    """Every step in ascending order, intact or not. Checks manifests and file sizes.

    Example:
        >>> stored_steps(Path("runs/nowhere"))
        []

    A step that the writer deletes in the meantime is left out.
    """
    found = (_stored_step(root, step) for step in directory.numbered(root))
    return [step for step in found if step is not None]


def _stored_step(root: Path, step: int) -> StoredStep | None:
    folder = directory.place(root, step)
    try:
        saved = (folder / manifests.NAME).stat().st_mtime
        read = manifests.read(folder)
    except (SnapshotError, OSError) as error:
        return None if _is_gone(root, step) else StoredStep(step, 0.0, size_of(folder), {}, None, {}, _line(error))
    size = sum(file.size for file in read.files.values())
    return StoredStep(step, saved, size, read.metrics, read.monitor, read.environment, None)


def read_history(root: Path, step: int) -> dict[str, list[Any]]:
    """The columns of the history of a step; empty if it has none.

    Raises:
        SnapshotError: the step, or its history, is damaged or gone.
    """
    folder = directory.place(root, step)
    return manifests.read_history(folder, manifests.read(folder)) or {}


def verify(root: Path, step: int) -> str | None:
    """Read every file of a step and compare the checksums; return the problem in one line, or None.

    Also None for a step that the writer deletes in the meantime.
    """
    folder = directory.place(root, step)
    try:
        read = manifests.read(folder)
        for part in range(read.parts):
            manifests.check_files(folder, read, part)
            reader.check_shapes(folder, read, part)
            if read.format < manifests.FORMAT:  # its checksums are those of values
                reader.load(folder, read, part, read.stored(part).keys())
        manifests.read_history(folder, read)
    except (SnapshotError, OSError) as error:
        return None if _is_gone(root, step) else _line(error)
    return None


def set_aside(root: Path) -> list[str]:
    """The names of steps that are kept as ``<step>.corrupt`` or ``<step>.archived``."""
    return [name for ending in ("corrupt", "archived") for name in directory.names_aside(root, ending)]


def _is_gone(root: Path, step: int) -> bool:
    return not directory.place(root, step).exists()


def size_of(folder: Path) -> int:
    """The bytes of the files in a directory."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # its writer has deleted it in the meantime
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
