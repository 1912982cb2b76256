"""After a donated step that failed half-way: its state is declared dead, and an earlier one is found."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import tree
from ..compile import live
from ..errors import PurestepError
from ..snapshot import Snapshots
from ..types import TrainState, Tree
from .record import Record, from_json
from .rollback import Keeper

_log = logging.getLogger("purestep")


class _Found(NamedTuple):
    state: Tree
    record: Record
    source: str


_NOTHING = _Found(None, Record(), "of which there is none")


def salvaged(
    state: Tree,
    record: Record,
    error: BaseException,
    keeper: Keeper,
    snapshots: Snapshots | None,
    start: tuple[Tree, Record] | None,
    *,
    adopted: bool,
) -> tuple[Tree, Record] | None:
    """The newest good state there is, told as a note on the error; None where nothing is lost.

    Args:
        state: that went into the step that failed. Reading it raises StateError from here on.
        record: of it.
        error: what the step raised.
        keeper: of the run.
        snapshots: of the run.
        start: the state that went into the run, where that is still what it was.
        adopted: a plain state has been donated too.
    """
    like = _bury(state, adopted=adopted)
    if like is None:
        return None
    found = [_saved(like, snapshots)] if snapshots is not None else []
    found.append(None if keeper.kept is None else _Found(*keeper.kept, "kept for a rollback"))
    found.append(None if start is None else _Found(*start, "that went into fit"))
    best = max((one for one in found if one is not None), key=lambda one: one.record.calls, default=_NOTHING)
    told = (
        f"the state was donated at step {record.calls + 1}, which failed: .result of this error has the last whole "
        f"one, that of step {best.record.calls}, {best.source}"
    )
    error.add_note(told)
    _log.warning("%s", told)
    return best.state, best.record


def _bury(state: Tree, *, adopted: bool) -> Tree:
    """Declare the memory of a state given away.

    Returns:
        A tree of the same structure to restore into; its numbers mean nothing. None for a state that is plain, which a
        step copies and so cannot have harmed.
    """
    parts = [part for part in live.states(state) if isinstance(part, live.LiveState) and part.live_store is not None]
    for part in parts:
        store = part.live_store
        if store is not None and store.generation == part.live_generation:
            store.begin()
    if not parts:
        return state if adopted else None
    return tree.map(_memory, state, is_leaf=live.is_state)


def _memory(node: Any) -> Any:
    """What lies where a state did, dead or not."""
    if isinstance(node, live.LiveState) and node.live_store is not None:
        return TrainState._make(node.live_store.parts[node.live_index])
    return node


def _saved(like: Tree, snapshots: Snapshots) -> _Found | None:
    try:
        snapshots.wait()
        found = snapshots.restore(like)
    except PurestepError as error:
        _log.warning("no snapshot to go back to: %s", error)
        return None
    known = isinstance(found.loop, Mapping) and "record" in found.loop
    record = from_json(found.loop["record"]) if known else Record(calls=found.step)
    return _Found(found.state, record, f"of the snapshot {snapshots.directory / str(found.step)}")
