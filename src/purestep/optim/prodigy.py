"""Prodigy: AdamW that estimates its learning rate."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Params, Tree
from .arguments import Decay, NonNegative, Rate, within
from .base import Norms, Transform, chain, described, identity, norm_of, unknown
from .complex_params import real_only
from .counts import zero_count
from .numerics import (
    add_scaled,
    complement_power,
    decay_square,
    lerp,
    multiply,
    rate_at,
    safe_sqrt,
    scalar_dtype,
    upcast,
    zeros_like,
    zeros_like_squares,
)
from .scale import decay_parts, rate_leaf
from .wrappers import Mask


class ProdigyState(NamedTuple):
    """State of `prodigy`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    learning_rate: Tensor  # shape=(), dtype=float32: of the last update, times the estimate, for logging
    estim_lr: Tensor  # shape=(), dtype=float32: the estimate d
    numerator: Tensor  # shape=(), dtype=float32: of the next estimate
    mu: Params  # name -> P: running mean of d x gradients
    nu: Params  # name -> P: running mean of their squares
    grad_sum: Params  # name -> P: decayed sum of weighted gradients
    start: Params  # name -> P: the initial weights
    inner: Tree  # of the weight decay


@known_keywords
def prodigy(
    learning_rate: Rate = 1.0,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    b3: Decay | None = None,
    eps: NonNegative = 1e-8,
    *,
    estim_lr0: Annotated[float, within(ends="()")] = 1e-6,
    estim_lr_coef: NonNegative = 1.0,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
    safeguard_warmup: bool = False,
) -> Transform:
    r"""Prodigy, as `optax.contrib.prodigy`: AdamW that estimates its learning rate.

    Example:
        >>> tx, params = prodigy(), {"w": torch.ones(1)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> f"{updates['w'].item():.1e}"
        '-1.0e-06'

    The estimate :math:`d` never falls. With the gradients :math:`g_t` at :math:`\theta_t`, the inner products over all
    parameters of this transform, and :math:`\gamma_t = \gamma d_t \sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`:

    .. math:: r_t = \beta_3 r_{t-1} + \gamma_t \frac{d_t}{d_0} \langle g_t, \theta_0 - \theta_t \rangle, \quad
        s_t = \beta_3 s_{t-1} + \gamma_t \frac{d_t}{d_0} g_t, \quad d_{t+1} = \max(d_t, c\, r_t / \|s_t\|_1)

    The step is :math:`-\gamma_t (m_t / (\sqrt{v_t} + d_{t+1} \epsilon) + \lambda \theta_t)`, with Adam's means of
    :math:`d_t g_t`. All parameters share one estimate. An update without a gradient counts for all parameters.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule whose peak is 1.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        b3: decay of the sums of the estimate, in [0, 1); None: the square root of ``b2``.
        eps: in [0, inf), outside the root.
        estim_lr0: :math:`d_0`, a float > 0, smaller than any good learning rate.
        estim_lr_coef: :math:`c` in [0, inf), a factor of the estimate.
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        mask: the parameters that decay, as in `masked`; None: all.
        safeguard_warmup: leave the learning rate out of :math:`s_t`, for schedules with a long warm-up.

    References:
        Mishchenko and Defazio, 2023, Prodigy: An Expeditiously Adaptive Parameter-Free Learner.
    """
    decay3 = b2**0.5 if b3 is None else b3
    decay = chain(identity(), *decay_parts(weight_decay, mask))

    def init(params: Params) -> ProdigyState:
        step = zero_count(params)
        return ProdigyState(
            step,
            rate_leaf(rate_at(learning_rate, step) * estim_lr0, step),
            rate_leaf(estim_lr0, step),
            rate_leaf(0.0, step),
            zeros_like(params),
            zeros_like_squares(params),
            zeros_like(params),
            {name: param.detach().clone() for name, param in params.items()},
            decay.init(params),
        )

    def update(
        updates: Params, state: ProdigyState, params: Params, norms: Norms | None = None
    ) -> tuple[Params, ProdigyState]:
        step, dtype = state.step + 1, scalar_dtype(updates)
        d = state.estim_lr.to(dtype)
        rate = d * rate_at(learning_rate, state.step)
        corrected = rate * complement_power(b2, step, dtype).sqrt() / complement_power(b1, step, dtype)
        gained = {name: upcast(g) * (upcast(state.start[name]) - upcast(params[name])) for name, g in updates.items()}
        scaled = {name: multiply(upcast(g), d) for name, g in updates.items()}
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in scaled.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in scaled.items()}
        weight = (d if safeguard_warmup else corrected) / estim_lr0
        grad_sum = {name: add_scaled(multiply(state.grad_sum[name], decay3), g, weight) for name, g in scaled.items()}
        numerator = decay3 * state.numerator.to(dtype) + d / estim_lr0 * corrected * _sum(gained, norms)
        size = _sum_of_positive({name: s.abs() for name, s in grad_sum.items()}, norms)
        estimate = estim_lr_coef * numerator / torch.where(size > 0, size, torch.ones_like(size))
        new_d = torch.maximum(d, torch.where(size > 0, estimate, torch.zeros_like(estimate)))
        directions = {
            name: (upcast(mu[name]) / (safe_sqrt(nu[name]) + (new_d * eps).to(upcast(nu[name]).dtype))).to(g.dtype)
            for name, g in updates.items()
        }
        decayed, inner = decay.update(directions, state.inner, params)
        new = {name: multiply(u, -corrected) for name, u in decayed.items()}
        used, d_leaf, r_leaf = (rate_leaf(value, step) for value in (rate, new_d, numerator))
        return new, ProdigyState(step, used, d_leaf, r_leaf, mu, nu, grad_sum, state.start, inner)

    whole = Transform(init, update, labels=decay.labels)
    return described(real_only(whole, "prodigy"), "prodigy", takes_norms=True)


def _sum(values: Params, norms: Norms | None) -> Tensor:
    """The sum of all numbers, shape=()."""
    positive = _sum_of_positive({name: value.clamp(min=0) for name, value in values.items()}, norms)
    return positive - _sum_of_positive({name: (-value).clamp(min=0) for name, value in values.items()}, norms)


def _sum_of_positive(values: Params, norms: Norms | None) -> Tensor:
    """The sum of numbers that are not negative, shape=(). By a norm, which also sums over several processes."""
    return norm_of({name: safe_sqrt(value) for name, value in values.items()}, unknown(norms)).square()
