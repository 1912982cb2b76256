"""Equal layers of a graph as calls of one function, so that a model of many compiles as fast as one of two.

Buys: a traced graph has every layer written out, forward and backward, and inductor lowers, schedules and writes each.
Here a stretch of the graph that repeats becomes a graph of its own, which is called with what differs: activations and
weights. `cpp_wrapper.py` writes it as a function of addresses. A stretch repeats where operators, arguments and layouts
do so with one period; a count of the distances between equal nodes gives the period, because a trace writes equal
layers in the same order.

Private names: ``torch._inductor.compile_fx``, ``torch._inductor.ir``, ``torch._inductor.virtualized``.

Without: every layer is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .. import aliasing, fx_passes
from . import graph_key

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_OFTEN = 3
"""Times that a stretch comes, at least: what two share is not worth the loops that its borders keep apart."""
_LONG = 24
"""Nodes of a stretch, at least: a few loops are compiled faster than called."""
_SMALL = 1 << 20
"""Bytes of a tensor, at most, in a stretch of loops alone."""
_WITHIN = 8
"""Times that the same operation may come in one stretch, for this to be found by it."""


_ALIVE: WeakValueDictionary[str, Block] = WeakValueDictionary()


def __getattr__(name: str) -> Block:
    """A graph, written as text by torch, imports what it calls."""
    try:
        return _ALIVE[name]
    except KeyError:
        raise AttributeError(f"module {__name__} has no attribute {name}") from None


class Block:
    """A function that a graph calls, as the target of its nodes."""

    _inductor_lowering_function = True  # inductor calls it to lower a node, and asks nobody what it returns

    def __init__(self, name: str, module: GraphModule) -> None:
        """
        Args:
            name: another for every function: inductor's cache knows it by that.
            module: what it does.
        """
        self.__name__ = self.__qualname__ = name
        self.module = module
        self._lowered: Any = None
        _ALIVE[name] = self

    def __call__(self, *args: Any) -> Any:
        """On tensors without memory, more of such; on inductor's, a call."""
        if all(isinstance(arg, Tensor) for arg in args):
            return tuple(made.new_empty_strided(made.shape, made.stride()) for made in self.made())
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        is_new = self._lowered is None
        if is_new:
            self._lowered = ir.Subgraph(name=self.__name__, graph_module=self._prepared())
        kind: Any = ir.InvokeSubgraph
        made = [_box(each) for each in kind.create(self._lowered, *args)]
        if is_new:
            _write(V.graph, self._lowered.graph)
        return made

    def _inductor_lowering_output_metadata_fn(self, *args: Any) -> Any:
        """What torch 2.14 asks, of tensors without memory, where the inputs of a call have changed."""
        return self(*args)

    def made(self) -> list[Tensor]:
        """What it returns, without memory."""
        return [node.meta["val"] for node in fx_passes.output(self.module).args[0]]

    def _prepared(self) -> GraphModule:
        """The function after what inductor does to a graph before it lowers it."""
        from torch._inductor import compile_fx, config

        inductor: Any = compile_fx
        given = [node.meta["val"] for node in self.module.graph.nodes if node.op == "placeholder"]
        inductor.record_original_output_strides(self.module)
        inductor.view_to_reshape(self.module)
        inductor.fake_tensor_prop(self.module, given)
        # Nodes stay in their order: a sum that is moved to the end would compute again what it is a sum of.
        with config.patch(reorder_for_locality=False):
            inductor._recursive_post_grad_passes(self.module, is_inference=True)
        return self.module


def _write(graph: Any, function: Any) -> None:
    """The function as C++, ahead of the graph around it: its kernels are compiled while that is lowered."""
    is_first = graph.wrapper_code is None
    if is_first:
        graph.init_wrapper_code()
    graph.wrapper_code.write_function(function)


def _box(made: Any) -> Any:
    """A result has memory of its own, which begins where it begins, even if the function took it from a larger buffer.
    Vectors may become part of longer ones, as a packed state's gradients do."""
    from torch._inductor import ir

    layout = made.layout
    if len(layout.size) == 1 and list(layout.stride) == [1]:
        made.layout = ir.FlexibleLayout(layout.device, layout.dtype, layout.size)
    else:
        made.layout = ir.FixedLayout(layout.device, layout.dtype, layout.size, layout.stride)
    return ir.TensorBox.create(made)


def outlined(graph: GraphModule) -> GraphModule | None:
    """The graph with stretches that come again as calls; None where there are none."""
    from torch.fx import Graph, GraphModule

    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    early = _early(nodes)
    found = list(_repeated([node for node in nodes if node not in early]))
    if not found:
        return None
    copy, copies = Graph(), dict[Any, Any]()
    copy.output(copy.graph_copy(graph.graph, copies)).meta.update(fx_passes.output(graph).meta)
    first = next(node for node in nodes if node not in early)
    for node in early:
        copies[first].prepend(copies[node])
    made = GraphModule(graph, copy)
    functions = dict[str, Block]()
    for windows in found:
        _outlined(made, [[copies[node] for node in window] for window in windows], functions)
    made.graph.lint()
    return made if functions else None


def _early(nodes: Sequence[Node]) -> dict[Node, None]:
    """Draws that need nothing computed before, and what they need: a layer is given the numbers that it drops out by.

    Draws keep their order, so none is among them that comes after one that has to stay.
    """
    found: dict[Node, None] = {}
    for node in nodes:
        if not fx_passes.is_draw(node):
            continue
        if any(source.all_input_nodes for source in node.all_input_nodes):
            break
        found |= dict.fromkeys([*(source for source in node.all_input_nodes if source.op == "call_function"), node])
    return found


# --- stretches that repeat --------------------------------------------------------------------------------------------


def _repeated(nodes: Sequence[Node]) -> Iterator[list[list[Node]]]:
    """Stretches of nodes that look the same, one behind the other; the longest first."""
    labels = [_label(node) for node in nodes]
    runs = sorted(_runs(labels), key=lambda run: (run[0] - run[1], run[2]))
    taken: set[int] = set()
    for start, end, period in runs:
        if taken.isdisjoint(range(start, end)):
            taken |= set(range(start, end))
            count = (end - start) // period
            yield [list(nodes[at : at + period]) for at in range(start, start + count * period, period)]


def _runs(labels: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Where labels repeat with a period: from, to, period."""
    seen, distances = defaultdict[Any, deque[int]](functools.partial(deque, maxlen=_WITHIN)), Counter[int]()
    for at, label in enumerate(labels):
        distances.update(at - before for before in seen[label])
        seen[label].append(at)
    for period, times in distances.items():
        # In such a run, nearly every label has come a period before.
        if period < _LONG or times < _LONG:
            continue
        start = 0
        for at in range(len(labels) - period + 1):
            if at < len(labels) - period and labels[at] is not None and labels[at] == labels[at + period]:
                continue
            if at + period - start >= _OFTEN * period:
                yield start, at + period, period
            start = at + 1


def _label(node: Node) -> Any:
    """What a node does, and with what, tensors apart; None where it must be left alone."""
    value, target = node.meta.get("val"), node.target
    if not graph_key.known(target) or fx_passes.is_draw(node):
        return None
    if target is not operator.getitem and target._schema.is_mutable:  # type: ignore[union-attr]
        return None
    if target is torch.ops.aten.as_strided.default and len(node.args) > 3:
        return None  # counts from where the memory begins that this is a piece of, which a function does not know
    try:
        given = [_named(part, lambda _: "%") for part in (node.args, node.kwargs)]
        return str(target), graph_key.plain(given), graph_key.plain(value, _layout)
    except graph_key.Untold:
        return None


def _named(given: Any, name: Callable[[Node], str]) -> Any:
    """Arguments with names for nodes."""
    from torch.fx.node import map_arg

    return map_arg(given, name)


def _layout(leaf: Tensor) -> str:
    """Not where in its memory a tensor begins: a function is given an address."""
    return f"{leaf.dtype} {leaf.device} {tuple(leaf.shape)} {leaf.stride()}"


# --- what becomes a function ------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A stretch as a function."""

    nodes: list[Node]
    inputs: list[Node]
    """from elsewhere, in the order that they are asked for"""
    text: str
    """the same for the same function"""
    outputs: set[int]
    """which nodes are needed elsewhere"""


def _form(nodes: list[Node]) -> _Form | None:
    places = {node: at for at, node in enumerate(nodes)}
    inputs: dict[Node, int] = {}

    def name(node: Node) -> str:
        return f"%{places[node]}" if node in places else f"input {inputs.setdefault(node, len(inputs))}"

    lines = [f"{node.target} {_named(node.args, name)} {_named(node.kwargs, name)}" for node in nodes]
    if not all(isinstance(node.meta.get("val"), Tensor) for node in inputs):
        return None
    text = "\n".join([*lines, *(_layout(node.meta["val"]) for node in inputs)])
    shown = {_shown(node) for node in nodes if any(user not in places for user in node.users)}
    return _Form(nodes, list(inputs), text, {places[node] for node in shown if node in places})


def _shown(node: Node) -> Node:
    """What a view is a view of: views are taken anew where they are needed."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: Any) -> bool:
    if node.target is operator.getitem:  # of several
        node = node.args[0]
    return aliasing.is_view(node) or node.target is torch.ops.aten._unsafe_view.default


def _outlined(graph: GraphModule, windows: list[list[Node]], functions: dict[str, Block]) -> None:
    """One function for what most of these do, and calls of it, where they are worth it."""
    if not _is_worth_calls(windows[0]):
        return
    forms = _same([form for form in map(_form, windows) if form is not None])
    if len(forms) < _OFTEN:
        return
    outputs = sorted(set[int]().union(*(form.outputs for form in forms)))
    first = forms[0]
    if not outputs or not all(isinstance(first.nodes[at].meta["val"], Tensor) for at in outputs):
        return
    name = hashlib.sha256(f"{first.text}\n{outputs}".encode()).hexdigest()[:16]
    if name not in functions:  # the same may come in two places
        functions[name] = Block(f"purestep_block_{name}", _function(first, outputs))
    made: dict[Node, Node] = {}
    for form in forms:
        _call(graph, form, outputs, functions[name], made)


def _is_worth_calls(nodes: list[Node]) -> bool:
    """Whether a function of these is as fast. Loops alone, such as an update by leaves, inductor joins to those around
    them, and has them write the state where it lies; a function keeps them apart, and what it returns is made
    elsewhere first. Beside a product that is little, and of small tensors nothing: the second cache holds them."""
    from torch.utils.flop_counter import flop_registry

    packets = {getattr(node.target, "overloadpacket", None) for node in nodes}
    if torch.ops.purestep.product in packets or not packets.isdisjoint(flop_registry):
        return True
    values = [node.meta.get("val") for node in nodes]
    return all(value.nbytes <= _SMALL for value in values if isinstance(value, Tensor))


def _same(forms: list[_Form]) -> list[_Form]:
    """Those of the function that most of them are."""
    usual = Counter(form.text for form in forms).most_common(1)
    return [form for form in forms if form.text == usual[0][0]]


def _function(form: _Form, outputs: list[int]) -> GraphModule:
    from torch.fx import Graph, GraphModule

    made, copies = Graph(), dict[Any, Any]()
    for at, source in enumerate(form.inputs):
        copies[source] = made.placeholder(f"input_{at}")
        copies[source].meta["val"] = source.meta["val"]
    for node in form.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[form.nodes[at]] for at in outputs))
    return fx_passes.as_laid_out(GraphModule(torch.nn.Module(), made))


def _call(graph: GraphModule, form: _Form, outputs: list[int], block: Block, made: dict[Node, Node]) -> None:
    of, inside = graph.graph, set(form.nodes)
    with of.inserting_after(form.nodes[-1]):
        call = of.call_function(block, tuple(made.get(each, each) for each in form.inputs))
    call.meta["val"] = tuple(form.nodes[at].meta["val"] for at in outputs)
    # Where inductor looks for the layouts that a function's inputs have; two others come first there.
    call.meta["eager_input_vals"] = ((None, None, *(each.meta["val"] for each in form.inputs)), {})
    last = call
    for index, at in enumerate(outputs):
        with of.inserting_after(last):
            last = made[form.nodes[at]] = of.call_function(operator.getitem, (call, index))
        last.meta.update(form.nodes[at].meta)
    for node in form.nodes:
        users = [user for user in node.users if user not in inside]
        if not users:
            continue
        if node not in made:  # a view
            last = _again(of, node, made, inside, last)
        for user in users:
            user.replace_input_with(node, made[node])
    for node in reversed(form.nodes):
        of.erase_node(node)


def _again(graph: Any, node: Node, made: dict[Node, Node], inside: set[Node], last: Node) -> Node:
    """A view taken anew, after `last`; the last node then."""
    source: Any = node.args[0]
    if source in inside and source not in made:
        last = _again(graph, source, made, inside, last)
    with graph.inserting_after(last):
        made[node] = graph.node_copy(node, lambda each: made.get(each, each))
    return made[node]
