"""Detection of round-trip casts (to a low precision and back), which inductor removes by default.

``x.bfloat16().float()`` simulates a low precision in a higher one. Inductor computes bfloat16 values in float32 between
two loads, so the two casts cancel. Its setting `emulate_precision_casts` keeps every cast, and rounds the result of
every low-precision operator that the trace has marked. It costs 10 to 40 % of a step in bfloat16 (a GPT, an MLP; on the
CPU), so it is set only for graphs that cast down and up again with only elementwise operators, views and copies in
between. In mixed precision the casts feed matrix products.

Before torch 2.13, inductor removes casts even with this setting. There `store_rounded` passes each rounded value
through an operator that inductor cannot fuse, so that the value is stored in the low precision.

One difference of a unit in the last place remains: in a sum of a bfloat16 tensor and a Python number, eager mode first
rounds the number to bfloat16, and inductor does not.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library
from torch._ops import OpOverload
from torch.torch_version import TorchVersion

from ..torch_ext import tracing
from . import control_flow
from .control_flow import Mode

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

_LOW = {
    *(torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
"""Dtypes that inductor computes in float32."""

_ELEMENTWISE = {
    *("clone", "_to_copy", "copy", "contiguous", "_unsafe_view", "repeat", "expand_copy", "view_copy", "permute_copy"),
    *("cat", "stack", "flip", "roll", "tril", "triu", "where", "masked_fill", "take", "gather", "scatter", "embedding"),
    *("index", "index_select", "index_put", "select_scatter", "slice_scatter", "select_backward", "slice_backward"),
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("upsample_nearest1d", "upsample_nearest2d", "pixel_shuffle", "pixel_unshuffle"),
    *("hardswish", "gelu", "glu", "prelu", "_prelu_kernel", "fill", "leaky_relu_backward", "hardswish_backward"),
    *("hardsigmoid_backward", "hardtanh_backward", "elu_backward", "softplus_backward", "mish_backward"),
    *("glu_backward", "softshrink_backward", "hardshrink_backward", "log_sigmoid_backward"),
}
"""Elementwise operators and copies, in place or not, that lack torch's tag for pointwise operators."""

OPTION = "emulate_precision_casts"

_MARK = "low_precision_pointwise_barrier"
"""The node metadata that a trace under `emulate_precision_casts` sets; inductor rounds by it whatever its settings."""


_KEEPS_CASTS = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""True if inductor's setting keeps every cast."""


@library.custom_op("purestep::rounded", mutates_args=(), schema="(Tensor value) -> Tensor")
def rounded(value: Tensor) -> Tensor:
    """Return a copy. Inductor has no lowering for this operator, so it stores the argument in memory."""
    return value.clone()


@rounded.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


def options(rounds: bool) -> dict[str, Any]:
    """Inductor's configuration for a graph that has round-trip casts (``rounds``) or has none."""
    return {OPTION: True} if rounds else {}


def unmark(graph: GraphModule) -> None:
    """Remove the marks from a graph without round-trip casts."""
    for node in graph.graph.nodes:
        node.meta.pop(_MARK, None)


def store_rounded(graph: GraphModule, options: Mapping[str, Any] | None, *, rounds: bool) -> None:
    """Before torch 2.13, insert `rounded` after each value that later operators of the graph must read rounded.

    Args:
        graph: changed.
        options: of the user; the setting there replaces ``rounds``, and True rounds every elementwise result.
        rounds: `Casts` has seen a round-trip cast.
    """
    wanted = (options or {}).get(OPTION)
    if _KEEPS_CASTS or not (rounds if wanted is None else wanted):
        return
    for part in (graph, *control_flow.inner(graph)):
        _store_in(part, Casts(everywhere=bool(wanted)))


def _store_in(graph: GraphModule, casts: Casts) -> None:
    nodes = list(graph.graph.nodes)
    last_read = {_memory(each): at for at, node in enumerate(nodes[:-1]) for each in node.all_input_nodes}
    for at, node in enumerate(nodes):
        if not isinstance(node.target, OpOverload) or not _is_floating(node.meta.get("val")):
            continue
        read = [value for each in node.all_input_nodes if isinstance(value := each.meta.get("val"), Tensor)]
        if casts.rounds(node.target, read, node.meta["val"]) and last_read.get(_memory(node), -1) > at:
            _store(graph, node)
    graph.recompile()


def _store(graph: GraphModule, node: Any) -> None:
    with graph.graph.inserting_after(node):
        made = graph.graph.call_function(torch.ops.purestep.rounded.default, (node,))
    made.meta.update(node.meta)
    if not node.target._schema.is_mutable:
        node.replace_all_uses_with(made, delete_user_cb=functools.partial(operator.is_not, made))
        return
    with graph.graph.inserting_after(made):
        written = graph.graph.call_function(torch.ops.aten.copy_.default, (node, made))
    written.meta.update(node.meta)


def _memory(node: Any) -> Any:
    """The identity of the storage of a node's tensor, which its views share; None if it is no strided tensor."""
    value = node.meta.get("val")
    memory: Any = value.untyped_storage() if isinstance(value, Tensor) and value.layout is torch.strided else None
    return None if memory is None else memory._cdata


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def marking(graph: GraphModule) -> Callable[..., Any]:
    """Return a function that runs a graph, and whose trace keeps this graph's marks: a new trace would mark the
    decomposed operators instead of the step's."""
    from torch.fx import Interpreter
    from torch.fx.traceback import preserve_node_meta

    def run(*inputs: Any) -> Any:
        with preserve_node_meta():
            return Interpreter(graph).run(*inputs)

    return run if any(_MARK in node.meta for node in graph.graph.nodes) else graph


class Casts(Mode):
    """Mode that records in ``seen`` whether some value was cast to a low precision and back.

    Args:
        everywhere: for `rounds`: every elementwise result in a low precision counts, not only what was cast down.
    """

    def __init__(self, *, everywhere: bool = False) -> None:
        super().__init__()
        self.seen, self._everywhere = False, everywhere
        self._rounded: dict[int, Any] = {}  # storages of values cast down, or computed elementwise from such

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing.has_parts(types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        is_operator = isinstance(func, OpOverload)  # not a higher-order operator
        if is_operator and not self.seen and _is_floating(made):
            self.rounds(func, list(_tensors(args)), made)
        return made

    def rounds(self, func: Any, given: list[Tensor], made: Tensor) -> bool:
        """Record one operator; True if it rounds its result, which was cast down or is computed from such values."""
        low = made.dtype in _LOW
        name = func._overloadpacket.__name__.removesuffix("_")
        if torch.Tag.pointwise not in func.tags and name not in _ELEMENTWISE:
            return False  # a view shares the storage of its base
        if any(self._is_rounded(leaf) and (not low or leaf.dtype != made.dtype) for leaf in given):
            self.seen = True
        is_cast = low and any(leaf.is_floating_point() and _digits(leaf) > _digits(made) for leaf in given)
        rounds = low and (self._everywhere or is_cast or any(map(self._is_rounded, given)))
        if rounds:
            memory: Any = made.untyped_storage()
            self._rounded[memory._cdata] = memory
        return rounds

    def _is_rounded(self, value: Tensor) -> bool:
        memory: Any = value.untyped_storage() if value.layout is torch.strided else None
        return memory is not None and memory._cdata in self._rounded


def _digits(value: Tensor) -> float:
    return -torch.finfo(value.dtype).eps


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
