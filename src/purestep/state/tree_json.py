"""Trees of tensors and plain values as JSON and bytes: for replay files, and for the other processes of a mesh.

Decoding runs and imports nothing, whoever has made the bytes: dicts, lists and tuples come back as such, NamedTuples as
tuples with the same names, other objects as namespaces. Tensors are dense.
"""

from __future__ import annotations

import zlib
from collections import namedtuple
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..errors import StateError
from ..torch_ext import tensor_layout

_PLAIN = (bool, int, float, str)


def encode(path: str, node: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Convert a tree to JSON values.

    Example:
        >>> decode(encode("batch", {"x": (torch.ones(2), 3)}, held := {}), held)
        {'x': (tensor([1., 1.]), 3)}

    Args:
        path: of the tree, for messages.
        node: dicts, lists, tuples, NamedTuples, dataclasses and other nodes (`tree.attributes`) of dense tensors,
            numeric arrays, numbers, text and None.
        tensors: gets the bytes of each tensor, on the CPU, by name.

    Raises:
        StateError: an object cannot be stored; the message has its path.
    """
    if isinstance(node, Tensor):
        return {"tensor": stored(path, node, tensors)}
    if isinstance(node, np.ndarray) and node.dtype.kind in "biufc":
        return {"array": stored(path, torch.as_tensor(node), tensors)}
    if isinstance(node, np.bool_ | np.integer | np.floating):
        node = node.item()
    if node is None or type(node) in _PLAIN:
        return {"value": node}
    if isinstance(node, Mapping):
        pairs = cast("Mapping[Any, Any]", node).items()
        if all(type(key) in _PLAIN for key, _ in pairs):
            return {"dict": [[key, encode(f"{path}/{key}", child, tensors)] for key, child in pairs]}
    if isinstance(node, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", node)
        fields: Any = getattr(items, "_fields", None)
        children = [encode(f"{path}/{index}", child, tensors) for index, child in enumerate(items)]
        found: dict[str, Any] = {"list" if isinstance(node, list) else "tuple": children}
        return found if fields is None else {**found, "name": type(items).__name__, "fields": list(fields)}
    attributes = tree.attributes(node, where=path)
    if attributes is not None:
        return {"object": [[name, encode(f"{path}/{name}", child, tensors)] for name, child in attributes.items()]}
    kind = f"{type(node).__module__}.{type(node).__qualname__}"
    raise StateError(f"a {kind} cannot be stored", where=path, hint="pass tensors, numbers and text in dicts and lists")


def stored(path: str, leaf: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The entry of a dense tensor, whose bytes ``tensors`` gets.

    Raises:
        StateError: the tensor is not dense, or on the meta device.
    """
    if not tensor_layout.is_dense(leaf) or leaf.is_meta:
        kind = "meta" if leaf.is_meta else tensor_layout.layout_name(leaf)
        raise StateError(f"a {kind} tensor cannot be stored", where=path, hint="pass a dense tensor")
    name = f"{len(tensors)}:{path}"  # a key of a dict may contain a slash
    tensors[name] = tensor_layout.as_bytes(leaf).to("cpu", copy=True)  # as bytes, because the format lacks some dtypes
    return {
        "path": path,
        "name": name,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "stride": list(torch.empty_like(leaf, device="meta").stride()),  # the choice of kernels depends on it
        "device": leaf.device.type,
        "crc32": zlib.crc32(tensors[name].numpy().data),
    }


def decode(node: Any, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> Any:
    """The inverse of `encode`.

    Args:
        node: its result.
        tensors: the bytes of each tensor, by name.
        device: the device for tensors that were not on the CPU.

    Raises:
        ValueError: the values are not those of `encode`, or a tensor is damaged.
    """
    try:
        return _decoded(node, tensors, device)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError) as error:
        raise ValueError(f"not a stored tree: {type(error).__name__}: {error}") from error


def loaded(entry: dict[str, Any], tensors: Mapping[str, Tensor], device: torch.device | str) -> Tensor:
    """The tensor of an entry of `stored`, in new memory.

    Raises:
        ValueError: it is damaged.
    """
    name = entry["name"]
    if name not in tensors or zlib.crc32(tensors[name].numpy().data) != entry["crc32"]:
        raise ValueError(f"{entry['path']} is damaged (its digest differs)")
    values = tensor_layout.from_bytes(tensors[name], entry["dtype"], entry["shape"])
    layout = torch.empty_strided(values.shape, entry["stride"], device="meta")
    if tensor_layout.extent(layout) != values.numel() or tensor_layout.overlaps(layout):
        raise ValueError(f"{entry['path']}: strides {entry['stride']} of shape {entry['shape']}")
    target = "cpu" if entry["device"] == "cpu" else device
    return torch.empty_strided(values.shape, entry["stride"], dtype=values.dtype, device=target).copy_(values)


def _decoded(node: dict[str, Any], tensors: Mapping[str, Tensor], device: torch.device | str) -> Any:
    def below(child: Any) -> Any:
        return _decoded(child, tensors, device)

    if "tensor" in node:
        return loaded(node["tensor"], tensors, device)
    if "array" in node:
        return loaded(node["array"], tensors, device).numpy()
    if "object" in node:
        return SimpleNamespace(**{name: below(child) for name, child in node["object"]})
    if "dict" in node:
        return {key: below(child) for key, child in node["dict"]}
    if "list" in node:
        return [below(child) for child in node["list"]]
    if "tuple" in node:
        children = tuple(below(child) for child in node["tuple"])
        if "fields" not in node:
            return children
        kind = namedtuple(node["name"], node["fields"])  # pyright: ignore[reportUntypedNamedTuple]  # read from the file
        return kind(*children)
    return node["value"]
