"""Whether a step rounds numbers by casts there and back, which inductor leaves out unless it is asked not to.

``x.bfloat16().float()`` simulates a low precision in a higher one. Inductor computes in float32 what is bfloat16
between two loads, so the two casts together do nothing. Its setting `emulate_precision_casts` keeps every cast, and
costs loops of a mixed precision some speed: it is set for graphs alone that cast down, and up again with nothing but
elementwise operators and views between. In a mixed precision what is cast down goes into a product.

On the CPU it does not reach everything: numbers between two operators of one loop that compute in the low precision,
and casts with a view between, stay as exact as float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .control_flow import Mode

_LOW = {
    *(torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
"""Dtypes whose numbers inductor computes in float32."""

_COPIES = (
    "clone",
    "_to_copy",
    "cat",
    "stack",
    "copy_",
    "contiguous",
    "constant_pad_nd",
    "where",
    "index_select",
    "index",
)


def options(rounds: bool) -> dict[str, Any]:
    """Inductor's configuration for a graph that does or does not."""
    return {"emulate_precision_casts": True} if rounds else {}


class Casts(Mode):
    """Sees the operators that run inside; ``seen`` says whether some value was cast down, and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self._rounded: dict[int, Tensor] = {}  # cast down, or computed from such elementwise; without memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_operator = isinstance(func, OpOverload)  # not one that takes functions
        if is_operator and not self.seen and isinstance(made, Tensor) and made.is_floating_point():
            self._look(func, list(_tensors(args)), made)
        return made

    def _look(self, func: Any, given: list[Tensor], made: Tensor) -> None:
        low = made.dtype in _LOW
        if not (func.is_view or torch.Tag.pointwise in func.tags or func._overloadpacket.__name__ in _COPIES):
            return
        if any(id(leaf) in self._rounded and (not low or leaf.dtype != made.dtype) for leaf in given):
            self.seen = True
        is_cast = low and any(leaf.is_floating_point() and _digits(leaf) > _digits(made) for leaf in given)
        if low and (is_cast or any(id(leaf) in self._rounded for leaf in given)):
            self._rounded[id(made)] = made


def _digits(value: Tensor) -> float:
    return -torch.finfo(value.dtype).eps


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
