"""Compilation of a traced graph for one GPU through inductor's inner entry; see `lower`.

It has run on an H100 with torch 2.11, with and without a CUDA graph around the code.

Without (``PURESTEP_CUDA=0``): `capture` calls inductor's public entry, to code of the same speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import fx_passes, inductor_fixes, lower

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .capture import Compiled

_WRITTEN_FOR = ("2.11.", "2.13.")
"""The torch versions whose private names are used here."""


def suits(inputs: Sequence[Tensor]) -> bool:
    """True if graphs of these inputs are compiled here."""
    return torch.__version__.startswith(_WRITTEN_FOR) and len({leaf.device for leaf in inputs}) == 1


while_traced = nullcontext


def compiled(
    graph: GraphModule, inputs: Sequence[Tensor], *, options: Mapping[str, Any] | None
) -> tuple[Compiled, bool] | None:
    """Compile a graph; return the code and whether it draws random numbers. None: the public entry compiles it.

    Args:
        graph: may write its inputs in place; not changed.
        inputs: examples.
        options: inductor's configuration; overrides the settings here.
    """
    constants = list(lower.constants(graph).values())
    rounds = {"emulate_precision_casts": True} if fx_passes.simulates_low_precision(graph) else {}
    try:
        with lower.functional(
            graph, [*inputs, *constants], {**inductor_fixes.trace_order.OPTIONS, **rounds, **dict(options or {})}
        ) as given:
            is_drawing = fx_passes.draws(given.graph)
            run = lower.compiled(given, cpp_wrapper=False)
    except lower.NotFunctional:
        return None

    def call(tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            return run([*tensors, *constants])

    return call, is_drawing
