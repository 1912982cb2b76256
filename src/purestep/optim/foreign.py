"""A foreign optimizer's step on copies: as it is, and as a graph of tensor operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import ConfigError
from ..types import Empty, Params, Tree

Slots: TypeAlias = dict[str, dict[str, Any]]
"""Name -> key -> tensor, or Empty for None, or a dict, list or tuple of these."""

_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}
_SCALAR = "scalar"  # a 0-d float64 tensor, kept in shape (1,), since a 0-d float64 leaf does not survive donation


class Maker(NamedTuple):
    """An optimizer class and what to call it with."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    where: str  # for messages
    lr_dtype: torch.dtype | None = None  # of a learning rate that is given as a tensor: torch computes in it

    def rate(self) -> float | None:
        """The learning rate, given or by default; None for an optimizer without one."""
        default = inspect.signature(self.optimizer).parameters.get("lr")
        found = self.options.get("lr", None if default is None else default.default)
        return float(found) if isinstance(found, int | float | Tensor) else None


class Outcome(NamedTuple):
    """What a step leaves behind."""

    params: Params
    slots: Slots
    group: dict[str, Any]


def run(
    maker: Maker,
    params: Params,
    grads: Params,
    slots: Slots,
    group: Mapping[str, Any],
    *,
    rate: Any = None,
    is_first: bool = False,
    is_traced: bool = False,
) -> Outcome:
    """One step on copies.

    Args:
        maker: the optimizer.
        params: name -> P.
        grads: name -> P.
        slots: what it keeps for each parameter; ignored by a first step, whose keys they still name.
        group: what it keeps in its parameter group.
        rate: the learning rate, where it is not the maker's.
        is_first: let the optimizer make its own state.
        is_traced: no number may be read back.
    """
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    optimizer = make(maker, list(leaves.values()), is_traced=is_traced)
    if rate is not None:
        if isinstance(rate, Tensor):
            # What promotes one parameter is what promotes the group.
            upcast = all(_may_upcast(leaf) for leaf in leaves.values())
            rate = rate.to(maker.lr_dtype or (torch.float64 if upcast else torch.float32))
        optimizer.param_groups[0]["lr"] = rate
    if not is_first:
        optimizer.param_groups[0].update(_thawed(group, upcast=False))
    for name, leaf in leaves.items():
        leaf.grad = grads[name].detach().to(leaf.dtype, copy=True)
        if not is_first:
            optimizer.state[leaf] = _thawed(slots[name], upcast=_may_upcast(leaf) and (is_traced or leaf.is_cuda))
    optimizer.step()
    mine = optimizer.param_groups[0]
    new = {name: frozen(optimizer.state[leaf], leaf, maker.where, slots[name]) for name, leaf in leaves.items()}
    kept = frozen({name: mine[name] for name, _ in map(split, group)}, next(iter(leaves.values())), maker.where)
    return Outcome({name: leaf.detach() for name, leaf in leaves.items()}, _like(new, slots), _like(kept, group))


def make(maker: Maker, leaves: list[Tensor], *, is_traced: bool = False) -> torch.optim.Optimizer:
    """The optimizer of these leaves, with its counts on their device where it can."""
    known = inspect.signature(maker.optimizer).parameters
    options = dict(maker.options)
    if is_traced:
        # Foreach makes a graph of few nodes.
        forced = {"capturable": True, "foreach": True, "fused": False}
        options |= {key: value for key, value in forced.items() if key in known}
    elif leaves[0].is_cuda and "capturable" in known:
        options = {"capturable": True, **options}
    build: Any = maker.optimizer  # each class has arguments of its own
    return build(leaves, **options)


def _may_upcast(param: Tensor) -> bool:
    """Whether a 0-d float64 tensor leaves this one's dtype as it is, on a device that has float64."""
    return param.device.type != "mps" and (param.ndim > 0 or param.dtype == torch.float64)


def split(key: str) -> tuple[str, str]:
    """``("step", "int")`` of ``"step:int"``; a key of another form is a name without type."""
    name, _, kind = key.rpartition(":")
    return (name, kind) if name and (kind in _NUMBERS or kind == _SCALAR) else (key, "")


def _thawed(kept: Any, *, upcast: bool) -> Any:
    """As the optimizer knows it, in memory of its own."""
    if isinstance(kept, Empty):
        return None
    if isinstance(kept, dict):
        return dict(_thawed_item(key, value, upcast) for key, value in kept.items())
    if isinstance(kept, list | tuple):
        return type(kept)(_thawed(value, upcast=upcast) for value in kept)
    if upcast and kept.ndim == 0 and kept.dtype == torch.float32:
        # Powers of a decay in float32 lose six digits near 1; Python, which torch uses elsewhere, has float64.
        return kept.double()
    return kept.detach().clone()


def _thawed_item(key: str, value: Any, upcast: bool) -> tuple[str, Any]:
    name, kind = split(key)
    if kind == _SCALAR:
        return name, value.detach().clone().view(())
    return name, _NUMBERS[kind](value.item()) if kind else _thawed(value, upcast=upcast)


def frozen(kept: Any, param: Tensor, where: str, before: Any = None) -> Any:
    """As a state keeps it: tensors alone, on the parameter's device, under the keys that they had before.

    Raises:
        ConfigError: for what is no tensor, number or None, or a container of tensors.
    """
    if kept is None:
        return Empty()
    if isinstance(kept, Tensor):
        return kept.detach().to(param.device)
    if isinstance(kept, dict):
        old = before if isinstance(before, dict) else {}
        return dict(_frozen_item(key, value, param, where, old) for key, value in kept.items())
    if type(kept) in (list, tuple):
        return type(kept)(frozen(value, param, where) for value in kept)
    hint = "an optimizer that keeps tensors, and numbers by name"
    raise ConfigError(f"it keeps a {type(kept).__name__}: {kept!r:.60}", where=where, hint=hint)


def _frozen_item(key: Any, value: Any, param: Tensor, where: str, before: dict[str, Any]) -> tuple[str, Any]:
    is_scalar = isinstance(value, Tensor) and value.ndim == 0 and value.dtype == torch.float64 and param.ndim > 0
    if is_scalar and key not in before:  # under its own name it is a float32 scalar that `_thawed` made wide
        return f"{key}:{_SCALAR}", value.detach().to(param.device).view(1)
    if isinstance(value, float):
        return f"{key}:float", torch.tensor([value], dtype=torch.float64, device=param.device)
    if isinstance(value, int):
        return f"{key}:{type(value).__name__}", torch.tensor(int(value), device=param.device)
    return str(key), frozen(value, param, where, before.get(key))


def _like(found: Tree, before: Tree) -> Tree:
    """In the dtypes of before, where it has the same structure: no leaf may change."""
    if tree.flatten(found)[1] != tree.flatten(before)[1]:
        return found
    return tree.map(lambda new, old: new.to(old.dtype), found, before)


def trace(
    maker: Maker, arguments: tuple[Any, ...], *, is_scheduled: bool, is_first: bool
) -> Callable[..., Outcome] | str:
    """One step as a graph of tensor operations, or the reason why there is none.

    Args:
        maker: the optimizer.
        arguments: params, grads, slots and group; only shapes and dtypes count.
        is_scheduled: the graph takes the learning rate as a fifth argument.
        is_first: see `run`.
    """
    numbers = sorted({split(key)[0] for key in _keys(arguments[2:]) if split(key)[1] in _NUMBERS})
    if numbers:
        return f"it keeps Python numbers, {', '.join(numbers)}, which a graph would take for constants"

    def step(params: Params, grads: Params, slots: Slots, group: dict[str, Any], *rates: Tensor) -> Outcome:
        rate = rates[0] if rates else None
        return run(maker, params, grads, slots, group, rate=rate, is_first=is_first, is_traced=True)

    def scheduled(params: Params, grads: Params, slots: Slots, group: dict[str, Any], rate: Tensor) -> Outcome:
        return step(params, grads, slots, group, rate)

    def constant(params: Params, grads: Params, slots: Slots, group: dict[str, Any]) -> Outcome:
        return step(params, grads, slots, group)

    from torch.fx.experimental.proxy_tensor import make_fx  # slow to load, and few optimizers come this way

    example = next(iter(arguments[0].values()))
    rates = (torch.zeros((), dtype=maker.lr_dtype, device=example.device),) if is_scheduled else ()
    try:
        with rng.scoped(0), _as_if_compiling():
            graph = make_fx(scheduled if is_scheduled else constant, tracing_mode="fake")(*arguments, *rates)
    except Exception as error:  # whatever a foreign optimizer, or the tracer on meeting it, raises
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for node in reversed(list(graph.graph.nodes)):
        # The record of the step for the profiler: nothing depends on it, and Dynamo cannot capture it.
        if "profiler" in str(node.target):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _keys(kept: Any) -> list[str]:
    if isinstance(kept, dict):
        return [key for name, value in kept.items() for key in (name, *_keys(value))]
    return [key for value in kept for key in _keys(value)] if isinstance(kept, list | tuple) else []


@contextmanager
def _as_if_compiling() -> Generator[None]:
    """Optimizers take the path that reads no number back, on every device, where this function says True: to this
    thread."""
    real, token = torch.compiler.is_compiling, _COMPILING.set(True)
    torch.compiler.is_compiling = lambda: _COMPILING.get() or real()
    try:
        yield
    finally:
        torch.compiler.is_compiling = real
        _COMPILING.reset(token)


_COMPILING: ContextVar[bool] = ContextVar("compiling", default=False)
