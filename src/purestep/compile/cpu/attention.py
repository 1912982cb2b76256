"""Attention over at most 256 positions, as matrix products and elementwise loops.

Buys: torch's flash kernel is designed for long sequences, whose matrix of weights would not fit into memory. For a few
hundred positions it takes two to three times as long as its arithmetic. Here a step computes the weights, stores them
for the backward pass, and leaves masks, exponentials and sums to inductor's loops.

Private names: ``torch._inductor.decomposition.select_decomp_table``. Without: torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import cpp_kernel, gemm

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

LONGEST = 256
"""Maximal number of positions: the stored weights take four times the memory of an activation, for heads of 64."""


def written_out(graph: GraphModule) -> GraphModule:
    """Replace torch's attention kernel in a graph by products and sums, for short sequences."""
    if not cpp_kernel.possible():
        return graph
    aten: Any = torch.ops.aten
    known = dict[Any, Any]()  # logsumexp node -> weights
    made = dict[Any, Any]()  # equal layers share their operations
    for node in list(graph.graph.nodes):
        if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default and _suits(node):
            out, total, weights = _inlined(graph, node, made, _forward, node.args[:3], _causal(node, 4), _scale(node))
            known[total] = weights
            _replace(graph, node, (out, total))
        elif node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default and _suits(node, 1):
            grad, query, key, value, out, total = node.args[:6]
            weights = known.get(_source(total))
            if weights is not None:
                inputs = (grad, query, key, value, out, weights)
                _replace(graph, node, _inlined(graph, node, made, _backward, inputs, _scale(node)))
    graph.recompile()
    return graph


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    scores = _product(query, key.transpose(-1, -2)) * scale
    if causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        later = torch.arange(key.shape[-2], device=query.device) > rows
        scores = torch.where(later, -math.inf, scores)
    total = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - total.unsqueeze(-1))
    return _product(weights, value, "heads inside"), total, weights


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Equations of FlashAttention (Dao et al. 2022, appendix B.2)."""
    through = _product(grad, value.transpose(-1, -2))
    slope = weights * (through - (grad * out).sum(-1, keepdim=True)) * scale
    pairs = ((slope, key), (slope.transpose(-1, -2), query), (weights.transpose(-1, -2), grad))
    return tuple(_product(left, right, "heads inside") for left, right in pairs)


def _product(a: Tensor, b: Tensor, form: str = "plain") -> Tensor:
    return torch.ops.purestep.product(a, b, form, gemm.VERSION)


# --- replacement in a graph -------------------------------------------------------------------------------------------


def _suits(node: Node, first: int = 0) -> bool:
    """True if query, key and value are short and have equally many heads, without a mask or dropout."""
    query, key, value = (source.meta["val"] for source in node.args[first : first + 3])  # type: ignore[union-attr]
    static = all(type(size) is int for each in (query, key, value) for size in each.shape)
    dropout = node.args[6 if first else 3] if len(node.args) > (6 if first else 3) else 0.0
    plain = query.dtype == torch.float32 and not dropout and node.kwargs.get("attn_mask") is None
    same = query.shape[:2] == key.shape[:2] == value.shape[:2]
    return static and plain and same and max(query.shape[-2], key.shape[-2]) <= LONGEST


def _causal(node: Node, at: int) -> bool:
    return bool(node.args[at]) if len(node.args) > at else False


def _scale(node: Node) -> float:
    given: Any = node.kwargs.get("scale")
    query: Any = node.args[1 if "backward" in str(node.target) else 0]
    return 1 / math.sqrt(query.meta["val"].shape[-1]) if given is None else given


def _source(node: Any) -> Any:
    """The origin of a saved tensor: autograd detaches the tensors that it saves."""
    while node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = node.args[0]
    return node


def _inlined(
    graph: GraphModule, at: Node, made: dict[Any, Any], function: Callable[..., Any], inputs: Any, *constants: Any
) -> Any:
    """Insert the function's operations before a node, return its result nodes; ``made`` caches the operations."""
    fakes = [source.meta["val"] for source in inputs]
    kind = (function, constants, *((fake.shape, fake.stride(), fake.device) for fake in fakes))
    if kind not in made:
        made[kind] = _operations(lambda *tensors: function(*tensors, *constants), fakes)
    places = [node for node in made[kind].nodes if node.op == "placeholder"]
    with graph.graph.inserting_before(at):
        return graph.graph.graph_copy(made[kind], dict(zip(places, inputs, strict=True)))


def _operations(function: Callable[..., Any], fakes: list[Any]) -> Any:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with fakes[0].fake_mode:
        return make_fx(function, decomposition_table=select_decomp_table())(*fakes).graph


def _replace(graph: GraphModule, node: Node, results: Any) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)
