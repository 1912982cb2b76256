"""What is done is saved before an error of somebody else's ends the run: a loader's, a callback's, a step's own.

After a donated step that failed half-way: its state is declared dead, and an earlier one is found.

Going back: a good state is kept, and taken up again when a loss or gradient is not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import rng, tree
from ..compile import donation
from ..errors import NonFiniteError, PurestepError, SnapshotError, StateError, StepContractError
from ..signals import Preempted
from ..snapshot import Snapshots
from ..types import TrainState, Tree
from .loop_state import Record, from_json

_log = logging.getLogger("purestep")
_OF_THE_STATE = (NonFiniteError, StateError, StepContractError, SnapshotError)


def rescue(error: BaseException, save: Callable[[], None]) -> None:
    """Call ``save``, unless the error says that the state or the directory is not to be trusted.

    What saving raises does not hide the error: it is a note on it.

    Args:
        error: what ends the run.
        save: writes a snapshot of the last whole state, and returns when it is committed.
    """
    by_signal = isinstance(error, Preempted) or not isinstance(error, Exception | SystemExit)  # which has saved already
    if by_signal or isinstance(error, _OF_THE_STATE):
        return
    try:
        save()
    except Exception as second:
        error.add_note(f"the last state is not saved: {type(second).__name__}: {second}")
        _log.warning("the last state is not saved: %s: %s", type(second).__name__, second)


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
    parts = [
        part for part in donation.states(state) if isinstance(part, donation.LiveState) and part.live_store is not None
    ]
    for part in parts:
        store = part.live_store
        if store is not None and store.generation == part.live_generation:
            store.begin()
    if not parts:
        return state if adopted else None
    return tree.map(_memory, state, is_leaf=donation.is_state)


def _memory(node: Any) -> Any:
    """What lies where a state did, dead or not."""
    if isinstance(node, donation.LiveState) and node.live_store is not None:
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


class Keeper:
    """The last good state and its record, where a run may go back; nothing is kept where it may not.

    Args:
        allowed: how often, in one run, >= 0.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.kept: tuple[Tree, Record] | None = None

    def keep(self, state: Tree, record: Record) -> None:
        """This is a good state: everything known about it has arrived and is finite."""
        if self._allowed and donation.states(state):
            self.kept = tree.clone(state), record

    def back(self, state: Tree, record: Record) -> tuple[Tree, Record] | None:
        """The kept state with the counters of the present one, and a record that goes on behind the batches between.

        Calls, key and place in the data go on: what led to the bad step is not repeated. None where there is nothing
        to go back to, or it has been done as often as it may be.
        """
        if self.kept is None or record.rollbacks >= self._allowed:
            return None
        good, then = self.kept
        present = iter(donation.states(state))

        def one(node: Any) -> Any:
            if not donation.is_state(node):
                return node
            key = next(present).key
            return node._replace(step=torch.full_like(node.step, int(key[1])), key=key.clone())

        return tree.map(one, tree.clone(good), is_leaf=donation.is_state), record._replace(
            updates=then.updates,
            interval=then.interval,
            line=then.line,
            last=then.last,
            rollbacks=record.rollbacks + 1,
        )


def past(state: Tree) -> Tree:
    """The tree with its keys behind a call that came to nothing, so that its random numbers are not drawn again."""
    return tree.map(
        lambda node: node._replace(key=rng.advance(node.key)) if donation.is_state(node) else node,
        state,
        is_leaf=donation.is_state,
    )
