"""Dynamic loss scaling as state, with the rule of `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError
from .state import at_least, in_range, known_keywords
from .types import Empty, Tree


class ScalerState(NamedTuple):
    """The loss scale, and the number of finite windows since its last change."""

    scale: Tensor  # shape=(), dtype=float32
    growth_tracker: Tensor  # shape=(), dtype=int64: finite windows since the scale last changed


class Scaler(NamedTuple):
    """The functions of a loss scaler.

    ``init(device) -> state``, ``scale(state) -> Tensor | None``, ``update(state, finite) -> state``, and
    ``exhausted(state, finite) -> Tensor``, True if the gradient is not finite and the scale cannot be lowered further.
    """

    init: Callable[[torch.device], Tree]
    scale: Callable[[Tree], Tensor | None]
    update: Callable[[Tree, Tensor], Tree]
    exhausted: Callable[[Tree, Tensor], Tensor]


def none() -> Scaler:
    """Disable scaling; the state is Empty, and every gradient that is not finite is exhausted.

    Example:
        >>> print(none().scale(none().init(torch.device("cpu"))))
        None
    """

    def update(state: Tree, finite: Tensor) -> Tree:
        del finite  # No scale.
        return state

    def exhausted(state: Tree, finite: Tensor) -> Tensor:
        del state  # No scale.
        return ~finite

    return Scaler(lambda device: Empty(), lambda state: None, update, exhausted)


@known_keywords
def dynamic(
    init_scale: Annotated[float, in_range(0.0)] = 2.0**16,
    *,
    growth_factor: Annotated[float, in_range(1.0)] = 2.0,
    backoff_factor: Annotated[float, in_range(0.0, 1.0)] = 0.5,
    growth_interval: Annotated[int, at_least(1)] = 2000,
    min_scale: Annotated[float, in_range(0.0, ends="[)")] = 2.0**-14,
) -> Scaler:
    """Multiply the loss by a scale that halves when a gradient overflows and doubles after many finite updates.

    Example:
        >>> import torch
        >>> scaler = dynamic(8.0)
        >>> state = scaler.update(scaler.init(torch.device("cpu")), torch.tensor(False))
        >>> state.scale.item()
        4.0

    The rule is that of `torch.amp.GradScaler` (`aten::_amp_update_scale_`), with a lower bound: torch's scale may fall
    to 0, after which every gradient is nan; this scale stops falling once it is below ``min_scale``.

    Args:
        init_scale: scale of the first step, > 0.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: number of finite optimizer updates between two growths, >= 1.
        min_scale: in [0, init_scale]. Below it a gradient that is not finite counts as an error, not an overflow, and
            the state halts. With ``nonfinite="skip"`` the state does not halt, and the scale stays until gradients are
            finite.

    Raises:
        ConfigError: a number is out of range.
    """
    if min_scale > init_scale:
        what = f"min_scale={min_scale} is more than init_scale={init_scale}"
        raise ConfigError(what, where="dynamic", hint=f"min_scale={init_scale}")

    def init(device: torch.device) -> ScalerState:
        scale = torch.tensor(init_scale, dtype=torch.float32, device=device)
        return ScalerState(scale, torch.zeros((), dtype=torch.int64, device=device))

    def update(state: ScalerState, finite: Tensor) -> ScalerState:
        count = state.growth_tracker + 1
        grown = _multiply(state.scale, growth_factor)
        # As in torch, a scale that would overflow float32 does not grow.
        grows = (count == growth_interval) & torch.isfinite(grown)
        lower = _multiply(state.scale, backoff_factor)
        shrunk = torch.where(state.scale < min_scale, state.scale, lower)
        scale = torch.where(finite, torch.where(grows, grown, state.scale), shrunk)
        tracker = torch.where(finite & (count < growth_interval), count, torch.zeros_like(count))
        return ScalerState(scale, tracker)

    def exhausted(state: ScalerState, finite: Tensor) -> Tensor:
        return ~finite & (state.scale < min_scale)

    return Scaler(init, lambda state: state.scale, update, exhausted)


def _multiply(scale: Tensor, factor: float) -> Tensor:
    # In float64, rounded once, as in torch: the factor may not be a power of two.
    return scale * factor if scale.device.type == "mps" else (scale.double() * factor).float()
