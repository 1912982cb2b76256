"""Hyperparameters as state leaves: a schedule or the user sets them between steps, without recompilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..state import known_keywords
from ..types import Empty, Labels, Params, TrainState, Tree
from .arguments import Schedule
from .base import Norms, Transform, described, updated
from .counts import zero_count
from .numerics import rate_at
from .wrappers import PartitionState


class InjectState(NamedTuple):
    """State of `inject`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    hyperparams: dict[str, Tensor]  # name -> shape=(), float32: for the next update; scheduled ones of the last
    scheduled: dict[str, Empty]  # names that follow a schedule; no leaves
    inner: Tree


@known_keywords
def inject(
    factory: Callable[..., Transform], *, static: tuple[str, ...] = ("mask", "labels")
) -> Callable[..., Transform]:
    """Wrap a factory so that its floats and schedules become float32 leaves of the state.

    Example:
        >>> from purestep.optim import scale_by_learning_rate
        >>> tx = inject(scale_by_learning_rate)(learning_rate=0.5)
        >>> params = {"w": torch.ones(1)}
        >>> state = set_hyperparams(tx.init(params), learning_rate=0.25)
        >>> tx.update(params, state, params)[0]["w"].item()
        -0.25

    Use it for a number that is changed or differentiated without a new program: a learning rate that a callback lowers,
    one that differs between the members of an `ensemble`, one that a gradient tunes. Other numbers are constants of the
    program, and a compiled step compiles again for another constant.

    Only arguments of the call become leaves; defaults stay constants. A leaf is rounded to float32, a relative error of
    up to 6e-8: for ``b2=0.999``, ``1 - b2`` has a relative error of 1.3e-5, which is visible in float64.

    Args:
        factory: a function that returns a transform, such as ``optim.adamw``; its arguments have names.
        static: names of arguments that are never leaves. Bools, ints, strings and None never are.

    Returns:
        A function of the factory's arguments, each by name; each float, 0-d tensor or schedule among them becomes a
        leaf, under this name.

    Raises:
        ConfigError: an argument is passed by position; at init, the factory builds a `from_torch`.
    """

    def build(*unnamed: Any, **arguments: Any) -> Transform:
        if unnamed:
            what, hint = f"{unnamed[0]!r} is passed by position", "pass each argument by name: learning_rate=1e-3"
            raise ConfigError(what, where=f"inject({getattr(factory, '__name__', factory)})", hint=hint)
        fixed = {name: value for name, value in arguments.items() if name in static or not _is_injected(value)}
        injected = {name: value for name, value in arguments.items() if name not in fixed}
        return _injected(factory, fixed, injected)

    return build


def _is_injected(value: Any) -> bool:
    return isinstance(value, float | Tensor) or callable(value)


def _injected(factory: Callable[..., Transform], fixed: dict[str, Any], injected: dict[str, Any]) -> Transform:
    schedules: dict[str, Schedule] = {}
    constants: dict[str, float | Tensor] = {}
    for name, value in injected.items():
        (schedules if callable(value) else constants)[name] = value
    start = torch.zeros((), dtype=torch.int64)
    # Built once with plain numbers, so that a number out of range raises here and not at the first step.
    template = factory(**fixed, **constants, **{name: rate_at(schedule, start) for name, schedule in schedules.items()})

    def leaves(count: Tensor, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        values = {name: rate_at(schedules[name], count) if name in schedules else stored[name] for name in injected}
        return {name: _leaf(value, count) for name, value in values.items()}

    def init(params: Params) -> InjectState:
        count = zero_count(params)
        values = leaves(count, constants)
        inner = factory(**fixed, **values).init(params)
        _check_cheap_to_rebuild(inner)
        return InjectState(count, values, {name: Empty() for name in schedules}, inner)

    def build(state: InjectState) -> tuple[Transform, InjectState]:
        """The transform of this update, and the state after it with the inner state of before."""
        values = leaves(state.step, state.hyperparams)
        return factory(**fixed, **values), state._replace(step=state.step + 1, hyperparams=values)

    def update(
        updates: Params, state: InjectState, params: Params, norms: Norms | None = None
    ) -> tuple[Params, InjectState]:
        tx, new = build(state)
        updates, inner = updated(tx, updates, state.inner, params, norms)
        return updates, new._replace(inner=inner)

    def labels(params: Params) -> Labels:
        return template.labels(params)

    whole = Transform(init, update, template.elementwise, labels)
    return described(whole, "inject", takes_norms=True, build=build)


def _check_cheap_to_rebuild(inner: Tree) -> None:
    """Raise for a `from_torch` inside: every update calls the factory again, with the current leaves."""
    for part in tree.flatten(inner, is_leaf=lambda node: hasattr(node, "cure_for_inject"))[0]:
        cure = getattr(part, "cure_for_inject", None)
        if cure is not None:
            raise ConfigError("the factory builds a from_torch, again in every update", where="inject", hint=cure)


def _leaf(value: Any, count: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device=count.device, dtype=torch.float32, copy=True)
    return torch.tensor(float(value), dtype=torch.float32, device=count.device)


def _fitted(name: str, value: Any, old: Tensor) -> Tensor:
    """A new leaf of the shape of the old one."""
    try:
        new = _leaf(value, old)
    except (TypeError, ValueError):
        new = None
    if new is None or new.shape not in ((), old.shape):
        found = f"a {type(value).__name__}" if new is None else f"of shape {list(new.shape)}"
        many = f", or a tensor of shape {list(old.shape)}" if old.dim() else ""
        raise ConfigError(
            f"{name} is {found}, not a number{many}", where="set_hyperparams", hint=f"pass a number{many}"
        )
    return new if new.shape == old.shape else new.expand(old.shape).clone()


def hyperparams(opt_state: Tree) -> dict[str, Tensor]:
    """Return the hyperparameters in a state: the learning rate of the last update, and the leaves of `inject`.

    Example:
        >>> from purestep.optim import scale_by_learning_rate
        >>> {name: value.item() for name, value in hyperparams(scale_by_learning_rate(0.5).init({})).items()}
        {'learning_rate': 0.5}

    Args:
        opt_state: the state of any transform.

    Returns:
        name -> shape=(), float32. Inside a `partition` the name is ``label/learning_rate``.
    """
    return dict(_hyperparams(opt_state, ""))


def _hyperparams(node: Tree, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(rate := getattr(node, "learning_rate", None), Tensor):
        yield f"{prefix}learning_rate", rate
        return
    for part, within in _children(node, prefix):
        yield from _hyperparams(part, within)
    if isinstance(node, InjectState):
        # Last, so that these replace a learning rate from inside: the next update uses them.
        yield from ((f"{prefix}{name}", value) for name, value in node.hyperparams.items())


def injected(opt_state: Tree) -> dict[str, Tensor]:
    """Return the leaves of `inject` that follow no schedule, by the names of `hyperparams`.

    Example:
        >>> from purestep.optim import scale
        >>> {name: value.item() for name, value in injected(inject(scale)(factor=2.0).init({})).items()}
        {'factor': 2.0}
    """
    return {name: value for name, value, is_scheduled in _leaves(opt_state, "") if not is_scheduled}


def set_hyperparams(opt_state: Tree, **values: float | Tensor) -> Tree:
    """Return the state with other values for leaves of `inject`; a compiled step uses them without recompiling.

    Example:
        >>> from purestep.optim import scale
        >>> state = inject(scale)(factor=2.0).init({})
        >>> set_hyperparams(state, factor=3.0).hyperparams["factor"].item()
        3.0

    Args:
        opt_state: the state of a transform that contains an `inject`; it is not modified.
        values: name -> number, by the names of `hyperparams`. Inside a `partition`, ``learning_rate=0.1`` sets every
            group; ``**{"head/learning_rate": 0.1}`` sets one, and takes precedence. In the state of an ensemble a
            number is that of all members, and a tensor of shape (members,) has one for each.

    Raises:
        ConfigError: the state is a TrainState; a name is not a leaf, or follows a schedule; a value is no number and
            no tensor of the shape of the leaf.
    """
    if isinstance(opt_state, TrainState):
        given = ", ".join(f"{name}=..." for name in values)
        hint = f"pass state.opt_state: state._replace(opt_state=optim.set_hyperparams(state.opt_state, {given}))"
        raise ConfigError("opt_state is a TrainState", where="set_hyperparams", hint=hint)
    leaves: dict[str, bool] = {}
    for name, _, scheduled in _leaves(opt_state, ""):  # Two parts of a chain may have leaves of the same name.
        leaves[name] = scheduled or leaves.get(name, False)
    for name in values:
        if name not in leaves and not any(leaf.rpartition("/")[2] == name for leaf in leaves):
            hint = f"one of {', '.join(leaves)}, or " if leaves else ""
            hint += f"optim.inject(optim.adamw)({name.rpartition('/')[2]}=...)"
            raise ConfigError(f"{name} is not a leaf of this state", where="set_hyperparams", hint=hint)
    named = {leaf: key for leaf in leaves for key in (leaf.rpartition("/")[2], leaf) if key in values}
    for leaf, key in named.items():
        if leaves[leaf]:
            hint = f"pass a number instead of a schedule for {leaf.rpartition('/')[2]} to inject"
            raise ConfigError(f"{key} follows a schedule", where="set_hyperparams", hint=hint)
    return _replaced(opt_state, {leaf: values[key] for leaf, key in named.items()}, "")


def _leaves(node: Tree, prefix: str) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield ``(name, value, follows a schedule)`` for each leaf of `inject`, those inside of another one first."""
    for part, within in _children(node, prefix):
        yield from _leaves(part, within)
    if isinstance(node, InjectState):
        yield from ((f"{prefix}{name}", value, name in node.scheduled) for name, value in node.hyperparams.items())


def _children(node: Tree, prefix: str) -> Iterator[tuple[Tree, str]]:
    """The parts of a state in which hyperparameters may be, each with the prefix of their names."""
    if isinstance(node, PartitionState):
        yield from ((group, f"{prefix}{label}/") for label, group in node.groups.items())
    elif isinstance(node, tuple):  # of a chain, or any NamedTuple
        yield from ((part, prefix) for part in node)  # pyright: ignore[reportUnknownVariableType]


def _replaced(node: Tree, values: Mapping[str, float | Tensor], prefix: str) -> Tree:
    children = [_replaced(part, values, within) for part, within in _children(node, prefix)]
    if isinstance(node, PartitionState):
        return PartitionState(dict(zip(node.groups, children, strict=True)))
    if not isinstance(node, tuple):
        return node
    new: Any = type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    if isinstance(new, InjectState):
        old = new.hyperparams.items()
        found = {name: _fitted(name, values.get(f"{prefix}{name}", value), value) for name, value in old}
        return new._replace(hyperparams=found)
    return new
