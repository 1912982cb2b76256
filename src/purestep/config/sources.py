"""Read settings from keyword arguments, a mapping, an object or a file."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..errors import ConfigError
from .messages import ALIASES, ELSEWHERE
from .settings import FitConfig


def resolve(config: object = None, fields: Mapping[str, Any] | None = None) -> FitConfig:
    """Build one `FitConfig` from the arguments of `fit`; ``fields`` override ``config``.

    Example:
        >>> resolve({"n_epochs": 5, "log_every": 10}, {"log_every": 20}).log_every
        20

    Args:
        config: a `FitConfig`, a mapping, the path of a JSON or TOML file, or an object with attributes (a dataclass,
            a namespace, a pydantic model). Each key of a mapping must be a setting of fit. An object may also hold
            settings of other functions (``learning_rate``); these are ignored. Names that other trainers use
            (``max_epochs``, ``n_epochs``, ...) are accepted.
        fields: settings by their names in `FitConfig`.

    Raises:
        ConfigError: as `FitConfig`; or a setting has two names with different values.
    """
    return FitConfig.from_dict(_canonical(config) | dict(fields or {}))


def _canonical(config: object) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, FitConfig):
        return {name: getattr(config, name) for name in config.model_fields_set}
    found = as_mapping(config, where="fit")
    if not isinstance(config, Mapping | str | Path):
        found = {name: value for name, value in found.items() if name not in ELSEWHERE}
    merged: dict[str, Any] = {}
    for name, value in found.items():
        own = ALIASES.get(name, name)
        if own in merged and merged[own] != value:
            raise ConfigError(
                f"{own!r} has two values, under two names: {merged[own]!r} and {value!r}",
                where="fit",
                hint=f"pass only {own}={value!r}",
            )
        merged[own] = value
    return merged


def as_mapping(config: object, *, where: str) -> dict[str, Any]:
    """The settings in a mapping, a file or the attributes of an object. Names are not changed.

    Raises:
        ConfigError: ``config`` is none of these.
    """
    if isinstance(config, str | Path):
        return read(config)
    if isinstance(config, Mapping | BaseModel):
        return {str(name): value for name, value in dict(config).items()}
    if isinstance(config, tuple) and hasattr(config, "_asdict"):
        return dict(config._asdict())  # pyright: ignore[reportAttributeAccessIssue]  # checked above
    if hasattr(config, "__dict__") and not isinstance(config, type):
        shared = {name: value for kind in reversed(type(config).__mro__) for name, value in vars(kind).items()}
        plain = {name: value for name, value in shared.items() if not hasattr(type(value), "__get__")}
        return {name: value for name, value in (plain | vars(config)).items() if not name.startswith("_")}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    raise ConfigError(
        f"{config!r} holds no settings",
        where=where,
        hint="pass a mapping, a FitConfig, an object with attributes, or the path of a .json or .toml file",
    )


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON or TOML file; the suffix decides. TOML has no null: leave the key out.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "run.toml")
        >>> _ = path.write_text('epochs = 3\\nmonitor = "val_loss"')
        >>> read(path)
        {'epochs': 3, 'monitor': 'val_loss'}

    Raises:
        ConfigError: the file does not exist, has another suffix, does not parse, or contains no mapping.
    """
    file = Path(path)
    parsers = {".json": json.loads, ".toml": tomllib.loads}
    if file.suffix not in parsers:
        raise ConfigError(f"the suffix {file.suffix!r} is unknown", where=str(file), hint="pass a .json or .toml file")
    try:
        found = parsers[file.suffix](file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the file cannot be read: {error.strerror}", where=str(file), hint="check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the file does not parse: {error}", where=str(file), hint=f"correct the {file.suffix[1:]}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"the file holds a {type(found).__name__}", where=str(file), hint='write a mapping: {"epochs": 10}'
        )
    return found
