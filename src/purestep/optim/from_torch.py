"""Any `torch.optim.Optimizer` as a pure transform.

In eager mode every update builds the optimizer anew on copies, hands it its state, lets it step and takes the state
back: the numbers are exactly its own. A compiled step runs a graph instead, which `init` traces on fake tensors; it is
there for every optimizer that keeps its state in tensors and reads none of them back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import modes, rng, tree
from ..errors import ConfigError, StateError, StepContractError
from ..recipes import recipe
from ..transform import Rate, Scalar, Schedule, Transform, rate_at, reported, require_rate, zero_count
from ..types import Empty, Params, Tree
from .foreign import Maker, Outcome, Slots, run, trace
from .probe import initial, probe


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
        if modes.transformed() or modes.followed([*params.values(), *updates.values()]):
            raise StepContractError(
                "an optimizer of torch's inside of torch.func.vmap, grad or another transform",
                where=maker.where,
                hint="one of purestep's own: optim.adamw(1e-3)",
            )
        rate = None if schedule is None else _rate(schedule, state.step)
        arguments = (params, updates, state.slots, state.group)
        plan = plans.get(_key(params))
        if rng.in_graph() or _is_traced():
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
