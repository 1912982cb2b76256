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

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

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


def is_contiguous(value: Tensor) -> bool:
    """True if a tensor is contiguous in any memory format.

    Args:
        value: of any layout, ``(N, C, *)``.

    Example:
        >>> is_contiguous(torch.ones(2, 3, 4, 5).permute(0, 3, 1, 2)), is_contiguous(torch.ones(2, 3, 4).mT)
        (True, False)
    """
    return value.is_contiguous() or value.is_contiguous(memory_format=_channels_last(value))


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


# --- results ----------------------------------------------------------------------------------------------------------


def _normalized(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first result is contiguous in some format; the fake one has the input's layout."""
    made, *statistics = func(*args, **kwargs)
    return made if is_contiguous(args[0]) else as_suggested(made, args[0]), *statistics


def _rows_first(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results are contiguous; the fake ones have the input's layout."""
    return tree_map_only(Tensor, Tensor.contiguous, func(*args, **kwargs))


def _in_its_format(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result has the input's memory format; the fake one is contiguous."""
    return as_suggested(func(*args, **kwargs), args[0])


RESULTS: dict[Any, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    _aten.native_batch_norm.default: _normalized,
    _aten.log_sigmoid_forward.default: _rows_first,
    **dict.fromkeys((_aten.roll.default, _aten.channel_shuffle.default), _in_its_format),
}
"""Operator -> ``(operator, args, kwargs) -> results`` with the layouts that the CPU kernels return."""


def _replace(graph: GraphModule, node: Any, index: int, function: Any, *given: Any) -> None:
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(function, given)
    made.meta.update(given[0].meta)
    node.update_arg(index, made)
