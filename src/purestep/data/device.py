"""Batches to the device of the state, ahead of time on CUDA."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import batch_objects, tensor_layout, tree
from ..errors import DataError
from ..precision import usable
from ..tree import leaves
from ..types import Batch, Device, TrainState, Tree

T = TypeVar("T")

_KEY = TrainState._fields.index("key")


def to_device(tree: T, like: Tree) -> T:
    """A batch on the device of ``like``, of the same classes; the very same object where nothing has to move. Or a
    state, whose key stays on the CPU.

    Tuples, lists, NamedTuples, dicts, other mappings (Hugging Face's BatchEncoding), objects with a ``to(device)``
    method, and without one dataclasses, attrs classes, namespaces and objects that hold tensors, in any nesting. Arrays
    of numbers become tensors. What else there is stays as it is. From pinned memory to CUDA the copy does not wait.

    Args:
        tree: a batch.
        like: a state, a tensor, a `torch.device` or its name.

    Raises:
        DataError: with the path of a leaf that cannot be moved.
        ConfigError: a name of no device of this machine.

    Example:
        >>> batch = {"x": torch.zeros(2), "names": ["a", "b"]}
        >>> to_device(batch, "cpu") is batch
        True
    """
    device = device_of(like)
    if type(tree) in (tuple, list) and all(type(leaf) is Tensor and leaf.device == device for leaf in cast(Any, tree)):
        return tree  # as nearly always on the CPU, where a small step is hardly longer than the walk
    try:
        return cast(T, _mapped(tree, lambda leaf: _moved(leaf, device), ""))
    except RecursionError as error:
        hint = "no dict or list that contains itself"
        raise DataError("nodes within nodes without end", where="batch", hint=hint) from error


def device_of(like: Tree) -> Device:
    """The device of a state (whose key is on the CPU wherever the rest is), a tensor, or a device's name.

    Raises:
        ConfigError: a name of no device of this machine.
    """
    if isinstance(like, torch.device):
        return like
    if isinstance(like, str):
        return usable(like)
    if isinstance(like, Tensor):
        return like.device
    if isinstance(like, TrainState):
        return like.step.device
    return tree.device(leaves(like))


def _moved(leaf: Any, device: Device) -> Any:
    leaf = _as_tensor(leaf)
    if isinstance(leaf, Tensor):
        if leaf.device.type == device.type and device.index in (None, leaf.device.index):
            return leaf
        return leaf.to(device, non_blocking=device.type == "cuda" and leaf.device.type == "cpu" and leaf.is_pinned())
    return leaf.to(device) if _moves_itself(leaf) else leaf


def _as_tensor(leaf: Any) -> Any:
    """An array of numbers as a tensor over the same memory; everything else as it is."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())


def _mapped(tree: Any, fn: Callable[[Any], Any], path: str) -> Any:
    """``fn`` of every leaf; a node none of whose children changed is returned itself."""
    if isinstance(tree, Tensor) or tree is None or isinstance(tree, (str, bytes, int, float, PackedSequence)):
        return _leaf(tree, fn, path)
    if isinstance(tree, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", tree)
        new = [_mapped(child, fn, f"{path}/{index}") for index, child in enumerate(items)]
        if isinstance(tree, TrainState):
            new[_KEY] = tree.key  # which the host reads
        if all(a is b for a, b in zip(new, items, strict=True)):
            return items
        return items._make(new) if hasattr(items, "_make") else type(items)(new)  # pyright: ignore  # a NamedTuple
    if isinstance(tree, Mapping):
        return _mapped_mapping(cast("Mapping[Any, Any]", tree), fn, path)
    held = None if _moves_itself(tree) else batch_objects.attributes(tree)
    if held is None:
        return _leaf(tree, fn, path)
    fresh = {name: _mapped(child, fn, f"{path}/{name}") for name, child in held.items()}
    if all(fresh[name] is child for name, child in held.items()):
        return tree
    return batch_objects.build(type(tree), fresh)


def _moves_itself(leaf: Any) -> bool:
    return not isinstance(leaf, type) and callable(getattr(leaf, "to", None))


def _mapped_mapping(tree: Mapping[Any, Any], fn: Callable[[Any], Any], path: str) -> Any:
    new = {key: _mapped(child, fn, f"{path}/{key}") for key, child in tree.items()}
    changed = {key: child for key, child in new.items() if child is not tree[key]}
    if not changed:
        return tree
    if type(tree) is dict:
        return new
    try:
        other: Any = copy.copy(tree)
        for key, child in changed.items():
            other[key] = child
    except TypeError:  # an immutable mapping
        return new
    return other


def _leaf(leaf: Any, fn: Callable[[Any], Any], path: str) -> Any:
    try:
        return fn(leaf)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        said = str(error).split("\n")[0]
        raise DataError(f"a {type(leaf).__name__} cannot be moved: {said}", where=f"batch{path}") from error


def prefetch(batches: Iterator[Batch], device: Device, *, depth: int = 2, name: str = "") -> Iterator[Batch]:
    """Batches on the device, on CUDA copied ahead of time from pinned memory on a stream of their own.

    The loader runs up to ``depth`` batches ahead of what was consumed. An error of the loader is raised where its
    batch would have come.

    Args:
        batches: as a `Feed` gives them.
        device: where to. On others than CUDA batches are moved as they come.
        depth: batches held ahead, >= 1.
        name: of the loader, for messages.

    Raises:
        DataError: with the path of a leaf that cannot be moved.

    Example:
        >>> list(prefetch(iter([torch.ones(1)]), torch.device("cpu")))
        [tensor([1.])]
    """
    if device.type != "cuda":
        return _named((to_device(batch, device) for batch in batches), name)
    return _named(_ahead(batches, device, depth), name)


def _named(batches: Iterator[Batch], name: str) -> Iterator[Batch]:
    """The batches; an error that names a place in one names the loader as well."""
    try:
        yield from batches
    except DataError as error:
        if not name or not error.where.startswith("batch"):
            raise
        raise DataError(error.what, where=f"{name}, {error.where}", hint=error.hint) from error


class _Copied(NamedTuple):
    batch: Batch
    event: torch.cuda.Event


def _ahead(batches: Iterator[Batch], device: Device, depth: int) -> Iterator[Batch]:
    stream = _stream(device)
    ready: deque[_Copied] = deque()
    failed: Exception | None = None
    more = True
    while more or ready:
        while more and len(ready) < depth:
            try:
                ready.append(_copied(next(batches), device, stream))
            except StopIteration:
                more = False
            except Exception as error:  # raised below, after the batches before it
                more, failed = False, error
        if ready:
            batch, event = ready.popleft()
            current = torch.cuda.current_stream(device)
            current.wait_event(event)
            # The allocator must not give this memory to the side stream again before the consumer's work is done.
            _mapped(batch, partial(_recorded, current), "")
            yield to_device(batch, device)  # what is neither tensor nor array could not be recorded: it moves here
    if failed is not None:
        raise failed


@functools.cache
def _stream(device: Device) -> torch.cuda.Stream:
    """One a device for all loaders: memory that one stream has given back, torch gives to no other."""
    return torch.cuda.Stream(device)


def _copied(batch: Batch, device: Device, stream: torch.cuda.Stream) -> _Copied:
    pinned = _mapped(batch, _pinned, "")
    with torch.cuda.stream(stream):
        moved = _mapped(pinned, lambda leaf: _moved(leaf, device) if _goes_ahead(leaf) else leaf, "")
        event = torch.cuda.Event()
        event.record(stream)
    return _Copied(moved, event)


def _pinned(leaf: Any) -> Any:
    leaf = _as_tensor(leaf)
    if not _goes_ahead(leaf) or leaf.device.type != "cpu" or leaf.is_pinned():
        return leaf
    # Memory that several numbers share (an expanded mask) cannot be filled.
    shared = any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True))
    return (leaf.contiguous() if shared else leaf).pin_memory()


def _goes_ahead(leaf: Any) -> bool:
    """Whether a leaf is dense: of others torch neither pins nor records the memory, and they move when they are due."""
    return isinstance(leaf, Tensor) and tensor_layout.is_dense(leaf)


def _recorded(stream: torch.cuda.Stream, leaf: Any) -> Any:
    if _goes_ahead(leaf) and leaf.is_cuda:
        leaf.record_stream(stream)
    return leaf
