"""The types of the fields of `FitConfig`, and the parsers that convert user input to them.

Reading order: parsers of values (counts, shares, intervals, durations, flags), which `contrib` uses too; one validator
for each kind of field; the annotated types. Each parser and validator raises a `ValueError` that says what the value
must be, and the caller adds the name of the field. pydantic's own messages would name its internal parts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import PlainSerializer, PlainValidator

from .. import stopping
from ..errors import ConfigError
from ..state import is_count, is_number

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


def count(value: Any, *, least: int = 1, infinite: bool = False) -> int:
    """Return a whole number of at least ``least``. With ``infinite``, -1 (no limit) is valid too."""
    found = literal(value)
    if is_count(found, least) or (infinite and is_count(found, -1) and found < 0):
        return found
    raise ValueError(f"must be a whole number of at least {least}{', or -1 for no limit' if infinite else ''}")


def share(value: Any, *, least: int = 0) -> int | float:
    """Return a number of batches (int) or a share in (0, 1] (float). If ``least`` is 0, 0.0 is valid too."""
    found = literal(value)
    if is_count(found, least):
        return found
    if isinstance(found, float) and (0.0 < found <= 1.0 or (least == 0 and found == 0.0)):
        return found
    raise ValueError(
        f"must be a number of batches (an int of at least {least}) or a share of the loader (a float in (0, 1])"
    )


def interval(value: Any) -> int | float:
    """Return a number of updates (int), or a fraction of an epoch or a whole number of epochs (float)."""
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
    """Convert a duration to seconds: a number, a `timedelta`, its keywords as a mapping, or ``"DD:HH:MM:SS"``.

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
    """Return True or False, also from text."""
    found = literal(value)
    if isinstance(found, bool):
        return found
    raise ValueError("must be True or False")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name with the most similar spelling, or None.

    Example:
        >>> nearest("max_epoch", ["max_epochs", "max_steps"])
        'max_epochs'
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def _limit(value: Any) -> int | None:
    value = literal(value)
    return None if value is None else count(value, infinite=True)


def _minimum(value: Any) -> int | None:
    value = literal(value)
    return None if value is None else count(value)


def _max_time(value: Any) -> float | None:
    return None if literal(value) is None else seconds(value)


def _evaluate_every(value: Any) -> int | float | dict[str, int | float] | None:
    if isinstance(value, Mapping):
        return {_name(loader): interval(each) for loader, each in value.items()}
    value = literal(value)
    return None if value is None else interval(value)


def _limit_batches(value: Any) -> int | float | dict[str, int | float] | None:
    if isinstance(value, Mapping):
        return {_name(loader): share(each) for loader, each in value.items()}
    value = literal(value)
    return None if value is None else share(value, least=1)


def _overfit_batches(value: Any) -> int | float:
    return share(value)


def _fast_dev_run(value: Any) -> int:
    value = literal(value)
    return int(value) if isinstance(value, bool) else count(value, least=0)


def _at_least_0(value: Any) -> int:
    return count(value, least=0)


def _checks(value: Any) -> int | None:
    try:
        return None if literal(value) is None else count(value, least=0)
    except ValueError as error:
        raise ValueError(f"{error}, or None") from None


def _profile(value: Any) -> tuple[int, int] | tuple[int, int, str] | None:
    value = literal(value)
    if value is None:
        return None
    parts: Any = value.split(":", 2) if isinstance(value, str) else value
    try:
        first, end, *named = parts
        window = count(first, least=0), count(end)
    except (TypeError, ValueError):
        window = (0, 0)
        named = []
    if window[0] >= window[1] or len(named) > 1 or not all(map(_is_path, named)):
        raise ValueError(
            "must be the first update and the one behind the last, such as (10, 13), and may name a directory"
        )
    return (*window, *map(str, named))  # pyright: ignore[reportReturnType]  # at most one name


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and bool(str(value)) and "\0" not in str(value)


def _name(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"has the key {value!r}, which is no name of a loader")


def _early_stopping(value: Any) -> stopping.EarlyStopping | None:
    value = literal(value)
    if value is None or isinstance(value, stopping.EarlyStopping):
        return value
    if not isinstance(value, Mapping):
        return stopping.EarlyStopping(patience=count(value))
    known = ("patience", "min_delta", "start_ratio")
    for name in value:
        if name not in known:
            near = nearest(str(name), known)
            cure = {near if key == name else key: each for key, each in value.items()} if near else {"patience": 10}
            what = f"has no setting {name!r}; the settings are {', '.join(known)}"
            raise ConfigError(what, hint=f"early_stopping={cure}")
    if "patience" not in value:
        raise ConfigError("needs a patience", hint=f"early_stopping={ {'patience': 10} | dict(value) }")
    return stopping.EarlyStopping(**value)


def _resume(value: Any) -> str | None:
    if value is None or _is_path(value):
        return None if literal(value) is None else str(value)
    raise ValueError('must be "auto", the path of a snapshot directory, or None')


def _compile(value: Any) -> Literal["auto"] | bool | dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): option for name, option in value.items()}
    value = literal(value)
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError('must be "auto", True, False, or a mapping of options of compile_step')


def _device(value: Any) -> str | None:
    if value is None or isinstance(value, torch.device):
        return None if value is None else str(value)
    try:
        return str(torch.device(value))
    except (RuntimeError, TypeError):
        raise ValueError('must be a torch device such as "cuda", "cuda:1", "mps" or "cpu", or None') from None


def _donate(value: Any) -> bool | Literal["init"]:
    return "init" if value == "init" else _flag_or(value, '"init"')


def _deterministic(value: Any) -> bool | Literal["warn"]:
    return "warn" if value == "warn" else _flag_or(value, '"warn"')


def _flag_or(value: Any, word: str) -> bool:
    try:
        return flag(value)
    except ValueError as error:
        raise ValueError(f"{error} or {word}") from None


def _choice(value: Any) -> bool | None:
    return None if literal(value) is None else _flag_or(value, "None")


def _evaluate_on(value: Any) -> Literal["params", "ema"] | None:
    if value in ("params", "ema"):
        return value
    if literal(value) is None:
        return None
    raise ValueError('must be "params", "ema" or None')


def _mode(value: Any) -> stopping.Mode | None:
    if value in ("min", "max"):
        return value
    if literal(value) is None:
        return None
    raise ValueError('must be "min", "max" or None')


def _monitor(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ValueError('must be the name of a metric, such as "val_loss", or None')


def _as_fields(rule: stopping.EarlyStopping | None) -> dict[str, int | float] | None:
    return None if rule is None else asdict(rule)


Limit = Annotated[int | None, PlainValidator(_limit)]
Minimum = Annotated[int | None, PlainValidator(_minimum)]
Seconds = Annotated[float | None, PlainValidator(_max_time)]
Intervals = Annotated[int | float | dict[str, int | float] | None, PlainValidator(_evaluate_every)]
View = Annotated[Literal["params", "ema"] | None, PlainValidator(_evaluate_on)]
Metric = Annotated[str | None, PlainValidator(_monitor)]
Direction = Annotated[stopping.Mode | None, PlainValidator(_mode)]
Patience = Annotated[stopping.EarlyStopping | None, PlainValidator(_early_stopping), PlainSerializer(_as_fields)]
AtLeast0 = Annotated[int, PlainValidator(_at_least_0)]
Checks = Annotated[int | None, PlainValidator(_checks)]
Resume = Annotated[str | None, PlainValidator(_resume)]
Compile = Annotated[Literal["auto"] | bool | dict[str, Any], PlainValidator(_compile)]
Donate = Annotated[bool | Literal["init"], PlainValidator(_donate)]
Device = Annotated[str | None, PlainValidator(_device)]
Deterministic = Annotated[bool | Literal["warn"], PlainValidator(_deterministic)]
Choice = Annotated[bool | None, PlainValidator(_choice)]
Flag = Annotated[bool, PlainValidator(flag)]
Profile = Annotated[tuple[int, int] | tuple[int, int, str] | None, PlainValidator(_profile)]
DevRun = Annotated[int, PlainValidator(_fast_dev_run)]
Overfit = Annotated[int | float, PlainValidator(_overfit_batches)]
Limits = Annotated[int | float | dict[str, int | float] | None, PlainValidator(_limit_batches)]
