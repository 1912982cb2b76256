"""When an evaluation is due: by updates over the whole run, or by a fraction of an epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from .. import data
from ..arguments import whole
from ..errors import ConfigError
from .record import Record

_log = logging.getLogger("purestep")


class Plan:
    """When the loaders of a run are evaluated.

    Args:
        intervals: by the name of the loader: an int is updates, a float is epochs.
        feed: what is trained on.
        window: batches of an accumulation window, inside which nothing is evaluated.

    Raises:
        ConfigError: a fraction of a loader without length.
    """

    def __init__(self, intervals: Mapping[str, int | float], feed: data.Feed, window: int) -> None:
        self._intervals = intervals
        self._feed = feed
        self._window = window
        self._seen = 0  # batches of the epoch up to which the marks of fractions have been looked at
        self._whole = 1  # batches that the marks of this epoch are fractions of
        self._fraction = next((every for every in intervals.values() if isinstance(every, float) and every < 1), None)
        if self._fraction is not None and not feed.length:
            told = f"evaluate_every={self._fraction} of a loader without length"
            raise ConfigError(told, where="fit", hint="a number of updates: 1000")
        self.inside = any(map(inside, intervals.values()))
        """Whether any of them may be due inside an epoch."""

    def begin(self, record: Record, left: int) -> None:
        """An epoch begins here, or goes on: with so many batches left of the window."""
        held = self._window - left
        if not held and record.is_ahead:
            held = self._window  # no row has been written here, so that an evaluation may have been broken off
        self._seen = max(0, record.batch - held)
        if self._fraction is not None:
            # A length may be wrong, and then the last epoch knows better.
            self._whole = self._feed.count(record.epoch) or record.counted or self._feed.length or 1

    def counted(self, record: Record) -> int:
        """The batches of the epoch that ends here, where fractions of the next ones hang on them: see `Record`."""
        if self._fraction is None or record.batch == self._whole or self._feed.count(record.epoch) is not None:
            return record.counted
        _log.warning(
            "evaluate_every=%g of epoch %d was taken of %d batches, and there were %d: len(loader) is wrong (cure: a "
            "number of updates)",
            *(self._fraction, record.epoch + 1, self._whole, record.batch),
        )
        return record.batch

    def crossed(self, record: Record, ahead: int) -> bool:
        """Whether an interval of updates has been passed, if the ``ahead`` updates were all applied."""
        return any(isinstance(every, int) and _crossed(every, record, ahead) for every in self._intervals.values())

    def due_inside(self, record: Record) -> list[str]:
        """The loaders to evaluate after the batch just done, where no window is open.

        What an open window had to wait for is due when it closes. Whether the epoch ends here, only the loader says.
        """
        since, self._seen = self._seen, record.batch
        return [name for name, every in self._intervals.items() if self._is_due(every, record, since)]

    def _is_due(self, every: int | float, record: Record, since: int) -> bool:
        if isinstance(every, int):
            return _crossed(every, record)
        return every < 1 and _passed(every, since, record.batch, self._whole)

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


def _passed(every: float, since: int, batch: int, count: int) -> bool:
    """Whether a mark of this fraction lies behind the batches ``since`` and up to ``batch``."""
    # A third of 7 batches ends behind batches 3, 5 and 7: the first batch at or past each mark. The last is the end's.
    part, inner = every * count, math.ceil(1 / every - 1e-9) - 1
    return min(whole(batch / part), inner) > min(whole(since / part), inner)
