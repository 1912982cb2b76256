"""Compilation of a recorded function to a library, by AOTInductor.

The function is traced again with inductor's decompositions, and functionalized if needed; the writes of its inputs move
to the end. Then inductor's own passes and code generator follow, without its second trace: a step's graph is a complete
program with gradients.

Private names: ``torch._inductor.compile_fx`` (``_recursive_joint_graph_passes``, ``compile_fx_inner``),
``torch._inductor.virtualized``, ``torch._guards``, ``torch._subclasses``, ``torch._dispatch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...torch_ext import tracing
from .. import backends, control_flow, draw_code, fx_passes, inductor_fixes
from ..capture import autocast_disabled
from . import cpp_library

if TYPE_CHECKING:
    from torch.fx import GraphModule


class NotFunctional(Exception):
    """The graph writes tensors in a way that inductor does not support, calls higher-order operators, or calls torch's
    functional collectives."""


def build(
    graph: GraphModule, inputs: Sequence[Tensor], constants: Sequence[str], options: Mapping[str, Any], library: str
) -> tuple[bool, int, bool]:
    """Compile a graph to a library.

    Args:
        graph: may write its inputs; not changed.
        inputs: examples of its inputs, followed by its constants.
        constants: names of the constants.
        options: inductor's configuration.
        library: the path, in a directory for the files of the compilation.

    Returns:
        Whether the code draws random numbers; the largest number of threads that it may use, 0 for no limit; whether
        it calls `cpp_library.loaded`.

    Raises:
        NotFunctional: in-place writes cannot be moved to the end.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx import _lazy_graph_module
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    lazy: Any = _lazy_graph_module
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [mode.from_tensor(leaf, static_shapes=True) for leaf in inputs]
    chosen = {**options, **inductor_fixes.options(options), "aot_inductor.output_path": library}
    # Lazy graph modules: no Python code is generated for a graph that is rewritten many times and never run.
    with config.patch(chosen), lazy._use_lazy_graph_module(True):
        with mode:
            graph = _traced(_replay(graph, constants), fakes)
        if fx_passes.has_functional_collectives(graph):
            raise NotFunctional("torch's functional collectives need results in storage of their own")
        if fx_passes.resizes(graph):
            raise NotFunctional("a kernel changes the size of its argument")
        if control_flow.operators(graph):
            raise NotFunctional("higher-order operators")
        with autocast_disabled():
            graph = fx_passes.finished(_functional(graph, fakes, mode))
        work = _work(graph)
        given = {name: value for name, value in options.items() if name != inductor_fixes.PASS}
        is_drawing, threads = fx_passes.draws(graph), _threads(graph, work)  # inductor changes the graph
        is_fast = _may_be_fast(graph)
        with (
            autocast_disabled(),
            config.patch({**_by_size(work), **(_fast() if is_fast else {}), **given}),
            V.set_aot_compilation(True),
        ):
            _lower(graph, fakes, mode)
    return is_drawing, threads, is_fast


def _may_be_fast(graph: GraphModule) -> bool:
    """True if the code may use the header of `cpp_library`: without a user's operators, which might keep a tensor."""
    spaces = {getattr(node.target, "namespace", "aten") for node in graph.graph.nodes if node.op == "call_function"}
    return spaces <= {"aten", "prims", "purestep"} and "fast" not in backends.switched_off("cpu")


def _fast() -> dict[str, Any]:
    """Inductor's configuration with the header of `cpp_library`."""
    return {"aot_inductor.custom_ops_to_c_shims": {torch.ops.purestep.taken.default: [cpp_library.shim()]}}


def _functional(graph: GraphModule, fakes: Sequence[Tensor], mode: Any) -> GraphModule:
    """Move all in-place writes of a graph to its end."""
    if not fx_passes.is_functional(graph):
        with mode:
            graph = _traced(torch.func.functionalize(graph, remove="mutations"), fakes)
    if not fx_passes.is_functional(graph):
        raise NotFunctional
    return fx_passes.writing_last(graph)


_BY_LAYOUT = (
    *(torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.view.dtype),
    *(torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default),
)
"""Operators whose result depends on the strides of their input."""


def _replay(graph: GraphModule, constants: Sequence[str]) -> Callable[..., Any]:
    """Return a function of a graph's inputs and constants that repeats its operations."""
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
        count = len(inputs) - len(constants)
        given.update(zip(constants, inputs[count:], strict=True))
        return Replay(graph).run(*inputs[:count])

    return call


def _with_strides(given: Tensor, strides: Sequence[int]) -> Tensor:
    """Give a tensor its recorded strides. A trace decomposes operations, and the result may have other strides, such
    as channels last in a batch of one."""
    lies = zip(given.shape, given.stride(), strides, strict=True)
    if all(size < 2 or found == recorded for size, found, recorded in lies):
        return given
    return given.new_empty_strided(given.shape, strides).copy_(given)


def _traced(function: Callable[..., Any], fakes: Sequence[Tensor]) -> GraphModule:
    from torch._inductor import decomposition, lowering
    from torch.fx.experimental.proxy_tensor import make_fx

    # Decompose during the trace, so that views are recorded for the final layouts.
    table: Any = dict(decomposition.select_decomp_table())
    # Torch's kernel adds up rows in one order on any number of threads; inductor's code adds them atomically.
    gradient: Any = torch.ops.aten.embedding_dense_backward.default
    if table.pop(gradient, None):
        lowering.make_fallback(gradient, override_decomp=True, warn=False)
    with tracing.no_recurrent_kernel(), control_flow.aliased_inputs_allowed():
        graph: GraphModule = make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    graph.graph.eliminate_dead_code()
    return fx_passes.without_copies(graph)


def _lower(graph: GraphModule, fakes: Sequence[Tensor], mode: Any) -> None:
    """Compile with inductor: its passes, then C++."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext
    from torch._guards import tracing as context
    from torch._inductor import compile_fx
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    inductor: Any = compile_fx
    fx_passes.output(graph).args = (tuple(fx_passes.output(graph).args[0]),)
    with context(TracingContext(mode)), V.set_fake_mode(mode), enable_python_dispatcher():
        graph = inductor._recursive_joint_graph_passes(graph, input_device=torch.device("cpu"))
        draw_code.register()
        backends.register_fallbacks(graph)
        fx_passes.as_laid_out(graph)
        inductor.compile_fx_inner(
            graph,
            fakes,
            static_input_idxs=range(len(fakes)),
            cudagraphs=BoxedBool(False),
            is_inference=True,
            cpp_wrapper=True,
        )


# --- threads ----------------------------------------------------------------------------------------------------------

_SINGLE_THREAD = 6e7
"""Operations below which a step is faster on one thread: waking another one takes longer than half of the work."""

_SLOW_WRAPPER = 1e9
"""Operations above which the code between kernels may be slow: it takes microseconds of a step of milliseconds."""


def _by_size(work: float) -> dict[str, Any]:
    """Inductor's configuration that depends on the number of operations."""
    if work < _SINGLE_THREAD:
        return {"cpp.threads": 1}
    # Saves a second of g++; kernels are still optimized.
    return {"aot_inductor.compile_wrapper_opt_level": "O0"} if work > _SLOW_WRAPPER else {}


def _threads(graph: GraphModule, work: float) -> int:
    """The maximal number of threads for the code; 0 means no limit."""
    if work < _SINGLE_THREAD:  # compiled for one thread
        return 0 if _uses_onednn(graph) else 1
    return torch.get_num_threads()


def _work(graph: GraphModule) -> float:
    """Estimate the operations of one call: of matrix products and convolutions, and four for each other element."""
    from torch.fx.node import map_arg
    from torch.utils.flop_counter import flop_registry

    total = 0.0
    for node in graph.graph.nodes:
        made = node.meta.get("val")
        if node.op != "call_function" or not isinstance(made, Tensor):
            continue
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is None:
            total += 4 * made.numel()
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
            total += count(*args, **kwargs, out_val=made)
    return total


def _uses_onednn(graph: GraphModule) -> bool:
    """True if products use oneDNN, which empties its cache of kernels when the number of threads changes."""
    made = [node.meta.get("val") for node in graph.graph.nodes]
    half = any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in made)
    return half or any("convolution" in str(node.target) for node in graph.graph.nodes)
