"""Copies in a donated step's graph where inductor would read a buffer after it was written.

Take a step that returns ``{"weights": new, "before": weights.clone()}``. The graph computes ``new`` and the clone, then
writes both. But inductor removes operations that change no value (a clone, ``x * 1``, a round-trip cast), and then
reads the buffer itself, which has been overwritten: ``before`` becomes ``new``. `torch.compile` of such a function has
the same bug (torch 2.11 to 2.14, https://github.com/pytorch/pytorch/issues/198131). A metric that is a value of the old
state would become one of the new state.

Here, once inductor has removed what it removes, such a source, or result, passes through an operator that copies. A
view of a computed value is stored before it is written into a buffer: inductor would compute it during the write, from
elements that are already overwritten.

Test: `test_aliasing.py`, ``test_without_it_a_copy_is_of_the_state_as_it_becomes``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, library

from .. import fx_passes

if TYPE_CHECKING:
    from torch.fx import Graph


@library.custom_op("purestep::own_copy", mutates_args=(), schema="(Tensor value) -> Tensor")
def own_copy(value: Tensor) -> Tensor:
    """A copy that inductor never removes."""
    return value.clone()


@own_copy.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@functools.cache
def register() -> None:
    """Register the lowering of `own_copy`: a separate copy. Loads inductor."""
    from torch._inductor import ir, lowering

    def lowered(value: Any) -> Any:
        return kind.copy_input(value)

    kind: Any = ir.ExternKernel
    decorator: Any = lowering.register_lowering(torch.ops.purestep.own_copy.default, type_promotion_kind=None)
    decorator(lowered)


def fix(graph: Graph) -> None:
    """Copy sources and results that are views of a written buffer, and store views of computed sources.

    Args:
        graph: changed; after inductor's other passes.
    """
    writes = fx_passes.writes(graph)
    written = {cast(Any, node.args[0]) for node in writes}
    users: list[Any] = [*writes, graph.output_node()] if writes else []
    for user in users:
        for source in user.all_input_nodes[user in writes :]:  # a write's first input is the buffer
            base, reader, is_moved = _origin(source, user)
            if base in written and (is_moved or user not in writes or base is not user.args[0]):
                _insert_copy(graph, user, source)
            elif (
                is_moved and user in writes and base.op == "call_function" and isinstance(base.meta.get("val"), Tensor)
            ):
                store_separately(graph, base, reader)


def _origin(node: Any, reader: Any) -> tuple[Any, Any, bool]:
    """The tensor that a node is a view of, its first reader on the way, and whether elements have other positions."""
    is_moved = False
    while source := _viewed(node):
        is_moved = is_moved or (fx_passes.size(node) != 1 and fx_passes.name_of(node) not in ("alias", "detach"))
        node, reader = source, node
    return node, reader, is_moved


def _viewed(node: Any) -> Any:
    """The tensor that a node is a view of; None if it is no view."""
    if node.op != "call_function" or not (fx_passes.is_view(node) or fx_passes.name_of(node) in _SAME):
        return None
    source = node.all_input_nodes[0]
    return source.kwargs["input_"][node.args[1]] if fx_passes.name_of(source) == _REJOINED else source


_SAME = {"getitem", "reshape", "_unsafe_view", "splitwithsizes_cat_replace"}
"""Operators without torch's mark of a view. The last one is inductor's name of a tensor that was split and rejoined."""

_REJOINED = "cat_splitwithsizes_replace"
"""Inductor's name of a list of tensors that were rejoined and split."""


def _insert_copy(graph: Graph, user: Any, source: Any) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first) if source.op == "placeholder" else graph.inserting_after(source):
        made = graph.call_function(torch.ops.purestep.own_copy.default, (source,))
    made.meta.update(source.meta)
    if user.op == "output":
        user.replace_input_with(source, made)
    else:
        user.update_arg(1, made)  # replaces the source, not the destination


def store_separately(graph: Graph, node: Any, reader: Any) -> None:
    """Store a value in separate memory before ``reader`` reads it."""
    from torch._inductor import inductor_prims

    own: Any = inductor_prims.force_stride_order
    with graph.inserting_after(node):
        made = graph.call_function(own, (node, node.meta["val"].stride()))
    made.meta.update(node.meta)
    reader.replace_input_with(node, made)
