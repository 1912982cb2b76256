"""Write one snapshot: from the staged buffers to a verified, committed directory on the disk.

Reading order: `Job` and `run`, the steps of one save; `_write_part`, the part of each process of a mesh; then
`Background`, the thread that runs one job at a time and that the end of a script waits for.
"""

from __future__ import annotations

import concurrent.futures.thread  # registers its exit hook; ours must be registered later to run earlier
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Corrupt, RankError, WriteFailed
from ..files import failpoint, remove_tree, sync_directory, sync_tree, write_failed
from ..parallel import processes
from . import directory, history, orbax_io, parts
from . import manifest as manifests
from . import staging as staging_
from .manifest import File, Manifest
from .parts import Spread

_log = logging.getLogger("purestep")
_CLEARINGS = 10
"""Looks at what a failed save has left, each followed by a pause."""
_PAUSE = 0.02  # seconds


class Job(NamedTuple):
    """The data of one save. It shares no memory with the caller's state."""

    root: Path
    manifest: Manifest  # without leaves, which the thread describes, and files
    kinds: Mapping[str, staging_.Kind]  # of all leaves
    buffers: staging_.Buffers
    history: Mapping[str, Any] | None
    overwrite: bool
    keep: int | None
    keep_best: int
    spread: Spread
    channel: processes.Channel  # to the same thread of the other processes
    token: str  # of this save, equal in all processes

    @property
    def staging(self) -> Path:
        """The directory that gets the step's name in the end."""
        return staging_path(self.root, self.manifest.step, self.token)


def staging_path(root: Path, step: int, token: str) -> Path:
    """The name of a step while it is written."""
    return root / f".tmp-{step}-{token}"


def run(job: Job) -> None:
    """Write, flush, read back and commit a step, then delete steps that are no longer kept.

    Of several processes, each one writes its part, and the first one, which commits, waits for the others.

    Raises:
        WriteFailed: the save failed, here or in another process; the message names the step. Earlier steps are intact.
    """
    if job.channel.rank:
        return _help(job)
    waiting = list(range(1, job.channel.size))  # for the files of their parts
    try:
        files = _write_part(job, 0)
        failpoint("snapshot.part")
        while waiting:
            files |= _files_of(job, waiting.pop(0))
        failpoint("snapshot.manifest")
        leaves = parts.described(job.kinds, job.spread)
        manifests.write(job.staging, job.manifest.model_copy(update={"leaves": leaves, "files": files}))
        failpoint("snapshot.sync")
        sync_tree(job.staging)
        failpoint("snapshot.verify")
        _read_back(job, 0, files)
        _commit(job, job.staging)
        _retire(job)
    except Exception as error:
        named = _failed(job, error, f"step {job.manifest.step}")
        for rank in waiting:  # they still write
            with suppress(Exception):
                _files_of(job, rank)
        _clear(job.root, job.manifest.step, job.staging)
        _answer(job, named)
        raise named from error
    _answer(job, None)


def _help(job: Job) -> None:
    """Write this process's part, if it has one, and wait until the first process has committed the step.

    Raises:
        WriteFailed: the save failed, here or in another process.
    """
    part, files, failure = job.spread.part, dict[str, File](), None
    try:
        if part is not None:
            files = _write_part(job, part)
            failpoint("snapshot.sync")
            sync_tree(parts.folder(job.staging, job.spread.parts, part))
            failpoint("snapshot.verify")
            _read_back(job, part, files)
            failpoint("snapshot.part")
    except Exception as error:
        failure = _failed(job, error, f"process {job.channel.rank}")
    try:
        job.channel.send([{name: list(file) for name, file in files.items()}, processes.error_sent(failure)], 0)
        sent = job.channel.receive(0)
    except RankError as error:
        raise _failed(job, error, f"step {job.manifest.step}") from error
    if sent is not None:
        raise processes.error_received(sent)


def _files_of(job: Job, rank: int) -> dict[str, File]:
    """The files that another process has written.

    Raises:
        WriteFailed: it could not write them.
        RankError: it has ended, or did not answer in time.
    """
    files, failure = job.channel.receive(rank)
    if failure is not None:
        raise processes.error_received(failure)
    return {name: File(*file) for name, file in files.items()}


def _answer(job: Job, failure: WriteFailed | None) -> None:
    """Tell the other processes how the save has ended."""
    for rank in range(1, job.channel.size):
        with suppress(RankError):
            job.channel.send(processes.error_sent(failure), rank)


def _failed(job: Job, error: Exception, who: str) -> WriteFailed:
    """The error of this save, which names a step or a process."""
    if isinstance(error, WriteFailed | RankError):
        failed = error
    else:
        size = sum(buffer.numel() * buffer.itemsize for buffer in job.buffers.values())
        failed = write_failed(job.root / str(job.manifest.step), error, size=size)
    named = WriteFailed(f"{who}: {failed.what}", where=failed.where, hint=failed.hint)
    named.errno = getattr(failed, "errno", None)
    return named


def _write_part(job: Job, part: int) -> dict[str, File]:
    """Write the values that this process holds, and in the first one the history; returns the files."""
    failpoint("snapshot.stage")
    count = job.spread.parts
    folder = parts.folder(job.staging, count, part)
    if count > 1:
        job.staging.mkdir(exist_ok=True)
    else:
        remove_tree(folder)
    arrays = {path: (staging_.NAMES[x.dtype], staging_.array(x)) for path, x in job.buffers.items()}
    if arrays:
        try:
            orbax_io.write(folder, arrays)
        except FileNotFoundError:
            # On a busy machine orbax (0.12.8) may find its new directory there already, remove it, and then miss it. If
            # it is the run's directory that is gone, this fails again.
            _remove_written(folder)
            orbax_io.write(folder, arrays)
    folder.mkdir(parents=True, exist_ok=True)
    if part == 0 and job.history is not None:
        history.write(folder, job.history)
    failpoint("snapshot.digest")
    return manifests.inventory(job.staging, below="" if count == 1 else folder.name)


def _read_back(job: Job, part: int, files: Mapping[str, File]) -> None:
    """Compare the files of a part, and in the first process the manifest, with what was written."""
    try:
        manifest = job.manifest.model_copy(update={"files": files}) if part else manifests.read(job.staging)
        manifests.check_files(job.staging, manifest, part)
    except Corrupt as error:
        raise WriteFailed(
            f"the snapshot reads back as damaged: {error.what}", where=error.where, hint="check the disk"
        ) from error


def _clear(root: Path, step: int, staging: Path) -> None:
    # The disk may fail here too; the next writer removes the rest.
    with suppress(OSError):
        directory.restore_replaced(root, step)
    _remove_written(staging)


def _remove_written(folder: Path) -> None:
    """Remove what orbax has written of a folder."""
    for leftover in (folder, Path(f"{folder}.orbax-checkpoint-tmp")):
        for _ in range(_CLEARINGS):  # orbax's threads may still write other arrays
            with suppress(OSError):
                remove_tree(leftover)
            if not os.path.lexists(leftover):
                break
            time.sleep(_PAUSE)


def _commit(job: Job, staging: Path) -> None:
    target = job.root / str(job.manifest.step)
    if job.overwrite and target.exists():
        failpoint("snapshot.replace")
        os.rename(target, directory.replaced(job.root, job.manifest.step))
    failpoint("snapshot.commit")
    os.rename(staging, target)
    try:
        failpoint("snapshot.committed")
        sync_directory(job.root)
    except OSError as error:
        text = f"is written, and its name may not survive a power cut: {error}"
        raise WriteFailed(text, where=str(job.root), hint="check the disk") from error


def _retire(job: Job) -> None:
    """Delete steps that are no longer kept. The new step is there, so an error of the disk is only logged."""
    try:
        remove_tree(directory.replaced(job.root, job.manifest.step))
        if job.keep is None:
            return
        found = directory.intact(job.root)
        kept = {manifest.step for manifest in found[-job.keep :]} | {job.manifest.step}
        monitor = job.manifest.monitor
        if monitor is not None and job.keep_best:  # a step that was saved under another monitor is not ranked
            ranked = [manifest for manifest in found if manifest.monitor == monitor]
            kept |= set(directory.best(ranked, *monitor, count=job.keep_best))
        for manifest in found:
            if manifest.step not in kept:
                directory.retire(job.root, manifest.step)
    except OSError as error:
        text = "%s: step %d is written, but older ones could not be deleted: %s (cure: check the disk, or delete them)"
        _log.warning(text, job.root, job.manifest.step, error)


class Background:
    """Runs at most one job at a time in a thread, and stores its error."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()

    @property
    def busy(self) -> bool:
        """True while a job of this process runs."""
        return self._thread is not None and self._pid == os.getpid() and self._thread.is_alive()

    def start(self, job: Callable[[], Any], *, holding: object = None) -> None:
        """Start a job; the one before has ended (`join`). ``holding`` lives till the job ends."""
        _finish_at_exit(self)
        self._thread = threading.Thread(target=self._run, args=(job, holding), name="purestep-snapshot")
        self._thread.start()

    def _run(self, job: Callable[[], Any], holding: object) -> None:
        del holding  # the thread's arguments keep it
        time.sleep(0.001)  # let the caller continue first: it could wait 5 ms for the interpreter's lock
        try:
            job()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Wait until no job runs; its error stays for `take_error`. Returns at once in a forked child."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join()
            self._thread = None

    def take_error(self) -> BaseException | None:
        """Return the error of the last job, and forget it."""
        error, self._error = self._error, None
        return error


_unfinished: weakref.WeakSet[Background] = weakref.WeakSet()
_hooked: list[int] = []


def _finish_at_exit(background: Background) -> None:
    """Let the end of a script without `close` wait for the last save."""
    _unfinished.add(background)
    if os.getpid() in _hooked:
        return
    _hooked.append(os.getpid())
    assert concurrent.futures.thread
    # atexit is too late: executors, which orbax uses, no longer accept work then. The name is private, hence the
    # default; without it the context manager still waits.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_finish_all, os.getpid())


def _finish_all(pid: int) -> None:
    if os.getpid() != pid:  # a forked worker does not have this thread and would wait for ever
        return
    for background in list(_unfinished):
        background.join()
        error = background.take_error()
        if error is not None:
            _log.error("the last save failed: %s (cure: end with snapshots.close(), which raises)", error)
