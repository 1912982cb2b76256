"""One call for many tensors: torch's functions for lists (documented under ``torch._foreach``), by plain names.

On a GPU a call launches a few kernels for all tensors; on the CPU it saves Python's part of each operation. `vmap`,
Dynamo and tensor subclasses take the operations one by one: ask `tracing.may_overwrite` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch  # torch's stubs do not export these names


def norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, shape=().

    Example:
        >>> [each.item() for each in norm([torch.tensor([3.0, 4.0]), torch.ones(1)])]
        [5.0, 1.0]
    """
    return list(_torch._foreach_norm(tensors))


def scaled(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """``tensor * factor`` for each tensor; the factor is a number, or has shape=() and the tensors' dtype.

    Example:
        >>> scaled([torch.ones(1)], 2.0)
        [tensor([2.])]
    """
    return list(_torch._foreach_mul(tensors, factor))


def scale_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """As `scaled`, in place.

    Example:
        >>> values = [torch.ones(1)]
        >>> scale_(values, 3.0)
        >>> values
        [tensor([3.])]
    """
    _torch._foreach_mul_(tensors, factor)


def lerp(old: Sequence[Tensor], new: Sequence[Tensor], weight: float) -> list[Tensor]:
    """``old + weight * (new - old)`` for each pair of one dtype.

    Example:
        >>> lerp([torch.zeros(1)], [torch.ones(1)], 0.25)
        [tensor([0.2500])]
    """
    return list(_torch._foreach_lerp(old, new, weight))


def lerp_(old: Sequence[Tensor], new: Sequence[Tensor], weight: float) -> None:
    """As `lerp`, written into ``old``.

    Example:
        >>> average = [torch.zeros(1)]
        >>> lerp_(average, [torch.ones(1)], 0.5)
        >>> average
        [tensor([0.5000])]
    """
    _torch._foreach_lerp_(old, new, weight)
