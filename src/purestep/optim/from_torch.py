"""Any `torch.optim.Optimizer` as a pure transform.

An update builds the optimizer on copies of the parameters, loads its state from the tree, runs one step, and stores the
state back in the tree: the numbers are exactly those of the optimizer. A compiled step traces this Python, as that of a
model. An optimizer can be traced if it keeps its state in tensors and does not read their values. In a user's
`torch.compile` the update is a break in the graph.

`init` first probes the optimizer on small tensors: which state it keeps for a parameter, that it keeps nothing
elsewhere, and that an optimizer which is rebuilt from this state computes the same updates, the first one included.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import ConfigError, PurestepError, StateError, StepContractError
from ..torch_ext import tracing
from ..types import Empty, Params, Tree
from .arguments import Rate, Scalar, Schedule, check_rate
from .base import Transform
from .counts import zero_count
from .numerics import rate_at
from .scale import rate_leaf

Slots: TypeAlias = dict[str, dict[str, Tensor | Empty]]
"""Name -> key -> tensor, or Empty for None."""
_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}
_SCALAR = "scalar"  # a 0-d float64 tensor, stored in shape (1,), since a 0-d float64 leaf cannot be donated


def from_torch(optimizer: type[torch.optim.Optimizer], *, lr: Rate | None = None, **kwargs: Any) -> Transform:
    """Build a pure transform from any optimizer class whose ``step`` needs no closure, including third-party ones.

    Example:
        >>> tx = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> params = {"w": torch.ones(1)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> round(updates["w"].item(), 4), list(state.slots["w"])
        (-0.1, ['momentum_buffer'])

    In eager mode the updates equal those of the optimizer, up to one rounding. Compiled steps support the dense
    optimizers of torch.optim except Adafactor (use `adafactor`), and others that keep their state in tensors and do not
    branch on tensor values. There is one parameter group; for more, use `partition`. Not elementwise.

    Args:
        optimizer: the class.
        lr: a number in [0, inf), a 0-d tensor, or a schedule. A tensor or a schedule is read from the device at every
            eager update. None: the optimizer's default.
        kwargs: further arguments of the class.

    Raises:
        ConfigError: the optimizer needs a closure (see `lbfgs`) or sparse gradients; its state of a parameter is not
            tensors and numbers under fixed keys, or it keeps state elsewhere (in its parameter group, on itself); its
            first step differs from the later ones, as that of SGD with dampening (use `sgd`); the rate is out of
            range; when compiling, the optimizer cannot be traced.
        StateError: at update, the keys or shapes of the optimizer's state have changed.
        StepContractError: at update, if called inside of a transform of `torch.func`.
    """
    spec = _spec_of(optimizer, lr, kwargs)
    schedule = lr if isinstance(lr, Tensor) or callable(lr) else None

    def init(params: Params) -> FromTorchState:
        step = zero_count(params)
        if not params:
            return FromTorchState(step, Empty(), {})
        slots = _initial_state(spec, params, _probe(spec, params))
        rate = spec.rate() if schedule is None else rate_at(schedule, step)
        return FromTorchState(step, Empty() if rate is None else rate_leaf(rate, step), slots)

    def update(updates: Params, state: FromTorchState, params: Params) -> tuple[Params, FromTorchState]:
        if not params:
            return updates, state
        if tracing.transformed() or tracing.followed([*params.values(), *updates.values()]):
            raise StepContractError(
                "it cannot run inside of torch.func.vmap, grad or another transform",
                where=spec.where,
                hint="use an optimizer of purestep.optim: optim.adamw(1e-3)",
            )
        rate = None if schedule is None else _rate(schedule, state.step)
        run = _traced_step if not torch.compiler.is_dynamo_compiling() and tracing.in_graph() else _eager_step
        new, slots = run(spec, params, updates, state.slots, rate)
        shown = spec.rate() if rate is None else rate
        learning_rate = state.learning_rate if shown is None else rate_leaf(shown, state.step)
        changes = {name: new[name] - params[name] for name in updates}
        return changes, FromTorchState(state.step + 1, learning_rate, slots)

    return Transform(init, update, elementwise=False)


class FromTorchState(NamedTuple):
    """State of `from_torch`. A Python number is a tensor under a key that ends in its type: ``step:int``."""

    step: Tensor  # shape=(), dtype=int64: updates done
    learning_rate: Tree  # shape=(), dtype=float32: of the last update; Empty for an optimizer without one
    slots: Slots  # name -> key -> the optimizer's state of this parameter

    cure_for_inject = (  # `inject` rebuilds its transform in every update; this one would be probed and traced again.
        "optim.inject(optim.adamw)(learning_rate=1e-3), an optimizer of purestep.optim; "
        "or from_torch(torch.optim.AdamW, lr=schedule) outside of inject"
    )


class _Spec(NamedTuple):
    """An optimizer class and its arguments."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    where: str  # for error messages
    lr_dtype: torch.dtype | None = None  # of a learning rate passed as a tensor: torch computes in this dtype

    def rate(self) -> float | None:
        """Return the learning rate, passed or default; None for an optimizer without one."""
        default = inspect.signature(self.optimizer).parameters.get("lr")
        rate = self.options.get("lr", None if default is None else default.default)
        return float(rate) if isinstance(rate, int | float | Tensor) else None


def _spec_of(optimizer: Any, lr: Rate | None, kwargs: dict[str, Any]) -> _Spec:
    if not isinstance(optimizer, type):
        kind = type(optimizer).__name__
        hint = f"from_torch(torch.optim.{kind}, lr=1e-3, ...), without parameters"
        raise ConfigError(f"the optimizer is a {kind}, not a class", where="from_torch", hint=hint)
    where = f"from_torch({optimizer.__name__})"
    _check_supported(optimizer, where)
    if lr is not None:
        check_rate(where, "lr", lr)
    start = lr if lr is None or isinstance(lr, float | int) else float(rate_at(lr, torch.zeros((), dtype=torch.int64)))
    dtype = lr.dtype if isinstance(lr, Tensor) and lr.is_floating_point() else None
    return _Spec(optimizer, kwargs if start is None else {"lr": start, **kwargs}, where, dtype)


def _check_supported(optimizer: type[torch.optim.Optimizer], where: str) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        cure = "optim.lbfgs(1.0)" if issubclass(optimizer, torch.optim.LBFGS) else "optim.adamw(1e-3)"
        raise ConfigError("its step needs a closure that evaluates the loss again", where=where, hint=cure)
    if issubclass(optimizer, torch.optim.SparseAdam):
        hint = "optim.adam(1e-3), and torch.nn.Embedding(..., sparse=False)"
        raise ConfigError("it needs sparse gradients, but a pure step has dense gradients", where=where, hint=hint)


def _rate(rate: Tensor | Schedule, step: Tensor) -> Scalar:
    """Return the rate of this update: a schedule's value, or a copy of a tensor in the tensor's dtype."""
    if isinstance(rate, Tensor) and rate.is_floating_point():
        return rate.detach().clone()
    return rate_at(rate, step)


@tracing.break_in_graph
def _eager_step(spec: _Spec, params: Params, grads: Params, slots: Slots, rate: Any) -> tuple[Params, Slots]:
    # Optimizers compare and format their learning rate as a Python number. A rate that the caller passed as a tensor
    # stays a tensor, because torch rounds differently then.
    number = rate if rate is None or spec.lr_dtype is not None else float(rate)
    params, found = _run(spec, params, grads, slots, rate=number)
    if tree.signature(found) != tree.signature(slots):
        new = sorted({*tree.paths(found)} ^ {*tree.paths(slots)}) or "a leaf of another shape"
        hint = "use an optimizer whose state has the same keys and shapes from its first step on"
        raise StateError(f"its state gained or lost {new}", where=spec.where, hint=hint)
    return params, found


def _traced_step(spec: _Spec, params: Params, grads: Params, slots: Slots, rate: Any) -> tuple[Params, Slots]:
    keys = {_split_key(key) for slot in slots.values() for key in slot}
    numbers = sorted({name for name, kind in keys if kind in _NUMBERS})
    if numbers:
        why = f"its state has Python numbers ({', '.join(numbers)}), which would be constants in a graph"
    else:
        try:
            return _run(spec, params, grads, slots, rate=rate, is_traced=True)
        except Exception as error:  # The optimizer and the tracer may raise anything.
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    hint = "set compile=False, or use the optimizer of the same name in purestep.optim"
    raise ConfigError(f"its step cannot be compiled: {why}", where=spec.where, hint=hint)


def _run(
    spec: _Spec,
    params: Params,
    grads: Params,
    slots: Slots,
    *,
    rate: Any = None,
    is_traced: bool = False,
) -> tuple[Params, Slots]:
    """Run one step of the optimizer on copies of the parameters.

    Args:
        spec: the optimizer.
        params: name -> P.
        grads: name -> P.
        slots: its state of each parameter.
        rate: a learning rate that replaces that of the spec.
        is_traced: the step must not read tensor values.
    """
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    optimizer = _build(spec, list(leaves.values()), is_traced=is_traced)
    if rate is not None:
        if isinstance(rate, Tensor):
            # One rate for the whole group: float64 only if it promotes none of the parameters.
            is_float64 = all(_may_upcast(leaf) for leaf in leaves.values())
            rate = rate.to(spec.lr_dtype or (torch.float64 if is_float64 else torch.float32))
        optimizer.param_groups[0]["lr"] = rate
    for name, leaf in leaves.items():
        leaf.grad = grads[name].detach().to(leaf.dtype, copy=True)
        optimizer.state[leaf] = _to_native(slots[name], upcast=_may_upcast(leaf) and (is_traced or leaf.is_cuda))
    if is_traced:  # without the wrapper around each `step`, which records it for profilers
        type(optimizer).step.__wrapped__(optimizer)  # pyright: ignore[reportFunctionMemberAccess]
    else:
        optimizer.step()
    new_slots = {
        name: _to_tensors(optimizer.state[leaf], leaf, spec.where, slots[name]) for name, leaf in leaves.items()
    }
    if tree.flatten(new_slots)[1] == tree.flatten(slots)[1]:  # a leaf must keep its dtype
        new_slots = tree.map(lambda leaf, old: leaf.to(old.dtype), new_slots, slots)
    return {name: leaf.detach() for name, leaf in leaves.items()}, new_slots


def _build(spec: _Spec, leaves: list[Tensor], *, is_traced: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer, with its step counts on the device of the leaves if it supports that (``capturable``)."""
    known = inspect.signature(spec.optimizer).parameters
    options = dict(spec.options)
    if is_traced:
        # foreach: fewer nodes in the graph.
        forced = {"capturable": True, "foreach": True, "fused": False}
        options |= {key: value for key, value in forced.items() if key in known}
    elif leaves[0].is_cuda and "capturable" in known:
        options = {"capturable": True, **options}
    build: Any = spec.optimizer  # Signatures differ between classes.
    return build(leaves, **options)


def _may_upcast(param: Tensor) -> bool:
    """Return True if the device has float64 and a 0-d float64 tensor does not promote this parameter."""
    return param.device.type != "mps" and (param.ndim > 0 or param.dtype == torch.float64)


def _to_native(stored: Mapping[str, Tensor | Empty], *, upcast: bool) -> dict[str, Any]:
    """Copy the state of a parameter from the tree into the optimizer's own form."""
    found: dict[str, Any] = {}
    for key, value in stored.items():
        name, kind = _split_key(key)
        if isinstance(value, Empty):
            found[name] = None
        elif kind == _SCALAR:
            found[name] = value.detach().clone().view(())
        elif kind:
            found[name] = _NUMBERS[kind](value.item())
        elif upcast and value.ndim == 0 and value.dtype == torch.float32:
            # Powers of a decay near 1 lose six digits in float32; torch's Python path computes them in float64.
            found[name] = value.double()
        else:
            found[name] = value.detach().clone()
    return found


def _to_tensors(
    native: Mapping[Any, Any], param: Tensor, where: str, before: Mapping[str, Any] | None = None
) -> dict[str, Tensor | Empty]:
    """Convert the optimizer's own state of a parameter to tensors on its device, under the keys of ``before``.

    Raises:
        ConfigError: a key is not a text, or a value is not a tensor, a number or None.
    """
    found: dict[str, Tensor | Empty] = {}
    for key, value in native.items():
        if not isinstance(key, str):
            what = f"its state of a parameter has the key {key!r}, a {type(key).__name__}"
            raise ConfigError(what, where=where, hint="use an optimizer whose state of a parameter has names as keys")
        if value is None:
            found[key] = Empty()
        elif isinstance(value, Tensor):
            own = value.detach().to(param.device)
            # If the key is in `before`, this is a float32 scalar that `_to_native` upcast.
            is_scalar = own.ndim == 0 and own.dtype == torch.float64 and param.ndim > 0 and key not in (before or {})
            found[f"{key}:{_SCALAR}" if is_scalar else key] = own.view(1) if is_scalar else own
        elif isinstance(value, float):
            found[f"{key}:float"] = torch.tensor([value], dtype=torch.float64, device=param.device)
        elif isinstance(value, int):
            found[f"{key}:{type(value).__name__}"] = torch.tensor(int(value), device=param.device)
        else:
            what = f"its state {key!r} of a parameter is a {type(value).__name__}: {value!r:.60}"
            hint = "use an optimizer whose state of a parameter is tensors, numbers and None"
            raise ConfigError(what, where=where, hint=hint)
    return found


def _split_key(key: str) -> tuple[str, str]:
    """Split ``"step:int"`` into ``("step", "int")``; the type is "" for a key without one."""
    name, _, kind = key.rpartition(":")
    return (name, kind) if name and (kind in _NUMBERS or kind == _SCALAR) else (key, "")


def _probe(spec: _Spec, params: Params) -> float | None:
    """Run a few steps on one small tensor per rank and dtype, to see which state the optimizer keeps and where.

    Returns:
        The argument ``fill`` of `_initial_state` for this optimizer.

    Raises:
        ConfigError: the optimizer fails, its keys change after the first step, its first step differs from the later
            ones, or it keeps state elsewhere.
    """
    generator = rng.generator(rng.key(0), "from_torch")
    kinds = {(param.ndim, param.dtype): name for name, param in params.items()}
    small: Params = {}
    for name in kinds.values():
        shape = [min(length, 3) for length in params[name].shape]
        small[name] = torch.randn(shape, generator=generator).to(params[name].dtype)
    try:
        return _compare_steps(spec, small)
    except PurestepError:
        raise
    except Exception as error:  # An optimizer may raise anything.
        hint = "use an optimizer whose step() needs gradients only"
        raise ConfigError(f"a step failed: {error}", where=spec.where, hint=hint) from error


def _compare_steps(spec: _Spec, small: Params) -> float | None:
    """Compare an optimizer with one that is rebuilt from its state in every step; see `_probe`."""
    gradients = [{name: torch.cos(3 * param + count) for name, param in small.items()} for count in range(4)]
    leaves = {name: param.clone().requires_grad_() for name, param in small.items()}
    with rng.scoped(0):
        optimizer = _build(spec, list(leaves.values()))
    before, first = _elsewhere(optimizer), dict[str, Any]()
    keys, wanted = list[dict[str, set[str]]](), list[Params]()
    for count, grads in enumerate(gradients):
        for name, grad in grads.items():
            leaves[name].grad = grad.clone()
        with rng.scoped(count):
            optimizer.step()
        keys.append({name: set(optimizer.state[leaf]) for name, leaf in leaves.items()})
        wanted.append({name: leaf.detach().clone() for name, leaf in leaves.items()})
        if not count:
            states = {name: _to_tensors(optimizer.state[leaf], leaf, spec.where) for name, leaf in leaves.items()}
            first = tree.clone(states)
    if keys[0] != keys[-1]:
        new = sorted({key for name in small for key in keys[0][name] ^ keys[-1][name]})
        hint = "use an optimizer whose state has the same keys from its first step on"
        raise ConfigError(f"its state gained or lost {new} after the first step", where=spec.where, hint=hint)
    after, what = _elsewhere(optimizer), "it keeps state elsewhere than by parameter"
    hint = "use an optimizer that keeps its state by parameter, such as those of purestep.optim"
    if changed := [key for key in after if key not in before or not _is_same(before[key], after[key])]:
        raise ConfigError(f"{what}: {', '.join(changed)}", where=spec.where, hint=hint)
    for fill in (0.0, 1.0, None):
        slots = _initial_state(spec, small, fill)
        if tree.signature(slots) == tree.signature(first):
            with rng.scoped(0):
                new, slots = _run(spec, small, gradients[0], slots)
            if _is_same((new, slots), (wanted[0], first)):
                break
    else:
        is_sgd = issubclass(spec.optimizer, torch.optim.SGD)
        cure = "optim.sgd(..., dampening=0.5)" if is_sgd else "use an optimizer of purestep.optim: optim.adamw(1e-3)"
        raise ConfigError("its first step differs from the later ones", where=spec.where, hint=cure)
    for count, grads in list(enumerate(gradients))[1:]:
        with rng.scoped(count):
            new, slots = _run(spec, new, grads, slots)
        if not all(torch.allclose(new[name], wanted[count][name], rtol=1e-5, equal_nan=True) for name in small):
            raise ConfigError(f"rebuilt from its state it computes other updates: {what}", where=spec.where, hint=hint)
    return fill


def _elsewhere(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of what an optimizer holds outside of the state of its parameters."""
    held = {f"param_groups[0][{key!r}]": value for key, value in optimizer.param_groups[0].items() if key != "params"}
    attributes = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    held |= {key: value for key, value in attributes.items() if isinstance(value, int | float | Tensor)}
    state: Any = optimizer.state
    held |= {f"state[{key!r}]": value for key, value in state.items() if not isinstance(key, Tensor)}
    return copy.deepcopy(held)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _initial_state(spec: _Spec, params: Params, fill: float | None) -> Slots:
    """The state before the first update. On the meta device, where some optimizers read a value, that of zeros.

    Args:
        spec: the optimizer.
        params: name -> P.
        fill: the first values that a step with gradients of this value stores. 1 is for optimizers that create no state
            for a gradient of 0. None: zeros, for those that store a gradient first, with the weight decay in it.
    """
    try:
        return _first_step(spec, params, fill)
    except RuntimeError:
        if not any(param.is_meta for param in params.values()):
            raise
        found = _first_step(spec, {name: torch.zeros_like(p, device="cpu") for name, p in params.items()}, fill)
        return tree.map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, found)


def _first_step(spec: _Spec, params: Params, fill: float | None) -> Slots:
    """Run a first step on copies; see `_initial_state`."""
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    device = next(iter(params.values())).device
    with rng.scoped(0, device), torch.enable_grad():
        optimizer = _build(spec, list(leaves.values()))
        recorders = {name: _Recorder(optimizer.state[leaf]) for name, leaf in leaves.items()}
        for name, leaf in leaves.items():
            optimizer.state[leaf] = recorders[name]
            leaf.grad = torch.full_like(leaf, 1.0 if fill is None else fill)
        optimizer.step()
    if fill is None:
        after = {name: _to_tensors(optimizer.state[leaf], leaf, spec.where) for name, leaf in leaves.items()}
        return tree.map(torch.zeros_like, after)
    return {name: _to_tensors(recorders[name].first, leaf, spec.where) for name, leaf in leaves.items()}


class _Recorder(dict[str, Any]):
    """A state dict that copies the first value of every key, before the step changes it in place."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(items)

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
