"""Checks of the arguments of a factory: a keyword that it does not have, and a value that its type excludes."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from ..errors import ConfigError
from .validation import check_choice, check_count, check_range, nearest

P = ParamSpec("P")
R = TypeVar("R")

Check: TypeAlias = Callable[[str, str, Any, str], None]
"""``(function, argument, value, cure)``: raises a ConfigError for a value out of range. The ``cure`` may be empty."""


def at_least(least: int) -> Check:
    """A check that a value is an int of at least ``least``: it raises a ConfigError."""
    return lambda where, name, value, cure: check_count(where, least=least, cure=cure, **{name: value})


def in_range(low: float = -math.inf, high: float = math.inf, ends: str = "()") -> Check:
    """A check that a value is a finite number between two bounds, as `check_range`: it raises a ConfigError."""
    return lambda where, name, value, cure: check_range(where, low, high, ends=ends, cure=cure, **{name: value})


def known_keywords(factory: Callable[P, R]) -> Callable[P, R]:
    """Wrap a factory: a keyword argument that it does not have raises a ConfigError with the nearest one, or with our
    name for one of another library; and so does a value that a `Check` in the argument's type refuses, or that is none
    of its literals.

    Example:
        >>> @known_keywords
        ... def decayed(learning_rate, weight_decay=0.0):
        ...     return learning_rate - weight_decay
        >>> try:
        ...     decayed(lr=0.1)
        ... except ConfigError as error:
        ...     print(error)
        decayed: the function has no argument 'lr' (cure: learning_rate=0.1)

    Args:
        factory: without ``**kwargs``. The type of an argument may be ``Annotated[float, check]``, ``Literal[...]``, or
            one of these or None.
    """
    parameters = inspect.signature(factory).parameters
    known = frozenset(
        name for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    )
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    where = factory.__name__
    checks: list[tuple[str, Check, bool, str]] | None = None  # found at the first call, which an import does not make

    @functools.wraps(factory)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal checks
        for name in kwargs:  # Dynamo follows a step that calls a factory: `optim.inject`
            if name not in known:
                raise _unknown_keyword(where, known, kwargs)
        if checks is None:
            checks = _checks(factory)
        if checks:
            given: dict[str, Any] = {**dict(zip(positional, args, strict=False)), **kwargs}
            for name, check, is_optional, cure in checks:
                if name in given and not (is_optional and given[name] is None):
                    check(where, name, given[name], cure)
        return factory(*args, **kwargs)

    return checked


def _checks(factory: Callable[..., Any]) -> list[tuple[str, Check, bool, str]]:
    """``(argument, check, True if None is valid, cure)`` for each check in the types of a factory."""
    parameters = inspect.signature(factory).parameters
    found: list[tuple[str, Check, bool, str]] = []
    for name, hint in get_type_hints(factory, include_extras=True).items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        cure = "" if default is inspect.Parameter.empty else f"{default!r} is the default"
        parts: list[Any] = [hint, *get_args(hint)]
        for check in (each for part in parts for each in getattr(part, "__metadata__", ())):
            if callable(check):
                found.append((name, cast(Check, check), type(None) in parts, cure))
        if options := _literals(hint):
            found.append((name, _one_of(options), False, ""))
    return found


def _literals(hint: Any) -> list[Any]:
    """The values of a type of literals, bools and None; [] for any other type, and for one without literals."""
    members = (hint,) if get_origin(hint) is Literal else get_args(hint)
    values: list[Any] = []
    for member in members:
        if get_origin(member) is not Literal and member not in (bool, type(None)):
            return []
        values += get_args(member) or ([True, False] if member is bool else [None])
    return values if any(get_origin(member) is Literal for member in members) else []


def _one_of(options: list[Any]) -> Check:
    return lambda where, name, value, cure: check_choice(where, options, **{name: value})


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


def _unknown_keyword(where: str, known: frozenset[str], given: Mapping[str, Any]) -> ConfigError:
    name = next(name for name in given if name not in known)
    hint = f"one of {', '.join(sorted(known))}"
    near = nearest(name, known)
    if known.issuperset(_PAIRS.get(name, "?")):
        values = given[name] if isinstance(given[name], tuple | list) else (given[name],)
        hint = ", ".join(f"{ours}={value!r}" for ours, value in zip(_PAIRS[name], values, strict=False))
    elif _ALIASES.get(name) in known:
        hint = f"{_ALIASES[name]}={_shown(given[name])}"
    elif name in _ELSEWHERE:
        hint = _ELSEWHERE[name]
    elif near:
        hint = f"{near}={_shown(given[name])}"
    return ConfigError(f"the function has no argument {name!r}", where=where, hint=hint)


def _shown(value: Any) -> str:
    """Return a short value as code, any other as an ellipsis."""
    return repr(value) if isinstance(value, int | float | str | bool | tuple) and len(repr(value)) < 40 else "..."
