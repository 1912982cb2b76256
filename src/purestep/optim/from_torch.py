"""A foreign optimizer's step on copies: as it is, and as a graph of tensor operations.

How `from_torch` finds out what an optimizer keeps, where, and what that is before its first step.

Any `torch.optim.Optimizer` as a pure transform.

In eager mode every update builds the optimizer anew on copies, hands it its state, lets it step and takes the state
back: the numbers are exactly its own. A compiled step runs a graph instead, which `init` traces on fake tensors; it is
there for every optimizer that keeps its state in tensors and reads none of them back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import rng, tracing, tree
from ..errors import ConfigError, PurestepError, StateError, StepContractError
from ..pickling import recipe
from ..types import Empty, Params, Tree
from .base import Transform, require_rate
from .numerics import Rate, Scalar, Schedule, rate_at, zero_count
from .scale import reported

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


class Start(NamedTuple):
    """What an optimizer keeps before its first step."""

    slots: Slots
    group: dict[str, Any]
    is_whole: bool  # False: the first step makes things of other types or shapes, and only those are right here


class Findings(NamedTuple):
    """What `probe` sees."""

    group_keys: tuple[str, ...]  # what changes in the parameter group
    fill: float  # of the gradient in a step that fills the whole state
    first_differs: bool  # the first step is no step from the state before it


class _Recorder(dict[str, Any]):
    """A state dict that remembers the first value of every key, before the step changes it in place."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(given)

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, copy.deepcopy(value))
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def initial(maker: Maker, params: Params, found: Findings) -> Start:
    """The first value of every key in a step that leads nowhere, where the step keeps their types and shapes.

    Args:
        maker: the optimizer.
        params: name -> P.
        found: by `probe`.
    """
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    device = next(iter(params.values())).device
    with rng.scoped(0, device), torch.enable_grad():
        optimizer = make(maker, list(leaves.values()))
        recorders = {name: _Recorder(optimizer.state[leaf]) for name, leaf in leaves.items()}
        for name, leaf in leaves.items():
            optimizer.state[leaf] = recorders[name]
            leaf.grad = torch.full_like(leaf, found.fill)
        before = copy.deepcopy({key: value for key, value in _group(optimizer).items() if key in found.group_keys})
        optimizer.step()
    leaf = next(iter(leaves.values()))
    slots = {name: frozen(dict(optimizer.state[leaf]), leaf, maker.where) for name, leaf in leaves.items()}
    after = {key: value for key, value in _group(optimizer).items() if key in found.group_keys}
    group = frozen(after, leaf, maker.where)
    if before.keys() == after.keys():
        first = {name: frozen(recorders[name].first, leaf, maker.where) for name, leaf in leaves.items()}
        start = frozen(before, leaf, maker.where)
        if tree.signature((first, start)) == tree.signature((slots, group)):
            return Start(first, start, is_whole=True)
    return Start(slots, group, is_whole=False)


def probe(maker: Maker, params: Params) -> Findings:
    """A few steps on a small tensor of each kind: what changes where, and whether the pure form does the same.

    Raises:
        ConfigError: for an optimizer that fails, gains keys after its first step, or keeps numbers elsewhere.
    """
    generator = rng.generator(rng.key(0), "from_torch")
    kinds = {(param.ndim, param.dtype): name for name, param in params.items()}
    small: Params = {}
    for name in kinds.values():
        shape = [min(length, 3) for length in params[name].shape]
        small[name] = torch.randn(shape, generator=generator).to(params[name].dtype)
    try:
        found = _look(maker, small)
        _reproduce(maker, small, found)
    except PurestepError:
        raise
    except Exception as error:  # whatever a foreign optimizer raises
        hint = "an optimizer whose step() runs on gradients alone"
        raise ConfigError(f"a step failed: {error}", where=maker.where, hint=hint) from error
    return found


def _look(maker: Maker, small: Params) -> Findings:
    optimizer, leaves = _native(maker, small)
    before, own = copy.deepcopy(_group(optimizer)), _numbers(optimizer)
    keys: list[dict[str, set[str]]] = []
    for count in range(3):
        _native_step(optimizer, leaves, small, count)
        keys.append({name: set(optimizer.state[leaf]) for name, leaf in leaves.items()})
    if keys[0] != keys[-1]:
        new = sorted({key for name in small for key in keys[0][name] ^ keys[-1][name]})
        hint = "an optimizer whose state has the same keys from its first step on"
        raise ConfigError(f"its state gained or lost {new} after the first step", where=maker.where, hint=hint)
    elsewhere = [key for key, value in own.items() if not _is_same(value, _numbers(optimizer).get(key))]
    keyed: Any = optimizer.state  # some have other keys than tensors
    elsewhere += [f"state[{key!r}]" for key in keyed if not isinstance(key, Tensor)]
    if elsewhere:
        hint = "an optimizer that keeps its state by parameter or in `param_groups`"
        raise ConfigError(f"it keeps {', '.join(elsewhere)} on itself", where=maker.where, hint=hint)
    after = _group(optimizer)
    changed = tuple(key for key in after if key not in before or not _is_same(before[key], after[key]))
    # Without a gradient some make no state at all.
    quiet = initial(maker, small, Findings(changed, 0.0, False))
    is_filled = all({split(key)[0] for key in quiet.slots[name]} == keys[0][name] for name in small)
    is_filled = is_filled and {split(key)[0] for key in quiet.group} == set(changed)
    found = Findings(changed, 0.0 if is_filled else 1.0, False)
    return found._replace(first_differs=_first_differs(maker, small, found))


def _first_differs(maker: Maker, small: Params, found: Findings) -> bool:
    start = initial(maker, small, found)
    if not start.is_whole:
        return True
    outcomes: list[Outcome] = []
    for is_first in (True, False):
        with rng.scoped(0):
            outcomes.append(run(maker, small, small, start.slots, start.group, is_first=is_first))
    return not _is_same(*outcomes)


def _reproduce(maker: Maker, small: Params, found: Findings) -> None:
    optimizer, leaves = _native(maker, small)
    start = initial(maker, small, found)
    pure = Outcome(small, start.slots, start.group)
    for count in range(4):
        _native_step(optimizer, leaves, small, count)
        with rng.scoped(count):
            is_first = found.first_differs and count == 0
            pure = run(maker, pure.params, _gradients(small, count), pure.slots, pure.group, is_first=is_first)
        if not all(torch.allclose(pure.params[n], leaves[n], rtol=1e-5, equal_nan=True) for n in small):
            hint = "an optimizer that keeps its state by parameter or in `param_groups`"
            what = "rebuilt from its state it makes other updates: it keeps something elsewhere"
            raise ConfigError(what, where=maker.where, hint=hint)


def _native(maker: Maker, small: Params) -> tuple[torch.optim.Optimizer, Params]:
    leaves = {name: param.clone().requires_grad_() for name, param in small.items()}
    with rng.scoped(0):
        return make(maker, list(leaves.values())), leaves


def _native_step(optimizer: torch.optim.Optimizer, leaves: Params, small: Params, count: int) -> None:
    for name, grad in _gradients(small, count).items():
        leaves[name].grad = grad
    with rng.scoped(count):
        optimizer.step()


def _gradients(small: Params, count: int) -> Params:
    return {name: torch.cos(3 * param + count) for name, param in small.items()}


def _group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    return {key: copy.deepcopy(value) for key, value in own.items() if isinstance(value, int | float | Tensor)}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


class FromTorchState(NamedTuple):
    """State of `from_torch`. A Python number is a tensor under a key that ends in its type: ``step:int``."""

    step: Tensor  # shape=(), dtype=int64: updates done
    learning_rate: Tree  # shape=(), dtype=float32: of the last update; Empty for an optimizer without one
    slots: Slots  # name -> key -> what the optimizer keeps for this parameter: tensors, or lists and dicts of them
    group: dict[str, Any]  # key -> what it keeps in its parameter group; mostly nothing

    cure_for_inject = (  # it would be looked at and traced anew in every update
        "optim.inject(optim.adamw)(learning_rate=1e-3), purestep's own; "
        "or from_torch(torch.optim.AdamW, lr=schedule), with other transforms injected apart"
    )


class _Plan(NamedTuple):
    """What is known of an optimizer on certain parameters."""

    first_differs: bool  # the first step does not follow from the state before it: SGD does not dampen that one
    later: Callable[..., Outcome] | str  # the traced step, or why there is none
    first: Callable[..., Outcome] | str  # the traced first step


@recipe
def from_torch(optimizer: type[torch.optim.Optimizer], *, lr: Rate | None = None, **kwargs: Any) -> Transform:
    """A pure transform from any optimizer whose ``step`` needs no closure, third-party ones too.

    In eager mode the updates are its own, bit for bit but for one rounding. Compiled it works for the dense optimizers
    of torch.optim except Adafactor (`adafactor` does), and for others that keep their state in tensors and branch on
    none. There is one parameter group; for more, see `partition`. Not elementwise.

    Args:
        optimizer: the class.
        lr: in [0, inf), a 0-d tensor, or a schedule; the latter two are read back from the device at every eager
            update. None: the optimizer's default.
        kwargs: further arguments of the class.

    Raises:
        ConfigError: for an optimizer that needs a closure or sparse gradients, or whose state cannot be kept as
            tensors under fixed keys; for a rate out of range; when compiling, for one that cannot be traced.
        StateError: at update, for an optimizer whose state changes its keys or shapes.
        StepContractError: at update, inside of a transform of `torch.func`.

    Example:
        >>> tx = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> params = {"w": torch.ones(1)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> round(updates["w"].item(), 4), list(state.slots["w"])
        (-0.1, ['momentum_buffer'])
    """
    maker = _maker(optimizer, lr, kwargs)
    schedule = lr if isinstance(lr, Tensor) or callable(lr) else None
    plans: dict[tuple[Any, ...], _Plan] = {}
    torch.compiler.assume_constant_result(_cannot_compile)  # here, since it loads Dynamo

    def init(params: Params) -> FromTorchState:
        step = zero_count(params)
        if not params:
            return FromTorchState(step, Empty(), {}, {})
        slots, group, plans[_key(params)] = _prepare(maker, params, is_scheduled=schedule is not None)
        rate = maker.rate() if schedule is None else rate_at(schedule, step)
        return FromTorchState(step, Empty() if rate is None else reported(rate, step), slots, group)

    def update(updates: Params, state: FromTorchState, params: Params) -> tuple[Params, FromTorchState]:
        if not params:
            return updates, state
        if tracing.transformed() or tracing.followed([*params.values(), *updates.values()]):
            raise StepContractError(
                "an optimizer of torch's inside of torch.func.vmap, grad or another transform",
                where=maker.where,
                hint="one of purestep's own: optim.adamw(1e-3)",
            )
        rate = None if schedule is None else _rate(schedule, state.step)
        arguments = (params, updates, state.slots, state.group)
        plan = plans.get(_key(params))
        if tracing.in_graph() or _is_traced():
            new, slots, group = _traced_step(plan, maker.where, arguments, rate, state.step)
        else:
            if plan is None:
                plan = plans[_key(params)] = _prepare(maker, params, is_scheduled=schedule is not None)[-1]
            new, slots, group = _eager_step(plan, maker, arguments, rate, state.step)
        shown = maker.rate() if rate is None else rate
        learning_rate = state.learning_rate if shown is None else reported(shown, state.step)
        changes = {name: new[name] - params[name] for name in updates}
        return changes, FromTorchState(state.step + 1, learning_rate, slots, group)

    return Transform(init, update, elementwise=False)


def _maker(optimizer: Any, lr: Rate | None, kwargs: dict[str, Any]) -> Maker:
    if not isinstance(optimizer, type):
        kind = type(optimizer).__name__
        hint = f"from_torch(torch.optim.{kind}, lr=1e-3, ...): the parameters come from the state"
        raise ConfigError(f"the optimizer is a {kind}, not a class", where="from_torch", hint=hint)
    where = f"from_torch({optimizer.__name__})"
    _refuse(optimizer, where)
    if lr is not None:
        require_rate(where, lr)
    start = lr if lr is None or isinstance(lr, float | int) else float(rate_at(lr, torch.zeros((), dtype=torch.int64)))
    dtype = lr.dtype if isinstance(lr, Tensor) and lr.is_floating_point() else None
    return Maker(optimizer, kwargs if start is None else {"lr": start, **kwargs}, where, dtype)


def _rate(given: Tensor | Schedule, step: Tensor) -> Scalar:
    """The rate of an update: what a schedule gives, or a tensor as it is now, in its own dtype."""
    if isinstance(given, Tensor) and given.is_floating_point():
        return given.detach().clone()
    return rate_at(given, step)


def _key(params: Params) -> tuple[Any, ...]:
    # Dynamo guards on the keys, and cannot write down a dtype.
    return tuple((name, tuple(param.shape), str(param.dtype)) for name, param in params.items())


def _is_traced() -> bool:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to load; `init` has loaded it

    return get_proxy_mode() is not None


def _cannot_compile(what: str, where: str, hint: str) -> Any:
    """Raises, while Dynamo looks at the step: marked as a constant, it is called instead of captured."""
    raise ConfigError(what, where=where, hint=hint)


def _refuse(optimizer: type[torch.optim.Optimizer], where: str) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError("its step needs a closure, to evaluate the loss again", where=where, hint="optim.adamw(1e-3)")
    if issubclass(optimizer, torch.optim.SparseAdam):
        hint = "optim.adam(1e-3), and torch.nn.Embedding(..., sparse=False)"
        raise ConfigError("it needs sparse gradients, and those of a pure step are dense", where=where, hint=hint)


_Arguments = tuple[Params, Params, Slots, dict[str, Any]]


def _prepare(maker: Maker, params: Params, *, is_scheduled: bool) -> tuple[Slots, dict[str, Any], _Plan]:
    found = probe(maker, params)
    slots, group, is_whole = initial(maker, params, found)
    differs = found.first_differs or not is_whole
    # Other tensors than the parameters, since a tracer takes one object for one input.
    grads = {name: param.detach() for name, param in params.items()}
    arguments = (params, grads, slots, group)
    later = trace(maker, arguments, is_scheduled=is_scheduled, is_first=False)
    first = trace(maker, arguments, is_scheduled=is_scheduled, is_first=True) if differs else later
    return slots, group, _Plan(differs, later, first)


def _eager_step(plan: _Plan, maker: Maker, arguments: _Arguments, rate: Any, step: Tensor) -> Outcome:
    # Optimizers compare and format their learning rate as a Python number. One that the caller gave as a tensor they
    # are called with as such, and round as they do then.
    number = rate if rate is None or maker.lr_dtype is not None else float(rate)
    is_first = plan.first_differs and bool(step == 0)
    outcome = run(maker, *arguments, rate=number, is_first=is_first)
    if tree.signature((outcome.slots, outcome.group)) != tree.signature(arguments[2:]):
        paths = tree.paths((outcome.slots, outcome.group))
        new = sorted(set(paths) ^ set(tree.paths(arguments[2:]))) or "a leaf of another shape"
        hint = "an optimizer whose state has the same keys and shapes from its first step on"
        raise StateError(f"its state gained or lost {new}", where=maker.where, hint=hint)
    return outcome


def _traced_step(plan: _Plan | None, where: str, arguments: _Arguments, rate: Any, step: Tensor) -> Outcome:
    if plan is None:
        return _cannot_compile("its state was not made here", where, "tx.init(params), then compile")
    if isinstance(plan.later, str) or isinstance(plan.first, str):
        reason = plan.later if isinstance(plan.later, str) else plan.first
        hint = "compile=False, or the optimizer of that name in purestep.optim"
        return _cannot_compile(f"its step cannot be compiled: {reason}", where, hint)
    rates = () if rate is None else (rate,)
    later = plan.later(*arguments, *rates)
    if not plan.first_differs:
        return later
    return tree.map(lambda first, then: torch.where(step == 0, first, then), plan.first(*arguments, *rates), later)
