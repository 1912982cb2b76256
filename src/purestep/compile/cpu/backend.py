"""From a traced graph to native code, called without a Python wrapper.

Buys: `torch.compile` and `standalone_compile` trace a graph a second time and call its code through a wrapper in
Python, which takes longer than the arithmetic of a small step. A step's graph is a whole program, gradients included,
whose inputs are the buffers of one state, so it needs neither.

Private names: ``torch._inductor.compile_fx`` (``_recursive_joint_graph_passes``, ``compile_fx_inner``),
``torch._guards``, ``torch._subclasses``, ``torch._dispatch``.

Without: `capture._lowered` calls `standalone_compile`; so it does for every graph that fails here.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from .. import aliasing, backends, control_flow, early_reductions, fx_passes, precision_casts, random_ops
from ..capture import Compiled, Flat, limit_threads, no_recurrent_kernel
from ..compile_lock import with_compiler
from . import attention, code_cache, embedding_grad, gemm, graph_key, launcher, offset_pointers, outline, workspace
from .graph_key import Record

if TYPE_CHECKING:
    from torch.fx import GraphModule

log = logging.getLogger("purestep")

_KNOWN = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""Whether inductor's private names mean what they are taken for here."""


class NotFunctional(Exception):
    """The graph writes to tensors in a way that inductor does not take, or calls operators that take functions."""


def suits(inputs: list[Tensor]) -> bool:
    """Whether graphs of these inputs are compiled here."""
    return _KNOWN and all(leaf.device.type == "cpu" for leaf in inputs)


record = graph_key.record


def _is_on(part: str) -> bool:
    return part not in backends.switched_off("cpu")


def compiled(record: Record, *, options: Mapping[str, Any] | None) -> tuple[Compiled, bool]:
    """What has been recorded as native code, made or found again, and whether it draws random numbers.

    Args:
        record: may write its inputs in place as the last thing it does.
        options: inductor's configuration, beyond what is set here.

    Raises:
        NotFunctional: it writes in place what cannot be written at its end.
    """
    name = code_cache.name(record, _chosen(options)) if _is_on("code_cache") else None
    made = code_cache.load(name, len(record.inputs))
    if made is None:
        with with_compiler():
            made = _made(record, options, is_kept=name is not None)
        code_cache.keep(name, made)
    run = made.code.run
    return limit_threads(run, made.threads) if made.threads else run, made.draws


def _made(record: Record, options: Mapping[str, Any] | None, *, is_kept: bool) -> code_cache.Made:
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
        casts = precision_casts.Casts()
        with mode, casts, config.patch(precision_casts.options(rounds=True)):
            graph = _traced(record.function, fakes)
        rounds = bool((options or {}).get(precision_casts.OPTION, casts.seen or config.emulate_precision_casts))
        if not rounds:
            precision_casts.unmark(graph)
        if control_flow.operators(graph):
            raise NotFunctional
        with graph_key.autocast_disabled(), config.patch(precision_casts.options(rounds)):
            return _made_of(graph, fakes, mode, options)


def _made_of(
    graph: GraphModule, fakes: Sequence[Tensor], mode: Any, options: Mapping[str, Any] | None
) -> code_cache.Made:
    """The graph, changed as a step may be, compiled; and how its code is called."""
    from torch._inductor import config

    graph = fx_passes.finished(_functional(graph, fakes, mode))
    work = _work(graph)
    is_drawing, threads = fx_passes.draws(graph), _threads(graph, work)  # inductor changes the graph
    with config.patch(_by_size(work) | dict(options or {})):
        run = _lowered(graph, fakes, mode)
        return code_cache.Made(launcher.of(run, len(fakes), in_arena=_in_workspace()), is_drawing, threads)


def _functional(graph: GraphModule, fakes: Sequence[Tensor], mode: Any) -> GraphModule:
    """The graph with all that it writes in place at its end."""
    if not fx_passes.is_functional(graph):
        with mode:
            graph = _traced(torch.func.functionalize(precision_casts.marking(graph), remove="mutations"), fakes)
    if not fx_passes.is_functional(graph):
        raise NotFunctional
    return fx_passes.writing_last(attention.written_out(graph) if _is_on("attention") else graph)


def _traced(function: Flat, fakes: Sequence[Tensor]) -> GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # Decomposed while it is traced: so views are recorded of the layouts that they will be taken of.
    table: Any = select_decomp_table()
    if _is_on("embedding_grad"):
        table = embedding_grad.decompositions(table)
    with no_recurrent_kernel(), control_flow.aliased_inputs_allowed():
        graph: GraphModule = make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    graph.graph.eliminate_dead_code()
    return fx_passes.without_copies(graph)


def _lowered(graph: GraphModule, fakes: Sequence[Tensor], mode: Any) -> Compiled:
    """Through inductor: its passes, our products, rows and memory, then its C++, with equal layers as functions."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    inductor: Any = compile_fx
    fx_passes.output(graph).args = (tuple(fx_passes.output(graph).args[0]),)
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), enable_python_dispatcher():
        graph = inductor._recursive_joint_graph_passes(graph, input_device=torch.device("cpu"))
        if _is_on("gemm"):
            graph = gemm.placed(graph)
        early_reductions.early(graph.graph)
        early_reductions.register()
        embedding_grad.register()
        aliasing.register()
        random_ops.register()
        backends.register_fallbacks(graph)
        in_arena = _in_workspace()
        if in_arena:
            workspace.taken(graph, code_cache.here())
            fakes = [*fakes, mode.from_tensor(workspace.header(), static_shapes=True)]
        fx_passes.as_laid_out(graph)
        if not in_arena:
            return _written(graph, fakes)
        with _changed():
            return _in_functions(graph, fakes) or _written(graph, fakes)


def _in_functions(graph: GraphModule, fakes: Sequence[Tensor]) -> Compiled | None:
    """A graph with equal layers as functions; None where it has none, or they cannot be made."""
    if not _is_on("outline"):
        return None
    try:
        shorter = outline.outlined(graph)
        return None if shorter is None else _written(shorter, fakes)
    except Exception as error:  # written out, it takes longer
        not_outlined(error)
        return None


def not_outlined(error: Exception) -> None:
    """Log that equal layers are compiled one by one."""
    log.info("equal layers are compiled one by one, which takes longer: %r", error)


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
    from . import cpp_wrapper

    with cpp_wrapper.laid_out(), offset_pointers.apart() if _is_on("offset_pointers") else nullcontext():
        yield


def _in_workspace() -> bool:
    return _is_on("workspace") and workspace.possible()


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
