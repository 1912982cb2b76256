"""Compilation of a traced graph to native code, called without a Python wrapper.

Buys: `torch.compile` and `standalone_compile` trace a graph again, through autograd, and load a compiler at every
start, and their Python wrapper takes longer than the arithmetic of a small step.

Private names: ``torch._C._aoti``.

Without: `capture` calls `standalone_compile`, as for every graph that fails here.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import fx_passes, lower
from ..capture import Compiled, limit_threads
from . import aot, attention, code_cache, cpp_library

if TYPE_CHECKING:
    from torch.fx import GraphModule

_WRITTEN_FOR = "2.13."
"""The torch whose private names are used here."""


def suits(inputs: Sequence[Tensor]) -> bool:
    """True if graphs of these inputs are compiled here: not of complex ones, for which inductor writes no code."""
    known = torch.__version__.startswith(_WRITTEN_FOR) and sys.platform == "linux"
    return known and torch.backends.cpu.get_cpu_capability().startswith("AVX") and all(map(_is_taken, inputs))


def _is_taken(leaf: Tensor) -> bool:
    return leaf.device.type == "cpu" and not leaf.is_complex()


while_traced = attention.AsProducts


def compiled(
    graph: GraphModule, inputs: Sequence[Tensor], *, options: Mapping[str, Any] | None
) -> tuple[Compiled, bool]:
    """Compile a graph, or load its code from the cache; return the code and whether it draws random numbers.

    Args:
        graph: may write its inputs in place; not changed.
        inputs: examples.
        options: inductor's configuration; overrides the settings here.
    """
    chosen = settings(fx_passes.rounding(graph) | dict(options or {}))
    constants = list(lower.constants(graph).values())
    build = functools.partial(aot.build, graph, [*inputs, *constants], chosen)
    if aot.may_be_fast(graph):
        cpp_library.loaded()
    run = code_cache.obtained(code_cache.key(graph, chosen), build, lambda library: _runner(library, constants))
    threads = aot.threads(graph)
    return limit_threads(run, threads) if threads else run, fx_passes.draws(graph)


def _runner(library: str, constants: Sequence[Tensor]) -> Compiled:
    """Return a function that calls a library from any thread. A runner serves one call at a time, and waits without
    releasing Python's lock, so calls at the same time use different runners."""
    aoti: Any = importlib.import_module("torch._C._aoti")
    idle = [aoti.AOTIModelContainerRunnerCpu(library, 1)]

    def call(tensors: list[Tensor]) -> Any:
        try:
            runner = idle.pop()
        except IndexError:
            runner = aoti.AOTIModelContainerRunnerCpu(library, 1)
        try:
            return runner.run([*tensors, *constants])
        finally:
            idle.append(runner)

    return call


def settings(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor's configuration that does not depend on the graph; ``options`` of the user replace it."""
    chosen: dict[str, Any] = {
        "cpp_wrapper": True,
        # torch draws in program order: the numbers are those of an eager step.
        "fallback_random": True,
        # torch itself uses these instructions: skip the test program that includes torch's headers.
        "cpp.vec_isa_ok": True,
    }
    return chosen | dict(options or {})
