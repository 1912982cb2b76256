"""The count as a number to compute with, and the two ways to get from one value to another."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

Count: TypeAlias = Tensor | int
"""Updates so far, shape=(), dtype=int64, on any device; a Python int in a plot or a test."""
Schedule: TypeAlias = Callable[[Count], Tensor]


def clock(count: Count) -> Tensor:
    """The count, shape=(), in the widest float of its device."""
    found = torch.as_tensor(count)
    return found.to(torch.float32 if found.device.type == "mps" else torch.float64)


def share(t: Tensor, steps: float) -> Tensor:
    """How much of ``steps`` is over, in [0, 1]."""
    return (t / steps).clamp(0.0, 1.0)


def line(a: float, b: float, s: Tensor) -> Tensor:
    """From a to b in a straight line. Exact at both ends, which ``a + (b - a) * s`` is not."""
    return a * (1.0 - s) + b * s


def half_wave(a: float, b: float, s: Tensor) -> Tensor:
    """From a to b along half a cosine."""
    return b + (a - b) * (1.0 + torch.cos(math.pi * s)) / 2.0


def jump(a: float, b: float, s: Tensor) -> Tensor:
    """a until the end, and b there."""
    return torch.where(s < 1.0, torch.full_like(s, a), b)


def through(t: Tensor, points: list[tuple[float, float]], between: Callable[[float, float, Tensor], Tensor]) -> Tensor:
    """From point to point, each a pair of (count, value) in rising order; the last value after the last one."""
    value = torch.full_like(t, points[0][1])
    for (begin, a), (finish, b) in pairwise(points):
        value = torch.where(t >= begin, between(a, b, share(t - begin, finish - begin)), value)
    return value
