"""Adam and its kin."""

from __future__ import annotations

import torch

from ..recipes import recipe
from ..transform import (
    Mask,
    Rate,
    Scalar,
    Transform,
    chain,
    decay_parts,
    require_typed,
    scale_by_adam,
    scale_by_adamax,
    scale_by_learning_rate,
    scale_by_nadam,
    scale_by_radam,
)


@recipe
def adamw(
    learning_rate: Rate = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    mask: Mask | None = None,
    *,
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
        nu_dtype: of the mean of squares; None: each parameter's, and float32 for float16.

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
    require_typed("adamw", learning_rate, below_one={"b1": b1, "b2": b2}, eps=eps, weight_decay=weight_decay)
    return chain(
        scale_by_adam(b1, b2, eps=eps, amsgrad=amsgrad, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        *decay_parts(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@recipe
def adam(
    learning_rate: Rate = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
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
        nu_dtype: of the mean of squares; None: each parameter's, and float32 for float16.

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
    require_typed("adam", learning_rate, below_one={"b1": b1, "b2": b2}, eps=eps, weight_decay=weight_decay)
    return chain(
        *decay_parts(weight_decay, mask),
        scale_by_adam(b1, b2, eps=eps, amsgrad=amsgrad, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        scale_by_learning_rate(learning_rate),
    )


@recipe
def nadam(
    learning_rate: Rate = 2e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    momentum_decay: Scalar = 4e-3,
    weight_decay: Scalar = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Mask | None = None,
) -> Transform:
    r"""Adam with Nesterov momentum, as `torch.optim.NAdam`; the direction is that of `scale_by_nadam`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        momentum_decay: how fast the momentum warms up, in [0, inf).
        weight_decay: in [0, inf), coupled: added to the gradient times the weights, unless decoupled.
        decoupled_weight_decay: take the decay out of the moments, as AdamW does.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Dozat, 2016, Incorporating Nesterov Momentum into Adam.

    Example:
        >>> import torch
        >>> tx = nadam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1056
    """
    typed = {"eps": eps, "momentum_decay": momentum_decay, "weight_decay": weight_decay}
    require_typed("nadam", learning_rate, below_one={"b1": b1, "b2": b2}, **typed)
    decay = decay_parts(weight_decay, mask)
    direction = scale_by_nadam(b1, b2, eps=eps, momentum_decay=momentum_decay)
    return _decayed(direction, decay, decoupled_weight_decay, learning_rate)


@recipe
def radam(
    learning_rate: Rate = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Mask | None = None,
) -> Transform:
    r"""Rectified Adam, as `torch.optim.RAdam`; the direction is that of `scale_by_radam`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights, unless decoupled.
        decoupled_weight_decay: take the decay out of the moments, as AdamW does.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Liu et al., 2020, On the Variance of the Adaptive Learning Rate and Beyond.

    Example:
        >>> import torch
        >>> tx = radam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    require_typed("radam", learning_rate, below_one={"b1": b1, "b2": b2}, eps=eps, weight_decay=weight_decay)
    decay = decay_parts(weight_decay, mask)
    return _decayed(scale_by_radam(b1, b2, eps=eps), decay, decoupled_weight_decay, learning_rate)


@recipe
def adamax(
    learning_rate: Rate = 2e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Adam in the infinity norm, as `torch.optim.Adamax`; the direction is that of `scale_by_adamax`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the greatest gradient, in [0, 1).
        eps: in [0, inf), added to each gradient's size.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Kingma and Ba, 2015, Adam, section 7.1.

    Example:
        >>> import torch
        >>> tx = adamax(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    require_typed("adamax", learning_rate, below_one={"b1": b1, "b2": b2}, eps=eps, weight_decay=weight_decay)
    return _decayed(scale_by_adamax(b1, b2, eps=eps), decay_parts(weight_decay, mask), False, learning_rate)


def _decayed(direction: Transform, decay: list[Transform], decoupled: bool, learning_rate: Rate) -> Transform:
    parts = [direction, *decay] if decoupled else [*decay, direction]
    return chain(*parts, scale_by_learning_rate(learning_rate))
