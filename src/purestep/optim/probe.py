"""How `from_torch` runs an optimizer on copies, finds out what its state starts as, and traces one step of it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import rng
from ..errors import ConfigError
from ..types import Empty, Params

Slots: TypeAlias = dict[str, dict[str, Any]]
"""Name -> key -> tensor, or Empty for None."""

_NUMBERS: dict[str, type] = {"int": int, "float": float, "bool": bool}


class Maker(NamedTuple):
    """An optimizer class and what to call it with."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    where: str  # for messages

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


class Findings(NamedTuple):
    """What `probe` sees."""

    group_keys: tuple[str, ...]  # what changes in the parameter group
    first_differs: bool


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
    on_device = is_traced or any(param.is_cuda for param in params.values())
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    optimizer = _make(maker, list(leaves.values()), on_device=on_device)
    if rate is not None:
        # What promotes one parameter is what promotes the group.
        upcast = all(_may_upcast(leaf) for leaf in leaves.values())
        is_leaf = isinstance(rate, Tensor)
        optimizer.param_groups[0]["lr"] = rate.to(torch.float64 if upcast else torch.float32) if is_leaf else rate
    optimizer.param_groups[0].update(_thawed(group, upcast=False))
    for name, leaf in leaves.items():
        leaf.grad = grads[name].detach().to(leaf.dtype, copy=True)
        if not is_first:
            optimizer.state[leaf] = _thawed(slots[name], upcast=on_device and _may_upcast(leaf))
    optimizer.step()
    mine = optimizer.param_groups[0]
    kept = {key: mine[key] for key in (key.partition(":")[0] for key in group)}
    return Outcome(
        {name: leaf.detach() for name, leaf in leaves.items()},
        {
            name: _as_before(_frozen(optimizer.state[leaf], leaf, maker.where), slots[name])
            for name, leaf in leaves.items()
        },
        _as_before(_frozen(kept, next(iter(leaves.values())), maker.where), group),
    )


def _make(maker: Maker, leaves: list[Tensor], *, on_device: bool) -> torch.optim.Optimizer:
    options = dict(maker.options)
    if on_device:
        known = inspect.signature(maker.optimizer).parameters
        # Capturable: the step count stays on the device. Foreach: a graph of few nodes.
        options |= {key: value for key, value in (("capturable", True), ("foreach", True)) if key in known}
        options |= {"fused": False} if "fused" in known else {}
    return maker.optimizer(leaves, **options)


def _may_upcast(param: Tensor) -> bool:
    """Whether a 0-d float64 tensor leaves this one's dtype as it is, on a device that has float64."""
    return param.device.type != "mps" and (param.ndim > 0 or param.dtype == torch.float64)


def _thawed(kept: Mapping[str, Any], *, upcast: bool) -> dict[str, Any]:
    thawed: dict[str, Any] = {}
    for key, value in kept.items():
        name, _, kind = key.partition(":")
        if kind:
            thawed[name] = _NUMBERS[kind](value.item())
        elif isinstance(value, Empty):
            thawed[name] = None
        elif upcast and value.ndim == 0 and value.dtype == torch.float32:
            # Powers of a decay in float32 lose six digits near 1; Python, which torch uses elsewhere, has float64.
            thawed[name] = value.double()
        else:
            thawed[name] = value.detach().clone()
    return thawed


def _frozen(kept: Mapping[str, Any], param: Tensor, where: str) -> dict[str, Any]:
    frozen: dict[str, Any] = {}
    for key, value in kept.items():
        if isinstance(value, Tensor):
            is_count = value.ndim == 0 and value.dtype == torch.float64 and param.ndim > 0
            frozen[key] = value.detach().to(param.device, torch.float32 if is_count else value.dtype)
        elif value is None:
            frozen[key] = Empty()
        elif isinstance(value, float):
            # Of shape (1,): a 0-d float64 leaf would not survive donation.
            frozen[f"{key}:float"] = torch.tensor([value], dtype=torch.float64, device=param.device)
        elif isinstance(value, int):
            frozen[f"{key}:{type(value).__name__}"] = torch.tensor(int(value), device=param.device)
        else:
            hint = "an optimizer that keeps tensors and numbers"
            raise ConfigError(f"it keeps a {type(value).__name__} under {key!r}", where=where, hint=hint)
    return frozen


def _as_before(found: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """In the order and dtypes of before, so that no leaf ever changes."""
    ordered = {**{key: found[key] for key in before if key in found}, **found}
    return {
        key: value.to(before[key].dtype) if isinstance(before.get(key), Tensor) else value
        for key, value in ordered.items()
    }


class _Recorder(dict[str, Any]):
    """A state dict that remembers the first value of every key, before the step changes it in place."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(given or {})

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.detach().clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def initial(maker: Maker, params: Params, group_keys: tuple[str, ...]) -> tuple[Slots, dict[str, Any]]:
    """What the optimizer keeps before its first step: the first value of every key in a step without gradient.

    Args:
        maker: the optimizer.
        params: name -> P.
        group_keys: what to keep of the parameter group.
    """
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    device = next(iter(params.values())).device
    optimizer = _make(maker, list(leaves.values()), on_device=device.type == "cuda")
    recorders = {name: _Recorder(optimizer.state[leaf]) for name, leaf in leaves.items()}
    optimizer.state = defaultdict(_Recorder, {leaf: recorders[name] for name, leaf in leaves.items()})
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf)
    before = {key: optimizer.param_groups[0][key] for key in group_keys}
    group = _frozen(before, next(iter(leaves.values())), maker.where)
    with rng.scoped(0, device):
        optimizer.step()
    return {name: _frozen(kept.first, leaves[name], maker.where) for name, kept in recorders.items()}, group


def probe(maker: Maker, params: Params) -> Findings:
    """Three steps on a small tensor of each kind: what changes where.

    Raises:
        ConfigError: for an optimizer that fails, gains keys after its first step, or keeps numbers on itself.
    """
    generator = rng.generator(rng.key(0), "from_torch")
    kinds = {(param.ndim, param.dtype): name for name, param in params.items()}
    small: Params = {}
    for name in kinds.values():
        shape = [min(length, 3) for length in params[name].shape]
        small[name] = torch.randn(shape, generator=generator).to(params[name].dtype)
    try:
        with rng.scoped(0):
            return _findings(maker, small)
    except ConfigError:
        raise
    except Exception as error:  # whatever a foreign optimizer raises
        hint = "an optimizer whose step() runs on gradients alone"
        raise ConfigError(f"a step failed: {error}", where=maker.where, hint=hint) from error


def _findings(maker: Maker, small: Params) -> Findings:
    leaves = {name: param.clone().requires_grad_() for name, param in small.items()}
    optimizer = _make(maker, list(leaves.values()), on_device=False)
    before, own = dict(optimizer.param_groups[0]), _numbers(optimizer)
    keys: list[dict[str, set[str]]] = []
    for _ in range(3):
        for name, leaf in leaves.items():
            leaf.grad = small[name].clone()
        optimizer.step()
        keys.append({name: set(optimizer.state[leaf]) for name, leaf in leaves.items()})
    if keys[0] != keys[-1]:
        new = sorted({key for name in small for key in keys[0][name] ^ keys[-1][name]})
        hint = "an optimizer whose state has the same keys from its first step on"
        raise ConfigError(f"its state gained or lost {new} after the first step", where=maker.where, hint=hint)
    changed = [key for key, value in own.items() if not _is_same(value, _numbers(optimizer).get(key))]
    if changed:
        hint = "an optimizer that keeps its state in `state` or `param_groups`"
        raise ConfigError(f"it keeps {', '.join(changed)} on itself", where=maker.where, hint=hint)
    after = optimizer.param_groups[0]
    group_keys = tuple(key for key in before if key != "params" and not _is_same(before[key], after[key]))
    return Findings(group_keys, _first_differs(maker, small, group_keys))


def _first_differs(maker: Maker, small: Params, group_keys: tuple[str, ...]) -> bool:
    slots, group = initial(maker, small, group_keys)
    outcomes: list[Outcome] = []
    for is_first in (True, False):
        with rng.scoped(0):
            outcomes.append(run(maker, small, small, slots, group, is_first=is_first))
    fresh, started = outcomes
    return not all(
        _is_same(fresh.params[name], started.params[name])
        and all(_is_same(value, started.slots[name].get(key)) for key, value in fresh.slots[name].items())
        for name in small
    )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in own.items()
        if isinstance(value, int | float | Tensor)
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return type(one) is type(other) and bool(one == other)


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

    slots, group = arguments[2:]
    numbers = sorted({key for kept in (*slots.values(), group) for key in kept if ":" in key})
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
    rates = (torch.zeros((), device=example.device),) if is_scheduled else ()
    try:
        with _as_if_compiling(), rng.scoped(0):
            graph = make_fx(scheduled if is_scheduled else constant, tracing_mode="fake")(*arguments, *rates)
    except Exception as error:  # whatever a foreign optimizer, or the tracer on meeting it, raises
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for node in reversed(list(graph.graph.nodes)):
        # The record of the step for the profiler: nothing depends on it, and Dynamo cannot capture it.
        if "profiler" in str(node.target):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


@contextmanager
def _as_if_compiling() -> Generator[None]:
    """Optimizers take the path that reads no number back, on every device, where this function says True."""
    real = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = real
