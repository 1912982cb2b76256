"""Memory formats in a trace: the strides of fake tensors, and an operator whose kernel needs one format.

A fake tensor may have other strides than the real one, if an operator's inputs are not contiguous (`roll`,
`native_batch_norm`, a dozen others), or only the stride of a dimension of size one differs. That stride means nothing,
but torch chooses memory formats by it. Two things depend on strides: the order of a random tensor that is filled like
another one (dropout after `roll`), and the copies in torch's composite functions (`group_norm`). `Strides` corrects
them (torch 2.13, on the CPU).

`fix_layouts` is for a graph whose operators run one by one (`backend="aot_eager"`). `native_batch_norm_backward` reads
two contiguous tensors in the order of the first, even if the other one is contiguous in another format: its gradients
are wrong. This needs a dimension of size one (channels last ``(4, 6, 2, 1)`` with strides ``(12, 1, 6, 1)``, which
torch's `suggest_memory_format` does not recognize). Inductor generates its own code. The eager step calls this operator
too, as does a training loop in plain torch, with the layouts of the model.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..torch_ext import extent

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

_aten: Any = torch.ops.aten


# --- batch norm -------------------------------------------------------------------------------------------------------


def fix_layouts(graph: GraphModule) -> GraphModule:
    """Convert an input of `native_batch_norm_backward` at run time to the layout of the other one.

    Args:
        graph: changed.
    """
    for node in list(graph.graph.nodes):
        if node.target is _aten.native_batch_norm_backward.default:
            with graph.graph.inserting_before(node):
                made = graph.graph.call_function(as_other, node.args[:2])
            made.meta.update(node.args[0].meta)
            node.update_arg(0, made)
    graph.recompile()
    return graph


def as_other(value: Tensor, other: Tensor) -> Tensor:
    """Copy a tensor to the memory format of another one, unless both are certainly read in the same order.

    Args:
        value: of any layout, ``(N, C, *)``; on another device than the CPU it is returned unchanged.
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


# --- strides of fake results ------------------------------------------------------------------------------------------


class Strides:
    """Gives fake results the strides of real ones: the real kernel runs on zeros.

    It runs once for equal arguments, and only if an input is not laid out as `torch.empty` does. The fake strides of
    matrix products, convolutions and attention, which take long, are right except for dimensions of size one.
    """

    def __init__(self) -> None:
        self._real: dict[Any, list[tuple[int, ...] | None]] = {}

    def correct(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Correct the strides of results in place.

        Args:
            func: the operator.
            args: its arguments, with fake tensors.
            kwargs: the same.
            made: its fake results.
        """
        given, results = _tensors((args, kwargs)), _tensors(made)
        if not _is_uncertain(func, given) or not {id(leaf) for leaf in results}.isdisjoint(map(id, given)):
            return
        key = func, repr(tree_map_only(Tensor, _layout, (tuple(args), dict(kwargs))))
        if key not in self._real:
            self._real[key] = _real_strides(func, args, kwargs)
        for result, strides in zip(tree_leaves(made), self._real[key], strict=False):
            if strides is not None and isinstance(result, Tensor) and _hints(result.stride()) != strides:
                _set_strides(result, strides)


def _is_uncertain(func: Any, given: Sequence[Tensor]) -> bool:
    """True if the fake results may have other strides than the real ones."""
    if getattr(func, "namespace", "") != "aten" or func._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags or any(leaf.device.type != "cpu" for leaf in given):
        return False
    # Integers may be opaque: oneDNN's backward pass of an LSTM crashes on a workspace of zeros.
    if any(not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool) for leaf in given):
        return False
    others = [leaf for leaf in given if _hints(leaf.stride()) != _contiguous_strides(_hints(leaf.shape))]
    if not _is_product(func):
        return bool(others)
    return any(1 in _hints(leaf.shape) for leaf in others)


@functools.cache
def _is_product(func: Any) -> bool:
    from torch.utils.flop_counter import flop_registry

    return func.overloadpacket in flop_registry


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    rows = (max(size, 1) for size in reversed(shape[1:]))
    return tuple(reversed(list(itertools.accumulate(rows, operator.mul, initial=1)))) if shape else ()


def _real_strides(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...] | None]:
    """The strides of the real kernel's results, None for one that is no tensor; empty if it fails on zeros."""
    modes: Any = importlib.import_module("torch.utils._python_dispatch")
    with modes._disable_current_modes():
        try:
            real_args, real_kwargs = tree_map_only((Tensor, torch.SymInt), _real, (tuple(args), dict(kwargs)))
            made = func(*real_args, **real_kwargs)
            return [leaf.stride() if isinstance(leaf, Tensor) else None for leaf in tree_leaves(made)]
        except Exception:  # a singular matrix, a sparse tensor, a size that depends on values
            return []


def _real(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return _hints([value])[0]
    like = torch.empty_strided(_hints(value.shape), _hints(value.stride()), dtype=value.dtype, device="meta")
    return torch.zeros(extent(like), dtype=like.dtype).as_strided(like.shape, like.stride())


def _set_strides(result: Tensor, strides: tuple[int, ...]) -> None:
    if any(isinstance(size, torch.SymInt) for size in result.shape):
        wanted, strides = strides, _dense_strides(result.shape, strides)
        if _hints(strides) != wanted:  # a view with gaps
            return
    core: Any = importlib.import_module("torch._C")
    with core._DisableTorchDispatch():  # changes the fake tensor itself, unseen by the trace
        result.as_strided_(result.shape, strides)


def _dense_strides(shape: Sequence[Any], like: Sequence[int]) -> tuple[Any, ...]:
    """Strides without gaps for symbolic sizes, with the dimensions in the order of example strides."""
    hints, strides, stride = _hints(shape), [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], hints[dim])):
        strides[dim] = stride
        stride = stride * shape[dim]
    return tuple(strides)


def _hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Sizes as numbers: symbolic ones as in the example that is traced, those that depend on values as 2."""
    hints = (size if type(size) is int else size.node.hint for size in sizes)
    return tuple(2 if hint is None else int(hint) for hint in hints)


def _layout(leaf: Tensor) -> Any:
    return leaf.dtype, tuple(leaf.shape), leaf.stride()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
