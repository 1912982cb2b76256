"""The directory as the loop sees it: save, restore, which steps there are, when the next one is due."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import tree
from ..errors import ConfigError, Corrupt, NotFound, SnapshotError, WriteFailed
from ..files import DirectoryLock
from ..types import Tree
from . import directory, orbax_io, reader, save_policy, staging, state_copy, writer
from . import manifest as manifests
from . import writer as writer_
from .directory import Abandoned
from .history_rows import RowsFile, Table
from .reader import Snapshot
from .versions import environment

_log = logging.getLogger("purestep")


class Snapshots:
    """Snapshots of a training state in a directory, written by orbax in the background, verified when read.

    A step counts as saved when `steps` lists it: whole, flushed to the disk, read back once. A kill or a power cut at
    any moment leaves the steps listed before it. Use it as a context manager; a script that ends without one waits for
    its last save as well. To read beside a run that writes: ``Snapshots(directory, writer=False)``, without a lock.

    The first save, or restore of a leaf above 1 MB, imports orbax and JAX: a handler on the root logger (call
    `logging.basicConfig` before) and threads (Python 3.12 and JAX warn when a DataLoader forks workers; no harm done).

    Args:
        directory: made by `open`: on entering ``with``, by `fit`, or on the first save.
        every_steps: a snapshot is due each time this many optimizer updates are done, at least 1; None: never.
        every_epochs: a snapshot is due each time this many epochs are done, at least 1; None: never.
        every_seconds: a snapshot is due when the last one is this old, in seconds > 0; None: never.
        keep: how many of the newest steps stay, at least 1; None for all.
        keep_best: how many of the best by ``monitor`` stay beside them, at least 0.
        monitor: the metric, out of ``save(metrics=...)``, that decides which step is best.
        mode: ``"min"`` or ``"max"``: which values of the monitor are good.
        writer: False makes the object read only: `save` raises.
        strict: whether `restore` raises where it would fall back to an older step.
        on_save_error: ``"raise"``, or ``"continue"``: a save that fails is logged and counted in ``failed``, no more.
        jax_platforms: what JAX, which orbax runs on, may start: the CPU only, so that it takes no GPU memory. None
            leaves JAX alone, for programs that use JAX on the GPU themselves.

    Raises:
        ConfigError: a number out of range, or another word than those above.

    Example:
        >>> import tempfile, torch
        >>> state = {"w": torch.arange(3.0), "step": torch.tensor(7)}
        >>> with Snapshots(tempfile.mkdtemp()) as snapshots:
        ...     snapshots.save(7, state, metrics={"val_loss": 0.5})
        ...     found = snapshots.restore(state)
        >>> found.step, found.state["w"].tolist(), found.metrics
        (7, [0.0, 1.0, 2.0], {'val_loss': 0.5})
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
        jax_platforms: str | None = "cpu",
    ) -> None:
        save_policy.check_policy(keep, keep_best, on_save_error)
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.keep_best = keep_best
        self.strict = strict
        self.waits = 0  # saves that had to wait for the one before: more than a few, and the interval is too short
        self.failed = 0  # saves, with on_save_error="continue"
        self._goes_on = on_save_error == "continue"
        self._every = save_policy.every(every_steps, every_epochs, every_seconds)
        self._monitor: tuple[str, str] | None = None
        self._is_writer = writer
        self._platforms = jax_platforms
        self._lock = DirectoryLock(self.directory)
        self._background = writer_.Background()
        self._copies = state_copy.Copies()
        self._abandoned = Abandoned()
        self._rows: dict[str, RowsFile] = {}  # the writer's
        self._closed = False
        self._pid = os.getpid()
        self._last = self._here = save_policy.Mark(0, 0, time.monotonic())
        if monitor is not None:
            self.track(monitor, mode=mode)

    # --- life -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Takes the directory for writing and clears away what a killed run left; `save` does it where nobody did.

        Raises:
            Locked: another run writes there.
            WriteFailed: the directory cannot be made or written to.
            SnapshotError: this object is closed, read only, or was made in another process.
        """
        hint = "a Snapshots of its own, after the fork"
        if self._pid != os.getpid():
            raise SnapshotError(f"was made in process {self._pid}", where=str(self.directory), hint=hint)
        if self._closed:
            raise SnapshotError("is closed", where=str(self.directory), hint="save inside the with block")
        if not self._is_writer:
            raise SnapshotError("was opened to read", where=str(self.directory), hint="Snapshots(directory)")
        if not self._lock.held:
            self._lock.acquire()
            try:
                directory.probe(self.directory)
                directory.sweep(self.directory)
            except BaseException:
                self._lock.release()
                raise

    def wait(self) -> None:
        """Returns when the last save is on the disk.

        Raises:
            WriteFailed: it is not; older steps are whole.
        """
        self._background.join()
        self.check()

    def check(self) -> None:
        """Raises what went wrong in the background since anybody last asked; does not wait.

        Raises:
            WriteFailed: names the step that was not written.
        """
        self._tell(self._background.take_error())

    def _tell(self, error: BaseException | None) -> None:
        if error is None:
            return
        if not (self._goes_on and isinstance(error, WriteFailed)):
            raise error
        self.failed += 1
        _log.error("the run goes on without a snapshot: %s", error)

    def close(self) -> None:
        """Waits for the last save and gives the directory back; reading goes on working.

        Raises:
            WriteFailed: as `wait`; the directory is given back all the same.
        """
        if self._pid != os.getpid():
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._copies.clear()
            if not self._background.busy:  # else Ctrl-C broke the wait, and the script's end waits instead
                self._lock.release()

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
            error.add_note(f"and the last save failed: {failed}")

    # --- when -----------------------------------------------------------------------------------------------------

    def begin(self, *, updates: int, epoch: int, now: float | None = None) -> None:
        """Tells where a run starts or goes on, so that `due` counts from there. Arguments as for `due`."""
        self._last = self._here = save_policy.Mark(updates, epoch, time.monotonic() if now is None else now)

    def due(self, *, updates: int, epoch: int, now: float | None = None) -> tuple[str, ...]:
        """What asks for a snapshot at this boundary: some of ``every_steps``, ``every_epochs``, ``every_seconds``.

        Several at once are one snapshot. The next `save` counts as the answer, whatever led to it. A run that has gone
        back comes to the same multiples again.

        Args:
            updates: optimizer updates done so far.
            epoch: epochs finished so far.
            now: reading of `time.monotonic`, in seconds; taken here by default.

        Example:
            >>> snapshots = Snapshots("runs/a", every_steps=10)
            >>> snapshots.due(updates=9, epoch=0), snapshots.due(updates=10, epoch=1)
            ((), ('every_steps', 'every_epochs'))
        """
        self._here = save_policy.Mark(updates, epoch, time.monotonic() if now is None else now)
        self._last = save_policy.gone_back(self._last, self._here)
        return save_policy.due(self._every, self._last, self._here)

    def track(self, monitor: str, *, mode: str = "min") -> None:
        """Sets the metric that decides which step is best, unless one is set already.

        Raises:
            ConfigError: ``mode`` is neither ``"min"`` nor ``"max"``.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode is {mode!r}", where="Snapshots", hint='mode="min" or mode="max"')
        if self._monitor is None:
            self._monitor = (monitor, mode)

    # --- what is there --------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are committed and whole, in ascending order.

        Whole by manifest and file sizes; `restore` looks at every number. A save in flight is not among them.
        """
        return [entry.step for entry in directory.entries(self.directory)]

    def latest(self) -> int | None:
        """The newest of `steps`, or None.

        None does not mean a fresh start: ask `restore`, which tells a damaged directory from an empty one.
        """
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best value of the monitor (of the run that wrote the newest step, where none is set here).

        None where no step has a value of it; NaN is never best; of equal values the oldest.
        """
        found = directory.entries(self.directory)
        monitor = self._monitor or (found[-1].monitor if found else None)
        ranked = directory.best(found, *monitor) if monitor else []
        return ranked[0] if ranked else None

    def start_over(self) -> list[int]:
        """Sets all steps aside, whole or damaged, as ``<step>.archived``; returns which. Raises what `open` does."""
        self.open()
        for step in (found := directory.numbered(self.directory)):
            directory.set_aside(self.directory, step, "archived")
        return found

    def check_space(self, state: Tree) -> None:
        """Warns when the disk has no room for the snapshots of this state that will be kept; for before the first step.

        Raises:
            StateError: a leaf that cannot be stored.
        """
        described = manifests.describe(tree.with_paths(state))
        size = sum(staging.size(leaf.dtype, leaf.shape) for leaf in described.values() if leaf.is_stored)
        # One more than is kept: an old step goes only after the new one is there.
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
        overwrite: bool = False,
    ) -> None:
        """Copies the state to host memory, returns, and writes it in the background.

        The copy is made before this returns: the state may be donated or changed right after. One save is in flight at
        a time; a second one waits for the first (counted in ``waits``).

        Args:
            step: its name, 0 or more.
            state: any pytree of tensors (and of plain Python numbers and texts).
            loop: the loop's own record, as JSON: dicts, lists, texts, numbers.
            metrics: numbers by name; the monitored one among them decides which step is best.
            meta: notes, as JSON.
            overwrite: replaces the newest step, where it has that name.

        Raises:
            SnapshotError: the step is there already, or older than the newest one without a `restore` of an even older
                one (after such a restore, or one before anything else, the steps that follow it are renamed to
                ``<step>.archived``); or ``loop`` or ``meta`` are no JSON.
            StateError: a leaf that cannot be stored.
            WriteFailed: no memory for the copy; or the save before failed, and this one is under way all the same.
            Locked: another run writes into the directory.
        """
        self.open()
        step = directory.checked_step(self.directory, step)
        look = self._copies.look(state)
        tables: dict[str, Table] = {}
        manifest = manifests.Manifest(
            step=step,
            leaves=look.layout.records,
            loop=manifests.as_json(loop, where="loop", tables=tables),
            metrics=manifests.as_metrics(metrics),
            meta=manifests.as_json(meta, where="meta"),
            monitor=self._monitor,
            environment=environment(look.layout.device),
            files={},
        )
        self.waits += self._background.busy
        self._background.join()
        archive = directory.to_archive(self.directory, step, abandoned=self._abandoned, overwrite=overwrite)
        try:
            buffers = writer.copied(self.directory, step, lambda: self._copies.make(look))
        except WriteFailed as error:
            return self._tell(error)
        job = writer.Job(
            root=self.directory,
            manifest=manifest,
            buffers=buffers,
            tables=tables,
            rows=self._rows,
            overwrite=overwrite,
            archive=archive,
            abandoned=self._abandoned,
            keep=self.keep,
            keep_best=self.keep_best,
            platforms=self._platforms,
        )
        self._last = self._here
        orbax_io.ready(self._platforms)
        self._tell(self._background.start(lambda: writer.run(job), holding=self._lock))

    # --- restore --------------------------------------------------------------------------------------------------

    def restore(self, template: Tree, *, step: int | None = None, only: str | Iterable[str] | None = None) -> Snapshot:
        """Reads a `Snapshot` (step, state, loop, metrics, meta) into new tensors; the template is not changed.

        Args:
            template: a state of the structure, shapes, dtypes and devices that the result shall have.
            step: which one; by default the newest that is good. A damaged newer one is passed over with a warning and,
                by the directory's writer, renamed to ``<step>.corrupt``.
            only: what to read; the rest is copied from the template, and may differ from what is stored. ``"params"``
                is what ``ps.view(state, "params")`` evaluates, and its average: parameters, trained or frozen in either
                state, and buffers; ``"params/"`` is the trained parameters alone. Else paths, each with what lies under
                it: ``"params/layers.1"`` takes ``params/layers.1.weight``, not ``params/layers.10.weight``.

        Raises:
            NotFound: there is no snapshot, or not that one.
            Mismatch: one line for each leaf that differs, before any data is read.
            Corrupt: that step is damaged, or every step is; with ``strict``, the newest one is.
            StateError: a leaf of the template that no snapshot can hold.
        """
        self._background.join()
        prefixes = None if only is None else {only} if isinstance(only, str) else set(only)
        if step is not None:
            if step not in (there := directory.numbered(self.directory)):
                hint = f"one of: {', '.join(map(str, there))}" if there else "another directory"
                raise NotFound(f"no snapshot of step {step}", where=str(self.directory), hint=hint)
            found = self._read(template, step, prefixes)
        else:
            found = self._newest_good(template, prefixes)
        self._abandoned.restored(self.directory, found.step)
        return found

    def _read(self, template: Tree, step: int, prefixes: set[str] | None) -> Snapshot:
        folder = directory.place(self.directory, step)
        try:
            return reader.read(
                folder, template, prefixes, platforms=self._platforms, tell=self._is_writer, strict=self.strict
            )
        except Corrupt:
            if folder.exists() or not directory.place(self.directory, step).exists():
                raise
        return self._read(template, step, prefixes)  # its writer has moved it meanwhile

    def _newest_good(self, template: Tree, prefixes: set[str] | None) -> Snapshot:
        damaged: dict[int, Corrupt] = {}
        seen: set[int] = set()
        while there := [step for step in directory.numbered(self.directory) if step not in seen]:
            seen.add(step := there[-1])  # the newest, also of those that a writer has saved while this one read
            try:
                found = self._read(template, step, prefixes)
            except Corrupt as error:
                if not directory.place(self.directory, step).exists():  # retired by its writer while this one read
                    continue
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
        directory.pass_over(self.directory, damaged, used, rename=is_writer)
