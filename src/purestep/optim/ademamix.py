"""AdEMAMix: AdamW with a second, slow mean of gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain
from .complex_params import real_only
from .counts import bias_corrections, no_updates
from .numerics import (
    adam_quotients,
    add_scaled,
    by_name,
    decay_square,
    divide,
    lerp,
    upcast,
    zeros_like,
    zeros_like_squares,
)
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByAdemamixState(NamedTuple):
    """State of `scale_by_ademamix`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu: Params  # name -> P: fast mean of gradients
    mu_slow: Params  # name -> P: slow mean of gradients
    nu: Params  # name -> P: mean of their squares
    missed: Tree = Empty()  # see `counts`


@known_keywords
def scale_by_ademamix(
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    b3: Decay = 0.9999,
    alpha: NonNegative = 5.0,
    *,
    eps: NonNegative = 1e-8,
    mu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Adam's direction with a second, slow mean of gradients in the numerator.

    Example:
        >>> tx = scale_by_ademamix(alpha=0.0, eps=0.0)
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [1.0, -1.0]

    .. math:: \frac{m_t / (1 - \beta_1^t) + \alpha n_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    The arguments are those of `ademamix`.

    References:
        Pagliardini et al., 2024, The AdEMAMix Optimizer: Better, Faster, Older.
    """

    def init(params: Params) -> ScaleByAdemamixState:
        mu, slow = zeros_like(params, mu_dtype), zeros_like(params, mu_dtype)
        return ScaleByAdemamixState(**no_updates(params), mu=mu, mu_slow=slow, nu=zeros_like_squares(params))

    def update(updates: Params, state: ScaleByAdemamixState, params: Params) -> tuple[Params, ScaleByAdemamixState]:
        del params  # Depends on the gradients only.
        state = state._replace(step=state.step + 1)
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        slow = {name: lerp(state.mu_slow[name], g, 1 - b3) for name, g in updates.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        mean_weight, square_weight = bias_corrections(state, updates, b1, b2)
        root_weight, weights = square_weight.sqrt(), by_name(mean_weight, updates)
        mixed = {
            name: add_scaled(divide(upcast(m), weights[name]), upcast(slow[name]), alpha) for name, m in mu.items()
        }
        new = adam_quotients(updates, mixed, nu, torch.ones_like(root_weight), root_weight, eps)
        return new, state._replace(mu=mu, mu_slow=slow, nu=nu)

    return real_only(Transform(init, update), "ademamix")


@known_keywords
def ademamix(
    learning_rate: Rate = 1e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    b3: Decay = 0.9999,
    alpha: NonNegative = 5.0,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
    mu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""AdEMAMix, as `optax.contrib.ademamix`: AdamW whose momentum has a second, slow mean of old gradients.

    Example:
        >>> tx = ademamix(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    .. math:: \theta_t = \theta_{t-1} - \gamma \left( \frac{\hat m_t + \alpha n_t}{\sqrt{\hat v_t} + \epsilon}
        + \lambda \theta_{t-1} \right)

    The paper warms up :math:`\alpha` and :math:`\beta_3`, which runs with large values need to be stable:
    ``optim.inject(optim.ademamix)(..., alpha=schedule, b3=schedule)``. The slow mean uses gradients of the last
    :math:`1 / (1 - \beta_3)` updates, so short runs want a smaller ``b3``, such as 0.999.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the fast mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        b3: decay of the slow mean, in [0, 1). It has no bias correction, so it grows slowly.
        alpha: :math:`\alpha`, the weight of the slow mean, in [0, inf).
        eps: in [0, inf), outside the root.
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        mask: the parameters that decay, as in `masked`; None: all.
        mu_dtype: dtype of both means; None: each parameter's.

    References:
        Pagliardini et al., 2024, The AdEMAMix Optimizer: Better, Faster, Older.
    """
    direction = scale_by_ademamix(b1, b2, b3, alpha, eps=eps, mu_dtype=mu_dtype)
    return chain(direction, *decay_parts(weight_decay, mask), scale_by_learning_rate(learning_rate))
