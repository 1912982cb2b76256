"""The state of a donated step: a TrainState in buffers that the next call overwrites.

Each call of a donated step starts a new generation of its memory, a `Store`. Reading a `LiveState` of an older
generation raises StateError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor

from .. import tree
from ..errors import StateError
from ..types import TrainState, Tree


def is_state(node: Any) -> bool:
    """True if a node of a tree is a TrainState."""
    return isinstance(node, TrainState)


def plain(state: Tree) -> Tree:
    """Convert the live states of a tree to plain TrainStates."""
    return tree.map(lambda node: TrainState(*node) if is_state(node) else node, state, is_leaf=is_state)


def states(state: Tree) -> list[TrainState]:
    """The TrainStates of a tree, in the order of its leaves."""
    found: list[TrainState] = []
    tree.map(lambda node: found.append(node) if is_state(node) else None, state, is_leaf=is_state)
    return found


def _containers(node: Any) -> list[Any]:
    """All mutable containers of a tree: dicts, lists and deques."""
    if isinstance(node, dict):
        named = cast(dict[Any, Any], node)
        return [named, *(found for child in named.values() for found in _containers(child))]
    if not isinstance(node, tuple | list | deque):
        return []
    found = [each for child in cast(Any, node) for each in _containers(child)]
    return found if isinstance(node, tuple) else [node, *found]


_KEY = TrainState._fields.index("key")


class Store:
    """The memory of a donated step's state: `buffers.StateBuffers`, or `eager_donation.OwnedState`."""

    def __init__(self) -> None:
        self.named: Any = None  # the state, or a tree of several
        self.parts: list[tuple[Any, ...]] = []  # the fields of each TrainState
        self.structure: tree.TreeDef | None = None  # of a tree of TrainStates, which are its leaves
        self.generation = 0
        self.failed = False  # the last call was interrupted
        self.is_read = False  # the caller has read the state, and may pass a part of it as a batch
        self.exposed: list[tuple[Any, Any]] | None = None  # dicts and lists that the caller has read, and their copies

    def tensors(self) -> list[Tensor]:
        """Tensors whose version counters cover every write into the state."""
        raise NotImplementedError

    def expose(self) -> None:
        """Remember the contents of dicts and lists, because the caller reads them and may modify them."""
        if self.exposed is None:
            self.exposed = [(node, node.copy()) for node in _containers(self.parts)]

    def is_unmodified(self) -> bool:
        """True if the dicts and lists that the caller has read still have the same leaves."""
        try:
            return all(node == copy for node, copy in self.exposed or ())  # identical objects are not compared
        except Exception:  # from comparing two tensors
            return False

    def begin(self) -> None:
        """Invalidate the input state before a call, since Ctrl-C can interrupt the call at any line."""
        self.failed = True
        self.generation += 1

    def undo(self) -> None:
        """Revert `begin` after a call that failed before it wrote anything."""
        self.generation -= 1
        self.failed = False

    def donation_message(self, index: int, generation: int) -> str:
        """The error text for a state of an earlier generation."""
        calls = int(self.parts[index][_KEY].flatten()[1]) + self.failed  # of all generations
        call = f"this state in call {calls - (self.generation - generation) + 1}"
        if self.failed and generation == self.generation - 1:
            return f"a donated step was overwriting {call}, which failed and may have written half of it"
        return f"a donated step has overwritten {call}"


class LiveState(TrainState):
    """A TrainState in donated buffers. Reading one after its donation raises StateError.

    `_replace`, `view`, `clone`, copy and pickle return a plain TrainState.
    """

    live_store: Store | None = None
    live_generation: int = 0
    live_index: int = 0

    def check_alive(self) -> None:
        """Raise StateError if this state has been donated."""
        store = self.live_store
        if store is not None and store.generation != self.live_generation:
            raise StateError(
                store.donation_message(self.live_index, self.live_generation),
                where="state",
                hint="use the state that the call returned; to keep an old one, call ps.clone(state) before the call; "
                "donate=False switches this off",
            )

    def item(self, index: int) -> Any:
        self.check_alive()
        found, store = tuple.__getitem__(self, index), self.live_store
        if store is not None:
            store.is_read = True
            if type(found) is not Tensor:
                store.expose()
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter([self.item(index) for index in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __repr__(self) -> str:
        if self.live_store is not None and self.live_store.generation != self.live_generation:
            return "TrainState(donated)"
        return repr(TrainState(*self))

    def _replace(self, **fields: Any) -> TrainState:  # pyright: ignore[reportIncompatibleMethodOverride]  # plain, see above
        return TrainState(*self)._replace(**fields)

    def _asdict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  # checks for donation
        return TrainState(*self)._asdict()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __copy__(self) -> TrainState:
        return TrainState(*self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        return tree.clone(TrainState(*self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (TrainState, tuple(self))


def _reader(index: int) -> Callable[[LiveState], Any]:
    def read(self: LiveState) -> Any:
        return self.item(index)

    return read


for _index, _field in enumerate(TrainState._fields):
    setattr(LiveState, _field, property(_reader(_index)))
tree.register(LiveState, lambda state: tuple(state), TrainState)


def live(store: Store, index: int) -> LiveState:
    """Return the state of a store's current generation; ``index`` selects one of its TrainStates."""
    state = tuple.__new__(LiveState, store.parts[index])
    state.live_store = store
    state.live_generation = store.generation
    state.live_index = index
    return state


# --- trees of live states ---------------------------------------------------------------------------------------------


def store_of(state: Tree) -> Store | None:
    """The store of a live state or of a tree of live states; None for a tree that has other leaves, or not all states
    of one store in their places."""
    if isinstance(state, LiveState):
        return state.live_store
    if isinstance(state, Tensor) or not isinstance(state, tuple | dict | list):
        return None
    parts, structure = tree.flatten(state, is_leaf=is_state)
    if not parts or not all(isinstance(part, LiveState) for part in parts):
        return None
    store = parts[0].live_store
    if store is None or structure != store.structure:
        return None
    own = all(part.live_store is store and part.live_index == at for at, part in enumerate(parts))
    return store if own else None


def check_alive(state: Tree) -> None:
    """Raise StateError if a state of the tree has been donated."""
    if type(state) is LiveState:
        return state.check_alive()
    for found in states(state):
        if isinstance(found, LiveState):
            found.check_alive()


def is_alive(state: Tree) -> bool:
    """True if a state can be read: it has not been donated."""
    try:
        check_alive(state)
    except StateError:
        return False
    return True


def memory(state: Tree) -> list[Any]:
    """Tensors whose version counters cover every write into a state: the buffers of a live state, else the leaves; none
    if the state has been donated."""
    store = store_of(state)
    if store is None:
        return tree.leaves(state)
    if not is_alive(state):
        return []
    return store.tensors()
