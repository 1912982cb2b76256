"""What is done is saved before an error of somebody else's ends the run: a loader's, a callback's, a step's own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import NonFiniteError, SnapshotError, StateError, StepContractError
from ..signals import Preempted

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
