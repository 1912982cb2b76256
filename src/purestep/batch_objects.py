"""Objects that are batches: dataclasses, attrs classes, namespaces, and others that hold tensors in attributes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

ATOMS = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None), type)
"""What has nothing inside."""

KNOWN: dict[type, None] = {}
"""Classes whose objects are records, whatever they hold: those that `tree` has made nodes."""


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
    if kind in KNOWN:
        return _attributes(node)
    if isinstance(node, (*ATOMS, Mapping, tuple, list, torch.nn.Module)) or kind.__module__.startswith("torch."):
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
    return isinstance(node, Tensor) or (not isinstance(node, ATOMS) and record(node) is not None)


def _is_plain(node: Any) -> bool:
    if isinstance(node, dict):
        return all(_is_plain(child) for child in cast(dict[Any, Any], node).values())
    if isinstance(node, list | tuple):
        return all(_is_plain(child) for child in cast("list[Any] | tuple[Any, ...]", node))
    return isinstance(node, (*ATOMS, torch.dtype, torch.device)) or record(node) is not None


def made(cls: type, held: Mapping[str, Any]) -> Any:
    """A record of that class with these attributes, frozen or not. Not by its constructor, which may check what it is
    given, or make something of it."""
    node = (types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object).__new__(cls)
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
