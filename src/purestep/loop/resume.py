"""Snapshots of a run: open the directory, find the state to go on from, save."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import data, events, files
from ..compile import states
from ..errors import ConfigError, Corrupt, Mismatch, NotFound
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


def resumed(
    state: Tree, snapshots: Snapshots | None, config: FitConfig, feed: data.Feed
) -> tuple[Tree, LoopState, bool]:
    """Return the states to go on from, and True if they are those of an interrupted run.

    Raises:
        Mismatch, NotFound, Corrupt: as `restored`; Mismatch also for another loader.
    """
    snapshot = restored(state, snapshots, config)
    given = _injected(state)
    if snapshot is None:
        return state, LoopState(injected=given), False
    origin = _origin(snapshot) if config.resume in (None, "auto") else _absolute(config.resume)
    if not isinstance(snapshot.loop, Mapping) or "record" not in snapshot.loop:
        # Saved by hand, without a loop's position. Later snapshots get later names.
        return snapshot.state, LoopState(calls=snapshot.step, origin=origin, injected=given), False
    feed.restore(snapshot.loop["feed"])
    loop = from_json(snapshot.loop["record"], snapshot.history)._replace(origin=origin)
    log.info("resumed from step %d: epoch %d, batch %d", snapshot.step, loop.epoch + 1, loop.batch)
    _warn_of_another_seed(state, snapshot.state, source=config.resume)
    _warn_of_other_hyperparams(loop.injected, given, _injected(snapshot.state))
    return snapshot.state, loop._replace(injected=given), True


def restored(state: Tree, snapshots: Snapshots | None, config: FitConfig) -> Snapshot | None:
    """Return the snapshot to go on from, if there is one.

    A job that is started again with the same command and a path for ``resume`` goes on from its own directory: its
    snapshots have the directory that the run began from.

    Raises:
        NotFound: ``resume`` names a path without snapshots.
        Mismatch, Corrupt: a snapshot that does not fit, or that is damaged in every copy.
    """
    if snapshots is not None and not config.fast_dev_run:
        snapshots.check_space(state)
    if config.resume is None or config.fast_dev_run:
        _start_over(snapshots)
        return None
    source = snapshots
    if config.resume != "auto":
        source = Snapshots(_absolute(config.resume), writer=False)
        if snapshots is not None and source.directory == snapshots.directory:
            source = snapshots
        if snapshots is not None and source is not snapshots:
            snapshot = _own_newest(state, snapshots, source.directory)
            if snapshot is not None:
                return snapshot
    if source is None:
        return None
    try:
        snapshot = source.restore(state)
    except Mismatch as error:
        if source is snapshots and config.resume == "auto":
            error.add_note(
                f"fit goes on from the newest snapshot of its directory, and {source.directory} is another run's "
                "(cure: snapshots=<another directory>, or resume=None, which sets that run aside)"
            )
        raise
    except NotFound:
        if config.resume != "auto":
            raise
        log.info("fresh start: no snapshot in %s", source.directory)
        return None
    if source is not snapshots:
        _start_over(snapshots)
    return snapshot


def _absolute(resume: str) -> str:
    return str(Path(resume).absolute())


def _origin(snapshot: Snapshot) -> str:
    """Return the directory that the snapshot's run began from; "" for a fresh start."""
    stored = snapshot.loop.get("record") if isinstance(snapshot.loop, Mapping) else None
    return stored.get("origin", "") if isinstance(stored, Mapping) else ""


def _own_newest(state: Tree, snapshots: Snapshots, origin: Path) -> Snapshot | None:
    """Return the newest snapshot of the run's own directory, if that run began from ``origin``."""
    try:
        snapshot = snapshots.restore(state)
    except (Mismatch, NotFound):
        return None
    except Corrupt as error:
        if snapshots.strict:
            raise
        log.warning("the run begins again from %s: %s", origin, error)
        return None
    return snapshot if _origin(snapshot) == str(origin) else None


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
                "optim.set_hyperparams(event.state.opt_state, %s)))",
                *(name, value, name, used[key], _argument(key, given)),
            )


def _argument(key: str, given: Mapping[str, float]) -> str:
    """The argument of `set_hyperparams` for a key of `_injected`; for a member of an ensemble, that of all members."""
    leaf, _, entry = key.partition("[")
    numbers = ", ".join(f"{value:g}" for name, value in given.items() if name.partition("[")[0] == leaf)
    value, name = f"torch.tensor([{numbers}])" if entry else numbers, leaf.partition("/")[2]
    return f"{name}={value}" if name.isidentifier() else f'**{{"{name}": {value}}}'


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
        self.on_save: Callable[[], None] | None = None
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

    def due(self, loop: LoopState, ahead: int) -> tuple[str, ...]:
        """The settings that make a snapshot due here. ``ahead``: updates since `loop`, if all are applied."""
        if self.snapshots is None or self._saved == loop.calls:
            return ()
        return self.snapshots.due(updates=loop.updates + ahead, epoch=loop.epoch)

    def add_row(self, loop: LoopState, row: Mapping[str, Cell]) -> None:
        """Store the row of this call: its snapshot is ranked by it."""
        self._rows = {loop.calls: {name: float(value) for name, value in row.items() if value is not None}}

    def save(self, state: Tree, loop: LoopState, *, ahead: int) -> events.Saved | None:
        """Hand a snapshot to the writer, unless this call has one. A row replaces a snapshot without it."""
        again = self._saved == loop.calls
        metrics = self._rows.pop(loop.calls, {})
        if self.snapshots is None or (again and not metrics):
            return None
        files.failpoint("loop.snapshot")
        self.snapshots.due(updates=loop.updates + ahead, epoch=loop.epoch)  # the policy counts from here
        stored = {"record": to_store(loop), "feed": self._feed.position(loop.epoch, loop.batch)}
        self._saved = loop.calls
        self.snapshots.save(loop.calls, state, loop=stored, metrics=metrics, history=loop.history, overwrite=again)
        if self.on_save is not None:
            self.on_save()
        return events.Saved(loop.calls, self.snapshots.directory / str(loop.calls))

    def wait(self) -> None:
        """Wait until every snapshot is committed."""
        if self.snapshots is not None:
            self.snapshots.wait()
