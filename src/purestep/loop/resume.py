"""The beginning of a run: the directory of its snapshots, and the state to go on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import data
from ..compile import states
from ..errors import ConfigError, Mismatch, NotFound
from ..files import local_path
from ..optim import hyperparameters
from ..parallel import mesh as meshes
from ..snapshot import Snapshot, Snapshots
from ..types import Tree
from . import inputs
from .loop_state import LoopState, from_json

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


class StartingPoint(NamedTuple):
    """The states to go on from."""

    state: Tree
    loop: LoopState
    is_resumed: bool  # they are those of an interrupted run
    saved: int | None  # the call that the state was saved after; None: it is the initial one
    sizes: Mapping[str, Any] = MappingProxyType({})  # see `compile.batch_sizes`
    unreached: Sequence[str] = ()  # see `step.unreached`


def starting_point(state: Tree, snapshots: Snapshots | None, config: FitConfig, feed: data.Feed) -> StartingPoint:
    """Return the states to go on from.

    Raises:
        Mismatch, NotFound, Corrupt: as `snapshot_to_resume`; Mismatch also for another loader.
    """
    snapshot = snapshot_to_resume(state, snapshots, config)
    given = _injected(state)
    if snapshot is None:
        return StartingPoint(state, LoopState(injected=given), is_resumed=False, saved=None)
    if not isinstance(snapshot.loop, Mapping) or "record" not in snapshot.loop:
        # Saved by hand, without a loop's position. Later snapshots get later names.
        loop = LoopState(calls=snapshot.step, injected=given)
        return StartingPoint(snapshot.state, loop, is_resumed=False, saved=loop.calls)
    feed.restore(snapshot.loop["feed"])
    loop = from_json(snapshot.loop["record"], snapshot.history)
    log.info("resumed from step %d: epoch %d, batch %d", snapshot.step, loop.epoch + 1, loop.batch)
    _warn_of_another_seed(state, snapshot.state, source=config.resume)
    _warn_of_other_hyperparams(loop.injected, given, _injected(snapshot.state))
    sizes, here = snapshot.loop.get("sizes", []), meshes.here()
    return StartingPoint(
        snapshot.state,
        loop._replace(injected=given),
        is_resumed=True,
        saved=loop.calls,
        sizes=sizes[here.rank] if len(sizes) == here.size else {},
        unreached=snapshot.loop.get("unreached", ()),
    )


def snapshot_to_resume(state: Tree, snapshots: Snapshots | None, config: FitConfig) -> Snapshot | None:
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
        source = Snapshots(local_path("fit", resume=config.resume).absolute(), writer=False)
        if snapshots is not None and (own := _newest_own(state, snapshots)) is not None:
            if source.directory != snapshots.directory:
                text = "the run goes on from %s, which has snapshots: resume=%r begins a run in a directory without any"
                log.warning(text, snapshots.directory, config.resume)
            return own
        snapshot = source.restore(state)
        _start_over(snapshots)
        return snapshot
    return None if snapshots is None else _newest_own(state, snapshots)


def _newest_own(state: Tree, snapshots: Snapshots) -> Snapshot | None:
    """Return the newest snapshot of the run's own directory, if it has one."""
    try:
        return snapshots.restore(state)
    except Mismatch as error:
        other = (
            f"if {snapshots.directory} is another run's: snapshots=<another directory>, or resume=None to set it aside"
        )
        raise Mismatch(error.what, where=error.where, hint=f"{other}; else {error.hint}") from None
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
