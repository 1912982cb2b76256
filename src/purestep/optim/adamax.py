"""Adamax: Adam in the infinity norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import Decay, NonNegative, Rate, Scalar
from .base import Transform, chain
from .complex_params import on_pairs
from .counts import bias_corrections, no_updates
from .numerics import by_name, divide, lerp, multiply, upcast, zeros_like, zeros_like_squares
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByAdamaxState(NamedTuple):
    """State of `scale_by_adamax`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu: Params  # name -> P: running mean of gradients
    nu: Params  # name -> P: decaying maximum of their magnitudes
    missed: Tree = Empty()  # see `counts`


@known_keywords
def scale_by_adamax(b1: Decay = 0.9, b2: Decay = 0.999, *, eps: NonNegative = 1e-8) -> Transform:
    r"""Adam's direction with a decaying maximum instead of the root mean square, as in `torch.optim.Adamax`.

    Example:
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx = scale_by_adamax()
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [1.0, -1.0]

    .. math:: \frac{m_t}{(1 - \beta_1^t) u_t}, \quad u_t = \max(\beta_2 u_{t-1}, |g_t| + \epsilon)

    The arguments are those of `adamax`.

    References:
        Kingma and Ba, 2015, Adam, section 7.1.
    """

    def init(params: Params) -> ScaleByAdamaxState:
        return ScaleByAdamaxState(**no_updates(params), mu=zeros_like(params), nu=zeros_like_squares(params))

    def update(updates: Params, state: ScaleByAdamaxState, params: Params) -> tuple[Params, ScaleByAdamaxState]:
        del params  # Depends on the gradients only.
        state = state._replace(step=state.step + 1)
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: _decay_max(state.nu[name], g, b2, eps) for name, g in updates.items()}
        weights = by_name(bias_corrections(state, updates, b1)[0], updates)
        new = {n: (divide(upcast(mu[n]), weights[n]) / upcast(nu[n])).to(g.dtype) for n, g in updates.items()}
        return new, state._replace(mu=mu, nu=nu)

    return on_pairs(Transform(init, update))


def _decay_max(peak: Tensor, update: Tensor, decay: Scalar, eps: Scalar) -> Tensor:
    return torch.maximum(multiply(upcast(peak), decay), upcast(update.abs()) + eps).to(peak.dtype)


@known_keywords
def adamax(
    learning_rate: Rate = 2e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Adam in the infinity norm, as `torch.optim.Adamax`; the direction is that of `scale_by_adamax`.

    Example:
        >>> import torch
        >>> tx = adamax(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the maximum, in [0, 1).
        eps: in [0, inf), added to each gradient's magnitude.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Kingma and Ba, 2015, Adam, section 7.1.
    """
    direction = scale_by_adamax(b1, b2, eps=eps)
    return chain(*decay_parts(weight_decay, mask), direction, scale_by_learning_rate(learning_rate))
