"""`torch.cond`, `torch.while_loop` and their kind in a step: operators that take functions.

torch runs them through Dynamo in eager mode too, which makes graphs of their functions; a trace finds these.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.fx import GraphModule


class Mode(TorchDispatchMode):
    """A mode of a trace. It sees these operators, and Dynamo does not skip their frames because of it: Dynamo would go
    on skipping them for the rest of the process."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """See above."""
        return True


def operators(graph: GraphModule) -> list[str]:
    """Names of those that a graph calls, each once."""
    kind: Any = importlib.import_module("torch._ops").HigherOrderOperator
    return list(dict.fromkeys(str(node.target) for node in graph.graph.nodes if isinstance(node.target, kind)))


def cure(names: list[str]) -> str:
    """What to do where inductor does not compile operators of these names."""
    is_loop = any("loop" in name for name in names)
    written = "write a Python loop of a fixed number of passes, or run the loop under torch.no_grad()"
    chosen = "compute both results and choose by torch.where(condition, a, b)"
    return (
        'pass backend="aot_eager", which runs the captured operations one by one; or use the step itself, in eager '
        f"mode (in fit: compile=False); or {written if is_loop else chosen}"
    )


def apart(graph: GraphModule) -> GraphModule:
    """The graph with copies of what these operators take and of what their functions return: inductor refuses operands
    that share memory, as weights do that are views of one vector, and a result that is an operand or another result.
    """
    kind: Any = importlib.import_module("torch._ops").HigherOrderOperator
    for part in (graph, *inner(graph)):
        for node in [node for node in part.graph.nodes if isinstance(node.target, kind)]:
            node.meta.pop("unbacked_bindings", None)  # sizes of the trace that is over
            _copy_tensors(part.graph, node)
        if part is not graph:
            _copy_tensors(part.graph, part.graph.output_node())
        part.recompile()
    return graph


def _copy_tensors(graph: Any, node: Any) -> None:
    """Every tensor that a node takes as a copy of its own, however often it takes it."""
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
    """The graphs of their functions."""
    yield from (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule) and part is not graph)


@contextmanager
def of_one_vector() -> Generator[None]:
    """Their functions may use several weights, which are views of one vector: torch refuses inputs that share memory,
    because one might be written. In a step none is. Under `with_compiler`: this patches Dynamo."""
    graphs: Any = importlib.import_module("torch._dynamo.output_graph")
    kind = graphs.SubgraphTracer
    if not hasattr(kind, "has_aliasing"):  # another torch
        yield
        return
    with mock.patch.object(kind, "has_aliasing", _but_inputs(kind.has_aliasing)):
        yield


def _but_inputs(true: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def has_aliasing(tracer: Any) -> Any:
        found = true(tracer)
        return dataclasses.replace(found, has_aliasing=False) if found.msg.startswith("Input-to-input") else found

    return has_aliasing
