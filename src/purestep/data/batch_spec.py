"""Check each batch against the first one of the run, before it reaches a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from .. import tree as trees
from ..errors import DataError
from ..torch_ext import tensor_layout

Spec: TypeAlias = Any
"""Nested tuples that describe the structure, dtypes and ranks of a batch. Sizes are not part of it."""


class _Leaf(NamedTuple):
    kind: str  # "float32 tensor of rank 2", "str", "None"
    moves: bool = False  # an object with a `to` method and unknown contents


class _Node(NamedTuple):
    kind: str  # "tuple", "dict"
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


_ALIKE = "make all batches alike except for their sizes: check the dataset and its collate_fn"


def check_batch(batch: Any, first: Spec = None, *, where: str = "batch") -> Spec:
    """Check a batch, and compare it with the first one of the run.

    Example:
        >>> first = check_batch((torch.zeros(4, 2), torch.zeros(4)))
        >>> _ = check_batch((torch.zeros(3, 2), torch.zeros(3)), first)
        >>> check_batch((torch.zeros(3, 2), None), first, where="train, epoch 1, batch 5")
        Traceback (most recent call last):
        purestep.errors.DataError: train, epoch 1, batch 5: batch/1 is None; batch 1 had a float32 tensor of rank 1
        (cure: make all batches alike except for ...)

    Structure, kinds of leaves, dtypes and ranks must be equal. Sizes may differ, and so may the length of a list whose
    entries are all alike (one entry per example). A list of text is one leaf.

    Args:
        batch: a batch, already on its device.
        first: the result of this function for the first batch; None for the first batch.
        where: the name of the loader, the epoch and the batch, for the error.

    Returns:
        The spec of this batch.

    Raises:
        DataError: the batch has no tensor, tensors on several devices or on meta, or another structure, dtype or rank
            than the first. The message has the path and the value of the first batch.
    """
    devices: dict[torch.device, str] = {}
    try:
        spec = _spec(batch, "batch", devices)
    except DataError as error:  # of an object of an unknown class
        raise DataError(f"{error.where} {error.what}", where=where, hint=error.hint) from None
    if first is not None and not _alike(spec, first, is_batch=True):
        raise DataError(_difference(spec, first, "batch"), where=where, hint=_ALIKE)
    if not devices and not _moves(spec):
        raise DataError(
            f"batch is {_article(spec)} without a tensor",
            where=where,
            hint="return tensors, or tuples, lists, dicts and objects of tensors from the loader",
        )
    if len(devices) > 1:
        text = ", ".join(f"{path} on {device}" for device, path in devices.items())
        hint = "call ps.to_device(batch, state)"
        raise DataError(f"tensors on {len(devices)} devices: {text}", where=where, hint=hint)
    if devices and next(iter(devices)).type == "meta":
        what = f"{next(iter(devices.values()))} is on the meta device: it has no values"
        raise DataError(what, where=where, hint='create tensors outside of torch.device("meta") in the loader')
    return spec


class BatchCheck:
    """Checks that a training batch has the structure of the first one, before it reaches a step."""

    def __init__(self) -> None:
        self._first: Spec = None
        self._last: tuple[trees.TreeDef, list[Any]] | None = None

    def __call__(self, batch: Any, epoch: int, index: int) -> None:
        """Check a batch of an epoch, both counted from 0.

        Raises:
            DataError: see `check_batch`.
        """
        leaves, treedef = trees.flatten(batch)
        if self._last is not None and self._last[0] == treedef and _are(leaves, self._last[1]):
            return
        spec = check_batch(batch, self._first, where=f"train, epoch {epoch + 1}, batch {index + 1}")
        self._first = self._first or spec
        self._last = treedef, [_kind(leaf) for leaf in leaves]


def _are(leaves: list[Any], kinds: list[Any]) -> bool:
    """True if the leaves are of these kinds. Runs in every step, so tensors are compared without a call of `_kind`."""
    for leaf, kind in zip(leaves, kinds, strict=True):
        if type(leaf) is not Tensor:
            if _kind(leaf) != kind:
                return False
        elif type(kind) is not tuple or (leaf.dtype, leaf.dim(), leaf.device, leaf.layout) != kind:
            return False
    return True


def _kind(leaf: Any) -> Any:
    """Return what must not change from batch to batch. A mapping or record that is a leaf is never equal."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.device, leaf.layout
    return object() if isinstance(leaf, Mapping) or trees.attributes(leaf) is not None else type(leaf)


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
    attributes = trees.attributes(tree, where=path)
    if attributes is not None:
        parts = tuple(_spec(child, f"{path}/{name}", devices) for name, child in attributes.items())
        return _Node(type(tree).__name__, tuple(attributes), parts)
    device = getattr(tree, "device", None)
    if isinstance(device, torch.device):  # a batch of graphs, for example: it contains tensors
        devices.setdefault(device, path)
    moves = not isinstance(tree, type) and callable(getattr(tree, "to", None))
    return _Leaf("None" if tree is None else type(tree).__name__, moves)


def _moves(spec: Spec) -> bool:
    return any(map(_moves, spec.children)) if isinstance(spec, _Node) else spec.moves


def _alike(found: Spec, first: Spec, *, is_batch: bool = False) -> bool:
    """True if two specs are equal except for the length of lists whose entries are all alike.

    The length of a batch that is a tuple with tensors must be equal: its input and its target may be alike.
    """
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
    """Describe the first place where two specs differ."""
    if isinstance(found, _Node) and isinstance(first, _Node) and found.kind == first.kind:
        if found.keys == first.keys:
            pairs = zip(found.keys, found.children, first.children, strict=True)
            key, ours, theirs = next(pair for pair in pairs if not _alike(pair[1], pair[2]))
            return _difference(ours, theirs, f"{path}/{key}")
        if isinstance(next(iter(found.keys or first.keys)), int):
            return f"{path} has {len(found.keys)} items; batch 1 had {len(first.keys)}"
        gone, new = [k for k in first.keys if k not in found.keys], [k for k in found.keys if k not in first.keys]
        changes = [f"misses {gone}" if gone else "", f"has the new {new}" if new else ""]
        return f"{path} {' and '.join(part for part in changes if part)}; batch 1 had {list(first.keys)}"
    return f"{path} is {_article(found)}; batch 1 had {_article(first)}"


def _article(spec: Spec) -> str:
    if isinstance(spec, _Node):
        return f"a {spec.kind} of {len(spec.keys)}"
    if spec.kind == "None":
        return "None"
    return f"{'an' if spec.kind[0] in 'aeiou' else 'a'} {spec.kind}"
