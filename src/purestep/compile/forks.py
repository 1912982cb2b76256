"""A compiled step that leaves its state as it was: the graph of a donated one, on a copy of the state's few buffers.

The state that comes out is a plain TrainState of views of those buffers. As long as it lives, the step knows them by
its key, and copies them whole next time; a state of other tensors is packed leaf by leaf. On the CPU the copy goes into
the memory of the state before, once nobody holds any of it: pages that are new cost more than the copy.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import tree
from ..types import TrainState
from .live import Host, Store

_FEW = 4  # leaves: as many views of one buffer are made as fast one by one as by one call
_FIELDS = slice(TrainState._fields.index("key"))  # all but the key, which is the last


class _Run(NamedTuple):
    """Leaves of one shape that lie at equal distances in a buffer."""

    buffer: int
    shape: tuple[Any, ...]  # of one leaf; of several, with their number in front
    stride: tuple[Any, ...]
    offset: Any
    leaves: tuple[int, ...]  # their positions


class _Views(NamedTuple):
    """How the leaves that users see lie in the buffers of stores of one structure."""

    treedef: tree.TreeDef
    key: int  # which leaf is the key
    runs: tuple[_Run, ...]
    frozen: tuple[int, ...]  # buffers that no step writes; behind the runs, each is a leaf as it is
    ordered: Callable[[list[Tensor]], Any]  # from the order of runs and frozen ones to that of the leaves
    places: tuple[tuple[int, int], ...]  # per leaf: a buffer and bytes from its start
    nodes: tuple[tuple[Any, ...], ...]  # where the state has dicts and lists, which can be changed

    def of(self, buffers: list[Tensor]) -> list[Tensor]:
        """The leaves, without the key."""
        made: list[Tensor] = []
        for run in self.runs:
            found = buffers[run.buffer].as_strided(run.shape, run.stride, run.offset)
            if len(run.leaves) == 1:
                made.append(found)
            else:
                made += found.unbind()
        made += [buffers[index] for index in self.frozen]
        return list(self.ordered(made))

    def state(self, leaves: list[Tensor], key: Tensor) -> TrainState:
        """The state of these leaves."""
        return tree.unflatten(self.treedef, [*leaves[: self.key], key, *leaves[self.key :]])

    def contents(self, state: TrainState) -> list[tuple[Any, list[Any]]]:
        """The dicts and lists of a state, and what is in them."""
        found = [functools.reduce(operator.getitem, path, cast(Any, state)) for path in self.nodes]
        return [(node, _content(node)) for node in found]


class _Handed(NamedTuple):
    """What is known of a state that was handed out. It must not hold the key, by which it is found."""

    store: Store  # without the state
    left: int | None
    views: _Views
    leaves: list[Tensor]  # without the key
    fields: tuple[Any, ...]  # without the key
    contents: list[tuple[Any, list[Any]]]
    versions: list[int]

    def is_still(self, state: TrainState) -> bool:
        """Whether the state is what was handed out: of the same tensors, none of which was written to since."""
        same = _are(state[_FIELDS], self.fields) and all(_are(_content(node), held) for node, held in self.contents)
        if not same or _versions(self.store) != self.versions:
            return False
        # `tensor.data = ...` is no write; it has the tensor lie elsewhere.
        starts = [buffer.data_ptr() for buffer in self.store.buffers]
        expected = [starts[buffer] + offset for buffer, offset in self.views.places]
        return [leaf.data_ptr() for leaf in self.leaves] == expected


class Forks:
    """The states that a step has handed out."""

    def __init__(self) -> None:
        self._views: dict[object, _Views | None] = {}
        self._handed: Any = WeakIdKeyDictionary()
        self._spare: Store | None = None  # of the state that went in last, which most callers drop then

    def of_live(self, store: Store) -> Store | None:
        """A store in memory of its own of a live state, which stays as it is; None where that cannot be told."""
        views = self._views_of(store)
        if views is None:
            return None
        return _forked(store, views, store.named.key, store.hosts[0].left, None)

    def of(self, state: TrainState) -> Store | None:
        """The same of a state that was handed out; None of any other."""
        key: Any = state.key
        found: _Handed | None = self._handed.get(key) if isinstance(key, Tensor) else None
        if found is None or not found.is_still(state):
            return None
        spare, self._spare = self._spare, found.store  # at once: another thread may call the step as well
        return _forked(found.store, found.views, state.key, found.left, spare)

    def hand_out(self, store: Store) -> TrainState:
        """The state of a store that nobody else has, as a plain TrainState."""
        state: TrainState = store.named
        views = self._views_of(store)
        if views is None:
            return state
        leaves = store.leaves
        if leaves is None:  # a buffer that is a leaf itself would not tell who holds it
            leaves = views.of(store.buffers)
            state = views.state(leaves, state.key)
        bare = store.elsewhere(store.buffers, None, [])
        with suppress(RuntimeError):  # tensors of inference mode do not count their writes
            known = state[_FIELDS], views.contents(state), _versions(store)
            self._handed[state.key] = _Handed(bare, store.hosts[0].left, views, leaves, *known)
        return state

    def _views_of(self, store: Store) -> _Views | None:
        known = store.slots.identity
        if known not in self._views:
            self._views[known] = _views(store)
        return self._views[known]


def _are(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _content(node: Any) -> list[Any]:
    return [*node, *node.values()] if isinstance(node, dict) else list(node)


def _versions(store: Store) -> list[int]:
    """How often the buffers were written to, their views included."""
    return [buffer._version for buffer in store.buffers]


# --- copies -----------------------------------------------------------------------------------------------------------


def _forked(store: Store, views: _Views, key: Tensor, left: int | None, spare: Store | None) -> Store:
    buffers = list(store.buffers)
    own = [index for index in range(len(buffers)) if index not in views.frozen]
    if spare is not None and spare.slots is store.slots and _is_free(spare, own):
        kept = [spare.buffers[index] for index in own]
        _torch._foreach_copy_(kept, [buffers[index] for index in own])
    else:
        kept = [buffers[index].clone() for index in own]
    for index, buffer in zip(own, kept, strict=True):
        buffers[index] = buffer
    leaves = views.of(buffers)
    state = views.state(leaves, key.clone())
    found = store.elsewhere(buffers, state, [Host(state, left)])
    found.leaves = leaves
    return found


def _is_free(spare: Store, own: list[int]) -> bool:
    """Whether nobody but the store holds its memory. No leaf is a buffer itself, so that each one counts as a holder,
    as do its views, arrays and graphs."""
    if spare.device.type != "cpu" or _holders is None:
        return False  # CUDA's allocator keeps what is freed
    return all(_held(spare.buffers[index]) == _alone() for index in own)


_torch: Any = torch  # no public name of it copies many tensors at once, or counts the holders of a memory
_holders: Callable[[int], int] | None = getattr(_torch._C, "_storage_Use_Count", None)


def _held(tensor: Any) -> tuple[int, int, bool]:
    """How many tensors and, in Python, names hold the memory of a tensor; whether other processes may."""
    assert _holders is not None
    storage = tensor.untyped_storage()
    return _holders(storage._cdata), sys.getrefcount(storage), storage.is_shared()


@functools.cache
def _alone() -> tuple[int, int, bool]:
    return _held(torch.empty(1))


# --- views ------------------------------------------------------------------------------------------------------------


def _views(store: Store) -> _Views | None:
    """Of a store's structure; None where its leaves cannot be told from its buffers."""
    state: TrainState = store.named
    leaves, treedef = tree.flatten(state)
    key = next(index for index, leaf in enumerate(leaves) if leaf is state.key)
    del leaves[key]
    nodes = _changeable(state)
    memory = {buffer.untyped_storage().data_ptr(): index for index, buffer in enumerate(store.buffers)}
    # A scalar lies beside others in one buffer.
    numbers = {id(buffer): index for index, buffer in enumerate(store.buffers)}
    frozen = {id(leaf): numbers[id(leaf)] for leaf in state.frozen.values() if id(leaf) in numbers}
    held: dict[int, int] = {}  # position -> the frozen buffer that it is
    inside: dict[int, list[int]] = defaultdict(list)  # buffer -> positions
    for position, leaf in enumerate(leaves):
        index = memory.get(leaf.untyped_storage().data_ptr())
        if id(leaf) in frozen:
            held[position] = frozen[id(leaf)]
        elif index is None or not leaf.numel() or store.buffers[index].storage_offset():
            return None
        else:
            inside[index].append(position)
    if nodes is None:
        return None
    runs = [run for index, positions in inside.items() for run in _runs(index, positions, leaves)]
    order = [position for run in runs for position in run.leaves] + list(held)
    back = sorted(range(len(order)), key=order.__getitem__)
    buffer_of = {position: run.buffer for run in runs for position in run.leaves} | held
    starts = [buffer.data_ptr() for buffer in store.buffers]
    places = [(buffer_of[at], leaf.data_ptr() - starts[buffer_of[at]]) for at, leaf in enumerate(leaves)]
    ordered = operator.itemgetter(*back)  # of two or more: every state counts its calls and its updates
    return _Views(treedef, key, tuple(runs), tuple(held.values()), ordered, tuple(places), nodes)


def _runs(buffer: int, positions: list[int], leaves: list[Tensor]) -> Iterator[_Run]:
    """The leaves in a buffer, those together that differ in their offset alone, by the same step."""
    waiting = sorted(positions, key=lambda position: leaves[position].storage_offset())
    while waiting:
        first = leaves[waiting[0]]
        start, step, count = first.storage_offset(), 0, 1
        if len(waiting) > 1:
            step = leaves[waiting[1]].storage_offset() - start
        for position in waiting[1:]:
            leaf = leaves[position]
            alike = leaf.shape == first.shape and leaf.stride() == first.stride() and leaf.dtype == first.dtype
            if not alike or leaf.storage_offset() != start + count * step:
                break
            count += 1
        if count < _FEW:
            count = 1
        together, waiting = waiting[:count], waiting[count:]
        front = ((count,), (step,)) if count > 1 else ((), ())
        yield _Run(buffer, (*front[0], *first.shape), (*front[1], *first.stride()), start, tuple(together))


def _changeable(state: TrainState) -> tuple[tuple[Any, ...], ...] | None:
    """The paths of all dicts and lists; None where there is a node of another kind."""
    found: list[tuple[Any, ...]] = []

    def walk(node: Any, path: tuple[Any, ...]) -> bool:
        if node is None or isinstance(node, Tensor):
            return True
        if not isinstance(node, tuple | list | dict):
            return False
        if not isinstance(node, tuple):
            found.append(path)
        inner = cast(Any, node.items() if isinstance(node, dict) else enumerate(node))
        return all(walk(child, (*path, at)) for at, child in inner)

    return tuple(found) if walk(state, ()) else None
