"""In which store's memory a state stands, and whether it still does."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from .. import tree
from ..errors import StateError
from ..types import Tree
from .donation import LiveState, Store, is_state, states


def store_of(state: Tree) -> Store | None:
    """The store that a whole tree of live states of one generation stands in, if it does."""
    if isinstance(state, LiveState):
        return state.live_store
    if isinstance(state, Tensor) or not isinstance(state, tuple | dict | list):
        return None
    found = [part for part in states(state) if isinstance(part, LiveState)]
    if not found or len(found) < len(states(state)):
        return None
    store = found[0].live_store
    whole = store is not None and [part.live_index for part in found] == list(range(len(store.hosts)))
    return store if whole and all(part.live_store is store for part in found) else None


def stands(state: Tree, store: Store) -> bool:
    """Whether a tree of live states of a store has the store's other leaves too, and nothing else."""
    if isinstance(state, LiveState):
        return True
    if type(state) is type(store.named) and isinstance(state, tuple) and all(map(is_state, state)):
        return len(state) == len(store.named)  # nothing but states, which are known to be the store's
    (given, leaves), (known, own) = _beside_states(state), _beside_states(store.named)
    return given == known and all(map(operator.is_, leaves, own))


def _beside_states(state: Tree) -> tuple[tree.TreeDef, list[Any]]:
    """The structure of a tree, its TrainStates without leaves, and its other leaves."""
    leaves, treedef = tree.flatten(tree.map(lambda node: None if is_state(node) else node, state, is_leaf=is_state))
    return treedef, leaves


def check_alive(state: Tree) -> None:
    """Raise the StateError of a donated state."""
    if type(state) is LiveState:
        return state.alive()
    for found in states(state):
        if isinstance(found, LiveState):
            found.alive()


def is_alive(state: Tree) -> bool:
    """Whether a state can still be read."""
    try:
        check_alive(state)
    except StateError:
        return False
    return True


def memory(state: Tree) -> list[Any]:
    """What counts every write into a state: the few tensors that a live one lies in, or its leaves. Of a live one that
    has been donated: nothing."""
    store = store_of(state)
    if store is None:
        return tree.leaves(state)
    if not is_alive(state):
        return []
    return [*store.buffers, *(host.key for host in store.hosts)]
