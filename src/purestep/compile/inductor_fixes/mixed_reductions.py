"""Sums that are parts of a concatenation, kept in memory of their own.

On a GPU inductor computes sums over the rows and over the columns of one large tensor in one kernel: a LayerNorm's
gradients by its weight and by its input. It adds up parts of the column sums afterwards, and gives the name of their
buffer to the result. If the buffer is a piece of a concatenation, such as a flat gradient, the piece is never written:
the concatenation has whatever was in the memory (torch 2.11 to 2.14; models with LayerNorm and 4,096 rows or more).
`torch.compile` of ``torch.cat([weight_grad, bias_grad])`` has the same bug
(https://github.com/pytorch/pytorch/issues/193061). Here such a sum gets a fixed layout, so that inductor copies it into
the concatenation.

Test: `tests/rigs/cuda_rehearsal/test_concatenation.py`, ``test_sums_that_are_parts_of_a_concatenation_are_read``, which
reads inductor's code; on a GPU also `test_mixed_reductions.py`, ``test_a_graph_is_right``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .. import fx_passes
from . import aliasing

if TYPE_CHECKING:
    from torch.fx import Graph, Node

_LEAST = 1 << 20
"""Inductor sums fewer elements in separate kernels: its limit is 5 Mi."""


def fix(graph: Graph) -> None:
    """Give sums that are parts of concatenations a fixed layout.

    Args:
        graph: changed.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.cat.default:
            for made, reader in list(_sums(node)):
                aliasing.store_separately(graph, made, reader)


def _sums(cat: Node) -> Iterator[tuple[Node, Node]]:
    """The sums among the inputs of a concatenation, directly or through views, and their readers on the way."""
    for source in cat.all_input_nodes:
        node, reader = source, cat
        while fx_passes.is_view(node) and node.all_input_nodes:
            node, reader = node.all_input_nodes[0], node
        if _is_large_sum(node):
            yield node, reader


def _is_large_sum(node: Any) -> bool:
    if node.op != "call_function" or fx_passes.name_of(node) not in ("sum", "prod"):
        return False
    if not all(value.meta["val"].device.type != "cpu" for value in (node, *node.all_input_nodes)):
        return False
    return any(not 0 < fx_passes.size(each) < _least() for each in node.all_input_nodes)


def _least() -> int:
    from torch._inductor import config

    return 0 if getattr(config.triton, "mix_order_reduction_non_strict_mode", False) else _LEAST
