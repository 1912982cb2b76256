"""Trees of tensors: the only file that imports optree.

A path joins the names of fields, keys and indices with ``/``: ``opt_state/0/mu/layers.0.weight``.
`None` is a node without leaves. A dataclass, an attrs class and a namespace are nodes of a batch, with their attributes
as children, and so is a class that `register` has got; an object of another class that holds tensors is refused.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import optree
import torch
from torch import Tensor

from .errors import DataError, StateError
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

    Raises:
        StateError: the tree is nested too deeply, as if a node contains itself.
    """
    try:
        found, treedef = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=_SPACE)
    except RecursionError as error:
        raise _too_deep(tree) from error
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
    elsewhere = (leaf.device for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_cpu)
    return next(elsewhere, torch.device("cpu"))


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Apply ``fn`` to corresponding leaves and return a tree of the same structure.

    Example:
        >>> map(lambda a, b: a + b, {"w": 1, "b": (2, 3)}, {"w": 10, "b": (20, 30)})
        {'w': 11, 'b': (22, 33)}

    A node for which ``is_leaf(node)`` is True is a leaf.

    Raises:
        ValueError: the trees have different structures.
        StateError: the tree is nested too deeply, as if a node contains itself.
    """
    try:
        return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=_SPACE)
    except RecursionError as error:
        raise _too_deep(tree) from error


def _entry_text(entry: Any) -> str:
    if isinstance(entry, optree.NamedTupleEntry):
        return str(entry.field)
    if entry.entry != entry.entry:
        hint = "pass a key that is equal to itself: text or a whole number"
        raise StateError(f"the key {entry.entry!r} is not equal to itself", where="tree", hint=hint)
    return str(entry.entry)


def with_paths(tree: Tree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """``[(path, leaf), ...]`` in the order of `leaves`. A node for which ``is_leaf(node)`` is True is a leaf.

    Example:
        >>> with_paths({"layers": [{"w": 1}, {"w": 2}]})
        [('layers/0/w', 1), ('layers/1/w', 2)]

    Raises:
        StateError: the tree is nested too deeply, as if a node contains itself.
    """
    try:
        accessors, found, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf, namespace=_SPACE)
    except RecursionError as error:
        raise _too_deep(tree) from error
    return [
        ("/".join(_entry_text(entry) for entry in accessor), leaf)
        for accessor, leaf in zip(accessors, found, strict=True)
    ]


def _too_deep(tree: Any) -> StateError:
    found = _cycle(tree, "", ())
    what = "the tree is nested too deeply" if found is None else "the tree contains itself here"
    return StateError(what, where=found or "tree", hint="pass no dict or list that contains itself")


def _cycle(node: Any, path: str, above: tuple[int, ...]) -> str | None:
    """The path of the first container that contains itself."""
    if not isinstance(node, dict | list | tuple) or len(above) > 100:
        return None
    if id(node) in above:
        return path
    names = getattr(type(node), "_fields", None) or range(len(cast(Any, node)))
    items = cast(Any, node).items() if isinstance(node, dict) else zip(names, cast(Any, node), strict=True)
    below = (_cycle(child, f"{path}/{key}" if path else str(key), (*above, id(node))) for key, child in items)
    return next((found for found in below if found is not None), None)


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
        found, treedef = flatten(tree)
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


def dicts(tree: Tree, *, where: str | None = "batch") -> Tree:
    """The tree with mappings that optree does not know (Hugging Face's BatchEncoding) as plain dicts.

    Example:
        >>> from collections import UserDict
        >>> dicts((UserDict(x=1), 2))
        ({'x': 1}, 2)
        >>> from types import SimpleNamespace
        >>> leaves(dicts(SimpleNamespace(x=1, y=(2, 3))))
        [1, 2, 3]

    `dicts` makes optree see dataclasses, attrs classes and namespaces as nodes. Returns the same object if nothing
    changes.

    Args:
        tree: a batch, or outputs of a model.
        where: the name of the tree in errors. None: objects of other classes that hold tensors are leaves.

    Raises:
        DataError: it holds such an object.
    """
    if isinstance(tree, Tensor) or all(isinstance(leaf, _ATOMS) for leaf in leaves(tree)):
        return tree
    tree = _of_known_nodes(tree)
    if where is not None:
        for path, leaf in with_paths(tree):
            attributes(leaf, where=f"{where}/{path}" if path else where)
    return tree


def _of_known_nodes(tree: Tree) -> Tree:
    while new := {type(leaf) for leaf in leaves(tree) if _is_record(leaf) and type(leaf) not in _RECORDS}:
        for cls in new:
            _register(cls, _attributes)
            _RECORDS.add(cls)
    if not any(isinstance(leaf, Mapping) for leaf in leaves(tree)):
        return tree
    return map(lambda leaf: {k: _of_known_nodes(leaf[k]) for k in leaf} if isinstance(leaf, Mapping) else leaf, tree)


_ATOMS = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None), type, torch.nn.Module)
_RECORDS: set[type] = set()  # classes that `dicts` has made known to optree; the class decides, not this set
_REGISTERED: dict[type, tuple[Callable[[Any], Mapping[str, Any]], Callable[..., Any]]] = {}  # flatten, unflatten


def attributes(node: Any, *, where: str = "batch") -> dict[str, Any] | None:
    """The children of a dataclass, an attrs class, a namespace or a registered class by name; None for another node.

    Example:
        >>> from types import SimpleNamespace
        >>> attributes(SimpleNamespace(y=2, x=1)), attributes({"x": 1})
        ({'x': 1, 'y': 2}, None)

    Args:
        node: a node of a batch.
        where: its path.

    Raises:
        DataError: the node is an object of another class that holds tensors.
    """
    if type(node) in _REGISTERED:
        return dict(_REGISTERED[type(node)][0](node))
    if _is_record(node):
        return _attributes(node)
    is_other = isinstance(node, (*_ATOMS, Mapping, tuple, list)) or type(node).__module__.startswith("torch.")
    if not is_other and _holds_tensor(_attributes(node)):
        kind = type(node).__name__
        raise DataError(
            f"the leaf is a {kind}, an object that holds tensors, of a class that purestep does not know",
            where=where,
            hint="make a dict of its tensors in the loader's collate_fn"
            f"{': batch.to_dict()' if hasattr(node, 'to_dict') else ''}; make {kind} a dataclass; or call "
            f"ps.tree.register({kind}, flatten, unflatten) once",
        )
    return None


def _is_record(node: Any) -> bool:
    kind = type(node)
    if isinstance(node, (*_ATOMS, Mapping, tuple, list)) or kind.__module__.startswith("torch."):
        return False
    return dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or isinstance(node, types.SimpleNamespace)


def _attributes(node: Any) -> dict[str, Any]:
    found = dict(getattr(node, "__dict__", {}))
    for cls in type(node).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(node, name):
                found[name] = getattr(node, name)
    return dict(sorted(found.items()))


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(_holds_tensor(child) for child in cast("Mapping[Any, Any]", node).values())
    if isinstance(node, list | tuple):
        return any(_holds_tensor(child) for child in cast("list[Any] | tuple[Any, ...]", node))
    return isinstance(node, Tensor)


def build(cls: type, children: Mapping[str, Any]) -> Any:
    """An object of this class with these children; the inverse of `attributes`.

    Example:
        >>> from types import SimpleNamespace
        >>> build(SimpleNamespace, {"x": 1})
        namespace(x=1)

    The constructor of a dataclass is not called, because it may reject or convert its arguments.
    """
    if cls in _REGISTERED:
        return _REGISTERED[cls][1](**children)
    node = (types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object).__new__(cls)
    for name, value in children.items():
        object.__setattr__(node, name, value)
    return node


def _register(cls: type, flatten: Callable[[Any], Mapping[str, Any]]) -> None:
    def flat(node: Any) -> tuple[Any, ...]:
        found = flatten(node)
        return tuple(found.values()), tuple(found), tuple(found)

    def back(names: Any, children: Iterable[Any]) -> Any:
        return build(cls, dict(zip(names, children, strict=True)))

    optree.register_pytree_node(cls, flat, back, path_entry_type=optree.GetAttrEntry, namespace=_SPACE)


def signature(tree: Tree) -> tuple[TreeDef, tuple[Any, ...]]:
    """The structure and, for each leaf, its shape, dtype and device; for a leaf that is no tensor, its type and value.

    Example:
        >>> signature((torch.ones(2), 3)) == signature((torch.zeros(2), 3)), signature(2) == signature(3)
        (True, False)
    """
    found, treedef = flatten(tree)
    return treedef, tuple(
        (() if x.is_nested else x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in found
    )


def register(cls: type, flatten: Callable[[Any], Any], unflatten: Callable[..., Any]) -> None:
    """Make objects of a class nodes, such as batches of a library's own class. Call it once for a class.

    Example:
        >>> class Graph:
        ...     def __init__(self, x, edges):
        ...         self.x, self.edges = x, edges
        >>> register(Graph, vars, Graph)
        >>> with_paths(Graph(7, edges=[1, 2]))
        [('x', 7), ('edges/0', 1), ('edges/1', 2)]

    Args:
        cls: a class. Its subclasses are not registered.
        flatten: ``node -> {name: child}``; for a subclass of a NamedTuple, ``node -> (values of its fields)``.
        unflatten: called with the children, by name; for a subclass of a NamedTuple, by position.
    """
    fields: tuple[str, ...] | None = getattr(cls, "_fields", None)
    if fields is None:
        _register(cls, flatten)
        _REGISTERED[cls] = flatten, unflatten
        return
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
