"""Snapshots of a run: open the directory, find the state to go on from, save, and read the best state."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import data, events, files, tree
from ..compile import LiveState, is_alive, plain, states
from ..errors import ConfigError, Mismatch, NotFound
from ..optim import hyperparameters
from ..snapshot import Snapshot, Snapshots
from ..types import Tree
from . import inputs
from .loop_state import Cell, LoopState, from_json, to_store

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

log = logging.getLogger("purestep")


# --- open -------------------------------------------------------------------------------------------------------------


def open_snapshots(snapshots: Any, config: FitConfig) -> tuple[Snapshots | None, bool]:
    """Return the snapshots to write, and True if this function opened them, so that fit closes them.

    Raises:
        ConfigError: neither a Snapshots nor a path.
        Locked, WriteFailed: the directory cannot be written.
    """
    if snapshots is None or config.fast_dev_run:
        return None, False
    opened, owned = snapshots, False
    if isinstance(snapshots, str | os.PathLike):
        opened, owned = Snapshots(snapshots), True
    elif not isinstance(snapshots, Snapshots):
        raise ConfigError(
            f"snapshots is a {type(snapshots).__name__}", where="fit", hint='"runs/name" or Snapshots("runs/name")'
        )
    opened.open()
    return opened, owned


# --- restore ----------------------------------------------------------------------------------------------------------


class Resumed(NamedTuple):
    """The states to go on from."""

    state: Tree
    loop: LoopState
    is_resumed: bool  # they are those of an interrupted run
    saved: int | None  # the call that the state was saved after; None: it is the initial one


def resumed(state: Tree, snapshots: Snapshots | None, config: FitConfig, feed: data.Feed) -> Resumed:
    """Return the states to go on from.

    Raises:
        Mismatch, NotFound, Corrupt: as `restored`; Mismatch also for another loader.
    """
    snapshot = restored(state, snapshots, config)
    given = _injected(state)
    if snapshot is None:
        return Resumed(state, LoopState(injected=given), is_resumed=False, saved=None)
    if not isinstance(snapshot.loop, Mapping) or "record" not in snapshot.loop:
        # Saved by hand, without a loop's position. Later snapshots get later names.
        loop = LoopState(calls=snapshot.step, injected=given)
        return Resumed(snapshot.state, loop, is_resumed=False, saved=loop.calls)
    feed.restore(snapshot.loop["feed"])
    loop = from_json(snapshot.loop["record"], snapshot.history)
    log.info("resumed from step %d: epoch %d, batch %d", snapshot.step, loop.epoch + 1, loop.batch)
    _warn_of_another_seed(state, snapshot.state, source=config.resume)
    _warn_of_other_hyperparams(loop.injected, given, _injected(snapshot.state))
    return Resumed(snapshot.state, loop._replace(injected=given), is_resumed=True, saved=loop.calls)


def restored(state: Tree, snapshots: Snapshots | None, config: FitConfig) -> Snapshot | None:
    """Return the snapshot to go on from, if there is one.

    The run's own directory comes first: a job that is started again with the same command and a path for ``resume``
    goes on where it was.

    Raises:
        NotFound: ``resume`` names a path without snapshots.
        Mismatch, Corrupt: a snapshot that does not fit, or that is damaged in every copy.
    """
    if snapshots is not None and not config.fast_dev_run:
        snapshots.check_space(state)
    if config.resume is None or config.fast_dev_run:
        _start_over(snapshots)
        return None
    if config.resume != "auto":
        source = Snapshots(Path(config.resume).absolute(), writer=False)
        if snapshots is not None and (own := _restored(state, snapshots)) is not None:
            if source.directory != snapshots.directory:
                text = "the run goes on from %s, which has snapshots: resume=%r begins a run in a directory without any"
                log.warning(text, snapshots.directory, config.resume)
            return own
        snapshot = source.restore(state)
        _start_over(snapshots)
        return snapshot
    return None if snapshots is None else _restored(state, snapshots)


def _restored(state: Tree, snapshots: Snapshots) -> Snapshot | None:
    """Return the newest snapshot of the run's own directory, if it has one."""
    try:
        return snapshots.restore(state)
    except Mismatch as error:
        error.add_note(
            f"fit goes on from the newest snapshot of its directory, and {snapshots.directory} is another run's "
            "(cure: snapshots=<another directory>, or resume=None, which sets that run aside)"
        )
        raise
    except NotFound:
        log.info("fresh start: no snapshot in %s", snapshots.directory)
        return None


def _start_over(snapshots: Snapshots | None) -> None:
    """Set aside the snapshots of another run in the directory."""
    if snapshots is not None and (aside := snapshots.start_over()):
        log.info("fresh start: the steps %s in %s are set aside", aside, snapshots.directory)


def _warn_of_another_seed(given: Tree, found: Tree, *, source: str | None) -> None:
    before, now = (inputs.seed_of(state) for state in (given, found))
    if before != now and source == "auto":
        log.warning(
            "the state given has seed %d, and the run that goes on has seed %d: the snapshot's state is trained "
            "(cure for a separate run: another directory, or resume=None)",
            before,
            now,
        )


def _injected(state: Tree) -> dict[str, float]:
    """Return the values of `optim.inject` that are no schedules, by "index of the TrainState/name"."""
    parts = enumerate(states(state))
    return {
        f"{index}/{name}" + (f"[{at}]" if value.dim() else ""): number
        for index, part in parts
        for name, value in hyperparameters.injected(part.opt_state).items()
        for at, number in enumerate(value.reshape(-1).tolist())
    }


def _warn_of_other_hyperparams(
    then: Mapping[str, float], given: Mapping[str, float], used: Mapping[str, float]
) -> None:
    """Warn of hyperparameters that changed: `optim.inject` stores them in the state, so a resumed run keeps them."""
    for key, value in given.items():
        name = key.partition("/")[2]
        if key in then and key in used and then[key] != value != used[key]:
            log.warning(
                "optim.inject is called with %s=%g, and the run that goes on has %s=%g, which it keeps: it is part of "
                "the state (cure: a callback that at events.FitStart returns event.state._replace(opt_state="
                "optim.set_hyperparams(event.state.opt_state, name=value)))",
                *(name, value, name, used[key]),
            )


# --- save -------------------------------------------------------------------------------------------------------------


class Checkpointer:
    """Saves the snapshots of a run: at most one per call of the step, whatever made it due.

    Args:
        snapshots: None to save nothing.
        feed: its position is saved with the state.
        saved: the call that the state was restored from, if it was.
    """

    def __init__(self, snapshots: Snapshots | None, feed: data.Feed, *, saved: int | None) -> None:
        self.snapshots = snapshots
        self._feed = feed
        self._saved = saved
        self._rows: dict[int, dict[str, float]] = {}  # call -> its row of the history; the last one, until it is saved

    def begin(self, loop: LoopState) -> None:
        """Let the policy count from here."""
        if self.snapshots is not None:
            self.snapshots.begin(updates=loop.updates, epoch=loop.epoch)

    def check(self) -> None:
        """Raise the error of the background writer, if it has failed."""
        if self.snapshots is not None:
            self.snapshots.check()

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
        self.snapshots.due(updates=loop.updates_at_most, epoch=loop.epoch)  # the policy counts from here
        stored = {"record": to_store(loop), "feed": self._feed.position(loop.epoch, loop.batch)}
        self._saved = loop.calls
        self.snapshots.save(loop.calls, state, loop=stored, metrics=metrics, history=loop.history, overwrite=again)
        return events.Saved(loop.calls, self.snapshots.directory / str(loop.calls))

    def wait(self) -> None:
        """Wait until every snapshot is committed."""
        if self.snapshots is not None:
            self.snapshots.wait()


# --- the best state ---------------------------------------------------------------------------------------------------


class BestState:
    """The state of the best row so far, for `FitResult.best_state`.

    A run with snapshots reads it from the snapshot that it saved there. A run without them keeps it in memory: a state
    of an eager step on the CPU itself, which nobody overwrites, and a copy on the host of any other one.

    Args:
        snapshots: None if the run saves none, or deletes the best one.
        resume: the setting; a path may name the directory of the best snapshot.
    """

    def __init__(self, snapshots: Snapshots | None, resume: str | None) -> None:
        self._snapshots = snapshots
        self._resume = [] if resume in (None, "auto") else [Path(resume).absolute()]
        self._kept: tuple[int, Tree, list[torch.device]] | None = None  # call, state on the host, devices of its leaves
        self._places: list[tuple[Path, int]] = []
        self._leaves: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._treedef: tree.TreeDef | None = None

    def keep(self, state: Tree, loop: LoopState) -> None:
        """Keep the state of the best row; it is saved already if the run has snapshots."""
        if self._snapshots is not None:
            return
        leaves, treedef = tree.flatten(plain(state))
        devices = [leaf.device if isinstance(leaf, Tensor) else torch.device("cpu") for leaf in leaves]
        is_safe = data.device_of(state).type == "cpu" and not any(isinstance(part, LiveState) for part in states(state))
        if not is_safe:
            leaves = [leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._kept = loop.calls, tree.unflatten(treedef, leaves), devices

    def end(self, state: Tree, loop: LoopState) -> None:
        """Remember where the best state is: the run has ended, and its last state may be donated before the call."""
        directories = [] if self._snapshots is None else [self._snapshots.directory]
        self._snapshots = None  # locks and threads, which a pickled result cannot have
        if loop.best_step is None or state is None or not is_alive(state):
            return
        self._places = [(directory, loop.best_step) for directory in directories + self._resume]
        leaves, self._treedef = tree.flatten(state)
        self._leaves = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves if isinstance(leaf, Tensor)]
        if len(self._leaves) < len(leaves):
            self._places = []  # a state with leaves that are no tensors has no snapshots

    def __repr__(self) -> str:
        place = "in memory" if self._kept is not None else f"in {self._places[0][0]}" if self._places else "nowhere"
        return f"<best state {place}>"

    def __call__(self) -> Tree | None:
        """Return the best state on the device of the run; None without a monitor, or if nothing has kept it.

        Raises:
            Corrupt, Mismatch: the snapshot is damaged, or another one.
        """
        if self._kept is not None:
            _, state, devices = self._kept
            leaves, treedef = tree.flatten(state)
            pairs = zip(leaves, devices, strict=True)
            return tree.unflatten(treedef, [x.to(device) if isinstance(x, Tensor) else x for x, device in pairs])
        for directory, step in self._places:
            try:
                return Snapshots(directory, writer=False).restore(self._template(), step=step).state
            except NotFound as error:
                log.warning("the best state is not in the snapshots: %s", error)
        return None

    def _template(self) -> Any:
        """Return a state of the right shapes that takes no memory."""
        assert self._treedef is not None
        made = [torch.empty((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in self._leaves]
        return tree.unflatten(self._treedef, made)
