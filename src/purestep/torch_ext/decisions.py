"""Decisions of a step: Python bools where the host may branch, 0-d bool tensors elsewhere.

On the CPU an operation of a 0-d tensor takes some microseconds, and a step decides often: is the loss finite, does a
target count, is the rate in range. Where `tracing.may_branch` allows it, `read` gives the number itself, and what
follows is Python's. On a GPU, in a graph and under a transform of `torch.func` the same lines compute with tensors.
"""

from __future__ import annotations

import functools
from typing import TypeAlias, overload

import torch
from torch import Tensor

from . import tracing

Value: TypeAlias = Tensor | float
"""A number that the host knows, or a tensor that holds it."""
Flag: TypeAlias = Tensor | bool
"""A bool that the host knows, or a tensor that holds it, shape=()."""


def read(value: Tensor) -> Value:
    """The number in a 0-d tensor if the host may branch on it; else, and for other shapes, the tensor.

    Example:
        >>> float(read(torch.tensor(0.5))), read(torch.ones(2))
        (0.5, tensor([1., 1.]))
    """
    return value.item() if value.dim() == 0 and tracing.may_branch(value) else value


def known(flag: Tensor) -> Flag:
    """As `read` of a bool.

    Example:
        >>> bool(known(torch.tensor(True)))
        True
    """
    value = read(flag)
    return value if isinstance(value, Tensor) else bool(value)


@overload
def is_finite(value: Tensor) -> Tensor: ...
@overload
def is_finite(value: Value) -> Flag: ...
def is_finite(value: Value) -> Flag:
    """Like `torch.isfinite` for floating numbers, in two operations in place of four: nan < inf is False.

    Example:
        >>> is_finite(torch.tensor(torch.nan)), is_finite(1.0)
        (tensor(False), True)
    """
    return abs(value) < torch.inf


def every(*flags: Flag) -> Flag:
    """True if all are. What the host knows costs no operation.

    Example:
        >>> every(True, torch.tensor(True)), every(True, False)
        (tensor(True), False)
    """
    unknown = [flag for flag in flags if isinstance(flag, Tensor)]
    known = all(flag for flag in flags if not isinstance(flag, Tensor))
    return functools.reduce(torch.logical_and, unknown) if known and unknown else known


def negated(flag: Flag) -> Flag:
    """The opposite.

    Example:
        >>> negated(True), negated(torch.tensor(True))
        (False, tensor(False))
    """
    return ~flag if isinstance(flag, Tensor) else not flag


def tensor(flag: Flag, device: torch.device) -> Tensor:
    """The flag as a tensor.

    Example:
        >>> tensor(True, torch.device("cpu"))
        tensor(True)
    """
    return flag if isinstance(flag, Tensor) else torch.full((), flag, dtype=torch.bool, device=device)


def where(flag: Flag, new: Tensor, old: Tensor) -> Tensor:
    """`torch.where`: ``new`` or ``old``, always in new memory, in the wider dtype of the two.

    Example:
        >>> where(True, torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if isinstance(flag, Tensor):
        return torch.where(flag, new, old)
    chosen = new if flag else old
    return chosen.clone() if new.dtype is old.dtype else chosen.to(torch.promote_types(new.dtype, old.dtype), copy=True)
