"""When a snapshot is due: arithmetic on updates, finished epochs and seconds."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ConfigError
from ..state import is_count, is_number


class Intervals(NamedTuple):
    """The intervals; None means never. Updates and epochs are multiples counted from the start of the run."""

    steps: int | None
    epochs: int | None
    seconds: float | None


class Mark(NamedTuple):
    """A position of a run: optimizer updates, finished epochs, and a monotonic clock in seconds."""

    updates: int
    epoch: int
    seconds: float


def checked(steps: int | None, epochs: int | None, seconds: float | None) -> Intervals:
    """Check the numbers and build an `Intervals`.

    Raises:
        ConfigError: a number is not positive.
    """
    counts = all(value is None or is_count(value, 1) for value in (steps, epochs))
    if not counts or not (seconds is None or (is_number(seconds) and seconds > 0)):
        given = (("every_steps", steps), ("every_epochs", epochs), ("every_seconds", seconds))
        found = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
        hint = "pass whole numbers of updates and epochs, seconds above 0; None means never"
        raise ConfigError(f"invalid intervals: {found}", where="Snapshots", hint=hint)
    return Intervals(steps, epochs, seconds)


def due(every: Intervals, last: Mark, here: Mark) -> tuple[str, ...]:
    """The settings that make a snapshot due here, if the last one was at ``last``.

    Example:
        >>> due(Intervals(4, 1, None), Mark(3, 0, 0.0), Mark(6, 0, 9.0))
        ('every_steps',)
        >>> due(Intervals(4, 1, 5.0), Mark(6, 0, 9.0), Mark(7, 1, 14.0))
        ('every_epochs', 'every_seconds')

    A skipped multiple counts: with 3 updates at a time and ``every_steps=4``, snapshots are due at 6, 9, 12, ...
    """
    found = (
        ("every_steps", every.steps is not None and here.updates // every.steps > last.updates // every.steps),
        ("every_epochs", every.epochs is not None and here.epoch // every.epochs > last.epoch // every.epochs),
        ("every_seconds", every.seconds is not None and here.seconds - last.seconds >= every.seconds),
    )
    return tuple(name for name, is_due in found if is_due)
