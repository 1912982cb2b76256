"""Tensors that are no block of numbers: sparse, nested and quantized ones, by name and in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def is_dense(leaf: Tensor) -> bool:
    """Whether a tensor is one block of numbers: neither sparse nor nested nor quantized."""
    return leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)


def layout_name(leaf: Tensor) -> str:
    """What a tensor is that is not dense, in a word; "" for a dense one.

    Example:
        >>> layout_name(torch.eye(2).to_sparse()), layout_name(torch.eye(2))
        ('sparse_coo', '')
    """
    if leaf.is_nested:
        return "nested"
    return "quantized" if leaf.is_quantized else "" if leaf.layout is torch.strided else str(leaf.layout)[6:]


def dense_parts(leaf: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a sparse or nested tensor consists of; a dense one itself.

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


def nbytes(leaves: Iterable[Any]) -> int:
    """How much memory tensors take, sparse and nested ones by what is in them; what is no tensor takes none.

    Example:
        >>> nbytes([torch.ones(2, 3), "text"])
        24
    """
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum(part.nbytes for leaf in found for part in ((leaf,) if is_dense(leaf) else dense_parts(leaf)))
