"""Write the state and the batch of a step to one file, bit for bit, and read them to repeat the step elsewhere.

The file is a safetensors file. Its metadata contain a JSON text and the digest of this text. The JSON has the structure
of both trees (`tree_json`), the memory layout and the digest of every tensor, and notes. Reading runs and imports
nothing: dicts, lists and tuples come back as such, NamedTuples of the state as those of a template, other objects as
namespaces.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import Corrupt, Mismatch, NotFound
from ..files import replacing, write_failed
from ..state import tree_json
from ..types import Tree

FORMAT = 2


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
        batch: dicts, lists, tuples, NamedTuples, dataclasses and other nodes (`tree.attributes`) of dense tensors,
            numeric arrays, numbers, text and None.
        notes: JSON values.

    Raises:
        StateError: the batch contains an object that cannot be stored; the message has its path.
        WriteFailed: the file could not be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    about = {
        "format": FORMAT,
        "state": [tree_json.stored(f"state/{place}", leaf, tensors) for place, leaf in tree.with_paths(state)],
        "batch": tree_json.encode("batch", tree.dicts(batch), tensors),
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
        Corrupt: a digest differs, or an entry does not fit its bytes.
        Mismatch: the state has another structure.
    """
    about, tensors = _opened(Path(path))
    try:
        stored = {entry["path"].removeprefix("state/"): entry for entry in about["state"]}
        found = {place: (entry["shape"], entry["dtype"]) for place, entry in stored.items()}
        batch, notes = tree_json.decode(about["batch"], tensors, device), dict(about["notes"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"the file cannot be read: {error}", where=str(path)) from error
    expected = {place: (list(leaf.shape), str(leaf.dtype)) for place, leaf in tree.with_paths(like)}
    if found != expected:
        place = next(place for place in {**expected, **found} if expected.get(place) != found.get(place))
        raise Mismatch(
            f"{place} is {found.get(place, 'missing')}, but {expected.get(place, 'missing')} in the program's state",
            where=str(path),
            hint="pass the program of that run",
        )
    try:
        leaves = [tree_json.loaded(stored[place], tensors, device) for place in expected]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Corrupt(str(error), where=str(path)) from error
    return Incident(tree.unflatten(tree.flatten(like)[1], leaves), batch, notes)


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
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise Corrupt("the file is not a replay file", where=str(path))
    if about["format"] > FORMAT:
        raise Mismatch(f"format {about['format']}, but this version reads up to {FORMAT}", where=str(path))
    return about, tensors
