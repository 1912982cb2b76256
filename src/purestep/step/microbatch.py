"""Splitting of a batch into micro-batches: rows of tensors and arrays, entries of lists with one for each example."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from .. import batch_objects, tree
from ..errors import DataError
from ..torch_ext import tensor_layout
from ..types import Batch


def split(batch: Batch, count: int) -> Iterator[Batch]:
    """Split a batch into ``count`` parts of consecutive examples; the first parts are the longer ones, as in torch.

    Columns are split along their leading dimension. A list or tuple inside the batch with one entry for each example
    (names; the dicts of a detector's labels; tensors of different sizes) is split by its entries, and so is a batch
    that is a list of such examples. Values without rows go into every part.

    Raises:
        DataError: there is nothing to split, numbers of rows differ, or there are too few rows.
    """
    rows, is_listed = _examples(batch, count)
    if rows < count:
        hint = "set drop_last=True in the loader if it is the last batch of an epoch, or use fewer microbatches"
        raise DataError(f"has {rows} rows, too few for {count} micro-batches", where="batch", hint=hint)
    bounds = [at * (rows // count) + min(at, rows % count) for at in range(count + 1)]

    def parts(node: Any) -> Any:
        if isinstance(node, Tensor) and node.dim():
            _check_splits(node, count)
            return node.tensor_split(count)
        if not is_listed(node) and not (_is_array(node) and node.ndim):
            return (node,) * count
        return tuple(node[start:end] for start, end in itertools.pairwise(bounds))

    leaves, treedef = tree.flatten(batch, is_leaf=is_listed)
    found = [parts(leaf) for leaf in leaves]
    for index in range(count):
        yield tree.unflatten(treedef, [part[index] for part in found])


def count_rows(batch: Batch) -> int:
    """The number of examples that `split` can divide.

    Raises:
        DataError: there is nothing to split, or numbers of rows differ.
    """
    return _examples(batch, 1)[0]


def rows(batch: Batch, first: int, end: int) -> Batch:
    """The examples ``first`` to ``end`` of a batch, as `split` divides them. Values without rows are kept.

    Raises:
        DataError: as `count_rows`.
    """
    _, is_listed = _examples(batch, 1)

    def part(node: Any) -> Any:
        return node[first:end] if is_listed(node) or (_is_array(node) and node.ndim) else node

    leaves, treedef = tree.flatten(batch, is_leaf=is_listed)
    return tree.unflatten(treedef, [part(leaf) for leaf in leaves])


class _List(NamedTuple):
    """A list or tuple in a batch that may have one entry for each example."""

    node: Any
    rows: tuple[int, ...]  # distinct leading dimensions of the arrays inside
    is_of_examples: bool  # its entries cannot be columns

    def is_listed(self, rows: int, *, surely: bool) -> bool:
        """True if it has one entry for each of ``rows`` examples. A list of n arrays with n rows each is columns,
        unless another list proves (``surely``) that lists have one entry for each example."""
        return len(self.node) == rows and (surely or self.is_of_examples or self.rows != (rows,))


def _examples(batch: Batch, count: int) -> tuple[int, Callable[[Any], bool]]:
    """The number of rows to split, and a function that says whether a node has one entry for each row."""
    lists = list(_lists(batch, is_root=True))
    inside = {id(leaf) for one in lists for leaf in tree.leaves(one.node)}
    columns = [_rows(leaf) for leaf in tree.leaves(batch) if _has_rows(leaf) and id(leaf) not in inside]
    sure = [len(one.node) for one in lists if one.is_of_examples]
    listed_rows = _distinct(itertools.chain(*(one.rows for one in lists)))
    if columns or sure:
        rows = (columns or sure)[0]
    elif len(listed_rows) == 1 and count <= min(listed_rows):  # columns in lists
        rows = min(listed_rows)
    elif listed_rows:
        rows = len(lists[0].node)
    else:
        raise DataError(
            f"holds no tensor to split into {count} micro-batches", where="batch", hint="set microbatches=1"
        )
    surely = any(one.rows and one.is_listed(rows, surely=False) for one in lists)
    known = {id(one.node) for one in lists if one.is_listed(rows, surely=surely)}

    def is_listed(node: Any) -> bool:
        return id(node) in known

    found, _ = tree.flatten(batch, is_leaf=is_listed)
    if any(_rows(leaf) != rows for leaf in found if _has_rows(leaf)):
        raise _uneven(batch, rows, count, is_listed)
    return rows, is_listed


def _lists(node: Any, *, is_root: bool = False) -> Iterator[_List]:
    """The lists and tuples in a batch, outermost first, without those inside a list of examples. The batch itself
    counts as a list of examples only if its arrays differ in rows: otherwise it is a tuple of columns."""
    if type(node) in (list, tuple):
        entries = cast("list[Any] | tuple[Any, ...]", node)
        rows = _distinct(_rows(leaf) for leaf in tree.leaves(entries) if _has_rows(leaf))
        found = _List(node, rows, _are_examples(entries) and (len(rows) > 1 or not is_root))
        if found.is_of_examples or not is_root:
            yield found
        if found.is_of_examples:
            return
    for child in batch_objects.children(node):
        yield from _lists(child)


def _distinct(sizes: Iterable[int]) -> tuple[int, ...]:
    """The distinct sizes. In a graph for all sizes these are symbols, which can be compared but not hashed."""
    found: list[int] = []
    for size in sizes:
        if not any(size == other for other in found):
            found.append(size)
    return tuple(found)


def _are_examples(entries: list[Any] | tuple[Any, ...]) -> bool:
    """True if all entries have one structure that columns cannot have: the same names, or tuples with the same mixture
    of types."""
    if all(batch_objects.is_named(entry) for entry in entries):
        return len({(type(entry), tuple(batch_objects.names(entry))) for entry in entries}) == 1
    if not all(isinstance(entry, list | tuple) for entry in entries):
        return False
    kinds = {tuple(_kind(part) for part in batch_objects.children(entry)) for entry in entries}
    return len(kinds) == 1 and len(set(next(iter(kinds)))) > 1


def _kind(part: Any) -> Any:
    return (part.dtype, part.ndim) if _is_array(part) else type(part)


def _uneven(batch: Batch, rows: int, count: int, is_listed: Callable[[Any], bool]) -> DataError:
    sizes = {path: _rows(leaf) for path, leaf in tree.with_paths(batch, is_leaf=is_listed) if _has_rows(leaf)}
    differing = dict((*list(sizes.items())[:1], next(item for item in sizes.items() if item[1] != rows)))
    return DataError(
        f"{' and '.join(f'{size} rows in {path}' for path, size in differing.items())}; "
        f"{count} micro-batches need equal numbers of rows",
        where="batch",
        hint="pass values that must not be split as context, or set microbatches=1",
    )


def _check_splits(leaf: Tensor, count: int) -> None:
    if not tensor_layout.is_dense(leaf):
        raise DataError(
            f"holds a {tensor_layout.layout_name(leaf)} tensor, which torch does not split into {count} micro-batches",
            where="batch",
            hint="call x.to_dense() or pad the tensor in the loader, or set microbatches=1",
        )


def _has_rows(leaf: Any) -> bool:
    return _is_array(leaf) and leaf.ndim > 0


def _rows(leaf: Any) -> int:
    return leaf.size(0) if isinstance(leaf, Tensor) and leaf.is_nested else leaf.shape[0]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray)
