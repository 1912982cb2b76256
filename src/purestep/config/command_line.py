"""Settings of a script from a dataclass, a file and the command line, parsed by tyro."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import ConfigError
from .settings import FitConfig
from .sources import read

_Config = TypeVar("_Config")


def cli(
    config: type[_Config], args: Sequence[str] | None = None, *, prog: str | None = None, description: str | None = None
) -> _Config:
    """Return a dataclass filled from the command line: its defaults, then a file, then options.

    Example:
        >>> from dataclasses import dataclass
        >>> import purestep as ps
        >>> @dataclass(frozen=True)
        ... class Config:
        ...     learning_rate: float = 1e-3
        ...     fit: ps.FitConfig = ps.FitConfig(epochs=3)
        >>> def main() -> None:  # python train.py --config run.toml --fit.epochs 5
        ...     config = ps.config.cli(Config)

    ``python train.py --config run.toml --learning-rate 3e-4 --fit.epochs 5``: the values of the file are options too,
    and those of the command line override them. Each field is an option (``learning_rate``: ``--learning-rate``), with
    its type, default and comment or docstring in ``--help``; a flag has ``--no-...`` too. A field that is a dataclass
    is a group with options ``--group.field``, and a table ``[group]`` in the file. A field of type `FitConfig` is a
    group with the settings of `fit`, for ``ps.fit(state, loaders, program, config.fit)``.

    A value in the file is written as for its option, in a list one by one; a table that is no group holds an option's
    keys and values. None of a setting of `fit` is ``none``, or ``null`` in JSON. A wrong option or file ends the
    program with status 2, and a message that names the option, the nearest names and the file. This is a thin layer on
    tyro (``pip install 'purestep[cli]'``), which parses the options: its annotations (``tyro.conf``) work in the
    dataclass.

    Args:
        config: a dataclass.
        args: options. None: those of the program, ``sys.argv[1:]``.
        prog: the name of the program in ``--help``. None: that of the script.
        description: for ``--help``. None: the docstring of the dataclass.

    Raises:
        ConfigError: ``config`` is no dataclass, or has a field ``config``; tyro is not installed.
        SystemExit: status 2 for a wrong option or file; status 0 after ``--help``.
    """
    where = "config.cli"
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"config={config!r} must be a dataclass", where=where, hint="@dataclass above `class Config:`"
        )
    if any(field.name == "config" for field in dataclasses.fields(config)):
        raise ConfigError("the dataclass has a field config", where=where, hint="rename it: --config names the file")
    try:
        tyro: Any = importlib.import_module("tyro")
    except ImportError as error:
        raise ConfigError("tyro is not installed", where=where, hint="pip install 'purestep[cli]'") from error
    first = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    given, rest = first.parse_known_args(sys.argv[1:] if args is None else list(args))
    text = (config.__doc__ or "" if description is None else description).strip()
    text += "\n\n--config FILE: a .toml or .json file with values of these fields, which options override."
    try:
        options = [] if given.config is None else _options(config, read(given.config), "")
        registry = tyro.constructors.ConstructorRegistry()
        registry.struct_rule(lambda info: _fit_options(info, tyro))
        return tyro.cli(config, args=[*options, *rest], prog=prog, description=text.strip(), registry=registry)
    except ConfigError as error:
        print(f"{prog or sys.argv[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except SystemExit as error:
        if error.code and given.config is not None:
            print(f"{prog or sys.argv[0]}: the values of {given.config} are among these options", file=sys.stderr)
        raise


def _options(config: Any, found: Mapping[str, Any], prefix: str) -> list[str]:
    """The values of a file as options: those of a table are options of its group."""
    kinds = typing.get_type_hints(config) if dataclasses.is_dataclass(config) else {}
    options: list[str] = []
    for name, value in found.items():
        kind, option = kinds.get(name), prefix + name.replace("_", "-")
        if config is FitConfig:
            options.append(f"--{option}={_shown(value)[0]}")
        elif kind is bool and isinstance(value, bool):
            options.append(f"--{option}" if value else f"--{prefix}no-{name.replace('_', '-')}")
        elif isinstance(value, Mapping) and (kind is FitConfig or dataclasses.is_dataclass(kind)):
            options += _options(kind, value, f"{option}.")
        elif isinstance(value, Mapping | list):
            texts = _texts(value)
            if wrong := [text for text in texts if text.startswith("--")]:
                what = f"{prefix}{name} has {wrong[0]!r}, which would be an option"
                raise ConfigError(what, where="config.cli", hint="no text that begins with --")
            options += [f"--{option}", *texts]
        else:
            options.append(f"--{option}={value}")
    return options


def _texts(value: Any) -> list[str]:
    """The numbers and texts of a list or a table, in order."""
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    return [text for each in value for text in _texts(each)] if isinstance(value, list) else [str(value)]


def _fit_options(info: Any, tyro: Any) -> Any:
    """A group of options for a `FitConfig`: each takes the text that the field takes."""
    if info.type is not FitConfig:
        return None
    given = isinstance(info.default, FitConfig)

    def made(**values: Any) -> FitConfig:
        defaults = info.default.model_fields_set if given else ()
        known = FitConfig.model_fields
        return FitConfig(**{n: v for n, v in values.items() if n in defaults or v != known[n].default})

    found: list[Any] = []
    for name, field in FitConfig.model_fields.items():
        default = getattr(info.default, name) if given else field.default
        text = " ".join((field.description or "").split()).partition(". ")[0]
        kind = typing.Annotated[Any, tyro.constructors.PrimitiveConstructorSpec(1, "VALUE", _read, _any, _shown)]
        found.append(tyro.constructors.StructFieldSpec(name, kind, default, helptext=text))
    return tyro.constructors.StructConstructorSpec(made, tuple(found))


def _read(args: list[str]) -> Any:
    """The text of an option; a mapping or list is written as JSON, and None as none or null."""
    (text,) = args
    if text.lower() in ("none", "null"):
        return None
    return json.loads(text) if text[:1] in "{[" else text


def _any(value: Any) -> bool:
    del value  # of whatever type
    return True


def _shown(value: Any) -> list[str]:
    return [json.dumps(value) if isinstance(value, Mapping | list) else str(value)]
