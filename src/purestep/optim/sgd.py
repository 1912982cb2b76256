"""SGD, with and without momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import NonNegative, Rate, Scalar
from .base import Transform, chain, described
from .counts import no_updates, update_counts
from .numerics import add_scaled, by_name, is_enabled, multiply, scalar_dtype, zeros_like
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class TraceState(NamedTuple):
    """State of `trace`."""

    step: Tree  # shape=(), dtype=int64: updates done; Empty without dampening
    trace: Params  # name -> P: the decaying sum of updates
    missed: Tree = Empty()  # see `counts`


@known_keywords
def trace(
    decay: NonNegative,
    *,
    nesterov: bool = False,
    dampening: NonNegative = 0.0,
    accumulator_dtype: torch.dtype | None = None,
) -> Transform:
    """Momentum: ``b = decay * b + (1 - dampening) * g``; the update is ``b``, or ``g + decay * b`` with Nesterov.

    Example:
        >>> tx = trace(0.5)
        >>> params = {"w": torch.ones(1)}
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> tx.update(params, state, params)[0]["w"].item()
        1.5

    As in `torch.optim.SGD`, the first gradient is not dampened.

    Args:
        decay: in [0, inf); 0.9 is usual.
        nesterov: use Nesterov momentum; needs ``dampening=0``.
        dampening: the share of each new gradient that is left out, in [0, inf).
        accumulator_dtype: dtype of the sum; None: each parameter's.

    Raises:
        ConfigError: Nesterov momentum is combined with dampening.
    """
    if nesterov and not isinstance(dampening, Tensor) and dampening != 0:
        raise ConfigError(f"nesterov=True needs dampening=0, not {dampening}", where="trace", hint="dampening=0.0")
    is_dampened = is_enabled(dampening)

    def init(params: Params) -> TraceState:
        total = zeros_like(params, accumulator_dtype)
        return TraceState(**no_updates(params), trace=total) if is_dampened else TraceState(Empty(), total)

    def update(updates: Params, state: TraceState, params: Params) -> tuple[Params, TraceState]:
        del params  # Depends on the gradients only.
        kept: dict[str, Any] = dict.fromkeys(updates, 1.0)
        if is_dampened:
            later = update_counts(state, updates) > 0
            kept = by_name(1.0 - later.to(scalar_dtype(updates)) * dampening, updates)
        new = {name: _accumulate(state.trace[name], u, decay, kept[name]) for name, u in updates.items()}
        ahead = {name: add_scaled(u, new[name], decay) for name, u in updates.items()} if nesterov else new
        step = state.step + 1 if is_dampened else state.step
        return {name: ahead[name].to(u.dtype) for name, u in updates.items()}, state._replace(step=step, trace=new)

    tx = Transform(init, update)
    return tx if is_dampened else described(tx, "trace", momentum=decay, nesterov=nesterov)


def _accumulate(total: Tensor, update: Tensor, decay: Scalar, kept: Scalar) -> Tensor:
    dtype = torch.promote_types(total.dtype, update.dtype)
    return (multiply(total.to(dtype), decay) + multiply(update.to(dtype), kept)).to(total.dtype)


@known_keywords
def sgd(
    learning_rate: Rate = 1e-3,
    momentum: NonNegative = 0.0,
    nesterov: bool = False,
    *,
    dampening: NonNegative = 0.0,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Stochastic gradient descent, as `torch.optim.SGD`: :math:`\theta_t = \theta_{t-1} - \gamma b_t`.

    Example:
        >>> tx = sgd(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        momentum: in [0, inf): :math:`b_t = \mu b_{t-1} + (1 - \tau) g_t`; 0: :math:`b_t = g_t`.
        nesterov: step along :math:`g_t + \mu b_t`; needs momentum and no dampening.
        dampening: :math:`\tau` in [0, inf), for all gradients but the first.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient.
        mask: the parameters that decay, as in `masked`; None: all.

    Raises:
        ConfigError: Nesterov is combined with no momentum or with dampening.

    References:
        Sutskever et al., 2013, On the importance of initialization and momentum in deep learning.
    """
    if nesterov and not is_enabled(momentum):
        raise ConfigError("nesterov=True needs momentum", where="sgd", hint="momentum=0.9")
    if nesterov and not isinstance(dampening, torch.Tensor) and dampening != 0:
        raise ConfigError(f"nesterov=True needs dampening=0, not {dampening}", where="sgd", hint="dampening=0.0")
    velocity = [trace(momentum, nesterov=nesterov, dampening=dampening)] if is_enabled(momentum) else []
    return chain(*decay_parts(weight_decay, mask), *velocity, scale_by_learning_rate(learning_rate))
