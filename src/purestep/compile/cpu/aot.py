"""Compilation of a lowered graph to a library, by AOTInductor; its threads and its own C++.

Private names: ``torch._inductor.virtualized``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import backends, inductor_fixes, lower
from . import cpp_library

if TYPE_CHECKING:
    from torch.fx import GraphModule


def build(graph: GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any], library: str) -> None:
    """Compile a graph to a library.

    Args:
        graph: may write its inputs; not changed.
        inputs: examples of its inputs, followed by its `lower.constants`.
        options: inductor's configuration.
        library: the path, in a directory for the files of the compilation.

    Raises:
        NotLowered: see there.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V

    own = {name: value for name, value in options.items() if name != inductor_fixes.PASS}  # which runs in ours
    header = cpp_library.options(library) if may_be_fast(graph) else {}
    with (
        lower.functional(graph, inputs, {**options, "aot_inductor.output_path": library}) as given,
        config.patch({**_by_size(_work(graph)), **header, **own}),
        V.set_aot_compilation(True),
    ):
        lower.compiled(given, cpp_wrapper=True)  # writes the library


def may_be_fast(graph: GraphModule) -> bool:
    """True if the code may use the header of `cpp_library`: without a user's operators, which might keep a tensor."""
    spaces = {getattr(node.target, "namespace", "aten") for node in graph.graph.nodes if node.op == "call_function"}
    return spaces <= {"aten", "prims", "purestep"} and "fast" not in backends.switched_off("cpu")


# --- threads ----------------------------------------------------------------------------------------------------------

_SINGLE_THREAD = 6e7
"""Operations below which a step is faster on one thread: waking another one takes longer than half of the work."""

_SLOW_WRAPPER = 1e9
"""Operations above which the code between kernels may be slow: it takes microseconds of a step of milliseconds."""


def _by_size(work: float) -> dict[str, Any]:
    """Inductor's configuration that depends on the number of operations."""
    if work < _SINGLE_THREAD:
        return {"cpp.threads": 1}
    # Saves a second of g++; kernels are still optimized.
    return {"aot_inductor.compile_wrapper_opt_level": "O0"} if work > _SLOW_WRAPPER else {}


def threads(graph: GraphModule) -> int:
    """The maximal number of threads for the code; 0 means no limit."""
    if _work(graph) < _SINGLE_THREAD:  # compiled for one thread
        return 0 if _uses_onednn(graph) else 1
    return torch.get_num_threads()


def _work(graph: GraphModule) -> float:
    """Estimate the operations of one call: of matrix products and convolutions, and four for each other element."""
    from torch.fx.node import map_arg
    from torch.utils.flop_counter import flop_registry

    total = 0.0
    for node in graph.graph.nodes:
        made = node.meta.get("val") if node.op == "call_function" else None
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is None:
            results = made if isinstance(made, list | tuple) else [made]
            total += sum(4 * leaf.numel() for leaf in results if isinstance(leaf, Tensor))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
            total += count(*args, **kwargs, out_val=made)
    return total


def _uses_onednn(graph: GraphModule) -> bool:
    """True if products use oneDNN, which empties its cache of kernels when the number of threads changes."""
    made = [node.meta.get("val") for node in graph.graph.nodes]
    half = any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in made)
    return half or any("convolution" in str(node.target) for node in graph.graph.nodes)
