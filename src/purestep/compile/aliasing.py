"""What a donated step writes and returns, in memory of its own where inductor would read a buffer too late.

A step returns ``{"weights": new, "before": weights.clone()}``. In the graph, ``new`` and the clone are computed, then
both are written. But inductor drops what changes no number (a clone, ``x * 1``, a cast there and back), and does not
see that what is left is a buffer, which has been written by then: ``before`` becomes ``new``. `torch.compile` of such a
function is wrong in the same way. A metric that is a number of the old state would become one of the new. Here such a
source, or result, goes through an operator that none of its passes knows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, library

from . import philox, random_ops

if TYPE_CHECKING:
    from torch.fx import Graph, Node


@library.custom_op("purestep::taken", mutates_args=(), schema="(Tensor value) -> Tensor")
def taken(value: Tensor) -> Tensor:
    """A copy that inductor makes, whatever it is a copy of."""
    return value.clone()


@taken.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@functools.cache
def register() -> None:
    """Let inductor make that copy in a loop of its own. Loads it."""
    from torch._inductor import ir, lowering

    def lowered(value: Any) -> Any:
        return kind.copy_input(value)

    kind: Any = ir.ExternKernel
    decorator: Any = lowering.register_lowering(torch.ops.purestep.taken.default, type_promotion_kind=None)
    decorator(lowered)


def writes(graph: Graph) -> list[Node]:
    """Where a graph writes its inputs, in order."""
    return [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]


def apart(graph: Graph, *, is_simplified: bool = False) -> None:
    """Put such sources into memory of their own, and whatever is written through a view of it.

    Args:
        graph: changed.
        is_simplified: inductor has dropped copies already.
    """
    found = writes(graph)
    if not found:
        return
    shown = _Shown(graph)
    held(graph, shown, is_simplified=is_simplified)
    for node in found:
        for at in list(shown(node.args[1])):
            made = at.node.op == "call_function" and isinstance(at.node.meta.get("val"), Tensor)  # not several at once
            if at.moved and made and at.node.target is not operator.getitem:
                _computed_apart(graph, at)


def held(graph: Graph, shown: _Shown, *, is_simplified: bool = False) -> None:
    """Have what is written, or returned, and may turn out to be a written buffer, taken before the first write.

    Args:
        graph: changed.
        shown: what its nodes may show.
        is_simplified: inductor has dropped copies already, so that a result that is a buffer was a copy of it. Before
            that it is the buffer, as it becomes.
    """
    found = writes(graph)
    written = {cast(Any, node.args[0]) for node in found}
    for node in found:
        buffer, source, *_ = node.args
        if any(at.node in written and (at.node is not buffer or at.moved) for at in shown(source)):
            _take(graph, node, source)
    last = next(node for node in reversed(graph.nodes) if node.op == "output")
    for source in last.all_input_nodes:
        if any(at.node in written and (at.copied or is_simplified) for at in shown(source)):
            _take(graph, last, source)


def as_option(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's options, with `apart`, `philox.held` and `reductions.early` before the passes that it ends with: for
    what goes through its front door.

    Loads what it needs of `draws` too, whose code is part of the name that its cache knows a graph by.
    """
    from torch._inductor import config, custom_graph_pass

    from . import early_reductions  # which asks this module about nodes

    register()
    random_ops.register()
    philox.register()
    early_reductions.register()
    name, settings, passes = "post_grad_custom_pre_pass", cast(Any, config), cast(Any, custom_graph_pass)
    given: Any = options.get(name, settings.post_grad_custom_pre_pass)
    theirs: tuple[Any, ...] = tuple(given) if isinstance(given, list | tuple) else (given,) if given else ()
    aware: Any = getattr(passes, "CustomInferenceAwareGraphPass", None)  # torch 2.11 has none

    class Held(aware or passes.CustomGraphPass):
        def __call__(self, graph: Graph, is_inference: bool = False) -> None:
            for each in theirs:
                known = {"is_inference": is_inference} if aware and isinstance(each, aware) else {}
                each(graph, **known)
            apart(graph, is_simplified=True)
            philox.held(graph)
            early_reductions.early(graph)

        def uuid(self) -> Any:
            """For inductor's cache, which keeps nothing that was made with a pass it cannot tell from others."""
            found = [each.uuid() if isinstance(each, passes.CustomGraphPass) else None for each in theirs]
            files = (__file__, random_ops.__file__, philox.__file__, early_reductions.__file__)
            return (passes.get_hash_for_files(files), *found) if all(found) else None

    return {**options, name: Held()}


def _take(graph: Graph, user: Node, source: Any) -> None:
    is_computed = source.op != "placeholder"
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_after(source) if is_computed else graph.inserting_before(first):
        made = graph.call_function(torch.ops.purestep.taken.default, (source,))
    made.meta.update(source.meta)
    if user.op == "output":
        user.replace_input_with(source, made)
    else:
        user.update_arg(1, made)  # what is written; where it is written to stays


def is_view(node: Any) -> bool:
    """Whether a node shows memory of another one."""
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def name_of(node: Any) -> str:
    """An operator's name, whichever of its overloads a node calls."""
    return getattr(node.target, "__name__", "").partition(".")[0]


def _computed_apart(graph: Graph, at: _At) -> None:
    """What an input becomes through a view in memory of its own: inductor computes it while it writes the input, of
    what it has written already."""
    from torch._inductor import inductor_prims

    own: Any = inductor_prims.force_stride_order
    with graph.inserting_after(at.node):
        made = graph.call_function(own, (at.node, at.node.meta["val"].stride()))
    made.meta.update(at.node.meta)
    at.reader.replace_input_with(at.node, made)


# --- what may turn out to be an input ---------------------------------------------------------------------------------

_SAME = {
    *("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "_to_copy", "convert_element_type"),
    *("_unsafe_view", "reshape", "view_copy", "constant_pad_nd", "repeat", "cat", "getitem"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"),
}
"""Operators whose result can be one of their inputs, number by number, or a view of one."""

_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "true_divide": 1, "pow": 1}
"""What changes nothing: a sum by this, a product by that. Of any other number the result is computed."""


class _At(NamedTuple):
    """What a node may show: an input, or something computed."""

    node: Any
    reader: Any  # on the way to it; None where it is the node itself
    moved: bool  # its numbers have other places
    copied: bool  # it was memory of its own before inductor saw that nothing changes


class _Shown:
    """What the nodes of a graph may show.

    Says so of some that are computed after all: those are copied once more.
    """

    def __init__(self, graph: Graph) -> None:
        self._depends = set[Any]()  # on inputs; what does not is a constant, which inductor computes beforehand
        for node in graph.nodes:
            if node.op == "placeholder" or any(each in self._depends for each in node.all_input_nodes):
                self._depends.add(node)

    def __call__(self, source: Any) -> Iterator[_At]:
        seen, waiting = set[_At](), [_At(source, None, moved=False, copied=False)]
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            node, _, moved, copied = one
            same = self._same_as(node)
            if not same:
                yield one
            own = copied or not (is_view(node) or node.target is operator.getitem)
            waiting += [_At(each, node, moved or _moves(each, node), own) for each in same]

    def _same_as(self, node: Any) -> list[Any]:
        """Those of a node's inputs that it may be the same as."""
        if node.op != "call_function":
            return []
        name = name_of(node)
        inputs = [each for each in node.all_input_nodes if each in self._depends]
        if name == "copy":  # of its second argument, into a tensor like the first
            return [each for each in inputs if each is node.args[1]]
        if name == "cat" and len(node.args[0]) > 1:  # memory of its own, unless it puts together what was split
            parts = node.args[0]
            whole = {each.args[0] for each in parts if each.target is operator.getitem}
            return list(whole) if len(whole) == 1 and all(each.target is operator.getitem for each in parts) else []
        if is_view(node) or name in _SAME:
            return inputs
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(inputs) == 1:
            numbers = [each for each in node.args if isinstance(each, int | float)]
            if all(name in _NEUTRAL and each == _NEUTRAL[name] for each in numbers):
                return inputs
        return []


def _moves(before: Any, after: Any) -> bool:
    """Whether numbers may have other places in one node than in the other; not where there is only one number."""
    shown = [node.meta.get("val") for node in (before, after)]
    if all(isinstance(value, Tensor) for value in shown):
        one, other = shown
        if one.numel() == other.numel() == 1:
            return False
        return (is_view(after) and name_of(after) not in ("alias", "detach")) or one.shape != other.shape
    return True
