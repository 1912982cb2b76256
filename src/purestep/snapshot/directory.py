"""A directory of snapshots: which are there, which go, and what a killed writer left behind.

``12`` is a snapshot of step 12. Names with a dot in front are nobody's business but the writer's: ``.tmp-12-...`` is
being written, ``.old-12-...`` is being deleted, ``.replaced-12`` waits for its successor. ``12.corrupt`` and
``12.archived`` are set aside for a person to look at; they are never listed and never deleted.
"""

from __future__ import annotations

import math
import operator
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Corrupt, NotFound, SnapshotError
from ..files import failpoint, read_json, remove_tree, sync_directory, write_failed
from . import history_rows as tables
from . import manifest as manifests

_REPLACED = ".replaced-"


class Entry(NamedTuple):
    """A committed step, as far as its manifest and its files' sizes tell."""

    step: int
    metrics: dict[str, float]
    monitor: tuple[str, str] | None


class Abandoned:
    """The steps that a run has left behind, where it went back to an older one.

    What is restored first is what a run begins from: newer steps are another run's, and go with the next save. A later
    restore may be a look, at the best step so far: they go where they are in the way.
    """

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.at_once = False
        self._begun = False
        self._first: int | None = None

    def restored(self, root: Path, step: int) -> None:
        """This step has been read."""
        if not self._begun:
            self._first, self._begun = step, True
        self.steps = {s for s in numbered(root) if s > step}
        self.at_once = step == self._first

    def saved(self) -> None:
        """A step has been written: none that is older is in the way any more."""
        self.steps = set()
        self.at_once, self._first, self._begun = False, None, True


def numbered(root: Path) -> list[int]:
    """Every step that has a directory, whole or not, in ascending order.

    A step whose writer died while it overwrote it counts: what it held is there, under another name.
    """
    try:
        with os.scandir(root) as found:
            names = {entry.name.removeprefix(_REPLACED) for entry in found}
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if is_step(name))


def place(root: Path, step: int) -> Path:
    """The directory of a step, whether it is there or not."""
    path = root / str(step)
    return path if path.exists() or not replaced(root, step).exists() else replaced(root, step)


def is_step(name: str) -> bool:
    """Whether this is the name of a snapshot.

    Example:
        >>> [is_step(name) for name in ("12", "012", "12.corrupt", ".tmp-12", "-1")]
        [True, False, False, False, False]
    """
    return name.isascii() and name.isdigit() and name == str(int(name)) and len(name) < 20


def checked_step(root: Path, step: Any) -> int:
    """The step as a number that can be a name.

    Raises:
        SnapshotError: it is no count.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise SnapshotError(f"step is {step!r}", where=str(root), hint="save(int(state.step), state)")
    return number


def entry(root: Path, step: int) -> Entry | None:
    """The step, or None where it is not whole (or was written by a newer release, or cannot be read by this user)."""
    try:
        found = manifests.read(place(root, step))
    except SnapshotError:
        return None
    return Entry(step, found.metrics, found.monitor)


def entries(root: Path) -> list[Entry]:
    """Every whole step in ascending order."""
    return [found for step in numbered(root) if (found := entry(root, step)) is not None]


def best(found: list[Entry], monitor: str, mode: str, *, count: int = 1) -> list[int]:
    """The steps with the best values of a metric, best first, of equal ones the older. NaN is never best."""
    sign = 1.0 if mode == "min" else -1.0
    known = [(sign * value, e.step) for e in found if math.isfinite(value := e.metrics.get(monitor, math.nan))]
    return [step for _, step in sorted(known)[:count]]


def to_archive(root: Path, step: int, *, abandoned: Abandoned, overwrite: bool) -> tuple[int, ...]:
    """The steps to set aside so that this one can be saved.

    Args:
        step: about to be saved.
        abandoned: what was there after an older step when that one was restored, and whether it is to go at once.
        overwrite: whether an equal step may be replaced.

    Raises:
        SnapshotError: the step is there, or a later one, and nothing older was restored.
    """
    there = numbered(root)
    later = [s for s in there if s >= step]
    goes = abandoned.steps.issuperset(later)
    if goes and (later or abandoned.at_once):
        return tuple(s for s in there if s in abandoned.steps)
    if not later or (overwrite and later == [step]):
        return ()
    if step in later and not overwrite:
        raise SnapshotError(f"step {step} is there already", where=str(root), hint="save(..., overwrite=True)")
    older = [s for s in there if s < step]
    hint = f"restore(template, step={older[-1]}) first" if older else "snapshots.start_over(), which sets all aside"
    hint += ", or another directory"
    raise SnapshotError(f"step {step} is older than step {later[-1]}, which is there", where=str(root), hint=hint)


def check_room(root: Path, needed: int) -> None:
    """Warns where the disk under the directory, or under where it will be, has fewer bytes left than are needed."""
    try:
        free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
    except (OSError, StopIteration):  # a disk that does not say
        return
    if free < needed:
        text = f"{root}: snapshots need {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB"
        warnings.warn(f"{text} (cure: keep=1, keep_best=0, or another disk)", RuntimeWarning, stacklevel=3)


def set_aside(root: Path, step: int, ending: str) -> Path:
    """Renames a step to ``<step>.<ending>`` (``.<ending>.2``, ... where that is taken) and returns the new path."""
    target = root / f"{step}.{ending}"
    number = 1
    while target.exists():
        number += 1
        target = root / f"{step}.{ending}.{number}"
    os.rename(root / str(step), target)
    sync_directory(root)
    return target


def aside(root: Path, ending: str) -> list[str]:
    """The names that `set_aside` gave."""
    if not root.is_dir():
        return []
    return sorted(name for name in os.listdir(root) if is_step(name.split(".")[0]) and name.split(".")[1:2] == [ending])


def pass_over(root: Path, damaged: Mapping[int, Corrupt], used: int, *, rename: bool) -> None:
    """Warns that newer steps are damaged, and where asked to renames them to ``<step>.corrupt``."""
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
    """What to raise where no step can be restored: never what an empty directory gets, where there is a damaged one."""
    names = aside(root, "corrupt")
    if not damaged and not names:
        return NotFound("no snapshot here", where=str(root), hint="the directory a run was saved to")
    lines = [f"{step}: {error}" for step, error in damaged.items()] + [f"{name}: set aside" for name in names]
    text = "\n  ".join(["every snapshot here is damaged", *lines])
    return Corrupt(text, where=str(root), hint="another directory, to start afresh")


def retire(root: Path, step: int) -> None:
    """Deletes a step; from the first moment on nobody sees it, and what a kill leaves of it is swept later."""
    failpoint("snapshot.retire")
    hidden = root / f".old-{step}-{os.getpid()}"
    remove_tree(hidden)
    os.rename(root / str(step), hidden)
    failpoint("snapshot.delete")
    remove_tree(hidden)


def replaced(root: Path, step: int) -> Path:
    """Where a step that is overwritten waits until its successor is there."""
    return root / f"{_REPLACED}{step}"


def put_back(root: Path, step: int) -> None:
    """Gives an overwritten step its name back where the successor never came."""
    if replaced(root, step).exists() and not (root / str(step)).exists():
        os.rename(replaced(root, step), root / str(step))


def sweep(root: Path) -> None:
    """Deletes what killed writers left; only for the holder of the lock."""
    for name in os.listdir(root):
        step = name.removeprefix(_REPLACED)
        if step != name and is_step(step):
            put_back(root, int(step))
        if name.startswith((".tmp-", ".old-", _REPLACED)):
            remove_tree(root / name)
    _sweep_rows(root)


def _sweep_rows(root: Path) -> None:
    """Deletes files of rows that no snapshot refers to, one that is set aside neither."""
    if not tables.unused(root, set()):
        return
    used: set[str] = set()
    for path in root.glob(f"*/{manifests.NAME}"):
        try:
            used |= {earlier["file"] for earlier in read_json(path).get("earlier", {}).values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # it may refer to any
    for path in tables.unused(root, used):
        remove_tree(path)


def probe(root: Path) -> None:
    """Makes and deletes a directory, so that a run learns before its first step that it could not save.

    Raises:
        WriteFailed: the directory cannot be written to.
    """
    folder = root / f".tmp-probe-{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        folder.rmdir()
    except OSError as error:
        raise write_failed(root, error) from error
