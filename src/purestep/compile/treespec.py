"""Flatten and unflatten trees in plain Python inside a graph: Dynamo cannot read a structure from outside of it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any, cast

from .. import tree
from ..types import Tree


def of(treedef: tree.TreeDef) -> Tree:
    """Return the tree of a structure whose leaves are their positions, as text: Dynamo would turn numbers that differ
    between two graphs into variables."""
    return tree.unflatten(treedef, [str(index) for index in range(treedef.num_leaves)])


def fill(skeleton: Tree, children: Sequence[Any]) -> Tree:
    """Unflatten inside a graph, like `tree.unflatten`.

    Args:
        skeleton: from `of`.
        children: the leaves.
    """
    if isinstance(skeleton, str):
        return children[int(skeleton)]
    if isinstance(skeleton, dict):
        filled = {key: fill(node, children) for key, node in cast(dict[Any, Any], skeleton).items()}
        return _of_kind(skeleton, filled)
    if isinstance(skeleton, tuple | list):
        nodes = [fill(node, children) for node in cast(Sequence[Any], skeleton)]
        return type(skeleton)(*nodes) if hasattr(type(skeleton), "_fields") else type(skeleton)(nodes)
    return tree.map(lambda index: children[int(index)], skeleton)


def _of_kind(node: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    # The leaves of an OrderedDict are in the order of its keys, those of other dicts in sorted order.
    if isinstance(node, OrderedDict):
        return OrderedDict(items)
    if isinstance(node, defaultdict):
        return defaultdict(cast(Any, node).default_factory, items)
    return items


def collect(skeleton: Tree, found: Tree) -> list[Any]:
    """Flatten inside a graph, like `tree.leaves`; the inverse of `fill`."""
    return [leaf for _, leaf in sorted(_numbered(skeleton, found), key=lambda pair: pair[0])]


def _numbered(skeleton: Tree, found: Tree) -> list[tuple[int, Any]]:
    if isinstance(skeleton, str):
        return [(int(skeleton), found)]
    if isinstance(skeleton, dict):
        named = cast(dict[Any, Any], skeleton)
        return [pair for key, node in named.items() for pair in _numbered(node, found[key])]
    if isinstance(skeleton, tuple | list):
        nodes = cast(Sequence[Any], skeleton)
        return [pair for node, child in zip(nodes, found, strict=True) for pair in _numbered(node, child)]
    return [(int(index), leaf) for index, leaf in zip(tree.leaves(skeleton), tree.leaves(found), strict=True)]


def containers(node: Any) -> list[Any]:
    """All mutable containers of a tree: dicts, lists and deques."""
    if isinstance(node, dict):
        named = cast(dict[Any, Any], node)
        return [named, *(found for child in named.values() for found in containers(child))]
    if not isinstance(node, tuple | list | deque):
        return []
    found = [each for child in cast(Any, node) for each in containers(child)]
    return found if isinstance(node, tuple) else [node, *found]
