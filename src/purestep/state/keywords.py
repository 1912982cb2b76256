"""Pickle the results of factories, which are closures, as the calls that created them.

`recipe` decorates a factory and wraps its result in an object that stores the factory and its arguments. `pickle` saves
these, and unpickling calls the factory again. Factories receive unwrapped arguments, so a step runs the bare functions.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import nn

from ..errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class Call(NamedTuple):
    """The call of a factory."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def recipe(factory: Callable[P, R]) -> Callable[P, R]:
    """Make the results of a factory picklable if its arguments are.

    Args:
        factory: a module-level function that returns a function or a NamedTuple of functions.

    Raises:
        ConfigError: from the decorated factory, for a keyword argument that it does not have. The message names the
            nearest one.

    Example:
        >>> import pickle
        >>> from purestep.schedules import cosine
        >>> float(pickle.loads(pickle.dumps(cosine(1.0, 4)))(2))
        0.5
    """

    known = _keywords(factory)

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # a step calls the factory, see `optim.inject`
            return factory(*args, **kwargs)
        if known is not None and not known.issuperset(kwargs):
            raise _unknown_keyword(_name(factory), known, kwargs)
        call = Call(make, tuple(map(_snapshot, args)), {name: _snapshot(value) for name, value in kwargs.items()})
        inner: Callable[..., Any] = factory
        made = inner(*map(bare, call.args), **{name: bare(value) for name, value in call.kwargs.items()})
        return cast(R, _wrapped(bare(made), call))

    return make


_ALIASES = {
    "accumulate_grad_batches": "accumulate",
    "accumulation": "accumulate",
    "accumulation_steps": "accumulate",
    "alpha": "decay",
    "beta": "decay",
    "clip_value": "max_value",
    "dtype": "precision",
    "ema_decay": "ema",
    "grad_accum_steps": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "loss_fn": "criterion",
    "lr": "learning_rate",
    "max_grad_norm": "max_norm",
    "optimizer": "tx",
    "skip_nonfinite": "nonfinite",
    "wd": "weight_decay",
}
"""Names of other libraries -> our name, used if the factory has it."""
_PAIRS = {"betas": ("b1", "b2"), "beta": ("b1",), "beta1": ("b1",), "beta2": ("b2",)}
_ELSEWHERE = {
    "epochs": "pass it to ps.fit(..., epochs=10)",
    "gradient_clip_val": "tx=optim.chain(optim.clip_by_global_norm(1.0), ...)",
    "lr": "pass it to the optimizer: optim.adamw(learning_rate=1e-3)",
    "max_grad_norm": "tx=optim.chain(optim.clip_by_global_norm(1.0), ...)",
    "params": "leave it out: program.init() passes the parameters",
    "seed": "pass it to program.init(seed=0)",
    "weight_decay": "pass it to the optimizer: optim.adamw(1e-3, weight_decay=0.1)",
}
"""Arguments that belong to another function."""


def _keywords(factory: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the keyword arguments; None if the factory takes any."""
    parameters = inspect.signature(factory).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def _unknown_keyword(where: str, known: frozenset[str], given: Mapping[str, Any]) -> ConfigError:
    name = next(name for name in given if name not in known)
    hint = f"one of {', '.join(sorted(known))}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if known.issuperset(_PAIRS.get(name, "?")):
        values = given[name] if isinstance(given[name], tuple | list) else (given[name],)
        hint = ", ".join(f"{ours}={value!r}" for ours, value in zip(_PAIRS[name], values, strict=False))
    elif _ALIASES.get(name) in known:
        hint = f"{_ALIASES[name]}={_shown(given[name])}"
    elif name in _ELSEWHERE:
        hint = _ELSEWHERE[name]
    elif near:
        hint = f"{near[0]}={_shown(given[name])}"
    return ConfigError(f"has no argument {name!r}", where=where, hint=hint)


def _shown(value: Any) -> str:
    """Return a short value as code, any other as an ellipsis."""
    return repr(value) if isinstance(value, int | float | str | bool | tuple) and len(repr(value)) < 40 else "..."


def bare(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Remove the wrapping of `recipe`, also in lists, tuples and dicts. Returns the same object if there is none.

    Args:
        value: any object.
        above: ids of the containers around it; a container that contains itself is returned unchanged.
    """
    if id(value) in above:
        return value
    here = (*above, id(value))
    if isinstance(value, PicklableFunction):
        return value.__wrapped__
    if isinstance(value, _PicklableTuple):
        return value.plain()
    if type(value) is dict:
        space = cast(dict[Any, Any], value)
        inner = {key: bare(item, here) for key, item in space.items()}
        return inner if any(inner[key] is not item for key, item in space.items()) else space
    if type(value) in (list, tuple):
        items = cast("list[Any] | tuple[Any, ...]", value)
        found = [bare(item, here) for item in items]
        return type(items)(found) if any(a is not b for a, b in zip(found, items, strict=True)) else items
    return value


class PicklableFunction:
    """A function from a factory, with the factory's call."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], call: Call) -> None:
        functools.update_wrapper(self, function)
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<function made by {_name(self.call.factory)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        _check(self.call, {})
        return _rebuild, (*self.call, {})

    def __copy__(self) -> PicklableFunction:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> PicklableFunction:
        return self


class _PicklableTuple:
    """Mixin for a NamedTuple from a factory, with the factory's call. ``_replace`` also stores its changes."""

    base: type[Any]
    call: Call | None = None
    changes: Mapping[str, Any] = types.MappingProxyType({})

    def plain(self) -> Any:
        return self.base(*cast(tuple[Any, ...], self))

    def _replace(self, **changes: Any) -> Any:
        new: Any = cast(Any, super())._replace(**changes)
        changed = {name: value for name, value in changes.items() if value is not getattr(self, name)}
        new.call, new.changes = self.call, {**self.changes, **changed}
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        if self.call is None:
            return self.base, tuple(cast(tuple[Any, ...], self))
        _check(self.call, self.changes)
        return _rebuild, (*self.call, dict(self.changes))

    def __copy__(self) -> Any:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


@functools.cache
def _picklable_class(base: type[Any]) -> type[Any]:
    return type(base.__name__, (_PicklableTuple, base), {"base": base, "__module__": base.__module__, "__doc__": None})


def _wrapped(made: Any, call: Call) -> Any:
    if isinstance(made, tuple):
        new: Any = _picklable_class(type(cast(Any, made)))(*cast(tuple[Any, ...], made))
        new.call = call
        return new
    return PicklableFunction(made, call)


def _rebuild(
    factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], changes: dict[str, Any]
) -> Any:
    made = factory(*args, **kwargs)
    return made._replace(**changes) if changes else made


def _snapshot(value: Any) -> Any:
    """Copy an argument at the call: a container may change later, and an iterator can be read only once."""
    if isinstance(value, Iterator):
        return tuple(cast(Iterator[Any], value))
    return value.copy() if type(value) in (dict, list, set) else value


def _check(call: Call, changes: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument contains a function or class that another process cannot import."""
    given = inspect.signature(call.factory).bind(*call.args, **call.kwargs).arguments
    for path, found in _local((*given.items(), *changes.items())):
        kind = "class" if isinstance(found, type) else "lambda" if found.__name__ == "<lambda>" else "function"
        name = "a lambda" if kind == "lambda" else f"the local {kind} {found.__qualname__}"
        raise ConfigError(
            f"cannot be pickled: its {path} is {name}, which another process cannot import",
            where=_name(call.factory),
            hint=f"define it with {'class' if kind == 'class' else 'def'} at the top of a module",
        )


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__).lstrip("_")


def _local(named: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """(path, value) pairs of functions and classes that cannot be imported by their names."""
    seen = set() if seen is None else seen
    for path, value in named:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, PicklableFunction | _PicklableTuple):
            continue  # it checks its own arguments
        if isinstance(value, types.FunctionType | type):
            if _is_local(value):
                yield str(path), value
        elif isinstance(value, dict):
            yield from _local(((f"{path}[{key!r}]", item) for key, item in cast(Any, value).items()), seen)
        elif isinstance(value, list | tuple | set):
            yield from _local(((f"{path}[{index}]", item) for index, item in enumerate(cast(Any, value))), seen)
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            yield from _local(((f"{path}.{name}", part) for name, part in parts.items()), seen)
        elif isinstance(value, types.MethodType):
            yield from _local([(path, value.__self__)], seen)
        elif isinstance(value, nn.Module):
            yield from _local_of_module(path, value, seen)
        elif _is_local(type(value)) and not _pickles_itself(type(value)):
            yield str(path), type(value)


def _local_of_module(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if _pickles_itself(type(part)):
            continue
        here = f"{path}.{name}" if name else path
        own = {key: item for key, item in vars(part).items() if key not in ("_parameters", "_buffers", "_modules")}
        yield from _local([(here, type(part)), *((f"{here}.{key}", item) for key, item in own.items())], seen)


def _is_local(value: Any) -> bool:
    return "<locals>" in value.__qualname__ or value.__qualname__.endswith("<lambda>")


def _pickles_itself(kind: type) -> bool:
    """True if a class defines how its instances are pickled."""
    names = ("__getstate__", "__reduce__", "__reduce_ex__")
    return any(name in vars(part) for part in kind.__mro__ if part not in (object, nn.Module) for name in names)
