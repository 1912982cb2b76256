"""Batches that are objects: dataclasses, attrs classes, namespaces, and other objects with tensors as attributes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

ATOMS = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None), type)
"""Types without children."""

REGISTERED: dict[type, None] = {}
"""The classes that `tree` has registered as nodes. Their objects are batch objects whatever they hold."""


def attributes(node: Any) -> dict[str, Any] | None:
    """The attributes of a batch object, by name; None if the node is no batch object.

    Batch objects are dataclasses, attrs classes and namespaces. An object of another class is one if it holds a tensor
    and otherwise only arrays, numbers, text, and containers and batch objects of these.

    Example:
        >>> from types import SimpleNamespace
        >>> attributes(SimpleNamespace(y=2, x=1)), attributes({"x": 1})
        ({'x': 1, 'y': 2}, None)
    """
    kind = type(node)
    if kind in REGISTERED:
        return _attributes(node)
    if isinstance(node, (*ATOMS, Mapping, tuple, list, torch.nn.Module)) or kind.__module__.startswith("torch."):
        return None
    found = _attributes(node)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or isinstance(node, types.SimpleNamespace):
        return found
    return found if _holds_tensor(found) and all(_is_plain(value) for value in found.values()) else None


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
    return isinstance(node, Tensor) or (not isinstance(node, ATOMS) and attributes(node) is not None)


def _is_plain(node: Any) -> bool:
    if isinstance(node, dict):
        return all(_is_plain(child) for child in cast(dict[Any, Any], node).values())
    if isinstance(node, list | tuple):
        return all(_is_plain(child) for child in cast("list[Any] | tuple[Any, ...]", node))
    return isinstance(node, (*ATOMS, torch.dtype, torch.device)) or attributes(node) is not None


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """Build an object of this class with these attributes, even of a frozen class.

    The constructor is not called, because it may reject or convert its arguments.
    """
    node = (types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object).__new__(cls)
    for name, value in values.items():
        object.__setattr__(node, name, value)
    return node


def is_named(node: Any) -> bool:
    """True if the children of a node have names: in a mapping, a NamedTuple or a batch object."""
    # Asked of the class: an object that stands for text in a graph refuses to be read.
    return isinstance(node, Mapping) or hasattr(type(node), "_fields") or attributes(node) is not None


def names(node: Any) -> list[Any]:
    """The names of the children of a node for which `is_named` is True, in order.

    Example:
        >>> names({"b": 1, "a": 2})
        ['a', 'b']
    """
    if isinstance(node, Mapping):
        return sorted(cast("Mapping[Any, Any]", node), key=str)
    return list(node._fields) if hasattr(type(node), "_fields") else list(attributes(node) or {})


def children(node: Any) -> list[Any]:
    """The children of a mapping, list, tuple or batch object; an empty list for a leaf.

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
    return list((attributes(node) or {}).values())
