"""Hyperparameters as state: leaves that a schedule fills or a user replaces between two steps, without recompiling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..pickling import recipe
from ..types import Empty, Labels, Params, Tree
from .base import Transform
from .numerics import Schedule, rate_at, zero_count
from .wrappers import MaskedState, PartitionState


class InjectState(NamedTuple):
    """State of `inject`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    hyperparams: dict[str, Tensor]  # name -> shape=(), float32: of the next update, scheduled ones of the last
    scheduled: dict[str, Empty]  # names that a schedule fills; no leaves
    inner: Tree


@recipe
def inject(
    factory: Callable[..., Transform], *, static: tuple[str, ...] = ("mask", "labels")
) -> Callable[..., Transform]:
    """The same factory with the floats and schedules that it is given as float32 leaves of the state.

    Only what the call names becomes a leaf: defaults stay constants. A leaf is rounded to float32, by up to 6e-8 of
    itself: ``b2=0.999`` leaves ``1 - b2`` off by 1.3e-5, which a float64 run shows.

    Args:
        factory: a function that returns a transform, such as ``optim.adamw``; its arguments have names.
        static: arguments that are passed on as they are, besides bools, ints, strings, None and the like.

    Returns:
        A function of the factory's arguments; every one given as float, 0-d tensor or schedule is a leaf.

    Raises:
        ConfigError: positional arguments that have no name in the factory's signature; at init, where one of torch's
            own optimizers is among what the factory makes.

    Example:
        >>> from purestep.optim import scale_by_learning_rate
        >>> tx = inject(scale_by_learning_rate)(learning_rate=0.5)
        >>> params = {"w": torch.ones(1)}
        >>> state = set_hyperparams(tx.init(params), learning_rate=0.25)
        >>> tx.update(params, state, params)[0]["w"].item()
        -0.25
    """

    def build(*positional: Any, **named: Any) -> Transform:
        arguments = _by_name(factory, positional, named) if positional else named
        fixed = {name: value for name, value in arguments.items() if name in static or not _is_injected(value)}
        given = {name: value for name, value in arguments.items() if name not in fixed}
        return _injected(factory, fixed, given)

    return build


def _by_name(factory: Callable[..., Transform], positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by the names that they have in the factory's signature."""
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        signature = inspect.signature(factory)
        found = signature.bind_partial(*positional).arguments
    except (TypeError, ValueError) as error:
        hint = "pass arguments by name: inject(optim.adamw)(learning_rate=0.1)"
        raise ConfigError(
            f"cannot name its {len(positional)} positional arguments: {error}", where=name, hint=hint
        ) from error
    unnamed = [key for key in found if signature.parameters[key].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for key in (*unnamed, *(key for key in found if key in named)):
        how = "by position and by name" if key in named else "by position, and has no name"
        raise ConfigError(f"{key} is given {how}", where=name, hint="pass each argument by name, once")
    return {**found, **named}


def _is_injected(value: Any) -> bool:
    return isinstance(value, float | Tensor) or callable(value)


@recipe
def _injected(factory: Callable[..., Transform], fixed: dict[str, Any], given: dict[str, Any]) -> Transform:
    schedules: dict[str, Schedule] = {}
    constants: dict[str, float | Tensor] = {}
    for name, value in given.items():
        (schedules if callable(value) else constants)[name] = value
    start = torch.zeros((), dtype=torch.int64)
    # Built once with numbers, so that those out of range are refused before the first step.
    template = factory(**fixed, **constants, **{name: rate_at(schedule, start) for name, schedule in schedules.items()})

    def leaves(count: Tensor, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        values = {name: rate_at(schedules[name], count) if name in schedules else stored[name] for name in given}
        return {name: _leaf(value, count) for name, value in values.items()}

    def init(params: Params) -> InjectState:
        count = zero_count(params)
        values = leaves(count, constants)
        _check_may_be_made_anew(inner := factory(**fixed, **values).init(params))
        return InjectState(count, values, {name: Empty() for name in schedules}, inner)

    def update(updates: Params, state: InjectState, params: Params) -> tuple[Params, InjectState]:
        values = leaves(state.step, state.hyperparams)
        updates, inner = factory(**fixed, **values).update(updates, state.inner, params)
        return updates, InjectState(state.step + 1, values, state.scheduled, inner)

    def labels(params: Params) -> Labels:
        return template.labels(params)

    return Transform(init, update, template.elementwise, labels)


def _check_may_be_made_anew(inner: Tree) -> None:
    """Every update calls the factory with the leaves as they are then, so what it makes must be cheap to make."""
    for part in tree.flatten(inner, is_leaf=lambda node: hasattr(node, "cure_for_inject"))[0]:
        cure = getattr(part, "cure_for_inject", None)
        if cure is not None:
            raise ConfigError("the factory makes an optimizer of torch's, in every update", where="inject", hint=cure)


def _leaf(value: Any, count: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device=count.device, dtype=torch.float32, copy=True)
    return torch.tensor(float(value), dtype=torch.float32, device=count.device)


def hyperparams(opt_state: Tree) -> dict[str, Tensor]:
    """The hyperparameters in a state: the learning rate of the last update, and what `inject` made leaves of.

    Args:
        opt_state: of any transform.

    Returns:
        name -> shape=(), float32. Below a `partition` the name is ``label/learning_rate``.

    Example:
        >>> from purestep.optim import scale_by_learning_rate
        >>> {name: value.item() for name, value in hyperparams(scale_by_learning_rate(0.5).init({})).items()}
        {'learning_rate': 0.5}
    """
    return dict(_found(opt_state, ""))


def _found(node: Tree, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, PartitionState):
        for label, group in node.groups.items():
            yield from _found(group.inner, f"{prefix}{label}/")
    elif isinstance(node, InjectState):
        # The leaves come last: they are what the next update uses.
        yield from _found(node.inner, prefix)
        yield from ((f"{prefix}{name}", value) for name, value in node.hyperparams.items())
    elif isinstance(rate := getattr(node, "learning_rate", None), Tensor):
        yield f"{prefix}learning_rate", rate
    elif isinstance(node, tuple):
        for part in node:  # pyright: ignore[reportUnknownVariableType]  # a chain's state, or any NamedTuple
            yield from _found(part, prefix)


def injected(opt_state: Tree) -> dict[str, Tensor]:
    """The leaves that `inject` made and no schedule fills, by the names of `hyperparams`.

    Example:
        >>> from purestep.optim import scale
        >>> {name: value.item() for name, value in injected(inject(scale)(factor=2.0).init({})).items()}
        {'factor': 2.0}
    """
    scheduled = dict(_leaves(opt_state, ""))
    return {name: value for name, value in _found(opt_state, "") if scheduled.get(name) is False}


def set_hyperparams(opt_state: Tree, **values: float | Tensor) -> Tree:
    """The state with other values for leaves that `inject` made; a compiled step uses them without recompiling.

    Args:
        opt_state: the state of a transform with an `inject` in it; it stays as it is.
        values: name -> number, by the names of `hyperparams`. Below a `partition`, ``learning_rate=0.1`` is for every
            group, ``**{"head/learning_rate": 0.1}`` for one, and comes before the other.

    Raises:
        ConfigError: for a name that is no leaf, or one that a schedule fills.

    Example:
        >>> from purestep.optim import scale
        >>> state = inject(scale)(factor=2.0).init({})
        >>> set_hyperparams(state, factor=3.0).hyperparams["factor"].item()
        3.0
    """
    leaves: dict[str, bool] = {}
    for name, scheduled in _leaves(opt_state, ""):  # two parts of a chain may have one of the same name
        leaves[name] = scheduled or leaves.get(name, False)
    for name in values:
        if name not in leaves and not any(leaf.rpartition("/")[2] == name for leaf in leaves):
            hint = f"one of {', '.join(leaves)}, or " if leaves else ""
            hint += f"optim.inject(optim.adamw)({name.rpartition('/')[2]}=...)"
            raise ConfigError(f"{name} is no leaf of this state", where="set_hyperparams", hint=hint)
    named = {leaf: key for leaf in leaves for key in (leaf.rpartition("/")[2], leaf) if key in values}
    for leaf, key in named.items():
        if leaves[leaf]:
            hint = f"a number instead of a schedule for {leaf.rpartition('/')[2]} in inject"
            raise ConfigError(f"{key} follows a schedule", where="set_hyperparams", hint=hint)
    return _replaced(opt_state, {leaf: values[key] for leaf, key in named.items()}, "")


def _leaves(node: Tree, prefix: str) -> Iterator[tuple[str, bool]]:
    """Of every leaf that `inject` made, its name and whether a schedule fills it."""
    if isinstance(node, InjectState):
        yield from ((f"{prefix}{name}", name in node.scheduled) for name in node.hyperparams)
    for part, within in _inside(node, prefix):
        yield from _leaves(part, within)


def _inside(node: Tree, prefix: str) -> Iterator[tuple[Tree, str]]:
    if isinstance(node, PartitionState):
        yield from ((group, f"{prefix}{label}/") for label, group in node.groups.items())
    elif isinstance(node, InjectState | MaskedState):
        yield node.inner, prefix
    elif type(node) is tuple:
        yield from ((part, prefix) for part in node)


def _replaced(node: Tree, values: Mapping[str, float | Tensor], prefix: str) -> Tree:
    inside = [_replaced(part, values, within) for part, within in _inside(node, prefix)]
    if isinstance(node, PartitionState):
        return PartitionState(dict(zip(node.groups, inside, strict=True)))
    if isinstance(node, InjectState):
        old = node.hyperparams.items()
        new = {name: _leaf(values.get(f"{prefix}{name}", value), node.step) for name, value in old}
        return node._replace(hyperparams=new, inner=inside[0])
    if isinstance(node, MaskedState):
        return node._replace(inner=inside[0])
    return tuple(inside) if type(node) is tuple else node
