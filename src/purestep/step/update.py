"""The update of one window or its rollback: the finite check, the transform, the average, the scaler."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import optim, tree
from ..errors import StepContractError
from ..optim import base, numerics, unused_parameters
from ..torch_ext import Flag, is_finite, read, tracing
from ..torch_ext import decisions as flags
from ..types import Empty, Form, Mean, Metrics, Params, TrainState, Tree
from .spec import Micro, Spec, wide

_Rate = TypeVar("_Rate")


class _Decision(NamedTuple):
    """The facts that decide about the update of a window."""

    goes_on: Flag  # the state has not halted
    may_apply: Flag  # and the window has targets
    finite: Flag  # its loss and its gradients, and updates of float16 parameters
    usable: Flag  # every learning rate is in [0, inf)


def apply(
    spec: Spec,
    form: Form,
    state: TrainState,
    grads: Params,
    weight: Tensor,
    verdict: Tensor,
    buffers: Params,
    skipped: unused_parameters.Reached,
) -> tuple[TrainState, Metrics, Flag]:
    """Compute the optimizer update of one window, and apply all of it or nothing.

    Args:
        spec: of the program.
        form: of the state.
        state: before the update.
        grads: stored form, mean gradient x scale.
        weight: shape=(); 0 if no target counts.
        verdict: shape=(); nan if a loss was not finite.
        buffers: after the forward pass, for their average.
        skipped: parameters without a gradient: they and their optimizer state do not change.

    Returns:
        The next state, metrics, and True if targets count, and loss and gradients are finite, in a state that has not
        halted.
    """
    scale = spec.scaler.scale(state.scaler)
    if scale is not None:
        grads = unscaled(grads, scale)
    norm = ((form.exchange and form.exchange.norm) or optim.global_norm)(grads)
    finite = flags.every(read(norm) < torch.inf, is_finite(read(verdict)))
    goes_on = going(state)
    decided = _Decision(goes_on, flags.every(goes_on, read(weight) != 0), finite, usable=True)
    unused = _unused(skipped)
    launch = None if unused is None else _launch(spec, form, state, grads)
    if launch is not None and unused is not None:
        ready = flags.every(finite, decided.may_apply, *map(numerics.usable, launch.rates))
        if form.owned is not None:
            form.owned()
        with base.known_norm(grads, norm):
            params, opt_state = launch.run(grads, ready, form.owned is not None, unused)
        opt_state = unused_parameters.skip(dict.fromkeys(unused), state.params, state.opt_state, opt_state)
    else:
        deltas, opt_state = _updates(spec, form, state, grads, norm)
        opt_state = unused_parameters.skip(skipped, state.params, state.opt_state, opt_state)
        fits = _fits_float16(form, deltas)
        decided = decided if fits is None else decided._replace(finite=flags.every(finite, flags.known(fits)))
        params = optim.apply_updates(state.params, deltas)
        params = unused_parameters.skip(skipped, state.params, state.params, params)
    rates = rates_of(opt_state)
    # A schedule may return any value, computed on the device. A kernel's other rates are numbers, checked before.
    valid = {name: numerics.usable(rate) for name, rate in rates.items()} if launch is None or launch.rates else {}
    decided = decided._replace(usable=flags.every(*valid.values()))
    attempted = flags.every(decided.usable, decided.may_apply)
    applied = flags.every(decided.finite, attempted)
    kept = _kept(spec, form, state, applied, params, opt_state, buffers, by_kernel=launch is not None)
    scaler = state.scaler
    if not isinstance(scaler, Empty):
        changed = spec.scaler.update(scaler, flags.tensor(decided.finite, norm.device))
        scaler = tree.map(lambda new, old: flags.where(attempted, new, old), changed, scaler)
    new = state._replace(
        updates=state.updates + applied,
        params=kept[0],
        opt_state=kept[1],
        ema=kept[2],
        scaler=scaler,
        halted=_halted(spec, state, scaler, decided, applied),
    )
    return new, _update_metrics(state, rates, valid, norm, applied), flags.every(decided.finite, decided.may_apply)


def _unused(skipped: unused_parameters.Reached) -> set[str] | None:
    """The parameters without a gradient; None if the host may not read which."""
    reached = {name: flag if flag is None else read(flag) for name, flag in skipped.items()}
    if any(isinstance(flag, Tensor) for flag in reached.values()):
        return None
    return {name for name, flag in reached.items() if not flag}


def _launch(spec: Spec, form: Form, state: TrainState, grads: Params) -> base.Launch | None:
    """The transform's kernel for these tensors, if it has one, no graph is captured, and this process holds all
    numbers."""
    kernel, exchange = base.fast_of(spec.tx).kernel, form.exchange
    if kernel is None or tracing.in_graph() or (exchange is not None and exchange.norm is not None):
        return None
    return kernel(grads, state.opt_state, state.params)


def _kept(
    spec: Spec,
    form: Form,
    state: TrainState,
    applied: Flag,
    params: Params,
    opt_state: Tree,
    buffers: Params,
    *,
    by_kernel: bool,
) -> tuple[Params, Tree, Tree]:
    """The parameters, the optimizer state and their average after the update, or the old ones where it is not applied.

    In eager mode on the CPU the host reads the flag, which waits for nothing there, and one of the two is not computed.
    """
    old, new = (state.params, state.opt_state, state.ema), (params, buffers)
    if isinstance(applied, Tensor):
        if by_kernel:
            return params, _where_not_by_kernel(applied, opt_state, old[1]), _averaged(spec, form, state, applied, *new)
        average = spec.average.update(state.ema, params, buffers, state.updates)
        return tree.where(applied, (params, opt_state, average), old)
    if not applied:
        return old if form.owned is not None else tree.clone(old)
    in_place, update = spec.average.in_place, spec.average.update
    if in_place is not None and form.owned is not None:
        form.owned()
        update = in_place
    average = update(state.ema, params, buffers, state.updates)
    if by_kernel and in_place is not None:
        return params, opt_state, average
    return _separate((params, opt_state, average), old, state)


def _averaged(spec: Spec, form: Form, state: TrainState, applied: Tensor, params: Params, buffers: Params) -> Tree:
    """The average of an update by a kernel, which has left the parameters as they were unless it is applied."""
    if spec.average.where is not None:
        found = spec.average.where(state.ema, params, buffers, state.updates, applied, form.owned is not None)
        if found is not None:
            return found
    return tree.where(applied, spec.average.update(state.ema, params, buffers, state.updates), state.ema)


def _where_not_by_kernel(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """`tree.where` of counts and scalars; a kernel has kept the other tensors."""

    def chosen(n: Tensor, o: Tensor) -> Tensor:
        return n if n is o or (n.dim() and n.is_floating_point()) else torch.where(condition, n, o)

    return tree.map(chosen, new, old)


def _updates(spec: Spec, form: Form, state: TrainState, grads: Params, norm: Tensor) -> tuple[Params, Tree]:
    """The updates and the optimizer state. With several processes, of all their pieces."""
    if form.exchange is not None:
        result = form.exchange.update(spec.tx.update, grads, state.opt_state, state.params, norm)
    elif tracing.in_graph():  # which computes equal norms once
        result = spec.tx.update(grads, state.opt_state, state.params)
    else:
        with base.known_norm(grads, norm):
            result = spec.tx.update(grads, state.opt_state, state.params)
    return _of_transform(result, state.params)


def unscaled(grads: Params, scale: Tensor) -> Params:
    """Unscale like torch's `GradScaler`: multiply by the inverse in at least float32, and round once."""
    inverse = {dtype: scale.to(dtype).reciprocal() for dtype in dict.fromkeys(wide(g.dtype) for g in grads.values())}
    return {name: (g.to(wide(g.dtype)) * inverse[wide(g.dtype)]).to(g.dtype) for name, g in grads.items()}


def _of_transform(found: Any, params: Params) -> tuple[Params, Tree]:
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


def going(state: TrainState) -> Flag:
    """True unless the state has halted."""
    return True if isinstance(state.halted, Empty) else read(state.halted) == 0


def _halted(spec: Spec, state: TrainState, scaler: Tree, decided: _Decision, applied: Flag) -> Tree:
    if isinstance(state.halted, Empty) or applied is True:
        return state.halted
    exhausted = spec.scaler.exhausted(scaler, flags.tensor(decided.finite, state.halted.device))
    fails = flags.every(exhausted, decided.may_apply)
    if decided.usable is not True:
        fails = fails | flags.every(decided.goes_on, flags.negated(decided.usable))
    return torch.where(flags.tensor(fails, state.halted.device), state.step + 1, state.halted)


def _update_metrics(
    state: TrainState, rates: dict[str, Tensor], valid: dict[str, Flag], norm: Tensor, applied: Flag
) -> Metrics:
    counted = flags.tensor(applied, norm.device).float()
    one = torch.ones_like(counted)
    reported = {name: _reported(rate, valid.get(name, True), counted) for name, rate in rates.items()}
    first = next(iter(reported.values()), None)
    metrics = {
        "lr": Mean(torch.where(counted > 0, torch.nan, counted), counted) if first is None else first,
        # The norm of an update that is applied is finite.
        "grad_norm": Mean(flags.where(applied, norm.float(), counted), counted),
        "applied": Mean(counted, one),
    }
    metrics |= group_rates(reported)
    if not isinstance(state.scaler, Empty):
        metrics["scale"] = Mean(state.scaler.scale, one)  # the scale of this update
    return metrics


def _reported(rate: Tensor, usable: Flag, counted: Tensor) -> Mean:
    """The rate of an applied update. An invalid rate becomes a total with weight 0: no mean counts it, and the host can
    report it."""
    return Mean(rate * counted if usable is True else flags.where(usable, rate * counted, rate), counted)


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


def weight_or_nan(micro: Micro) -> Tensor:
    """The weight, or nan if the loss is not finite: the sum over a window is then nan at its end."""
    bad = flags.negated(is_finite(read(micro.mean))) & (read(micro.weight) != 0)
    return flags.where(bad, torch.full_like(micro.weight, torch.nan), micro.weight)


def either(condition: Flag, new: Tree, old: Tree, *, state: TrainState) -> Tree:
    """Select leaves like `tree.where`; where the host may branch, without copies of what is selected. The new leaves
    are of this call."""
    if isinstance(condition, Tensor):
        return tree.where(condition, new, old)
    if not tracing.may_branch(state.step):
        return new  # of a state that cannot halt
    return _separate(new, old, state) if condition else tree.clone(old)


def _separate(new: Tree, old: Tree, state: TrainState) -> Tree:
    """The new leaves, copied if they share memory with the state or each other: a transform may store its arguments."""
    used = {leaf.data_ptr() for leaf in tree.leaves(state) if type(leaf) in (Tensor, nn.Parameter)}

    def own(n: Any, o: Any) -> Any:
        if n is o:
            return o
        if type(n) is Tensor and n.data_ptr() not in used and n.untyped_storage().nbytes() == n.nbytes:
            used.add(n.data_ptr())
            return n if n.dtype == o.dtype else n.to(torch.promote_types(n.dtype, o.dtype))
        return torch.where(torch.ones((), dtype=torch.bool), n, o)

    return tree.map(own, new, old)
