"""Compilers of captured graphs: plug-ins for devices, and the backends of `torch.compile`.

Dynamo's graph is first traced below autograd. This keeps draws in eager mode's layout (`torch_ext.draws`), which
inductor's own trace loses. A user's backend gets Dynamo's graph unchanged.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..torch_ext import draws, tracing
from . import draw_code, fx_passes, inductor_fixes

if TYPE_CHECKING:
    from torch.fx import GraphModule

PLUGINS = {"cpu": ("PURESTEP_CPU", ".cpu.backend")}
"""By device type: the environment variable that switches the plug-in or parts of it off (`switched_off`), and the
plug-in's module with

- ``suits(inputs) -> bool``: whether it compiles graphs of these tensors;
- ``record(function, inputs) -> Record``: runs the Python once; ``Record.function`` repeats its operations;
- ``compiled(record, *, options) -> (run, draws)``: the code, and whether it draws random numbers.
"""

NAMES = ("inductor", "aot_eager", "eager")
"""Names of backends that work with a trace and with Dynamo."""


def switched_off(device: str) -> frozenset[str]:
    """Parts that a plug-in's environment variable switches off, as in ``-gemm,-outline``; ``0`` means all."""
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


def dynamo_backend(name: str, options: Mapping[str, Any] | None) -> Callable[[GraphModule, list[Any]], Any]:
    """Return a backend for `torch.compile`.

    Args:
        name: one of `NAMES`.
        options: inductor's configuration.
    """
    _inductor(options)  # raises for an unknown option

    def purestep(graph: GraphModule, inputs: list[Any]) -> Any:
        traced = _traced(graph)
        if name != "inductor":
            return fx_passes.views_allowed(traced).forward
        register_fallbacks(traced)
        rounds = fx_passes.simulates_low_precision(traced)
        on_cpu = all(leaf.device.type == "cpu" for leaf in inputs if isinstance(leaf, Tensor))
        return _inductor(inductor_options(options, on_cpu=on_cpu, rounds=rounds))(traced, inputs)

    return purestep


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


def _inductor(options: Mapping[str, Any] | None) -> Any:
    torch_: Any = torch
    return torch_._TorchCompileInductorWrapper(None, dict(options or {}), None)


def _traced(graph: GraphModule) -> GraphModule:
    """Trace Dynamo's graph to operators."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    modes = {id(leaf.fake_mode): leaf.fake_mode for leaf in inputs if isinstance(leaf, FakeTensor)}
    (mode,) = modes.values()
    with tracing.no_transforms_left(), tracing.capturing(), torch.no_grad(), mode, draws.Draws():
        traced: GraphModule = make_fx(graph, _allow_non_fake_inputs=True)(*inputs)
    fx_passes.collectives_in_order(traced)
    traced.recompile()
    return traced
