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
