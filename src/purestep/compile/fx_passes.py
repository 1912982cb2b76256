"""Rewrites of a traced graph before it is compiled, and queries about a graph."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import StepContractError
from ..torch_ext import tracing
from . import control_flow

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import Graph, GraphModule, Node

ONE_DTYPE = (
    'call model.float() before ps.program and pass float32 batches, or set ps.program(..., precision="64-true"), which '
    "casts both"
)
"""The cure for weights and batches of different dtypes."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


def checked(graph: GraphModule) -> GraphModule:
    """Check a graph and rewrite it for the compiler.

    Raises:
        StepContractError: a matrix product of two dtypes, which fake tensors accept but torch rejects at run time;
            random numbers drawn in a function of `torch.cond` and the like.
    """
    if any(map(draws, control_flow.inner(graph))):
        raise StepContractError(
            f"random numbers are drawn inside {', '.join(control_flow.operators(graph))}, whose gradient draws others",
            where="step",
            hint="draw them before, and pass them as operands (dropout: x * torch.bernoulli(keep) / p)",
        )
    for node in graph.graph.nodes:
        if name_of(node) not in _PRODUCTS:
            continue
        values = [source.meta.get("val") for source in node.all_input_nodes]
        dtypes = {value.dtype: None for value in values if isinstance(value, Tensor)}
        if len(dtypes) > 1:
            raise StepContractError(
                f"a product of {' and '.join(map(str, dtypes))} ({node.target})",
                where="step",
                hint=ONE_DTYPE,
            )
    collectives_in_order(graph)
    return graph


_LOW = {
    *(torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
"""Dtypes that inductor computes in float32."""


def rounding(graph: GraphModule) -> dict[str, Any]:
    """Inductor's option `emulate_precision_casts` for a graph that casts to a low precision and computes no product in
    it, as ``x.bfloat16().float()`` does.

    Inductor cancels the two casts without the option, which rounds every operation in a low precision and so slows down
    a step in mixed precision, whose casts feed products.
    """
    casts = False
    for part in (graph, *control_flow.inner(graph)):
        for node in part.graph.nodes:
            values = [source.meta.get("val") for source in node.all_input_nodes]
            reads_low = any(isinstance(value, Tensor) and value.dtype in _LOW for value in values)
            made = node.meta.get("val")
            casts = casts or (isinstance(made, Tensor) and made.dtype in _LOW and node.op == "call_function")
            if reads_low and (name_of(node) in _PRODUCTS or "attention" in name_of(node)):
                return {}
    return {"emulate_precision_casts": True} if casts else {}


def copied(leaf: Tensor) -> Tensor:
    """Copy a batch's tensor at the beginning of a graph; see `without_copies`."""
    return leaf.clone(memory_format=torch.preserve_format)  # the explicit argument marks our copies


def without_copies(graph: GraphModule) -> GraphModule:
    """Remove copies of inputs (`copied`) that are never written, neither directly nor through a view."""
    base, written = dict[Any, Any](), set[Any]()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.target is operator.getitem:  # one of several views: of `split`, `chunk` or `unbind`
            base[node] = base.get(node.args[0], node.args[0])
        if schema is None or not node.all_input_nodes:
            continue
        if schema.is_mutable:
            written |= {base.get(source, source) for source in node.all_input_nodes}
        if schema.is_mutable or is_view(node):
            base[node] = base.get(node.all_input_nodes[0], node.all_input_nodes[0])
    for node in list(graph.graph.nodes):
        is_copied = (
            node.target is torch.ops.aten.clone.default and node.kwargs.get("memory_format") is torch.preserve_format
        )
        # A user's own copy of a buffer is one of ours too, and the buffer is written later.
        if is_copied and node.args[0].op == "placeholder" and not written & {node, node.args[0]}:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph


def collectives_in_order(graph: GraphModule) -> None:
    """Let each collective depend on the one before, by its argument ``after``. A compiler orders independent operations
    by the sizes of their results, which differ between processes, and drops results that only one process reads: all
    processes must make the same calls in the same order."""
    last: Any = None
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") != "purestep" or node.target._schema.arguments[-1].name != "after":
            continue
        if last is not None:
            node.update_kwarg("after", last)
        last = node


def may_resize(graph: GraphModule) -> bool:
    """True if a kernel may give its argument another size, which no trace sees: fake quantization with a scale for each
    channel does so in its first call."""
    return any(name_of(node).startswith("_fused_moving_avg_obs_fq_helper") for node in graph.graph.nodes)


def has_functional_collectives(graph: GraphModule) -> bool:
    """True if a graph calls torch's functional collectives. Their wait looks for pending work by storage: a result that
    lies in other storage over the same memory is read before it has arrived."""
    return any(str(getattr(node.target, "namespace", "")).startswith("_c10d_functional") for node in graph.graph.nodes)


def reshaped(graph: GraphModule) -> GraphModule:
    """Turn each `view` into a `reshape`: a compiler may change the layout of its input, and some kernels lay out their
    result otherwise than fake tensors do (the gradient of `batch_norm` on the CPU)."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return graph


def is_functional(graph: GraphModule) -> bool:
    """True if a graph writes only inputs, each once, and never reads them afterwards, not even through a view."""
    written, base = set[Any](), dict[Any, Any]()  # base: view -> the tensor that it views
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if any(base.get(source, source) in written for source in node.all_input_nodes):
            return False
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":
                return False
            written |= {node, node.args[0]}
        elif node.target is operator.getitem or is_view(node):
            base[node] = base.get(node.args[0], node.args[0])
    return True


def writing_last(graph: GraphModule) -> GraphModule:
    """Move every write to the end of the graph: inductor reads views, and copies that it removed, at their use."""
    last = output(graph)
    for node in writes(graph.graph):
        last.prepend(node)
    return graph


def draws(graph: GraphModule) -> bool:
    """True if a graph draws random numbers."""
    return any(
        hasattr(node.target, "tags") and tracing.is_random(node.target, node.args, node.kwargs)
        for node in graph.graph.nodes
    )


_KNOWN = {"aten", "prims", "_prims", "purestep"}


def is_recordable(graph: GraphModule) -> bool:
    """True if a CUDA graph may hold this graph: it calls only torch's and purestep's operators, and none that talks to
    other processes or that torch keeps out of CUDA graphs. A user's operator may ask the host for what a replay would
    not ask again."""
    for node in graph.graph.nodes:
        target = node.target
        is_graph = node.op == "get_attr" and not isinstance(getattr(graph, node.target, None), Tensor)
        if node.op == "call_module" or is_graph:
            return False
        if node.op != "call_function" or target is operator.getitem:
            continue
        tags = getattr(target, "tags", ())
        if getattr(target, "namespace", "") not in _KNOWN or getattr(torch.Tag, "cudagraph_unsafe", None) in tags:
            return False
        if target.namespace == "purestep" and [each.name for each in target._schema.arguments][-1:] == ["after"]:
            return False  # a collective
    return True


def output(graph: GraphModule) -> Any:
    """The output node of a graph."""
    return next(node for node in reversed(graph.graph.nodes) if node.op == "output")


# --- nodes ------------------------------------------------------------------------------------------------------------


def writes(graph: Graph) -> list[Node]:
    """The nodes that write a graph's inputs, in order."""
    return [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]


def is_view(node: Any) -> bool:
    """True if a node is a view of another one."""
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def name_of(node: Any) -> str:
    """The name of a node's operator, without the overload."""
    return getattr(node.target, "__name__", "").partition(".")[0]


def size(node: Any) -> int:
    """Number of elements of a node's tensor; 0 if it is no tensor or has symbolic sizes."""
    value = node.meta.get("val")
    sizes: Any = value.shape if isinstance(value, Tensor) else ("none",)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
