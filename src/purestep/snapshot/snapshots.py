"""`Snapshots`: save, restore, list the steps, and decide when the next snapshot is due."""

from __future__ import annotations

import logging
import os
import secrets
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import tree
from ..errors import ConfigError, Corrupt, NotFound, RankError, SnapshotError, WriteFailed
from ..files import DirectoryLock, failpoint, local_path
from ..parallel import mesh as meshes
from ..parallel import processes
from ..state import check_choice, check_count, check_range
from ..types import Tree
from . import directory, orbax_io, parts, reader, staging, writer
from . import history as history_
from . import manifest as manifests
from .reader import Snapshot
from .versions import environment
from .writer import Background

_log = logging.getLogger("purestep")
_SAME = (
    "build the same program in every process, and call save(int(state.step), state) in each after the same call of the "
    "step"
)


class _Mark(NamedTuple):
    """A position of a run."""

    updates: int
    epoch: int  # finished ones
    seconds: float  # of a monotonic clock


class Snapshots:
    """Snapshots of a training state in a directory. orbax writes them in the background; reading verifies them.

    Example:
        >>> import tempfile, torch
        >>> state = {"w": torch.arange(3.0), "step": torch.tensor(7)}
        >>> with Snapshots(tempfile.mkdtemp()) as snapshots:
        ...     snapshots.save(7, state, metrics={"val_loss": 0.5})
        ...     found = snapshots.restore(state)
        >>> found.step, found.state["w"].tolist(), found.metrics
        (7, [0.0, 1.0, 2.0], {'val_loss': 0.5})

    A step is saved when `steps` lists it: it is complete, flushed to the disk, and was read back once. A kill or a
    power cut leaves the earlier steps intact. Use the object as a context manager; a script without one waits for
    its last save too. To read while a run writes, pass ``writer=False``, which takes no lock.

    On several processes (`parallel.start`), every process creates the object with the same arguments, and calls `open`,
    `save`, `restore` and `start_over` at the same places: they are collectives. Each process writes and reads its own
    rows of a state of `distribute`; the first one commits, archives and deletes, for all. A snapshot fits any number of
    processes, and one written by one process is not different from one of replicated states. The directory must be on
    a disk that all processes share. The other methods, `wait` and `close` among them, are no collectives: they may be
    called by one process, or while an error ends it. `wait` returns in every process after the commit, or raises the
    same error. All processes list the same steps after `wait`.

    The first save imports orbax and JAX. They add a handler to the root logger (call `logging.basicConfig` before) and
    start threads. JAX's warning at later forks of workers, which never use it, is filtered out, unless your program
    imports JAX itself, before. JAX is kept off the GPU's memory, unless it runs already or its platforms are set
    (``JAX_PLATFORMS``, or ``jax_platforms`` of ``jax.config``).

    Args:
        directory: the directory. `open` creates it: on entering ``with``, in `fit`, or at the first save.
        every_steps: a snapshot is due at each multiple of this many optimizer updates, at least 1. None: never.
        every_epochs: a snapshot is due at each multiple of this many epochs, at least 1. None: never.
        every_seconds: a snapshot is due when the last one is this old, in seconds > 0. None: never.
        keep: the number of newest steps to keep, at least 1. None: all.
        keep_best: the number of steps with the best ``monitor`` to keep as well, at least 0.
        monitor: the metric of ``save(metrics=...)`` that decides which step is best.
        mode: ``"min"`` or ``"max"``: which values of the monitor are better.
        writer: False: the object only reads, and `save` raises.
        strict: True: `restore` raises instead of falling back to an older step.
        on_save_error: ``"raise"``, or ``"continue"``: log a failed save and count it in ``failed``.

    Raises:
        ConfigError: a value is out of its range, the directory is empty text or a URL, or its path has a backslash or,
            for a writer, an opening square bracket.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        every_seconds: float | None = None,
        keep: int | None = 3,
        keep_best: int = 1,
        monitor: str | None = None,
        mode: str = "min",
        writer: bool = True,
        strict: bool = False,
        on_save_error: str = "raise",
    ) -> None:
        if keep is not None:
            check_count("Snapshots", least=1, cure="keep=1, or keep=None for all", keep=keep)
        check_count("Snapshots", least=0, cure="keep_best=0 for none", keep_best=keep_best)
        for name, count in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if count is not None:
                check_count("Snapshots", least=1, cure=f"{name}=1, or {name}=None for never", **{name: count})
        if every_seconds is not None:
            check_range("Snapshots", 0, ends="()", cure="every_seconds=None for never", every_seconds=every_seconds)
        check_choice("Snapshots", ("raise", "continue"), on_save_error=on_save_error)
        self.directory = local_path("Snapshots", directory=directory).absolute()
        _check_name(self.directory, writer=writer)
        self.keep = keep
        self.keep_best = keep_best
        self.strict = strict
        self.waits = 0  # saves that waited for the previous one; more than a few: the interval is too short
        self.failed = 0  # saves, with on_save_error="continue"
        self._continues = on_save_error == "continue"
        self._every = every_steps, every_epochs, every_seconds
        self._monitor: tuple[str, str] | None = None
        self._is_writer = writer
        self._lock = DirectoryLock(self.directory)
        self._background = Background()
        self._paths = tree.Paths()
        self._buffers: staging.Buffers = {}  # of the last save; the next one reuses them
        self._restored: int | None = None  # the step that was restored since the last save
        self._channel: processes.Channel | None = None  # to the writers of the other processes, while it is open
        self._closed = False
        self._pid = os.getpid()
        self._last = _Mark(0, 0, time.monotonic())  # `due` counts from it
        self._asked: _Mark | None = None  # where `due` was called last: `save` makes it the last mark
        if monitor is not None:
            self.track(monitor, mode=mode)

    # --- open and close -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the directory for writing and remove leftovers of killed runs. `save` calls it if necessary.

        Raises:
            Locked: another run writes into the directory.
            WriteFailed: the directory cannot be created or written to.
            SnapshotError: this object is closed, only reads, or was created in another process.
            RankError: the processes have different directories, or the mesh is another one than before.
        """
        hint = "create a Snapshots after the fork"
        if self._pid != os.getpid():
            raise SnapshotError(
                f"the Snapshots was created in process {self._pid}", where=str(self.directory), hint=hint
            )
        if self._closed:
            raise SnapshotError("the Snapshots is closed", where=str(self.directory), hint="save inside the with block")
        if not self._is_writer:
            raise SnapshotError("the Snapshots was opened to read", where=str(self.directory), hint="pass writer=True")
        here = meshes.here()
        if self._channel is None:
            self._acquire()
        elif (here.rank, here.size) != (self._channel.rank, self._channel.size):
            raise RankError(
                f"the Snapshots was opened by {self._channel.size} processes, and now there are {here.size}",
                where=str(self.directory),
                hint="create, use and close a Snapshots inside one `with ps.parallel.start(...)`",
            )

    def _acquire(self) -> None:
        def lock() -> None:
            self._lock.acquire()
            directory.sweep(self.directory)

        paths = processes.gathered(str(self.directory))
        if any(path != paths[0] for path in paths):
            raise RankError(
                f"the processes have the directories {', '.join(dict.fromkeys(paths))}",
                where="Snapshots",
                hint="pass the same directory in every process, on a shared disk",
            )
        try:
            processes.first(lock)
            self._channel = processes.Channel()
        except BaseException:
            self._lock.release()
            raise

    def wait(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            WriteFailed: the save failed; older steps are intact.
        """
        self._background.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a save that failed since the last check. Does not wait.

        Raises:
            WriteFailed: a step was not written; the message names it.
        """
        self._report(self._background.take_error())

    def _report(self, error: BaseException | None) -> None:
        if error is None:
            return
        if not (self._continues and isinstance(error, WriteFailed)):
            raise error
        self.failed += 1
        _log.error("the run continues without a snapshot: %s", error)

    def close(self) -> None:
        """Wait for the last save and unlock the directory. Reading still works afterwards.

        Raises:
            WriteFailed: as in `wait`; the directory is unlocked all the same.
        """
        if self._pid != os.getpid():
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._buffers = {}
            if not self._background.busy:  # else Ctrl-C interrupted the wait; the end of the script waits
                self._lock.release()
                if self._channel is not None:
                    self._channel.close()

    def __enter__(self) -> Snapshots:
        if self._is_writer:
            self.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except SnapshotError as failed:
            if error is None:
                raise
            error.add_note(f"the last save failed too: {failed}")

    # --- due ------------------------------------------------------------------------------------------------------

    def count_from(self, *, updates: int, epoch: int, now: float | None = None) -> None:
        """Let `due` count from here: from the start of a run, or a save. Arguments as in `due`."""
        self._last = _Mark(updates, epoch, time.monotonic() if now is None else now)
        self._asked = None

    def due(self, *, updates: int, epoch: int, now: float | None = None) -> tuple[str, ...]:
        """The settings that make a snapshot due now: any of ``every_steps``, ``every_epochs``, ``every_seconds``.

        Example:
            >>> snapshots = Snapshots("runs/a", every_steps=10)
            >>> snapshots.due(updates=9, epoch=0), snapshots.due(updates=10, epoch=1)
            ((), ('every_steps', 'every_epochs'))
            >>> snapshots.count_from(updates=10, epoch=1)  # or: snapshots.save(10, state)
            >>> snapshots.due(updates=11, epoch=1)
            ()

        Several at once need one snapshot. `fit` calls this, and so may a loop of your own; `save` itself always
        saves. A multiple is due once it lies after the last `save` (at the numbers that `due` got before it) or after
        `count_from`; seconds count from there.

        Args:
            updates: optimizer updates so far.
            epoch: finished epochs so far.
            now: the time of `time.monotonic` in seconds; by default the current time.
        """
        last, here = self._last, _Mark(updates, epoch, time.monotonic() if now is None else now)
        self._asked = here
        steps, epochs, seconds = self._every
        found = {  # a skipped multiple counts: with 3 updates at a time and every_steps=4 at 6, 9, 12, ...
            "every_steps": steps is not None and here.updates // steps > last.updates // steps,
            "every_epochs": epochs is not None and here.epoch // epochs > last.epoch // epochs,
            "every_seconds": seconds is not None and here.seconds - last.seconds >= seconds,
        }
        return tuple(name for name, is_due in found.items() if is_due)

    def track(self, monitor: str, *, mode: str = "min") -> None:
        """Set the metric that decides which step is best, unless one is set already.

        Raises:
            ConfigError: ``mode`` is neither ``"min"`` nor ``"max"``.
        """
        check_choice("Snapshots", ("min", "max"), mode=mode)
        if self._monitor is None:
            self._monitor = (monitor, mode)

    def keeps_best(self, monitor: str, *, mode: str = "min") -> bool:
        """True if the step with the best value of this metric is never deleted.

        Example:
            >>> Snapshots("runs/a", monitor="val_loss").keeps_best("val_loss")
            True
        """
        keeps = self.keep_best > 0 or self.keep is None
        return keeps and self._monitor == (monitor, mode) and not self._continues

    # --- list --------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed and intact steps, in ascending order.

        Checks manifests and file sizes; only `restore` checks all values. A running save is not included.
        """
        return [manifest.step for manifest in directory.intact(self.directory)]

    def latest(self) -> int | None:
        """The newest of `steps`, or None.

        None does not mean that the directory is empty: only `restore` distinguishes damaged steps from none.
        """
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best value of the monitor, or None if no step has one.

        If this object has no monitor, the monitor of the newest step is used. NaN is never best. Of equal values the
        oldest step is best.
        """
        found = directory.intact(self.directory)
        monitor = self._monitor or (found[-1].monitor if found else None)
        ranked = directory.best(found, *monitor) if monitor else []
        return ranked[0] if ranked else None

    def start_over(self, *, after: int | None = None) -> list[int]:
        """Rename steps to ``<step>.archived``, intact or damaged ones, and return them: a run begins again before them.

        Example:
            >>> import tempfile, torch
            >>> with Snapshots(tempfile.mkdtemp()) as snapshots:
            ...     for step in (5, 10):
            ...         snapshots.save(step, {"w": torch.ones(1)})
            ...     snapshots.wait()
            ...     snapshots.start_over(after=5), snapshots.steps()
            ([10], [5])

        Args:
            after: only newer steps than this one. By default all steps.

        Raises:
            Locked, WriteFailed, SnapshotError, RankError: as in `open`.
        """
        self.open()
        self._background.join()

        def archive() -> list[int]:
            found = [step for step in directory.numbered(self.directory) if after is None or step > after]
            for step in reversed(found):  # a run that is killed here keeps a whole beginning
                failpoint("snapshot.archive")
                directory.set_aside(self.directory, step, "archived")
            return found

        found = processes.first(archive)
        self._restored = None
        return found

    def check_space(self, state: Tree) -> None:
        """Warn if the disk has no room for the snapshots of this state to keep. Call it before the first step.

        Raises:
            StateError: a leaf cannot be stored.
        """
        described = parts.described(staging.kinds(tree.with_paths(state)), parts.spread(state))
        if meshes.here().rank:
            return
        size = sum(leaf.nbytes for leaf in described.values() if leaf.is_stored)
        # One more than is kept: an old step is deleted only after the new one is committed.
        directory.check_room(self.directory, size * max(1, (self.keep or 1) + self.keep_best + 1 - len(self.steps())))

    # --- save -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Tree,
        *,
        loop: Any = None,
        metrics: Mapping[str, Any] | None = None,
        meta: Any = None,
        history: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Copy the state to host memory, return, and write the copy in the background.

        The state may be donated or changed after the return. One save runs at a time; another one waits for it
        (counted in ``waits``). Steps only grow: to go on from an older step that was restored, call
        ``start_over(after=step)`` first.

        Args:
            step: the name of the snapshot, at least 0.
            state: a pytree of tensors, Python numbers and text.
            loop: the state of the loop as JSON: dicts, lists, text, numbers. Of several processes, the first one's
                ``loop``, ``metrics``, ``meta`` and ``history`` are stored.
            metrics: numbers by name; the monitored one decides which step is best.
            meta: notes as JSON.
            history: columns of numbers and None, one row each time something was measured. They are stored as one
                array, which takes less time than JSON.
            overwrite: replace the newest step if it has this name.

        Raises:
            SnapshotError: the step is not newer than all others, or an older step was restored and newer ones exist;
                or ``loop`` or ``meta`` are no JSON.
            StateError: a leaf cannot be stored.
            WriteFailed: there is no memory for the copy; or the previous save failed (this one runs all the same).
            Locked: another run writes into the directory.
            RankError: the processes save different steps or states.
        """
        self.open()
        self._last, self._asked = self._asked or self._last, None  # also for a save that fails
        here = meshes.here()
        assert self._channel is not None

        def plan() -> tuple[manifests.Manifest, dict[str, Any], dict[str, staging.Kind], parts.Spread]:
            number = directory.checked_step(self.directory, step)
            paths, leaves = self._paths(state)
            kinds, spread = staging.kinds(zip(paths, leaves, strict=True)), parts.spread(state)
            manifest = manifests.Manifest.model_construct(
                format=manifests.FORMAT,
                step=number,
                leaves={},
                loop=manifests.as_json(loop, where="loop"),
                history=history_.columns(history),
                metrics=manifests.as_metrics(metrics),
                meta=manifests.as_json(meta, where="meta"),
                monitor=self._monitor,
                environment=environment(tree.device(leaves)),
                parts=spread.parts,
            )
            self.waits += self._background.busy
            self._background.join()
            if here.rank == 0:
                directory.check_order(self.directory, number, restored=self._restored, overwrite=overwrite)
            return manifest, dict(zip(paths, leaves, strict=True)), kinds, spread

        try:
            manifest, leaves, kinds, spread = processes.together(plan)
            if here.size > 1:
                described = [(path, leaf.text()) for path, leaf in parts.described(kinds, spread).items()]
                found = zlib.crc32(repr((described, spread.parts, spread.sums)).encode())
                facts = {"the step": manifest.step, "the checksum of the leaves' names and shapes": found}
                processes.check_same(facts, where=str(self.directory), hint=_SAME)
            leaves = parts.completed(leaves, spread)
            processes.together(lambda: self._copy(manifest.step, leaves, spread))
        except WriteFailed as error:
            return self._report(error)
        before = self._background.take_error()  # of the previous save: all processes have the same
        job = writer.Job(
            root=self.directory,
            manifest=manifest,
            kinds=kinds,
            buffers=self._buffers,
            history=None if not history else {name: tuple(column) for name, column in history.items()},
            overwrite=overwrite,
            keep=self.keep,
            keep_best=self.keep_best,
            spread=spread,
            channel=self._channel,
            # Random, so that nobody can put a link there before.
            token=processes.first(lambda: secrets.token_hex(8)),
        )
        self._restored = None
        self._background.start(lambda: writer.run(job), holding=self._lock)
        self._report(before)

    def _copy(self, step: int, leaves: Mapping[str, Any], spread: parts.Spread) -> None:
        """Copy the values that this process stores, into the memory of the last copy where it fits; import orbax.

        Raises:
            WriteFailed: there is no memory for the copy.
        """
        spare, self._buffers = self._buffers, {}
        try:
            failpoint("snapshot.copy")
            self._buffers = staging.stage(parts.own(leaves, spread), spare)
            if self._buffers:
                orbax_io.ready()
        except (MemoryError, RuntimeError) as error:
            failed = _no_memory(error, step, self.directory)
            if failed is None:
                raise
            raise failed from error

    # --- restore --------------------------------------------------------------------------------------------------

    def restore(self, template: Tree, *, step: int | None = None, only: str | Iterable[str] | None = None) -> Snapshot:
        """Read a `Snapshot` (step, state, loop, metrics, meta, history) into new tensors. The template is not changed.

        Args:
            template: a state with the structure, shapes, dtypes and devices of the result.
            step: the step to read; by default the newest intact one. `restore` warns about newer damaged steps, and the
                writer of the directory renames them to ``<step>.corrupt``.
            only: the leaves to read; others are copied from the template and may differ from the snapshot.
                ``"params"`` reads the leaves of ``ps.view(state, "params")`` and their average: parameters (trained or
                frozen in either state) and buffers. ``"params/"`` reads only the trained parameters. Other values are
                path prefixes: ``"params/layers.1"`` reads ``params/layers.1.weight``, not ``params/layers.10.weight``.

        Raises:
            NotFound: there is no snapshot, or none of this step.
            Mismatch: leaves differ; the message has one line for each. No values were read.
            Corrupt: this step is damaged, or all steps are; with ``strict``, the newest one is.
            StateError: a leaf of the template has a type that snapshots cannot store.
        """
        self._background.join()
        prefixes = None if only is None else {only} if isinstance(only, str) else set(only)
        if step is not None:
            hint = "pass the same step in every process"
            processes.check_same({"the step to restore": step}, where=str(self.directory), hint=hint)
            there = processes.first(lambda: directory.numbered(self.directory))
            if step not in there:
                hint = f"pass one of: {', '.join(map(str, there))}" if there else "pass another directory"
                raise NotFound(f"no snapshot of step {step}", where=str(self.directory), hint=hint)
            found = self._read_together(template, step, prefixes)
        else:
            found = self._newest_good(template, prefixes)
        self._restored = found.step
        return found

    def _read_together(self, template: Tree, step: int, prefixes: set[str] | None) -> Snapshot:
        """Read a step in every process, or raise one error in all: a step is intact if every process can read it."""
        return processes.together(lambda: self._read(template, step, prefixes), mild=Corrupt)

    def _read(self, template: Tree, step: int, prefixes: set[str] | None) -> Snapshot:
        folder = directory.place(self.directory, step)
        try:
            return reader.read(folder, template, prefixes, warn=self._is_writer)
        except Corrupt:
            if folder.exists() or not directory.place(self.directory, step).exists():
                raise
        return self._read(template, step, prefixes)  # its writer has moved it in the meantime

    def _newest_good(self, template: Tree, prefixes: set[str] | None) -> Snapshot:
        damaged: dict[int, Corrupt] = {}
        seen: set[int] = set()
        # The first process lists the steps: another one may see them later, on a network disk.
        unseen = lambda: [step for step in directory.numbered(self.directory) if step not in seen]  # noqa: E731
        while there := processes.first(unseen):
            seen.add(step := there[-1])  # the newest, including steps that were saved in the meantime
            try:
                found = self._read_together(template, step, prefixes)
            except Corrupt as error:
                if not processes.first(lambda step=step: directory.place(self.directory, step).exists()):
                    continue  # its writer has deleted it in the meantime
                if self.strict:
                    raise
                damaged[step] = error
                continue
            if newer := {s: error for s, error in damaged.items() if s > step}:
                self._pass_over(newer, step)
            return found
        raise directory.nothing_good(self.directory, damaged)

    def _pass_over(self, damaged: dict[int, Corrupt], used: int) -> None:
        if is_writer := self._is_writer and not self._closed:
            self.open()
        processes.first(lambda: directory.pass_over(self.directory, damaged, used, rename=is_writer))


def _no_memory(error: Exception, step: int, where: Path) -> WriteFailed | None:
    """The error of a save without memory for its copy; None for another error."""
    if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch's form of a MemoryError
        return None
    hint = "use a larger machine or fewer workers: a save needs a copy of the state in host memory"
    return WriteFailed(f"step {step}: no host copy: {type(error).__name__}: {error}", where=str(where), hint=hint)


def _check_name(directory: Path, *, writer: bool) -> None:
    """Raise ConfigError for a path that orbax cannot use: it reads a backslash as a slash, and writes into what a path
    with brackets matches as a pattern."""
    path = directory.as_posix()
    for character in ("\\", "[") if writer else ("\\",):
        if character in path:
            raise ConfigError(
                f"orbax cannot use a directory with {character!r} in its path",
                where=path,
                hint="pass another directory, or rename this one",
            )
