"""The buffers that a donated step writes in place, and the state laid out in them.

`DonatedBuffers` owns the memory; each call starts a new generation. `Slots` maps the leaves of a state to buffers, and
`HostCounters` keeps on the host what a step would otherwise read from the device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import packed, tensor_layout, tree
from ..errors import StateError
from ..types import Empty, TrainState, Tree
from . import treespec
from .live_state import LiveState as LiveState
from .live_state import is_state, live, states


class HostCounters:
    """What the host keeps of one TrainState in a store, so that no step has to read it from the device."""

    __slots__ = ("_at", "_numbers", "key", "left", "seed")

    def __init__(self, state: TrainState, left: int | None = None) -> None:
        self.key = state.key  # its `_version` counts writes of others; ours go through numpy and do not count
        self._at, self._numbers = self.key.data_ptr(), self.key.numpy()
        self.seed = int(self._numbers[0])
        self.left = left  # calls until the window closes, where that is known
        if left is None and not isinstance(state.accum, Empty):
            self.left = int(state.accum.left)

    @property
    def calls(self) -> int:
        """Calls so far, the second number of the key."""
        return int(self._view()[1])

    def advance(self, calls: int = 1) -> None:
        """One more call, or several in one."""
        self._view()[1] += calls

    def _view(self) -> Any:
        # Of numpy's: writing it costs a twentieth of an in-place op. `share_memory_`, which sending a state to another
        # process calls, has the key lie elsewhere.
        if self.key.data_ptr() != self._at:
            self._at, self._numbers = self.key.data_ptr(), self.key.numpy()
        return self._numbers


class Slots(NamedTuple):
    """How the leaves of a flat tree lie in a store's buffers."""

    treedef: tree.TreeDef
    places: tuple[tuple[str, int], ...]  # per leaf: ("int64" | "float32" | "key" | "own" | "one", index); see `_kind`
    identity: object  # hashed once instead of the structure; stores of one structure share it

    def gather(self, buffers: list[Tensor], keys: list[Tensor] | None = None) -> list[Tensor]:
        """The leaves: 0-d ones are elements of one buffer a dtype. Keys belong to the host: inside a graph they
        are zeros, and nothing may depend on them."""
        count = sum(kind == "key" for kind, _ in self.places)
        known = keys or [torch.zeros(2, dtype=torch.int64)] * count
        source = {"int64": buffers[0].unbind(), "float32": buffers[1].unbind(), "own": buffers[2:], "key": known}
        return [source[kind][index] if kind != "one" else buffers[2 + index][0] for kind, index in self.places]

    def scatter(self, buffers: list[Tensor], old: list[Tensor], new: list[Tensor]) -> None:
        """Write the leaves that changed back, in place."""
        scalars = [
            (buffers[number], torch.stack(fresh))
            for number, kind in enumerate(("int64", "float32"))
            if (fresh := [leaf for leaf, (place, _) in zip(new, self.places, strict=True) if place == kind])
        ]
        own = [
            (buffers[2 + index], after)
            for before, after, (kind, index) in zip(old, new, self.places, strict=True)
            if kind in ("own", "one") and after is not before
        ]
        # A leaf may be another one's old value: all are taken before the first is written.
        for buffer, after in scalars + [(buffer, apart(after, buffers)) for buffer, after in own]:
            buffer.copy_(after)


def apart(value: Tensor, buffers: list[Tensor]) -> Tensor:
    """The value in memory of its own, if it may lie in one of the buffers."""
    if torch.compiler.is_dynamo_compiling():
        return value.clone()  # Dynamo cannot compare memory; inductor folds the copy into what made the value
    memory = StorageWeakRef(value.untyped_storage())
    taken = any(StorageWeakRef(buffer.untyped_storage()) == memory for buffer in buffers)
    return value.clone() if taken else value


def memory_of(leaf: Tensor) -> Tensor:
    """What a tensor lies in, as a vector: slices and expanded tensors keep the strides that kernels are made for."""
    return leaf.detach().as_strided((tensor_layout.extent(leaf),), (1,))


def unshared(leaf: Tensor) -> Tensor:
    """The tensor in memory of its own, of the same strides."""
    return memory_of(leaf).clone().as_strided(leaf.shape, leaf.stride(), 0)


def place(flat: Tree) -> Slots:
    """Assign every leaf of a flat tree to a buffer."""
    leaves, treedef = tree.flatten(flat)
    check_tensors(leaves)
    keys = key_positions(treedef)
    counts = {"int64": 0, "float32": 0, "own": 0, "key": 0}
    places: list[tuple[str, int]] = []
    for position, leaf in enumerate(leaves):
        kind = "key" if position in keys else _kind(leaf)
        counted = "own" if kind == "one" else kind
        places.append((kind, counts[counted]))
        counts[counted] += 1
    return Slots(treedef, tuple(places), object())


def check_tensors(leaves: list[Any]) -> None:
    """Raise StateError for a leaf of a state that is no tensor."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise StateError(
                f"a {type(leaf).__name__} is no tensor",
                where="state",
                hint="torch.tensor(value): state is tensors only",
            )


def _kind(leaf: Tensor) -> str:
    if leaf.dim() == 0 and leaf.dtype in (torch.int64, torch.float32):
        return str(leaf.dtype).removeprefix("torch.")
    # Dynamo takes a 0-d float64 for a number of Python's and loses what is written into it: it lies in a vector of one.
    return "one" if leaf.dim() == 0 and leaf.dtype == torch.float64 else "own"


@functools.lru_cache(maxsize=64)
def key_positions(treedef: tree.TreeDef) -> frozenset[int]:
    """Which leaves of trees of a structure are the keys of TrainStates; the same tensor may be a leaf elsewhere too."""
    return frozenset(int(cast(Any, part.key)) for part in states(treespec.of(treedef)))


class DonatedBuffers:
    """Static buffers, the named tree over them, and the generation."""

    def __init__(
        self,
        state: Tree,
        layout: packed.Layout | None,
        layouts: object,
        *,
        adopt: bool = False,
        frozen: bool = True,
    ) -> None:
        self.layout = layout
        self.layouts = layouts  # of all compiled steps that take a state as it lies here
        flat = state if layout is None else packed.pack(layout, state)
        assert flat is not None
        self.slots = place(flat)
        leaves = tree.leaves(flat)
        given = _shared(leaves) if adopt else {id(leaf) for leaf in tree.leaves(state)}
        # Never written by a program's step, so the caller's tensors serve as they are: a frozen backbone is not held
        # twice. A step of one's own may write them.
        callers = _frozen(flat) if frozen else set[int]()
        given -= callers
        self.holds_callers = bool(callers)
        self.buffers = self._fill(leaves, copied=given)
        self.kinds: tuple[Any, ...] = ()  # of the buffers, as graphs were made for them; see `graphs.kinds`
        keys = [found.key.to("cpu", copy=True) for found in states(flat)]
        whole = tree.unflatten(self.slots.treedef, self.slots.gather(self.buffers, keys))
        self.named = whole if layout is None else packed.unpack(layout, whole)
        self.hosts = [HostCounters(found) for found in states(self.named)]
        self.device = self.buffers[0].device
        self.generation = 0
        self.calls = 0  # a generation may be several
        self.failed = False  # the last call was broken off
        self.leaves: list[Tensor] | None = None  # of the state, without its key, where they are at hand
        self.parts = [tuple(found) for found in states(self.named)]
        self.single = isinstance(self.named, TrainState)  # else a tree of several
        self.is_read = adopt  # by somebody, who may give a part of it back as a batch
        self.shown: list[tuple[Any, Any]] | None = None  # its dicts and lists, read by somebody, and what is in them
        self.memory: set[int] | None = None  # addresses of its buffers, asked for where something may lie there

    def _fill(self, leaves: list[Tensor], *, copied: set[int]) -> list[Tensor]:
        chosen: dict[str, list[Tensor]] = {"int64": [], "float32": [], "own": [], "key": []}
        device = tree.device(leaves)
        for leaf, (kind, _) in zip(leaves, self.slots.places, strict=True):
            if kind in ("own", "one"):
                # What is put off, a conjugation or a sign, a copy has in its memory; compiled code reads that alone.
                put_off = leaf.is_conj() or leaf.is_neg()
                mine = leaf.detach().clone() if id(leaf) in copied or put_off else leaf
                chosen["own"].append(mine if kind == "own" else mine.detach().reshape(1))
            else:
                chosen[kind].append(leaf)
        return [
            torch.stack(chosen["int64"]) if chosen["int64"] else torch.zeros(0, dtype=torch.int64, device=device),
            torch.stack(chosen["float32"]) if chosen["float32"] else torch.zeros(0, device=device),
            *chosen["own"],
        ]

    def live(self) -> Tree:
        """The state of this generation, to give to the user."""
        if self.single:
            return live(self, 0)
        count = iter(range(len(self.hosts)))
        return tree.map(lambda node: live(self, next(count)) if is_state(node) else node, self.named, is_leaf=is_state)

    def elsewhere(self, buffers: list[Tensor], named: Any, hosts: list[HostCounters]) -> DonatedBuffers:
        """A store of the same structure over other memory, of a single state."""
        other = object.__new__(DonatedBuffers)
        vars(other).update(vars(self))
        other.buffers, other.named, other.hosts, other.parts = buffers, named, hosts, [named]
        other.generation, other.calls, other.failed, other.is_read = 0, 0, False, False
        other.leaves = other.shown = other.memory = None
        return other

    def show(self) -> None:
        """Somebody reads the state, and may put another tensor into a dict of it."""
        if self.shown is None:
            self.shown = [(node, node.copy()) for node in treespec.containers(self.parts)]

    def is_as_shown(self) -> bool:
        """Whether no leaf has been put in, or taken out. Asks nothing of a state that nobody has read."""
        try:
            return all(node == held for node, held in self.shown or ())  # what is the same object is not compared
        except Exception:  # of two tensors that are compared
            return False

    def check(self, kinds: tuple[Any, ...]) -> None:
        """Raise StateError where a tensor of a state has been given memory of another layout (``tensor.data = ...``):
        compiled code would write where there is nothing."""
        for was, now in zip(self.kinds, kinds, strict=True):
            if was != now:
                raise StateError(
                    f"a tensor of the state, {list(was[0])} {was[2]} of strides {was[1]}, has become {list(now[0])} "
                    f"{now[2]} of strides {now[1]}",
                    where="state",
                    hint="state._replace(...) with the new tensor, or tensor.copy_(...) into the one that is there",
                )

    def beside(self, leaves: list[Any]) -> list[Any]:
        """What a step is given besides the state; a part of that very state, which the step writes, as a copy."""
        if self.memory is None:
            self.memory = {buffer.untyped_storage().data_ptr() for buffer in self.buffers if buffer.numel()}
        memory = self.memory

        def is_part(leaf: Any) -> bool:
            dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
            return dense and leaf.untyped_storage().data_ptr() in memory

        return [unshared(leaf) if is_part(leaf) else leaf for leaf in leaves]

    def begin(self) -> None:
        """A call is made: whatever becomes of it (Ctrl-C comes at any line), the state that went in is dead."""
        self.failed = True
        self.generation += 1

    def undo(self) -> None:
        """The call has ended before it wrote anything."""
        self.generation -= 1
        self.failed = False

    def end(self, calls: int = 1) -> None:
        """The call has been made: every key has moved."""
        self.calls += calls
        for host in self.hosts:
            host.advance(calls)
        self.failed = False

    def fate(self, index: int, generation: int, calls: int) -> str:
        """What became of the state of an earlier generation."""
        told = f"donated at step {self.hosts[index].calls - (self.calls - calls) + 1}"
        last = self.failed and generation == self.generation - 1
        return f"{told}, which failed and may have written half of it" if last else told


def overlaps(leaf: Tensor) -> bool:
    """Whether two indices of a tensor are one place in memory, as in `expand`: writing in place is an error there."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1 and stride < extent:
            return leaf.numel() > 0
        extent += stride * (size - 1)
    return False


def _shared(leaves: list[Tensor]) -> set[int]:
    """Leaves that cannot be written where they are: a target network may start as the very weights."""
    found, taken = set[int](), set[int]()
    for leaf in leaves:
        memory = leaf.untyped_storage().data_ptr()
        if memory in taken or overlaps(leaf):
            found.add(id(leaf))
        taken.add(memory)
    return found


def _frozen(state: Tree) -> set[int]:
    return {id(value) for found in states(state) for value in found.frozen.values()}
