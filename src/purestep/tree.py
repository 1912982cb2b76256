"""Trees of tensors: the only file that imports optree.

Paths are the names of fields, keys and indices joined by ``/``: ``opt_state/0/mu/layers.0.weight``.
`None` is a node without leaves.
"""

from __future__ import annotations

import importlib
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import optree
import torch
from torch import Tensor

from .errors import StateError
from .types import Tree

TreeDef = optree.PyTreeSpec
_SPACE = "purestep"  # optree refuses to register nodes for everybody


def leaves(tree: Tree) -> list[Any]:
    """The leaves, dict keys in sorted order."""
    return optree.tree_leaves(tree, namespace=_SPACE)


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """Leaves and structure; `unflatten` is the way back.

    Example:
        >>> found, treedef = flatten({"b": 2, "a": (1, None)})
        >>> found, unflatten(treedef, [10, 20])
        ([1, 2], {'b': 20, 'a': (10, None)})
    """
    found, treedef = optree.tree_flatten(tree, namespace=_SPACE)
    return found, treedef


def unflatten(treedef: TreeDef, children: list[Any] | tuple[Any, ...]) -> Tree:
    """The tree of that structure with these leaves."""
    return optree.tree_unflatten(treedef, children)


def indices(treedef: TreeDef) -> Tree:
    """The tree of that structure whose leaves are their own positions, as text: Dynamo takes numbers that differ
    between two graphs for variables. See `fill` and `collect`."""
    return unflatten(treedef, [str(index) for index in range(treedef.num_leaves)])


def fill(positions: Tree, children: Sequence[Any]) -> Tree:
    """`unflatten` in plain Python, for inside a graph: Dynamo reads no structure made outside of it.

    Args:
        positions: from `indices`.
        children: the leaves.
    """
    if isinstance(positions, str):
        return children[int(positions)]
    if isinstance(positions, dict):
        filled = {key: fill(node, children) for key, node in cast(dict[Any, Any], positions).items()}
        return _of_kind(positions, filled)
    if isinstance(positions, tuple | list):
        nodes = [fill(node, children) for node in cast(Sequence[Any], positions)]
        return type(positions)(*nodes) if hasattr(type(positions), "_fields") else type(positions)(nodes)
    return map(lambda index: children[int(index)], positions)


def _of_kind(node: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    # Of an OrderedDict the leaves come in the order of its keys, of others in sorted order.
    if isinstance(node, OrderedDict):
        return OrderedDict(items)
    if isinstance(node, defaultdict):
        return defaultdict(cast(Any, node).default_factory, items)
    return items


def collect(positions: Tree, tree: Tree) -> list[Any]:
    """`leaves` in plain Python, for inside a graph; the inverse of `fill`."""
    return [leaf for _, leaf in sorted(_numbered(positions, tree), key=lambda pair: pair[0])]


def _numbered(positions: Tree, tree: Tree) -> list[tuple[int, Any]]:
    if isinstance(positions, str):
        return [(int(positions), tree)]
    if isinstance(positions, dict):
        named = cast(dict[Any, Any], positions)
        return [pair for key, node in named.items() for pair in _numbered(node, tree[key])]
    if isinstance(positions, tuple | list):
        nodes = cast(Sequence[Any], positions)
        return [pair for node, child in zip(nodes, tree, strict=True) for pair in _numbered(node, child)]
    return [(int(index), leaf) for index, leaf in zip(leaves(positions), leaves(tree), strict=True)]


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """``fn`` of corresponding leaves, as a tree of the same structure; ``is_leaf(node)`` makes a node a leaf.

    Raises:
        ValueError: trees of different structures.

    Example:
        >>> map(lambda a, b: a + b, {"w": 1, "b": (2, 3)}, {"w": 10, "b": (20, 30)})
        {'w': 11, 'b': (22, 33)}
    """
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=_SPACE)


def path_text(accessor: optree.PyTreeAccessor) -> str:
    """``a/b/0`` of one leaf."""
    return "/".join(_entry_text(entry) for entry in accessor)


def _entry_text(entry: Any) -> str:
    if isinstance(entry, optree.NamedTupleEntry):
        return str(entry.field)
    return str(entry.entry)


def with_paths(tree: Tree) -> list[tuple[str, Any]]:
    """``[(path, leaf), ...]`` in the order of `leaves`.

    Raises:
        StateError: a node that contains itself.

    Example:
        >>> with_paths({"layers": [{"w": 1}, {"w": 2}]})
        [('layers/0/w', 1), ('layers/1/w', 2)]
    """
    try:
        accessors, found, _ = optree.tree_flatten_with_accessor(tree, namespace=_SPACE)
    except RecursionError as error:
        raise _endless() from error
    return [(path_text(accessor), leaf) for accessor, leaf in zip(accessors, found, strict=True)]


def _endless() -> StateError:
    return StateError("nodes within nodes without end", where="tree", hint="no dict or list that contains itself")


def paths(tree: Tree) -> list[str]:
    """The path of every leaf."""
    return [path for path, _ in with_paths(tree)]


class Paths:
    """`paths` and `leaves` of trees of one structure, again and again: the paths are made once."""

    def __init__(self) -> None:
        self._known: tuple[TreeDef, list[str]] | None = None

    def __call__(self, tree: Tree) -> tuple[list[str], list[Any]]:
        """The paths, one list for as long as the structure is the same, and the leaves."""
        try:
            found, treedef = flatten(tree)
        except RecursionError as error:
            raise _endless() from error
        if self._known is None or self._known[0] != treedef:
            self._known = treedef, paths(tree)
        return self._known[1], found


def layout_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """What tells, in a call with as many leaves, one argument each, whether all are laid out like these: of the same
    type, dtype, device, shape and strides, dense, requiring gradients or not. It holds none of them.

    Dynamo's guards, a tenth of a microsecond a tensor. None where there is none: a leaf is no plain tensor, or this
    torch has other guards.
    """
    if not all(type(leaf) is Tensor for leaf in tensors):
        return None
    with suppress(Exception):  # another torch, or a layout that has no strides
        guards: Any = importlib.import_module("torch._C._dynamo.guards")
        sizes = [list(leaf.shape) for leaf in tensors]
        strides = [list(leaf.stride()) for leaf in tensors]
        same: Any = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        if same(*tensors) is True:
            return same
    return None


def where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """Leaf by leaf ``new`` where the 0-d condition holds, else ``old``. Two leaves of two dtypes are promoted.

    Example:
        >>> import torch
        >>> where(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    return map(lambda n, o: torch.where(condition, n, o) if n is not o else o, new, old)


def clone(tree: Tree) -> Tree:
    """An independent copy: same structure, values, dtypes, devices and memory layout.

    Example:
        >>> import torch
        >>> a = {"w": torch.zeros(2)}
        >>> b = clone(a)
        >>> _ = b["w"].add_(1)
        >>> a["w"].tolist()
        [0.0, 0.0]
    """
    return map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def detach(tree: Tree) -> Tree:
    """The same tensors without their graph."""
    return map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def dicts(tree: Tree) -> Tree:
    """The tree with mappings that are no nodes (Hugging Face's BatchEncoding) as plain dicts; else the tree itself."""
    if isinstance(tree, Tensor) or not any(_is_mapping(leaf) for leaf in leaves(tree)):
        return tree
    return map(lambda leaf: {key: dicts(leaf[key]) for key in leaf} if _is_mapping(leaf) else leaf, tree)


def _is_mapping(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and isinstance(leaf, Mapping)


def signature(tree: Tree) -> tuple[TreeDef, tuple[Any, ...]]:
    """Structure and, per leaf, what a compiled graph depends on: shape, dtype and device (or the value of a number)."""
    try:
        found, treedef = flatten(tree)
    except RecursionError as error:
        raise _endless() from error
    return treedef, tuple(
        (() if x.is_nested else x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in found
    )


def register(cls: type, flatten: Callable[[Any], tuple[Any, ...]], unflatten: Callable[..., Any]) -> None:
    """Make ``cls``, a subclass of a NamedTuple, a node whose children ``flatten`` gives by the names of its fields."""
    fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]  # a NamedTuple's

    with warnings.catch_warnings():
        # optree says that a NamedTuple was a node already, which is why it is registered anew.
        warnings.simplefilter("ignore", UserWarning)
        optree.register_pytree_node(
            cls,
            lambda node: (flatten(node), None, fields),
            lambda _, children: unflatten(*children),
            path_entry_type=optree.GetAttrEntry,
            namespace=_SPACE,
        )
