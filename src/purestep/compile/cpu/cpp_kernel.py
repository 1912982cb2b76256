"""purestep's C++ functions in inductor's code: called with pointers, compiled with a graph's kernels.

Buys: the calls of `gemm`, `attention` and `embedding_grad` without dispatch and tensor objects.

Private names: ``torch._inductor.ir`` (an external kernel), ``torch._inductor.lowering``.

Without: torch's operators.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Shape = Sequence[Any]


class Kernel(NamedTuple):
    """A function ``void name(inputs..., output, plan)`` that implements an operator.

    Args:
        name: of the function, and of the operator in ``torch.ops.purestep``.
        source: its definition and dependencies.
        layout: ``(input sizes..., other arguments...) -> (sizes, strides)`` of the output.
        plan: ``((sizes, strides) of inputs and output...) -> numbers`` passed to a call.
    """

    name: str
    source: str
    layout: Callable[..., tuple[Shape, Shape]]
    plan: Callable[..., Sequence[Any]]

    @property
    def version(self) -> int:
        """A checksum of the source: an argument of the operator, so that inductor's cache distinguishes versions."""
        return zlib.crc32(self.source.encode())


def possible() -> bool:
    """True if the graph being compiled can call such functions: from C++, on a processor with AVX."""
    from torch._inductor import config

    # Not `pick_vec_isa`, which starts compilers: cached code needs none.
    vectors: Any = config.cpp.simdlen
    return config.cpp_wrapper and vectors is None and torch.backends.cpu.get_cpu_capability().startswith("AVX")


_REGISTERED: dict[Any, Kernel] = {}
"""By operator."""


@functools.cache
def register(kernel: Kernel) -> Any:
    """Register the lowering of a kernel's operator, and return the operator."""
    from torch._inductor import ir, lowering

    operator: Any = getattr(torch.ops.purestep, kernel.name).default
    _REGISTERED[operator] = kernel
    call = _call_class()

    def lowered(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, ir.TensorBox)]
        inputs = [ir.ExternKernel.realize_input(each) for each in tensors]
        size, strides = kernel.layout(*(each.get_size() for each in tensors), *args[len(tensors) :])
        like = tensors[0].get_device_or_error(), tensors[0].get_dtype(), size
        # Inductor may place a vector in a longer one.
        layout = ir.FlexibleLayout(*like) if len(size) == 1 else ir.FixedLayout(*like, strides)
        made = call(layout, inputs, op_overload=operator)
        made.kernel = kernel
        return ir.TensorBox.create(made)

    decorator: Any = lowering.register_lowering(operator, type_promotion_kind=None)
    decorator(lowered)
    return operator


@functools.cache
def _call_class() -> Any:
    from torch._inductor import ir

    base: Any = ir.ExternKernelOut

    class Call(base):
        """A call with pointers instead of an operator with tensors."""

        def codegen(self, wrapper: Any) -> None:
            function = f"purestep_{self.kernel.name}"
            tensors = [*self.inputs, self]
            if function not in wrapper.src_to_kernel:
                wrapper.src_to_kernel[function] = function
                arguments = ", ".join(_c_type(each, each is self) for each in tensors)
                declared = f'extern "C" void {function}({arguments}, const int64_t* plan);\n'
                wrapper.define_kernel(function, self.kernel.source, gpu=False, cpp_definition=declared)
            layouts = [(each.get_size(), each.get_stride()) for each in tensors]
            plan = ", ".join(map(str, self.kernel.plan(*layouts)))
            wrapper.writeline(f"static constexpr int64_t plan_{self.get_name()}[] = {{{plan}}};")
            pointers = ", ".join(f"({_c_type(each, each is self)})({address(each)})" for each in tensors)
            wrapper.writeline(f"{function}({pointers}, plan_{self.get_name()});")

    return Call


def _c_type(buffer: Any, written: bool) -> str:
    name = {torch.float32: "float", torch.int64: "int64_t"}[buffer.get_dtype()]
    return f"{name}*" if written else f"const {name}*"


def unboxed(given: Any) -> Any:
    """The buffer or view inside inductor's boxes; a box forwards attributes, but not the class."""
    from torch._inductor import ir

    while isinstance(given, ir.MutableBox):
        given = given.data
    return given


def is_view(given: Any) -> bool:
    """True if this is a view of a buffer, which may have an offset.

    Raises:
        TypeError: it is not in memory.
    """
    from torch._inductor import ir

    made = unboxed(given)
    if not isinstance(made, ir.ReinterpretView | ir.Buffer):
        raise TypeError(f"a {type(made).__name__} has no memory to point at")
    return isinstance(made, ir.ReinterpretView)


def address(given: Any) -> str:
    """The C++ expression for the address of a buffer or view."""
    start = f"{given.get_name()}.data_ptr()"
    if not is_view(given):
        return start
    return f"(char*){start} + {given.get_layout().offset * given.get_dtype().itemsize}"


def contiguous(size: Shape) -> list[Any]:
    """The strides of a contiguous tensor of this size."""
    strides: list[Any] = [1]
    for length in reversed(size[1:]):
        strides.insert(0, strides[0] * length)
    return strides
