"""Lion: the sign of an interpolation between momentum and gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..state import known_keywords
from ..types import Params
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain
from .complex_params import real_only
from .numerics import lerp, zeros_like
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByLionState(NamedTuple):
    """State of `scale_by_lion`."""

    mu: Params  # name -> P: running mean of gradients


@known_keywords
def scale_by_lion(b1: Decay = 0.9, b2: Decay = 0.99, *, mu_dtype: torch.dtype | None = None) -> Transform:
    r"""The sign of momentum and gradient mixed, :math:`\operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t)`.

    Example:
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx = scale_by_lion()
        >>> tx.update(params, tx.init(params), params)[0]["w"].tolist()
        [1.0, -1.0]

    The arguments are those of `lion`.

    References:
        Chen et al., 2023, Symbolic Discovery of Optimization Algorithms.
    """

    def init(params: Params) -> ScaleByLionState:
        return ScaleByLionState(zeros_like(params, mu_dtype))

    def update(updates: Params, state: ScaleByLionState, params: Params) -> tuple[Params, ScaleByLionState]:
        del params  # Depends on the gradients only.
        new = {
            name: lerp(state.mu[name].to(torch.promote_types(state.mu[name].dtype, g.dtype)), g, 1 - b1)
            .sign()
            .to(g.dtype)
            for name, g in updates.items()
        }
        return new, ScaleByLionState({name: lerp(state.mu[name], g, 1 - b2) for name, g in updates.items()})

    return real_only(Transform(init, update), "lion")


@known_keywords
def lion(
    learning_rate: Rate = 1e-4,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    *,
    weight_decay: NonNegative = 1e-3,
    mask: Mask | None = None,
    mu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Lion, as `optax.lion`: a step along the sign of momentum. torch.optim has no Lion.

    Example:
        >>> tx = lion(0.1, weight_decay=0.0)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    .. math:: \theta_t = \theta_{t-1} - \gamma (s_t + \lambda \theta_{t-1}), \quad
        s_t = \operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t)

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule; usually a third to a tenth of AdamW's.
        b1: weight of the mean in the direction, in [0, 1).
        b2: decay of the mean of gradients, :math:`m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t`, in [0, 1).
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        mask: the parameters that decay, as in `masked`; None: all.
        mu_dtype: dtype of the mean; None: each parameter's.

    References:
        Chen et al., 2023, Symbolic Discovery of Optimization Algorithms.
    """
    direction = scale_by_lion(b1, b2, mu_dtype=mu_dtype)
    return chain(direction, *decay_parts(weight_decay, mask), scale_by_learning_rate(learning_rate))
