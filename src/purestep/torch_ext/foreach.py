"""One call for many tensors: torch's functions for lists (``torch._foreach``) and its kernels of optimizers
(``torch._fused``), by plain names.

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
    """The 2-norm of each tensor, shape=()."""
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
    for places in by_dtype(tensors):
        _torch._foreach_copy_([made[index] for index in places], [tensors[index] for index in places])
    return made


def scale_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor in place; the factor is a number, or has shape=() and the tensors' dtype."""
    _torch._foreach_mul_(tensors, factor)


def lerp(old: Sequence[Tensor], new: Sequence[Tensor], weight: float, *, in_place: bool) -> list[Tensor]:
    """``old + weight * (new - old)`` for each pair of one dtype; ``in_place`` writes it into ``old``."""
    if not in_place:
        return list(_torch._foreach_lerp(old, new, weight))
    _torch._foreach_lerp_(old, new, weight)
    return list(old)


def average(old: Sequence[Tensor], new: Sequence[Tensor], weight: Tensor, *, in_place: bool) -> list[Tensor]:
    """``(1 - weight) * old + weight * new`` for each pair; the weight has shape=() and the tensors' dtype. Exact where
    the weight is 0 or 1 and both are finite. ``in_place`` writes it into ``old``.

    Example:
        >>> average([torch.zeros(1)], [torch.ones(1)], torch.tensor(0.25), in_place=False)
        [tensor([0.2500])]
    """
    mixed = list(old) if in_place else list(_torch._foreach_mul(old, 1 - weight))
    if in_place:
        _torch._foreach_mul_(mixed, 1 - weight)
    _torch._foreach_add_(mixed, _torch._foreach_mul(new, weight))
    return mixed


def where(condition: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """``new`` if the 0-d condition is True, else ``old``, in new memory; plain tensors, equal dtypes in each pair.

    Example:
        >>> where(torch.tensor(True), [torch.ones(1), torch.tensor(2)], [torch.zeros(1), torch.tensor(1)])
        [tensor([1.]), tensor(2)]
    """
    made = [torch.empty_like(leaf) for leaf in new]
    for places in by_dtype(new):
        flat = [torch.cat([leaves[index].reshape(-1) for index in places]) for leaves in (new, old)]
        parts = torch.where(condition, *flat).split([new[index].numel() for index in places])
        shaped = [part.view(new[index].shape) for part, index in zip(parts, places, strict=True)]
        _torch._foreach_copy_([made[index] for index in places], shaped)
    return made


def copy_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy each tensor; of one device. For small tensors a call takes longer than the copy."""
    _torch._foreach_copy_(into, source)


def fused_(kernel: str, lists: list[list[Tensor]], counts: list[Tensor], options: dict[str, Any]) -> None:
    """An update by the kernel of ``torch.optim`` with ``fused=True``, once for each dtype.

    Example:
        >>> w, fixed = [torch.ones(1)], {"lr": 0.5, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        >>> fused_("sgd", [w, [torch.ones(1)]], [], fixed)
        >>> w
        [tensor([0.5000])]

    Args:
        kernel: "adam", "adamw" or "sgd".
        lists: parameters, updates, and the moments; float32 or float64, of one dtype for each parameter. The kernel
            writes into the first and the last, and may write temporaries into the updates.
        counts: for Adam, shape=() each, float32: updates with this one. One tensor may stand for several parameters.
        options: ``lr``, ``weight_decay``, the optimizer's numbers, and ``found_inf``: shape=(), float32, 1 leaves
            everything as it was; or None.
    """
    for places in by_dtype(lists[0]):
        params, updates, *moments = [[each[index] for index in places] for each in lists]
        if kernel == "sgd":
            sums = moments[0] if moments else []
            fixed = {"dampening": 0.0, "maximize": False, "is_first_step": False}
            _torch._fused_sgd_(params, updates, sums, **fixed, **options)
        else:
            call = _torch._fused_adamw_ if kernel == "adamw" else _torch._fused_adam_
            steps = [counts[index] for index in places]
            call(params, updates, *moments, [], steps, amsgrad=False, maximize=False, **options)


def by_dtype(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """The indices of the tensors of each dtype: a kernel takes one."""
    found: dict[torch.dtype, list[int]] = {}
    for index, each in enumerate(tensors):
        found.setdefault(each.dtype, []).append(index)
    return found.values()
