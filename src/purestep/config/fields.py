"""The types of the fields of `FitConfig`: pydantic's constraints, and parsers of values that pydantic does not know.

Each parser raises a `ValueError` that says what the value must be; `messages` adds the name of the field and the cure.
Text from a command line or a file is read as the value that it spells.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, PlainSerializer, Strict

from .. import stopping
from ..errors import ConfigError
from ..state import nearest

_WORDS: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}


def literal(value: Any) -> Any:
    """Convert text from a command line or an environment variable to its value. Other values are returned unchanged.

    ``"1"`` becomes an int and ``"1.0"`` a float, because several settings treat them differently.

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


def _share(value: int | float) -> int | float:
    if value > 0 if isinstance(value, int) else 0.0 < value <= 1.0:
        return value
    raise ValueError("must be a number of batches (an int of at least 1) or a share of the loader (a float in (0, 1])")


def _share_or_none(value: int | float) -> int | float:
    return value if value == 0 else _share(value)


def _interval(value: int | float) -> int | float:
    if value > 0 if isinstance(value, int) else 0.0 < value <= 1.0 or (value > 1.0 and value.is_integer()):
        return value
    raise ValueError(
        "must be a number of updates (an int of at least 1) or of epochs (a float: 0.25 four times an epoch, "
        "1.0 once, 2.0 every other epoch)"
    )


def _seconds(value: Any) -> Any:
    """Convert a `timedelta`, its keywords as a mapping, or ``"DD:HH:MM:SS"`` to seconds."""
    try:
        if isinstance(value, Mapping):
            return timedelta(**value).total_seconds()
        if isinstance(value, str) and value.count(":") == 3:
            days, hours, minutes, rest = map(int, value.split(":"))
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
    except (TypeError, ValueError):
        raise ValueError('must be seconds, a timedelta, a mapping such as {"hours": 2} or "DD:HH:MM:SS"') from None
    return value.total_seconds() if isinstance(value, timedelta) else literal(value)


def _profile(value: Any) -> Any:
    value = literal(value)
    parts: Any = value.split(":", 2) if isinstance(value, str) else value
    return (
        [str(part) if isinstance(part, Path) else part for part in parts] if isinstance(parts, list | tuple) else parts
    )


def _window(value: Any) -> Any:
    if value is not None and value[0] >= value[1]:
        raise ValueError(
            "must be the first update and the one behind the last, such as (10, 13), and may name a directory"
        )
    return value


def _early_stopping(value: Any) -> stopping.EarlyStopping | None:
    value = literal(value)
    if value is None or isinstance(value, stopping.EarlyStopping):
        return value
    if not isinstance(value, Mapping):
        value = {"patience": value}
    known = ("patience", "min_delta", "start_ratio")
    for name in value:
        if name not in known:
            near = nearest(str(name), known)
            raise ValueError(
                f"has no setting {name!r}{f'; the nearest is {near!r}' if near else ''}: {', '.join(known)}"
            )
    settings: dict[str, Any] = {"patience": None, **value}
    try:
        return stopping.EarlyStopping(**settings)
    except ConfigError as error:
        raise ValueError(error.what) from None


def _device(value: Any) -> str | None:
    if value is None or isinstance(value, torch.device):
        return None if value is None else str(value)
    try:
        return str(torch.device(value))
    except (RuntimeError, TypeError):
        raise ValueError('must be a torch device such as "cuda", "cuda:1", "mps" or "cpu", or None') from None


def _path(value: Any) -> Any:
    if isinstance(value, str | Path) and "\0" not in str(value):
        return None if literal(value) is None else str(value)
    return value if value is None else 0  # what pydantic refuses


def _int_of_flag(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _as_fields(rule: stopping.EarlyStopping | None) -> dict[str, int | float] | None:
    return None if rule is None else asdict(rule)


_TEXT = BeforeValidator(literal)
_Bool = Annotated[bool, Strict()]
_Number = Annotated[int, Strict(), Le(sys.maxsize)] | Annotated[float, Strict(), AllowInfNan(False)]
_Name = Annotated[str, Strict(), MinLen(1)]
_Interval = Annotated[_Number, AfterValidator(_interval), _TEXT]
_Natural = Annotated[int, Strict(), Ge(0), Le(sys.maxsize)]
_Positive = Annotated[int, Strict(), Ge(1), Le(sys.maxsize)]

Count = Annotated[_Positive, _TEXT]
AtLeast0 = Annotated[_Natural, _TEXT]
Limit = Annotated[_Positive | Literal[-1] | None, _TEXT]
Minimum = Annotated[_Positive | None, _TEXT]
Checks = Annotated[_Natural | None, _TEXT]
DevRun = Annotated[_Natural, BeforeValidator(_int_of_flag), _TEXT]
Share = Annotated[_Number, AfterValidator(_share), _TEXT]
ShareOrNone = Annotated[_Number, AfterValidator(_share_or_none), _TEXT]
Limits = Share | dict[_Name, ShareOrNone] | Annotated[None, _TEXT]
Intervals = _Interval | dict[_Name, _Interval] | Annotated[None, _TEXT]
Seconds = Annotated[Annotated[float, Strict(), Gt(0), AllowInfNan(False)] | None, BeforeValidator(_seconds)]
Flag = Annotated[_Bool, _TEXT]
Choice = Annotated[_Bool | None, _TEXT]
Donate = Annotated[_Bool | Literal["init"], _TEXT]
Deterministic = Annotated[_Bool | Literal["warn"], _TEXT]
Compile = Annotated[Literal["auto"] | _Bool | dict[str, Any], _TEXT]
View = Annotated[Literal["params", "ema"] | None, _TEXT]
Direction = Annotated[stopping.Mode | None, _TEXT]
Metric = Annotated[str, MinLen(1)] | None
Patience = Annotated[stopping.EarlyStopping | None, BeforeValidator(_early_stopping), PlainSerializer(_as_fields)]
Resume = Annotated[_Name | None, BeforeValidator(_path)]
Device = Annotated[str | None, BeforeValidator(_device)]
Profile = Annotated[
    tuple[AtLeast0, Count] | tuple[AtLeast0, Count, _Name] | None, AfterValidator(_window), BeforeValidator(_profile)
]
