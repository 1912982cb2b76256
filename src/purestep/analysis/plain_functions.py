"""Functions of torch in plain operations, which `torch.func` maps and differentiates twice.

Attention as products: torch's fused kernels lack second derivatives, and on the CPU a rule for vmap. `one_hot` as a
comparison: torch's reads the values to check them, which no transform allows.

``sdpa_kernel(SDPBackend.MATH)`` alone would fail inside `torch.func.grad` and autocast, where it mixes dtypes. It is
for `nn.MultiheadAttention`, whose inner call no mode sees: that layer cannot be mapped on the CPU in a ``-mixed``
precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..torch_ext import tracing


@contextmanager
def differentiable() -> Generator[None]:
    """Inside the block, `scaled_dot_product_attention` has second derivatives and a rule for `torch.func.vmap`, and
    `one_hot` with a number of classes can be mapped and traced.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 8)
        >>> fused = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> with differentiable():
        ...     plain = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> bool(torch.allclose(plain, fused, atol=1e-6))
        True
    """
    with _Plain(), sdpa_kernel(SDPBackend.MATH):
        yield


class _Plain(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func is functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 1 or not (tracing.in_graph() or tracing.is_mapped(tensor)):
        return functional.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The formula of `scaled_dot_product_attention`, with its arguments. A query that may see no key gets zeros."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
    else:
        weights = (scores + attn_mask).softmax(-1)
    return functional.dropout(weights, dropout_p) @ value


def decomposed(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap a function of tensors so that `vmap` can map the recurrent layers of torch inside.

    `vmap` has no rule for them, and maps them only below a level of `grad`, which splits them into their operations.
    The level here differentiates nothing, so that no activation is kept.
    """

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        found: Any = torch.func.vjp(lambda zero: (zero, function(*tensors)), torch.zeros(()), has_aux=True)
        return found[2]

    return call
