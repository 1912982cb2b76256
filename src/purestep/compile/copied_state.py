"""A compiled step that leaves its state as it was: the graph of a donated one, on a copy of the state's few buffers.

The state that comes out is a plain TrainState of views of those buffers. As long as it lives, the step knows them by
its key, and copies them whole next time; a state of other tensors is packed leaf by leaf.
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
    own: tuple[int, ...]  # buffers that a step writes
    frozen: tuple[int, ...]  # buffers that none writes; each is a leaf as it is
    ordered: Callable[[list[Tensor]], Any]  # from the order of the runs, and the frozen ones after them, to the leaves'
    contiguous: list[bool]  # per leaf
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

    store: DonatedBuffers  # without the state
    left: int | None
    views: _Views
    leaves: list[Tensor]  # without the key
    fields: tuple[Any, ...]  # without the key
    contents: list[tuple[Any, list[Any]]]
    versions: list[int]
    addresses: list[int]  # of the leaves

    def is_still(self, state: TrainState) -> bool:
        """Whether the state is what was handed out: of the same tensors, none of which was written to since."""
        same = _are(state[_FIELDS], self.fields) and all(_are(_content(node), held) for node, held in self.contents)
        if not same or _versions(self.store) != self.versions:
            return False
        # `tensor.data = ...` is no write; it has the tensor lie elsewhere, or turned.
        moved = [leaf.data_ptr() for leaf in self.leaves] != self.addresses
        return not moved and [leaf.is_contiguous() for leaf in self.leaves] == self.views.contiguous


class Forks:
    """The states that a step has handed out."""

    def __init__(self) -> None:
        self._views: dict[object, _Views | None] = {}
        self._handed: Any = WeakIdKeyDictionary()

    def of_live(self, store: DonatedBuffers) -> DonatedBuffers | None:
        """A store in memory of its own of a live state, which stays as it is; None where that cannot be told."""
        views = self._views_of(store)
        if views is None:
            return None
        return _forked(store, views, store.named.key, store.hosts[0].left)

    def of(self, state: TrainState) -> DonatedBuffers | None:
        """The same of a state that was handed out; None of any other."""
        key: Any = state.key
        found: _Handed | None = self._handed.get(key) if isinstance(key, Tensor) else None
        if found is None or not found.is_still(state):
            return None
        # Where it costs nothing the window is read, not remembered: the state knows better (`left.numpy()[()] = 1`).
        left = None if found.store.device.type == "cpu" else found.left
        return _forked(found.store, found.views, state.key, left)

    def hand_out(self, store: DonatedBuffers) -> TrainState:
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
            known = state[_FIELDS], views.contents(state), _versions(store), [leaf.data_ptr() for leaf in leaves]
            self._handed[state.key] = _Handed(bare, store.hosts[0].left, views, leaves, *known)
        return state

    def _views_of(self, store: DonatedBuffers) -> _Views | None:
        known = store.slots.identity
        if known not in self._views:
            self._views[known] = _views(store)
        return self._views[known]


def _are(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _content(node: Any) -> list[Any]:
    return [*node, *node.values()] if isinstance(node, dict) else list(node)


def _versions(store: DonatedBuffers) -> list[int]:
    """How often the buffers were written to, their views included."""
    return [buffer._version for buffer in store.buffers]


# --- copies -----------------------------------------------------------------------------------------------------------


def _forked(store: DonatedBuffers, views: _Views, key: Tensor, left: int | None) -> DonatedBuffers:
    buffers = list(store.buffers)
    for index in views.own:
        buffers[index] = buffers[index].clone()
    leaves = views.of(buffers)
    state = views.state(leaves, key.clone())
    found = store.elsewhere(buffers, state, [HostCounters(state, left)])
    found.leaves = leaves
    return found


# --- views ------------------------------------------------------------------------------------------------------------


def _views(store: DonatedBuffers) -> _Views | None:
    """Of a store's structure; None where its leaves cannot be told from its buffers."""
    state: TrainState = store.named
    nodes = _changeable(state)
    leaves, treedef = tree.flatten(state)
    key = next(index for index, leaf in enumerate(leaves) if leaf is state.key)
    del leaves[key]
    held = _frozen(store, leaves)
    inside = _inside(store, leaves, held)
    if nodes is None or inside is None:
        return None
    runs = tuple(run for index, positions in inside.items() for run in _runs(index, positions, leaves))
    own = tuple(index for index in range(len(store.buffers)) if index not in held.values())
    contiguous = [leaf.is_contiguous() for leaf in leaves]
    return _Views(treedef, key, runs, own, tuple(held.values()), _ordered(runs, held), contiguous, nodes)


def _frozen(store: DonatedBuffers, leaves: list[Tensor]) -> dict[int, int]:
    """Positions of the leaves that are frozen buffers, and which. A frozen scalar lies beside other scalars in one
    buffer, and is taken for one of them."""
    numbers = {id(buffer): index for index, buffer in enumerate(store.buffers)}
    frozen = {id(leaf) for leaf in store.named.frozen.values()}
    return {at: numbers[id(leaf)] for at, leaf in enumerate(leaves) if id(leaf) in frozen and id(leaf) in numbers}


def _inside(store: DonatedBuffers, leaves: list[Tensor], held: dict[int, int]) -> dict[int, list[int]] | None:
    """Per buffer, the positions of the other leaves, which lie in its memory; None where one does not."""
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


def _ordered(runs: tuple[_Run, ...], held: dict[int, int]) -> Callable[[list[Tensor]], Any]:
    order = [position for run in runs for position in run.leaves] + list(held)
    # Which gives a tuple where it is asked for two or more: every state has .step and .updates.
    return operator.itemgetter(*sorted(range(len(order)), key=order.__getitem__))


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
            alike = leaf.shape == first.shape and leaf.stride() == first.stride()
            if not alike or leaf.storage_offset() != start + count * step:
                break
            count += 1
        shape, stride = tuple(first.shape), first.stride()
        if count < _FEW:
            count = 1
        else:
            shape, stride = (count, *shape), (step, *stride)
        yield _Run(buffer, shape, stride, start, tuple(waiting[:count]))
        waiting = waiting[count:]


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
