"""One call for many tensors: torch's functions for lists (documented under ``torch._foreach``), by plain names.

On a GPU a call launches a few kernels for all tensors; on the CPU it saves Python's part of each operation. `vmap`,
Dynamo and tensor subclasses take the operations one by one: ask `tracing.may_overwrite` before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def clone(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor, in the memory layout of `Tensor.clone`. The tensors are dense (`tensor_layout.is_dense`).

    Example:
        >>> clone([torch.ones(1), torch.tensor(2)])
        [tensor([1.]), tensor(2)]
    """
    if all(each.device.type == "cpu" for each in tensors):  # where a loop is faster
        return [each.clone() for each in tensors]
    made = [torch.empty_like(each) for each in tensors]
    for places in _by_dtype(tensors):
        _torch._foreach_copy_([made[index] for index in places], [tensors[index] for index in places])
    return made


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


def average(old: Sequence[Tensor], new: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """``(1 - weight) * old + weight * new`` for each pair; the weight has shape=() and the tensors' dtype. Exact where
    the weight is 0 or 1 and both are finite.

    Example:
        >>> average([torch.zeros(1)], [torch.ones(1)], torch.tensor(0.25))
        [tensor([0.2500])]
    """
    mixed = scaled(old, 1 - weight)
    _torch._foreach_add_(mixed, scaled(new, weight))
    return mixed


def average_(old: Sequence[Tensor], new: Sequence[Tensor], weight: Tensor) -> None:
    """As `average`, written into ``old``.

    Example:
        >>> shadow = [torch.zeros(1)]
        >>> average_(shadow, [torch.ones(1)], torch.tensor(1.0))
        >>> shadow
        [tensor([1.])]
    """
    scale_(old, 1 - weight)
    _torch._foreach_add_(old, scaled(new, weight))


def where(condition: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """``new`` if the 0-d condition is True, else ``old``, in new memory; plain tensors, equal dtypes in each pair.

    Example:
        >>> where(torch.tensor(True), [torch.ones(1), torch.tensor(2)], [torch.zeros(1), torch.tensor(1)])
        [tensor([1.]), tensor(2)]
    """
    made = [torch.empty_like(leaf) for leaf in new]
    for places in _by_dtype(new):
        flat = [torch.cat([leaves[index].reshape(-1) for index in places]) for leaves in (new, old)]
        parts = torch.where(condition, *flat).split([new[index].numel() for index in places])
        shaped = [part.view(new[index].shape) for part, index in zip(parts, places, strict=True)]
        _torch._foreach_copy_([made[index] for index in places], shaped)
    return made


def _by_dtype(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """The indices of the tensors of each dtype: a kernel takes one."""
    found: dict[torch.dtype, list[int]] = {}
    for index, each in enumerate(tensors):
        found.setdefault(each.dtype, []).append(index)
    return found.values()
