"""The code that inductor generates for draws (`torch_ext.draws`): calls of torch's fills, in a buffer of their own.

Inductor's own lowering of ``bernoulli_`` writes a buffer in place, and a fused kernel may read it before it is filled.
Inductor also removes a draw that nobody reads, and later draws have other numbers then. Here a fill computes a new
buffer, and is never removed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch

from ..torch_ext import draws

_TOSS: Any = torch.ops.aten.bernoulli_.Tensor


@functools.cache
def register() -> None:
    """Register the lowerings of the operators of draws. Loads inductor."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    kinds, lowerings, fill_class = ir, lowering, _fill_class()

    def filled(fill: Any, given: list[Any], size: Any, stride: Any, dtype: torch.dtype, *numbers: Any) -> Any:
        layout: Any = kinds.FixedLayout(torch.device("cpu"), dtype, list(size), list(stride))
        return kinds.TensorBox.create(fill_class(layout, given, constant_args=numbers, op_overload=fill))

    def called(operator: Any, *args: Any) -> Any:
        made: Any = kinds.FallbackKernel.create(operator, *args)
        made.has_side_effects = lambda: True
        return kinds.TensorBox.create(made)

    def drawn(fill: str, size: Any, stride: Any, dtype: Any, whole: Any, numbers: Any, members: int) -> Any:
        if members or fill not in draws.FILLS:
            return called(draws.DRAWN, fill, size, stride, dtype, whole, numbers, members)
        return filled(draws.FILLS[fill], [], size, stride, dtype, *whole, *numbers)

    def coins(chances: Any, size: Any, stride: Any, dtype: torch.dtype, members: int) -> Any:
        eager = V.graph.current_node.all_input_nodes[0].meta["val"].stride()
        chances = kinds.ExternKernel.require_exact_strides(kinds.ExternKernel.copy_input(chances), list(eager))
        if members:
            return called(draws.COINS, chances, size, stride, dtype, members)
        return filled(_TOSS, [kinds.ExternKernel.realize_input(chances)], size, stride, dtype)

    table: Any = lowerings.register_lowering
    table(draws.DRAWN, type_promotion_kind=None)(drawn)
    table(draws.COINS, type_promotion_kind=None)(coins)


@functools.cache
def _fill_class() -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    base: Any = ir.ExternKernelOut

    class Fill(base):
        """A new buffer, filled by an operator of torch."""

        def codegen(self, wrapper: Any) -> None:
            name, fill, numbers = self.get_name(), self.op_overload, self.constant_args
            graph: Any = V.graph
            is_unread = name in graph.removed_buffers  # inductor has removed its allocation
            if is_unread:
                graph.removed_buffers.discard(name)
                wrapper.codegen_allocation(self)
            given = [each.codegen_reference() for each in self.inputs]
            if graph.cpp_wrapper:
                for line in _in_cpp(name, fill, given, numbers):
                    wrapper.writeline(line)
            else:
                packet, _, overload = str(fill).removeprefix("aten.").partition(".")
                arguments = ", ".join(map(str, (name, *given, *numbers)))
                wrapper.writeline(f'getattr(torch.ops.aten.{packet}, "{overload}")({arguments})')
            if is_unread:
                wrapper.codegen_free(self)

        def has_side_effects(self) -> bool:
            return True

    return Fill


def _in_cpp(name: str, fill: Any, given: Sequence[str], numbers: Sequence[Any]) -> list[str]:
    """C++ lines that call the operator. Only the Bernoulli operators have a function in inductor's C interface; others
    go through the dispatcher by name, with arguments as 64-bit words."""
    if fill in (torch.ops.aten.bernoulli_.float, _TOSS):
        function = f"aoti_torch_cpu_bernoulli__{fill._schema.overload_name}"
        (chance,) = given or [repr(float(numbers[0]))]
        return [f"AOTI_TORCH_ERROR_CODE_CHECK({function}({name}, {chance}, nullptr));"]
    stack, waiting = [f"(StableIValue){name}_taken"], list(numbers)
    for argument in fill._schema.arguments[1:]:
        kind = str(argument.type)
        if argument.name == "generator":
            stack.append("0")
        elif kind == "float":
            stack.append(f"{struct.unpack('<Q', struct.pack('<d', waiting.pop(0)))[0]}ULL")
        elif kind.startswith("Optional"):
            stack.append(f"(StableIValue)new StableIValue((StableIValue){waiting.pop(0)}LL)")  # the callee deletes it
        else:
            stack.append(f"(StableIValue){waiting.pop(0)}LL")
    operator, _, overload = str(fill).removeprefix("aten.").partition(".")
    overload = "" if overload == "default" else overload
    return [
        f"AtenTensorHandle {name}_taken;",
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle({name}, &{name}_taken));",
        f"StableIValue {name}_stack[] = {{{', '.join(stack)}}};",
        f'AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("aten::{operator}", "{overload}", {name}_stack));',
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_delete_tensor_object((AtenTensorHandle){name}_stack[0]));",
    ]
