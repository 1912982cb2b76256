"""Higher-order operators in a step: `torch.cond`, `torch.while_loop` and others that take functions.

Torch runs them through Dynamo even in eager mode, which captures their functions as graphs; a trace contains these.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.fx import GraphModule


def operators(graph: GraphModule) -> list[str]:
    """Distinct names of the higher-order operators in a graph."""
    kind: Any = importlib.import_module("torch._ops").HigherOrderOperator
    return list(dict.fromkeys(str(node.target) for node in graph.graph.nodes if isinstance(node.target, kind)))


def cure(names: list[str]) -> str:
    """The cure if inductor cannot compile operators of these names."""
    is_loop = any("loop" in name for name in names)
    written = "write a Python loop of a fixed number of passes, or run the loop under torch.no_grad()"
    chosen = "compute both results and choose by torch.where(condition, a, b)"
    return (
        'pass backend="aot_eager", which runs the captured operations one by one; or call the step itself, in eager '
        f"mode (in fit: compile=False); or {written if is_loop else chosen}"
    )


def copy_operands(graph: GraphModule) -> GraphModule:
    """Copy the operands of these operators and the results of their functions: inductor rejects operands that share
    memory, such as weights that are views of one vector, and a result that is an operand or another result.
    """
    kind: Any = importlib.import_module("torch._ops").HigherOrderOperator
    for part in (graph, *inner(graph)):
        for node in [node for node in part.graph.nodes if isinstance(node.target, kind)]:
            node.meta.pop("unbacked_bindings", None)  # symbols of the finished trace
            _copy_tensors(part.graph, node)
        if part is not graph:
            _copy_tensors(part.graph, part.graph.output_node())
        part.recompile()
    return graph


def _copy_tensors(graph: Any, node: Any) -> None:
    """Replace each tensor argument of a node by a separate copy."""
    from torch.fx.node import map_arg

    def copied(source: Any) -> Any:
        if not isinstance(source.meta.get("val"), torch.Tensor):
            return source
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.aten.clone.default, (source,))
        made.meta.update(source.meta)
        return made

    node.args = map_arg(node.args, copied)


def inner(graph: GraphModule) -> Iterator[GraphModule]:
    """The graphs of the operators' functions."""
    yield from (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule) and part is not graph)


@contextmanager
def aliased_inputs_allowed() -> Generator[None]:
    """Let the operators' functions use several weights that are views of one vector. Torch rejects inputs that share
    memory, because one might be written; a step writes none. Changes a class of Dynamo: call it inside
    `capture.exclusive`."""
    graphs: Any = importlib.import_module("torch._dynamo.output_graph")
    kind = graphs.SubgraphTracer
    if not hasattr(kind, "has_aliasing"):  # another torch
        yield
        return
    before = kind.has_aliasing

    def has_aliasing(tracer: Any) -> Any:
        found = before(tracer)
        return dataclasses.replace(found, has_aliasing=False) if found.msg.startswith("Input-to-input") else found

    kind.has_aliasing = has_aliasing
    try:
        yield
    finally:
        kind.has_aliasing = before
