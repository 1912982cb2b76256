"""Whether a step rounds numbers by casts there and back, which inductor leaves out unless it is asked not to.

``x.bfloat16().float()`` simulates a low precision in a higher one. Inductor computes in float32 what is bfloat16
between two loads, so the two casts together do nothing. Its setting `emulate_precision_casts` keeps every cast, and
rounds the result of every low-precision operator that the trace has marked. It costs 10 to 40 % of a step in bfloat16
(a GPT, an MLP; on the CPU): it is set for graphs alone that cast down, and up again with nothing but elementwise
operators, views and copies between. In a mixed precision what is cast down goes into a product.

What stays different, by a unit in the last place: a sum of a bfloat16 tensor and a Python number, which eager mode
rounds to bfloat16 first, and inductor does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .control_flow import Mode

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

_LOW = {
    *(torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
"""Dtypes whose numbers inductor computes in float32."""

_NUMBER_BY_NUMBER = {
    *("clone", "_to_copy", "copy", "contiguous", "_unsafe_view", "repeat", "expand_copy", "view_copy", "permute_copy"),
    *("cat", "stack", "flip", "roll", "tril", "triu", "where", "masked_fill", "take", "gather", "scatter", "embedding"),
    *("index", "index_select", "index_put", "select_scatter", "slice_scatter", "select_backward", "slice_backward"),
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("upsample_nearest1d", "upsample_nearest2d", "pixel_shuffle", "pixel_unshuffle"),
    *("hardswish", "gelu", "glu", "prelu", "_prelu_kernel", "fill", "leaky_relu_backward", "hardswish_backward"),
    *("hardsigmoid_backward", "hardtanh_backward", "elu_backward", "softplus_backward", "mish_backward"),
    *("glu_backward", "softshrink_backward", "hardshrink_backward", "log_sigmoid_backward"),
}
"""Elementwise operators and copies without torch's tag for elementwise ones, in place or not."""

OPTION = "emulate_precision_casts"

_MARK = "low_precision_pointwise_barrier"
"""What a trace under `emulate_precision_casts` writes on nodes, and inductor rounds by, whatever is set by then."""


def options(rounds: bool) -> dict[str, Any]:
    """Inductor's configuration for a graph that does or does not."""
    return {OPTION: True} if rounds else {}


def unmark(graph: GraphModule) -> None:
    """Let inductor round where it likes to, in a graph that does not round."""
    for node in graph.graph.nodes:
        node.meta.pop(_MARK, None)


def marking(graph: GraphModule) -> Callable[..., Any]:
    """A function that runs a graph, whose trace has the marks of this graph: a trace marks by its own operators, which
    are parts of those of the step here."""
    from torch.fx import Interpreter
    from torch.fx.traceback import preserve_node_meta

    def run(*inputs: Any) -> Any:
        with preserve_node_meta():
            return Interpreter(graph).run(*inputs)

    return run if any(_MARK in node.meta for node in graph.graph.nodes) else graph


class Casts(Mode):
    """Sees the operators that run inside; ``seen`` says whether some value was cast down, and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self._rounded: dict[int, Any] = {}  # memory of what was cast down, or computed from such elementwise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_operator = isinstance(func, OpOverload)  # not one that takes functions
        if is_operator and not self.seen and isinstance(made, Tensor) and made.is_floating_point():
            self._look(func, list(_tensors(args)), made)
        return made

    def _look(self, func: Any, given: list[Tensor], made: Tensor) -> None:
        low = made.dtype in _LOW
        name = func._overloadpacket.__name__.removesuffix("_")
        if torch.Tag.pointwise not in func.tags and name not in _NUMBER_BY_NUMBER:
            return  # views share the memory of what they show
        if any(self._is_rounded(leaf) and (not low or leaf.dtype != made.dtype) for leaf in given):
            self.seen = True
        is_cast = low and any(leaf.is_floating_point() and _digits(leaf) > _digits(made) for leaf in given)
        if low and (is_cast or any(map(self._is_rounded, given))):
            memory: Any = made.untyped_storage()
            self._rounded[memory._cdata] = memory

    def _is_rounded(self, value: Tensor) -> bool:
        memory: Any = value.untyped_storage() if value.layout is torch.strided else None
        return memory is not None and memory._cdata in self._rounded


def _digits(value: Tensor) -> float:
    return -torch.finfo(value.dtype).eps


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
