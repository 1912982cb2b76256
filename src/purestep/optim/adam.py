"""Adam and its kin."""

from __future__ import annotations

import torch

from ..transform import (
    Mask,
    Rate,
    Scalar,
    Transform,
    add_decayed_weights,
    chain,
    scale_by_adam,
    scale_by_learning_rate,
)
from ..transform.base import is_on


def adamw(
    learning_rate: Rate = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    *,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    mask: Mask | None = None,
    amsgrad: bool = False,
    mu_dtype: torch.dtype | None = None,
    nu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Adam with decoupled weight decay, as `torch.optim.AdamW`.

    .. math:: \theta_t = \theta_{t-1} - \gamma (\hat m_t / (\sqrt{\hat v_t} + \epsilon) + \lambda \theta_{t-1})

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: :math:`\lambda` in [0, inf).
        mask: what decays, as in `masked`; None: everything. See `decay_mask`.
        amsgrad: divide by the greatest mean of squares so far.
        mu_dtype: of the mean of gradients; None: each parameter's.
        nu_dtype: of the mean of squares; None: each parameter's.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Loshchilov and Hutter, 2019, Decoupled Weight Decay Regularization.

    Example:
        >>> tx = adamw(0.1, weight_decay=0.0)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    return chain(
        scale_by_adam(b1, b2, eps=eps, amsgrad=amsgrad, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        *([add_decayed_weights(weight_decay, mask=mask)] if is_on(weight_decay) else []),
        scale_by_learning_rate(learning_rate),
    )


def adam(
    learning_rate: Rate = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    *,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
    amsgrad: bool = False,
    mu_dtype: torch.dtype | None = None,
    nu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Adam, as `torch.optim.Adam`: :math:`\theta_t = \theta_{t-1} - \gamma \hat m_t / (\sqrt{\hat v_t} + \epsilon)`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights. `adamw` decouples it.
        mask: what decays, as in `masked`; None: everything.
        amsgrad: divide by the greatest mean of squares so far.
        mu_dtype: of the mean of gradients; None: each parameter's.
        nu_dtype: of the mean of squares; None: each parameter's.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Kingma and Ba, 2015, Adam: A Method for Stochastic Optimization.

    Example:
        >>> tx = adam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    return chain(
        *([add_decayed_weights(weight_decay, mask=mask)] if is_on(weight_decay) else []),
        scale_by_adam(b1, b2, eps=eps, amsgrad=amsgrad, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        scale_by_learning_rate(learning_rate),
    )
