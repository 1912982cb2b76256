"""Settings of a script from a dataclass, a file and the command line, parsed by tyro."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from ..errors import ConfigError
from ..state import nearest
from . import messages
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

    ``python train.py --config run.toml --learning-rate 3e-4 --fit.epochs 5``: the file sets fields by their names, and
    options override it. A file holds all fields without a default. Each field is an option (``learning_rate``:
    ``--learning-rate``), with its type, default and comment or docstring in ``--help``; a flag has ``--no-...`` too. A
    field that is a dataclass is a group with options ``--group.field``, and a table ``[group]`` in the file. A field of
    type `FitConfig` is a group with the settings of `fit`, for ``ps.fit(state, loaders, program, config.fit)``.

    A wrong option or file ends the program with status 2, and a message that names the option or the file and the
    nearest names. This is a thin layer on tyro (``pip install 'purestep[cli]'``), which parses the options: its
    annotations (``tyro.conf``) work in the dataclass.

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
        found = {} if given.config is None else read(given.config)
        default = {} if given.config is None else {"default": _filled(config, None, found, str(given.config), "")}
        registry = tyro.constructors.ConstructorRegistry()
        registry.struct_rule(lambda info: _fit_options(info, tyro))
        registry.struct_rule(lambda info: _group_options(info, tyro))
        return tyro.cli(config, args=rest, prog=prog, description=text.strip(), registry=registry, **default)
    except ConfigError as error:
        print(f"{prog or sys.argv[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _filled(config: type[Any], before: Any, found: Mapping[str, Any], file: str, prefix: str) -> Any:
    """A dataclass with the values of a file; the other values are those of ``before``, or the defaults without one.

    ``__init__`` does not run: tyro calls it with the options too, and ``__post_init__`` may derive values from them.

    Raises:
        ConfigError: a name is not a field, a value has another type, or a field without a default is missing.
    """
    has_before = isinstance(before, config)
    if has_before:
        config = type(before)
    own = {field.name: field for field in dataclasses.fields(config) if field.init}
    for name in found:
        if name not in own:
            near = nearest(str(name), own)
            raise ConfigError(
                f"{prefix}{name} is not a setting; the settings are {', '.join(prefix + each for each in own)}",
                where=file,
                hint=f"{prefix}{near}" if near else "use one of these",
            )
    types = typing.get_type_hints(config, include_extras=True)
    made, lacking = object.__new__(config), list[str]()
    for name, field in own.items():
        value = getattr(before, name) if has_before else _default(field, types[name], file, f"{prefix}{name}.")
        if name in found:
            value = _value(types[name], found[name], value, file, prefix + name)
        if value is dataclasses.MISSING:
            lacking.append(prefix + name)
        object.__setattr__(made, name, value)
    if lacking:
        what = f"{', '.join(lacking)} has no default and is not in the file"
        raise ConfigError(what, where=file, hint=f"add {lacking[0]} to the file")
    return made


def _default(field: dataclasses.Field[Any], kind: Any, file: str, prefix: str) -> Any:
    """The default of a field, ``MISSING`` without one."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    if field.default_factory is kind and isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _filled(kind, None, {}, file, prefix)
    return field.default_factory()


def _value(kind: Any, found: Any, before: Any, file: str, name: str) -> Any:
    """A value of a file in the type of its field."""
    bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    if bare is FitConfig:
        _check_table(found, file, name)
        known = {each: getattr(before, each) for each in before.model_fields_set} if isinstance(before, bare) else {}
        try:
            return FitConfig.from_dict({**known, **found})
        except ConfigError as error:
            raise ConfigError(f"{name}: {error.what}", where=file, hint=error.hint) from error
    if isinstance(bare, type) and dataclasses.is_dataclass(bare):
        _check_table(found, file, name)
        return _filled(bare, before, found, file, f"{name}.")
    try:
        return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(found)
    except ValidationError as error:
        what = f"{name} = {found!r}: {messages.reason(error.errors())}"
        raise ConfigError(what, where=file, hint=f"correct {name} in the file") from error
    except (PydanticSchemaGenerationError, PydanticUserError):  # a type that pydantic does not know
        return found


def _check_table(found: Any, file: str, name: str) -> None:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} = {found!r} must be a table", where=file, hint=f"[{name}] and its settings below")


def _group_options(info: Any, tyro: Any) -> Any:
    """A group of options for a dataclass with an instance as default, of which only arguments of ``__init__`` count.

    tyro would also copy the fields that ``__post_init__`` computes.
    """
    kind, default = info.type, info.default
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(default, kind)):
        return None
    arguments = {each.name: getattr(default, each.name) for each in dataclasses.fields(kind) if each.init}
    spec = tyro.constructors.ConstructorRegistry.get_struct_spec(
        dataclasses.replace(info, default=SimpleNamespace(**arguments))
    )
    return spec if isinstance(spec, tyro.constructors.StructConstructorSpec) else None  # not in a union


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
    """The text of an option; a mapping or list is written as JSON."""
    (text,) = args
    return json.loads(text) if text[:1] in "{[" else text


def _any(value: Any) -> bool:
    del value  # of whatever type
    return True


def _shown(value: Any) -> list[str]:
    return [json.dumps(value) if isinstance(value, Mapping | list) else str(value)]
