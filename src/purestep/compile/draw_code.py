"""The code that inductor generates for draws (`torch_ext.draws`): calls of their operators, which are never removed.

Dropout, the most frequent draw, calls torch's Bernoulli operators without Python. Inductor's own lowering of
``bernoulli_`` writes a buffer in place, and a fused kernel may read it before it is filled; here the operator fills a
new buffer. Other draws call Python.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..torch_ext import draws

_TOSS: Any = torch.ops.aten.bernoulli_


@functools.cache
def register() -> None:
    """Register the lowerings of the operators of draws. Loads inductor."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    kinds, lowerings, fill_class = ir, lowering, _fill_class()

    def tossed(toss: Any, given: list[Any], size: Any, stride: Any, dtype: torch.dtype, *chance: float) -> Any:
        layout: Any = kinds.FixedLayout(torch.device("cpu"), dtype, list(size), list(stride))
        return kinds.TensorBox.create(fill_class(layout, given, constant_args=chance, op_overload=toss))

    def called(operator: Any, *args: Any) -> Any:
        made: Any = kinds.FallbackKernel.create(operator, *args)
        made.has_side_effects = lambda: True
        return kinds.TensorBox.create(made)

    def drawn(fill: str, size: Any, stride: Any, dtype: Any, whole: Any, numbers: Any, members: int) -> Any:
        if members or fill != str(_TOSS.float):
            return called(draws.DRAWN, fill, size, stride, dtype, whole, numbers, members)
        return tossed(_TOSS.float, [], size, stride, dtype, *numbers)

    def coins(chances: Any, size: Any, stride: Any, dtype: torch.dtype, members: int) -> Any:
        eager = V.graph.current_node.all_input_nodes[0].meta["val"].stride()
        chances = kinds.ExternKernel.require_exact_strides(kinds.ExternKernel.copy_input(chances), list(eager))
        if members:
            return called(draws.COINS, chances, size, stride, dtype, members)
        return tossed(_TOSS.Tensor, [kinds.ExternKernel.realize_input(chances)], size, stride, dtype)

    table: Any = lowerings.register_lowering
    table(draws.DRAWN, type_promotion_kind=None)(drawn)
    table(draws.COINS, type_promotion_kind=None)(coins)


@functools.cache
def _fill_class() -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    base: Any = ir.ExternKernelOut

    class Fill(base):
        """A new buffer, filled by a Bernoulli operator."""

        def codegen(self, wrapper: Any) -> None:
            name, graph = self.get_name(), V.graph
            is_unread = name in graph.removed_buffers  # inductor has removed its allocation
            if is_unread:
                graph.removed_buffers.discard(name)
                wrapper.codegen_allocation(self)
            (chance,) = [each.codegen_reference() for each in self.inputs] or self.constant_args
            toss = self.op_overload._overloadname
            if graph.cpp_wrapper:
                call = f"aoti_torch_cpu_bernoulli__{toss}({name}, {chance}, nullptr)"
                wrapper.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK({call});")
            else:
                wrapper.writeline(f"torch.ops.aten.bernoulli_.{toss}({name}, {chance})")
            if is_unread:
                wrapper.codegen_free(self)

        def has_side_effects(self) -> bool:
            return True

    return Fill
