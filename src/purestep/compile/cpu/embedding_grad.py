"""The gradient of an embedding, sums of rows by index, in one order whatever the number of threads.

Buys: inductor adds such rows by atomic additions in all threads, so the last bit of a sum depends on their timing, and
runs are not reproducible bit for bit. Here each thread adds some columns of all rows.

Private names: those of `cpp_kernel`. Without: atomic additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, library

from . import cpp_kernel, csrc

_SOURCE = csrc.text("embedding_grad.cpp")


def _layout(rows: Any, index: Any, height: int, version: int) -> tuple[Any, Any]:
    return [height, rows[1]], [rows[1], 1]


def _plan(rows: Any, index: Any, made: Any) -> list[Any]:
    return [*rows[0], *rows[1], *index[1], made[0][0]]


KERNEL = cpp_kernel.Kernel("rows_added", _SOURCE, _layout, _plan)


@library.custom_op(
    "purestep::rows_added", mutates_args=(), schema="(Tensor rows, Tensor index, int height, int version) -> Tensor"
)
def rows_added(rows: Tensor, index: Tensor, height: int, version: int) -> Tensor:
    """Sum the rows with the same index; shape ``(height, columns)``.

    Args:
        rows: shape ``(count, columns)``, float32, any strides: inductor chooses them.
        index: shape ``(count,)``, int64; rows with an index outside of ``range(height)`` are ignored.
        height: number of sums.
        version: of the kernel.
    """
    inside = (index >= 0) & (index < height)
    return rows.new_zeros(height, rows.shape[1]).index_add(0, index[inside], rows[inside])


@rows_added.register_fake
def _(rows: Tensor, index: Tensor, height: int, version: int) -> Tensor:
    return rows.new_empty(height, rows.shape[1])


def register() -> None:
    """Register the kernel's lowering, if the graph being compiled can call it."""
    if cpp_kernel.possible():
        cpp_kernel.register(KERNEL)


def decompositions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the table of decompositions with an embedding's gradient as `rows_added`."""
    if not cpp_kernel.possible():
        return dict(table)
    operator: Any = torch.ops.aten.embedding_dense_backward.default
    otherwise = table[operator]

    def gradient(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
        sizes = (*grad.shape, num_weights)
        if scale_grad_by_freq or grad.dtype != torch.float32 or not all(type(size) is int and size for size in sizes):
            return otherwise(grad, indices, num_weights, padding_idx, scale_grad_by_freq)
        index = indices.reshape(-1).to(torch.int64)
        if padding_idx >= 0:
            index = torch.where(index == padding_idx, -1, index)
        rows = grad.reshape(-1, grad.shape[-1])
        return torch.ops.purestep.rows_added(rows, index, num_weights, KERNEL.version)

    return dict(table) | {operator: gradient}
