"""Equal layers of a graph as calls of one function, so that a deep model compiles as fast as one with two layers.

Buys: a traced graph contains every layer, forward and backward, and inductor lowers, schedules and writes each of them.
Here a repeated sequence of nodes becomes a separate graph, called with different activations and weights, and
`cpp_wrapper` writes it as a function of addresses. A sequence repeats if operators, arguments and layouts are periodic;
the period is the most frequent distance of equal nodes, because a trace writes equal layers in the same order.

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

from .. import fx_passes, inductor_fixes
from . import graph_key

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_MIN_REPEATS = 3
"""Minimal number of repeats: two do not pay for the loops that a function's borders prevent from being fused."""
_MIN_NODES = 24
"""Minimal number of nodes of a sequence: a few loops compile faster than a call."""
_MAX_BYTES = 1 << 20
"""Maximal bytes of a tensor in a sequence without matrix products."""
_MAX_OCCURRENCES = 8
"""Maximal number of earlier equal nodes whose distances are counted."""


_ALIVE: WeakValueDictionary[str, Block] = WeakValueDictionary()


def __getattr__(name: str) -> Block:
    """Return a living block by name: torch writes a graph as Python text, which imports its targets."""
    try:
        return _ALIVE[name]
    except KeyError:
        raise AttributeError(f"module {__name__} has no attribute {name}") from None


class Block:
    """A function that a graph calls, as the target of its nodes."""

    _inductor_lowering_function = True  # inductor calls it to lower a node

    def __init__(self, name: str, module: GraphModule) -> None:
        """
        Args:
            name: unique for each function: a key of inductor's cache.
            module: the function's graph.
        """
        self.__name__ = self.__qualname__ = name
        self.module = module
        self._lowered: Any = None
        _ALIVE[name] = self

    def __call__(self, *args: Any) -> Any:
        """Return fake results for fake tensors, and lower a call for inductor's tensors."""
        if all(isinstance(arg, Tensor) for arg in args):
            return tuple(made.new_empty_strided(made.shape, made.stride()) for made in self.made())
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        is_new = self._lowered is None
        if is_new:
            self._lowered = ir.Subgraph(name=self.__name__, graph_module=self._apply_passes())
        kind: Any = ir.InvokeSubgraph
        made = [_own_memory(each) for each in kind.create(self._lowered, *args)]
        if is_new:
            _write_function(V.graph, self._lowered.graph)
        return made

    def _inductor_lowering_output_metadata_fn(self, *args: Any) -> Any:
        """Return fake results; torch 2.14 calls this if the inputs of a call have changed."""
        return self(*args)

    def made(self) -> list[Tensor]:
        """The fake results."""
        return [node.meta["val"] for node in fx_passes.output(self.module).args[0]]

    def _apply_passes(self) -> GraphModule:
        """Run inductor's passes on the function's graph, as before a lowering."""
        from torch._inductor import compile_fx, config

        inductor: Any = compile_fx
        given = [node.meta["val"] for node in self.module.graph.nodes if node.op == "placeholder"]
        inductor.record_original_output_strides(self.module)
        inductor.view_to_reshape(self.module)
        inductor.fake_tensor_prop(self.module, given)
        # Whatever the user's options: a sum that moves to the end would recompute its terms.
        with config.patch(inductor_fixes.trace_order.OPTIONS | {inductor_fixes.PASS: None}):
            inductor._recursive_post_grad_passes(self.module, is_inference=True)
        return self.module


def _write_function(graph: Any, function: Any) -> None:
    """Write the function as C++ before the graph around it, whose lowering then overlaps with compiling its kernels."""
    is_first = graph.wrapper_code is None
    if is_first:
        graph.init_wrapper_code()
    graph.wrapper_code.write_function(function)


def _own_memory(made: Any) -> Any:
    """Give a result separate memory without an offset, even if the function computes it in a larger buffer. Vectors may
    become parts of longer ones, like a packed state's gradients."""
    from torch._inductor import ir

    layout = made.layout
    if len(layout.size) == 1 and list(layout.stride) == [1]:
        made.layout = ir.FlexibleLayout(layout.device, layout.dtype, layout.size)
    else:
        made.layout = ir.FixedLayout(layout.device, layout.dtype, layout.size, layout.stride)
    return ir.TensorBox.create(made)


def outlined(graph: GraphModule) -> GraphModule | None:
    """Replace repeated sequences of a graph by calls; return None if there are none."""
    from torch.fx import Graph, GraphModule

    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    early = _leading_draws(nodes)
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
        _outline(made, [[copies[node] for node in window] for window in windows], functions)
    made.graph.lint()
    return made if functions else None


def _leading_draws(nodes: Sequence[Node]) -> dict[Node, None]:
    """The first draws and their inputs, if those are not computed: a layer gets its dropout masks as inputs.

    Draws keep their order, so the first one with computed inputs ends the list.
    """
    found: dict[Node, None] = {}
    for node in nodes:
        if not fx_passes.is_draw(node):
            continue
        if any(source.all_input_nodes for source in node.all_input_nodes):
            break
        found |= dict.fromkeys([*(source for source in node.all_input_nodes if source.op == "call_function"), node])
    return found


# --- repeated sequences -----------------------------------------------------------------------------------------------


def _repeated(nodes: Sequence[Node]) -> Iterator[list[list[Node]]]:
    """Adjacent sequences of nodes with equal labels, the longest first."""
    labels = [_label(node) for node in nodes]
    runs = sorted(_runs(labels), key=lambda run: (run[0] - run[1], run[2]))
    used: set[int] = set()
    for start, end, period in runs:
        if used.isdisjoint(range(start, end)):
            used |= set(range(start, end))
            count = (end - start) // period
            yield [list(nodes[at : at + period]) for at in range(start, start + count * period, period)]


def _runs(labels: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Ranges where labels are periodic: (start, end, period)."""
    seen, distances = defaultdict[Any, deque[int]](functools.partial(deque, maxlen=_MAX_OCCURRENCES)), Counter[int]()
    for at, label in enumerate(labels):
        distances.update(at - before for before in seen[label])
        seen[label].append(at)
    for period, times in distances.items():
        # In such a range, nearly every label has occurred one period before.
        if period < _MIN_NODES or times < _MIN_NODES:
            continue
        start = 0
        for at in range(len(labels) - period + 1):
            if at < len(labels) - period and labels[at] is not None and labels[at] == labels[at + period]:
                continue
            if at + period - start >= _MIN_REPEATS * period:
                yield start, at + period, period
            start = at + 1


def _label(node: Node) -> Any:
    """The operator, the arguments that are no tensors, and the layout of a node; None if it cannot be in a function."""
    value, target = node.meta.get("val"), node.target
    if not graph_key.known(target) or fx_passes.is_draw(node):
        return None
    if target is not operator.getitem and target._schema.is_mutable:  # type: ignore[union-attr]
        return None
    if target is torch.ops.aten.as_strided.default and len(node.args) > 3:
        return None  # a storage offset, whose base a function does not know
    try:
        given = [_with_names(part, lambda _: "%") for part in (node.args, node.kwargs)]
        return str(target), graph_key.plain(given), graph_key.plain(value, _layout)
    except graph_key.Unkeyable:
        return None


def _with_names(given: Any, name: Callable[[Node], str]) -> Any:
    """Replace nodes in arguments by names."""
    from torch.fx.node import map_arg

    return map_arg(given, name)


def _layout(leaf: Tensor) -> str:
    """The layout without the storage offset: a function gets an address."""
    return f"{leaf.dtype} {leaf.device} {tuple(leaf.shape)} {leaf.stride()}"


# --- functions --------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A sequence of nodes as a function."""

    nodes: list[Node]
    inputs: list[Node]
    """nodes outside of the sequence, in order of use"""
    text: str
    """equal for equal functions"""
    outputs: set[int]
    """indices of nodes that are used outside"""


def _form(nodes: list[Node]) -> _Form | None:
    places = {node: at for at, node in enumerate(nodes)}
    inputs: dict[Node, int] = {}

    def name(node: Node) -> str:
        return f"%{places[node]}" if node in places else f"input {inputs.setdefault(node, len(inputs))}"

    lines = [f"{node.target} {_with_names(node.args, name)} {_with_names(node.kwargs, name)}" for node in nodes]
    if not all(isinstance(node.meta.get("val"), Tensor) for node in inputs):
        return None
    text = "\n".join([*lines, *(_layout(node.meta["val"]) for node in inputs)])
    shown = {_base(node) for node in nodes if any(user not in places for user in node.users)}
    return _Form(nodes, list(inputs), text, {places[node] for node in shown if node in places})


def _base(node: Node) -> Node:
    """The base of a view: views are repeated outside of the function."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: Any) -> bool:
    if node.target is operator.getitem:  # one of several results
        node = node.args[0]
    return fx_passes.is_view(node) or node.target is torch.ops.aten._unsafe_view.default


def _outline(graph: GraphModule, windows: list[list[Node]], functions: dict[str, Block]) -> None:
    """Replace the sequences with the most common form by calls of one function, if that pays."""
    if not _is_worth_calls(windows[0]):
        return
    forms = _most_common([form for form in map(_form, windows) if form is not None])
    if len(forms) < _MIN_REPEATS:
        return
    outputs = sorted(set[int]().union(*(form.outputs for form in forms)))
    first = forms[0]
    if not outputs or not all(isinstance(first.nodes[at].meta["val"], Tensor) for at in outputs):
        return
    name = hashlib.sha256(f"{first.text}\n{outputs}".encode()).hexdigest()[:16]
    if name not in functions:  # two places may have the same function
        functions[name] = Block(f"purestep_block_{name}", _function(first, outputs))
    made: dict[Node, Node] = {}
    for form in forms:
        _call(graph, form, outputs, functions[name], made)


def _is_worth_calls(nodes: list[Node]) -> bool:
    """True if calls are as fast as inlined code. Inductor fuses elementwise loops, such as an update by leaves, with
    their neighbours and writes the state in place; a function prevents the fusion, and its results need a copy. That
    cost is small compared with a matrix product, and negligible for small tensors, which stay in the L2 cache."""
    from torch.utils.flop_counter import flop_registry

    packets = {getattr(node.target, "overloadpacket", None) for node in nodes}
    if torch.ops.purestep.product in packets or not packets.isdisjoint(flop_registry):
        return True
    values = [node.meta.get("val") for node in nodes]
    return all(value.nbytes <= _MAX_BYTES for value in values if isinstance(value, Tensor))


def _most_common(forms: list[_Form]) -> list[_Form]:
    """The forms of the most common function."""
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
    # Inductor reads the layouts of a function's inputs here, after two other entries.
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
            last = _copy_view(of, node, made, inside, last)
        for user in users:
            user.replace_input_with(node, made[node])
    for node in reversed(form.nodes):
        of.erase_node(node)


def _copy_view(graph: Any, node: Node, made: dict[Node, Node], inside: set[Node], last: Node) -> Node:
    """Repeat a view after `last`; return the new last node."""
    source: Any = node.args[0]
    if source in inside and source not in made:
        last = _copy_view(graph, source, made, inside, last)
    with graph.inserting_after(last):
        made[node] = graph.node_copy(node, lambda each: made.get(each, each))
    return made[node]
