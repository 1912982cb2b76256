"""Gradient descent without second moments."""

from __future__ import annotations

from ..errors import ConfigError
from ..transform import Mask, Rate, Scalar, Transform, add_decayed_weights, chain, scale_by_learning_rate, trace
from ..transform.base import is_on


def sgd(
    learning_rate: Rate = 1e-3,
    momentum: Scalar = 0.0,
    *,
    nesterov: bool = False,
    dampening: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Stochastic gradient descent, as `torch.optim.SGD`: :math:`\theta_t = \theta_{t-1} - \gamma b_t`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        momentum: in [0, inf): :math:`b_t = \mu b_{t-1} + (1 - \tau) g_t`; 0: :math:`b_t = g_t`.
        nesterov: step along :math:`g_t + \mu b_t`; needs momentum and no dampening.
        dampening: :math:`\tau`, of all gradients but the first.
        weight_decay: in [0, inf), coupled: added to the gradient times the weights.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range, or Nesterov without momentum or with dampening.

    References:
        Sutskever et al., 2013, On the importance of initialization and momentum in deep learning.

    Example:
        >>> import torch
        >>> tx = sgd(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    if nesterov and not is_on(momentum):
        raise ConfigError("nesterov without momentum", where="sgd", hint="momentum=0.9")
    decay = [add_decayed_weights(weight_decay, mask=mask)] if is_on(weight_decay) else []
    velocity = [trace(momentum, nesterov=nesterov, dampening=dampening)] if is_on(momentum) else []
    return chain(*decay, *velocity, scale_by_learning_rate(learning_rate))
