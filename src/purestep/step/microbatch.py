"""Splitting of a batch into micro-batches.

Tensors and arrays are split by rows. The number of rows is that of the first tensor that lies in no list, else the
length of the first list. A list or tuple inside the batch with one entry for each row (names, the dicts of a detector's
labels, tensors of different sizes) is split by its entries; all else goes into every part. A list of as many tensors as
rows, all with that many rows, may be columns too, and is refused. A batch that is a list, and a list of tensors of
several dtypes or ranks, is a list of columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from .. import tree
from ..errors import DataError
from ..torch_ext import tensor_layout
from ..types import Batch

_CURE = "pass values that all parts share as context, by a closure of the objective, or as a buffer of the model"


def split(batch: Batch, count: int) -> Iterator[Batch]:
    """Split a batch into ``count`` parts of consecutive rows; the first parts are the longer ones, as in torch.

    Raises:
        DataError: there is nothing to split, numbers of rows differ, a list is ambiguous, or there are too few rows.
    """
    number, leaves, treedef = _by_rows(batch, count)
    if number < count:
        hint = "set drop_last=True in the loader if it is the last batch of an epoch, or use fewer microbatches"
        raise DataError(f"the batch has {number} rows, too few for {count} micro-batches", where="batch", hint=hint)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not tensor_layout.is_dense(leaf):
            raise DataError(
                f"the batch holds a {tensor_layout.layout_name(leaf)} tensor, which torch does not split into {count} "
                "micro-batches",
                where="batch",
                hint="call x.to_dense() or pad the tensor in the loader, or set microbatches=1",
            )
    bounds = [at * (number // count) + min(at, number % count) for at in range(count + 1)]
    for start, end in itertools.pairwise(bounds):
        yield tree.unflatten(treedef, [_part(leaf, number, start, end) for leaf in leaves])


def count_rows(batch: Batch, count: int = 1) -> int:
    """The number of rows that `split` can divide into ``count`` parts.

    Raises:
        DataError: there is nothing to split, numbers of rows differ, or a list is ambiguous.
    """
    return _by_rows(batch, count)[0]


def rows(batch: Batch, first: int, end: int) -> Batch:
    """The rows ``first`` to ``end`` of a batch, as `split` divides them.

    Raises:
        DataError: as `count_rows`.
    """
    number, leaves, treedef = _by_rows(batch, 1)
    return tree.unflatten(treedef, [_part(leaf, number, first, end) for leaf in leaves])


def repeated(batch: Batch, number: int) -> Batch:
    """A batch of ``number`` rows: those of the batch, again and again.

    Raises:
        DataError: as `count_rows`.
    """
    count, leaves, treedef = _by_rows(batch, 1)
    order = [at % count for at in range(number)]
    return tree.unflatten(treedef, [_taken(leaf, order, count) for leaf in leaves])


def _taken(leaf: Any, order: list[int], count: int) -> Any:
    if _has_rows(leaf):
        return leaf[order]
    return type(leaf)(leaf[at] for at in order) if _is_list(leaf, count) else leaf


def _part(leaf: Any, number: int, start: int, end: int) -> Any:
    return leaf[start:end] if _has_rows(leaf) or _is_list(leaf, number) else leaf


def _by_rows(batch: Batch, count: int) -> tuple[int, list[Any], tree.TreeDef]:
    """The number of rows, and the leaves and the structure of a batch whose lists with one entry for each row are
    leaves."""
    outer, _ = tree.flatten(batch, is_leaf=lambda node: node is not batch and _is_list(node))
    columns, lists = [leaf for leaf in outer if _has_rows(leaf)], [leaf for leaf in outer if _is_list(leaf)]
    if not columns and not lists:
        raise DataError(f"the batch holds no tensor to split into {count} parts", where="batch", hint=_CURE)
    number = _rows(columns[0]) if columns else len(next(filter(_sizes, lists), lists[0]))
    named = tree.with_paths(batch, is_leaf=lambda node: node is not batch and _is_list(node, number))
    listed = [leaf for _, leaf in named if _is_list(leaf, number)]
    for entries in [] if any(map(_are_records, listed)) else listed:
        sizes = _sizes(entries)
        if len(sizes) == 1 and (sizes[0] == number or not columns):
            raise DataError(
                f"the batch holds a list of {number} tensors of {sizes[0]} rows: one for each row, or columns",
                where="batch",
                hint="stack tensors of one size: torch.stack(x); name columns: {'a': x, 'b': y}; or make a list of "
                "one dict for each row",
            )
    found = {path: _rows(leaf) for path, leaf in named if _has_rows(leaf)}
    for path, size in found.items():
        if size != number:
            first = next(iter(found))
            others = f"{found[first]} rows in {first}" if found[first] != size else f"{number} entries in a list"
            raise DataError(
                f"{others} and {size} rows in {path}; {count} parts need equal numbers of rows",
                where="batch",
                hint=_CURE,
            )
    return number, *tree.flatten(batch, is_leaf=lambda node: node is not batch and _is_list(node, number))


def _is_list(node: Any, length: int | None = None) -> bool:
    """True for a list or tuple that may have one entry for each row: its tensors have one dtype and rank."""
    if type(node) not in (list, tuple) or (length is not None and len(node) != length):
        return False
    return len({(entry.dtype, entry.ndim) for entry in node if isinstance(entry, Tensor | np.ndarray)}) < 2


def _are_records(entries: Any) -> bool:
    """True for a list of mappings or objects with the same names, which is no list of columns."""
    structures = [
        tree.flatten(entry, is_leaf=lambda node, entry=entry: node is not entry)[1]
        for entry in entries
        if type(entry) not in (list, tuple, type(None))
    ]
    same = len(structures) == len(entries) and all(each == structures[0] for each in structures)
    return same and bool(structures) and not structures[0].is_leaf()


def _sizes(entries: Any) -> list[int]:
    """The distinct numbers of rows in a list. In a graph for all sizes these are symbols, which cannot be hashed."""
    found: list[int] = []
    for leaf in tree.leaves(entries):
        if _has_rows(leaf) and not any(_rows(leaf) == size for size in found):
            found.append(_rows(leaf))
    return found


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0


def _rows(leaf: Any) -> int:
    return leaf.size(0) if isinstance(leaf, Tensor) and leaf.is_nested else leaf.shape[0]
