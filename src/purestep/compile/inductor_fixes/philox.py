"""The random state of fused attention kernels, excluded from inductor's memory planning.

With dropout, such a kernel returns the Philox seed and offset of its mask for the backward pass. Their fake tensors are
on the GPU, but outside of a CUDA graph's capture the memory-efficient kernel returns them on the CPU. If the forward
and the backward pass are one graph, inductor reuses this memory for a counter that a Triton kernel writes, and the
launch fails (torch 2.11 to 2.14). Here the state passes through an operator without a copy, whose lowering marks the
buffer as never reused.

Test: `test_philox.py`, ``test_the_random_state_of_a_kernel_is_not_written``.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

if TYPE_CHECKING:
    from torch.fx import Graph

_NAMES = ("philox", "rng_state", "unused")  # returns of torch's attention operators, by their schemas


@library.custom_op("purestep::never_reused", mutates_args=(), schema="(Tensor value) -> Tensor")
def never_reused(value: Tensor) -> Tensor:
    """The value; inductor does not reuse its memory."""
    return value.clone()


@never_reused.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@functools.cache
def register() -> None:
    """Register the lowering of `never_reused`. Loads inductor."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    def lowered(value: Any) -> Any:
        value.realize()
        V.graph.never_reuse_buffers.add(value.get_name())
        return value

    decorator: Any = lowering.register_lowering(torch.ops.purestep.never_reused.default, type_promotion_kind=None)
    decorator(lowered)


def fix(graph: Graph) -> None:
    """Insert `never_reused` after every random state that one operator returns and another reads.

    Args:
        graph: changed.
    """
    for node in list(graph.nodes):
        if node.target is not operator.getitem or not node.users:
            continue
        made, at = node.args
        schema = getattr(made.target, "_schema", None)
        returns: Any = schema.returns if schema is not None else ()
        # The schema has a single return for a list of tensors.
        if at >= len(returns) or not any(name in (returns[at].name or "") for name in _NAMES):
            continue
        with graph.inserting_after(node):
            kept = graph.call_function(torch.ops.purestep.never_reused.default, (node,))
        kept.meta.update(node.meta)
        node.replace_all_uses_with(kept, delete_user_cb=functools.partial(operator.is_not, kept))
