"""The update of one window or its rollback: the finite check, the transform, the average, the scaler.

The decision has one order: a halted state and a window without targets change nothing; a loss or gradient that is not
finite lowers the scale, and halts the state where it cannot be lowered; an invalid learning rate halts it; else the
update is applied. The host does not read this decision: it would wait for a GPU, and a graph or a transform of
`torch.func` has no values. Both results are computed, and one is selected. A kernel of torch that writes in place gets
a flag that says whether to write.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import optim, tree
from ..errors import StepContractError
from ..optim import base, fused, unused_parameters
from ..torch_ext import is_finite, tracing
from ..types import Empty, Form, Mean, Metrics, Params, TrainState, Tree
from .spec import Micro, Spec, wide

_Rate = TypeVar("_Rate")


class _Window(NamedTuple):
    """The state and the gradients of a window that is complete."""

    spec: Spec
    form: Form
    state: TrainState
    grads: Params  # stored form: mean gradient
    norm: Tensor  # shape=(): of the gradients
    buffers: Params  # after the forward pass, for their average
    skipped: unused_parameters.Reached  # parameters without a gradient
    value_and_grad: base.ValueAndGrad | None


def apply(
    spec: Spec,
    form: Form,
    state: TrainState,
    grads: Params,
    weight: Tensor,
    verdict: Tensor,
    buffers: Params,
    skipped: unused_parameters.Reached,
    value_and_grad: base.ValueAndGrad | None = None,
) -> tuple[TrainState, Metrics, Tensor]:
    """Compute the optimizer update of one window, and apply all of it or nothing.

    Args:
        spec: of the program.
        form: of the state.
        state: before the update.
        grads: stored form, mean gradient x scale.
        weight: shape=(); 0 if no target counts.
        verdict: shape=(); not finite if a loss was not. Its value does not matter otherwise.
        buffers: after the forward pass, for their average.
        skipped: parameters without a gradient: they and their optimizer state do not change.
        value_and_grad: the loss of this call as a function of the parameters, for a transform that evaluates it again.

    Returns:
        The next state, metrics, and True (shape=()) if targets count, and loss and gradients are finite, in a state
        that has not halted.
    """
    scale = spec.scaler.scale(state.scaler)
    if scale is not None:
        grads = unscaled(grads, scale)
    norm = ((form.exchange and form.exchange.norm) or optim.global_norm)(grads)
    window = _Window(spec, form, state, grads, norm, buffers, skipped, value_and_grad)
    counts = weight != 0
    if not isinstance(state.halted, Empty):
        counts = counts & (state.halted == 0)
    finite = (window.norm < torch.inf) & is_finite(verdict)  # a norm is not negative
    plan, old = _plan(window), (state.params, state.opt_state, state.ema)
    if plan is None:
        params, opt_state, fits = _by_tree(window)
        finite = finite if fits is None else finite & fits
    else:
        params, opt_state = _by_kernels(window, plan, ready=_all(counts & finite, plan.rates))
    attempted = counts & finite
    rates = rates_of(opt_state)
    # A schedule may return any value. A plan's other rates are numbers, checked before.
    usable = None if plan is not None and not plan.rates else _usable(rates.values())
    applied = attempted if usable is None else attempted & usable
    if plan is None:
        average = spec.average.update(state.ema, params, window.buffers, state.updates)
        params, opt_state, average = tree.where(applied, (params, opt_state, average), old)
    else:
        opt_state = _scalars_where(applied, opt_state, state.opt_state)
        average = _average_where(window, applied, params)
    scaler, halted = state.scaler, state.halted
    if not isinstance(scaler, Empty):
        changes = counts if usable is None else counts & (usable | ~finite)
        scaler = tree.where(changes, spec.scaler.update(scaler, finite), scaler)
    if not isinstance(halted, Empty):
        exhausted = spec.scaler.exhausted(scaler, finite)
        fails = counts & (exhausted if usable is None else torch.where(finite, ~usable, exhausted))
        halted = torch.where(fails, state.step + 1, halted)
    new = state._replace(
        updates=state.updates + applied,
        params=params,
        opt_state=opt_state,
        ema=average,
        scaler=scaler,
        halted=halted,
    )
    share = applied.float()  # 0 where nothing is attempted
    shown = {
        name: rate * share if usable is None else torch.where(attempted, rate, share) for name, rate in rates.items()
    }
    norm = torch.where(applied, window.norm, torch.zeros_like(window.norm))
    return new, _update_metrics(state, shown, norm, applied=share), attempted


def _usable(rates: Iterable[Tensor]) -> Tensor | None:
    """True if all learning rates are in [0, inf); None if there are none."""
    found = [rate.sqrt() < torch.inf for rate in rates]  # the root of a negative number is nan
    return functools.reduce(torch.logical_and, found) if found else None


def _all(flag: Tensor, rates: Iterable[Tensor]) -> Tensor:
    """The flag, and True only if all learning rates are in [0, inf)."""
    usable = _usable(rates)
    return flag if usable is None else flag & usable


def _scalars_where(applied: Tensor, new: Tree, old: Tree) -> Tree:
    """`tree.where` of counts and scalars; a kernel has kept the other tensors."""

    def chosen(n: Tensor, o: Tensor) -> Tensor:
        return n if n is o or (n.dim() and n.is_floating_point()) else torch.where(applied, n, o)

    return tree.map(chosen, new, old)


def _average_where(window: _Window, applied: Tensor, params: Params) -> Tree:
    """The average of an update by a kernel, which has left the parameters as they were unless it is applied."""
    state, average, buffers = window.state, window.spec.average, window.buffers
    if average.where is not None:
        found = average.where(state.ema, params, buffers, state.updates, applied, window.form.before_write is not None)
        if found is not None:
            return found
    return tree.where(applied, average.update(state.ema, params, buffers, state.updates), state.ema)


# --- the transform --------------------------------------------------------------------------------------------------


def _plan(window: _Window) -> fused.Plan | None:
    """The update by torch's fused kernels, if they compute it for these tensors, no graph is captured, this process
    holds all numbers, and the host knows which parameters are unused."""
    exchange, state = window.form.exchange, window.state
    if tracing.in_graph() or (exchange is not None and exchange.norm is not None) or _unused(window.skipped) is None:
        return None
    return fused.plan(window.spec.tx, window.grads, state.opt_state, state.params)


def _unused(skipped: unused_parameters.Reached) -> set[str] | None:
    """The parameters without a gradient; None if the host may not read which."""
    if any(flag is not None and not tracing.may_branch(flag) for flag in skipped.values()):
        return None
    return {name for name, flag in skipped.items() if flag is None or not flag.item()}


def _by_kernels(window: _Window, plan: fused.Plan, *, ready: Tensor) -> tuple[Params, Tree]:
    """The parameters and the optimizer state by a plan, which writes nothing of the state where ``ready`` is False."""
    before_write, state, unused = window.form.before_write, window.state, _unused(window.skipped) or set[str]()
    if before_write is not None:
        before_write()
    owned, norm = before_write is not None, window.norm
    params, new = fused.run(plan, window.grads, state.params, norm=norm, ready=ready, owned=owned, unused=unused)
    return params, unused_parameters.skip(dict.fromkeys(unused), state.params, state.opt_state, new)


def _by_tree(window: _Window) -> tuple[Params, Tree, Tensor | None]:
    """The parameters and the optimizer state by `Transform.update`, and `_fits_float16`, or True if the accepted
    parameters of a transform that evaluates are finite."""
    form, state, tx = window.form, window.state, window.spec.tx
    if form.exchange is not None:
        result = form.exchange.update(tx, window.grads, state.opt_state, state.params, window.norm)
    else:
        norms = base.Norms(known=window.norm)
        result = base.updated(tx, window.grads, state.opt_state, state.params, norms, window.value_and_grad)
    deltas, opt_state = _checked(result, state.params)
    if tx.evaluates:
        return deltas, opt_state, optim.global_norm(deltas) < math.inf
    opt_state = unused_parameters.skip(window.skipped, state.params, state.opt_state, opt_state)
    params = optim.apply_updates(state.params, deltas)
    params = unused_parameters.skip(window.skipped, state.params, state.params, params)
    return params, opt_state, _fits_float16(form, deltas)


def unscaled(grads: Params, scale: Tensor) -> Params:
    """Unscale like torch's `GradScaler`: multiply by the inverse in at least float32, and round once."""
    inverse = {dtype: scale.to(dtype).reciprocal() for dtype in dict.fromkeys(wide(g.dtype) for g in grads.values())}
    return {name: (g.to(wide(g.dtype)) * inverse[wide(g.dtype)]).to(g.dtype) for name, g in grads.items()}


def _checked(found: Any, params: Params) -> tuple[Params, Tree]:
    """Return the result of ``tx.update`` after a check.

    Raises:
        StepContractError: it is not a pair of updates, one for each parameter, and a state.
    """
    what = f"a {type(found).__name__}"
    if isinstance(found, tuple) and len(found) == 2:
        updates: Any = found[0]
        missing = [name for name in params if name not in updates] if isinstance(updates, dict) else None
        if missing == []:
            return found
        what = f"updates as a {type(updates).__name__}" if missing is None else f"no update of {', '.join(missing)}"
    raise StepContractError(
        f"the transformation returned {what}",
        where="tx.update",
        hint="return ({name: update for every name of updates}, state)",
    )


_OVERFLOW = 65520.0  # float16 rounds values from here on to infinity


def _fits_float16(form: Form, deltas: Params) -> Tensor | None:
    """True if updates of float16 parameters are in range: a finite gradient over a tiny eps can overflow. None if there
    are no such parameters."""
    half = {name: delta for name, delta in deltas.items() if delta.dtype == torch.float16 and delta.numel()}
    if not half:
        return None
    # Not isfinite in float16: compiled code may keep the update in float32. Comparisons with nan are False.
    fits = torch.stack([delta.float().abs().amax() < _OVERFLOW for delta in half.values()]).all()
    if form.exchange is None or form.exchange.norm is None:
        return fits
    return form.exchange.total((~fits).float()) == 0


# --- other parts of a state -----------------------------------------------------------------------------------------


def kept_if_halted(state: TrainState, new: Tree, old: Tree) -> Tree:
    """The new leaves, which are of this call, or copies of the old ones if the state has halted."""
    if isinstance(state.halted, Empty):
        return new
    if not tracing.may_branch(state.halted):
        return tree.where(state.halted == 0, new, old)
    return new if state.halted.item() == 0 else tree.clone(old)


def weight_or_nan(micro: Micro) -> Tensor:
    """The weight, or nan if the loss is not finite: the sum over a window is then nan at its end."""
    bad = ~is_finite(micro.mean) & (micro.weight != 0)
    return torch.where(bad, torch.full_like(micro.weight, torch.nan), micro.weight)


# --- metrics --------------------------------------------------------------------------------------------------------


def _update_metrics(state: TrainState, rates: dict[str, Tensor], norm: Tensor, *, applied: Tensor) -> Metrics:
    """Metrics of an update with the weight ``applied`` (1.0 or 0.0). A rate that is refused is a total with weight 0:
    no mean counts it, and the host can report it."""
    one = torch.ones_like(applied)
    reported = {name: Mean(rate, applied) for name, rate in rates.items()}
    first = next(iter(reported.values()), None)
    metrics = {
        "lr": Mean(torch.where(applied > 0, torch.nan, applied), applied) if first is None else first,
        "grad_norm": Mean(norm, applied),
        "applied": Mean(applied, one),
    }
    metrics |= group_rates(reported)
    if not isinstance(state.scaler, Empty):
        metrics["scale"] = Mean(state.scaler.scale, one)  # the scale of this update
    return metrics


def group_rates(rates: dict[str, _Rate]) -> dict[str, _Rate]:
    """``lr/<group>`` for every parameter group, if there are several."""
    found = {name: rate for name, rate in rates.items() if name != "learning_rate"}
    if len(found) < 2:
        return {}
    return {f"lr/{name.rpartition('/')[0]}": rate for name, rate in found.items()}


def rates_of(opt_state: Tree) -> dict[str, Tensor]:
    """The learning rates of an optimizer state by name, shape=() each."""
    found = optim.hyperparams(opt_state)
    return {name: rate.float() for name, rate in found.items() if name.rpartition("/")[2] == "learning_rate"}


def rate_names(state: TrainState) -> frozenset[str]:
    """Names of a step's metrics that are learning rates: ``lr``, and ``lr/<group>`` if there are several groups."""
    return frozenset(("lr", *group_rates(rates_of(state.opt_state))))
