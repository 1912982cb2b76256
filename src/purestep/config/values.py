"""What settings may be written as: counts, shares, durations, and numbers that arrive as text.

Every function raises a `ValueError` that says what a value has to be; the caller adds where it stood.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from ..arguments import is_count, is_number

_WORDS: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}


def literal(value: Any) -> Any:
    """Text from a command line or an environment variable as what it spells; anything else as it is.

    ``"1"`` is an int and ``"1.0"`` a float, because several settings mean different things by them.

    Example:
        >>> [literal(text) for text in ("1", "1.0", "-1", "1e3", "none", "true", "auto")]
        [1, 1.0, -1, 1000.0, None, True, 'auto']
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return value


def count(value: Any, *, least: int = 1, infinite: bool = False) -> int:
    """A whole number of at least ``least``; with ``infinite`` also -1, which means no limit."""
    found = literal(value)
    if is_count(found, least) or (infinite and is_count(found, -1) and found < 0):
        return found
    raise ValueError(f"must be a whole number of at least {least}{', or -1 for no limit' if infinite else ''}")


def share(value: Any, *, least: int = 0) -> int | float:
    """An int is a number of batches, a float a share in (0, 1] of the loader (0.0 where ``least`` is 0)."""
    found = literal(value)
    if is_count(found, least):
        return found
    if isinstance(found, float) and (0.0 < found <= 1.0 or (least == 0 and found == 0.0)):
        return found
    raise ValueError(
        f"must be a number of batches (an int of at least {least}) or a share of the loader (a float in (0, 1])"
    )


def interval(value: Any) -> int | float:
    """An int is a number of updates, a float a fraction of an epoch or a whole number of epochs."""
    found = literal(value)
    if is_count(found, 1):
        return found
    if isinstance(found, float) and (0.0 < found <= 1.0 or (found > 1.0 and found.is_integer())):
        return found
    raise ValueError(
        "must be a number of updates (an int of at least 1) or of epochs (a float: 0.25 four times an epoch, "
        "1.0 once, 2.0 every other epoch)"
    )


def seconds(value: Any) -> float:
    """A duration: seconds, a `timedelta`, its keywords as a mapping, or ``"DD:HH:MM:SS"``.

    Example:
        >>> seconds("00:01:30:00"), seconds({"minutes": 2}), seconds(timedelta(hours=1))
        (5400.0, 120.0, 3600.0)
    """
    found = _seconds(literal(value))
    if found is None or not math.isfinite(found) or found <= 0:
        raise ValueError('must be seconds > 0, a timedelta, a mapping such as {"hours": 2} or "DD:HH:MM:SS"')
    return found


def _seconds(value: Any) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        try:
            return timedelta(**value).total_seconds()
        except TypeError:
            return None
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
            return None
        days, hours, minutes, rest = (int(part) for part in parts)
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
    return float(value) if is_number(value) else None


def flag(value: Any) -> bool:
    """True or False, as such or in words."""
    found = literal(value)
    if isinstance(found, bool):
        return found
    raise ValueError("must be True or False")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like this one.

    Example:
        >>> nearest("max_epoch", ["max_epochs", "max_steps"])
        'max_epochs'
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None
