"""Pieces of packed vectors as pointers of their own, so that layers of one shape are the same code.

A packed state has the weights of all layers in one vector, and inductor writes a piece's place into the kernel that
reads it. Kernels of two equal layers then differ in a number, and are written and compiled once a layer. Here the graph
has an input for each piece, and the C++ that calls the kernels finds out where it is (`wrapper.py`). The caller knows
nothing of this: it passes the vector, as before.

Inductor does not see that such an input is part of another one. All that could go wrong is that a vector is written
before a piece of it was read; `ordered` tells inductor's scheduler to wait.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_NAME = "purestep_piece"


class Piece(NamedTuple):
    """Which numbers of which input."""

    source: int
    """index of the input"""
    offset: int
    """of its first number, in numbers"""
    size: int


def of(name: str) -> Piece | None:
    """What an input of this name is a piece of; None where it is none."""
    prefix, *numbers = name.rsplit("_", 3)
    return Piece(*map(int, numbers)) if prefix == _NAME else None


def apart(graph: GraphModule) -> list[Tensor]:
    """Give the graph an input for every piece that it reads, after all others; what they look like, in that order."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    made: dict[Piece, Node] = {}
    for index, vector in enumerate(inputs):
        for split in _splits(vector):
            for part in list(split.users):
                value = part.meta["val"]
                offset = value.storage_offset() - vector.meta["val"].storage_offset()
                piece = Piece(index, offset, value.numel())
                if piece not in made:
                    made[piece] = _added(graph, piece, value, after=next(reversed(made.values()), inputs[-1]))
                part.replace_all_uses_with(made[piece])
                graph.graph.erase_node(part)
            graph.graph.erase_node(split)
    return [node.meta["val"] for node in made.values()]


def _added(graph: GraphModule, piece: Piece, value: Tensor, *, after: Node) -> Node:
    with graph.graph.inserting_after(after):
        node = graph.graph.placeholder("_".join(map(str, (_NAME, *piece))))
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return node


def _splits(vector: Node) -> list[Node]:
    """Where an input is taken into pieces that are only read."""
    from torch._inductor.fx_passes import reinplace

    value = vector.meta.get("val")
    plain = isinstance(value, Tensor) and value.dim() == 1 and value.is_contiguous() and value.device.type == "cpu"
    # What leaves the graph must keep its vector alive; some operators inductor lets write to what nobody reads later.
    if not plain or any(user.op == "output" or user.target in reinplace.inplaceable_ops for user in _users(vector)):
        return []
    splits = (torch.ops.aten.split_with_sizes.default, torch.ops.aten.split.Tensor)
    return [user for user in vector.users if user.target in splits]


def _users(node: Node) -> Iterator[Node]:
    """Nodes that read a tensor or a view of it."""
    for user in node.users:
        yield user
        if user.target is operator.getitem or getattr(user.target, "is_view", False):
            yield from _users(user)


@contextmanager
def ordered() -> Generator[None]:
    """Inductor's scheduler writes a vector when all of its pieces have been read."""
    from torch._inductor import scheduler

    true = scheduler.Scheduler.compute_dependencies
    with mock.patch.object(scheduler.Scheduler, "compute_dependencies", functools.partialmethod(_after_reads, true)):
        yield


def _after_reads(plan: Any, true: Callable[[Any], None]) -> None:
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    readers = dict[str, set[str]]()  # vector -> buffers made of its pieces
    for node in plan.nodes:
        for read in node.read_writes.reads:
            piece = of(read.name)
            if piece is not None:
                vector = graph.graph_input_names[piece.source]
                readers.setdefault(vector, set()).update(buffer.get_name() for buffer in node.get_outputs())
    for node in plan.nodes:
        for buffer in node.get_outputs():
            for written in buffer.get_mutations():
                others = readers.get(written, set()) - {buffer.get_name()}
                graph.additional_buffer_deps[node.get_name()].update(sorted(others))
    true(plan)
