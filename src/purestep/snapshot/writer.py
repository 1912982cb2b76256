"""From staged buffers to a committed, verified, durable directory, and back to values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import Corrupt, WriteFailed
from ..files import failpoint, remove_tree, sync_directory, sync_tree, write_failed
from . import directory, host, reading, store
from . import manifest as manifests
from .manifest import Manifest
from .table import Earlier, RowsFile, Table, placed


class Job(NamedTuple):
    """Everything one save needs; nothing in it is shared with the caller's state."""

    root: Path
    manifest: Manifest  # without digests and files
    buffers: host.Buffers
    tables: Mapping[str, Table]  # by path in the manifest's ``loop``
    rows: dict[str, RowsFile]  # the same, of the whole run
    overwrite: bool
    archive: tuple[int, ...]  # steps of an abandoned branch, set aside before the commit
    abandoned: directory.Abandoned  # the caller's, who looks at it between jobs only
    keep: int | None
    keep_best: int
    platforms: str | None


def copied(root: Path, step: int, make: Callable[[], host.Buffers]) -> host.Buffers:
    """The copy that ``make`` makes, in the caller's thread.

    Raises:
        WriteFailed: no memory for the copy.
    """
    try:
        failpoint("snapshot.copy")
        return make()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch's word for a MemoryError
            raise
        hint = "a larger machine, or fewer workers: a save needs a copy of the state in host memory"
        text = f"step {step}: no host copy: {type(error).__name__}: {error}"
        raise WriteFailed(text, where=str(root), hint=hint) from error


def run(job: Job) -> None:
    """Stages, digests, flushes, reads back, commits, then retires what is no longer kept.

    Raises:
        WriteFailed: naming the step; every step that was there before is there still, under its name or set aside.
    """
    step = job.manifest.step
    staging = job.root / f".tmp-{step}-{os.getpid()}"
    try:
        _stage(job, staging)
        failpoint("snapshot.verify")
        _verify(staging, job.platforms)
        _commit(job, staging)
        _retire(job)
    except Exception as error:
        _clear(job.root, step, staging)
        size = sum(buffer.numel() * buffer.itemsize for buffer in job.buffers.values())
        failed = error if isinstance(error, WriteFailed) else write_failed(job.root / str(step), error, size=size)
        named = WriteFailed(f"step {step}: {failed.what}", where=failed.where, hint=failed.hint)
        named.errno = failed.errno
        raise named from error


def _clear(root: Path, step: int, staging: Path) -> None:
    # Best effort on a disk that fails: what stays here, the next writer sweeps.
    with suppress(OSError):
        directory.put_back(root, step)
    for leftover in (staging, Path(f"{staging}.orbax-checkpoint-tmp")):
        with suppress(OSError):
            remove_tree(leftover)


def _stage(job: Job, staging: Path) -> None:
    failpoint("snapshot.stage")
    remove_tree(staging)
    leaves = job.manifest.leaves
    arrays = {path: (leaves[path].dtype, host.array(buffer)) for path, buffer in job.buffers.items()}
    if arrays:
        store.write(staging, arrays, platforms=job.platforms)
    else:
        staging.mkdir()
    failpoint("snapshot.digest")
    digested = {path: leaves[path]._replace(crc32=host.digest(values)) for path, (_, values) in arrays.items()}
    manifest = _with_tables(job)
    failpoint("snapshot.manifest")
    files = manifests.inventory(staging)
    manifests.write(staging, manifest._replace(leaves=leaves | digested, files=files))
    failpoint("snapshot.sync")
    sync_tree(staging)


def _with_tables(job: Job) -> Manifest:
    """The manifest with the last rows of every table; those before them are in files beside the snapshots."""
    loop, earlier = job.manifest.loop, dict[str, Earlier]()
    for path, table in job.tables.items():
        found = job.rows.setdefault(path, RowsFile()).write(job.root, table)
        if found is not None:
            earlier[path] = found
        loop = placed(loop, path.split("/")[1:], table.columns(found.rows if found else 0))
    return job.manifest._replace(loop=loop, earlier=earlier)


def _verify(staging: Path, platforms: str | None) -> None:
    try:
        manifest = manifests.read(staging)
        reading.verify(staging, manifest, platforms=platforms)
    except Corrupt as error:
        raise WriteFailed(
            f"reads back as damaged: {error.what}", where=error.where, hint="a look at the disk"
        ) from error


def _commit(job: Job, staging: Path) -> None:
    failpoint("snapshot.archive")
    for step in job.archive:
        directory.set_aside(job.root, step, "archived")
    job.abandoned.saved()
    target = job.root / str(job.manifest.step)
    if job.overwrite and target.exists():
        failpoint("snapshot.replace")
        os.rename(target, directory.replaced(job.root, job.manifest.step))
    failpoint("snapshot.commit")
    os.rename(staging, target)
    failpoint("snapshot.committed")
    sync_directory(job.root)
    remove_tree(directory.replaced(job.root, job.manifest.step))


def _retire(job: Job) -> None:
    if job.keep is None:
        return
    found = directory.entries(job.root)
    kept = {entry.step for entry in found[-job.keep :]} | {job.manifest.step}
    if job.manifest.monitor is not None and job.keep_best:
        kept |= set(directory.best(found, *job.manifest.monitor, count=job.keep_best))
    for entry in found:
        if entry.step not in kept:
            directory.retire(job.root, entry.step)
