"""Recovery from errors: save the last whole state, find one after a donated step failed, go back to a good state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import rng, tree
from ..compile import LiveState, is_state, states
from ..errors import NonFiniteError, PurestepError, SnapshotError, StateError, StepContractError
from ..snapshot import Snapshots
from ..types import TrainState, Tree
from .loop_state import LoopState, from_json
from .signals import is_at_once

_OF_THE_STATE = (NonFiniteError, StateError, StepContractError, SnapshotError)
_log = logging.getLogger("purestep")


def save_on_error(error: BaseException, save: Callable[[], None], *, processes: int) -> None:
    """Call ``save``, unless the error says that the state or the directory cannot be trusted, or that a second signal
    ends the run at once.

    Of several processes one alone may have failed, or be gone: nothing is saved, since that takes all of them.

    An error of ``save`` becomes a note on ``error``, which it must not hide.

    Args:
        error: the reason that the run ends.
        save: writes a snapshot of the last whole state, and returns when it is committed.
        processes: of the run.
    """
    if is_at_once(error) or isinstance(error, _OF_THE_STATE):
        return
    if processes > 1:
        error.add_note("one process alone cannot save the state of several: the run goes on from the last snapshot")
        return
    try:
        save()
    except Exception as second:
        error.add_note(f"the last state is not saved: {type(second).__name__}: {second}")
        _log.warning("the last state is not saved: %s: %s", type(second).__name__, second)


class LastGood:
    """The last good state, to which a run may go back.

    Args:
        allowed: how often one run may go back, >= 0. With 0, no copy is kept.
        start: the caller's own state, if the run leaves it valid: to keep it costs no memory.
    """

    def __init__(self, allowed: int, start: tuple[Tree, LoopState] | None) -> None:
        self._allowed = allowed
        self.start = start
        self.kept: tuple[Tree, LoopState] | None = None

    def keep(self, state: Tree, loop: LoopState) -> None:
        """Keep a copy of a good state, of which all metrics have arrived and are finite."""
        if self._allowed and states(state):
            self.kept = tree.clone(state), loop

    def back(self, state: Tree, loop: LoopState) -> tuple[Tree, LoopState] | None:
        """Return the kept state with the counters of the present one; None if there is none, or no more allowed.

        Calls, key and position in the data go on, so that the batches that led to the bad step are not repeated.
        """
        if self.kept is None or loop.rollbacks >= self._allowed:
            return None
        good, then = self.kept
        present = iter(states(state))

        def one(node: Any) -> Any:
            if not is_state(node):
                return node
            key = next(present).key
            return node._replace(step=key[..., 1].to(node.step.device, copy=True), key=key.clone())

        return tree.map(one, tree.clone(good), is_leaf=is_state), loop._replace(
            updates=then.updates,
            interval=then.interval,
            line=then.line,
            last=then.last,
            rollbacks=loop.rollbacks + 1,
        )


def past_call(state: Tree) -> Tree:
    """Advance the keys of a tree past a call without effect, so that its random numbers are not drawn again."""
    return tree.map(
        lambda node: node._replace(key=rng.advance(node.key)) if is_state(node) else node, state, is_leaf=is_state
    )


class _Candidate(NamedTuple):
    state: Tree
    loop: LoopState
    source: str


_NONE = _Candidate(None, LoopState(), "of which there is none")


def after_failed_donation(
    state: Tree,
    loop: LoopState,
    error: BaseException,
    last_good: LastGood,
    snapshots: Snapshots | None,
    *,
    adopted: bool,
) -> tuple[Tree, LoopState] | None:
    """Return the newest good state, named in a note on the error; None if the failed step has harmed no state.

    Args:
        state: the input of the failed step. Reading it raises StateError from here on.
        loop: of the same moment.
        error: raised by the step.
        last_good: of the run.
        snapshots: of the run.
        adopted: plain states are donated too.
    """
    like = _declare_donated(state, adopted=adopted)
    if like is None:
        return None
    candidates = [_newest_snapshot(like, snapshots)] if snapshots is not None else []
    candidates.append(None if last_good.kept is None else _Candidate(*last_good.kept, "kept for a rollback"))
    candidates.append(None if last_good.start is None else _Candidate(*last_good.start, "that went into fit"))
    best = max((one for one in candidates if one is not None), key=lambda one: one.loop.calls, default=_NONE)
    note = (
        f"the state was donated at step {loop.calls + 1}, which failed: .result of this error has the last whole "
        f"one, that of step {best.loop.calls}, {best.source}"
    )
    error.add_note(note)
    _log.warning("%s", note)
    return best.state, best.loop


def _declare_donated(state: Tree, *, adopted: bool) -> Tree:
    """Mark the memory of a state as given away.

    Returns:
        A tree of the same structure to restore into, with undefined numbers. None for a plain state that was not
        donated: the step copied it.
    """
    parts = [part for part in states(state) if isinstance(part, LiveState) and part.live_store is not None]
    for part in parts:
        store = part.live_store
        if store is not None and store.generation == part.live_generation:
            store.begin()
    if not parts:
        return state if adopted else None
    return tree.map(_memory, state, is_leaf=is_state)


def _memory(node: Any) -> Any:
    """Return the buffers of a state, alive or not."""
    if isinstance(node, LiveState) and node.live_store is not None:
        return TrainState._make(node.live_store.parts[node.live_index])
    return node


def _newest_snapshot(like: Tree, snapshots: Snapshots) -> _Candidate | None:
    try:
        snapshots.wait()
        found = snapshots.restore(like)
    except PurestepError as error:
        _log.warning("no snapshot to go back to: %s", error)
        return None
    known = isinstance(found.loop, Mapping) and "record" in found.loop
    loop = from_json(found.loop["record"], found.history) if known else LoopState(calls=found.step)
    return _Candidate(found.state, loop, f"of the snapshot {snapshots.directory / str(found.step)}")
