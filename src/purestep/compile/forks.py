"""A compiled step that leaves its state as it was: the graph of a donated one, on a copy of the state's few buffers.

The state that comes out is a plain TrainState of views of those buffers. As long as it lives, the step knows them by
its key, and copies them whole next time; a state of other tensors is packed leaf by leaf.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import tree
from ..types import TrainState
from .live import Host, Store


class _Views(NamedTuple):
    """How the leaves that users see lie in the buffers of stores of one structure."""

    treedef: tree.TreeDef
    key: int  # which leaf is the key
    places: tuple[Any, ...]  # of the others: a buffer's number, or (number, shape, stride, offset)
    frozen: frozenset[int]  # buffers that no step writes

    def of(self, buffers: list[Tensor]) -> list[Tensor]:
        """The leaves, without the key."""
        return [
            buffers[place] if type(place) is int else buffers[place[0]].as_strided(*place[1:]) for place in self.places
        ]

    def state(self, leaves: list[Tensor], key: Tensor) -> TrainState:
        """The state of these leaves."""
        return tree.unflatten(self.treedef, [*leaves[: self.key], key, *leaves[self.key :]])


class _Handed(NamedTuple):
    """What is known of a state that was handed out. It must not hold the key, by which it is found."""

    store: Store  # without the state
    left: int | None
    views: _Views
    leaves: list[Tensor]  # without the key
    memory: list[tuple[int, int]]

    def is_still(self, state: TrainState) -> bool:
        """Whether the state is what was handed out: of the same tensors, none of which was written to since."""
        leaves, treedef = tree.flatten(state)
        del leaves[self.views.key]
        same = len(leaves) == len(self.leaves) and all(map(operator.is_, leaves, self.leaves))
        return same and treedef == self.views.treedef and _memory(leaves) == self.memory


class Forks:
    """The states that a step has handed out."""

    def __init__(self) -> None:
        self._views: dict[object, _Views | None] = {}
        self._handed: Any = WeakIdKeyDictionary()

    def of_live(self, store: Store) -> Store | None:
        """A store in memory of its own of a live state, which stays as it is; None where that cannot be told."""
        views = self._views_of(store)
        return None if views is None else _forked(store, views, store.named.key, store.hosts[0].left)

    def of(self, state: TrainState) -> Store | None:
        """The same of a state that was handed out; None of any other."""
        key: Any = state.key
        found: _Handed | None = self._handed.get(key) if isinstance(key, Tensor) else None
        if found is None or not found.is_still(state):
            return None
        return _forked(found.store, found.views, state.key, found.left)

    def hand_out(self, store: Store) -> TrainState:
        """The state of a store that nobody else has, as a plain TrainState."""
        state: TrainState = store.named
        views = self._views_of(store)
        if views is not None:
            leaves = store.leaves
            if leaves is None:
                leaves = tree.leaves(state)
                del leaves[views.key]
            bare = store.elsewhere(store.buffers, None, [])
            with suppress(RuntimeError):  # tensors of inference mode do not count their writes
                self._handed[state.key] = _Handed(bare, store.hosts[0].left, views, leaves, _memory(leaves))
        return state

    def _views_of(self, store: Store) -> _Views | None:
        known = store.slots.identity
        if known not in self._views:
            self._views[known] = _views(store)
        return self._views[known]


def _memory(leaves: list[Tensor]) -> list[tuple[int, int]]:
    """Where they lie, which ``tensor.data = ...`` changes, and how often they were written to."""
    return [(leaf.data_ptr(), leaf._version) for leaf in leaves]


def _forked(store: Store, views: _Views, key: Tensor, left: int | None) -> Store:
    buffers = [buffer if index in views.frozen else buffer.clone() for index, buffer in enumerate(store.buffers)]
    leaves = views.of(buffers)
    state = views.state(leaves, key.clone())
    found = store.elsewhere(buffers, state, [Host(state, left)])
    found.leaves = leaves
    return found


def _views(store: Store) -> _Views | None:
    state: TrainState = store.named
    leaves, treedef = tree.flatten(state)
    key = next(index for index, leaf in enumerate(leaves) if leaf is state.key)
    del leaves[key]
    numbers = {id(buffer): index for index, buffer in enumerate(store.buffers)}
    memory = {buffer.untyped_storage().data_ptr(): index for index, buffer in enumerate(store.buffers)}
    places: list[Any] = []
    for leaf in leaves:
        if id(leaf) in numbers:
            places.append(numbers[id(leaf)])
            continue
        index = memory.get(leaf.untyped_storage().data_ptr())
        if index is None or not leaf.numel() or store.buffers[index].storage_offset():
            return None
        places.append((index, leaf.shape, leaf.stride(), leaf.storage_offset()))
    # A scalar lies beside others in one buffer.
    frozen = frozenset(numbers[id(leaf)] for leaf in state.frozen.values() if id(leaf) in numbers)
    return _Views(treedef, key, tuple(places), frozen)
