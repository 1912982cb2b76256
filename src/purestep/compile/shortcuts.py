"""Work that inductor does for nothing while it writes C++, left out; what it writes stays the same to the letter."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch

if TYPE_CHECKING:
    from torch.fx import GraphModule


@contextmanager
def while_loading() -> Generator[None]:
    """Inductor, loaded inside, does not compile its twenty templates of kernels for GPUs before it needs one."""
    with _patched(_templates_late):
        yield


@contextmanager
def taken() -> Generator[None]:
    """Whatever inductor compiles inside takes them. Under `alone`: this patches inductor."""
    with _patched(_rules_once, _strides_read_off, _no_empty_tails):
        yield


@contextmanager
def patterns_for(graph: GraphModule) -> Generator[None]:
    """Inductor looks for no attention in a graph without batched products. Under `alone`: this patches inductor."""
    with _patched(*(() if _has_batched_products(graph) else (_no_attention,))):
        yield


def _has_batched_products(graph: GraphModule) -> bool:
    graphs = (module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
    return any(node.target is torch.ops.aten.bmm.default for each in graphs for node in each.nodes)


@contextmanager
def _patched(*patches: Callable[[], Any]) -> Generator[None]:
    with ExitStack() as stack:
        for patch in patches:
            with suppress(Exception):  # another torch: it takes longer
                stack.enter_context(patch())
        yield


def _templates_late() -> Any:
    common: Any = importlib.import_module("torch._inductor.codegen.common")
    kind = common.KernelTemplate
    late = functools.partial(_Late, kind._template_from_string)
    return mock.patch.object(kind, "_template_from_string", staticmethod(late))


class _Late:
    """A template that is compiled when something is asked of it."""

    def __init__(self, make: Callable[[str], Any], source: str) -> None:
        self._make = functools.cache(functools.partial(make, source))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


def _no_attention() -> Any:
    """Some hundred patterns of attention, each with a ``bmm``, are neither loaded nor tried on every product."""
    from torch._inductor.fx_passes import joint_graph

    return mock.patch.object(joint_graph, "lazy_init", _other_patterns())


@functools.cache
def _other_patterns() -> Any:
    """What makes the other patterns, once; those of attention are added where a later graph asks for all."""
    from torch._inductor import pattern_matcher
    from torch._inductor.fx_passes import fuse_attention, joint_graph

    matcher, true = cast(Any, pattern_matcher), inspect.unwrap(cast(Any, joint_graph.lazy_init))

    def lazy_init(input_device: Any = None) -> None:
        with mock.patch.object(fuse_attention, "_sfdp_init"):
            true(input_device)

    return matcher.init_once_fakemode(lazy_init)


def _rules_once() -> Any:
    """One object has all rules for dtypes; inductor writes them into it anew for every operation of every loop."""
    from torch._inductor import dtype_propagation

    kind: Any = dtype_propagation.DtypePropagationOpsHandler
    true, made = kind.__init__, list[Any]()

    def init(self: Any) -> None:  # at the first operation: by then everything that adds rules is loaded
        if self not in made:
            true(self)
            made.append(self)

    return mock.patch.object(kind, "__init__", init)


def _strides_read_off() -> Any:
    """The stride of ``a*x + b*y + c`` along x is a: sympy's `simplify` takes milliseconds to say so."""
    from torch._inductor.codegen import cpp

    module: Any = cpp
    return mock.patch.object(module, "stride_at_vec_range", functools.partial(_stride, module.stride_at_vec_range))


def _stride(otherwise: Callable[..., Any], index: Any, var: Any, vec_length: Any = None) -> Any:
    sympy: Any = importlib.import_module("sympy")  # has no types
    found = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        factor, rest = term.as_coeff_Mul()
        if not (rest.is_Symbol or rest is sympy.S.One) or not factor.is_Integer:
            return otherwise(index, var, vec_length)
        if rest == var:
            found = factor
    return found


def _no_empty_tails() -> Any:
    """What a loop's last, narrower turn would be is written for every loop, and thrown away where there is none."""
    from torch._inductor import scheduler

    true: Any = scheduler.SchedulerNode.codegen

    def codegen(node: Any, *arguments: Any) -> Any:
        from torch._inductor.virtualized import V

        return None if _is_empty(V.kernel) else true(node, *arguments)

    return mock.patch.object(scheduler.SchedulerNode, "codegen", codegen)


def _is_empty(kernel: Any) -> bool:
    """Whether nothing of a kernel is used."""
    if not hasattr(kernel, "outer_tail_size"):
        return getattr(kernel, "tail_size", None) == 0
    # Tiles of two loops. The tail of both ends sums of the outer one's, whether or not the inner loop has a tail.
    outer, inner = kernel.outer_tail_size, kernel.inner_tail_size
    return outer == 0 or (outer is None and inner == 0)
