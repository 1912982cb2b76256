"""Attention as plain products: torch's fused kernels lack some derivatives and rules for vmap."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def mappable(device: torch.device) -> AbstractContextManager[Any]:
    """Inside the block, `scaled_dot_product_attention` has a rule for `torch.func.vmap`. The fused kernel of the CPU
    has none: vmap would loop over the examples and warn."""
    return differentiable() if device.type == "cpu" else nullcontext()


def differentiable() -> AbstractContextManager[Any]:
    """Inside the block, `scaled_dot_product_attention` has second derivatives, which no fused kernel has."""
    return sdpa_kernel(SDPBackend.MATH)
