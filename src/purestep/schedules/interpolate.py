"""Interpolation between values: linear, along half a cosine, in steps."""

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
"""Count of updates -> value, shape=()."""


def count_as_float(count: Count) -> Tensor:
    """Convert a count to the widest float dtype of its device. shape=()."""
    tensor = torch.as_tensor(count)
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def progress(t: Tensor, steps: float) -> Tensor:
    """Return ``t / steps``, clamped to [0, 1]."""
    return (t / steps).clamp(0.0, 1.0)


def line(a: float, b: float, s: Tensor) -> Tensor:
    """Interpolate linearly from a to b. Exact at both ends, unlike ``a + (b - a) * s``."""
    return a * (1.0 - s) + b * s


def half_cosine(a: float, b: float, s: Tensor) -> Tensor:
    """Interpolate from a to b along half a cosine."""
    return b + (a - b) * (1.0 + torch.cos(math.pi * s)) / 2.0


def hold(a: float, b: float, s: Tensor) -> Tensor:
    """Return a for s < 1, b at s = 1."""
    return torch.where(s < 1.0, torch.full_like(s, a), b)


def interpolate_points(
    t: Tensor, points: list[tuple[float, float]], between: Callable[[float, float, Tensor], Tensor]
) -> Tensor:
    """Interpolate between (count, value) points with rising counts; past the last point, return its value."""
    value = torch.full_like(t, points[0][1])
    for (begin, a), (end, b) in pairwise(points):
        value = torch.where(t >= begin, between(a, b, progress(t - begin, end - begin)), value)
    return value
