"""Write the state and the batch of a step to one file, bit for bit, and read them to repeat the step elsewhere.

The file is a safetensors file. Its metadata contain a JSON text and the digest of this text. The JSON has the structure
of both trees, the memory layout and the digest of every tensor, and notes. Reading runs and imports nothing: dicts,
lists and tuples come back as such, NamedTuples of the state as those of a template, other objects as namespaces.
"""

from __future__ import annotations

import json
import zlib
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..errors import Corrupt, Mismatch, NotFound, StateError
from ..files import replacing, write_failed
from ..torch_ext import tensor_layout
from ..types import Tree

FORMAT = 2
_PLAIN = (bool, int, float, str)


class Incident(NamedTuple):
    """The contents of a file."""

    state: Tree
    batch: Any
    notes: dict[str, Any]


def write(path: Path | str, state: Tree, batch: Any, notes: Mapping[str, Any]) -> Path:
    """Write a state and a batch to one file, atomically.

    Args:
        path: the file.
        state: a tree of tensors.
        batch: dicts, lists, tuples, NamedTuples, dataclasses and other nodes (`tree.attributes`) of
            tensors, numeric arrays, numbers, text and None.
        notes: JSON values.

    Raises:
        StateError: the batch contains an object that cannot be stored; the message has its path.
        WriteFailed: the file could not be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    about = {
        "format": FORMAT,
        "state": [_stored(f"state/{place}", leaf, tensors) for place, leaf in tree.with_paths(state)],
        "batch": _node("batch", tree.dicts(batch), tensors),
        "notes": dict(notes),
    }
    text = json.dumps(about)
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"about": text, "crc32": str(zlib.crc32(text.encode()))})
        except Exception as error:  # safetensors reports a full disk with its own error class
            raise write_failed(path, error) from error
    return Path(path)


def read(path: Path | str, like: Tree, device: torch.device | str = "cpu") -> Incident:
    """Read a file of `write`.

    Args:
        path: the file.
        like: a state of the same structure, from ``program.init()``.
        device: the device for tensors that were not on the CPU.

    Raises:
        NotFound: the file does not exist.
        Corrupt: a digest differs.
        Mismatch: the state has another structure.
    """
    about, tensors = _opened(Path(path))

    def leaf(entry: dict[str, Any]) -> Any:
        return _loaded(entry, tensors, device, where=str(path))

    stored = {entry["path"].removeprefix("state/"): entry for entry in about["state"]}
    expected = {place: (list(found.shape), str(found.dtype)) for place, found in tree.with_paths(like)}
    found = {place: (entry["shape"], entry["dtype"]) for place, entry in stored.items()}
    if found != expected:
        place = next(place for place in {**expected, **found} if expected.get(place) != found.get(place))
        raise Mismatch(
            f"{place} is {found.get(place, 'missing')}, but {expected.get(place, 'missing')} in the program's state",
            where=str(path),
            hint="pass the program of that run",
        )
    state = tree.unflatten(tree.flatten(like)[1], [leaf(stored[place]) for place in expected])
    return Incident(state, _tree(about["batch"], leaf), about["notes"])


# --- the file ---------------------------------------------------------------------------------------------------------


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise NotFound("no such file", where=str(path), hint="pass the path in the error message")
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
        text = metadata["about"]
        about = json.loads(text)
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise Corrupt(f"the file cannot be read: {error}", where=str(path)) from error
    if metadata.get("crc32") != str(zlib.crc32(text.encode())):
        raise Corrupt("its metadata are damaged (their digest differs)", where=str(path))
    if about["format"] > FORMAT:
        raise Mismatch(f"format {about['format']}, but this version reads up to {FORMAT}", where=str(path))
    return about, tensors


def _stored(path: str, leaf: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
        raise StateError(
            f"a {leaf.layout} tensor on {leaf.device} cannot be stored", where=path, hint="call .to_dense()"
        )
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


def _loaded(entry: dict[str, Any], tensors: dict[str, Tensor], device: torch.device | str, *, where: str) -> Tensor:
    name, dtype = entry["name"], getattr(torch, entry["dtype"].removeprefix("torch."))
    if name not in tensors or zlib.crc32(tensors[name].numpy().data) != entry["crc32"]:
        raise Corrupt(f"{entry['path']} is damaged (its digest differs)", where=where)
    values = tensors[name].view(dtype).view(entry["shape"])
    target = "cpu" if entry["device"] == "cpu" else device
    return torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype, device=target).copy_(values)


# --- trees as JSON ----------------------------------------------------------------------------------------------------


def _node(path: str, node: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(node, Tensor):
        if not tensor_layout.is_dense(node):
            return _in_parts(path, node, tensors)
        return {"tensor": _stored(path, node, tensors)}
    if isinstance(node, np.ndarray) and node.dtype.kind in "biufc":
        return {"array": _stored(path, torch.as_tensor(node), tensors)}
    if node is None or type(node) in _PLAIN:
        return {"value": node}
    if isinstance(node, Mapping):
        pairs = cast("Mapping[Any, Any]", node).items()
        if all(type(key) in _PLAIN for key, _ in pairs):
            return {"dict": [[key, _node(f"{path}/{key}", child, tensors)] for key, child in pairs]}
    if isinstance(node, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", node)
        fields: Any = getattr(items, "_fields", None)
        children = [_node(f"{path}/{index}", child, tensors) for index, child in enumerate(items)]
        found: dict[str, Any] = {"list" if isinstance(node, list) else "tuple": children}
        return found if fields is None else {**found, "name": type(items).__name__, "fields": list(fields)}
    attributes = tree.attributes(node, where=path)
    if attributes is not None:
        return {"object": [[name, _node(f"{path}/{name}", child, tensors)] for name, child in attributes.items()]}
    kind = f"{type(node).__module__}.{type(node).__qualname__}"
    raise StateError(f"a {kind} cannot be stored", where=path, hint="pass tensors, numbers and text in dicts and lists")


def _in_parts(path: str, node: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    jagged: Any = node
    holes = node.layout is torch.jagged and (jagged.lengths() is not None or not node.is_contiguous())
    if node.is_quantized or holes:
        kind = "nested tensor with holes, or a transposed one," if holes else "quantized tensor"
        raise StateError(f"a {kind} cannot be stored", where=path, hint="call .contiguous(), or pass a dense tensor")
    layout = str(node.layout)[6:]
    parts = [_stored(path, part, tensors) for part in tensor_layout.dense_parts(node)]
    return {"layout": layout, "parts": parts, "shape": [] if node.is_nested else list(node.shape)}


def _of_parts(layout: str, parts: list[Tensor], shape: list[int]) -> Tensor:
    if layout == "strided":
        return torch.nested.as_nested_tensor(parts)
    if layout == "jagged":
        return torch.nested.nested_tensor_from_jagged(parts[0], parts[1])
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(parts[0], parts[1], shape, is_coalesced=True)
    return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], shape, layout=getattr(torch, layout))


def _tree(node: dict[str, Any], leaf: Any) -> Any:
    if "tensor" in node:
        return leaf(node["tensor"])
    if "array" in node:
        return leaf(node["array"]).numpy()
    if "layout" in node:
        return _of_parts(node["layout"], [leaf(part) for part in node["parts"]], node["shape"])
    if "object" in node:
        return SimpleNamespace(**{name: _tree(child, leaf) for name, child in node["object"]})
    if "dict" in node:
        return {key: _tree(child, leaf) for key, child in node["dict"]}
    if "list" in node:
        return [_tree(child, leaf) for child in node["list"]]
    if "tuple" in node:
        children = tuple(_tree(child, leaf) for child in node["tuple"])
        if "fields" not in node:
            return children
        kind = namedtuple(node["name"], node["fields"])  # pyright: ignore[reportUntypedNamedTuple]  # read from the file
        return kind(*children)
    return node["value"]
