"""Trees of tensors: the only file that imports optree.

A path joins the names of fields, keys and indices with ``/``: ``opt_state/0/mu/layers.0.weight``.
`None` is a node without leaves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from . import batch_objects
from .errors import StateError
from .types import Tree

TreeDef = optree.PyTreeSpec
_SPACE = "purestep"  # optree requires a namespace for registered nodes


def leaves(tree: Tree) -> list[Any]:
    """The leaves, dict keys in sorted order.

    Example:
        >>> leaves({"b": 2, "a": (1, None)})
        [1, 2]
    """
    return optree.tree_leaves(tree, namespace=_SPACE)


def flatten(tree: Tree, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """Leaves and structure; `unflatten` is the inverse. A node for which ``is_leaf(node)`` is True is a leaf.

    Example:
        >>> found, treedef = flatten({"b": 2, "a": (1, None)})
        >>> found, unflatten(treedef, [10, 20])
        ([1, 2], {'b': 20, 'a': (10, None)})
    """
    found, treedef = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=_SPACE)
    return found, treedef


def unflatten(treedef: TreeDef, children: list[Any] | tuple[Any, ...]) -> Tree:
    """The tree of this structure with these leaves.

    Example:
        >>> _, treedef = flatten({"b": 2, "a": (1, None)})
        >>> unflatten(treedef, [10, 20])
        {'b': 20, 'a': (10, None)}
    """
    return optree.tree_unflatten(treedef, children)


def device(leaves: Iterable[Any]) -> torch.device:
    """The first device among the tensors that is not the CPU, else the CPU. Leaves that are no tensors are ignored.

    Example:
        >>> device([torch.zeros(2, device="meta"), "text"]), device([])
        (device(type='meta'), device(type='cpu'))
    """
    found = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
    return next((each for each in found if each.type != "cpu"), torch.device("cpu"))


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Apply ``fn`` to corresponding leaves and return a tree of the same structure.

    A node for which ``is_leaf(node)`` is True is a leaf.

    Raises:
        ValueError: the trees have different structures.

    Example:
        >>> map(lambda a, b: a + b, {"w": 1, "b": (2, 3)}, {"w": 10, "b": (20, 30)})
        {'w': 11, 'b': (22, 33)}
    """
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=_SPACE)


def _path_text(accessor: optree.PyTreeAccessor) -> str:
    return "/".join(_entry_text(entry) for entry in accessor)


def _entry_text(entry: Any) -> str:
    if isinstance(entry, optree.NamedTupleEntry):
        return str(entry.field)
    return str(entry.entry)


def with_paths(tree: Tree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """``[(path, leaf), ...]`` in the order of `leaves`. A node for which ``is_leaf(node)`` is True is a leaf.

    Raises:
        StateError: the tree is nested too deeply, as if a node contains itself.

    Example:
        >>> with_paths({"layers": [{"w": 1}, {"w": 2}]})
        [('layers/0/w', 1), ('layers/1/w', 2)]
    """
    try:
        accessors, found, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf, namespace=_SPACE)
    except RecursionError as error:
        raise _too_deep() from error
    return [(_path_text(accessor), leaf) for accessor, leaf in zip(accessors, found, strict=True)]


def _too_deep() -> StateError:
    return StateError("the tree is nested too deeply", where="tree", hint="pass no dict or list that contains itself")


def paths(tree: Tree) -> list[str]:
    """The path of every leaf.

    Example:
        >>> paths({"layers": [{"w": 1}, {"w": 2}]})
        ['layers/0/w', 'layers/1/w']
    """
    return [path for path, _ in with_paths(tree)]


class Paths:
    """`paths` and `leaves` of many trees of one structure. The paths are built once.

    Example:
        >>> known = Paths()
        >>> known({"w": 1, "b": 2})
        (['b', 'w'], [2, 1])
    """

    def __init__(self) -> None:
        self._known: tuple[TreeDef, list[str]] | None = None

    def __call__(self, tree: Tree) -> tuple[list[str], list[Any]]:
        """The paths and the leaves. While the structure stays the same, the list of paths is the same object."""
        try:
            found, treedef = flatten(tree)
        except RecursionError as error:
            raise _too_deep() from error
        if self._known is None or self._known[0] != treedef:
            self._known = treedef, paths(tree)
        return self._known[1], found


def where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """``new`` if the 0-d condition is True, else ``old``, leaf by leaf. Leaves of different dtypes are promoted.

    Example:
        >>> import torch
        >>> where(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    return map(lambda n, o: torch.where(condition, n, o) if n is not o else o, new, old)


def clone(tree: Tree) -> Tree:
    """An independent copy with the same structure, values, dtypes, devices and memory layout.

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
    """The same tensors, detached from the autograd graph.

    Example:
        >>> detach({"w": torch.ones(1, requires_grad=True)})["w"].requires_grad
        False
    """
    return map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def dicts(tree: Tree) -> Tree:
    """The tree with mappings that optree does not know (Hugging Face's BatchEncoding) as plain dicts.

    Registers the classes of batch objects in the tree (`batch_objects.attributes`) as nodes, for the whole process.
    Returns the same object if nothing changes.

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
        if not isinstance(leaf, batch_objects.ATOMS) and (_is_mapping(leaf) or _is_unregistered(leaf)):
            return map(
                lambda leaf: {key: dicts(leaf[key]) for key in leaf} if _is_mapping(leaf) else leaf, _registered(tree)
            )
    return tree


def _is_mapping(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and isinstance(leaf, Mapping)


def _registered(tree: Tree) -> Tree:
    """Register the classes of the batch objects in the tree, nested ones too, and return the tree."""
    while new := {type(leaf) for leaf in leaves(tree) if _is_unregistered(leaf)}:
        for cls in new:
            _register_batch_object(cls)
    return tree


def _is_unregistered(leaf: Any) -> bool:
    return (
        not isinstance(leaf, batch_objects.ATOMS)
        and type(leaf) not in batch_objects.REGISTERED
        and batch_objects.attributes(leaf) is not None
    )


def _register_batch_object(cls: type) -> None:
    def flat(node: Any) -> tuple[Any, ...]:
        values = batch_objects.attributes(node) or {}
        return tuple(values.values()), tuple(values), tuple(values)

    def back(names: Any, children: Iterable[Any]) -> Any:
        return batch_objects.build(cls, dict(zip(names, children, strict=True)))

    batch_objects.REGISTERED[cls] = None
    optree.register_pytree_node(cls, flat, back, path_entry_type=optree.GetAttrEntry, namespace=_SPACE)


def signature(tree: Tree) -> tuple[TreeDef, tuple[Any, ...]]:
    """The structure and, for each leaf, its shape, dtype and device; for a leaf that is no tensor, its type and value.

    Example:
        >>> signature((torch.ones(2), 3)) == signature((torch.zeros(2), 3)), signature(2) == signature(3)
        (True, False)
    """
    try:
        found, treedef = flatten(tree)
    except RecursionError as error:
        raise _too_deep() from error
    return treedef, tuple(
        (() if x.is_nested else x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in found
    )


def register(cls: type, flatten: Callable[[Any], tuple[Any, ...]], unflatten: Callable[..., Any]) -> None:
    """Register ``cls``, a subclass of a NamedTuple, as a node. ``flatten(node)`` returns the values of its fields.

    Example:
        >>> from typing import NamedTuple
        >>> class Lazy(NamedTuple("Lazy", [("value", Any)])):
        ...     "Holds a function that returns the value."
        >>> register(Lazy, lambda node: (node[0](),), lambda child: Lazy(lambda: child))
        >>> leaves(Lazy(lambda: 7))
        [7]
    """
    fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]  # a NamedTuple's

    with warnings.catch_warnings():
        # optree warns that NamedTuples are nodes already; replacing that is the purpose.
        warnings.simplefilter("ignore", UserWarning)
        optree.register_pytree_node(
            cls,
            lambda node: (flatten(node), None, fields),
            lambda _, children: unflatten(*children),
            path_entry_type=optree.GetAttrEntry,
            namespace=_SPACE,
        )
