"""Checks of arguments. A bool is neither a count nor a number, although Python treats it as an int."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

from ..errors import ConfigError


def is_count(value: Any, least: int = 0) -> TypeGuard[int]:
    """True for an int of at least ``least`` and below 2**63, with which Python's iterators and torch count."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= sys.maxsize


def is_number(value: Any) -> TypeGuard[int | float]:
    """True for an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(number: float) -> int:
    """Round down to an int, except that a number within a rounding error of an int gives this int.

    Example:
        >>> 0.29 * 100, whole(0.29 * 100), whole(28.99)
        (28.999999999999996, 29, 28)
    """
    near = round(number)
    return near if abs(number - near) <= 1e-12 * max(1.0, abs(number)) else math.floor(number)


def nearest_names(pattern: str, names: Iterable[str]) -> str:
    """Name up to three of ``names`` whose spelling, or that of a part of them, is nearest to a pattern.

    Args:
        pattern: a name, glob or regular expression that matches none of them.
        names: dotted names.

    Example:
        >>> nearest_names("^encodr", ["head.weight", "encoder.weight"])
        "the nearest names are 'encoder.weight', 'head.weight'"
    """
    known = list(names)
    word = re.sub(r"\\.|[\[\]^$().*+?{}|]", lambda found: "." if "." in found[0] else "", pattern).strip(".")

    def likeness(name: str) -> float:
        parts = name.split(".")
        spans = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
        return max(difflib.SequenceMatcher(None, word, span).ratio() for span in spans)

    near = sorted(known, key=likeness, reverse=True)[:3]
    shown = ", ".join(map(repr, near))
    return f"the nearest names are {shown}" if len(near) > 1 else f"the nearest name is {shown}" if near else ""


def check_count(where: str, *, least: int, **counts: Any) -> None:
    """Check that each value is an int of at least ``least``.

    Raises:
        ConfigError: a value is not; the message has its name.
    """
    for name, value in counts.items():
        if not is_count(value, least):
            raise ConfigError(f"{name}={value!r} is no int of at least {least}", where=where, hint=f"{name}=10")


def check_finite(where: str, **numbers: Any) -> None:
    """Check that each value is a finite int or float.

    Raises:
        ConfigError: a value is not; the message has its name.
    """
    for name, value in numbers.items():
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{name}={value!r} is no finite int or float", where=where, hint=f"{name}=1e-3")


def check_positive(where: str, **numbers: Any) -> None:
    """Check that each value is a finite number > 0.

    Raises:
        ConfigError: a value is not; the message has its name.
    """
    check_finite(where, **numbers)
    for name, value in numbers.items():
        if value <= 0:
            raise ConfigError(f"{name}={value!r} is not positive", where=where, hint=f"{name}=0.1")


def check_callable(where: str, cure: str, **functions: Any) -> None:
    """Check that each value is callable.

    Raises:
        ConfigError: a value is not; the message has its name.
    """
    for name, value in functions.items():
        if not callable(value):
            raise ConfigError(f"{name}={value!r} is no function", where=where, hint=cure)


def listed(where: str, cure: str, **series: Any) -> list[Any]:
    """Convert the one keyword argument, any iterable except text, to a list.

    Raises:
        ConfigError: the argument is not iterable; the message has its name.
    """
    ((name, value),) = series.items()
    if not isinstance(value, str | bytes):
        try:
            return list(cast("list[Any]", value))
        except TypeError:  # a number, a function, a tensor without dimensions
            pass
    raise ConfigError(f"{name}={value!r} is no list", where=where, hint=cure)
