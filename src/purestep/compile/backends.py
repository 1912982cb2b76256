"""Compilers of traced graphs: plug-ins for devices, and inductor's settings."""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import draw_code, inductor_fixes

if TYPE_CHECKING:
    from torch.fx import GraphModule

PLUGINS = {"cpu": ("PURESTEP_CPU", ".cpu.backend"), "cuda": ("PURESTEP_CUDA", ".cuda")}
"""By device type: the environment variable that switches the plug-in or parts of it off (`switched_off`), and the
plug-in's module with

- ``suits(inputs) -> bool``: whether it compiles graphs of these tensors;
- ``while_traced() -> context``: in which their graph is traced;
- ``compiled(graph, inputs, *, options) -> (run, draws) | None``: the code, and whether it draws random numbers; None
  leaves the graph to inductor's public entry. The graph is a trace without decompositions, which it does not change.
"""


def switched_off(device: str) -> frozenset[str]:
    """Parts that a plug-in's environment variable switches off, as in ``-fast``; ``0`` means all."""
    words = os.environ.get(PLUGINS[device][0], "").split(",")
    return frozenset(word.removeprefix("-") for word in words)


def plugin(inputs: list[Tensor]) -> types.ModuleType | None:
    """The plug-in for graphs of these tensors; None if there is none or it is switched off."""
    devices = {leaf.device.type for leaf in inputs}
    device = devices.pop() if len(devices) == 1 else ""
    if device not in PLUGINS or "0" in switched_off(device):
        return None
    found = importlib.import_module(PLUGINS[device][1], __package__)
    return found if found.suits(inputs) else None


def inductor_options(options: Mapping[str, Any] | None, *, on_cpu: bool, rounds: bool) -> dict[str, Any]:
    """Return inductor's configuration for a graph that is compiled through its public entry.

    Args:
        options: of the user.
        on_cpu: let torch draw, in program order: the numbers are those of an eager step.
        rounds: keep every cast, for `fx_passes.simulates_low_precision`.
    """
    own = ({"fallback_random": True} if on_cpu else {}) | ({"emulate_precision_casts": True} if rounds else {})
    draw_code.register()
    return inductor_fixes.options(own | dict(options or {}))


def register_fallbacks(graph: GraphModule) -> None:
    """Let inductor call torch's kernel for each operator that it neither lowers nor decomposes.

    Inductor does so by itself, but raises an AssertionError where the environment variable ``CI`` is set and torch has
    a decomposition for the operator (``upsample_bilinear2d``, below autograd).
    """
    from torch._decomp import get_decompositions
    from torch._inductor import lowering
    from torch._ops import OpOverload

    inductor: Any = lowering
    for node in graph.graph.nodes:
        operator = node.target
        if not isinstance(operator, OpOverload) or operator in inductor.lowerings:
            continue
        if get_decompositions([operator]) and operator not in inductor.decompositions:
            tag = inductor.get_layout_constraint_tag(operator, with_default=True)
            inductor.make_fallback(operator, inductor.tag_to_layout_constraint(tag), warn=False)
