"""Losses and metrics of a forward pass, computed before the backward pass.

A loss is a sum over logits that is read when the step is through, beside the norm of the gradients. Inductor fuses the
sum with what reads it, and the logits, often the largest tensor of all, live until then. Here the sum moves to where
its inputs are computed, and what the backward pass makes of the logits waits for it: so their gradient may be written
over them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

from . import aliasing

if TYPE_CHECKING:
    from torch.fx import Graph, Node

_LARGE = 1 << 16
"""Elements from which on it matters how long a tensor lives. Below, one kernel more costs more than it saves."""


@library.custom_op("purestep::after", mutates_args=(), schema="(Tensor value, Tensor first) -> Tensor")
def after(value: Tensor, first: Tensor) -> Tensor:
    """The value, which inductor computes once ``first`` is there."""
    return value.clone()


@after.register_fake
def _(value: Tensor, first: Tensor) -> Tensor:
    return torch.empty_like(value)


@functools.cache
def register() -> None:
    """Let inductor leave that operator out, and keep the order. Loads it."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    def lowered(value: Any, first: Any) -> Any:
        value.realize()
        first.realize()
        operation = getattr(value.data.data, "operation_name", None)  # none of an input, which is there anyway
        if operation is not None:
            V.graph.additional_buffer_deps[operation].add(first.get_name())
        return value

    decorator: Any = lowering.register_lowering(torch.ops.purestep.after.default, type_promotion_kind=None)
    decorator(lowered)


def early(graph: Graph) -> None:
    """Compute every scalar that is made of a large tensor, and read only when all others have read that tensor, before
    the last of them does.

    Args:
        graph: changed.
    """
    at = {each: index for index, each in enumerate(graph.nodes)}
    for node in filter(_is_reduction, list(graph.nodes)):
        large = [each for each in _needed(node) if each.op == "call_function" and _size(each) >= _LARGE]
        # Computed of the large tensors, and kept in memory for a product or as a result.
        kept = [each for each in _made_of(large) if _is_kept(each)]
        if not kept:
            continue
        last = max(at[each] for each in kept)
        if any(at[reader] <= last for reader in _readers(node, last, at)):
            continue
        behind = _ancestors(node)
        kept = [each for each in kept if each not in behind]
        if not kept or any(node in _ancestors(each) for each in kept):
            continue
        first = min(kept, key=lambda each: at[each])
        moved = [each for each in (*behind, node) if at[each] > at[first]]
        if not all(_is_computed_anew(each) or _is_a_loop(each) for each in moved):
            continue
        for each in sorted(moved, key=lambda each: at[each]):
            first.prepend(each)
        for each in kept:
            _put_after(graph, each, node)
        at = {each: index for index, each in enumerate(graph.nodes)}


def _put_after(graph: Graph, node: Node, first: Node) -> None:
    """``node``, whose readers wait for ``first``, which stands before it."""
    with graph.inserting_after(node):
        made = graph.call_function(torch.ops.purestep.after.default, (node, first))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _size(node: Any) -> int:
    """Elements of a node's tensor; 0 of what is none, or has sizes that are not known."""
    value = node.meta.get("val")
    sizes: Any = value.shape if isinstance(value, Tensor) else ("none",)
    if not all(isinstance(size, int) for size in sizes):
        return 0
    return math.prod(sizes)


def _is_reduction(node: Any) -> bool:
    """Whether a node makes one number of many."""
    if node.op != "call_function" or _size(node) != 1 or aliasing.is_view(node) or aliasing.name_of(node) == "getitem":
        return False
    return any(_size(source) > 1 for source in node.all_input_nodes)


def _needed(node: Node) -> set[Node]:
    """What is in memory for the loop of a reduction."""
    seen, needed, waiting = {node}, set["Node"](), list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if _is_computed_anew(one):
            waiting += one.all_input_nodes
        else:
            needed.add(one)
    return needed


_INDEXING = {"gather", "index", "embedding", "slice", "select", "cat", "constant_pad_nd", "index_select", "iota"}
_COPYING = {"_to_copy", "clone", "convert_element_type", "full", "scalar_tensor", "full_like", "arange"}


def _is_computed_anew(node: Any) -> bool:
    """Whether inductor computes an operator where it is read."""
    if node.op != "call_function":
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or aliasing.is_view(node) or aliasing.name_of(node) in _INDEXING | _COPYING


def _ancestors(node: Node) -> set[Node]:
    """All that a node is computed of."""
    found, waiting = set["Node"](), [node]
    while waiting:
        for one in waiting.pop().all_input_nodes:
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found


def _made_of(large: list[Node]) -> list[Node]:
    """Large tensors that are computed of these, number by number."""
    found, waiting = dict["Node", None](), list(large)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and _is_computed_anew(user) and _size(user) >= _LARGE:
                found[user] = None
                waiting.append(user)
    return list(found)


def _is_kept(node: Node) -> bool:
    """Whether a tensor lies in memory: an operator of another kind than a loop reads it, as it is or as a view."""
    if aliasing.is_view(node):
        return False
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if aliasing.is_view(user):
            waiting += user.users
        elif not _is_computed_anew(user) and not _is_a_loop(user):
            return True
    return False


def _is_a_loop(node: Any) -> bool:
    """Whether an operator is a reduction, which reads what it is made of in its loop."""
    return torch.Tag.reduction in getattr(node.target, "tags", ()) or aliasing.name_of(node) in _REDUCING


_REDUCING = {"sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "any", "all", "var_mean", "var", "max", "min"}


def _readers(node: Node, last: int, at: dict[Any, int]) -> Iterator[Node]:
    """What reads a number, or numbers that are made of it up to ``last``."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _size(user) == 1 and at[user] <= last:
                waiting.append(user)
            else:
                yield user
