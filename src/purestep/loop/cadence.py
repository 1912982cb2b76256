"""When an evaluation is due: by updates over the whole run, or by a fraction of an epoch."""

from __future__ import annotations

import math

from ..errors import ConfigError
from .record import Record


def due_at_end(every: int | float, record: Record) -> bool:
    """Whether an interval asks for an evaluation at the end of an epoch (``record.epoch`` counts it already)."""
    if isinstance(every, int):
        return crossed(every, record)
    return every < 1 or record.epoch % int(every) == 0


def is_inside(every: int | float) -> bool:
    """Whether an interval may ask for an evaluation inside an epoch."""
    return isinstance(every, int) or every < 1


def due_inside(every: int | float, record: Record, length: int | None) -> bool:
    """Whether an interval asks for an evaluation after the batch just done, which is not the last of its epoch.

    Raises:
        ConfigError: a fraction of a loader without length.
    """
    if record.batch == length or not is_inside(every):
        return False
    return crossed(every, record) if isinstance(every, int) else _at_fraction(every, record.batch, length)


def crossed(every: int, record: Record, ahead: int = 0) -> bool:
    """Whether a multiple of ``every`` updates lies behind the last row of the history.

    Args:
        every: updates.
        record: whose updates have arrived on the host.
        ahead: updates that may have been made since.
    """
    steps = record.history.get("step")
    last = int(steps[-1] or 0) if steps else 0
    return (record.updates + ahead) // every > last // every


def _at_fraction(every: float, batch: int, length: int | None) -> bool:
    if length is None:
        raise ConfigError(
            f"evaluate_every={every} of a loader without length", where="fit", hint="a number of updates: 1000"
        )
    # A third of 7 batches ends behind batches 3, 5 and 7: the first batch at or past each mark.
    part = every * length
    return math.floor(batch / part + 1e-9) > math.floor((batch - 1) / part + 1e-9)
