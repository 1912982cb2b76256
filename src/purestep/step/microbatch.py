"""Splitting of a batch into micro-batches.

Tensors and arrays are split by rows; a list or tuple inside the batch with one entry for each row (names, the dicts of
a detector's labels, tensors of different sizes) by its entries; all else goes into every part. A list whose tensors all
have as many rows as the list has entries may be columns too, and is refused. A batch that is a list is a list of
columns, unless it holds dicts whose tensors differ in rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from .. import tree
from ..errors import DataError
from ..torch_ext import tensor_layout
from ..types import Batch


class Words(NamedTuple):
    """Texts of messages; ``{}`` stands for the number of parts."""

    divide: str  # to divide a batch into parts
    parts: str
    empty_cure: str  # of a batch without rows
    uneven_cure: str  # of tensors with different numbers of rows


MICRO = Words(
    "split into {} micro-batches",
    "{} micro-batches",
    "set microbatches=1",
    "pass values that must not be split as context, or set microbatches=1",
)


def split(batch: Batch, count: int) -> Iterator[Batch]:
    """Split a batch into ``count`` parts of consecutive rows; the first parts are the longer ones, as in torch.

    Raises:
        DataError: there is nothing to split, numbers of rows differ, a list is ambiguous, or there are too few rows.
    """
    number, listed = _rows_and_lists(batch, count, MICRO)
    if number < count:
        hint = "set drop_last=True in the loader if it is the last batch of an epoch, or use fewer microbatches"
        raise DataError(f"the batch has {number} rows, too few for {count} micro-batches", where="batch", hint=hint)
    bounds = [at * (number // count) + min(at, number % count) for at in range(count + 1)]
    leaves, treedef = tree.flatten(batch, is_leaf=lambda node: id(node) in listed)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not tensor_layout.is_dense(leaf):
            raise DataError(
                f"the batch holds a {tensor_layout.layout_name(leaf)} tensor, which torch does not split into {count} "
                "micro-batches",
                where="batch",
                hint="call x.to_dense() or pad the tensor in the loader, or set microbatches=1",
            )
    for start, end in itertools.pairwise(bounds):
        yield tree.unflatten(treedef, [_part(leaf, start, end, listed) for leaf in leaves])


def count_rows(batch: Batch, count: int = 1, words: Words = MICRO) -> int:
    """The number of rows that `split` can divide.

    Args:
        batch: of the rows.
        count: number of parts, for messages.
        words: of the parts, for messages.

    Raises:
        DataError: there is nothing to split, numbers of rows differ, or a list is ambiguous.
    """
    return _rows_and_lists(batch, count, words)[0]


def rows(batch: Batch, first: int, end: int) -> Batch:
    """The rows ``first`` to ``end`` of a batch, as `split` divides them.

    Raises:
        DataError: as `count_rows`.
    """
    _, listed = _rows_and_lists(batch, 1, MICRO)
    leaves, treedef = tree.flatten(batch, is_leaf=lambda node: id(node) in listed)
    return tree.unflatten(treedef, [_part(leaf, first, end, listed) for leaf in leaves])


def _part(leaf: Any, start: int, end: int, listed: Mapping[int, Any]) -> Any:
    return leaf[start:end] if id(leaf) in listed or _has_rows(leaf) else leaf


def _rows_and_lists(batch: Batch, count: int, words: Words) -> tuple[int, dict[int, Any]]:
    """The number of rows, and the lists with one entry for each row, by id."""
    lists = list(_lists(batch, is_batch=True))
    inside = {id(leaf) for node in lists for leaf in tree.leaves(node)}
    columns = [leaf for leaf in tree.leaves(batch) if _has_rows(leaf) and id(leaf) not in inside]
    examples = [node for node in lists if _are_named(node)]
    if columns:
        number = _rows(columns[0])
    elif lists:
        number = len((examples or [node for node in lists if _sizes(node)] or lists)[0])
    else:
        what = f"the batch holds no tensor to {words.divide.format(count)}"
        raise DataError(what, where="batch", hint=words.empty_cure)
    listed = {id(node): node for node in _of_length(lists, number)}
    if not any(len(node) == number for node in examples):  # which no columns can be
        for node in listed.values():
            sizes = _sizes(node)
            if len(sizes) == 1 and (sizes[0] == number or not columns):
                raise DataError(
                    f"the batch holds a list of {number} tensors of {sizes[0]} rows: one for each row, or columns",
                    where="batch",
                    hint="stack tensors of one size: torch.stack(x); name columns: {'a': x, 'b': y}; or make a list of "
                    "one dict for each row",
                )
    named = tree.with_paths(batch, is_leaf=lambda node: id(node) in listed)
    found = {path: _rows(leaf) for path, leaf in named if _has_rows(leaf)}
    for path, size in found.items():
        if size != number:
            first = next(iter(found))
            others = f"{found[first]} rows in {first}" if found[first] != size else f"{number} entries in a list"
            raise DataError(
                f"{others} and {size} rows in {path}; {words.parts.format(count)} need equal numbers of rows",
                where="batch",
                hint=words.uneven_cure,
            )
    return number, listed


def _lists(node: Any, *, is_batch: bool = False) -> Iterator[Any]:
    """The outermost lists and tuples in a batch that may have one entry for each row: their tensors are of one kind."""
    if type(node) in (list, tuple):
        kinds = {(entry.dtype, entry.ndim) for entry in node if _is_array(entry)}
        if len(_sizes(node)) > 1 and _are_named(node) if is_batch else len(kinds) < 2:
            yield node
            return
    for child in _children(node):
        yield from _lists(child)


def _of_length(lists: Iterable[Any], number: int) -> Iterator[Any]:
    for node in lists:
        if len(node) == number:
            yield node
        else:
            yield from _of_length((found for entry in node for found in _lists(entry)), number)


def _are_named(entries: Any) -> bool:
    """True if all entries have children with the same names, as examples have."""
    names = [_names(entry) for entry in entries]
    return bool(names) and names[0] is not None and all(name == names[0] for name in names)


def _names(node: Any) -> list[Any] | None:
    if isinstance(node, Mapping):
        return sorted(cast("Mapping[Any, Any]", node), key=str)
    fields = getattr(type(node), "_fields", None)  # of a NamedTuple
    return fields if fields is not None else list(tree.attributes(node) or ()) or None


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return cast("Mapping[Any, Any]", node).values()
    return node if isinstance(node, list | tuple) else (tree.attributes(node) or {}).values()


def _sizes(entries: Any) -> list[int]:
    """The distinct numbers of rows in a list. In a graph for all sizes these are symbols, which cannot be hashed."""
    found: list[int] = []
    for leaf in tree.leaves(entries):
        if _has_rows(leaf) and not any(_rows(leaf) == size for size in found):
            found.append(_rows(leaf))
    return found


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray)


def _has_rows(leaf: Any) -> bool:
    return _is_array(leaf) and leaf.ndim > 0


def _rows(leaf: Any) -> int:
    return leaf.size(0) if isinstance(leaf, Tensor) and leaf.is_nested else leaf.shape[0]
