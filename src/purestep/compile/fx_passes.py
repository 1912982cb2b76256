"""Changes to a traced graph before it is compiled, and what is asked of one."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from .. import tracing
from ..errors import StepContractError
from . import aliasing, control_flow

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

ONE_DTYPE = (
    'model.float() before ps.program and batches of float32; or ps.program(..., precision="64-true"), which casts both'
)
"""The cure of weights and batches that do not fit."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


def finished(graph: GraphModule) -> GraphModule:
    """What is compiled.

    Raises:
        StepContractError: a product of two dtypes, which torch refuses when it is computed, and fake tensors let pass;
            random numbers that a function of `torch.cond` or its kind draws.
    """
    if any(map(draws, control_flow.inner(graph))):
        raise StepContractError(
            f"random numbers are drawn inside {', '.join(control_flow.operators(graph))}, whose gradient draws others",
            where="step",
            hint="draw them before, and pass them as operands (dropout: x * torch.bernoulli(keep) / p)",
        )
    for node in graph.graph.nodes:
        if aliasing.name_of(node) not in _PRODUCTS:
            continue
        values = [source.meta.get("val") for source in node.all_input_nodes]
        dtypes = {value.dtype: None for value in values if isinstance(value, Tensor)}
        if len(dtypes) > 1:
            raise StepContractError(
                f"a product of {' and '.join(map(str, dtypes))} ({node.target})",
                where="step",
                hint=ONE_DTYPE,
            )
    _permutations_apart(graph)
    return _scalars_apart(graph) if _OFFSETS_STAY else graph


def copied(leaf: Tensor) -> Tensor:
    """A copy of a batch's tensor at the beginning of a graph; see `without_copies`."""
    return leaf.clone(memory_format=torch.preserve_format)  # which nobody else spells out


def without_copies(graph: GraphModule) -> GraphModule:
    """The graph with inputs in place of those of their copies (`copied`) that nothing writes, nor a view of them."""
    base, written = dict[Any, Any](), set[Any]()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.all_input_nodes:
            continue
        if schema.is_mutable:
            written |= {base.get(source, source) for source in node.all_input_nodes}
        if schema.is_mutable or aliasing.is_view(node):
            base[node] = base.get(node.all_input_nodes[0], node.all_input_nodes[0])
    for node in list(graph.graph.nodes):
        is_copied = (
            node.target is torch.ops.aten.clone.default and node.kwargs.get("memory_format") is torch.preserve_format
        )
        if is_copied and node.args[0].op == "placeholder" and node not in written:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph


def _permutations_apart(graph: GraphModule) -> None:
    """A permutation as an index behind a copy: inductor has a pattern for `x[torch.randperm(n)]`, and fails where it is
    met (torch 2.13: "Not all inputs to pattern found")."""
    for node in list(graph.graph.nodes):
        if aliasing.name_of(node) != "randperm":
            continue
        with graph.graph.inserting_after(node):
            made = graph.graph.call_function(torch.ops.purestep.taken.default, (node,))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made, delete_user_cb=functools.partial(operator.is_not, made))


_OFFSETS_STAY = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""Inductor of torch 2.11 folds ``1 * view``, and loses the view's offset where another one is taken of it: in a step
with a loss scale, the learning rate beside it was read."""


def views_allowed(graph: GraphModule) -> GraphModule:
    """Views as reshapes: an operation before one may come out in another layout when it is compiled."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    return graph


def _scalars_apart(graph: GraphModule) -> GraphModule:
    """Keep every scalar that a larger tensor is computed with in memory of its own.

    Inductor computes a 0-d expression anew wherever it is read: a bias correction once for every few parameters. A view
    by strides needs memory to look at, so it makes inductor compute the scalar once.
    """
    for node in list(graph.graph.nodes):
        if not _is_computed(node) or not _is_scalar(node):
            continue
        readers = [user for user in node.users if isinstance(user.meta.get("val"), Tensor) and not _is_scalar(user)]
        if not readers:
            continue
        with graph.graph.inserting_after(node):
            apart = graph.graph.call_function(torch.ops.aten.as_strided.default, (node, [], []))
        apart.meta.update(node.meta)
        for reader in readers:
            reader.replace_input_with(node, apart)
    graph.recompile()
    return graph


def _is_computed(node: Any) -> bool:
    """Whether a node makes memory of its own: a view has it already, at an offset that a second view would lose.

    So has a copy: inductor takes the original where it can.
    """
    copied = node.target in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
    return not copied and not getattr(node.target, "is_view", True)  # getitem, without is_view, takes one of several


def _is_scalar(node: Any) -> bool:
    value = node.meta.get("val")
    # On a GPU a scalar is cheaper computed in every thread than in a kernel of its own.
    return isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu"


def is_functional(graph: GraphModule) -> bool:
    """Whether inputs are all that is written, each once, and not read after, not through an earlier view either."""
    written, of = set[Any](), dict[Any, Any]()  # view -> what it shows
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if any(of.get(source, source) in written for source in node.all_input_nodes):
            return False
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":
                return False
            written |= {node, node.args[0]}
        elif node.target is operator.getitem or aliasing.is_view(node):
            of[node] = of.get(node.args[0], node.args[0])
    return True


def writing_last(graph: GraphModule) -> GraphModule:
    """The graph with every write at its end: inductor reads a view, or what it takes for one, where it is used."""
    aliasing.apart(graph.graph)
    last = output(graph)
    for node in aliasing.writes(graph.graph):
        last.prepend(node)
    return graph


def draws(graph: GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    return any(map(is_draw, graph.graph.nodes))


def is_draw(node: Any) -> bool:
    """Whether a node draws random numbers."""
    return hasattr(node.target, "tags") and tracing.is_random(node.target, node.args, node.kwargs)


def as_laid_out(graph: GraphModule) -> GraphModule:
    """The graph, whose results inductor shall lay out as they are here."""
    found = output(graph)
    found.meta["user_visible_output_idxs"] = list(range(len(found.args[0])))
    return graph


def output(graph: GraphModule) -> Any:
    """The node of what the graph returns."""
    return next(node for node in reversed(graph.graph.nodes) if node.op == "output")
