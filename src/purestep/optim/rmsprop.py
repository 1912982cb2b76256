"""Directions from squares of gradients: RMSprop, Adagrad, Adadelta.

Optimizers that divide by squares of gradients, without a mean of gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..pickling import recipe
from ..types import Empty, Params, Tree
from .base import Transform, chain, require, require_typed
from .numerics import (
    Rate,
    Scalar,
    decay_square,
    divided,
    each,
    is_on,
    lerp,
    none_missed,
    own_count,
    root,
    scalar_dtype,
    wide,
    zero_count,
    zeros_like,
    zeros_like_squares,
)
from .scale import decay_parts, scale_by_learning_rate, trace
from .wrappers import Mask


class ScaleByRmsState(NamedTuple):
    """State of `scale_by_rms`."""

    nu: Params  # name -> P: running mean of squares
    mean: Tree  # name -> P: running mean of gradients; Empty unless centered


@recipe
def scale_by_rms(decay: Scalar = 0.99, *, eps: Scalar = 1e-8, centered: bool = False) -> Transform:
    r"""Gradients over their root mean square, :math:`g_t / (\sqrt{v_t} + \epsilon)`, as in `torch.optim.RMSprop`.

    Args:
        decay: of the mean of squares, in [0, 1); torch's alpha.
        eps: in [0, inf), outside the root.
        centered: divide by the standard deviation, :math:`\sqrt{v_t - \bar g_t^2}`.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Hinton, 2012, Neural Networks for Machine Learning, lecture 6e; Graves, 2013 (centered).

    Example:
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx = scale_by_rms(0.75)
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [2.0, -2.0]
    """
    require("scale_by_rms", high=1.0, decay=decay)
    require("scale_by_rms", eps=eps)

    def init(params: Params) -> ScaleByRmsState:
        return ScaleByRmsState(zeros_like_squares(params), zeros_like(params) if centered else Empty())

    def update(updates: Params, state: ScaleByRmsState, params: Params) -> tuple[Params, ScaleByRmsState]:
        del params  # A function of gradients alone.
        nu = {name: decay_square(state.nu[name], g, decay) for name, g in updates.items()}
        mean = {name: lerp(state.mean[name], g, 1 - decay) for name, g in updates.items()} if centered else state.mean
        new: Params = {}
        for name, g in updates.items():
            square = wide(nu[name])
            variance = torch.addcmul(square, wide(mean[name]), wide(mean[name]), value=-1) if centered else square
            new[name] = (wide(g) / (root(variance) + eps)).to(g.dtype)
        return new, ScaleByRmsState(nu, mean)

    return Transform(init, update)


class ScaleByRssState(NamedTuple):
    """State of `scale_by_rss`."""

    total: Params  # name -> P: sum of squares


@recipe
def scale_by_rss(initial_accumulator_value: float = 0.0, *, eps: Scalar = 1e-10) -> Transform:
    r"""Gradients over the root of the sum of all squares so far, as in `torch.optim.Adagrad`.

    Args:
        initial_accumulator_value: what the sum starts from, in [0, inf).
        eps: in [0, inf), outside the root.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Duchi et al., 2011, Adaptive Subgradient Methods.

    Example:
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx = scale_by_rss()
        >>> tx.update(params, tx.init(params), params)[0]["w"].tolist()
        [1.0, -1.0]
    """
    require("scale_by_rss", initial_accumulator_value=initial_accumulator_value, eps=eps)

    def init(params: Params) -> ScaleByRssState:
        return ScaleByRssState({name: z + initial_accumulator_value for name, z in zeros_like_squares(params).items()})

    def update(updates: Params, state: ScaleByRssState, params: Params) -> tuple[Params, ScaleByRssState]:
        del params  # A function of gradients alone.
        total = {name: _add_square(state.total[name], g) for name, g in updates.items()}
        new = {name: (wide(g) / (root(total[name]) + eps)).to(g.dtype) for name, g in updates.items()}
        return new, ScaleByRssState(total)

    return Transform(init, update)


def _add_square(total: Tensor, update: Tensor) -> Tensor:
    return torch.addcmul(wide(total), wide(update), wide(update)).to(total.dtype)


class StepState(NamedTuple):
    """State of a transform that only counts."""

    step: Tensor  # shape=(), dtype=int64: updates done
    missed: Tree = Empty()  # of the updates, those that a parameter had no gradient in


@recipe
def scale_by_inverse_time(decay: Scalar) -> Transform:
    """Updates over ``1 + decay * updates done``: the learning rate's decay in `torch.optim.Adagrad`.

    Args:
        decay: in [0, inf).

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> params = {"w": torch.ones(1)}
        >>> tx = scale_by_inverse_time(1.0)
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> tx.update(params, state, params)[0]["w"].item()
        0.5
    """
    require("scale_by_inverse_time", decay=decay)

    def init(params: Params) -> StepState:
        return StepState(zero_count(params), none_missed(params))

    def update(updates: Params, state: StepState, params: Params) -> tuple[Params, StepState]:
        del params  # A function of the count alone.
        own = own_count(state.step, state.missed, updates)
        divisors = each(1 + decay * own.to(scalar_dtype(updates)), updates)
        new = {name: divided(wide(u), divisors[name]).to(u.dtype) for name, u in updates.items()}
        return new, StepState(state.step + 1, state.missed)

    return Transform(init, update)


class ScaleByAdadeltaState(NamedTuple):
    """State of `scale_by_adadelta`."""

    square: Params  # name -> P: running mean of squared gradients
    delta: Params  # name -> P: running mean of squared updates


@recipe
def scale_by_adadelta(rho: Scalar = 0.9, *, eps: Scalar = 1e-6) -> Transform:
    r"""Gradients times the ratio of root mean squares of updates and gradients, as in `torch.optim.Adadelta`.

    .. math:: \Delta_t = g_t \sqrt{u_{t-1} + \epsilon} / \sqrt{v_t + \epsilon}

    Args:
        rho: decay of both means, in [0, 1).
        eps: in [0, inf), inside the roots.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Zeiler, 2012, ADADELTA: An Adaptive Learning Rate Method.

    Example:
        >>> params = {"w": torch.tensor([2.0])}
        >>> tx = scale_by_adadelta(0.75, eps=1.0)
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        1.4142
    """
    require("scale_by_adadelta", high=1.0, rho=rho)
    require("scale_by_adadelta", eps=eps)

    def init(params: Params) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(zeros_like_squares(params), zeros_like_squares(params))

    def update(updates: Params, state: ScaleByAdadeltaState, params: Params) -> tuple[Params, ScaleByAdadeltaState]:
        del params  # A function of gradients alone.
        square = {name: decay_square(state.square[name], g, rho) for name, g in updates.items()}
        new = {
            name: ((wide(state.delta[name]) + eps).sqrt() / (wide(square[name]) + eps).sqrt() * wide(g)).to(g.dtype)
            for name, g in updates.items()
        }
        delta = {name: decay_square(state.delta[name], u, rho) for name, u in new.items()}
        return new, ScaleByAdadeltaState(square, delta)

    return Transform(init, update)


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
