"""Snapshots of a run: the directory, and what is in it to go on from.

Snapshots of a run: one a call, whatever made it due.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import data
from ..compile import donation
from ..errors import ConfigError, Corrupt, Mismatch, NotFound
from ..optim import hyperparameters
from ..snapshot import Snapshot, Snapshots
from ..types import Tree
from . import inputs
from .loop_state import Record, from_json

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig
from .. import events, files
from .loop_state import Cell, to_store

log = logging.getLogger("purestep")


def open_snapshots(snapshots: Any, config: FitConfig, feed: data.Feed) -> tuple[Snapshots | None, bool]:
    """The snapshots to write, and whether fit opened them and so closes them.

    Raises:
        ConfigError: something that is neither a Snapshots nor a path.
        DataError: a loader that a snapshot inside an epoch could not go on with.
        Locked, WriteFailed: the directory cannot be written.
    """
    if snapshots is None or config.fast_dev_run:
        return None, False
    feed.require_resume()
    opened, owned = snapshots, False
    if isinstance(snapshots, str | os.PathLike):
        opened, owned = Snapshots(snapshots), True
    elif not isinstance(snapshots, Snapshots):
        raise ConfigError(
            f"snapshots is a {type(snapshots).__name__}", where="fit", hint='"runs/name" or Snapshots("runs/name")'
        )
    opened.open()
    return opened, owned


def restored(state: Tree, snapshots: Snapshots | None, config: FitConfig) -> Snapshot | None:
    """The snapshot to go on from, if there is one.

    A job that is started again by the same command, with ``resume`` a path, goes on where it was: from its own
    directory, whose snapshots say where the run began.

    Raises:
        NotFound: ``resume`` names a path without snapshots.
        Mismatch, Corrupt: what is there does not fit, or is damaged in every copy.
    """
    if snapshots is not None and not config.fast_dev_run:
        snapshots.check_space(state)
    if config.resume is None or config.fast_dev_run:
        _start_over(snapshots)
        return None
    source = snapshots
    if config.resume != "auto":
        source = Snapshots(_place(config.resume), writer=False)
        if snapshots is not None and source.directory == snapshots.directory:
            source = snapshots
        if snapshots is not None and source is not snapshots:
            found = _gone_on(state, snapshots, source.directory)
            if found is not None:
                return found
    if source is None:
        return None
    try:
        found = source.restore(state)
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
    return found


def resumed(state: Tree, snapshots: Snapshots | None, config: FitConfig, feed: data.Feed) -> tuple[Tree, Record, bool]:
    """The state and the record to go on from, and whether they are those of a run that was stopped.

    Raises:
        Mismatch, NotFound, Corrupt: as `restored`; Mismatch also where the loader is another one.
    """
    found = restored(state, snapshots, config)
    given = _injected(state)
    if found is None:
        return state, Record(injected=given), False
    origin = _origin(found) if config.resume in (None, "auto") else _place(config.resume)
    if not isinstance(found.loop, Mapping) or "record" not in found.loop:
        # Saved by hand: a state without a loop's position. Later snapshots get later names.
        return found.state, Record(calls=found.step, origin=origin, injected=given), False
    feed.restore(found.loop["feed"])
    record = from_json(found.loop["record"])._replace(origin=origin)
    log.info("resumed from step %d: epoch %d, batch %d", found.step, record.epoch + 1, record.batch)
    _warn_of_another_seed(state, found.state, source=config.resume)
    _warn_of_other_hyperparams(record.injected, given, _injected(found.state))
    return found.state, record._replace(injected=given), True


def _place(resume: str) -> str:
    return str(Path(resume).absolute())


def _origin(found: Snapshot) -> str:
    """The directory that the run of a snapshot began from; "" where it began anew."""
    record = found.loop.get("record") if isinstance(found.loop, Mapping) else None
    return record.get("origin", "") if isinstance(record, Mapping) else ""


def _gone_on(state: Tree, snapshots: Snapshots, origin: Path) -> Snapshot | None:
    """The newest snapshot of the run's own directory, where that run began from ``origin``."""
    try:
        found = snapshots.restore(state)
    except (Mismatch, NotFound):
        return None
    except Corrupt as error:
        if snapshots.strict:
            raise
        log.warning("the run begins anew from %s: %s", origin, error)
        return None
    return found if _origin(found) == str(origin) else None


def _warn_of_another_seed(given: Tree, found: Tree, *, source: str | None) -> None:
    before, now = (inputs.seed_of(state) for state in (given, found))
    if before != now and source == "auto":
        log.warning(
            "the state given has seed %d, and the run that goes on has seed %d: the snapshot's state is the one that "
            "is trained (cure for a run of its own: another directory, or resume=None)",
            before,
            now,
        )


def _injected(state: Tree) -> dict[str, float]:
    """The values of `optim.inject` that no schedule fills; of a tree, by the number of the TrainState too."""
    parts = enumerate(donation.states(state))
    return {
        f"{index}/{name}": float(value)
        for index, part in parts
        for name, value in hyperparameters.injected(part.opt_state).items()
    }


def _warn_of_other_hyperparams(
    then: Mapping[str, float], given: Mapping[str, float], used: Mapping[str, float]
) -> None:
    """What `optim.inject` makes of a hyperparameter is part of the state, so that a resumed run keeps it."""
    for key, value in given.items():
        name = key.partition("/")[2]
        if key in then and key in used and then[key] != value != used[key]:
            log.warning(
                "optim.inject is called with %s=%g, and the run that goes on has %s=%g, which it keeps: it is part of "
                "the state (cure: a callback that at events.FitStart returns event.state._replace(opt_state="
                "optim.set_hyperparams(event.state.opt_state, %s=%g)))",
                *(name, value, name, used[key], name, value),
            )


def _start_over(snapshots: Snapshots | None) -> None:
    """What is in the directory belongs to another run."""
    if snapshots is not None and (aside := snapshots.start_over()):
        log.info("fresh start: the steps %s in %s are set aside", aside, snapshots.directory)


class Saver:
    """Writes a run's snapshots, if it has any.

    Args:
        snapshots: None where nothing is saved.
        feed: whose position is saved with the state.
        saved: the call that the state comes from, where it was read from a snapshot.
    """

    def __init__(self, snapshots: Snapshots | None, feed: data.Feed, *, saved: int | None) -> None:
        self._snapshots = snapshots
        self._feed = feed
        self._saved = saved
        self._rows: dict[int, dict[str, float]] = {}  # of the last call that has one, until it is saved

    def due(self, record: Record, ahead: int) -> bool:
        """Whether the policy asks for one here; ``ahead`` updates may have been made since the record."""
        if self._snapshots is None or self._saved == record.calls:
            return False
        return bool(self._snapshots.due(updates=record.updates + ahead, epoch=record.epoch))

    def scored(self, record: Record, row: Mapping[str, Cell]) -> None:
        """This row of the history is that of this call. Whoever saves the call saves it too: it ranks the snapshot."""
        self._rows = {record.calls: {name: float(value) for name, value in row.items() if value is not None}}

    def save(self, state: Tree, record: Record, *, ahead: int) -> events.Saved | None:
        """Hand a snapshot to the writer, unless this call has one; that with a row knows more, and replaces it."""
        again = self._saved == record.calls
        metrics = self._rows.pop(record.calls, {})
        if self._snapshots is None or (again and not metrics):
            return None
        files.failpoint("loop.snapshot")
        self._snapshots.due(updates=record.updates + ahead, epoch=record.epoch)  # counts from here
        loop = {"record": to_store(record), "feed": self._feed.position(record.epoch, record.batch)}
        self._saved = record.calls
        self._snapshots.save(record.calls, state, loop=loop, metrics=metrics, overwrite=again)
        return events.Saved(record.calls, self._snapshots.directory / str(record.calls))

    def wait(self) -> None:
        """Returns when everything is committed."""
        if self._snapshots is not None:
            self._snapshots.wait()
