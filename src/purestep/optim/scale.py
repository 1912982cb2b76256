"""The plain parts: a factor, the learning rate, weight decay, momentum."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..pickling import recipe
from ..types import Empty, Params, Tree
from .base import Transform, require, require_rate, stateless
from .numerics import (
    Rate,
    Scalar,
    each,
    is_on,
    none_missed,
    own_count,
    rate_at,
    scalar_dtype,
    times,
    wide,
    zero_count,
    zeros_like,
)
from .wrappers import Mask, masked


@recipe
def scale(factor: Scalar) -> Transform:
    """Updates times a number; ``chain(scale(-1.0), ...)`` maximizes.

    Args:
        factor: finite.

    Raises:
        ConfigError: for another value; a schedule is for `inject`.

    Example:
        >>> scale(0.5).update({"w": torch.ones(1)}, Empty(), {})[0]["w"].item()
        0.5
    """
    require("scale", low=-math.inf, factor=factor)

    def fn(updates: Params, params: Params) -> Params:
        del params  # A constant factor.
        return {name: times(u, factor) for name, u in updates.items()}

    return stateless(fn, elementwise=True)


class ScaleByLearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    learning_rate: Tensor  # shape=(), dtype=float32: of the last update, for reports; at init that of the first


@recipe
def scale_by_learning_rate(learning_rate: Rate) -> Transform:
    """Updates times ``-learning_rate``: the last part of every named optimizer, which turns directions into descent.

    Args:
        learning_rate: in [0, inf): a number, a 0-d tensor, or a schedule of the count of updates done, so that the
            first update sees ``schedule(0)``.

    Raises:
        ConfigError: for a number out of range, or one of torch's schedulers.

    Example:
        >>> tx = scale_by_learning_rate(lambda count: 1.0 / (count + 1))
        >>> params = {"w": torch.ones(1)}
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        >>> updates["w"].item(), state.step.item(), state.learning_rate.item()
        (-0.5, 2, 0.5)
    """
    require_rate("scale_by_learning_rate", learning_rate)

    def init(params: Params) -> ScaleByLearningRateState:
        count = zero_count(params)
        return ScaleByLearningRateState(count, reported(rate_at(learning_rate, count), count))

    def update(
        updates: Params, state: ScaleByLearningRateState, params: Params
    ) -> tuple[Params, ScaleByLearningRateState]:
        del params  # The rate depends on the count alone.
        rate = rate_at(learning_rate, state.step)
        scaled = {name: times(u, -rate) for name, u in updates.items()}
        return scaled, ScaleByLearningRateState(state.step + 1, reported(rate, state.step))

    return Transform(init, update)


def reported(rate: Scalar, count: Tensor) -> Tensor:
    """The rate as a float32 leaf of its own on the counter's device. shape=()."""
    if isinstance(rate, Tensor):
        return rate.detach().to(device=count.device, dtype=torch.float32, copy=True)
    return torch.full((), rate, dtype=torch.float32, device=count.device)


@recipe
def add_decayed_weights(weight_decay: Scalar, *, mask: Mask | None = None) -> Transform:
    """``updates + weight_decay * params``.

    Before the moments it is torch's coupled weight decay (an L2 penalty), after them the decoupled one of AdamW.

    Args:
        weight_decay: in [0, inf).
        mask: which parameters decay, as in `masked`; None: all. See `decay_mask`.

    Raises:
        ConfigError: for numbers out of range; at init, for a mask that does not fit, as in `masked`.
        StateError: at update with a mask, for a state of other parameters.

    References:
        Loshchilov and Hutter, 2019, Decoupled Weight Decay Regularization.

    Example:
        >>> params = {"w": torch.full((1,), 2.0)}
        >>> add_decayed_weights(0.1).update({"w": torch.ones(1)}, Empty(), params)[0]["w"].item()
        1.2000000476837158
    """
    require("add_decayed_weights", weight_decay=weight_decay)

    def decay(updates: Params, params: Params) -> Params:
        return {name: _add_scaled(u, params[name], weight_decay) for name, u in updates.items()}

    inner = stateless(decay, elementwise=True)
    return inner if mask is None else masked(inner, mask)


def _add_scaled(update: Tensor, param: Tensor, factor: Scalar) -> Tensor:
    if isinstance(factor, Tensor):
        return (wide(update) + times(wide(param), factor)).to(update.dtype)
    return torch.add(update, param, alpha=factor).to(update.dtype)


def decay_parts(weight_decay: Scalar, mask: Mask | None) -> list[Transform]:
    """The part of a chain that decays weights, or nothing where the decay is the number 0."""
    return [add_decayed_weights(weight_decay, mask=mask)] if is_on(weight_decay) else []


class TraceState(NamedTuple):
    """State of `trace`."""

    step: Tree  # shape=(), dtype=int64: updates done; Empty without dampening
    trace: Params  # name -> P: the decaying sum of updates
    missed: Tree = Empty()  # with dampening: of the updates, those that a parameter had no gradient in


@recipe
def trace(
    decay: Scalar, *, nesterov: bool = False, dampening: Scalar = 0.0, accumulator_dtype: torch.dtype | None = None
) -> Transform:
    """Momentum: ``b = decay * b + (1 - dampening) * g``, and ``b``, or ``g + decay * b`` with Nesterov.

    As in `torch.optim.SGD`, the first gradient is not dampened.

    Args:
        decay: in [0, inf); 0.9 is usual.
        nesterov: looks ahead by one step; needs ``dampening=0``.
        dampening: how much of each new gradient is left out, in [0, inf).
        accumulator_dtype: of the sum; None: the parameter's.

    Raises:
        ConfigError: for numbers out of range, or Nesterov momentum that is dampened.

    Example:
        >>> tx = trace(0.5)
        >>> params = {"w": torch.ones(1)}
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> tx.update(params, state, params)[0]["w"].item()
        1.5
    """
    require("trace", decay=decay, dampening=dampening)
    if nesterov and not isinstance(dampening, Tensor) and dampening != 0:
        raise ConfigError(f"nesterov with dampening={dampening}", where="trace", hint="dampening=0.0")
    is_dampened = isinstance(dampening, Tensor) or dampening != 0

    def init(params: Params) -> TraceState:
        total = zeros_like(params, accumulator_dtype)
        return TraceState(zero_count(params), total, none_missed(params)) if is_dampened else TraceState(Empty(), total)

    def update(updates: Params, state: TraceState, params: Params) -> tuple[Params, TraceState]:
        del params  # A sum of gradients alone.
        kept: dict[str, Any] = dict.fromkeys(updates, 1.0)
        if is_dampened:
            later = own_count(state.step, state.missed, updates) > 0
            kept = each(1.0 - later.to(scalar_dtype(updates)) * dampening, updates)
        new = {name: _accumulate(state.trace[name], u, decay, kept[name]) for name, u in updates.items()}
        ahead = {name: _add_scaled(u, new[name], decay) for name, u in updates.items()} if nesterov else new
        step = state.step + 1 if is_dampened else state.step
        return {name: ahead[name].to(u.dtype) for name, u in updates.items()}, TraceState(step, new, state.missed)

    return Transform(init, update)


def _accumulate(total: Tensor, update: Tensor, decay: Scalar, kept: Scalar) -> Tensor:
    dtype = torch.promote_types(total.dtype, update.dtype)
    return (times(total.to(dtype), decay) + times(update.to(dtype), kept)).to(total.dtype)
