"""After an error: save the last whole state, or say that a failed step has overwritten it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..compile import LiveState, states
from ..errors import NonFiniteError, PurestepError, SnapshotError, StateError, StepContractError
from ..snapshot import Snapshots
from ..types import Tree
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


def is_lost(state: Tree, *, adopted: bool) -> bool:
    """True if a failed step has overwritten its input, which raises StateError when it is read from here on.

    Args:
        state: the input of the failed step.
        adopted: plain states are donated too; otherwise the step copied such a state.
    """
    parts = [part for part in states(state) if isinstance(part, LiveState) and part.live_store is not None]
    for part in parts:
        store = part.live_store
        if store is not None and store.generation == part.live_generation:
            store.begin()
    return bool(parts) or adopted


def note_lost(error: BaseException, call: int, snapshots: Snapshots | None) -> None:
    """Note on the error of a failed step that its state is lost, and name the snapshot to go on from."""
    step = None
    if snapshots is not None:
        try:
            snapshots.wait()
            step = snapshots.latest()
        except PurestepError as failed:
            _log.warning("the last snapshot is not saved: %s", failed)
    place = (
        "no snapshot has an earlier one"
        if snapshots is None or step is None
        else (
            f"the snapshot {snapshots.directory / str(step)} has the last one, from which the same call of fit goes on"
        )
    )
    note = f"the state was donated at step {call}, which failed and may have written half of it: {place}"
    error.add_note(note)
    _log.warning("%s", note)
