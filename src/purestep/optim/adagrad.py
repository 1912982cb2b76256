"""Adagrad: gradients over the root of the sum of all their squares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Params
from .arguments import NonNegative, NonNegativeFloat, Rate
from .base import Transform, chain
from .complex_params import on_pairs
from .counts import StepState, no_updates, update_counts
from .numerics import by_name, divide, is_enabled, safe_sqrt, scalar_dtype, upcast, zeros_like_squares
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByRssState(NamedTuple):
    """State of `scale_by_rss`."""

    total: Params  # name -> P: sum of squares


@known_keywords
def scale_by_rss(initial_accumulator_value: NonNegativeFloat = 0.0, *, eps: NonNegative = 1e-10) -> Transform:
    r"""Gradients over the root of the sum of all squares so far, as in `torch.optim.Adagrad`.

    Example:
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx = scale_by_rss()
        >>> tx.update(params, tx.init(params), params)[0]["w"].tolist()
        [1.0, -1.0]

    The arguments are those of `adagrad`.

    References:
        Duchi et al., 2011, Adaptive Subgradient Methods.
    """

    def init(params: Params) -> ScaleByRssState:
        # As torch, the same for the real and the imaginary part.
        start = initial_accumulator_value * (1 + 1j)
        return ScaleByRssState(
            {
                name: zeros + (start if zeros.is_complex() else initial_accumulator_value)
                for name, zeros in zeros_like_squares(params).items()
            }
        )

    def update(updates: Params, state: ScaleByRssState, params: Params) -> tuple[Params, ScaleByRssState]:
        del params  # Depends on the gradients only.
        total = {name: _add_square(state.total[name], g) for name, g in updates.items()}
        new = {name: (upcast(g) / (safe_sqrt(total[name]) + eps)).to(g.dtype) for name, g in updates.items()}
        return new, ScaleByRssState(total)

    return on_pairs(Transform(init, update))


def _add_square(total: Tensor, update: Tensor) -> Tensor:
    return torch.addcmul(upcast(total), upcast(update), upcast(update)).to(total.dtype)


@known_keywords
def scale_by_inverse_time(decay: NonNegative) -> Transform:
    """Divide updates by ``1 + decay * updates done``: the learning rate decay of `torch.optim.Adagrad`.

    Example:
        >>> params = {"w": torch.ones(1)}
        >>> tx = scale_by_inverse_time(1.0)
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> tx.update(params, state, params)[0]["w"].item()
        0.5

    Args:
        decay: in [0, inf).
    """

    def init(params: Params) -> StepState:
        return StepState(**no_updates(params))

    def update(updates: Params, state: StepState, params: Params) -> tuple[Params, StepState]:
        del params  # Depends on the count only.
        divisors = by_name(1 + decay * update_counts(state, updates).to(scalar_dtype(updates)), updates)
        new = {name: divide(upcast(u), divisors[name]).to(u.dtype) for name, u in updates.items()}
        return new, state._replace(step=state.step + 1)

    return Transform(init, update)


@known_keywords
def adagrad(
    learning_rate: Rate = 1e-2,
    *,
    lr_decay: NonNegative = 0.0,
    initial_accumulator_value: NonNegativeFloat = 0.0,
    eps: NonNegative = 1e-10,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Adagrad, as `torch.optim.Adagrad`: gradients over the root of the sum of all their squares.

    Example:
        >>> import torch
        >>> tx = adagrad(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    .. math:: \theta_t = \theta_{t-1} - \frac{\gamma}{1 + (t - 1) \eta}
        \frac{g_t}{\sqrt{\sum_{i \le t} g_i^2} + \epsilon}

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        lr_decay: :math:`\eta` in [0, inf).
        initial_accumulator_value: the initial sum of squares, in [0, inf).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Duchi et al., 2011, Adaptive Subgradient Methods for Online Learning.
    """
    rate_decay = [scale_by_inverse_time(lr_decay)] if is_enabled(lr_decay) else []
    direction = scale_by_rss(initial_accumulator_value, eps=eps)
    return chain(*decay_parts(weight_decay, mask), direction, *rate_decay, scale_by_learning_rate(learning_rate))
