"""Compilation of a traced graph to native code, called without a Python wrapper.

Buys: `torch.compile` and `standalone_compile` trace a graph a second time, and their Python wrapper takes longer than
the arithmetic of a small step. A step's graph is a complete program with gradients, on the buffers of one state, so it
needs neither.

Private names: ``torch._inductor.compile_fx`` (``_recursive_joint_graph_passes``, ``compile_fx_inner``),
``torch._inductor.cpu_vec_isa.pick_vec_isa``, ``torch._guards``, ``torch._subclasses``, ``torch._dispatch``.

Without: `capture` calls `standalone_compile`, as for every graph that fails here.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ...torch_ext import tracing
from .. import (
    backends,
    control_flow,
    draw_code,
    fx_passes,
    inductor_fixes,
)
from ..capture import Compiled, Flat, limit_threads
from ..compile_lock import with_compiler
from . import attention, code_cache, embedding_grad, gemm, graph_key, launcher, offset_pointers, outline, workspace
from .graph_key import Record

if TYPE_CHECKING:
    from torch.fx import GraphModule

log = logging.getLogger("purestep")

_KNOWN = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""True if this torch has the private names of inductor that are used here."""


class NotFunctional(Exception):
    """The graph writes tensors in a way that inductor does not support, calls higher-order operators, or calls torch's
    functional collectives."""


def suits(inputs: list[Tensor]) -> bool:
    """True if graphs of these inputs are compiled here."""
    return _KNOWN and all(leaf.device.type == "cpu" for leaf in inputs)


record = graph_key.record


def _is_on(part: str) -> bool:
    return part not in backends.switched_off("cpu")


def compiled(record: Record, *, options: Mapping[str, Any] | None) -> tuple[Compiled, bool]:
    """Compile a record, or load its code from the cache; return the code and whether it draws random numbers.

    Args:
        record: its function may write inputs in place at its end.
        options: inductor's configuration; overrides the settings here.

    Raises:
        NotFunctional: in-place writes cannot be moved to the end.
    """
    name = code_cache.name(record, _settings(options)) if _is_on("code_cache") else None
    made = code_cache.load(name, len(record.inputs))
    if made is None:
        with with_compiler():
            made = _compile(record, options, is_kept=name is not None)
        code_cache.keep(name, made)
    run = made.code.run
    return limit_threads(run, made.threads) if made.threads else run, made.draws


def _compile(record: Record, options: Mapping[str, Any] | None, *, is_kept: bool) -> code_cache.Made:
    """Trace and compile a record with inductor's settings."""
    from torch._inductor import config
    from torch._subclasses import FakeTensorMode
    from torch.fx import _lazy_graph_module
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    lazy: Any = _lazy_graph_module
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [mode.from_tensor(leaf, static_shapes=True) for leaf in record.inputs]
    more = inductor_fixes.options(options)
    if is_kept:
        more["fx_graph_cache"] = False  # our cache replaces inductor's
    # Lazy graph modules: no Python code is generated for a graph that is rewritten many times and never run.
    with config.patch(_settings(options) | more), lazy._use_lazy_graph_module(True), _instructions_tested():
        with mode:
            graph = _traced(record.function, fakes)
        rounds = config.emulate_precision_casts
        if "emulate_precision_casts" not in (options or {}) and fx_passes.simulates_low_precision(graph):
            rounds = True
            with mode, config.patch(emulate_precision_casts=True):  # the trace marks the operators that round
                graph = _traced(record.function, fakes)
        if fx_passes.has_functional_collectives(graph):
            raise NotFunctional("torch's functional collectives need results in storage of their own")
        if control_flow.operators(graph):
            raise NotFunctional
        with graph_key.autocast_disabled(), config.patch(emulate_precision_casts=rounds):
            return _compile_graph(graph, fakes, mode, options)


def _compile_graph(
    graph: GraphModule, fakes: Sequence[Tensor], mode: Any, options: Mapping[str, Any] | None
) -> code_cache.Made:
    """Rewrite and compile a graph."""
    from torch._inductor import config

    graph = fx_passes.finished(_functional(graph, fakes, mode))
    work = _work(graph)
    is_drawing, threads = fx_passes.draws(graph), _threads(graph, work)  # inductor changes the graph
    given = {name: value for name, value in (options or {}).items() if name != inductor_fixes.PASS}
    with config.patch(_by_size(work) | given):
        run = _lower(graph, fakes, mode)
        return code_cache.Made(launcher.of(run, len(fakes), in_workspace=_in_workspace()), is_drawing, threads)


def _functional(graph: GraphModule, fakes: Sequence[Tensor], mode: Any) -> GraphModule:
    """Move all in-place writes of a graph to its end."""
    if not fx_passes.is_functional(graph):
        with mode:
            graph = _traced(torch.func.functionalize(graph, remove="mutations"), fakes)
    if not fx_passes.is_functional(graph):
        raise NotFunctional
    return fx_passes.writing_last(attention.written_out(graph) if _is_on("attention") else graph)


def _traced(function: Flat, fakes: Sequence[Tensor]) -> GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # Decompositions of pools read this module as an attribute of its package, without an import.
    importlib.import_module("torch._inductor.lowering")
    # Decompose during the trace, so that views are recorded for the final layouts.
    table: Any = select_decomp_table()
    if _is_on("embedding_grad"):
        table = embedding_grad.decompositions(table)
    with tracing.no_recurrent_kernel(), control_flow.aliased_inputs_allowed():
        graph: GraphModule = make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    graph.graph.eliminate_dead_code()
    return fx_passes.without_copies(graph)


def _lower(graph: GraphModule, fakes: Sequence[Tensor], mode: Any) -> Compiled:
    """Compile with inductor: its passes, our kernels and workspace, then C++ with equal layers as functions."""
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
        embedding_grad.register()
        draw_code.register()
        backends.register_fallbacks(graph)
        in_workspace = _in_workspace()
        if in_workspace:
            workspace.add_input(graph, code_cache.here())
            fakes = [*fakes, mode.from_tensor(workspace.header(), static_shapes=True)]
        fx_passes.as_laid_out(graph)
        if not in_workspace:
            return _to_cpp(graph, fakes)
        with _cpp_patches():
            return _with_functions(graph, fakes) or _to_cpp(graph, fakes)


def _with_functions(graph: GraphModule, fakes: Sequence[Tensor]) -> Compiled | None:
    """Compile a graph with equal layers as functions; None if there are none or this fails."""
    if not _is_on("outline"):
        return None
    try:
        shorter = outline.outlined(graph)
        return None if shorter is None else _to_cpp(shorter, fakes)
    except Exception as error:  # compiling every layer takes longer
        not_outlined(error)
        return None


def not_outlined(error: Exception) -> None:
    """Log that equal layers are compiled one by one."""
    log.info("equal layers are compiled one by one, which takes longer: %r", error)


def _to_cpp(graph: GraphModule, fakes: Sequence[Tensor]) -> Compiled:
    """Generate, compile and load C++."""
    from torch._inductor import compile_fx, config
    from torch._inductor.utils import BoxedBool

    wait([_instruction_tests()])
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
def _cpp_patches() -> Generator[None]:
    """Patch inductor's C++ for graphs with the workspace input, which distinguishes them in its cache."""
    from . import cpp_wrapper

    with cpp_wrapper.enabled(), offset_pointers.enabled() if _is_on("offset_pointers") else nullcontext():
        yield


def _in_workspace() -> bool:
    return _is_on("workspace") and workspace.possible()


def _settings(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor's configuration that does not depend on the graph."""
    chosen: dict[str, Any] = {
        "cpp_wrapper": True,
        # torch draws in program order: the numbers are those of an eager step.
        "fallback_random": True,
        # Kernels at -O3, the calling code at -O1: a third of the compile time at the same speed.
        "cpp_wrapper_build_separate": True,
        **inductor_fixes.trace_order.OPTIONS,
    }
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        # torch itself uses these instructions: skip the test program that includes torch's headers.
        chosen["cpp.vec_isa_ok"] = True
    return chosen | dict(options or {})


@contextmanager
def _instructions_tested() -> Generator[None]:
    """Inside, Python traces while the C++ compiler runs `_instruction_tests`."""
    tests = _instruction_tests()
    try:
        yield
    finally:
        wait([tests])  # after an error too: inductor must not start the same tests beside them


@functools.cache
def _instruction_tests() -> Future[Any]:
    """Start inductor's tests of the processor's instructions: a second of g++, once in a process.

    Inductor starts them itself when it generates the first kernel, and waits. It keeps the result, or repeats an error.
    """
    from torch._inductor import codecache, cpu_vec_isa

    del codecache  # loaded by this thread: the other one must import nothing that this one may be importing
    threads = ThreadPoolExecutor(1, thread_name_prefix="purestep-instructions")
    tests = threads.submit(copy_context().run, cpu_vec_isa.pick_vec_isa)
    threads.shutdown(wait=False)
    return tests


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
