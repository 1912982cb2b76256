"""Faults of the library, for children of the fork server: with one of these a trial must fail."""

from __future__ import annotations

import pickle
import pkgutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data._utils import worker

from purestep import files
from purestep.data import workers
from purestep.snapshot import Snapshots, directory, manifest, writer
from rigs.faults.running import files_of

kept: list[Any] = []  # what is not given back


def switch_off(guard: str) -> None:
    """Makes a function of the library do nothing."""
    owner, _, name = guard.rpartition(".")
    found = pkgutil.resolve_name(owner)
    assert hasattr(found, name), f"{guard} is not there to be switched off"
    setattr(found, name, lambda *args, **kwargs: None)


def write_under_the_final_name() -> None:
    """No temporary name, so that a half-written step is seen."""
    writer.staging_path = lambda root, step, token: root / str(step)
    writer._read_back = writer._commit = lambda *args: None


def unpickle_what_is_there() -> None:
    """A reader that looks into every file with pickle."""
    real = manifest.check_files

    def check(folder: Path, *args: Any) -> None:
        for path in files_of(folder):
            with suppress(Exception):
                pickle.loads(path.read_bytes())
        real(folder, *args)

    manifest.check_files = check


def delete_through_links() -> None:
    """What a killed writer left is deleted with all that its links lead to."""

    def delete(path: Path) -> None:
        for found in path.resolve().glob("**/*"):
            delete(found) if found.is_dir() or found.is_symlink() else found.unlink()

    directory.remove_tree = delete


def workers_that_do_not_look() -> None:
    """A worker whose parent is gone does not notice."""
    worker.ManagerWatchdog.is_alive = lambda self: True  # torch's own look
    workers._exit_with_parent = lambda parent: None


def keep_every_lock() -> None:
    """The file of a lock stays open."""
    files.DirectoryLock.release = lambda self: kept.append(self)


def acknowledge_at_once() -> None:
    """A step is called saved while it is still being written."""
    Snapshots.wait = lambda self: None
    writer.Background.join = lambda self: None


def delete_in_place() -> None:
    """An old step keeps its name while its files go."""
    directory.retire = lambda root, step: files.remove_tree(root / str(step))
