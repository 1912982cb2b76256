"""Disks that take no more at a random write: full, read-only, over quota, for a while."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from saving import file_size_limit
from torch import Tensor

from purestep import errors
from purestep.snapshot import Snapshots
from rigs.faults.trials import contents, seeded

TRIALS = 100
TMPFS = 4 << 20  # bytes
POINTS = ("snapshot.stage", "snapshot.digest", "snapshot.manifest", "snapshot.sync", "snapshot.commit")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")


def state(step: int) -> dict[str, Tensor]:
    """400 kB, so that a small disk holds a few of them."""
    return {"w": torch.full((100_000,), float(step)), "b": torch.full((2,), float(step))}


# --- disks that fail --------------------------------------------------------------------------------------------------


@contextmanager
def failpoint(plan: str) -> Iterator[None]:
    os.environ["PURESTEP_FAILPOINT"] = plan
    try:
        yield
    finally:
        del os.environ["PURESTEP_FAILPOINT"]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A directory that nobody writes into: for root, whom no mode stops, it is mounted so."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    mount("--bind", str(folder), str(folder))
    try:
        mount("-o", "remount,bind,ro", str(folder))
        yield
    finally:
        unmount(folder)


@contextmanager
def full(folder: Path, room: int) -> Iterator[None]:
    """A disk on which so many bytes are left, by a file that takes the rest."""
    usage = os.statvfs(folder)
    ballast = folder / "ballast"
    ballast.write_bytes(b"\0" * max(0, usage.f_bavail * usage.f_frsize - room))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A tmpfs of `TMPFS` bytes mounted here."""
    mount("-t", "tmpfs", "-o", f"size={TMPFS}", "tmpfs", str(folder))
    try:
        yield
    finally:
        unmount(folder)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may: root in a container often may not."""
    try:
        with small_disk(folder):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


# --- the trial --------------------------------------------------------------------------------------------------------


def trial(number: int, folder: Path) -> str | None:
    """Goes round: a limit on file sizes, a small disk (a failpoint where none can be mounted), quota, read-only."""
    rng = seeded("filling", number)
    kind = number % 4
    if kind == 1 and can_mount(folder):
        with small_disk(folder):
            return fails_and_recovers(folder, lambda: full(folder, rng.randrange(4096, 400_000)))
    if kind == 3 and (os.geteuid() != 0 or can_mount(folder)):
        return fails_and_recovers(folder, lambda: read_only(folder))
    if kind == 0:
        return fails_and_recovers(folder, lambda: file_size_limit(rng.randrange(0, 400_000)))
    plan = f"{rng.choice(POINTS)}=raise:{rng.choice(ERRORS)}"
    return fails_and_recovers(folder, lambda: failpoint(plan))


def fails_and_recovers(folder: Path, fault: Callable[[], AbstractContextManager[None]]) -> str | None:
    """Two good saves, one on a disk that fails, and one when it no longer does."""
    with Snapshots(folder, keep=None) as snapshots:
        for step in (1, 2):
            snapshots.save(step, state(step))
        snapshots.wait()
        before = contents(folder)
        with fault():
            found = _told(snapshots)
        if found:
            return found
        if contents(folder) != before:
            changed = dict(contents(folder).items() ^ before.items())
            return f"left behind or damaged: {sorted(changed)}"
        if snapshots.steps() != [1, 2]:
            return f"steps are {snapshots.steps()}"
        snapshots.save(4, state(4))
        snapshots.wait()
        ok = all(torch.equal(snapshots.restore(state(0), step=s).state["w"], state(s)["w"]) for s in (1, 2, 4))
        return None if ok else "other values"


def _told(snapshots: Snapshots) -> str | None:
    """A failed save is told by the first look after it, once, with the file and the reason."""
    snapshots.save(3, state(3))
    while snapshots._background.busy:  # the step that runs meanwhile
        time.sleep(0.001)
    try:
        snapshots.check()
    except errors.WriteFailed as error:
        snapshots.check()
        ok = "step 3" in error.what and error.where.startswith(str(snapshots.directory)) and error.errno
        return None if ok else f"says only: {error}"
    return "nothing was told"
