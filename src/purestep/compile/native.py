"""A step on the CPU straight into inductor: one trace, one graph, native code called without a Python wrapper.

What `torch.compile` and `standalone_compile` put round inductor's code (a second trace, a wrapper in Python a call)
costs a small step more than its arithmetic. A step needs none of it: its graph is the whole program, gradients
included, and its inputs are the buffers of one store. None of the names used here are public, so whatever goes wrong
is left to `standalone_compile`; see `capture.trace`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from . import (
    arena,
    attention,
    blocks,
    branches,
    calls,
    carried,
    draws,
    elementary,
    kept,
    kernels,
    passes,
    pieces,
    products,
    recording,
    reductions,
    rounding,
    rows,
    shortcuts,
    sources,
    toolchain,
)
from .alone import with_compiler
from .calls import Compiled
from .recording import Record

if TYPE_CHECKING:
    from torch.fx import GraphModule

Flat = Callable[..., Any]
"""``f(*tensors) -> tensors``"""


_KNOWN = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""Whether inductor's private names mean what they are taken for here."""


class NotFunctional(Exception):
    """The graph writes to tensors in a way that inductor does not take, or calls operators that take functions."""


def given_up(what: str, error: Exception) -> None:
    """Say why something is done in another way, which takes longer."""
    logging.getLogger("purestep").debug("%s cannot be made: %r", what, error)


def suits(inputs: list[Tensor], backend: Any) -> bool:
    """Whether a graph of these inputs is made here."""
    return _KNOWN and backend == "inductor" and all(leaf.device.type == "cpu" for leaf in inputs)


def compiled(record: Record, *, options: Mapping[str, Any] | None) -> tuple[Compiled, bool]:
    """What has been recorded as native code, made or found again, and whether it draws random numbers.

    Args:
        record: may write its inputs in place as the last thing it does.
        options: inductor's configuration, beyond what is set here.

    Raises:
        NotFunctional: it writes in place what cannot be written at its end.
    """
    name = kept.name(record, _chosen(options))
    made = kept.load(name)
    if made is None:
        with with_compiler():
            made = _made(record, options, is_kept=name is not None)
        kept.keep(name, made)
    carried.along(name)
    run = calls.in_arena(made.code, len(record.inputs)) if made.in_arena else made.code.run
    return on_threads(run, made.threads) if made.threads else run, made.draws


def _made(record: Record, options: Mapping[str, Any] | None, *, is_kept: bool) -> kept.Made:
    """Traced, then compiled, inductor set for both."""
    from torch._inductor import config
    from torch._subclasses import FakeTensorMode
    from torch.fx import _lazy_graph_module
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    lazy: Any = _lazy_graph_module
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [mode.from_tensor(leaf, static_shapes=True) for leaf in record.inputs]
    caching = {"fx_graph_cache": False} if is_kept else {}  # there is nothing to ask inductor's cache for
    # No Python is written for a graph that is changed a dozen times and never run.
    with config.patch(_chosen(options) | caching), lazy._use_lazy_graph_module(True):
        casts = rounding.Casts()
        with mode, casts, config.patch(rounding.options(rounds=True)):
            graph = _traced(record.function, fakes)
        rounds = bool((options or {}).get(rounding.OPTION, casts.seen or config.emulate_precision_casts))
        if not rounds:
            rounding.unmark(graph)
        if branches.operators(graph):
            raise NotFunctional
        with recording.below_autocast(), config.patch(rounding.options(rounds)):
            return _made_of(graph, fakes, mode, options)


def _made_of(graph: GraphModule, fakes: Sequence[Tensor], mode: Any, options: Mapping[str, Any] | None) -> kept.Made:
    """The graph, changed as a step may be, compiled; and how its code is called."""
    from torch._inductor import config

    graph = passes.finished(_functional(graph, fakes, mode))
    work = _work(graph)
    is_drawing, threads = passes.draws(graph), _threads(graph, work)  # inductor changes the graph
    with config.patch(_by_size(work) | dict(options or {})):
        with shortcuts.while_loading(), toolchain.beside() as ahead, shortcuts.taken():
            run = _lowered(graph, fakes, mode, ahead)
        return kept.Made(calls.of(run), is_drawing, arena.possible(), threads)


def _functional(graph: GraphModule, fakes: Sequence[Tensor], mode: Any) -> GraphModule:
    """The graph with all that it writes in place at its end."""
    if not passes.is_functional(graph):
        with mode:
            graph = _traced(torch.func.functionalize(rounding.marking(graph), remove="mutations"), fakes)
    if not passes.is_functional(graph):
        raise NotFunctional
    return passes.writing_last(attention.written_out(graph))


def _traced(function: Flat, fakes: Sequence[Tensor]) -> GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # Decomposed while it is traced: so views are recorded of the layouts that they will be taken of.
    table = rows.decompositions(_pools(select_decomp_table()))
    with no_recurrent_kernel(), branches.of_one_vector():
        graph: GraphModule = make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    graph.graph.eliminate_dead_code()
    return passes.without_copies(graph)


def _pools(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The table, whose rule for a pool asks inductor's lowerings, which nobody may have loaded yet."""
    operator: Any = torch.ops.aten.max_pool2d_with_indices.default
    true = table.get(operator)

    def pool(*args: Any, **kwargs: Any) -> Any:
        assert true is not None
        with shortcuts.while_loading():
            importlib.import_module("torch._inductor.lowering")
        return true(*args, **kwargs)

    return dict(table) if true is None else dict(table) | {operator: pool}


@contextmanager
def no_recurrent_kernel() -> Generator[None]:
    """An LSTM is traced as its products: the workspace of oneDNN's kernel for it has no size before a real call.
    Convolutions are not decided here but when they are compiled."""
    core: Any = importlib.import_module("torch._C")
    was_on = core._get_mkldnn_enabled()
    core._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of TF32
    try:
        yield
    finally:
        core._set_mkldnn_enabled(was_on)


def _lowered(graph: GraphModule, fakes: Sequence[Tensor], mode: Any, ahead: Callable[[list[str]], None]) -> Compiled:
    """Through inductor: its passes, our products, rows and memory, then its C++, with equal layers as functions."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    inductor: Any = compile_fx
    passes.output(graph).args = (tuple(passes.output(graph).args[0]),)
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), enable_python_dispatcher():
        with shortcuts.patterns_for(graph):
            graph = inductor._recursive_joint_graph_passes(graph, input_device=torch.device("cpu"))
        graph = products.placed(graph)
        reductions.early(graph.graph)
        reductions.register()
        rows.register()
        sources.register()
        draws.register()
        ahead([kernel.source for kernel in kernels.called(graph)])
        in_arena = arena.possible()
        if in_arena:
            arena.taken(graph, kept.here())
            fakes = [*fakes, mode.from_tensor(arena.header(), static_shapes=True)]
        passes.as_laid_out(graph)
        if not in_arena:
            return _written(graph, fakes)
        with _changed():
            return _in_functions(graph, fakes) or _written(graph, fakes)


def _in_functions(graph: GraphModule, fakes: Sequence[Tensor]) -> Compiled | None:
    """A graph with equal layers as functions; None where it has none, or they cannot be made."""
    try:
        shorter = blocks.outlined(graph)
        return None if shorter is None else _written(shorter, fakes)
    except Exception as error:  # written out, it takes longer
        given_up("one function for equal layers", error)
        return None


def _written(graph: GraphModule, fakes: Sequence[Tensor]) -> Compiled:
    """As C++, compiled and loaded."""
    from torch._inductor import compile_fx, config
    from torch._inductor.utils import BoxedBool

    inductor: Any = compile_fx
    made = inductor.compile_fx_inner(
        graph,
        fakes,
        static_input_idxs=range(len(fakes)),
        cudagraphs=BoxedBool(False),
        is_inference=True,
        cpp_wrapper=config.cpp_wrapper,
    )
    return made.current_callable


@contextmanager
def _changed() -> Generator[None]:
    """Inductor writes other C++; only of graphs with the arena's input, which its cache tells apart."""
    from . import wrapper

    with wrapper.laid_out(), elementary.shorter(), pieces.apart():
        yield


def _chosen(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor's configuration, what depends on the graph apart."""
    chosen: dict[str, Any] = {
        "cpp_wrapper": True,
        # torch's draws, in the order of the program: those of an eager step.
        "fallback_random": True,
        # Kernels at -O3, the code that calls them at -O1: a third of the compile time, the same speed.
        "cpp_wrapper_build_separate": True,
    }
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        # torch itself runs on these instructions: no need to compile three programs that try them out.
        chosen["cpp.vec_isa_ok"] = True
    return chosen | dict(options or {})


# --- threads ----------------------------------------------------------------------------------------------------------

_ALONE = 6e7
"""Operations below which a step is faster on one thread: waking another takes longer than half of the work."""

_LONG = 1e9
"""Operations above which the code between kernels may be slow: microseconds of a step that takes milliseconds."""


def _by_size(work: float) -> dict[str, Any]:
    """What of inductor's configuration depends on how much there is to do."""
    if work < _ALONE:
        return {"cpp.threads": 1}
    # A second of g++ less; kernels are optimized as always.
    return {"aot_inductor.compile_wrapper_opt_level": "O0"} if work > _LONG else {}


def _threads(graph: GraphModule, work: float) -> int:
    """On how many threads the code may run; 0: on as many as there are."""
    if work < _ALONE:  # written for one
        return 0 if _uses_onednn(graph) else 1
    return torch.get_num_threads()


def _work(graph: GraphModule) -> float:
    """Operations of one call, about: of matrix products and convolutions, and four for every other number made."""
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
    """Whether products go through oneDNN, whose cache of kernels is emptied when the number of threads changes."""
    made = [node.meta.get("val") for node in graph.graph.nodes]
    half = any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in made)
    return half or any("convolution" in str(node.target) for node in graph.graph.nodes)


def on_threads(run: Compiled, most: int) -> Compiled:
    """The code on no more threads than so many: inductor has made room for the sums of those that there were."""

    def call(tensors: list[Tensor]) -> Any:
        threads = torch.get_num_threads()
        if threads <= most:
            return run(tensors)
        torch.set_num_threads(most)
        try:
            return run(tensors)
        finally:
            torch.set_num_threads(threads)

    return call
