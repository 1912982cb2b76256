"""Types of the arguments of transforms. A number's range is part of its type; `known_keywords` checks it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from ..errors import ConfigError
from ..state import Check, check_range

Scalar: TypeAlias = float | Tensor
"""A Python number, which is a constant in a compiled graph, or a 0-d tensor, which may change between calls."""
Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""Count of updates done, shape=(), int64 -> value, shape=()."""


def within(low: float = 0.0, high: float = math.inf, ends: str = "[)") -> Check:
    """A check that a number is between two bounds. A tensor is not read, since that waits for the device.

    Example:
        >>> within(0.0, 1.0)("adamw", "b1", 1.5, "0.9 is the default")
        Traceback (most recent call last):
        purestep.errors.ConfigError: adamw: b1=1.5 must be in [0, 1) (cure: 0.9 is the default)

    Args:
        low: the lower bound.
        high: the upper bound.
        ends: a bracket for each bound: a bound with a square bracket is a valid value itself.
    """

    def check(where: str, name: str, value: Any, cure: str) -> None:
        if isinstance(value, Tensor):
            return
        if callable(value):
            raise ConfigError(
                f"{name} is a schedule; only learning_rate takes one directly",
                where=where,
                hint=f"optim.inject(optim.{where})(..., {name}=schedule)",
            )
        check_range(where, low, high, ends=ends, cure=cure, **{name: value})

    return check


_check_number = within()


def check_rate(where: str, name: str, value: Any, cure: str = "") -> None:
    """Check that a learning rate is a schedule, a tensor or a number of at least 0.

    Raises:
        ConfigError: it is a number out of range, has another type, or is one of torch's schedulers.
    """
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        group = value.optimizer.param_groups[0]
        rate = group.get("initial_lr", group["lr"])
        raise ConfigError(
            f"{name} is a {type(value).__name__}, which counts its own steps",
            where=where,
            hint=f"schedules.from_torch_scheduler({type(value).__name__}, {rate}, steps=..., ...)",
        )
    if not callable(value):
        _check_number(where, name, value, cure)


Rate: TypeAlias = Annotated[float | Tensor | Schedule, check_rate]
"""A learning rate: a number in [0, inf), a 0-d tensor or a schedule."""
Decay: TypeAlias = Annotated[Scalar, within(0.0, 1.0)]
"""The share of a running mean that one update keeps, in [0, 1)."""
NonNegative: TypeAlias = Annotated[Scalar, within(0.0)]
"""In [0, inf)."""
NonNegativeFloat: TypeAlias = Annotated[float, within(0.0)]
"""The same, where a tensor is not supported."""
