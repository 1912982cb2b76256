"""Recurrent layers under `torch.func.vmap` without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def decomposed(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap a function of tensors so that `vmap` can map the recurrent layers of torch inside.

    `vmap` has no rule for them, and maps them only below a level of `grad`, which splits them into their operations.
    The level here differentiates nothing, so that no activation is kept.
    """

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        found: Any = torch.func.vjp(lambda zero: (zero, function(*tensors)), torch.zeros(()), has_aux=True)
        return found[2]

    return call
