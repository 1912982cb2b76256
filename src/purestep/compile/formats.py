"""Corrections of memory formats: for some operators, the fake results in a trace have another layout than real ones.

`RESULTS` has rules for those operators (torch 2.13, on the CPU). A random tensor like such a result (dropout after
`roll`) would be filled in another order; `random_ops.AsInEager` applies the rules.

`fix_layouts` is for a graph whose operators run one by one (`backend="aot_eager"`). Two of them fail for some formats;
inductor generates its own code for both:

- `native_group_norm` rejects a tensor that is not contiguous in the format that its strides suggest. Eager mode copies
  it before the call. A trace omits that copy if the fake tensor is contiguous, but the strides of a fake tensor may
  differ from those of the real one (a sum of two images, in a batch of one).
- `native_batch_norm_backward` reads two contiguous tensors in the order of the first, even if the other one is
  contiguous in another format: its gradients are wrong. This needs a dimension of size one (channels last
  ``(4, 6, 2, 1)`` with strides ``(12, 1, 6, 1)``, which torch's `suggest_memory_format` does not recognize). The eager
  step calls this operator too, as does a training loop in plain torch, with the layouts of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

_aten: Any = torch.ops.aten


def fix_layouts(graph: GraphModule) -> GraphModule:
    """Convert the inputs of these operators at run time to the layouts that they need.

    Args:
        graph: changed.
    """
    for node in list(graph.graph.nodes):
        if node.target is _aten.native_group_norm.default:
            _replace(graph, node, 0, as_suggested, node.args[0])
        elif node.target is _aten.native_group_norm_backward.default:
            _replace(graph, node, 0, as_suggested, node.args[0], node.args[1])
            _replace(graph, node, 1, as_suggested, node.args[1])
        elif node.target is _aten.native_batch_norm_backward.default:
            _replace(graph, node, 0, as_other, node.args[0], node.args[1])
    graph.recompile()
    return graph


def as_suggested(value: Tensor, like: Tensor | None = None) -> Tensor:
    """Make a tensor contiguous in the format that its strides, or those of ``like``, suggest.

    Args:
        value: of any layout, ``(N, C, *)``; on another device than the CPU it is returned unchanged.
        like: of the same shape.

    Example:
        >>> as_suggested(torch.ones(1, 2, 4, 3).transpose(2, 3)).stride()
        (24, 12, 4, 1)
    """
    from torch import _prims_common  # no public name for the format that strides suggest

    if value.device.type != "cpu":
        return value
    return value.contiguous(memory_format=_prims_common.suggest_memory_format(value if like is None else like))


def as_other(value: Tensor, other: Tensor) -> Tensor:
    """Copy a tensor to the memory format of another one, unless both are certainly read in the same order.

    Args:
        value: of any layout, ``(N, C, *)``.
        other: of the same shape.

    Example:
        >>> turned = torch.ones(4, 2, 6).transpose(1, 2).unsqueeze(-1)
        >>> turned.stride(), as_other(turned, torch.ones(4, 6, 2, 1)).stride()
        ((12, 1, 6, 1), (12, 2, 1, 1))
    """
    if 1 not in value.shape or value.device.type != "cpu":  # the strides fit only one format
        return value
    if other.is_contiguous():
        return value.contiguous()
    return value.contiguous(memory_format=_channels_last(value))


def _channels_last(value: Tensor) -> Any:
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim(), torch.contiguous_format)


# --- strides of results -----------------------------------------------------------------------------------------------

_INEXACT = (
    *(_aten.native_batch_norm.default, _aten.log_sigmoid_forward.default),
    *(_aten.roll.default, _aten.channel_shuffle.default),
)
"""Operators whose fake results have other strides than the real ones for inputs of any shape (torch 2.13)."""


class Strides:
    """Corrects the strides of fake results: the real kernel runs on zeros and shows its own.

    A kernel runs once for equal arguments, and only for arguments whose fake results may be wrong: `_INEXACT`
    operators, and inputs with a dimension of size one, whose stride means nothing but makes torch choose one memory
    format or another. Contiguous inputs are certain.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[int, ...]] | None] = {}
        self.is_unsure = False
        """True after a result of unknown sizes whose strides differ from the real ones."""

    def correct(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Give the results of an operator the strides that its kernel returns, in place.

        Args:
            func: on the CPU.
            args: with fake tensors.
            kwargs: the same.
            made: the fake results.
        """
        if not isinstance(func, torch._ops.OpOverload) or not _is_uncertain(func, (args, kwargs)):
            return
        results = _tensors(made)
        taken = {id(leaf) for leaf in _tensors((args, kwargs))}
        if not results or any(id(leaf) in taken for leaf in results):
            return
        key = func, repr(tree_map_only(Tensor, _layout, (tuple(args), dict(kwargs))))
        if key not in self._known:
            self._known[key] = _real_strides(func, args, kwargs)
        real = self._known[key]
        if real is None or len(real) != len(results):
            return
        for result, strides in zip(results, real, strict=True):
            if not _is_known(result):
                self.is_unsure |= tuple(map(_hint, result.stride())) != strides
            elif result.stride() != strides:
                with torch._C._DisableTorchDispatch():
                    result.as_strided_(result.shape, strides)


def _is_uncertain(func: Any, given: Any) -> bool:
    """True if the fake results of this call may have other strides than the real ones."""
    changes = func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags
    if changes or func.namespace != "aten":
        return False
    tensors = _tensors(given)
    return bool(tensors) and (func in _INEXACT or any(map(_is_ambiguous, tensors)))


def _is_ambiguous(leaf: Tensor) -> bool:
    """True if a tensor has a dimension of size one and is not laid out as `torch.empty` does."""
    if leaf.dim() < 2 or leaf.layout is not torch.strided:
        return False
    expected, has_one = 1, False
    strides = leaf.stride()
    is_plain = True
    for size, stride in zip(reversed(leaf.shape), reversed(strides), strict=True):
        size, stride = _hint(size), _hint(stride)
        has_one |= size == 1
        is_plain &= stride == expected
        expected *= max(size, 1)
    return has_one and not is_plain


def _real_strides(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]] | None:
    """The strides of the results of the real kernel; None if it fails for zeros."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        try:
            real = tree_map_only(Tensor, _zeros, (tuple(args), dict(kwargs)))
            real = tree_map_only(torch.SymInt, _hint, real)
            return [leaf.stride() for leaf in _tensors(func(*real[0], **real[1]))]
        except Exception:  # a singular matrix, a sparse tensor, a size that depends on values
            return None


def _zeros(leaf: Tensor) -> Tensor:
    shape, strides = [_hint(size) for size in leaf.shape], [_hint(stride) for stride in leaf.stride()]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    return torch.zeros(extent, dtype=leaf.dtype).as_strided(shape, strides)


def _layout(leaf: Tensor) -> Any:
    return leaf.dtype, tuple(leaf.shape), leaf.stride()


def _is_known(leaf: Tensor) -> bool:
    return all(type(size) is int for size in (*leaf.shape, *leaf.stride()))


def _hint(size: Any) -> int:
    return size if type(size) is int else size.node.hint


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _replace(graph: GraphModule, node: Any, index: int, function: Any, *given: Any) -> None:
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(function, given)
    made.meta.update(given[0].meta)
    node.update_arg(index, made)
