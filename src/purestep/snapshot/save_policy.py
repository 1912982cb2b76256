"""When a snapshot is due: arithmetic on updates, finished epochs and seconds; and checks of these settings."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ConfigError
from ..state import check_choice, check_count, is_count, is_number


class Every(NamedTuple):
    """The intervals; None means never. Updates and epochs are multiples counted from the start of the run."""

    steps: int | None
    epochs: int | None
    seconds: float | None


class Mark(NamedTuple):
    """A position of a run: optimizer updates, finished epochs, and a monotonic clock in seconds."""

    updates: int
    epoch: int
    seconds: float


def every(steps: int | None, epochs: int | None, seconds: float | None) -> Every:
    """Check the numbers and build an `Every`.

    Raises:
        ConfigError: a number is not positive.
    """
    counts = all(value is None or is_count(value, 1) for value in (steps, epochs))
    if not counts or not (seconds is None or (is_number(seconds) and seconds > 0)):
        given = (("every_steps", steps), ("every_epochs", epochs), ("every_seconds", seconds))
        found = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
        hint = "pass whole numbers of updates and epochs, seconds above 0; None means never"
        raise ConfigError(f"invalid intervals: {found}", where="Snapshots", hint=hint)
    return Every(steps, epochs, seconds)


def check_policy(keep: int | None, keep_best: int, on_save_error: str) -> None:
    """Check ``keep``, ``keep_best`` and ``on_save_error``.

    Raises:
        ConfigError: a value is out of its range.
    """
    if keep is not None:
        check_count("Snapshots", least=1, cure="keep=1, or keep=None for all", keep=keep)
    check_count("Snapshots", least=0, cure="keep_best=0 for none", keep_best=keep_best)
    check_choice("Snapshots", ("raise", "continue"), on_save_error=on_save_error)


def counted_from(last: Mark, here: Mark) -> Mark:
    """The mark to count from. Updates that were counted ahead may have been refused: a run reaches the same multiples
    again.

    Example:
        >>> counted_from(Mark(6, 2, 9.0), Mark(4, 2, 11.0))
        Mark(updates=4, epoch=2, seconds=9.0)
    """
    if here.updates >= last.updates and here.epoch >= last.epoch:
        return last  # the usual case
    return Mark(min(last.updates, here.updates), min(last.epoch, here.epoch), last.seconds)


def due(rule: Every, last: Mark, here: Mark) -> tuple[str, ...]:
    """The parts of the rule that make a snapshot due here, if the last one was at ``last``.

    A skipped multiple counts: with 3 updates at a time and ``every_steps=4``, snapshots are due at 6, 9, 12, ...

    Example:
        >>> due(Every(4, 1, None), Mark(3, 0, 0.0), Mark(6, 0, 9.0))
        ('every_steps',)
        >>> due(Every(4, 1, 5.0), Mark(6, 0, 9.0), Mark(7, 1, 14.0))
        ('every_epochs', 'every_seconds')
    """
    found = (
        ("every_steps", rule.steps is not None and here.updates // rule.steps > last.updates // rule.steps),
        ("every_epochs", rule.epochs is not None and here.epoch // rule.epochs > last.epoch // rule.epochs),
        ("every_seconds", rule.seconds is not None and here.seconds - last.seconds >= rule.seconds),
    )
    return tuple(name for name, is_due in found if is_due)
