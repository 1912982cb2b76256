"""Copies in a donated step's graph where inductor would read a buffer after it was written.

Take a step that returns ``{"weights": new, "before": weights.clone()}``. The graph computes ``new`` and the clone, then
writes both. But inductor removes operations that change no value (a clone, ``x * 1``, a round-trip cast), and then
reads the buffer itself, which has been overwritten: ``before`` becomes ``new``. `torch.compile` of such a function has
the same bug. A metric that is a value of the old state would become one of the new state. Here such a source, or
result, passes through an operator that inductor's passes cannot remove.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, library

from . import draw_code, philox

if TYPE_CHECKING:
    from torch.fx import Graph, Node


@library.custom_op("purestep::taken", mutates_args=(), schema="(Tensor value) -> Tensor")
def taken(value: Tensor) -> Tensor:
    """A copy that inductor never removes."""
    return value.clone()


@taken.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@functools.cache
def register() -> None:
    """Register the lowering of `taken`: a separate copy. Loads inductor."""
    from torch._inductor import ir, lowering

    def lowered(value: Any) -> Any:
        return kind.copy_input(value)

    kind: Any = ir.ExternKernel
    decorator: Any = lowering.register_lowering(torch.ops.purestep.taken.default, type_promotion_kind=None)
    decorator(lowered)


def writes(graph: Graph) -> list[Node]:
    """The nodes that write a graph's inputs, in order."""
    return [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]


def separate_sources(graph: Graph, *, is_simplified: bool = False) -> None:
    """Copy sources that may alias a written buffer, and values that are written through a view of their input.

    Args:
        graph: changed.
        is_simplified: inductor has already removed copies.
    """
    found = writes(graph)
    if not found:
        return
    sources = _Sources(graph)
    copy_before_writes(graph, sources, is_simplified=is_simplified)
    for node in found:
        for at in list(sources(node.args[1])):
            made = at.node.op == "call_function" and isinstance(at.node.meta.get("val"), Tensor)  # a single tensor
            if at.moved and made and at.node.target is not operator.getitem:
                # Inductor would compute it during the write, from elements that are already overwritten.
                store_separately(graph, at.node, at.reader)


def copy_before_writes(graph: Graph, sources: _Sources, *, is_simplified: bool = False) -> None:
    """Copy sources and results that may alias a written buffer before the first write.

    Args:
        graph: changed.
        sources: finds what its nodes may alias.
        is_simplified: inductor has already removed copies, so a result that is a buffer was a copy of it. Before
            that, such a result is meant to be the buffer after the writes.
    """
    found = writes(graph)
    written = {cast(Any, node.args[0]) for node in found}
    for node in found:
        buffer, source, *_ = node.args
        if any(at.node in written and (at.node is not buffer or at.moved) for at in sources(source)):
            _insert_copy(graph, node, source)
    last = next(node for node in reversed(graph.nodes) if node.op == "output")
    for source in last.all_input_nodes:
        if any(at.node in written and (at.copied or is_simplified) for at in sources(source)):
            _insert_copy(graph, last, source)


def as_option(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add `separate_sources`, `philox.protect`, `early_reductions.early` and `mixed_reductions.separate` to inductor's
    options as a pass before its last ones, `inplace_reuse` and `early_reductions.OPTIONS`, for graphs that are compiled
    through its public entry.

    Registers `draw_code` too: its code is part of the pass's cache key.
    """
    from torch._inductor import config, custom_graph_pass

    from . import early_reductions, inplace_reuse, mixed_reductions  # the first and the last import this module

    register()
    draw_code.register()
    philox.register()
    early_reductions.register()
    name, settings, passes = "post_grad_custom_pre_pass", cast(Any, config), cast(Any, custom_graph_pass)
    given: Any = options.get(name, settings.post_grad_custom_pre_pass)
    theirs: tuple[Any, ...] = tuple(given) if isinstance(given, list | tuple) else (given,) if given else ()
    aware: Any = getattr(passes, "CustomInferenceAwareGraphPass", None)  # torch 2.11 has none

    class Passes(aware or passes.CustomGraphPass):
        def __call__(self, graph: Graph, is_inference: bool = False) -> None:
            for each in theirs:
                known = {"is_inference": is_inference} if aware and isinstance(each, aware) else {}
                each(graph, **known)
            separate_sources(graph, is_simplified=True)
            philox.protect(graph)
            early_reductions.early(graph)
            mixed_reductions.separate(graph)

        def uuid(self) -> Any:
            """The key for inductor's cache, which stores no graph compiled with a pass without a key."""
            found = [each.uuid() if isinstance(each, passes.CustomGraphPass) else None for each in theirs]
            used = (draw_code, philox, early_reductions, mixed_reductions)
            files = (__file__, *(str(module.__file__) for module in used))
            return (passes.get_hash_for_files(files), *found) if all(found) else None

    return {**inplace_reuse.option(options), **early_reductions.OPTIONS, **options, name: Passes()}


def _insert_copy(graph: Graph, user: Node, source: Any) -> None:
    is_computed = source.op != "placeholder"
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_after(source) if is_computed else graph.inserting_before(first):
        made = graph.call_function(torch.ops.purestep.taken.default, (source,))
    made.meta.update(source.meta)
    if user.op == "output":
        user.replace_input_with(source, made)
    else:
        user.update_arg(1, made)  # replaces the source, not the destination


def is_view(node: Any) -> bool:
    """True if a node is a view of another one."""
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def name_of(node: Any) -> str:
    """The name of a node's operator, without the overload."""
    return getattr(node.target, "__name__", "").partition(".")[0]


def store_separately(graph: Graph, node: Any, reader: Any) -> None:
    """Store a value in separate memory before ``reader`` reads it."""
    from torch._inductor import inductor_prims

    own: Any = inductor_prims.force_stride_order
    with graph.inserting_after(node):
        made = graph.call_function(own, (node, node.meta["val"].stride()))
    made.meta.update(node.meta)
    reader.replace_input_with(node, made)


def size(node: Any) -> int:
    """Number of elements of a node's tensor; 0 if it is no tensor or has symbolic sizes."""
    value = node.meta.get("val")
    sizes: Any = value.shape if isinstance(value, Tensor) else ("none",)
    if not all(isinstance(size, int) for size in sizes):
        return 0
    return math.prod(sizes)


# --- aliases of inputs ------------------------------------------------------------------------------------------------

_SAME = {
    *("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "_to_copy", "convert_element_type"),
    *("_unsafe_view", "reshape", "view_copy", "constant_pad_nd", "repeat", "cat", "getitem"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"),
}
"""Operators whose result may equal one of their inputs elementwise, or be a view of it."""

_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "true_divide": 1, "pow": 1}
"""The second operand with which an operator returns its input unchanged."""


class _Origin(NamedTuple):
    """A node that another one may alias: an input, or a computed value."""

    node: Any
    reader: Any  # the node that reads it on the path; None for the node itself
    moved: bool  # its elements have other positions
    copied: bool  # it was a copy before inductor simplified the graph


class _Sources:
    """Finds the nodes that a node of a graph may alias. May report too many, which costs an extra copy."""

    def __init__(self, graph: Graph) -> None:
        self._depends = set[Any]()  # nodes that depend on inputs; others are constants, which inductor folds
        for node in graph.nodes:
            if node.op == "placeholder" or any(each in self._depends for each in node.all_input_nodes):
                self._depends.add(node)

    def __call__(self, source: Any) -> Iterator[_Origin]:
        seen, waiting = set[_Origin](), [_Origin(source, None, moved=False, copied=False)]
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            node, _, moved, copied = one
            same = self._pass_through(node)
            if not same:
                yield one
            own = copied or not (is_view(node) or node.target is operator.getitem)
            waiting += [_Origin(each, node, moved or _is_moved(each, node), own) for each in same]

    def _pass_through(self, node: Any) -> list[Any]:
        """The inputs of a node that its result may equal."""
        if node.op != "call_function":
            return []
        name = name_of(node)
        inputs = [each for each in node.all_input_nodes if each in self._depends]
        if name == "copy":  # of its second argument
            return [each for each in inputs if each is node.args[1]]
        if name == "cat" and len(node.args[0]) > 1:  # a new tensor, unless it rejoins a split
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


def _is_moved(before: Any, after: Any) -> bool:
    """True if elements may have other positions in the second node; False for a single element."""
    values = [node.meta.get("val") for node in (before, after)]
    if all(isinstance(value, Tensor) for value in values):
        one, other = values
        if one.numel() == other.numel() == 1:
            return False
        return (is_view(after) and name_of(after) not in ("alias", "detach")) or one.shape != other.shape
    return True
