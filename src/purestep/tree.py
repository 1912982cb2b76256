"""Trees of tensors: the only file that imports optree.

Paths are the names of fields, keys and indices joined by ``/``: ``opt_state/0/mu/layers.0.weight``.
`None` is a node without leaves.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import optree
import torch
from torch import Tensor

from . import batch_objects
from .errors import StateError
from .types import Tree

TreeDef = optree.PyTreeSpec
_SPACE = "purestep"  # optree refuses to register nodes for everybody


def leaves(tree: Tree) -> list[Any]:
    """The leaves, dict keys in sorted order.

    Example:
        >>> leaves({"b": 2, "a": (1, None)})
        [1, 2]
    """
    return optree.tree_leaves(tree, namespace=_SPACE)


def flatten(tree: Tree, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """Leaves and structure; `unflatten` is the way back. ``is_leaf(node)`` makes a node a leaf.

    Example:
        >>> found, treedef = flatten({"b": 2, "a": (1, None)})
        >>> found, unflatten(treedef, [10, 20])
        ([1, 2], {'b': 20, 'a': (10, None)})
    """
    found, treedef = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=_SPACE)
    return found, treedef


def unflatten(treedef: TreeDef, children: list[Any] | tuple[Any, ...]) -> Tree:
    """The tree of that structure with these leaves.

    Example:
        >>> _, treedef = flatten({"b": 2, "a": (1, None)})
        >>> unflatten(treedef, [10, 20])
        {'b': 20, 'a': (10, None)}
    """
    return optree.tree_unflatten(treedef, children)


def device(leaves: Iterable[Any]) -> torch.device:
    """The first device of these that is not the CPU; the CPU where there is none. What is no tensor has none.

    Example:
        >>> device([torch.zeros(2, device="meta"), "text"]), device([])
        (device(type='meta'), device(type='cpu'))
    """
    found = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
    return next((each for each in found if each.type != "cpu"), torch.device("cpu"))


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
    """``a/b/0`` of one leaf.

    Example:
        >>> accessors, _, _ = optree.tree_flatten_with_accessor({"layers": [{"w": 1}]})
        >>> path_text(accessors[0])
        'layers/0/w'
    """
    return "/".join(_entry_text(entry) for entry in accessor)


def _entry_text(entry: Any) -> str:
    if isinstance(entry, optree.NamedTupleEntry):
        return str(entry.field)
    return str(entry.entry)


def with_paths(tree: Tree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """``[(path, leaf), ...]`` in the order of `leaves`; ``is_leaf(node)`` makes a node a leaf.

    Raises:
        StateError: a node that contains itself.

    Example:
        >>> with_paths({"layers": [{"w": 1}, {"w": 2}]})
        [('layers/0/w', 1), ('layers/1/w', 2)]
    """
    try:
        accessors, found, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf, namespace=_SPACE)
    except RecursionError as error:
        raise _endless() from error
    return [(path_text(accessor), leaf) for accessor, leaf in zip(accessors, found, strict=True)]


def _endless() -> StateError:
    return StateError("nodes within nodes without end", where="tree", hint="no dict or list that contains itself")


def paths(tree: Tree) -> list[str]:
    """The path of every leaf.

    Example:
        >>> paths({"layers": [{"w": 1}, {"w": 2}]})
        ['layers/0/w', 'layers/1/w']
    """
    return [path for path, _ in with_paths(tree)]


class Paths:
    """`paths` and `leaves` of trees of one structure, again and again: the paths are made once.

    Example:
        >>> known = Paths()
        >>> known({"w": 1, "b": 2})
        (['b', 'w'], [2, 1])
    """

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


def extent(leaf: Tensor) -> int:
    """How many elements of memory there are from a tensor's first to its last, both included.

    Example:
        >>> extent(torch.ones(2, 6)), extent(torch.ones(2, 6)[:, ::2]), extent(torch.ones(0, 6))
        (12, 11, 0)
    """
    if not leaf.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))


def layout_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """What tells, in a call with as many leaves, one argument each, whether all are laid out like these: of the same
    type, dtype, device, shape and strides, dense, requiring gradients or not. It holds none of them.

    Dynamo's guards, a tenth of a microsecond a tensor. None where there is none: a leaf is no plain tensor, or this
    torch has other guards.

    Example:
        >>> same = layout_guard([torch.ones(2)])
        >>> same is None or (same(torch.zeros(2)), same(torch.zeros(3)))
        (True, False)
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
    """The same tensors without their graph.

    Example:
        >>> detach({"w": torch.ones(1, requires_grad=True)})["w"].requires_grad
        False
    """
    return map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def dicts(tree: Tree) -> Tree:
    """The tree with mappings that are no nodes (Hugging Face's BatchEncoding) as plain dicts; else the tree itself.

    The classes of records (`records.record`) in it become nodes, from now on and everywhere.

    Example:
        >>> from collections import UserDict
        >>> dicts((UserDict(x=1), 2))
        ({'x': 1}, 2)
        >>> from types import SimpleNamespace
        >>> leaves(dicts(SimpleNamespace(x=1, y=(2, 3))))
        [1, 2, 3]
    """
    if isinstance(tree, Tensor):
        return tree
    for leaf in leaves(tree):
        if not isinstance(leaf, batch_objects.ATOMS) and (_is_mapping(leaf) or _is_new_record(leaf)):
            return map(
                lambda leaf: {key: dicts(leaf[key]) for key in leaf} if _is_mapping(leaf) else leaf, _noded(tree)
            )
    return tree


def _is_mapping(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and isinstance(leaf, Mapping)


def _noded(tree: Tree) -> Tree:
    """The tree, after the classes of its records have become nodes, those inside of others too."""
    while new := {type(leaf) for leaf in leaves(tree) if _is_new_record(leaf)}:
        for cls in new:
            _register_record(cls)
    return tree


def _is_new_record(leaf: Any) -> bool:
    return (
        not isinstance(leaf, batch_objects.ATOMS)
        and type(leaf) not in batch_objects.KNOWN
        and batch_objects.record(leaf) is not None
    )


def _register_record(cls: type) -> None:
    def flat(node: Any) -> tuple[Any, ...]:
        held = batch_objects.record(node) or {}
        return tuple(held.values()), tuple(held), tuple(held)

    def back(names: Any, children: Iterable[Any]) -> Any:
        return batch_objects.made(cls, dict(zip(names, children, strict=True)))

    batch_objects.KNOWN[cls] = None
    optree.register_pytree_node(cls, flat, back, path_entry_type=optree.GetAttrEntry, namespace=_SPACE)


def signature(tree: Tree) -> tuple[TreeDef, tuple[Any, ...]]:
    """Structure and, per leaf, what a compiled graph depends on: shape, dtype and device (or the value of a number).

    Example:
        >>> signature((torch.ones(2), 3)) == signature((torch.zeros(2), 3)), signature(2) == signature(3)
        (True, False)
    """
    try:
        found, treedef = flatten(tree)
    except RecursionError as error:
        raise _endless() from error
    return treedef, tuple(
        (() if x.is_nested else x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in found
    )


def register(cls: type, flatten: Callable[[Any], tuple[Any, ...]], unflatten: Callable[..., Any]) -> None:
    """Make ``cls``, a subclass of a NamedTuple, a node whose children ``flatten`` gives by the names of its fields.

    Example:
        >>> from typing import NamedTuple
        >>> class Lazy(NamedTuple("Lazy", [("value", Any)])):
        ...     "Reads what is behind it."
        >>> register(Lazy, lambda node: (node[0](),), lambda child: Lazy(lambda: child))
        >>> leaves(Lazy(lambda: 7))
        [7]
    """
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
