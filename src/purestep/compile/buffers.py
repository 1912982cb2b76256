"""The buffers that a compiled step writes in place, and the state laid out in them. An undonated call has its own.

`StateBuffers` owns the memory; each call starts a new generation. `Slots` maps the leaves of a state to buffers, and
`HostCounters` keeps on the host what a step would otherwise read from the device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import tree
from ..errors import StateError
from ..state import packed, stacked
from ..torch_ext import tensor_layout
from ..types import Empty, TrainState, Tree
from .live_state import Store, is_state, live, states


class HostCounters:
    """Values of one TrainState that the host keeps, so that no step reads them from the device; of all members of a
    stacked one."""

    __slots__ = ("_at", "_numbers", "key", "left", "seeds")

    def __init__(self, state: TrainState) -> None:
        self.key = state.key  # its `_version` counts other writes; ours go through numpy and do not count
        self._at, self._numbers = self.key.data_ptr(), self.key.numpy()
        self.seeds: list[int] = self._numbers.reshape(-1, 2)[:, 0].tolist()
        # Calls until the window closes; None if it is unknown, or the members differ.
        self.left = None if isinstance(state.accum, Empty) else stacked.window_left(state)

    @property
    def calls(self) -> int:
        """Number of calls so far, the second number of the key; that of the first member."""
        return int(self._view().flat[1])

    def keys(self) -> list[tuple[int, int]]:
        """(seed, calls) of every member; of a plain state, one pair."""
        return [(seed, calls) for seed, calls in self._view().reshape(-1, 2).tolist()]

    def advance(self) -> None:
        """Add one to the number of calls."""
        self._view()[..., 1] += 1

    def _view(self) -> Any:
        # A write through numpy costs a twentieth of an in-place op. `share_memory_`, called when a state is sent to
        # another process, moves the memory of the key.
        if self.key.data_ptr() != self._at:
            self._at, self._numbers = self.key.data_ptr(), self.key.numpy()
        return self._numbers


class Slots(NamedTuple):
    """The places of a flat tree's leaves in the buffers."""

    treedef: tree.TreeDef
    places: tuple[tuple[str, int], ...]  # per leaf: ("int64" | "float32" | "key" | "own", index)
    identity: object  # hashed instead of the structure; shared by all buffers of one structure
    keys: tuple[torch.Size, ...]  # shapes of the keys: (2,), or (members, 2) of a stacked state

    def gather(self, buffers: list[Tensor], keys: list[Tensor] | None = None) -> list[Tensor]:
        """Return the leaves; 0-d leaves of one dtype share a buffer. Keys belong to the host: inside a graph they are
        zeros, and nothing may depend on them."""
        keys = keys or [torch.zeros(shape, dtype=torch.int64) for shape in self.keys]
        source = {"int64": buffers[0].unbind(), "float32": buffers[1].unbind(), "own": buffers[2:], "key": keys}
        return [source[kind][index] for kind, index in self.places]

    def scatter(self, buffers: list[Tensor], old: list[Tensor], new: list[Tensor]) -> None:
        """Write the changed leaves to the buffers in place."""
        scalars = [
            (buffers[number], torch.stack(fresh))
            for number, kind in enumerate(("int64", "float32"))
            if (fresh := [leaf for leaf, (place, _) in zip(new, self.places, strict=True) if place == kind])
        ]
        own = [
            (buffers[2 + index], after)
            for before, after, (kind, index) in zip(old, new, self.places, strict=True)
            if kind == "own" and after is not before
        ]
        # A new leaf may be the old value of another: copy all of them before the first write.
        for buffer, after in scalars + [(buffer, unaliased(after, buffers)) for buffer, after in own]:
            buffer.copy_(after)


def unaliased(value: Tensor, buffers: list[Tensor]) -> Tensor:
    """Clone the value if it may share memory with one of the buffers."""
    memory = StorageWeakRef(value.untyped_storage())
    is_shared = any(StorageWeakRef(buffer.untyped_storage()) == memory for buffer in buffers)
    return value.clone() if is_shared else value


def memory_of(leaf: Tensor) -> Tensor:
    """A tensor's memory as a vector: slices and expanded tensors keep the strides that kernels were compiled for."""
    return leaf.detach().as_strided((tensor_layout.extent(leaf),), (1,))


def strided_clone(leaf: Tensor) -> Tensor:
    """Clone a tensor with its strides."""
    return memory_of(leaf).clone().as_strided(leaf.shape, leaf.stride(), 0)


def place(flat: Tree) -> Slots:
    """Assign every leaf of a flat tree to a buffer. Raise StateError for a leaf that is no tensor."""
    leaves, treedef = tree.flatten(flat)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise StateError(
                f"the state has a {type(leaf).__name__}, not a tensor",
                where="state",
                hint="pass torch.tensor(value): a state holds tensors only",
            )
    keys = key_positions(treedef)
    counts = {"int64": 0, "float32": 0, "own": 0, "key": 0}
    places: list[tuple[str, int]] = []
    for position, leaf in enumerate(leaves):
        kind = "key" if position in keys else _kind(leaf)
        places.append((kind, counts[kind]))
        counts[kind] += 1
    return Slots(treedef, tuple(places), object(), tuple(leaves[at].shape for at in sorted(keys)))


def _kind(leaf: Tensor) -> str:
    if leaf.dim() == 0 and leaf.dtype in (torch.int64, torch.float32):
        return str(leaf.dtype).removeprefix("torch.")
    return "own"


@functools.lru_cache(maxsize=64)
def key_positions(treedef: tree.TreeDef) -> frozenset[int]:
    """Positions of the TrainStates' keys among the leaves of a structure; the same tensor may be another leaf too."""
    numbered = tree.unflatten(treedef, list(range(treedef.num_leaves)))
    return frozenset(int(cast(Any, part.key)) for part in states(numbered))


class StateBuffers(Store):
    """The buffers of a state (a "store"), the named tree of views of them, and the generation."""

    def __init__(
        self,
        state: Tree,
        packing: packed.Packing | None,
        packings: object,
        *,
        adopt: bool = False,
        shares_frozen: bool = True,
    ) -> None:
        super().__init__()
        self.packing = packing
        self.packings = packings  # of the compiled steps that share this packing
        flat = state if packing is None else packed.pack(packing, state)
        assert flat is not None
        self.slots = place(flat)
        leaves = tree.leaves(flat)
        adopt = adopt and all(map(is_state, tree.flatten(state, is_leaf=is_state)[0]))
        copied = unwritable(leaves) if adopt else {id(leaf) for leaf in tree.leaves(state)}
        # A program's step never writes frozen leaves, so they are not copied: one copy of a frozen backbone is enough.
        # A user-defined step may write them.
        not_copied = _frozen(flat) if shares_frozen else set[int]()
        copied -= not_copied
        self.holds_callers = bool(not_copied)  # some buffers are tensors of the caller
        self.buffers = self._fill(leaves, copied=copied)
        self.signature: tuple[Any, ...] = ()  # of the buffers, as graphs expect them; see `guards.signature`
        keys = [part.key.to("cpu", copy=True) for part in states(flat)]
        whole = tree.unflatten(self.slots.treedef, self.slots.gather(self.buffers, keys))
        self.named = whole if packing is None else packed.unpack(packing, whole)
        self.hosts = [HostCounters(part) for part in states(self.named)]
        self.device = self.buffers[0].device
        self.parts = [tuple(part) for part in states(self.named)]
        self.single = isinstance(self.named, TrainState)  # else a tree
        found, structure = tree.flatten(self.named, is_leaf=is_state)
        # Leaves beside the states are read from the caller's tree at every call, so such a tree is not live.
        self.structure = structure if found and all(map(is_state, found)) else None
        self.is_read = adopt
        self.memory: set[int] | None = None  # addresses of the buffers; computed lazily

    def _fill(self, leaves: list[Tensor], *, copied: set[int]) -> list[Tensor]:
        chosen: dict[str, list[Tensor]] = {"int64": [], "float32": [], "own": [], "key": []}
        device = tree.device(leaves)
        for leaf, (kind, _) in zip(leaves, self.slots.places, strict=True):
            if kind == "own":
                # Compiled code reads raw memory: copying materializes lazy conj and neg views.
                is_lazy = leaf.is_conj() or leaf.is_neg()
                chosen["own"].append(leaf.detach().clone() if id(leaf) in copied or is_lazy else leaf)
            else:
                chosen[kind].append(leaf)
        return [
            torch.stack(chosen["int64"]) if chosen["int64"] else torch.zeros(0, dtype=torch.int64, device=device),
            torch.stack(chosen["float32"]) if chosen["float32"] else torch.zeros(0, device=device),
            *chosen["own"],
        ]

    def live(self) -> Tree:
        """Return the state of this generation, for the user; a plain tree if it has leaves beside its states."""
        if self.single:
            return live(self, 0)
        if self.structure is None:
            return self.named
        return tree.unflatten(self.structure, [live(self, at) for at in range(len(self.hosts))])

    def tensors(self) -> list[Tensor]:
        """The buffers, and the keys on the host."""
        return [*self.buffers, *(host.key for host in self.hosts)]

    def check(self, signature: tuple[Any, ...]) -> None:
        """Raise StateError if a tensor of the state has memory of another layout since ``tensor.data = ...``: compiled
        code would write out of bounds."""
        for was, now in zip(self.signature, signature, strict=True):
            if was != now:
                raise StateError(
                    f"a tensor of the state, {list(was[0])} {was[2]} of strides {was[1]}, has become {list(now[0])} "
                    f"{now[2]} of strides {now[1]}",
                    where="state",
                    hint="call state._replace(...) with the new tensor, or tensor.copy_(...) to write the old one",
                )

    def without_aliases(self, leaves: list[Any]) -> list[Any]:
        """Clone the batch leaves that share memory with the state, which the step writes."""
        if self.memory is None:
            self.memory = {buffer.untyped_storage().data_ptr() for buffer in self.buffers if buffer.numel()}
        memory = self.memory

        def is_part(leaf: Any) -> bool:
            dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
            return dense and leaf.untyped_storage().data_ptr() in memory

        return [strided_clone(leaf) if is_part(leaf) else leaf for leaf in leaves]

    def end(self) -> None:
        """Count a completed call and advance every key."""
        for host in self.hosts:
            host.advance()
        self.failed = False


def unwritable(leaves: list[Tensor]) -> set[int]:
    """Ids of leaves that need a copy to be written: a target network may share the memory of the weights."""
    found, used = set[int](), set[int]()
    for leaf in leaves:
        memory = leaf.untyped_storage().data_ptr()
        if memory in used or tensor_layout.overlaps(leaf):
            found.add(id(leaf))
        used.add(memory)
    return found


def _frozen(state: Tree) -> set[int]:
    return {id(value) for part in states(state) for value in part.frozen.values()}
