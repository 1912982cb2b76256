"""Move batches to the device of the state, on CUDA ahead of time."""

from __future__ import annotations

import copy
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import tree as trees
from ..errors import DataError
from ..state import usable_device
from ..torch_ext import tensor_layout
from ..types import Batch, Device, TrainState, Tree

T = TypeVar("T")

_KEY = TrainState._fields.index("key")


def to_device(tree: T, like: Tree) -> T:
    """Move a batch, or a state, to the device of ``like``. Returns the same object if nothing has to move.

    Example:
        >>> batch = {"x": torch.zeros(2), "names": ["a", "b"]}
        >>> to_device(batch, "cpu") is batch
        True

    Supports, in any nesting, tuples, lists, NamedTuples, dicts, other mappings (Hugging Face's BatchEncoding), objects
    with a ``to(device)`` method, dataclasses, attrs classes, namespaces and objects that hold tensors, and keeps their
    classes. Numeric arrays become tensors; other leaves are not changed. The key of a state stays on the CPU. A copy
    from pinned memory to CUDA is asynchronous.

    Args:
        tree: a batch or a state.
        like: a state, a tensor, a `torch.device` or its name.

    Raises:
        DataError: a leaf cannot be moved; the message has its path.
        ConfigError: this machine has no device with this name.
    """
    device = device_of(like)
    if type(tree) in (tuple, list) and all(type(leaf) is Tensor and leaf.device == device for leaf in cast(Any, tree)):
        return tree  # the usual case on the CPU; a small step takes hardly longer than a walk over the tree
    try:
        return cast(T, _mapped(tree, lambda leaf: _moved(leaf, device), ""))
    except RecursionError as error:
        hint = "pass no dict or list that contains itself"
        raise DataError("the batch is nested too deeply", where="batch", hint=hint) from error


def device_of(like: Tree) -> Device:
    """The device of a state (except its key, which is on the CPU), of a tensor, or with this name.

    Raises:
        ConfigError: this machine has no device with this name.
    """
    if isinstance(like, torch.device):
        return like
    if isinstance(like, str):
        return usable_device(like)
    if isinstance(like, Tensor):
        return like.device
    if isinstance(like, TrainState):
        return like.step.device
    return trees.device(trees.leaves(like))


def _moved(leaf: Any, device: Device) -> Any:
    leaf = _as_tensor(leaf)
    if isinstance(leaf, Tensor):
        if leaf.device.type == device.type and device.index in (None, leaf.device.index):
            return leaf
        return leaf.to(device, non_blocking=device.type == "cuda" and leaf.device.type == "cpu" and leaf.is_pinned())
    return leaf.to(device) if _moves_itself(leaf) else leaf


def _as_tensor(leaf: Any) -> Any:
    """Convert a numeric array to a tensor over the same memory. Other leaves are returned unchanged."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())


def _mapped(tree: Any, fn: Callable[[Any], Any], path: str) -> Any:
    """Apply ``fn`` to every leaf. A node whose children did not change is returned itself."""
    if isinstance(tree, Tensor) or tree is None or isinstance(tree, (str, bytes, int, float, PackedSequence)):
        return _leaf(tree, fn, path)
    if isinstance(tree, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", tree)
        new = [_mapped(child, fn, f"{path}/{index}") for index, child in enumerate(items)]
        if isinstance(tree, TrainState):
            new[_KEY] = tree.key  # the host reads it
        if all(a is b for a, b in zip(new, items, strict=True)):
            return items
        return items._make(new) if hasattr(items, "_make") else type(items)(new)  # pyright: ignore  # a NamedTuple
    if isinstance(tree, Mapping):
        return _mapped_mapping(cast("Mapping[Any, Any]", tree), fn, path)
    values = None if _moves_itself(tree) else trees.attributes(tree, where=f"batch{path}")
    if values is None:
        return _leaf(tree, fn, path)
    new = {name: _mapped(child, fn, f"{path}/{name}") for name, child in values.items()}
    if all(new[name] is child for name, child in values.items()):
        return tree
    return trees.build(type(tree), new)


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
        reason = str(error).split("\n")[0]
        hint = "make a dict of its tensors in the loader's collate_fn"
        raise DataError(
            f"a {type(leaf).__name__} cannot be moved: {reason}", where=f"batch{path}", hint=hint
        ) from error


class Prefetched(Iterator[Batch]):
    """The batches of an iterator on a device. On CUDA they are copied ahead, from pinned memory on a side stream.

    Example:
        >>> letters = Prefetched(iter("ab"), torch.device("cpu"))
        >>> letters.more(), list(letters), letters.more()
        (True, ['a', 'b'], False)

    On CUDA the loader runs up to ``depth`` batches ahead. An error of the loader is raised in place of its batch.

    Args:
        batches: the batches of a `Feed`.
        device: the target. On other devices than CUDA each batch is moved when it is requested.
        depth: the number of batches to copy ahead, >= 1.
        name: the name of the loader, for messages.
        waited: called with the seconds that each batch took to load.

    Raises:
        DataError: from the iterator: a leaf cannot be moved; the message has its path.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        device: Device,
        *,
        depth: int = 2,
        name: str = "",
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._batches = batches
        self._device = device
        self._depth = depth if device.type == "cuda" else 1
        self._name = name
        self._waited = waited
        self._ready: deque[_Copied] = deque()
        self._failed: Exception | None = None
        self._has_ended = False

    def __next__(self) -> Batch:
        self._fill(self._depth)
        if self._ready:
            return self._arrived(*self._ready.popleft())
        if self._failed is None:
            raise StopIteration
        try:
            raise self._failed
        finally:
            self._failed = None  # its traceback holds this object

    def more(self) -> bool:
        """True if there is another batch, or an error in its place."""
        self._fill(1)
        return bool(self._ready) or self._failed is not None

    def close(self) -> None:
        """Close the source."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def _fill(self, count: int) -> None:
        while not self._has_ended and len(self._ready) < count:
            try:
                self._ready.append(self._sent(self._loaded()))
            except StopIteration:
                self._has_ended = True
            except Exception as error:  # raised after the batches before: a run that ends there does not need it
                self._has_ended, self._failed = True, error

    def _loaded(self) -> Batch:
        start = time.monotonic()
        batch = next(self._batches)
        self._waited(time.monotonic() - start)
        return batch

    def _sent(self, batch: Batch) -> _Copied:
        try:
            if self._device.type == "cuda":
                return _copied(batch, self._device, _stream(self._device))
            return _Copied(to_device(batch, self._device), None)
        except DataError as error:
            raise self._named(error) from error

    def _arrived(self, batch: Batch, event: torch.cuda.Event | None) -> Batch:
        if event is None:
            return batch
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        # The allocator must not reuse this memory on the side stream before the consumer has finished.
        _mapped(batch, partial(_recorded, current), "")
        try:
            return to_device(batch, self._device)  # other leaves than tensors and arrays could not be recorded
        except DataError as error:
            raise self._named(error) from error

    def _named(self, error: DataError) -> DataError:
        """The error with the name of the loader before its path."""
        where = f"{self._name}, {error.where}" if self._name else error.where
        return DataError(error.what, where=where, hint=error.hint)


class _Copied(NamedTuple):
    batch: Batch
    event: torch.cuda.Event | None  # None: nothing was copied ahead


@functools.cache
def _stream(device: Device) -> torch.cuda.Stream:
    """One stream per device, for all loaders: torch does not reuse the memory of one stream on another."""
    return torch.cuda.Stream(device)


def _copied(batch: Batch, device: Device, stream: torch.cuda.Stream) -> _Copied:
    if type(batch) in (tuple, list) and all(type(leaf) is Tensor and leaf.device == device for leaf in batch):
        return _Copied(batch, None)
    pinned = _mapped(batch, _pinned, "")
    with torch.cuda.stream(stream):
        moved = _mapped(pinned, lambda leaf: _moved(leaf, device) if _is_copied_ahead(leaf) else leaf, "")
        event = torch.cuda.Event()
        event.record(stream)
    return _Copied(moved, event)


def _pinned(leaf: Any) -> Any:
    leaf = _as_tensor(leaf)
    if not _is_copied_ahead(leaf) or leaf.device.type != "cpu" or leaf.is_pinned():
        return leaf
    # An expanded tensor, whose elements share memory, cannot be filled.
    shared = any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True))
    return (leaf.contiguous() if shared else leaf).pin_memory()


def _is_copied_ahead(leaf: Any) -> bool:
    """True for a dense tensor. torch can neither pin nor record the memory of other tensors, so they move later."""
    return isinstance(leaf, Tensor) and tensor_layout.is_dense(leaf)


def _recorded(stream: torch.cuda.Stream, leaf: Any) -> Any:
    if _is_copied_ahead(leaf) and leaf.is_cuda:
        leaf.record_stream(stream)
    return leaf
