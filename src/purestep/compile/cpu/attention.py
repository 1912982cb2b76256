"""Attention over at most 256 positions, by torch's own formulas: products, and loops of inductor.

Buys: torch's flash kernel is designed for long sequences, whose matrix of weights would not fit into memory. For a few
hundred positions it takes two to three times as long as its arithmetic.

Without: torch's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import attention, functional
from torch.overrides import TorchFunctionMode

LONGEST = 256
"""Maximal number of positions: the stored weights take four times the memory of an activation, for heads of 64."""


class AsProducts(TorchFunctionMode):
    """Inside, calls of attention in float32 over short sequences are traced as products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is not functional.scaled_dot_product_attention or not _is_short(*args, **given):
            return func(*args, **given)
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            return func(*args, **given)


def _is_short(query: Any, key: Any, *_: Any, **__: Any) -> bool:
    return query.dtype == torch.float32 and max(query.shape[-2], key.shape[-2]) <= LONGEST
