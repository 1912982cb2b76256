"""Trees of tensors: the only file that imports optree.

Paths are the names of fields, keys and indices joined by ``/``: ``opt_state/0/mu/layers.0.weight``.
`None` is a node without leaves.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import optree
import torch
from torch import Tensor

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

    The classes of `records` in it become nodes, from now on and everywhere.

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
        if not isinstance(leaf, _ATOMS) and (_is_mapping(leaf) or _is_new_record(leaf)):
            return map(lambda leaf: {key: dicts(leaf[key]) for key in leaf} if _is_mapping(leaf) else leaf, _noded(tree))
    return tree


_ATOMS = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None), type)


def _is_mapping(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and isinstance(leaf, Mapping)


def _noded(tree: Tree) -> Tree:
    """The tree, after the classes of its records have become nodes, those inside of others too."""
    while new := {type(leaf) for leaf in leaves(tree) if _is_new_record(leaf)}:
        for cls in new:
            _register_record(cls)
    return tree


def record(node: Any) -> dict[str, Any] | None:
    """The attributes of a record, by name; None for anything else.

    Records are dataclasses, attrs classes, namespaces, and objects of other classes that hold tensors, and besides them
    only arrays, numbers, text, and containers and records of such.

    Example:
        >>> from types import SimpleNamespace
        >>> record(SimpleNamespace(y=2, x=1)), record({"x": 1})
        ({'x': 1, 'y': 2}, None)
    """
    kind = type(node)
    if kind in _RECORDS:
        return _attributes(node)
    if isinstance(node, (*_ATOMS, Mapping, tuple, list, torch.nn.Module)) or kind.__module__.startswith("torch."):
        return None
    held = _attributes(node)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or isinstance(node, types.SimpleNamespace):
        return held
    return held if _holds_tensor(held) and all(_is_plain(value) for value in held.values()) else None


def _attributes(node: Any) -> dict[str, Any]:
    names = {name for cls in type(node).__mro__ for name in _slots(cls)} | set(getattr(node, "__dict__", ()))
    return {name: getattr(node, name) for name in sorted(names) if hasattr(node, name)}


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_holds_tensor(child) for child in cast(dict[Any, Any], node).values())
    if isinstance(node, list | tuple):
        return any(_holds_tensor(child) for child in cast("list[Any] | tuple[Any, ...]", node))
    return isinstance(node, Tensor) or (not isinstance(node, _ATOMS) and record(node) is not None)


def _is_plain(node: Any) -> bool:
    if isinstance(node, dict):
        return all(_is_plain(child) for child in cast(dict[Any, Any], node).values())
    if isinstance(node, list | tuple):
        return all(_is_plain(child) for child in cast("list[Any] | tuple[Any, ...]", node))
    return isinstance(node, (*_ATOMS, torch.dtype, torch.device)) or record(node) is not None


_RECORDS: dict[type, None] = {}
"""Classes that are nodes by now."""


def _is_new_record(leaf: Any) -> bool:
    return not isinstance(leaf, _ATOMS) and type(leaf) not in _RECORDS and record(leaf) is not None


def _register_record(cls: type) -> None:
    def flat(node: Any) -> tuple[Any, ...]:
        held = _attributes(node)
        return tuple(held.values()), tuple(held), tuple(held)

    def back(names: tuple[str, ...], children: Iterable[Any]) -> Any:
        # Not by its constructor, which may check what it is given, or make something of it.
        return rebuilt(object.__new__(cls), dict(zip(names, children, strict=True)))

    _RECORDS[cls] = None
    optree.register_pytree_node(cls, flat, back, path_entry_type=optree.GetAttrEntry, namespace=_SPACE)


def rebuilt(node: Any, held: Mapping[str, Any]) -> Any:
    """The record itself with these attributes, frozen or not."""
    for name, value in held.items():
        object.__setattr__(node, name, value)
    return node


def is_named(node: Any) -> bool:
    """Whether a node's children have names: a mapping, a NamedTuple or a record."""
    return isinstance(node, Mapping) or hasattr(node, "_fields") or record(node) is not None


def names(node: Any) -> list[Any]:
    """The names of such a node's children, in order.

    Example:
        >>> names({"b": 1, "a": 2})
        ['a', 'b']
    """
    if isinstance(node, Mapping):
        return sorted(cast("Mapping[Any, Any]", node), key=str)
    return list(node._fields) if hasattr(node, "_fields") else list(record(node) or {})


def children(node: Any) -> list[Any]:
    """What is directly in a node: in a mapping, a list, a tuple or a record. Nothing is in a leaf.

    Example:
        >>> children({"x": (1, 2), "y": 3}), children(3)
        ([(1, 2), 3], [])
    """
    if isinstance(node, Tensor):
        return []
    if isinstance(node, Mapping):
        return list(cast("Mapping[Any, Any]", node).values())
    if isinstance(node, list | tuple):
        return list(cast("list[Any] | tuple[Any, ...]", node))
    return list((record(node) or {}).values())


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
        return (leaf.values(), leaf.offsets()) if leaf.layout is torch.jagged else leaf.unbind()
    if leaf.layout is torch.sparse_coo:
        whole = leaf.coalesce()
        return whole.indices(), whole.values()
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return leaf.crow_indices(), leaf.col_indices(), leaf.values()
    if leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        return leaf.ccol_indices(), leaf.row_indices(), leaf.values()
    return (leaf,)


def nbytes(tree: Tree) -> int:
    """How much memory the tensors of a tree take, sparse and nested ones by what is in them.

    Example:
        >>> nbytes((torch.ones(2, 3), "text"))
        24
    """
    found = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
    return sum(part.nbytes for leaf in found for part in ((leaf,) if is_dense(leaf) else dense_parts(leaf)))


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
