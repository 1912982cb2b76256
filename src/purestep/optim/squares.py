"""Optimizers that divide by squares of gradients, without a mean of gradients."""

from __future__ import annotations

from ..recipes import recipe
from ..transform import (
    Mask,
    Rate,
    Scalar,
    Transform,
    chain,
    decay_parts,
    is_on,
    require_typed,
    scale_by_adadelta,
    scale_by_inverse_time,
    scale_by_learning_rate,
    scale_by_rms,
    scale_by_rss,
    trace,
)


@recipe
def rmsprop(
    learning_rate: Rate = 1e-2,
    decay: Scalar = 0.99,
    eps: Scalar = 1e-8,
    *,
    momentum: Scalar = 0.0,
    centered: bool = False,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Gradients over their root mean square, as `torch.optim.RMSprop`.

    .. math:: \theta_t = \theta_{t-1} - \gamma b_t, \quad b_t = \mu b_{t-1} + g_t / (\sqrt{v_t} + \epsilon)

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        decay: of the mean of squares, in [0, 1); torch's alpha.
        eps: in [0, inf), outside the root.
        momentum: in [0, inf).
        centered: divide by the standard deviation.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Hinton, 2012, Neural Networks for Machine Learning, lecture 6e; Graves, 2013 (centered).

    Example:
        >>> import torch
        >>> tx = rmsprop(0.1, decay=0.75)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.2
    """
    typed = {"eps": eps, "momentum": momentum, "weight_decay": weight_decay}
    require_typed("rmsprop", learning_rate, below_one={"decay": decay}, **typed)
    velocity = [trace(momentum)] if is_on(momentum) else []
    direction = scale_by_rms(decay, eps=eps, centered=centered)
    return chain(*decay_parts(weight_decay, mask), direction, *velocity, scale_by_learning_rate(learning_rate))


@recipe
def adagrad(
    learning_rate: Rate = 1e-2,
    *,
    lr_decay: Scalar = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: Scalar = 1e-10,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Gradients over the root of the sum of all their squares, as `torch.optim.Adagrad`.

    .. math:: \theta_t = \theta_{t-1} - \frac{\gamma}{1 + (t - 1) \eta}
        \frac{g_t}{\sqrt{\sum_{i \le t} g_i^2} + \epsilon}

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        lr_decay: :math:`\eta` in [0, inf).
        initial_accumulator_value: what the sum starts from, in [0, inf).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Duchi et al., 2011, Adaptive Subgradient Methods for Online Learning.

    Example:
        >>> import torch
        >>> tx = adagrad(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    typed = {"lr_decay": lr_decay, "initial_accumulator_value": initial_accumulator_value, "eps": eps}
    require_typed("adagrad", learning_rate, below_one=None, weight_decay=weight_decay, **typed)
    slowing = [scale_by_inverse_time(lr_decay)] if is_on(lr_decay) else []
    direction = scale_by_rss(initial_accumulator_value, eps=eps)
    return chain(*decay_parts(weight_decay, mask), direction, *slowing, scale_by_learning_rate(learning_rate))


@recipe
def adadelta(
    learning_rate: Rate = 1.0,
    rho: Scalar = 0.9,
    eps: Scalar = 1e-6,
    *,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Steps in the units of the weights, as `torch.optim.Adadelta`; the direction is that of `scale_by_adadelta`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        rho: decay of both means of squares, in [0, 1).
        eps: in [0, inf), inside the roots.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Zeiler, 2012, ADADELTA: An Adaptive Learning Rate Method.

    Example:
        >>> import torch
        >>> tx = adadelta(rho=0.75, eps=1.0)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.8944
    """
    require_typed("adadelta", learning_rate, below_one={"rho": rho}, eps=eps, weight_decay=weight_decay)
    direction = scale_by_adadelta(rho, eps=eps)
    return chain(*decay_parts(weight_decay, mask), direction, scale_by_learning_rate(learning_rate))
