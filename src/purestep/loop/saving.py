"""The snapshots that a run saves, and the state of its best row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import data, events, files, tree
from ..compile import batch_sizes, plain
from ..errors import NotFound
from ..parallel import processes
from ..snapshot import Snapshots
from ..step import unreached
from ..types import Program, Tree
from .loop_state import Cell, LoopState, to_json

_log = logging.getLogger("purestep")


class Checkpointer:
    """Saves the snapshots of a run: at most one per call of the step, whatever made it due.

    Args:
        snapshots: None to save nothing.
        feed: what it stores (`Feed.position`) is saved with the state.
        program: what its calls have met is saved too: `batch_sizes` and `step.unreached`.
        saved: the call that the state was restored from, if it was.
    """

    def __init__(self, snapshots: Snapshots | None, feed: data.Feed, program: Program, *, saved: int | None) -> None:
        self.snapshots = snapshots
        self._feed = feed
        self._program = program
        self._saved = saved
        self._has_position = snapshots is None  # the feed has answered once
        self._rows: dict[int, dict[str, float]] = {}  # call -> its row of the history; the last one, until it is saved

    @property
    def directory(self) -> Path | None:
        """That of the snapshots; None to save nothing."""
        return None if self.snapshots is None else self.snapshots.directory

    def count_from(self, loop: LoopState) -> None:
        """Let the policy of the snapshots count from here."""
        if self.snapshots is not None:
            self.snapshots.count_from(updates=loop.updates, epoch=loop.epoch)

    def check(self) -> None:
        """Raise the error of the background writer, if it has failed."""
        if self.snapshots is not None:
            self.snapshots.check()

    def check_position(self, loop: LoopState) -> None:
        """Ask the feed for its position, at the first call of the run alone: the first snapshot may be hours away.

        Raises:
            DataError: a snapshot cannot store it.
        """
        if not self._has_position:
            self._has_position = True
            self._feed.position(loop.epoch, loop.batch)

    def is_saved(self, loop: LoopState) -> bool:
        """True if this call has a snapshot."""
        return self._saved == loop.calls

    def due(self, loop: LoopState) -> tuple[str, ...]:
        """The settings that make a snapshot due here."""
        if self.snapshots is None or self._saved == loop.calls:
            return ()
        return self.snapshots.due(updates=loop.updates_at_most, epoch=loop.epoch)

    def add_row(self, loop: LoopState, row: Mapping[str, Cell]) -> None:
        """Store the row of this call: its snapshot is ranked by it."""
        self._rows = {loop.calls: {name: float(value) for name, value in row.items() if value is not None}}

    def save(self, state: Tree, loop: LoopState) -> events.Saved | None:
        """Hand a snapshot to the writer, unless this call has one. A row replaces a snapshot without it."""
        again = self._saved == loop.calls
        metrics = self._rows.pop(loop.calls, {})
        if self.snapshots is None or (again and not metrics):
            return None
        files.failpoint("loop.snapshot")
        self.count_from(loop)  # also for a save that fails, which is not due again at the next call
        stored: dict[str, Any] = {"record": to_json(loop), "feed": self._feed.position(loop.epoch, loop.batch)}
        # Stored with the state: the graphs for the sizes of batches, and the parameters that a flush leaves out.
        sizes, names = zip(*processes.gathered((batch_sizes(self._program), unreached(self._program))), strict=True)
        stored |= {"sizes": sizes} if any(sizes) else {}
        stored |= {"unreached": sorted(set().union(*names))} if any(names) else {}
        self._saved = loop.calls
        self.snapshots.save(loop.calls, state, loop=stored, metrics=metrics, history=loop.history, overwrite=again)
        return events.Saved(loop.calls, self.snapshots.directory / str(loop.calls))

    def wait(self) -> None:
        """Wait until every snapshot is committed."""
        if self.snapshots is not None:
            self.snapshots.wait()


class BestState:
    """The state of the best row so far, for `FitResult.best_state`.

    A run with snapshots reads it from the snapshot that it saved there. A run without them keeps a copy on the host.

    Args:
        snapshots: None if the run saves none, or deletes the best one.
        resume: the setting; a path may name the directory of the best snapshot.
        state: at the start of the run; a run that fails may leave no state with memory.
    """

    def __init__(self, snapshots: Snapshots | None, resume: str | None, state: Tree) -> None:
        self._snapshots = snapshots
        self._resume = [] if resume in (None, "auto") else [Path(resume).absolute()]
        self._kept: tuple[tree.TreeDef, list[tuple[torch.device, Tensor]]] | None = None
        self._places: list[tuple[Path, int]] = []
        leaves, treedef = tree.flatten(state)
        empty = [torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape) for leaf in leaves]
        self._template = tree.unflatten(treedef, empty)  # it takes no memory

    def keep(self, state: Tree) -> None:
        """Keep the state of the best row; it is saved already if the run has snapshots."""
        if self._snapshots is None:
            leaves, treedef = tree.flatten(plain(state))
            self._kept = treedef, [(leaf.device, leaf.detach().to("cpu", copy=True)) for leaf in leaves]

    def end(self, loop: LoopState) -> None:
        """Remember where the best state is: the run has ended."""
        directories = [] if self._snapshots is None else [self._snapshots.directory]
        self._snapshots = None  # locks and threads, which a pickled result cannot have
        if loop.best_step is not None:
            self._places = [(directory, loop.best_step) for directory in directories + self._resume]

    def __repr__(self) -> str:
        place = "in memory" if self._kept is not None else f"in {self._places[0][0]}" if self._places else "nowhere"
        return f"<best state {place}>"

    def __call__(self) -> Tree | None:
        """Return the best state on the device of the run; None without a monitor, or if nothing has kept it.

        Raises:
            Corrupt, Mismatch: the snapshot is damaged, or another one.
        """
        if self._kept is not None:
            treedef, copies = self._kept
            return tree.unflatten(treedef, [copy.to(device, copy=True) for device, copy in copies])
        for directory, step in self._places:
            try:
                return Snapshots(directory, writer=False).restore(self._template, step=step).state
            except NotFound as error:
                _log.warning("the best state is not in the snapshots: %s", error)
        return None
