"""Gradient descent without second moments."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..pickling import recipe
from .adam import scale_by_lion
from .base import Transform, chain, require_typed
from .numerics import Rate, Scalar, is_on
from .scale import decay_parts, scale_by_learning_rate, trace
from .wrappers import Mask


@recipe
def sgd(
    learning_rate: Rate = 1e-3,
    momentum: Scalar = 0.0,
    nesterov: bool = False,
    *,
    dampening: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Stochastic gradient descent, as `torch.optim.SGD`: :math:`\theta_t = \theta_{t-1} - \gamma b_t`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        momentum: in [0, inf): :math:`b_t = \mu b_{t-1} + (1 - \tau) g_t`; 0: :math:`b_t = g_t`.
        nesterov: step along :math:`g_t + \mu b_t`; needs momentum and no dampening.
        dampening: :math:`\tau` in [0, inf), of all gradients but the first.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range, or Nesterov without momentum or with dampening.

    References:
        Sutskever et al., 2013, On the importance of initialization and momentum in deep learning.

    Example:
        >>> tx = sgd(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    require_typed("sgd", learning_rate, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
    if nesterov and not is_on(momentum):
        raise ConfigError("nesterov without momentum", where="sgd", hint="momentum=0.9")
    if nesterov and not isinstance(dampening, torch.Tensor) and dampening != 0:
        raise ConfigError(f"nesterov with dampening={dampening}", where="sgd", hint="dampening=0.0")
    velocity = [trace(momentum, nesterov=nesterov, dampening=dampening)] if is_on(momentum) else []
    return chain(*decay_parts(weight_decay, mask), *velocity, scale_by_learning_rate(learning_rate))


@recipe
def lion(
    learning_rate: Rate = 1e-4,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    *,
    weight_decay: Scalar = 1e-3,
    mask: Mask | None = None,
    mu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""The sign of momentum, as `optax.lion`; torch has none.

    .. math:: \theta_t = \theta_{t-1} - \gamma (s_t + \lambda \theta_{t-1}), \quad
        s_t = \operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t)

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule; a third to a tenth of AdamW's.
        b1: weight of the mean in the direction, in [0, 1).
        b2: decay of the mean of gradients, in [0, 1).
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        mask: what decays, as in `masked`; None: everything.
        mu_dtype: of the mean; None: each parameter's.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Chen et al., 2023, Symbolic Discovery of Optimization Algorithms.

    Example:
        >>> tx = lion(0.1, weight_decay=0.0)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    require_typed("lion", learning_rate, below_one={"b1": b1, "b2": b2}, weight_decay=weight_decay)
    direction = scale_by_lion(b1, b2, mu_dtype=mu_dtype)
    return chain(direction, *decay_parts(weight_decay, mask), scale_by_learning_rate(learning_rate))
