"""Collectives as operators of their own, named by the axis of the open mesh.

Each waits before it returns, so that a graph may store its result anywhere: torch's functional collectives find pending
work by storage object, and wait for nothing where a compiler has put a result into other storage. The axis, unlike the
name of a process group, is the same text in every process and run: graphs and caches may contain it.

The argument ``after`` of an operator is not read: in a graph it is the collective before, so that all processes keep
one order (`compile.fx_passes.collectives_in_order`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, library

from . import mesh as meshes
from .processes import answered


def all_reduce(value: Tensor, axis: str, op: str = "sum") -> Tensor:
    """The sum ("sum") or largest value ("max") over the processes of an axis.

    Args:
        value: any shape; equal shapes in all processes.
        axis: "data", "shard", "tensor", "batch" or "world"; an axis of one process returns ``value``.
        op: "sum" or "max".
    """
    return value if _width(axis) == 1 else _all_reduce(value, op, axis)


def all_gather(value: Tensor, axis: str) -> Tensor:
    """The values of all processes of an axis, stacked along the first dimension: (n, ...) -> (W n, ...)."""
    width = _width(axis)
    return value if width == 1 else _all_gather(value, width, axis)


def reduce_scatter(value: Tensor, axis: str) -> Tensor:
    """This process's part of the sum over the processes of an axis: (W n, ...) -> (n, ...)."""
    width = _width(axis)
    return value if width == 1 else _reduce_scatter(value, width, axis)


def gathered(value: Tensor, axis: str) -> Tensor:
    """`all_gather` whose gradient is the sum of all processes' gradients: `scattered`."""
    return value if _width(axis) == 1 else _Gathered.apply(value, axis)  # pyright: ignore[reportReturnType]


def scattered(value: Tensor, axis: str) -> Tensor:
    """`reduce_scatter` whose gradient is gathered."""
    return value if _width(axis) == 1 else _Scattered.apply(value, axis)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor, axis: str) -> Tensor:
        return all_gather(value, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return scattered(grads[0], ctx.axis), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor, axis: str) -> Tensor:
        return reduce_scatter(value, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gathered(grads[0], ctx.axis), None


def _width(axis: str) -> int:
    groups = meshes.current()
    if groups is None:
        meshes.group(axis)  # raises
        return 1
    return groups.mesh.width(axis)


@library.custom_op("purestep::all_reduce", mutates_args=())
def _all_reduce(value: Tensor, op: str, axis: str, after: Tensor | None = None) -> Tensor:
    del after
    found = value.clone(memory_format=torch.contiguous_format)
    group, kind = meshes.group(axis), dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    with answered("all_reduce"):
        dist.all_reduce(found, kind, group=group)
    return found


@_all_reduce.register_fake
def _(value: Tensor, op: str, axis: str, after: Tensor | None = None) -> Tensor:
    del op, axis, after
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@library.custom_op("purestep::all_gather", mutates_args=())
def _all_gather(value: Tensor, width: int, axis: str, after: Tensor | None = None) -> Tensor:
    del after
    found = value.new_empty((value.shape[0] * width, *value.shape[1:]))
    group = meshes.group(axis)
    with answered("all_gather"):
        _torchs("all_gather_single", "all_gather_into_tensor")(found, value.contiguous(), group=group)
    return found


@_all_gather.register_fake
def _(value: Tensor, width: int, axis: str, after: Tensor | None = None) -> Tensor:
    del axis, after
    return value.new_empty((value.shape[0] * width, *value.shape[1:]))


@library.custom_op("purestep::reduce_scatter", mutates_args=())
def _reduce_scatter(value: Tensor, width: int, axis: str, after: Tensor | None = None) -> Tensor:
    del after
    found = value.new_empty((value.shape[0] // width, *value.shape[1:]))
    group = meshes.group(axis)
    with answered("reduce_scatter"):
        _torchs("reduce_scatter_single", "reduce_scatter_tensor")(found, value.contiguous(), group=group)
    return found


@_reduce_scatter.register_fake
def _(value: Tensor, width: int, axis: str, after: Tensor | None = None) -> Tensor:
    del axis, after
    return value.new_empty((value.shape[0] // width, *value.shape[1:]))


def keep_in_graphs() -> None:
    """Let torch.fx keep calls whose results this process does not read. Called when several processes start: it loads
    torch.fx."""
    from torch.fx.node import has_side_effect

    for name in ("all_reduce", "all_gather", "check_rows", "reduce_scatter"):
        has_side_effect(getattr(torch.ops.purestep, name).default)


def _torchs(new: str, old: str) -> Any:
    """A collective whose name torch 2.13 changed; it warns of the old one."""
    return getattr(dist, new, None) or getattr(dist, old)
