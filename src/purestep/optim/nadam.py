"""NAdam: Adam with Nesterov momentum that warms up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Params
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain
from .complex_params import on_pairs
from .counts import zero_count
from .numerics import (
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


class ScaleByNadamState(NamedTuple):
    """State of `scale_by_nadam`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu_product: Tensor  # shape=(), dtype=float32: product of all momentum coefficients so far
    mu: Params  # name -> P: running mean of gradients
    nu: Params  # name -> P: running mean of their squares


@known_keywords
def scale_by_nadam(
    b1: Decay = 0.9, b2: Decay = 0.999, *, eps: NonNegative = 1e-8, momentum_decay: NonNegative = 4e-3
) -> Transform:
    r"""Adam's direction with Nesterov momentum that warms up, as in `torch.optim.NAdam`.

    Example:
        >>> params = {"w": torch.ones(2)}
        >>> tx = scale_by_nadam()
        >>> tx.init(params).mu_product.item()
        1.0

    .. math:: \left( \frac{(1 - \mu_t) g_t}{1 - \pi_t} + \frac{\mu_{t+1} m_t}{1 - \pi_{t+1}} \right)
        / (\sqrt{\hat v_t} + \epsilon), \quad
        \mu_t = \beta_1 (1 - 0.96^{t \psi} / 2), \quad \pi_t = \prod_{i \le t} \mu_i

    The arguments are those of `nadam`.

    References:
        Dozat, 2016, Incorporating Nesterov Momentum into Adam.
    """

    def init(params: Params) -> ScaleByNadamState:
        step = zero_count(params)
        return ScaleByNadamState(
            step, torch.ones_like(step, dtype=torch.float32), zeros_like(params), zeros_like_squares(params)
        )

    def update(updates: Params, state: ScaleByNadamState, params: Params) -> tuple[Params, ScaleByNadamState]:
        del params  # Depends on the gradients only.
        step, dtype = state.step + 1, exact_dtype(updates)
        now = b1 * (1 - 0.5 * torch.pow(0.96, step.to(dtype) * momentum_decay))
        following = b1 * (1 - 0.5 * torch.pow(0.96, (step + 1).to(dtype) * momentum_decay))
        product = state.mu_product * now.float()
        gradient_weight = (1 - now) / (1 - product.to(dtype))
        mean_weight = following / (1 - product.to(dtype) * following)
        root_weight = complement_power(b2, step, dtype).sqrt()
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        new: Params = {}
        for name, g in updates.items():
            ahead = multiply(upcast(g), gradient_weight) + multiply(upcast(mu[name]), mean_weight)
            new[name] = (ahead / (divide(safe_sqrt(nu[name]), root_weight) + eps)).to(g.dtype)
        return new, ScaleByNadamState(step, product, mu, nu)

    return on_pairs(Transform(init, update))


@known_keywords
def nadam(
    learning_rate: Rate = 2e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    momentum_decay: NonNegative = 4e-3,
    weight_decay: NonNegative = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Mask | None = None,
) -> Transform:
    r"""Adam with Nesterov momentum, as `torch.optim.NAdam`; the direction is that of `scale_by_nadam`.

    Example:
        >>> import torch
        >>> tx = nadam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1056

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        momentum_decay: :math:`\psi`, the rate at which the momentum warms up, in [0, inf).
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient, unless decoupled.
        decoupled_weight_decay: add the decay after the moments, as AdamW does.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Dozat, 2016, Incorporating Nesterov Momentum into Adam.
    """
    decay = decay_parts(weight_decay, mask)
    direction = scale_by_nadam(b1, b2, eps=eps, momentum_decay=momentum_decay)
    parts = [direction, *decay] if decoupled_weight_decay else [*decay, direction]
    return chain(*parts, scale_by_learning_rate(learning_rate))
