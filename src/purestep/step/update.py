"""From gradients to the next state: accumulation, the finite check, the update or its rollback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import optim, rng, tracing, tree
from ..errors import DataError, StateError, StepContractError
from ..optim import unused_parameters
from ..types import Batch, Empty, Form, Mean, Metrics, Params, Steps, TrainState, Tree
from . import exchange
from .gradient import finite_mean, gradients, kept_buffers
from .spec import Accum, Adding, Closing, Micro, Spec, drawn, is_finite, wide


def steps_of(spec: Spec, form: Form) -> Steps:
    """Build a program's ``train_step`` and ``flush`` for one form of its state."""
    compute = spec.gradients or gradients

    def train_step(state: TrainState, batch: Batch, *context: Any) -> tuple[TrainState, Metrics]:
        """``(state, batch, *context) -> (state, metrics)``; the input state does not change.

        It does not wait for the device. With ``accumulate``, `fit`, `run_epoch` and compiled steps count the window's
        position on the host. Any other eager call on a GPU computes both results, for adding and for closing, and
        selects one: about 1.5 times the launches of a step without accumulation.
        """
        if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]  # may be of any type
            raise _no_state(state)
        micro = _drawing(spec, form, state, batch, lambda: compute(spec, form, state, batch, context))
        if isinstance(state.accum, Empty):
            micro, verdict, skipped = _whole(spec, form, state, micro)
            new, metrics = _apply(spec, form, state, micro.grads, micro.weight, verdict, micro.buffers, skipped)
            counted = (metrics["finite"].total > 0) & (micro.weight != 0)
            new = new._replace(buffers=kept_buffers(state.buffers, micro, counted))
            del metrics["finite"]
        else:
            new, micro, metrics = _accumulate(spec, form, state, micro)
        return _count_call(state, new), _joined(micro.metrics, metrics)

    def flush(state: TrainState) -> tuple[TrainState, Metrics]:
        """Close an open window according to the program's ``tail``."""
        if isinstance(state.accum, Empty) or spec.tail == "carry":
            return state, {}
        accum = cast(Accum, state.accum)
        weight = accum.weight if spec.tail == "step" else torch.zeros_like(accum.weight)
        new, metrics = _close(spec, form, state, accum._replace(weight=weight), spec.reach.ever)
        return _count_call(state, new), metrics

    return Steps(train_step, flush)


def _joined(measured: Metrics, own: Metrics) -> Metrics:
    """Merge the objective's metrics with those of the step.

    Raises:
        StepContractError: both have the same name: ``lr/<group>`` depends on the transformation.
    """
    both = measured.keys() & own.keys()
    if both:
        raise StepContractError(
            "the step itself has a metric of this name", where=f"metrics/{min(both)}", hint="choose another name"
        )
    return {**measured, **own}


def rate_names(state: TrainState) -> frozenset[str]:
    """Names of a step's metrics that are learning rates: ``lr``, and ``lr/<group>`` if there are several groups."""
    return frozenset(("lr", *_group_rates(_rates(state.opt_state))))


def _no_state(found: Any) -> StateError:
    return StateError(f"is a {type(found).__name__}", where="state", hint="call train_step(state, batch)")


def _drawing(spec: Spec, form: Form, state: TrainState, batch: Batch, call: Callable[[], Micro]) -> Micro:
    """Make a call with the random numbers of this step, unless the host has seeded for a whole graph. Each of several
    processes draws its own.

    Raises:
        DataError: the call failed because a tensor of the batch is on another device. Not checked before the call: an
            operation may need an index on the CPU.
    """
    if tracing.in_graph():
        return call()
    # If states are mapped with a key each, mix all keys: their numbers are drawn together.
    stream = () if form.exchange is None else form.exchange.stream
    number = rng.mix(*tracing.unwrapped(state.key).flatten().tolist(), "step", *stream)
    try:
        return drawn(spec.host, call, number, state.step.device)
    except RuntimeError as error:
        here = state.step.device
        elsewhere = [path for path, leaf in tree.with_paths(batch) if getattr(leaf, "device", here) != here]
        if not elsewhere or "device" not in str(error):
            raise
        raise DataError(
            f"is not on {here}, where the state is",
            where="/".join(filter(None, ("batch", elsewhere[0]))),
            hint="call batch = ps.to_device(batch, state)",
        ) from error


def _whole(spec: Spec, form: Form, state: TrainState, micro: Micro) -> tuple[Micro, Tensor, unused_parameters.Reached]:
    """The call of all processes, its verdict, and the parameters without a gradient."""
    verdict, stored = _verdict(micro), form.unreached(micro.unreached)
    if form.exchange is None:
        return micro, verdict, dict.fromkeys(stored)
    found = exchange.joined(spec, form, micro, verdict, checks_gradients=False)
    grads = exchange.mean_gradients(form, state, micro.grads, micro.grad_weight, found.micro.weight)
    return found.micro._replace(grads=grads), found.verdict, _reached(stored, found.reached)


def _reached(stored: dict[str, str], flags: dict[str, Tensor]) -> unused_parameters.Reached:
    """Stored names of parameters without a gradient in this process -> True if another process has one."""
    return {place: flags[name] for name, place in sorted(stored.items())}


def _verdict(micro: Micro) -> Tensor:
    """The weight, or nan if the loss is not finite: the sum over a window is then nan at its end."""
    bad = ~is_finite(micro.mean) & (micro.weight != 0)
    return torch.where(bad, torch.full_like(micro.weight, torch.nan), micro.weight)


def _either(condition: Tensor, new: Tree, old: Tree, *, state: TrainState) -> Tree:
    """Select leaves like `tree.where`. In eager mode on the CPU, where reading the condition does not wait, selected
    leaves are returned without a copy, unless they share memory: a transform may store its arguments."""
    if condition.device.type != "cpu" or not tracing.may_read(condition):
        return tree.where(condition, new, old)
    holds = bool(condition)
    used = {leaf.data_ptr() for leaf in tree.leaves(state) if type(leaf) in (Tensor, nn.Parameter)}

    def chosen(n: Any, o: Any) -> Any:
        if n is o:
            return o
        if type(n) is type(o) is Tensor and n.shape == o.shape and n.dtype == o.dtype:
            found = n if holds else o
            if found.data_ptr() not in used and found.untyped_storage().nbytes() == found.nbytes:
                used.add(found.data_ptr())
                return found
        return torch.where(condition, n, o)

    return tree.map(chosen, new, old)


def _accumulate(spec: Spec, form: Form, state: TrainState, micro: Micro) -> tuple[TrainState, Micro, Metrics]:
    """Add to the window, and close it after its last micro-batch. Returns the micro-batch of all processes."""
    old, unreached = cast(Accum, state.accum), micro.unreached
    form.unreached(unreached)  # the same check for every micro-batch
    verdict = _verdict(micro)
    added = exchange.weighted(micro.grads, micro.grad_weight)
    finite = is_finite(optim.global_norm(micro.grads)) if micro.buffers and form.exchange is None else None
    if form.exchange is not None:
        micro, verdict, _, finite = exchange.joined(spec, form, micro, verdict, checks_gradients=bool(micro.buffers))
        added = added if form.exchange.once else exchange.reduced(form, added)
    accum = Accum(old.left - 1, old.weight + verdict, {name: old.grads[name] + grad for name, grad in added.items()})
    state = _with_buffers(state, micro, finite)
    if isinstance(old, Adding):
        return _with_micro(micro, _keep_open(state, accum))
    if isinstance(old, Closing):
        return _with_micro(micro, _close(spec, form, state, accum, unreached))
    if old.left.device.type == "cpu" and tracing.may_read(old.left):  # on other devices the host would wait
        last = int(old.left) == 1
        return _with_micro(micro, _close(spec, form, state, accum, unreached) if last else _keep_open(state, accum))
    # The window position is unknown to the host: compute both results, select one.
    opened, open_metrics = _keep_open(state, accum)
    closed, close_metrics = _close(spec, form, state, accum, unreached)
    last = old.left == 1
    return tree.where(last, closed, opened), micro, tree.where(last, close_metrics, open_metrics)


def _with_buffers(state: TrainState, micro: Micro, finite: Tensor | None) -> TrainState:
    """Set this micro-batch's buffers, unless its loss or gradients are not finite or its weight is 0."""
    if not micro.buffers or finite is None:
        return state
    counted = finite & is_finite(micro.mean) & (micro.weight != 0) & ~_halted(state)
    return state._replace(buffers=kept_buffers(state.buffers, micro, counted))


def _with_micro(micro: Micro, result: tuple[TrainState, Metrics]) -> tuple[TrainState, Micro, Metrics]:
    return result[0], micro, result[1]


def _keep_open(state: TrainState, accum: Accum) -> tuple[TrainState, Metrics]:
    zero = torch.zeros((), dtype=torch.float32, device=state.step.device)
    kept = _either(_halted(state), Accum(*cast(Accum, state.accum)), accum, state=state)
    metrics = {"lr": Mean(zero, zero), "grad_norm": Mean(zero, zero), "applied": Mean(zero, torch.ones_like(zero))}
    metrics |= {name: Mean(zero, zero) for name in _group_rates(_rates(state.opt_state))}
    if not isinstance(state.scaler, Empty):
        metrics["scale"] = Mean(state.scaler.scale, torch.ones_like(zero))
    return state._replace(accum=kept), metrics


def _close(
    spec: Spec, form: Form, state: TrainState, accum: Accum, unreached: frozenset[str]
) -> tuple[TrainState, Metrics]:
    """Divide the window by its weight, apply it and empty it.

    Args:
        spec: of the program.
        form: of the state.
        state: before the update.
        accum: the complete window.
        unreached: named parameters that the last loss did not reach; one whose summed gradient is 0 was never reached.
    """
    stored, summed = form.unreached(unreached), accum.grads
    if form.exchange is not None and form.exchange.once:
        summed = exchange.reduced(form, summed)
    flags = _nonzero(form, summed, set(stored.values()))
    reached = {name: flags[place] for name, place in stored.items()}
    grads = exchange.divided(state, summed, accum.weight)
    counted = torch.where(torch.isnan(accum.weight), torch.ones_like(accum.weight), accum.weight)
    new, metrics = _apply(spec, form, state, grads, counted, accum.weight, state.buffers, reached)
    del metrics["finite"]
    left = torch.full_like(accum.left, spec.accumulate)
    empty = Accum(left, torch.zeros_like(accum.weight), tree.map(torch.zeros_like, accum.grads))
    return new._replace(accum=_either(_halted(state), Accum(*cast(Accum, state.accum)), empty, state=state)), metrics


def _nonzero(form: Form, grads: Params, names: set[str]) -> dict[str, Tensor]:
    """For these stored names, True if the whole gradient has a number other than 0. If several processes hold pieces,
    each contributes all of its names: which ones a process asks for may differ."""
    if form.exchange is None or form.exchange.norm is None:
        return {name: grads[name].ne(0).any() for name in sorted(names)}
    found = form.exchange.total(torch.stack([grad.ne(0).any().float() for grad in grads.values()]))
    return {name: flag > 0 for name, flag in zip(grads, found.unbind(), strict=True) if name in names}


def _apply(
    spec: Spec,
    form: Form,
    state: TrainState,
    grads: Params,
    weight: Tensor,
    verdict: Tensor,
    buffers: Params,
    skipped: unused_parameters.Reached,
) -> tuple[TrainState, Metrics]:
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
    """
    scale = spec.scaler.scale(state.scaler)
    if scale is not None:
        grads = _unscaled(grads, scale)
    nothing = weight == 0
    norm, deltas, opt_state = _updates(spec, form, state, grads)
    opt_state = unused_parameters.skip(skipped, state.params, state.opt_state, opt_state)
    finite = (is_finite(norm) & is_finite(verdict) & _fits_float16(form, deltas)) | nothing
    halted = _halted(state)
    rates = _rates(opt_state)
    usable = _all_usable(rates, finite)
    applied = finite & usable & ~nothing & ~halted
    params = optim.apply_updates(state.params, deltas)
    params = unused_parameters.skip(skipped, state.params, state.params, params)
    average = spec.average.update(state.ema, params, buffers, state.updates)
    kept = _either(applied, (params, opt_state, average), (state.params, state.opt_state, state.ema), state=state)
    attempted = usable & ~nothing & ~halted
    scaler = tree.where(attempted, spec.scaler.update(state.scaler, finite), state.scaler)
    new = state._replace(
        updates=state.updates + applied,
        params=kept[0],
        opt_state=kept[1],
        ema=kept[2],
        scaler=scaler,
        halted=_halt(spec, state, finite, scaler, usable),
    )
    return new, _update_metrics(state, rates, norm, applied, finite & ~halted)


def _updates(spec: Spec, form: Form, state: TrainState, grads: Params) -> tuple[Tensor, Params, Tree]:
    """The gradients' norm, the updates and the optimizer state. With several processes, of all their pieces."""
    if form.exchange is None:
        norm, result = optim.global_norm(grads), spec.tx.update(grads, state.opt_state, state.params)
    else:
        norm = (form.exchange.norm or optim.global_norm)(grads)
        result = form.exchange.update(spec.tx.update, grads, state.opt_state, state.params, norm)
    return norm, *_of_transform(result, state.params)


def _unscaled(grads: Params, scale: Tensor) -> Params:
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


def _fits_float16(form: Form, deltas: Params) -> Tensor:
    """True if updates of float16 parameters are in range: a finite gradient over a tiny eps can overflow."""
    half = {name: delta for name, delta in deltas.items() if delta.dtype == torch.float16 and delta.numel()}
    if not half:
        return torch.ones((), dtype=torch.bool, device=next(iter(deltas.values())).device)
    # Not isfinite in float16: compiled code may keep the update in float32. Comparisons with nan are False.
    fits = torch.stack([delta.float().abs().amax() < _OVERFLOW for delta in half.values()]).all()
    if form.exchange is None or form.exchange.norm is None:
        return fits
    return form.exchange.total((~fits).float()) == 0


def _all_usable(rates: dict[str, Tensor], like: Tensor) -> Tensor:
    """True if every learning rate is valid; a schedule may return any value, computed on the device."""
    found = [_usable(rate) for rate in rates.values()]
    return functools.reduce(torch.logical_and, found) if found else torch.ones_like(like)


def _usable(rate: Tensor) -> Tensor:
    """True if a learning rate is in [0, inf): the square root of a negative number is nan, and nan < inf is False."""
    return rate.sqrt() < torch.inf


def _halted(state: TrainState) -> Tensor:
    if isinstance(state.halted, Empty):
        return torch.zeros((), dtype=torch.bool, device=state.step.device)
    return state.halted != 0


def _halt(spec: Spec, state: TrainState, finite: Tensor, scaler: Tree, usable: Tensor) -> Tree:
    if isinstance(state.halted, Empty):
        return state.halted
    stops = (spec.scaler.exhausted(scaler, finite) | ~usable) & (state.halted == 0)
    return torch.where(stops, state.step + 1, state.halted)


def _update_metrics(
    state: TrainState, rates: dict[str, Tensor], norm: Tensor, applied: Tensor, finite: Tensor
) -> Metrics:
    one = torch.ones((), dtype=torch.float32, device=state.step.device)
    counted = applied.float()
    metrics = {
        "lr": _first_rate(rates, counted),
        "grad_norm": finite_mean(torch.where(applied, norm, torch.zeros_like(norm)), counted),
        "applied": Mean(counted, one),
        "finite": Mean(finite.float(), one),
    }
    metrics |= {name: _reported(rate, counted) for name, rate in _group_rates(rates).items()}
    if not isinstance(state.scaler, Empty):
        metrics["scale"] = Mean(state.scaler.scale, one)  # the scale of this update
    return metrics


def _reported(rate: Tensor, counted: Tensor) -> Mean:
    """The rate of an applied update. An invalid rate becomes a total with weight 0: no mean counts it, and the host can
    report it."""
    return Mean(torch.where(_usable(rate), rate * counted, rate), counted)


def _first_rate(rates: dict[str, Tensor], counted: Tensor) -> Mean:
    if not rates:
        return Mean(torch.where(counted > 0, torch.nan, counted), counted)
    return _reported(next(iter(rates.values())), counted)


def _group_rates(rates: dict[str, Tensor]) -> dict[str, Tensor]:
    """``lr/<group>`` for every parameter group, if there are several."""
    found = {name: rate for name, rate in rates.items() if name != "learning_rate"}
    if len(found) < 2:
        return {}
    return {f"lr/{name.rpartition('/')[0]}": rate for name, rate in found.items()}


def _rates(opt_state: Tree) -> dict[str, Tensor]:
    found = optim.hyperparams(opt_state)
    return {name: rate.float() for name, rate in found.items() if name.rpartition("/")[2] == "learning_rate"}


def _count_call(old: TrainState, new: TrainState) -> TrainState:
    step = torch.where(_halted(old), old.step, old.step + 1)
    return new._replace(step=step, key=old.key if tracing.in_graph() else rng.advance(old.key))
