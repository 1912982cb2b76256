"""Pointers to parts of packed vectors, so that kernels of equal layers have the same code.

Buys: a packed state has the weights of all layers in one vector, and inductor writes the offset of a part into the
kernel that reads it. Kernels of two equal layers then differ in a number and are compiled twice. Here a kernel takes a
pointer to the part, and the calling C++ adds the offset. Only the text of the code changes: inductor still plans with
the vector, and a kernel reads the same addresses.

Private names: ``torch._inductor.codegen`` (arguments and loads of a C++ kernel), ``torch._inductor.graph``.

Without: a kernel for each layer, which takes longer to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from . import csrc

HEADER = csrc.text("piece.h")

_FROM = "+"
"""Separates the name of a vector and an offset in the name of a kernel's pointer."""


@contextmanager
def enabled() -> Generator[None]:
    """Let inductor's kernels take parts of vectors by separate pointers."""
    from torch._inductor import graph
    from torch._inductor.codegen import common, cpp

    kinds: tuple[Any, ...] = (cpp.CppKernel, cpp.CppVecKernel, cpp.CppTile2DKernel)
    arguments: Any = common.KernelArgs
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "load", _loading(kind.load)))
        stack.enter_context(mock.patch.object(arguments, "cpp_argdefs", _passing(arguments.cpp_argdefs)))
        stack.enter_context(mock.patch.object(graph.GraphLowering, "get_dtype", _typed(graph.GraphLowering.get_dtype)))
        yield


def _loading(true: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel's method that reads one element or a vector of adjacent ones."""

    def load(kernel: Any, name: str, index: Any) -> Any:
        offset = 0 if "input" in vars(kernel.args) else _offset(name, index)  # a nested read
        if offset == 0:
            return true(kernel, name, index)
        pointer = kernel.args._lookup("in_ptr", kernel.args.input_buffers, f"{name}{_FROM}{offset}")

        def given(_: str) -> str:
            return pointer

        with mock.patch.object(kernel.args, "input", given):
            return true(kernel, name, index - offset)

    return load


def _offset(name: str, index: Any) -> int:
    """The constant offset of a read in a vector input of the graph; 0 for other reads."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    given = graph.graph_inputs.get(name)
    if not isinstance(given, ir.TensorBox) or len(given.get_size()) != 1:
        return 0
    constant, _ = index.as_coeff_Add()
    return int(constant) if constant.is_Integer and constant > 0 else 0


def _passing(true: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that lists a kernel's arguments."""

    def cpp_argdefs(self: Any, *more: Any) -> Any:
        definitions, given, types = true(self, *more)
        return definitions, [_address(one) if isinstance(one, str) else one for one in given], types

    return cpp_argdefs


def _address(name: str) -> str:
    vector, _, offset = name.partition(_FROM)
    if not offset.isdecimal():
        return name
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    start = int(offset) * graph.get_dtype(vector).itemsize
    return f"Piece{{(const char*)({vector}.data_ptr()) + {start}}}"


def _typed(true: Callable[..., Any]) -> Callable[..., Any]:
    def get_dtype(self: Any, name: str) -> Any:
        return true(self, name.partition(_FROM)[0])

    return get_dtype
