"""LAMB: AdamW with each layer's step scaled to the norm of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Params
from .adam import scale_by_adam
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain, stateless
from .complex_params import real_only
from .numerics import multiply, upcast
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


def scale_by_trust_ratio() -> Transform:
    r"""Multiply each parameter's update by the norm of the parameter over that of the update.

    The factor is :math:`\|\theta\| / \|u\|`, and 1 if either norm is 0.

    Example:
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> scale_by_trust_ratio().update({"w": torch.tensor([0.0, 2.0])}, (), params)[0]["w"].tolist()
        [0.0, 5.0]

    References:
        You et al., 2020, Large Batch Optimization for Deep Learning, algorithm 2 (LAMB).
    """

    def fn(updates: Params, params: Params) -> Params:
        return {name: multiply(u, _trust_ratio(upcast(params[name]), upcast(u))) for name, u in updates.items()}

    return real_only(stateless(fn, elementwise=False), "lamb")


def _trust_ratio(param: Tensor, update: Tensor) -> Tensor:
    weight_norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
    is_defined = (weight_norm > 0) & (update_norm > 0)
    return torch.where(is_defined, weight_norm / torch.where(update_norm > 0, update_norm, 1.0), 1.0)


@known_keywords
def lamb(
    learning_rate: Rate = 1e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-6,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""LAMB, as `optax.lamb`: AdamW with each layer's step scaled to the norm of its weights. torch.optim has none.

    Example:
        >>> tx = lamb(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    With :math:`u_t = \hat m_t / (\sqrt{\hat v_t} + \epsilon) + \lambda \theta_{t-1}`, :math:`\theta_t = \theta_{t-1}
    - \gamma u_t \|\theta_{t-1}\| / \|u_t\|`. Not elementwise.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: :math:`\lambda` in [0, inf).
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        You et al., 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes.
    """
    return chain(
        scale_by_adam(b1, b2, eps=eps),
        *decay_parts(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )
