"""Directions from running means of gradients and of their squares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..types import Empty, Params, Tree
from .base import Scalar, Transform, complement_power, lerp, require, scalar_dtype, times, wide, zero_count, zeros_like


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu: Params  # name -> P: running mean of gradients
    nu: Params  # name -> P: running mean of their squares
    nu_max: Tree  # name -> P: the greatest nu so far; Empty without amsgrad


def scale_by_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    *,
    eps: Scalar = 1e-8,
    amsgrad: bool = False,
    mu_dtype: torch.dtype | None = None,
    nu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Adam's direction, :math:`\frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}`.

    Args:
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean of squares, in [0, 1).
        eps: in [0, inf), outside the root, as in torch.
        amsgrad: divide by the greatest :math:`v` so far.
        mu_dtype: of the mean; None: each parameter's.
        nu_dtype: of the mean of squares; None: each parameter's. In bfloat16 it stands still once it is near its
            value, since 1 - b2 is below the rounding.

    References:
        Kingma and Ba, 2015, Adam; Reddi et al., 2018, On the Convergence of Adam and Beyond.

    Example:
        >>> tx = scale_by_adam(eps=0.0)
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [1.0, -1.0]
    """
    require("adam", high=1.0, b1=b1, b2=b2)
    require("adam", eps=eps)

    def init(params: Params) -> ScaleByAdamState:
        nu_max = zeros_like(params, nu_dtype) if amsgrad else Empty()
        return ScaleByAdamState(zero_count(params), zeros_like(params, mu_dtype), zeros_like(params, nu_dtype), nu_max)

    def update(updates: Params, state: ScaleByAdamState, params: Params) -> tuple[Params, ScaleByAdamState]:
        del params  # A function of gradients alone.
        step = state.step + 1
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        nu_max = {name: torch.maximum(state.nu_max[name], nu[name]) for name in nu} if amsgrad else state.nu_max
        dtype = scalar_dtype(updates)
        mean_weight = complement_power(b1, step, dtype)
        root_weight = complement_power(b2, step, dtype).sqrt()
        under = nu_max if amsgrad else nu
        new = {
            name: adam_ratio(mu[name], under[name], mean_weight, root_weight, eps).to(g.dtype)
            for name, g in updates.items()
        }
        return new, ScaleByAdamState(step, mu, nu, nu_max)

    return Transform(init, update)


def decay_square(nu: Tensor, update: Tensor, decay: Scalar) -> Tensor:
    """``decay * nu + (1 - decay) * update ** 2`` in the dtype of ``nu``."""
    dtype = torch.promote_types(nu.dtype, update.dtype)
    old, new = nu.to(dtype), update.to(dtype)
    if isinstance(decay, Tensor):
        return (times(old, decay) + times(new * new, 1 - decay)).to(nu.dtype)
    return torch.addcmul(old * decay, new, new, value=1 - decay).to(nu.dtype)


def adam_ratio(mu: Tensor, nu: Tensor, mean_weight: Scalar, root_weight: Scalar, eps: Scalar) -> Tensor:
    """``(mu / mean_weight) / (sqrt(nu) / root_weight + eps)``, computed in at least float32."""
    mean, root = wide(mu), wide(nu).sqrt()
    return divided(mean, mean_weight) / (divided(root, root_weight) + eps)


def divided(leaf: Tensor, divisor: Scalar) -> Tensor:
    """``leaf / divisor`` without promotion by a 0-d divisor."""
    return leaf / (divisor.to(leaf.dtype) if isinstance(divisor, Tensor) else divisor)
