"""Dynamic loss scaling as state: the rule of `torch.amp.GradScaler`, without the object."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError
from .pickling import recipe
from .types import Empty, Tree
from .validation import is_count


class ScalerState(NamedTuple):
    """Scale of the loss and how long it has held."""

    scale: Tensor  # shape=(), dtype=float32
    growth_tracker: Tensor  # shape=(), dtype=int64: finite windows since the scale last changed


class Scaler(NamedTuple):
    """``init(device) -> state``, ``scale(state) -> Tensor | None``, ``update(state, finite) -> state`` and
    ``exhausted(state, finite) -> Tensor``: whether this gradient is not finite and no scale is left to try."""

    init: Callable[[torch.device], Tree]
    scale: Callable[[Tree], Tensor | None]
    update: Callable[[Tree, Tensor], Tree]
    exhausted: Callable[[Tree, Tensor], Tensor]


@recipe
def none() -> Scaler:
    """No scaling: an Empty state; the first gradient that is not finite has no other scale to try.

    Example:
        >>> print(none().scale(none().init(torch.device("cpu"))))
        None
    """

    def update(state: Tree, finite: Tensor) -> Tree:
        del finite  # no scale to move
        return state

    def exhausted(state: Tree, finite: Tensor) -> Tensor:
        del state  # no scale to look at
        return ~finite

    return Scaler(lambda device: Empty(), lambda state: None, update, exhausted)


@recipe
def dynamic(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-14,
) -> Scaler:
    """Multiply the loss by a scale that halves when a gradient overflows and doubles after a long finite stretch.

    The rule is that of `torch.amp.GradScaler` (`aten::_amp_update_scale_`), step for step; but torch's scale falls to
    0 in the end, where every gradient is nan for good, and this one falls no further than once below ``min_scale``.

    Args:
        init_scale: scale of the first step, > 0.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: a whole number of finite optimizer updates between two growths, >= 1.
        min_scale: in [0, init_scale]; below it the gradients are taken to be broken, not overflowing: the state halts.
            With ``nonfinite="skip"`` nothing halts, and the scale waits there for finite ones.

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> import torch
        >>> scaler = dynamic(8.0)
        >>> state = scaler.update(scaler.init(torch.device("cpu")), torch.tensor(False))
        >>> state.scale.item()
        4.0
    """
    # nan is in no range.
    factors = growth_factor > 1 and 0 < backoff_factor < 1
    if not (0 < init_scale < math.inf and factors and is_count(growth_interval, 1) and 0 <= min_scale <= init_scale):
        raise ConfigError(
            f"init_scale={init_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
            f"growth_interval={growth_interval}, min_scale={min_scale}",
            where="scaler",
            hint="init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1, growth_interval=2000, "
            "0 <= min_scale <= init_scale",
        )

    def init(device: torch.device) -> ScalerState:
        scale = torch.tensor(init_scale, dtype=torch.float32, device=device)
        return ScalerState(scale, torch.zeros((), dtype=torch.int64, device=device))

    def update(state: ScalerState, finite: Tensor) -> ScalerState:
        run = state.growth_tracker + 1
        grown = _times(state.scale, growth_factor)
        # As torch does: a scale that would overflow float32 stays.
        grows = (run == growth_interval) & torch.isfinite(grown)
        lower = _times(state.scale, backoff_factor)
        shrunk = torch.where(state.scale < min_scale, state.scale, lower)
        scale = torch.where(finite, torch.where(grows, grown, state.scale), shrunk)
        tracker = torch.where(finite & (run < growth_interval), run, torch.zeros_like(run))
        return ScalerState(scale, tracker)

    def exhausted(state: ScalerState, finite: Tensor) -> Tensor:
        return ~finite & (state.scale < min_scale)

    return Scaler(init, lambda state: state.scale, update, exhausted)


def _times(scale: Tensor, factor: float) -> Tensor:
    # In float64 and rounded once, as torch does it: factors need not be powers of two.
    return scale * factor if scale.device.type == "mps" else (scale.double() * factor).float()
