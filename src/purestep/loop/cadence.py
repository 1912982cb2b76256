"""When an evaluation is due: by updates over the whole run, or by a fraction of an epoch."""

from __future__ import annotations

from collections.abc import Mapping

from ..arguments import whole
from ..errors import ConfigError
from .record import Record


class Plan:
    """When the loaders of a run are evaluated.

    Args:
        intervals: by the name of the loader: an int is updates, a float is epochs.
        length: batches an epoch; None where the loader cannot say.
        window: batches of an accumulation window, inside which nothing is evaluated.
    """

    def __init__(self, intervals: Mapping[str, int | float], length: int | None, window: int) -> None:
        self._intervals = intervals
        self._length = length
        self._window = window
        self._seen = 0  # batches of the epoch up to which the marks of fractions have been looked at
        self.inside = any(map(inside, intervals.values()))
        """Whether any of them may be due inside an epoch."""

    def begin(self, record: Record, left: int) -> None:
        """An epoch begins here, or goes on: with so many batches left of the window."""
        held = self._window - left
        if not held and record.is_ahead:
            held = self._window  # no row has been written here, so that an evaluation may have been broken off
        self._seen = max(0, record.batch - held)

    def crossed(self, record: Record, ahead: int) -> bool:
        """Whether an interval of updates has been passed, if the ``ahead`` updates were all applied."""
        return any(isinstance(every, int) and _crossed(every, record, ahead) for every in self._intervals.values())

    def due_inside(self, record: Record) -> list[str]:
        """The loaders to evaluate after the batch just done, where no window is open.

        What an open window had to wait for is due when it closes. At the last batch of an epoch nothing is: its end
        follows.

        Raises:
            ConfigError: a fraction of a loader without length.
        """
        since, self._seen = self._seen, record.batch
        if record.batch == self._length:
            return []
        return [name for name, every in self._intervals.items() if self._is_due(every, record, since)]

    def _is_due(self, every: int | float, record: Record, since: int) -> bool:
        if isinstance(every, int):
            return _crossed(every, record)
        return every < 1 and _passed(every, since, record.batch, self._length)

    def due_at_end(self, record: Record) -> list[str]:
        """The loaders to evaluate at the end of an epoch (``record.epoch`` counts it already)."""
        return [name for name, every in self._intervals.items() if _is_due_at_end(every, record)]


def inside(every: int | float) -> bool:
    """Whether an evaluation may be due inside an epoch."""
    return isinstance(every, int) or every < 1


def _is_due_at_end(every: int | float, record: Record) -> bool:
    if isinstance(every, int):
        return _crossed(every, record)
    return every < 1 or record.epoch % int(every) == 0


def _crossed(every: int, record: Record, ahead: int = 0) -> bool:
    """Whether a multiple of ``every`` updates lies behind the last row of the history.

    Args:
        every: updates.
        record: whose updates have arrived on the host.
        ahead: updates that may have been made since.
    """
    return (record.updates + ahead) // every > record.told // every


def _passed(every: float, since: int, batch: int, length: int | None) -> bool:
    """Whether a mark of this fraction lies behind the batches ``since`` and up to ``batch``."""
    if length is None:
        raise ConfigError(
            f"evaluate_every={every} of a loader without length", where="fit", hint="a number of updates: 1000"
        )
    # A third of 7 batches ends behind batches 3, 5 and 7: the first batch at or past each mark.
    part = every * length
    return whole(batch / part) > whole(since / part)
