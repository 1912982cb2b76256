"""Lowering of a traced graph by inductor, for the CPU and for CUDA.

The graph is traced again with inductor's decompositions, and functionalized if needed; the writes of its inputs move to
the end. Then inductor's own passes and code generator follow, without its second trace: a step's graph is a complete
program with gradients.

Buys: `standalone_compile`, the public entry, traces through autograd and checks every call in Python. A cold start on a
GPU takes half to two thirds of its time (``benchmarks/README.md``).

Private names: ``torch._inductor.compile_fx`` (``_recursive_joint_graph_passes``, ``compile_fx_inner``),
``torch._inductor.virtualized``, ``torch._guards``, ``torch._subclasses``, ``torch._dispatch``.

Without: `capture` calls the public entry, as for every graph that fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..torch_ext import tracing
from . import backends, code_directory, control_flow, draw_code, fx_passes, inductor_fixes

if TYPE_CHECKING:
    from torch.fx import GraphModule


class NotLowered(Exception):
    """The graph writes tensors in a way that cannot be moved to its end, may give an argument another size, calls
    higher-order operators, or calls torch's functional collectives."""


class Functional(NamedTuple):
    """A graph of inductor's operators, which writes its inputs at its end."""

    graph: GraphModule
    fakes: Sequence[Tensor]  # its inputs
    mode: Any  # of the fake tensors


def constants(graph: GraphModule) -> dict[str, Tensor]:
    """Tensors that a graph holds, by their names in it: literals of the step, and what `outside.lifted` leaves. They
    are further inputs of its code."""
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    found = {name: getattr(graph, name) for name in sorted(names)}
    return {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}


@contextmanager
def functional(graph: GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Generator[Functional]:
    """Decompose a graph, and move its writes to the end. Inside, inductor has these options and our fixes. The caller
    has disabled autocast: the graph contains its casts.

    Args:
        graph: may write its inputs; not changed.
        inputs: examples of its inputs, followed by its `constants`.
        options: inductor's configuration.

    Raises:
        NotLowered: for one of the reasons of its class.
    """
    from torch._inductor import config
    from torch._subclasses import FakeTensorMode
    from torch.fx import _lazy_graph_module
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    code_directory.directory(whole=True)
    lazy: Any = _lazy_graph_module
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [mode.from_tensor(leaf, static_shapes=True) for leaf in inputs]
    # Lazy graph modules: no Python code is generated for a graph that is rewritten many times and never run.
    with config.patch(inductor_fixes.options(options)), lazy._use_lazy_graph_module(True):
        with mode:
            graph = traced(_replay(graph, list(constants(graph))), fakes)
        inductor_fixes.before(graph.graph)
        if fx_passes.has_functional_collectives(graph):
            raise NotLowered("torch's functional collectives need results in storage of their own")
        if fx_passes.may_resize(graph):
            raise NotLowered("a kernel may change the size of its argument")
        if control_flow.operators(graph):
            raise NotLowered("higher-order operators")
        if not fx_passes.is_functional(graph):
            with mode:
                graph = traced(torch.func.functionalize(graph, remove="mutations"), fakes)
        if not fx_passes.is_functional(graph):
            raise NotLowered("writes in place cannot be moved to the end")
        yield Functional(fx_passes.checked(fx_passes.writing_last(graph)), fakes, mode)


def compiled(given: Functional, *, cpp_wrapper: bool) -> Callable[[list[Tensor]], Any]:
    """Compile with inductor: its passes, then code. Inside `functional`."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext
    from torch._guards import tracing as context
    from torch._inductor import compile_fx
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    inductor: Any = compile_fx
    graph, fakes, mode = given
    fx_passes.output(graph).args = (tuple(fx_passes.output(graph).args[0]),)
    with context(TracingContext(mode)), V.set_fake_mode(mode), enable_python_dispatcher():
        graph = inductor._recursive_joint_graph_passes(graph, input_device=fakes[0].device)
        draw_code.register()
        backends.register_fallbacks(graph)
        results = fx_passes.output(graph)
        # Inductor keeps the layouts of the results.
        results.meta["user_visible_output_idxs"] = list(range(len(results.args[0])))
        return inductor.compile_fx_inner(
            graph,
            fakes,
            static_input_idxs=(),  # on CUDA a batch that is not aligned as the example was is copied
            cudagraphs=BoxedBool(False),
            is_inference=True,
            cpp_wrapper=cpp_wrapper,
        )


_BY_LAYOUT = (
    *(torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.view.dtype),
    *(torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default),
)
"""Operators whose result depends on the strides of their input."""


def _replay(graph: GraphModule, names: Sequence[str]) -> Callable[..., Any]:
    """Return a function of a graph's inputs and constants (``names``) that repeats its operations."""
    from torch.fx import Interpreter

    class Replay(Interpreter):
        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            return given[target] if target in given else super().get_attr(target, args, kwargs)

        def run_node(self, n: Any) -> Any:
            if n.target in _BY_LAYOUT:
                first = n.args[0]
                self.env[first] = _with_strides(self.env[first], first.meta["val"].stride())
            return super().run_node(n)

    given = dict[str, Any]()

    def call(*inputs: Tensor) -> Any:
        count = len(inputs) - len(names)
        given.update(zip(names, inputs[count:], strict=True))
        return Replay(graph).run(*inputs[:count])

    return call


def _with_strides(given: Tensor, strides: Sequence[int]) -> Tensor:
    """Give a tensor its recorded strides. A trace decomposes operations, and the result may have other strides, such
    as channels last in a batch of one."""
    lies = zip(given.shape, given.stride(), strides, strict=True)
    if all(size < 2 or found == recorded for size, found, recorded in lies):
        return given
    return given.new_empty_strided(given.shape, strides).copy_(given)


def traced(function: Callable[..., Any], fakes: Sequence[Tensor]) -> GraphModule:
    """Trace a function with inductor's decompositions."""
    from torch._inductor import decomposition, lowering
    from torch.fx.experimental.proxy_tensor import make_fx

    # Decompose during the trace, so that views are recorded for the final layouts.
    table: Any = dict(decomposition.select_decomp_table())
    # Torch's kernel adds up rows in one order on any number of threads; inductor's code adds them atomically.
    gradient: Any = torch.ops.aten.embedding_dense_backward.default
    if fakes[0].device.type == "cpu" and table.pop(gradient, None):
        lowering.make_fallback(gradient, override_decomp=True, warn=False)
    with tracing.no_recurrent_kernel(), control_flow.aliased_inputs_allowed():
        graph: GraphModule = make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    graph.graph.eliminate_dead_code()
    return fx_passes.without_copies(graph)
