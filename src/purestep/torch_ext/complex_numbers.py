"""Complex tensors as pairs of real numbers, as torch's optimizers compute with them."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(leaf: Tensor) -> Tensor:
    """A view of a complex tensor, P, as its real and imaginary parts, (*P, 2); a real tensor unchanged.

    Example:
        >>> as_real(torch.tensor([1 + 2j])), as_real(torch.tensor([3.0]))
        (tensor([[1., 2.]]), tensor([3.]))
    """
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def like(pairs: Tensor, leaf: Tensor) -> Tensor:
    """The inverse of `as_real`: a complex tensor if ``leaf`` is complex.

    Example:
        >>> like(torch.tensor([[1.0, 2.0]]), torch.tensor([0j]))
        tensor([1.+2.j])
    """
    if not leaf.is_complex():
        return pairs
    return torch.view_as_complex(pairs if pairs.stride(-1) == 1 else pairs.contiguous())
