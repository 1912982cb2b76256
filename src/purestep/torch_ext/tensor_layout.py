"""How a tensor lies in memory: dense, sparse, nested or quantized, and how much memory it takes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def is_dense(leaf: Tensor) -> bool:
    """True if a tensor is neither sparse nor nested nor quantized."""
    return leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)


def layout_name(leaf: Tensor) -> str:
    """The layout of a tensor that is not dense, in one word; "" for a dense tensor.

    Example:
        >>> layout_name(torch.eye(2).to_sparse()), layout_name(torch.eye(2))
        ('sparse_coo', '')
    """
    if leaf.is_nested:
        return "nested"
    return "quantized" if leaf.is_quantized else "" if leaf.layout is torch.strided else str(leaf.layout)[6:]


def dense_parts(leaf: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that make up a sparse or nested tensor; a dense tensor is its only part.

    Example:
        >>> [part.tolist() for part in dense_parts(torch.eye(2).to_sparse())]
        [[[0, 1], [0, 1]], [1.0, 1.0]]
    """
    leaf = leaf.detach()
    if leaf.is_nested:
        jagged: Any = leaf
        return (jagged.values(), jagged.offsets()) if leaf.layout is torch.jagged else leaf.unbind()
    if leaf.layout is torch.sparse_coo:
        whole = leaf.coalesce()
        return whole.indices(), whole.values()
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return leaf.crow_indices(), leaf.col_indices(), leaf.values()
    if leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        return leaf.ccol_indices(), leaf.row_indices(), leaf.values()
    return (leaf,)


def as_bytes(leaf: Tensor) -> Tensor:
    """The bytes of a dense tensor in C order, shape=(nbytes,), dtype=uint8, on its device. They may share its memory.

    Example:
        >>> as_bytes(torch.tensor([[1, 256]], dtype=torch.int16))
        tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    flat = leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


_DTYPE = re.compile("(torch[.])?((bool|uint|int|float|bfloat|complex)[0-9a-z_]*)")


def from_bytes(data: Tensor, dtype: str, shape: Iterable[int]) -> Tensor:
    """The inverse of `as_bytes`, for bytes that may come from a file of somebody else. Shares the memory of ``data``.

    Example:
        >>> from_bytes(torch.tensor([1, 0, 0, 1], dtype=torch.uint8), "int16", [2])
        tensor([  1, 256], dtype=torch.int16)

    Raises:
        ValueError: there is no such dtype, the bytes do not fit the shape, or are not those of True and False.
    """
    name, sizes = _DTYPE.fullmatch(dtype), list(shape)
    kind = getattr(torch, name[2], None) if name else None
    if not isinstance(kind, torch.dtype) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a tensor of dtype {dtype!r} and shape {sizes}")
    if kind is torch.bool and data.numel() and int(data.max()) > 1:
        raise ValueError("bytes of a bool tensor that are neither 0 nor 1")
    try:
        return data.view(kind).view(sizes)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"{data.numel()} bytes for a tensor of {dtype} {sizes}") from error


def extent(leaf: Tensor) -> int:
    """The number of memory elements from a tensor's first element to its last, both included.

    Example:
        >>> extent(torch.ones(2, 6)), extent(torch.ones(2, 6)[:, ::2]), extent(torch.ones(0, 6))
        (12, 11, 0)
    """
    if not leaf.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))


def overlaps(leaf: Tensor) -> bool:
    """True if two indices of a tensor share an address, as after `expand`: in-place writes raise for such a tensor.

    Example:
        >>> overlaps(torch.ones(1, 2).expand(3, 2)), overlaps(torch.ones(3, 2).t())
        (True, False)
    """
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1 and stride < extent:
            return leaf.numel() > 0
        extent += stride * (size - 1)
    return False


def layout_guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """A function ``same(*others) -> bool`` that compares other tensors with these. It keeps no reference to them.

    Example:
        >>> same = layout_guard([torch.ones(2)])
        >>> same(torch.zeros(2)), same(torch.zeros(3)), layout_guard([2.0])(2.0)
        (True, False, False)

    It returns True if each pair has the same type, dtype, device, shape, strides and ``requires_grad``. It calls
    Dynamo's guards, which take 0.1 us for each tensor. Always False if a leaf is not a plain dense tensor.
    """
    if not all(type(leaf) in (Tensor, Parameter) and is_dense(leaf) for leaf in tensors):
        return lambda *_: False
    guards: Any = importlib.import_module("torch._C._dynamo.guards")
    sizes = [list(leaf.shape) for leaf in tensors]
    strides = [list(leaf.stride()) for leaf in tensors]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
