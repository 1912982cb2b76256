"""A batch that is not like the first one: found before it reaches a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from .. import batch_objects, tensor_layout
from ..errors import DataError

Spec: TypeAlias = Any
"""Nested tuples: what every batch of a run has in common with the first."""


class BatchSpec(NamedTuple):
    """What a batch is made of: structure, dtypes and ranks. Sizes may differ from batch to batch."""

    spec: Spec


class _Leaf(NamedTuple):
    kind: str  # "float32 tensor of rank 2", "str", "None"
    moves: bool = False  # an object with a `to` method, of which nobody knows what is in it


class _Node(NamedTuple):
    kind: str  # "tuple", "dict"
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


_ALIKE = "a loader whose batches are alike but for their sizes: see its dataset and its collate_fn"


def check_batch(batch: Any, first: BatchSpec | None = None, *, where: str = "batch") -> BatchSpec:
    """Check a batch by itself and against the first one of the run.

    Structure, kinds of leaves, dtypes and ranks must be the same; sizes may differ, and so may the length of a list
    whose entries are all alike, as one entry an example is. Lists of text are one leaf.

    Args:
        batch: already on its device.
        first: what this function returned for the first batch; None for the first.
        where: the loader's name, the epoch and the batch.

    Returns:
        What this batch is made of.

    Raises:
        DataError: with the path and what the first batch had there: no tensor at all, tensors on two devices or on
            meta, another structure, dtype or rank.

    Example:
        >>> first = check_batch((torch.zeros(4, 2), torch.zeros(4)))
        >>> _ = check_batch((torch.zeros(3, 2), torch.zeros(3)), first)
        >>> check_batch((torch.zeros(3, 2), None), first, where="train, epoch 1, batch 5")
        Traceback (most recent call last):
        purestep.errors.DataError: train, epoch 1, batch 5: batch/1 is None; batch 1 had a float32 tensor of rank 1
        (cure: a loader whose batches are alike ...)
    """
    devices: dict[torch.device, str] = {}
    spec = BatchSpec(_spec(batch, "batch", devices))
    if first is not None and not _alike(spec.spec, first.spec, is_batch=True):
        raise DataError(_difference(spec.spec, first.spec, "batch"), where=where, hint=_ALIKE)
    if not devices and not _moves(spec.spec):
        raise DataError(
            f"{_text(spec.spec, 'batch')} without a tensor in it",
            where=where,
            hint="a loader gives tensors, or tuples, lists, dicts and objects of them",
        )
    if len(devices) > 1:
        told = ", ".join(f"{path} on {device}" for device, path in devices.items())
        raise DataError(f"tensors on {len(devices)} devices: {told}", where=where, hint="ps.to_device(batch, state)")
    if devices and next(iter(devices)).type == "meta":
        raise DataError(f"{next(iter(devices.values()))} is on the meta device: it has no values", where=where)
    return spec


def _spec(tree: Any, path: str, devices: dict[torch.device, str]) -> Spec:
    if isinstance(tree, Tensor):
        if tree.device not in devices:
            devices[tree.device] = path
        kind = " ".join(filter(None, (str(tree.dtype)[6:], tensor_layout.layout_name(tree))))
        return _Leaf(f"{kind} tensor of rank {tree.dim()}")
    if isinstance(tree, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", tree)
        if items and all(isinstance(item, str) for item in items):
            return _Leaf(f"{type(items).__name__} of text")
        children = [_spec(child, f"{path}/{index}", devices) for index, child in enumerate(items)]
        return _Node(type(items).__name__, tuple(range(len(children))), tuple(children))
    if isinstance(tree, Mapping):
        mapping = cast("Mapping[Any, Any]", tree)
        keys = tuple(sorted(mapping, key=str))
        return _Node(type(tree).__name__, keys, tuple(_spec(mapping[key], f"{path}/{key}", devices) for key in keys))
    if isinstance(tree, np.ndarray):
        return _Leaf(f"{tree.dtype} array of rank {tree.ndim}")
    held = batch_objects.attributes(tree)
    if held is not None:
        parts = tuple(_spec(child, f"{path}/{name}", devices) for name, child in held.items())
        return _Node(type(tree).__name__, tuple(held), parts)
    device = getattr(tree, "device", None)
    if isinstance(device, torch.device):  # a batch of graphs and its like: tensors inside
        devices.setdefault(device, path)
    moves = not isinstance(tree, type) and callable(getattr(tree, "to", None))
    return _Leaf("None" if tree is None else type(tree).__name__, moves)


def _moves(spec: Spec) -> bool:
    return any(map(_moves, spec.children)) if isinstance(spec, _Node) else spec.moves


def _alike(found: Spec, first: Spec, *, is_batch: bool = False) -> bool:
    """Whether two specs agree but for the length of lists whose entries are all alike. A batch that is a tuple of
    tensors is none of these: an input and a target may look alike."""
    if found == first:
        return True
    if not isinstance(found, _Node) or not isinstance(first, _Node) or found.kind != first.kind:
        return False
    if found.keys == first.keys:
        return all(map(_alike, found.children, first.children))
    entries = found.children + first.children
    columns = is_batch and found.kind == "tuple" and any(isinstance(entry, _Leaf) for entry in entries)
    return found.kind in ("list", "tuple") and not columns and all(_alike(entry, entries[0]) for entry in entries)


def _difference(found: Spec, first: Spec, path: str) -> str:
    """The first place where two specs differ, in words."""
    if isinstance(found, _Node) and isinstance(first, _Node) and found.kind == first.kind:
        if found.keys == first.keys:
            pairs = zip(found.keys, found.children, first.children, strict=True)
            key, ours, theirs = next(pair for pair in pairs if not _alike(pair[1], pair[2]))
            return _difference(ours, theirs, f"{path}/{key}")
        if isinstance(next(iter(found.keys or first.keys)), int):
            return f"{path} has {len(found.keys)} items; batch 1 had {len(first.keys)}"
        gone, new = [k for k in first.keys if k not in found.keys], [k for k in found.keys if k not in first.keys]
        told = [f"misses {gone}" if gone else "", f"has the new {new}" if new else ""]
        return f"{path} {' and '.join(part for part in told if part)}; batch 1 had {list(first.keys)}"
    return f"{_text(found, path)}; batch 1 had {_article(first)}"


def _text(spec: Spec, path: str) -> str:
    return f"{path} is {_article(spec)}"


def _article(spec: Spec) -> str:
    if isinstance(spec, _Node):
        return f"a {spec.kind} of {len(spec.keys)}"
    if spec.kind == "None":
        return "None"
    return f"{'an' if spec.kind[0] in 'aeiou' else 'a'} {spec.kind}"
