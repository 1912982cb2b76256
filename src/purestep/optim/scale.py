"""Parts that most optimizers share: a constant factor, the learning rate, weight decay."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Params
from .arguments import NonNegative, Rate, Scalar, within
from .base import Transform, described, stateless
from .counts import zero_count
from .numerics import add_scaled, is_enabled, multiply, rate_at
from .wrappers import Mask, masked


@known_keywords
def scale(factor: Annotated[Scalar, within(-math.inf)]) -> Transform:
    """Multiply updates by a number; ``chain(scale(-1.0), ...)`` maximizes.

    Example:
        >>> scale(0.5).update({"w": torch.ones(1)}, (), {})[0]["w"].item()
        0.5

    Args:
        factor: finite. For a schedule use `inject`.
    """

    def fn(updates: Params, params: Params) -> Params:
        del params  # A constant factor.
        return {name: multiply(u, factor) for name, u in updates.items()}

    return described(stateless(fn, elementwise=True), "scale", factor=factor)


class ScaleByLearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    learning_rate: Tensor  # shape=(), dtype=float32: of the last update, for logging; at init of the first update


@known_keywords
def scale_by_learning_rate(learning_rate: Rate) -> Transform:
    """Multiply updates by ``-learning_rate``: the last part of every named optimizer.

    Example:
        >>> tx = scale_by_learning_rate(lambda count: 1.0 / (count + 1))
        >>> params = {"w": torch.ones(1)}
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        >>> updates["w"].item(), state.step.item(), state.learning_rate.item()
        (-0.5, 2, 0.5)

    Args:
        learning_rate: in [0, inf): a number, a 0-d tensor, or a schedule of the count of updates done. The first
            update uses ``schedule(0)``.
    """

    def init(params: Params) -> ScaleByLearningRateState:
        count = zero_count(params)
        return ScaleByLearningRateState(count, rate_leaf(rate_at(learning_rate, count), count))

    def update(
        updates: Params, state: ScaleByLearningRateState, params: Params
    ) -> tuple[Params, ScaleByLearningRateState]:
        del params  # The rate depends on the count only.
        rate = rate_at(learning_rate, state.step)
        scaled = {name: multiply(u, -rate) for name, u in updates.items()}
        return scaled, ScaleByLearningRateState(state.step + 1, rate_leaf(rate, state.step))

    return described(Transform(init, update), "learning_rate", learning_rate=learning_rate)


def rate_leaf(rate: Scalar, count: Tensor) -> Tensor:
    """Copy the rate into a new float32 tensor on the device of the count. shape=()."""
    if isinstance(rate, Tensor):
        return rate.detach().to(device=count.device, dtype=torch.float32, copy=True)
    return torch.full((), rate, dtype=torch.float32, device=count.device)


@known_keywords
def add_decayed_weights(weight_decay: NonNegative, *, mask: Mask | None = None) -> Transform:
    """Weight decay: ``updates + weight_decay * params``.

    Example:
        >>> params = {"w": torch.full((1,), 2.0)}
        >>> add_decayed_weights(0.1).update({"w": torch.ones(1)}, (), params)[0]["w"].item()
        1.2000000476837158

    Before the moments this is torch's coupled weight decay (an L2 penalty); after them, the decoupled one of AdamW.

    Args:
        weight_decay: in [0, inf).
        mask: the parameters that decay, as in `masked`; None: all. See `decay_mask`.

    Raises:
        ConfigError: at init, the mask does not fit, as in `masked`.
        StateError: at update with a mask, the state belongs to other parameters.

    References:
        Loshchilov and Hutter, 2019, Decoupled Weight Decay Regularization.
    """

    def decay(updates: Params, params: Params) -> Params:
        return {name: add_scaled(u, params[name], weight_decay) for name, u in updates.items()}

    inner = described(stateless(decay, elementwise=True), "decay", weight_decay=weight_decay)
    return inner if mask is None else masked(inner, mask)


def decay_parts(weight_decay: Scalar, mask: Mask | None) -> list[Transform]:
    """Return the weight decay part of a chain in a list; an empty list if the decay is the number 0."""
    return [add_decayed_weights(weight_decay, mask=mask)] if is_enabled(weight_decay) else []
