"""The accumulation window: add a micro-batch, and apply the update of a window that is full.

A loss that is not finite makes the window's weight nan. So the whole window is refused, at the call that closes it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .. import optim, tree
from ..torch_ext import is_finite, tracing
from ..types import Empty, Form, Mean, Metrics, Params, TrainState
from . import exchange
from .gradient import kept_buffers
from .spec import Accum, Adding, Closing, Micro, Spec
from .update import apply, group_rates, kept_if_halted, rates_of, weight_or_nan


def accumulate(spec: Spec, form: Form, state: TrainState, micro: Micro) -> tuple[TrainState, Micro, Metrics]:
    """Add to the window, and close it after its last micro-batch. Returns the micro-batch of all processes."""
    old, unreached = cast(Accum, state.accum), micro.unreached
    form.unreached(unreached)  # the same check for every micro-batch
    verdict = weight_or_nan(micro)
    added = exchange.weighted(micro.grads, micro.grad_weight)
    finite = is_finite(optim.global_norm(micro.grads)) if micro.buffers and form.exchange is None else None
    if form.exchange is not None:
        micro, verdict, _, finite = exchange.joined(
            spec, form, state.buffers, micro, verdict, checks_gradients=bool(micro.buffers)
        )
        added = added if form.exchange.once else form.exchange.reduce(added)
    accum = Accum(old.left - 1, old.weight + verdict, {name: old.grads[name] + grad for name, grad in added.items()})
    state = _with_buffers(state, micro, finite)
    reads = tracing.may_branch(old.left)  # on other devices the host would wait
    if isinstance(old, Adding) or (reads and type(old) is Accum and int(old.left) != 1):
        new, metrics = _keep_open(state, accum)
    elif isinstance(old, Closing) or reads:
        new, metrics = close(spec, form, state, accum, unreached)
    else:  # the window position is unknown to the host: compute both results, select one
        opened, closed = _keep_open(state, accum), close(spec, form, state, accum, unreached)
        new, metrics = tree.where(old.left == 1, closed, opened)
    return new, micro, metrics


def _with_buffers(state: TrainState, micro: Micro, finite: Tensor | None) -> TrainState:
    """Set this micro-batch's buffers, unless its loss or gradients are not finite or its weight is 0."""
    if not micro.buffers or finite is None:
        return state
    counted = finite & is_finite(micro.mean) & (micro.weight != 0)
    if not isinstance(state.halted, Empty):
        counted = counted & (state.halted == 0)
    return state._replace(buffers=kept_buffers(state.buffers, micro, counted))


def _keep_open(state: TrainState, accum: Accum) -> tuple[TrainState, Metrics]:
    zero = torch.zeros((), dtype=torch.float32, device=state.step.device)
    kept = kept_if_halted(state, accum, Accum(*cast(Accum, state.accum)))
    metrics = {"lr": Mean(zero, zero), "grad_norm": Mean(zero, zero), "applied": Mean(zero, torch.ones_like(zero))}
    metrics |= {name: Mean(zero, zero) for name in group_rates(rates_of(state.opt_state))}
    if not isinstance(state.scaler, Empty):
        metrics["scale"] = Mean(state.scaler.scale, torch.ones_like(zero))
    return state._replace(accum=kept), metrics


def close(
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
        summed = form.exchange.reduce(summed)
    flags = _nonzero(form, summed, set(stored.values()))
    reached = {name: flags[place] for name, place in stored.items()}
    grads = exchange.divided(state, summed, accum.weight)
    counted = torch.where(torch.isnan(accum.weight), torch.ones_like(accum.weight), accum.weight)
    new, metrics, _ = apply(spec, form, state, grads, counted, accum.weight, state.buffers, reached)
    left = torch.full_like(accum.left, spec.accumulate)
    empty = Accum(left, torch.zeros_like(accum.weight), tree.map(torch.zeros_like, accum.grads))
    return new._replace(accum=kept_if_halted(state, empty, Accum(*cast(Accum, state.accum)))), metrics


def _nonzero(form: Form, grads: Params, names: set[str]) -> dict[str, Tensor]:
    """For these stored names, True if the whole gradient has a number other than 0. If several processes hold pieces,
    each contributes all of its names: which ones a process asks for may differ."""
    if form.exchange is None or form.exchange.norm is None:
        return {name: grads[name].ne(0).any() for name in sorted(names)}
    found = form.exchange.total(torch.stack([grad.ne(0).any().float() for grad in grads.values()]))
    return {name: flag > 0 for name, flag in zip(grads, found.unbind(), strict=True) if name in names}
