"""The types of the fields of `FitConfig`: what each may be given as, and what it is afterwards.

Validators say themselves what a value has to be; pydantic's own words name its parts, not the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import PlainSerializer, PlainValidator

from .. import stopping
from . import values


def _limit(value: Any) -> int | None:
    value = values.literal(value)
    return None if value is None else values.count(value, infinite=True)


def _minimum(value: Any) -> int | None:
    value = values.literal(value)
    return None if value is None else values.count(value)


def _max_time(value: Any) -> float | None:
    return None if values.literal(value) is None else values.seconds(value)


def _evaluate_every(value: Any) -> int | float | dict[str, int | float] | None:
    if isinstance(value, Mapping):
        return {_name(loader): values.interval(each) for loader, each in value.items()}
    value = values.literal(value)
    return None if value is None else values.interval(value)


def _limit_batches(value: Any) -> int | float | dict[str, int | float] | None:
    if isinstance(value, Mapping):
        return {_name(loader): values.share(each) for loader, each in value.items()}
    value = values.literal(value)
    return None if value is None else values.share(value, least=1)


def _overfit_batches(value: Any) -> int | float:
    return values.share(value)


def _fast_dev_run(value: Any) -> int:
    value = values.literal(value)
    return int(value) if isinstance(value, bool) else values.count(value, least=0)


def _at_least_0(value: Any) -> int:
    return values.count(value, least=0)


def _checks(value: Any) -> int | None:
    try:
        return None if values.literal(value) is None else values.count(value, least=0)
    except ValueError as error:
        raise ValueError(f"{error}, or None") from None


def _name(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"has the key {value!r}, which is not the name of a loader")


def _early_stopping(value: Any) -> stopping.EarlyStopping | None:
    value = values.literal(value)
    if value is None or isinstance(value, stopping.EarlyStopping):
        return value
    if not isinstance(value, Mapping):
        return stopping.EarlyStopping(patience=values.count(value))
    known = ("patience", "min_delta", "start_ratio")
    for name in value:
        if name not in known:
            raise ValueError(f"has no setting {name!r}; there are {', '.join(known)}")
    if "patience" not in value:
        raise ValueError("needs a patience")
    return stopping.EarlyStopping(**value)


def _resume(value: Any) -> str | None:
    if value is None or (isinstance(value, str | Path) and str(value)):
        return None if values.literal(value) is None else str(value)
    raise ValueError('must be "auto", the path of a snapshot directory, or None')


def _compile(value: Any) -> Literal["auto"] | bool | dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): option for name, option in value.items()}
    value = values.literal(value)
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
        return values.flag(value)
    except ValueError as error:
        raise ValueError(f"{error} or {word}") from None


def _choice(value: Any) -> bool | None:
    return None if values.literal(value) is None else _flag_or(value, "None")


def _evaluate_on(value: Any) -> Literal["params", "ema"] | None:
    if value in ("params", "ema"):
        return value
    if values.literal(value) is None:
        return None
    raise ValueError('must be "params", "ema" or None')


def _mode(value: Any) -> stopping.Mode | None:
    if value in ("min", "max"):
        return value
    if values.literal(value) is None:
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
Flag = Annotated[bool, PlainValidator(values.flag)]
DevRun = Annotated[int, PlainValidator(_fast_dev_run)]
Overfit = Annotated[int | float, PlainValidator(_overfit_batches)]
Limits = Annotated[int | float | dict[str, int | float] | None, PlainValidator(_limit_batches)]
