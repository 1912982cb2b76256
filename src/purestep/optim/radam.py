"""RAdam: Adam with a rectifier for early updates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import Decay, NonNegative, Rate, Scalar
from .base import Transform, chain
from .complex_params import on_pairs
from .counts import no_updates, update_counts
from .numerics import (
    by_name,
    complement_power,
    decay_square,
    divide,
    exact_dtype,
    lerp,
    multiply,
    safe_sqrt,
    upcast,
    zeros_like,
    zeros_like_squares,
)
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByRadamState(NamedTuple):
    """State of `scale_by_radam`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu: Params  # name -> P: running mean of gradients
    nu: Params  # name -> P: running mean of their squares
    missed: Tree = Empty()  # see `counts`


@known_keywords
def scale_by_radam(b1: Decay = 0.9, b2: Decay = 0.999, *, eps: NonNegative = 1e-8) -> Transform:
    r"""Adam's direction with a rectifier for early updates, as `torch.optim.RAdam`.

    The variance of :math:`v` is large in early updates.

    Example:
        >>> params = {"w": torch.tensor([3.0])}
        >>> tx = scale_by_radam()
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)  # not yet adaptive
        3.0

    With :math:`\rho_t = \rho_\infty - 2 t \beta_2^t / (1 - \beta_2^t)`: :math:`\hat m_t` where
    :math:`\rho_t \le 5`, else :math:`r_t \hat m_t \sqrt{1 - \beta_2^t} / (\sqrt{v_t} + \epsilon)`.

    The arguments are those of `radam`.

    References:
        Liu et al., 2020, On the Variance of the Adaptive Learning Rate and Beyond.
    """

    def init(params: Params) -> ScaleByRadamState:
        return ScaleByRadamState(**no_updates(params), mu=zeros_like(params), nu=zeros_like_squares(params))

    def update(updates: Params, state: ScaleByRadamState, params: Params) -> tuple[Params, ScaleByRadamState]:
        del params  # Depends on the gradients only.
        state, dtype = state._replace(step=state.step + 1), exact_dtype(updates)
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        counts = update_counts(state, updates)
        mean_weight, square_weight = complement_power(b1, counts, dtype), complement_power(b2, counts, dtype)
        is_adaptive, rectifier = _rectifier(counts.to(dtype), b2, square_weight)
        mean_weights, adaptive = by_name(mean_weight, updates), by_name(is_adaptive, updates)
        factors = by_name(rectifier * square_weight.sqrt(), updates)
        new: Params = {}
        for name, g in updates.items():
            mean, divisor = divide(upcast(mu[name]), mean_weights[name]), safe_sqrt(nu[name]) + eps
            new[name] = torch.where(adaptive[name], multiply(mean, factors[name]) / divisor, mean).to(g.dtype)
        return new, state._replace(mu=mu, nu=nu)

    return on_pairs(Transform(init, update))


def _rectifier(step: Tensor, b2: Scalar, square_weight: Tensor) -> tuple[Tensor, Tensor]:
    last = 2 / (1 - b2) - 1
    rho = last - 2 * step * (1 - square_weight) / square_weight
    is_adaptive = rho > 5
    # Below the threshold the radicand may be negative; the result is not used there.
    rho = torch.where(is_adaptive, rho, 5.0)
    return is_adaptive, ((rho - 4) * (rho - 2) * last / ((last - 4) * (last - 2) * rho)).sqrt()


@known_keywords
def radam(
    learning_rate: Rate = 1e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Mask | None = None,
) -> Transform:
    r"""Rectified Adam, as `torch.optim.RAdam`; the direction is that of `scale_by_radam`.

    Example:
        >>> import torch
        >>> tx = radam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), added before the bias correction.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient, unless decoupled.
        decoupled_weight_decay: add the decay after the moments, as AdamW does.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Liu et al., 2020, On the Variance of the Adaptive Learning Rate and Beyond.
    """
    direction, decay = scale_by_radam(b1, b2, eps=eps), decay_parts(weight_decay, mask)
    parts = [direction, *decay] if decoupled_weight_decay else [*decay, direction]
    return chain(*parts, scale_by_learning_rate(learning_rate))
