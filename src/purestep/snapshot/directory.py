"""A directory of snapshots: which steps it has, which to delete, and how to clean up after a killed writer.

``12`` is the snapshot of step 12. Names that start with a dot belong to the writer: ``.tmp-12-...`` is being written,
``.old-12-...`` is being deleted, ``.replaced-12`` is being overwritten. ``12.corrupt`` and ``12.archived`` are kept for
the user; they are never listed and never deleted.
"""

from __future__ import annotations

import math
import operator
import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import Corrupt, NotFound, SnapshotError
from ..files import failpoint, remove_tree, sync_directory
from . import manifest as manifests

_REPLACED = ".replaced-"


def numbered(root: Path) -> list[int]:
    """Every step that has a directory, intact or not, in ascending order.

    Includes a step whose writer died while it overwrote it: the old contents still exist under another name.
    """
    try:
        with os.scandir(root) as found:
            names = {entry.name.removeprefix(_REPLACED) for entry in found}
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if is_step(name))


def place(root: Path, step: int) -> Path:
    """The path of a step, which may not exist."""
    path = root / str(step)
    return path if path.exists() or not replaced(root, step).exists() else replaced(root, step)


def is_step(name: str) -> bool:
    """True for the name of a snapshot.

    Example:
        >>> [is_step(name) for name in ("12", "012", "12.corrupt", ".tmp-12", "-1")]
        [True, False, False, False, False]
    """
    return name.isascii() and name.isdigit() and name == str(int(name)) and len(name) < 20


def checked_step(root: Path, step: Any) -> int:
    """Convert the step to an int that can be a name.

    Raises:
        SnapshotError: the step is no int in [0, 10**18).
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise SnapshotError(
            f"step={step!r} must be an int in [0, 1e18)", where=str(root), hint="call save(int(state.step), state)"
        )
    return number


def intact(root: Path) -> list[manifests.Manifest]:
    """The manifests of the steps in ascending order, without those that are damaged, written by a newer release, or not
    readable for this user, according to the manifests and the sizes of their files."""
    found: list[manifests.Manifest] = []
    for step in numbered(root):
        with suppress(SnapshotError):
            found.append(manifests.read(place(root, step)))
    return found


def best(found: list[manifests.Manifest], monitor: str, mode: str, *, count: int = 1) -> list[int]:
    """The steps with the best values of a metric, best first, older first among equals. NaN is never best."""
    sign = 1.0 if mode == "min" else -1.0
    known = [(sign * value, one.step) for one in found if math.isfinite(value := one.metrics.get(monitor, math.nan))]
    return [step for _, step in sorted(known)[:count]]


def check_order(root: Path, step: int, *, restored: int | None, overwrite: bool) -> None:
    """Raise SnapshotError unless this step would be the newest one of the run in the directory.

    Args:
        root: the directory.
        step: the step to save.
        restored: the step that was restored since the last save, if any; newer ones belong to another run.
        overwrite: the newest step may be replaced.
    """
    there = numbered(root)
    aside = ", which renames them to <step>.archived"
    newer = [s for s in there if restored is not None and s > restored]
    if newer:
        raise SnapshotError(
            f"step {restored} was restored, and the newer steps {', '.join(map(str, newer))} exist",
            where=str(root),
            hint=f"call start_over(after={restored}){aside}; to look at older steps, use Snapshots(..., writer=False)",
        )
    later = [s for s in there if s >= step]
    if not later or (overwrite and later == [step]):
        return
    if later == [step]:
        raise SnapshotError(f"step {step} exists already", where=str(root), hint="call save(..., overwrite=True)")
    older = [s for s in there if s < step]
    cure = f"start_over(after={older[-1]})" if older else "start_over()"
    raise SnapshotError(
        f"step {step} is not newer than the existing step {later[-1]}",
        where=str(root),
        hint=f"call {cure}{aside}, or use another directory",
    )


def check_room(root: Path, needed: int) -> None:
    """Warn if the disk of the directory, which need not exist yet, has fewer free bytes than needed."""
    try:
        free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
    except (OSError, StopIteration):  # the disk does not report its free space
        return
    if free < needed:
        text = f"{root}: snapshots need {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB"
        warnings.warn(f"{text} (cure: pass keep=1, keep_best=0, or use another disk)", RuntimeWarning, stacklevel=3)


def set_aside(root: Path, step: int, ending: str) -> Path:
    """Rename a step to ``<step>.<ending>`` (``.<ending>.2``, ... if that exists) and return the new path."""
    target = root / f"{step}.{ending}"
    number = 1
    while target.exists():
        number += 1
        target = root / f"{step}.{ending}.{number}"
    os.rename(root / str(step), target)
    sync_directory(root)
    return target


def names_aside(root: Path, ending: str) -> list[str]:
    """The names that `set_aside` has created."""
    if not root.is_dir():
        return []
    return sorted(name for name in os.listdir(root) if is_step(name.split(".")[0]) and name.split(".")[1:2] == [ending])


def pass_over(root: Path, damaged: Mapping[int, Corrupt], used: int, *, rename: bool) -> None:
    """Warn that newer steps are damaged; with ``rename``, rename them to ``<step>.corrupt``."""
    lines = [f"  {step}: {error}" for step, error in damaged.items()]
    if rename:
        for step in damaged:
            failpoint("snapshot.quarantine")
            set_aside(root, step, "corrupt")
        lines.append("  renamed to " + ", ".join(f"{step}.corrupt" for step in damaged))
    lost = f"{max(damaged) - used} steps lost"
    text = "\n".join([f"{root}: went back to step {used}, {lost}; damaged:", *lines])
    warnings.warn(text, RuntimeWarning, stacklevel=5)


def nothing_good(root: Path, damaged: Mapping[int, Corrupt]) -> SnapshotError:
    """The error if no step can be restored: `NotFound` for an empty directory, `Corrupt` if a step is damaged."""
    names = names_aside(root, "corrupt")
    if not damaged and not names:
        return NotFound("no snapshot here", where=str(root), hint="pass the directory of a run")
    lines = [f"{step}: {error}" for step, error in damaged.items()] + [f"{name}: set aside" for name in names]
    text = "\n  ".join(["every snapshot here is damaged", *lines])
    return Corrupt(text, where=str(root), hint="use another directory to start from the beginning")


def retire(root: Path, step: int) -> None:
    """Delete a step. The rename hides it at once; `sweep` removes what a kill leaves."""
    failpoint("snapshot.retire")
    hidden = root / f".old-{step}-{os.getpid()}"
    remove_tree(hidden)
    os.rename(root / str(step), hidden)
    failpoint("snapshot.delete")
    remove_tree(hidden)


def replaced(root: Path, step: int) -> Path:
    """The path of an overwritten step until its successor is committed."""
    return root / f"{_REPLACED}{step}"


def restore_replaced(root: Path, step: int) -> None:
    """Rename an overwritten step back if its successor was not committed."""
    if replaced(root, step).exists() and not (root / str(step)).exists():
        os.rename(replaced(root, step), root / str(step))


def sweep(root: Path) -> None:
    """Delete leftovers of killed writers. Only the holder of the lock may call it."""
    for name in os.listdir(root):
        step = name.removeprefix(_REPLACED)
        if step != name and is_step(step):
            restore_replaced(root, int(step))
        if name.startswith((".tmp-", ".old-", _REPLACED)):
            remove_tree(root / name)
