"""Adadelta: gradients times the ratio of the root mean squares of updates and gradients."""

from __future__ import annotations

from typing import NamedTuple

from ..state import known_keywords
from ..types import Params
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain
from .complex_params import on_pairs
from .numerics import decay_square, upcast, zeros_like_squares
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByAdadeltaState(NamedTuple):
    """State of `scale_by_adadelta`."""

    square: Params  # name -> P: running mean of squared gradients
    delta: Params  # name -> P: running mean of squared updates


@known_keywords
def scale_by_adadelta(rho: Decay = 0.9, *, eps: NonNegative = 1e-6) -> Transform:
    r"""Gradients times the ratio of root mean squares of updates and gradients, as in `torch.optim.Adadelta`.

    Example:
        >>> import torch
        >>> params = {"w": torch.tensor([2.0])}
        >>> tx = scale_by_adadelta(0.75, eps=1.0)
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        1.4142

    .. math:: \Delta_t = g_t \sqrt{u_{t-1} + \epsilon} / \sqrt{v_t + \epsilon}

    The arguments are those of `adadelta`.

    References:
        Zeiler, 2012, ADADELTA: An Adaptive Learning Rate Method.
    """

    def init(params: Params) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(zeros_like_squares(params), zeros_like_squares(params))

    def update(updates: Params, state: ScaleByAdadeltaState, params: Params) -> tuple[Params, ScaleByAdadeltaState]:
        del params  # Depends on the gradients only.
        square = {name: decay_square(state.square[name], g, rho) for name, g in updates.items()}
        new = {
            name: ((upcast(state.delta[name]) + eps).sqrt() / (upcast(square[name]) + eps).sqrt() * upcast(g)).to(
                g.dtype
            )
            for name, g in updates.items()
        }
        delta = {name: decay_square(state.delta[name], u, rho) for name, u in new.items()}
        return new, ScaleByAdadeltaState(square, delta)

    return on_pairs(Transform(init, update))


@known_keywords
def adadelta(
    learning_rate: Rate = 1.0,
    rho: Decay = 0.9,
    eps: NonNegative = 1e-6,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Adadelta, as `torch.optim.Adadelta`: steps in the units of the weights; see `scale_by_adadelta`.

    Example:
        >>> import torch
        >>> tx = adadelta(rho=0.75, eps=1.0)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.8944

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        rho: decay of both means of squares, in [0, 1).
        eps: in [0, inf), inside the roots.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Zeiler, 2012, ADADELTA: An Adaptive Learning Rate Method.
    """
    direction = scale_by_adadelta(rho, eps=eps)
    return chain(*decay_parts(weight_decay, mask), direction, scale_by_learning_rate(learning_rate))
