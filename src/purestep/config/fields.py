"""The types of the fields of `FitConfig`: pydantic's constraints, and parsers of values that pydantic does not know.

Each parser, and `_says`, raises a `ValueError` that says what the value must be; `messages` adds the name of the field
and the cure.
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
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    PlainSerializer,
    Strict,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from .. import stopping
from ..errors import ConfigError
from ..state import is_number, nearest

_WORDS: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}


def literal(value: Any) -> Any:
    """Convert text from a command line or an environment variable to its value. Other values are returned unchanged.

    Example:
        >>> [literal(text) for text in ("1", "1.0", "-1", "1e3", "none", "true", "auto")]
        [1, 1.0, -1, 1000.0, None, True, 'auto']

    ``"1"`` becomes an int and ``"1.0"`` a float, because several settings treat them differently.
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


def _float(value: Any) -> float:
    """Refuse all but a float: pydantic would convert a numpy int, which is a count, to a float, which is a share."""
    if not isinstance(value, float):
        raise ValueError("must be a float")
    return value


def _epochs(value: float) -> float:
    if value > 1.0 and not value.is_integer():
        raise ValueError("must be a fraction or a whole number of epochs")
    return value


def _seconds(value: Any) -> Any:
    """Convert a `timedelta`, its keywords as a mapping, or ``"DD:HH:MM:SS"`` to seconds."""
    try:
        if isinstance(value, Mapping):
            return timedelta(**value).total_seconds()
        if isinstance(value, str) and value.count(":") == 3:
            days, hours, minutes, rest = map(int, value.split(":"))
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
        found = value.total_seconds() if isinstance(value, timedelta) else literal(value)
        return float(found) if is_number(found) else found
    except (TypeError, OverflowError):
        raise ValueError("must be a duration") from None


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
            cure = {near if key == name else key: each for key, each in value.items()} if near else 10
            what = f"has no setting {name!r}; the settings are {', '.join(known)}"
            raise ConfigError(what, hint=f"early_stopping={cure}")
    if "patience" not in value:
        raise ConfigError("the mapping has no patience", hint=f"early_stopping={ {'patience': 10, **value} }")
    try:
        return stopping.EarlyStopping(**value)
    except ConfigError as error:
        raise ValueError(error.what) from None


def _device(value: Any) -> str | None:
    try:
        return None if value is None else str(torch.device(value))
    except (RuntimeError, TypeError, ValueError):
        raise ValueError('must be a torch device such as "cuda", "cuda:1", "mps" or "cpu", or None') from None


def _path(value: Any) -> Any:
    if literal(value) is None:
        return None
    return str(value) if isinstance(value, Path) else value


def _int_of_flag(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _as_fields(rule: stopping.EarlyStopping | None) -> dict[str, int | float] | None:
    return None if rule is None else asdict(rule)


def _says(text: str) -> WrapValidator:
    """Give a type one message, in place of those of pydantic about its parts."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(text) from None

    return WrapValidator(check)


_TEXT = BeforeValidator(literal)
_Bool = Annotated[bool, Strict()]
_Float = Annotated[float, Strict(), AllowInfNan(False), BeforeValidator(_float)]
_Natural = Annotated[int, Strict(), Ge(0), Le(sys.maxsize)]
_Positive = Annotated[int, Strict(), Ge(1), Le(sys.maxsize)]
_Path = Annotated[str, Strict(), StringConstraints(pattern=r"^[^\x00]+$")]
_Loader = Annotated[str, Strict(), MinLen(1), _says("must have names of loaders as its keys")]
_Interval = Annotated[
    _Positive | Annotated[_Float, Gt(0), AfterValidator(_epochs)],
    _says(
        "must be a number of updates (an int of at least 1) or of epochs (a float: 0.25 four times an epoch, 1.0 once, "
        "2.0 every other epoch)"
    ),
    _TEXT,
]

Count = Annotated[_Positive, _says("must be a whole number of at least 1"), _TEXT]
AtLeast0 = Annotated[_Natural, _says("must be a whole number of at least 0"), _TEXT]
Limit = Annotated[
    _Positive | Literal[-1] | None, _says("must be a whole number of at least 1, or -1 for no limit"), _TEXT
]
Minimum = Annotated[_Positive | None, _says("must be a whole number of at least 1, or None"), _TEXT]
Checks = Annotated[_Natural | None, _says("must be a whole number of at least 0, or None"), _TEXT]
DevRun = Annotated[AtLeast0, BeforeValidator(_int_of_flag), _TEXT]
Share = Annotated[
    _Positive | Annotated[_Float, Gt(0), Le(1)],
    _says("must be a number of batches (an int of at least 1) or a share of the loader (a float in (0, 1])"),
    _TEXT,
]
ShareOrNone = Annotated[
    _Natural | Annotated[_Float, Ge(0), Le(1)],
    _says("must be a number of batches (an int of at least 0) or a share of the loader (a float in [0, 1])"),
    _TEXT,
]
Limits = Share | dict[_Loader, ShareOrNone] | Annotated[None, _TEXT]
Intervals = _Interval | dict[_Loader, _Interval] | Annotated[None, _TEXT]
Seconds = Annotated[
    Annotated[_Float, Gt(0)] | None,
    BeforeValidator(_seconds),
    _says('must be seconds > 0, a timedelta, a mapping such as {"hours": 2} or "DD:HH:MM:SS"'),
]
Flag = Annotated[_Bool, _TEXT]
Choice = Annotated[_Bool | None, _says("must be True, False or None"), _TEXT]
Donate = Annotated[_Bool | Literal["init"], _TEXT]
Deterministic = Annotated[_Bool | Literal["warn"], _TEXT]
Compile = Annotated[
    Literal["auto"] | _Bool | dict[str, Any],
    _says('must be "auto", True, False or a mapping of options of compile_step'),
    _TEXT,
]
View = Annotated[Literal["params", "ema"] | None, _TEXT]
Direction = Annotated[stopping.Mode | None, _TEXT]
Metric = Annotated[Annotated[str, MinLen(1)] | None, _says('must be the name of a metric, such as "val_loss", or None')]
Patience = Annotated[stopping.EarlyStopping | None, BeforeValidator(_early_stopping), PlainSerializer(_as_fields)]
Resume = Annotated[_Path | None, BeforeValidator(_path), _says('must be "auto", the path of a snapshot, or None')]
Device = Annotated[str | None, BeforeValidator(_device)]
