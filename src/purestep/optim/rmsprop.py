"""RMSprop: gradients over their root mean square."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain
from .complex_params import on_pairs
from .numerics import decay_square, is_enabled, lerp, safe_sqrt, upcast, zeros_like, zeros_like_squares
from .scale import decay_parts, scale_by_learning_rate
from .sgd import trace
from .wrappers import Mask


class ScaleByRmsState(NamedTuple):
    """State of `scale_by_rms`."""

    nu: Params  # name -> P: running mean of squares
    mean: Tree  # name -> P: running mean of gradients; Empty unless centered


@known_keywords
def scale_by_rms(decay: Decay = 0.99, *, eps: NonNegative = 1e-8, centered: bool = False) -> Transform:
    r"""Gradients over their root mean square, :math:`g_t / (\sqrt{v_t} + \epsilon)`, as in `torch.optim.RMSprop`.

    Example:
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx = scale_by_rms(0.75)
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [2.0, -2.0]

    The arguments are those of `rmsprop`.

    References:
        Hinton, 2012, Neural Networks for Machine Learning, lecture 6e; Graves, 2013 (centered).
    """

    def init(params: Params) -> ScaleByRmsState:
        return ScaleByRmsState(zeros_like_squares(params), zeros_like(params) if centered else Empty())

    def update(updates: Params, state: ScaleByRmsState, params: Params) -> tuple[Params, ScaleByRmsState]:
        del params  # Depends on the gradients only.
        nu = {name: decay_square(state.nu[name], g, decay) for name, g in updates.items()}
        mean = {name: lerp(state.mean[name], g, 1 - decay) for name, g in updates.items()} if centered else state.mean
        new: Params = {}
        for name, g in updates.items():
            square = upcast(nu[name])
            variance = torch.addcmul(square, upcast(mean[name]), upcast(mean[name]), value=-1) if centered else square
            new[name] = (upcast(g) / (safe_sqrt(variance) + eps)).to(g.dtype)
        return new, ScaleByRmsState(nu, mean)

    return on_pairs(Transform(init, update))


@known_keywords
def rmsprop(
    learning_rate: Rate = 1e-2,
    decay: Decay = 0.99,
    eps: NonNegative = 1e-8,
    *,
    momentum: NonNegative = 0.0,
    centered: bool = False,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""RMSprop, as `torch.optim.RMSprop`: gradients over their root mean square, with optional momentum.

    Example:
        >>> import torch
        >>> tx = rmsprop(0.1, decay=0.75)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.2

    .. math:: \theta_t = \theta_{t-1} - \gamma b_t, \quad b_t = \mu b_{t-1} + g_t / (\sqrt{v_t} + \epsilon)

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        decay: decay of the mean of squares, in [0, 1); torch's alpha.
        eps: in [0, inf), outside the root.
        momentum: in [0, inf).
        centered: divide by the standard deviation, :math:`\sqrt{v_t - \bar g_t^2}`.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Hinton, 2012, Neural Networks for Machine Learning, lecture 6e; Graves, 2013 (centered).
    """
    velocity = [trace(momentum)] if is_enabled(momentum) else []
    direction = scale_by_rms(decay, eps=eps, centered=centered)
    return chain(*decay_parts(weight_decay, mask), direction, *velocity, scale_by_learning_rate(learning_rate))
