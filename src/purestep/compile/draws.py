"""Draws with the layout that they have in eager mode, where a tensor is filled in the order of its memory.

The same numbers in a turned tensor are others. Inductor lays out what it fills by those who read it: `dropout(h.t())`
would drop out other numbers than in eager. And what draws into a slice in place becomes an operator that draws a whole
tensor, in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

from .. import rng, tree
from ..errors import StepContractError

if TYPE_CHECKING:
    from torch.fx import GraphModule


@library.custom_op(
    "purestep::coins",
    mutates_args=(),
    schema="(Tensor like, float p, int[] strides) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def coins(like: Tensor, p: float, strides: list[int]) -> Tensor:
    """1 with a chance of ``p``, else 0: of the shape and dtype of a tensor, and of these strides."""
    return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device).bernoulli_(p)


@coins.register_fake
def _(like: Tensor, p: float, strides: list[int]) -> Tensor:
    return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)


@functools.cache
def register() -> None:
    """Let inductor fill such a tensor where it is. Loads it."""
    from torch._inductor import lowering

    known: Any = lowering

    def lowered(like: Any, p: float, strides: list[int]) -> Any:
        made = known.empty_strided(like.get_size(), strides, dtype=like.get_dtype(), device=like.get_device())
        return known.bernoulli_(made, p)

    known.register_lowering(torch.ops.purestep.coins.default, type_promotion_kind=None)(lowered)


def check(graph: GraphModule) -> None:
    """Raise StepContractError where numbers are drawn into a slice in place; before it is made functional."""
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or not rng.is_draw(node.target, node.args, node.kwargs):
            continue
        filled = node.args[0].meta["val"]
        if filled.numel() and tree.extent(filled) != filled.numel():
            raise StepContractError(
                f"random numbers are drawn into a slice in place ({node.target} of {list(filled.shape)} with strides "
                f"{filled.stride()}): a compiled step would draw others than eager mode",
                where="step",
                hint="x[:, ::2] = torch.rand(...): draw a tensor of its own, and write that",
            )


def decompositions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The table with coins that say how what they fill lies in memory."""
    aten: Any = torch.ops.aten
    return dict(table) | {aten.bernoulli_.float: _filled, aten.bernoulli.p: _made}


def _filled(value: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    return value.copy_(torch.ops.purestep.coins(value, p, value.stride()))


def _made(like: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    made = torch.empty_like(like, memory_format=torch.contiguous_format)  # as torch makes it
    return torch.ops.purestep.coins(made, p, made.stride())
