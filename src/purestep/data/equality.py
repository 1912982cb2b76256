"""Bitwise comparison of batches, items and orders."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def same(first: Any, second: Any) -> bool:
    """True if two values are equal bit for bit; nan equals nan. Values of other types count as equal.

    Example:
        >>> same([1, {"x": float("nan")}], [1, {"x": float("nan")}]), same((1, 2), (2, 1))
        (True, False)
    """
    if isinstance(first, Tensor):
        alike = isinstance(second, Tensor) and first.shape == second.shape and first.layout == second.layout
        return alike and bool(((first == second) | (first != first)).all())
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, (list, tuple)):
        listed = isinstance(second, (list, tuple)) and len(first) == len(second)
        return listed and all(same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, (bool, int, float, str, bytes)):
        return bool(first == second or first != first)
    return True
