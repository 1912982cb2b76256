"""Snapshots of a run: the directory, and what is in it to go on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import data
from ..errors import ConfigError, Mismatch, NotFound
from ..snapshot import Snapshot, Snapshots
from ..types import Tree
from . import setup
from .record import Record, from_json

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig

log = logging.getLogger("purestep")


def open_snapshots(snapshots: Any, config: FitConfig, feed: data.Feed) -> tuple[Snapshots | None, bool]:
    """The snapshots to write, and whether fit opened them and so closes them.

    Raises:
        ConfigError: something that is neither a Snapshots nor a path.
        DataError: a loader that a snapshot inside an epoch could not go on with.
        Locked, WriteFailed: the directory cannot be written.
    """
    if snapshots is None and config.compile_cache:
        raise ConfigError(
            "compile_cache keeps what was compiled beside the snapshots, and there are none",
            where="fit",
            hint='snapshots="runs/name", or compile_cache=False',
        )
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
        source = Snapshots(Path(config.resume), writer=False)
        if snapshots is not None and source.directory == snapshots.directory:
            source = snapshots
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
    if found is None:
        return state, Record(), False
    if not isinstance(found.loop, Mapping) or "record" not in found.loop:
        # Saved by hand: a state without a loop's position. Later snapshots get later names.
        return found.state, Record(calls=found.step), False
    feed.restore(found.loop["feed"])
    record = from_json(found.loop["record"])
    log.info("resumed from step %d: epoch %d, batch %d", found.step, record.epoch + 1, record.batch)
    _warn_of_another_seed(state, found.state, source=config.resume)
    return found.state, record, True


def _warn_of_another_seed(given: Tree, found: Tree, *, source: str | None) -> None:
    before, now = (setup.seed_of(state) for state in (given, found))
    if before != now and source == "auto":
        log.warning(
            "the state given has seed %d, and the run that goes on has seed %d: the snapshot's state is the one that "
            "is trained (cure for a run of its own: another directory, or resume=None)",
            before,
            now,
        )


def _start_over(snapshots: Snapshots | None) -> None:
    """What is in the directory belongs to another run."""
    if snapshots is not None and (aside := snapshots.start_over()):
        log.info("fresh start: the steps %s in %s are set aside", aside, snapshots.directory)
