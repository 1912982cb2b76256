"""What Dynamo gives a captured graph to: inductor's front door, or the graph itself, after a trace of purestep's own.

A trace below autograd shows what inductor's own would not: draws in eager mode's layout (`draws.py`), which functional
form loses, and casts there and back (`rounding.py`). Other backends are given Dynamo's graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import rng
from . import draws, formats, passes, rounding, sources

if TYPE_CHECKING:
    from torch.fx import GraphModule

OURS = ("inductor", "aot_eager", "eager")
"""Backends by name that a trace has, too."""


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
            return formats.settled(passes.views_allowed(traced)).forward
        on_cpu = all(leaf.device.type == "cpu" for leaf in inputs if isinstance(leaf, Tensor))
        return _inductor(chosen(options, on_cpu=on_cpu, rounds=rounds))(traced, inputs)

    return purestep


def chosen(options: Mapping[str, Any] | None, *, on_cpu: bool, rounds: bool) -> dict[str, Any]:
    """Inductor's configuration for a graph that goes through its front door.

    Args:
        options: the user's.
        on_cpu: torch draws, in the order of the program: the numbers of an eager step.
        rounds: `rounding.Casts` has seen a cast there and back.
    """
    own = {"fallback_random": True} if on_cpu else {}
    return sources.as_option(own | rounding.options(rounds) | dict(options or {}))


def _inductor(options: Mapping[str, Any] | None) -> Any:
    torch_: Any = torch
    return torch_._TorchCompileInductorWrapper(None, dict(options or {}), None)


def _traced(graph: GraphModule) -> tuple[GraphModule, bool]:
    """Dynamo's graph as operators, and whether it casts there and back."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    casts = rounding.Casts()
    modes = {id(leaf.fake_mode): leaf.fake_mode for leaf in inputs if isinstance(leaf, FakeTensor)}
    (mode,) = modes.values()
    with rng.capturing(), torch.no_grad(), mode, casts, draws.AsInEager():
        traced: GraphModule = make_fx(graph, _allow_non_fake_inputs=True)(*inputs)
    return traced, casts.seen
