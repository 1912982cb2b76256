"""Calls without donation: the graph of the donated step runs on a copy of the state's few buffers.

The returned state is a plain TrainState of views of those buffers. While it is alive, the step finds its buffers by the
state's key and copies them whole at the next call; a state of other tensors is packed leaf by leaf.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import tree
from ..types import TrainState
from .donation import DonatedBuffers, HostCounters

_MIN_RUN = 4  # leaves: fewer views of a buffer are as fast one by one as by one call
_FIELDS = slice(TrainState._fields.index("key"))  # all but the key, which is the last


class _Run(NamedTuple):
    """Leaves of one shape at equal distances in a buffer."""

    buffer: int
    shape: tuple[Any, ...]  # of one leaf, or (number of leaves, *shape)
    stride: tuple[Any, ...]
    offset: Any
    leaves: tuple[int, ...]  # their positions


class _Views(NamedTuple):
    """The user's leaves as views of the buffers, for stores of one structure."""

    treedef: tree.TreeDef
    key: int  # position of the key among the leaves
    runs: tuple[_Run, ...]
    own: tuple[int, ...]  # indices of buffers that the step writes
    frozen: tuple[int, ...]  # indices of buffers that no step writes; each is one leaf
    ordered: Callable[[list[Tensor]], Any]  # from (leaves of the runs, frozen leaves) to the tree's order
    contiguous: list[bool]  # per leaf
    nodes: tuple[tuple[Any, ...], ...]  # paths of the state's dicts and lists, which are mutable

    def of(self, buffers: list[Tensor]) -> list[Tensor]:
        """Return the leaves without the key."""
        views: list[Tensor] = []
        for run in self.runs:
            view = buffers[run.buffer].as_strided(run.shape, run.stride, run.offset)
            if len(run.leaves) == 1:
                views.append(view)
            else:
                views += view.unbind()
        views += [buffers[index] for index in self.frozen]
        return list(self.ordered(views))

    def state(self, leaves: list[Tensor], key: Tensor) -> TrainState:
        """Build the state from its leaves."""
        return tree.unflatten(self.treedef, [*leaves[: self.key], key, *leaves[self.key :]])

    def contents(self, state: TrainState) -> list[tuple[Any, list[Any]]]:
        """The dicts and lists of a state, each with its contents."""
        nodes = [functools.reduce(operator.getitem, path, cast(Any, state)) for path in self.nodes]
        return [(node, _content(node)) for node in nodes]


class _Returned(NamedTuple):
    """Record of a returned state. It must not hold the key: `CopiedStates` maps keys weakly to records."""

    store: DonatedBuffers  # without the state
    left: int | None
    views: _Views
    leaves: list[Tensor]  # without the key
    fields: tuple[Any, ...]  # without the key
    contents: list[tuple[Any, list[Any]]]
    versions: list[int]
    addresses: list[int]  # of the leaves

    def is_unmodified(self, state: TrainState) -> bool:
        """True if the state still has the tensors that were returned, and none was written since."""
        same = _are_same(state[_FIELDS], self.fields) and all(
            _are_same(_content(node), held) for node, held in self.contents
        )
        if not same or _versions(self.store) != self.versions:
            return False
        # `tensor.data = ...` does not count as a write, but changes the address or the strides.
        moved = [leaf.data_ptr() for leaf in self.leaves] != self.addresses
        return not moved and [leaf.is_contiguous() for leaf in self.leaves] == self.views.contiguous


class CopiedStates:
    """The states that a step has returned, with the buffers that they are views of."""

    def __init__(self) -> None:
        self._views: dict[object, _Views | None] = {}
        self._returned: Any = WeakIdKeyDictionary()

    def copy_live(self, store: DonatedBuffers) -> DonatedBuffers | None:
        """Copy the store of a live state; return None if its leaves are not views of its buffers."""
        views = self._views_of(store)
        if views is None:
            return None
        return _copy_store(store, views, store.named.key, store.hosts[0].left)

    def copy(self, state: TrainState) -> DonatedBuffers | None:
        """Copy the store of a returned state; return None for any other state."""
        key: Any = state.key
        found: _Returned | None = self._returned.get(key) if isinstance(key, Tensor) else None
        if found is None or not found.is_unmodified(state):
            return None
        # On the CPU the window's position is read again: the user may have written it (`left.numpy()[()] = 1`).
        left = None if found.store.device.type == "cpu" else found.left
        return _copy_store(found.store, found.views, state.key, left)

    def release(self, store: DonatedBuffers) -> TrainState:
        """Return the state of a new store as a plain TrainState, and remember it."""
        state: TrainState = store.named
        views = self._views_of(store)
        if views is None:
            return state
        leaves = store.leaves
        if leaves is None:  # as views, never as the buffers themselves
            leaves = views.of(store.buffers)
            state = views.state(leaves, state.key)
        bare = store.with_memory(store.buffers, None, [])
        with suppress(RuntimeError):  # inference tensors have no version counter
            known = state[_FIELDS], views.contents(state), _versions(store), [leaf.data_ptr() for leaf in leaves]
            self._returned[state.key] = _Returned(bare, store.hosts[0].left, views, leaves, *known)
        return state

    def _views_of(self, store: DonatedBuffers) -> _Views | None:
        known = store.slots.identity
        if known not in self._views:
            self._views[known] = _views(store)
        return self._views[known]


def _are_same(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _content(node: Any) -> list[Any]:
    return [*node, *node.values()] if isinstance(node, dict) else list(node)


def _versions(store: DonatedBuffers) -> list[int]:
    """Version counters of the buffers; writes to views count too."""
    return [buffer._version for buffer in store.buffers]


# --- copies -----------------------------------------------------------------------------------------------------------


def _copy_store(store: DonatedBuffers, views: _Views, key: Tensor, left: int | None) -> DonatedBuffers:
    buffers = list(store.buffers)
    for index in views.own:
        buffers[index] = buffers[index].clone()
    leaves = views.of(buffers)
    state = views.state(leaves, key.clone())
    copy = store.with_memory(buffers, state, [HostCounters(state, left)])
    copy.leaves = leaves
    return copy


# --- views ------------------------------------------------------------------------------------------------------------


def _views(store: DonatedBuffers) -> _Views | None:
    """The views of a store's structure; None if a leaf is neither a view nor a frozen buffer."""
    state: TrainState = store.named
    nodes = _container_paths(state)
    leaves, treedef = tree.flatten(state)
    key = next(index for index, leaf in enumerate(leaves) if leaf is state.key)
    del leaves[key]
    held = _frozen(store, leaves)
    inside = _by_buffer(store, leaves, held)
    if nodes is None or inside is None:
        return None
    runs = tuple(run for index, positions in inside.items() for run in _runs(index, positions, leaves))
    own = tuple(index for index in range(len(store.buffers)) if index not in held.values())
    contiguous = [leaf.is_contiguous() for leaf in leaves]
    return _Views(treedef, key, runs, own, tuple(held.values()), _reordering(runs, held), contiguous, nodes)


def _frozen(store: DonatedBuffers, leaves: list[Tensor]) -> dict[int, int]:
    """Positions of the frozen leaves and the indices of their buffers. A frozen scalar shares a buffer with other
    scalars and is treated like them."""
    numbers = {id(buffer): index for index, buffer in enumerate(store.buffers)}
    frozen = {id(leaf) for leaf in store.named.frozen.values()}
    return {at: numbers[id(leaf)] for at, leaf in enumerate(leaves) if id(leaf) in frozen and id(leaf) in numbers}


def _by_buffer(store: DonatedBuffers, leaves: list[Tensor], held: dict[int, int]) -> dict[int, list[int]] | None:
    """Positions of the other leaves by the buffer that contains them; None if a leaf is outside of all buffers."""
    memory = {buffer.untyped_storage().data_ptr(): index for index, buffer in enumerate(store.buffers)}
    found: dict[int, list[int]] = defaultdict(list)
    for position, leaf in enumerate(leaves):
        if position in held:
            continue
        index = memory.get(leaf.untyped_storage().data_ptr())
        if index is None or not leaf.numel() or store.buffers[index].storage_offset():
            return None
        found[index].append(position)
    return found


def _reordering(runs: tuple[_Run, ...], held: dict[int, int]) -> Callable[[list[Tensor]], Any]:
    order = [position for run in runs for position in run.leaves] + list(held)
    # itemgetter returns a tuple for two or more items: every state has .step and .updates.
    return operator.itemgetter(*sorted(range(len(order)), key=order.__getitem__))


def _runs(buffer: int, positions: list[int], leaves: list[Tensor]) -> Iterator[_Run]:
    """Group the leaves in a buffer that differ only in their offset, by a constant step."""
    waiting = sorted(positions, key=lambda position: leaves[position].storage_offset())
    while waiting:
        first = leaves[waiting[0]]
        start, step, count = first.storage_offset(), 0, 1
        if len(waiting) > 1:
            step = leaves[waiting[1]].storage_offset() - start
        for position in waiting[1:]:
            leaf = leaves[position]
            alike = leaf.shape == first.shape and leaf.stride() == first.stride()
            if not alike or leaf.storage_offset() != start + count * step:
                break
            count += 1
        shape, stride = tuple(first.shape), first.stride()
        if count < _MIN_RUN:
            count = 1
        else:
            shape, stride = (count, *shape), (step, *stride)
        yield _Run(buffer, shape, stride, start, tuple(waiting[:count]))
        waiting = waiting[count:]


def _container_paths(state: TrainState) -> tuple[tuple[Any, ...], ...] | None:
    """Paths of all dicts and lists; None if there is a node of another type."""
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
