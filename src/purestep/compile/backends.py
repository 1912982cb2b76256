"""Compilers of captured graphs: the plug-ins for devices, and what Dynamo hands a graph to.

Dynamo's graph is traced below autograd first: that keeps draws in eager mode's layout (`random_ops.py`) and casts there
and back (`precision_casts.py`), which inductor's own trace loses. Backends of the user's get Dynamo's graph as it is.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import tracing
from . import aliasing, formats, fx_passes, precision_casts, random_ops

if TYPE_CHECKING:
    from torch.fx import GraphModule

PLUGINS = {"cpu": ("PURESTEP_CPU", ".cpu.backend")}
"""By device type: the environment variable that switches the plug-in or parts of it off (`switched_off`), and its
module, which has

- ``suits(inputs) -> bool``: whether it compiles graphs of these tensors;
- ``record(function, inputs) -> Record``: runs the Python once; ``Record.function`` does the same operations again;
- ``compiled(record, *, options) -> (run, draws)``: the code, and whether it draws random numbers.
"""

OURS = ("inductor", "aot_eager", "eager")
"""Backends by name that a trace has, too."""


def switched_off(device: str) -> frozenset[str]:
    """Parts that the environment variable of a plug-in switches off: ``-gemm,-outline``; ``0`` is all of it."""
    words = os.environ.get(PLUGINS[device][0], "").split(",")
    return frozenset(word.removeprefix("-") for word in words)


def plugin(inputs: list[Tensor]) -> types.ModuleType | None:
    """The plug-in for graphs of these tensors; None where there is none, or it is switched off."""
    devices = {leaf.device.type for leaf in inputs}
    device = devices.pop() if len(devices) == 1 else ""
    if device not in PLUGINS or "0" in switched_off(device):
        return None
    found = importlib.import_module(PLUGINS[device][1], __package__)
    return found if found.suits(inputs) else None


def of(name: str, options: Mapping[str, Any] | None) -> Callable[[GraphModule, list[Any]], Any]:
    """A backend for `torch.compile`.

    Args:
        name: one of `OURS`.
        options: inductor's configuration.
    """
    _inductor(options)  # an option that does not exist is an error now

    def purestep(graph: GraphModule, inputs: list[Any]) -> Any:
        traced, rounds = _traced(graph)
        if name != "inductor":
            return formats.settled(fx_passes.views_allowed(traced)).forward
        register_fallbacks(traced)
        on_cpu = all(leaf.device.type == "cpu" for leaf in inputs if isinstance(leaf, Tensor))
        return _inductor(chosen(options, on_cpu=on_cpu, rounds=rounds))(traced, inputs)

    return purestep


def chosen(options: Mapping[str, Any] | None, *, on_cpu: bool, rounds: bool) -> dict[str, Any]:
    """Inductor's configuration for a graph that goes through its front door.

    Args:
        options: the user's.
        on_cpu: torch draws, in the order of the program: the numbers of an eager step.
        rounds: `precision_casts.Casts` has seen a cast there and back.
    """
    own = {"fallback_random": True} if on_cpu else {}
    return aliasing.as_option(own | precision_casts.options(rounds) | dict(options or {}))


def register_fallbacks(graph: GraphModule) -> None:
    """Let inductor call torch's own kernel for each operator that it neither lowers nor decomposes.

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


def _traced(graph: GraphModule) -> tuple[GraphModule, bool]:
    """Dynamo's graph as operators, and whether it casts there and back."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    casts = precision_casts.Casts()
    modes = {id(leaf.fake_mode): leaf.fake_mode for leaf in inputs if isinstance(leaf, FakeTensor)}
    (mode,) = modes.values()
    with tracing.capturing(), torch.no_grad(), mode, casts, random_ops.AsInEager():
        traced: GraphModule = make_fx(graph, _allow_non_fake_inputs=True)(*inputs)
    return traced, casts.seen
