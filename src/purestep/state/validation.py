"""Checks of arguments. A bool is neither a count nor a number, although Python treats it as an int."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import torch

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


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name with the most similar spelling; None if no name is as similar as ``likeness``, in [0, 1].

    Example:
        >>> nearest("max_epoch", ["max_epochs", "max_steps"])
        'max_epochs'
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def nearest_names(pattern: str, names: Iterable[str]) -> str:
    """Name up to three of ``names`` whose spelling, or that of a part of them, is nearest to a pattern.

    Example:
        >>> nearest_names("^encodr", ["head.weight", "encoder.weight"])
        "the nearest names are 'encoder.weight', 'head.weight'"

    Args:
        pattern: a name, glob or regular expression that matches none of them.
        names: dotted names.
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


def check_count(where: str, *, least: int, cure: str = "", **counts: Any) -> None:
    """Check that each value is an int of at least ``least``.

    Raises:
        ConfigError: a value is not; the message has its name.
    """
    for name, value in counts.items():
        if not is_count(value, least):
            is_share = isinstance(value, float) and 0 < value < 1
            own = f"a whole number: {name} is a count, not a share" if is_share else f"{name}={least}, or more"
            raise ConfigError(f"{name}={value!r} must be an int of at least {least}", where=where, hint=cure or own)


def check_range(
    where: str, low: float, high: float = math.inf, /, *, ends: str = "[)", cure: str = "", **numbers: Any
) -> None:
    """Check that each value is a finite number between two bounds.

    Example:
        >>> check_range("adamw", 0, 1, cure="0.9 is the default", b1=1.5)
        Traceback (most recent call last):
        purestep.errors.ConfigError: adamw: b1=1.5 must be in [0, 1) (cure: 0.9 is the default)

    Args:
        where: the function that has these arguments.
        low: the lower bound.
        high: the upper bound.
        ends: a bracket for each bound: a bound with a square bracket is a valid value itself.
        cure: the cure; empty: the caller's own number, if its text or its sign was wrong, else the bounds.
        numbers: the values by the names of the arguments.

    Raises:
        ConfigError: a value is not; the message has its name and the range.
    """

    def fits(value: Any) -> bool:
        above = is_number(value) and -math.inf < value < math.inf and (value > low or (ends[0] == "[" and value == low))
        return above and (value < high or (ends[1] == "]" and value == high))

    for name, value in numbers.items():
        if fits(value):
            continue
        bounds = f"in {ends[0]}{low:g}, {high:g}{ends[1]}"
        if math.isinf(high):
            least = f" {'of at least' if ends[0] == '[' else 'greater than'} {low:g}"
            bounds = f"a finite number{'' if math.isinf(low) else least}"
        problem = f"must be {bounds}" if is_number(value) else f"is a {type(value).__name__}, not a number"
        meant = _meant(value)
        own = f"{name}={meant}" if fits(meant) else f"pass {'a number ' if bounds.startswith('in ') else ''}{bounds}"
        raise ConfigError(f"{name}={value!r} {problem}", where=where, hint=cure or own)


def _meant(value: Any) -> Any:
    """The number that a text spells, or a negative number without its sign; None for any other value."""
    try:
        return float(value) if isinstance(value, str) else -value if is_number(value) and value < 0 else None
    except ValueError:
        return None


def check_choice(where: str, options: Iterable[Any], *, also: str = "", **values: Any) -> None:
    """Check that each value is one of the options.

    Example:
        >>> check_choice("masked_mse", ("mean", "sum", "batch_mean"), reduction="foo")
        Traceback (most recent call last):
        purestep.errors.ConfigError: masked_mse: reduction='foo' is unknown (cure: "mean", "sum" or "batch_mean")

    Args:
        where: the function that has these arguments.
        options: the valid texts, ints, bools or None.
        also: words for other values that are valid, which the caller has sorted out.
        values: the values by the names of the arguments.

    Raises:
        ConfigError: a value is none of them; the message has its name and all options.
    """
    known = list(options)
    for name, value in values.items():
        if isinstance(value, str | int | None) and value in known:
            continue
        words = [f'"{option}"' if isinstance(option, str) else str(option) for option in known]
        *most, last = [*words, also] if also else words
        hint = f"{', '.join(most)} or {last}" if most else last
        raise ConfigError(f"{name}={value!r} is unknown", where=where, hint=hint)


def check_callable(where: str, cure: str, **functions: Any) -> None:
    """Check that each value is callable.

    Raises:
        ConfigError: a value is not; the message has its name.
    """
    for name, value in functions.items():
        if not callable(value):
            raise ConfigError(f"{name}={value!r} must be a function", where=where, hint=cure)


def listed(where: str, **series: Any) -> list[Any]:
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
    hint = f"{name}=[{value!r}]" if is_number(value) else "pass a list"
    raise ConfigError(f"{name}={value!r} must be a list", where=where, hint=hint)


def usable_device(name: str | torch.device) -> torch.device:
    """Return the device of that name, if this machine has it.

    Example:
        >>> usable_device("cpu")
        device(type='cpu')

    Raises:
        ConfigError: the machine has no such device.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA.
        reason = str(error).partition(". ")[0]  # The rest of torch's message lists all backends.
        what, hint = f"no device {str(name)!r} here: {reason}", 'device="cpu"'
        if str(name).startswith("cuda") and not torch.backends.cuda.is_built():
            what = f"no device {str(name)!r} here: torch {torch.__version__} is built without CUDA"
            hint = 'install a CUDA build of torch (pytorch.org), or pass device="cpu"'
        raise ConfigError(what, where="device", hint=hint) from error
    return device
