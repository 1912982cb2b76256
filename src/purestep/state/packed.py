"""The packed form of a state: one flat buffer per dtype and parameter group instead of hundreds of small tensors.

An elementwise update of a group is one expression over one buffer: it compiles once instead of once per parameter, and
a compiled call passes few tensors. Users, snapshots and evaluation see the named tree, as views of the buffers. The key
of a flat buffer is the name of the first parameter in its group, so both forms are dicts by parameter name.
In a stacked state every leaf and every buffer has a leading dimension for the members.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import StepContractError
from ..types import Empty, Form, Labels, Missed, Params, TrainState, Tree
from . import stacked


class Slot(NamedTuple):
    """One parameter in the buffer of its group."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions by decreasing stride: packing keeps channels_last
    size: int

    @property
    def is_permuted(self) -> bool:
        """True if the memory order differs from the order of the dimensions."""
        return self.order != tuple(range(len(self.order)))


class Group(NamedTuple):
    """Parameters of one dtype and one label, in one buffer."""

    name: str  # key of the buffer: the first parameter in the module's order
    slots: tuple[Slot, ...]  # in the order of the buffer


class Packing(NamedTuple):
    """The groups of a program's parameters."""

    groups: tuple[Group, ...]
    names: tuple[str, ...]  # in the module's order

    @property
    def form(self) -> Form:
        """The argument of a program's ``static.made.steps``."""
        return Form(self.expand, self.collect, self.unreached)

    def expand(self, stored: Params) -> Params:
        """Return the parameters as views of the flat buffers, in the module's order."""
        named: Params = {}
        for group in self.groups:
            if group.name in stored:
                parts = stored[group.name].split([slot.size for slot in group.slots], dim=-1)
                named |= {slot.name: _shaped(part, slot) for slot, part in zip(group.slots, parts, strict=True)}
        return self.ordered(named)

    def unreached(self, names: frozenset[str]) -> dict[str, str]:
        """Return the buffer of every parameter without a gradient: parameter name -> buffer name.

        Raises:
            Split: a buffer also has parameters with a gradient.
        """
        buffer_of = {slot.name: group.name for group in self.groups for slot in group.slots if slot.name in names}
        affected = {slot.name for group in self.groups if group.name in buffer_of.values() for slot in group.slots}
        if affected != buffer_of.keys():
            raise Split(names)
        return buffer_of

    def ordered(self, named: dict[str, Any]) -> dict[str, Any]:
        """Sort a dict into the module's order."""
        return {name: named[name] for name in self.names if name in named}

    def collect(self, named: Params) -> Params:
        """Copy named tensors into flat buffers."""
        return {group.name: _concatenated(group, named) for group in self.groups}


def packing(params: Params, labels: Labels) -> Packing:
    """Group parameters by (dtype, label), in the order of the first parameter of each group.

    Example:
        >>> import torch
        >>> form = packing({"a": torch.ones(2, 2), "b": torch.zeros(3)}, {"a": 0, "b": 0})
        >>> form.collect({"a": torch.ones(2, 2), "b": torch.zeros(3)})["a"].shape
        torch.Size([7])

    Inside a group the parameters are sorted by alignment, best first: each begins at a multiple of the largest power of
    two up to 64 that divides its size. So it is aligned in the buffer without padding.

    Args:
        params: name -> P.
        labels: name -> hashable, from the transform.
    """
    grouped: dict[Any, list[Slot]] = {}
    for name, value in params.items():
        grouped.setdefault((value.dtype, labels[name]), []).append(_slot(name, value))
    groups = [Group(s[0].name, tuple(sorted(s, key=lambda slot: -_alignment(slot.size)))) for s in grouped.values()]
    return Packing(tuple(groups), tuple(params))


def _alignment(size: int) -> int:
    """Return the largest power of two, up to 64, that divides a size."""
    return math.gcd(size, 64)


def pack(packing: Packing, state: TrainState) -> TrainState | None:
    """Copy every dict by parameter name into flat buffers; return None if a dict has only a part of a group."""
    try:
        return _convert(state, lambda subtree: _pack_tree(packing, subtree))
    except _PartialGroup:
        return None


def unpack(packing: Packing, state: TrainState) -> TrainState:
    """Return the named tree of a packed state, as views of its buffers."""
    return _convert(state, lambda subtree: _unpack_tree(packing, subtree))


class Packings:
    """The packings of a program's states, shared by all of its compiled steps.

    Parameters share a buffer if the transform treats them alike and if, in the first step without gradients for all and
    in the updates that the state records, either all of them had a gradient or none.
    """

    def __init__(self, labels: Callable[[Params], Labels] | None) -> None:
        self._labels = labels  # None: states keep their tree
        self._apart = frozenset[str]()
        self._known: dict[Any, Packing | None] = {}

    def of(self, state: Any) -> Packing | None:
        """The packing of a state; None if it keeps its tree."""
        if self._labels is None or not isinstance(state, TrainState):
            return None
        counts = missed(state)
        key = tree.signature(state.params), tuple(sorted(counts.items()))
        if key not in self._known:
            many = stacked.size(state)
            params = {name: value[0] for name, value in state.params.items()} if many else state.params
            labels = self._labels(params)
            own: Labels = {n: (label, counts.get(n), n in self._apart) for n, label in labels.items()}
            found = packing(params, own)
            self._known[key] = found if pack(found, state) is not None else None
        return self._known[key]

    def split(self, names: frozenset[str]) -> None:
        """Put these parameters, which have no gradient, into separate buffers; after a second such set, states keep
        their tree."""
        if self._apart:
            self._labels = None
        self._apart = names
        self._known.clear()

    def known(self, packing: Packing | None) -> bool:
        """True if a packing is one of these."""
        return any(packing is found for found in self._known.values())


class Split(StepContractError):
    """A buffer must be split: some of its parameters have a gradient in this step, others have none."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__("no gradient, but others in the same buffer have one", where=", ".join(sorted(names)))
        self.names = names


class _PartialGroup(Exception):
    """A dict by parameter name has only a part of a group."""


def _convert(state: TrainState, one: Any) -> TrainState:
    accum = state.accum
    if not isinstance(accum, Empty):
        accum = accum._replace(grads=one(accum.grads))
    # ema.buffers, frozen and buffers have other names and do not change.
    ema = state.ema if isinstance(state.ema, Empty) else state.ema._replace(params=one(state.ema.params))
    return TrainState(*state)._replace(params=one(state.params), opt_state=one(state.opt_state), ema=ema, accum=accum)


def _pack_tree(packing: Packing, subtree: Tree) -> Tree:
    slots = {slot.name: slot for group in packing.groups for slot in group.slots}

    def is_named(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and all(_is_slot(slots.get(k), v) for k, v in node.items())

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Missed) or is_named(node)  # Missed has counts by parameter in both forms.

    return tree.map(lambda node: _pack_dict(packing, node) if is_named(node) else node, subtree, is_leaf=is_leaf)


def missed(state: TrainState) -> dict[str, tuple[int, ...]]:
    """Return the missed updates of every parameter that has missed one, with one count per `Missed` in the state.

    Parameters with different counts cannot share a buffer. Waits for the device.
    """
    counts_of: dict[str, list[int]] = {}
    nodes = tree.flatten(state.opt_state, is_leaf=lambda node: isinstance(node, Missed))[0]
    for node in nodes:
        if isinstance(node, Missed):
            of_members = node.counts.reshape(-1, len(node.names)).T.tolist()  # one row for each name
            for name, counts in zip(sorted(node.names), of_members, strict=True):
                counts_of.setdefault(name, []).extend(counts)
    return {name: tuple(counts) for name, counts in counts_of.items() if any(counts)}


def _pack_dict(packing: Packing, node: dict[str, Any]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for group in packing.groups:
        present = [slot for slot in group.slots if slot.name in node]
        if not present:
            continue
        if len(present) < len(group.slots):
            raise _PartialGroup
        if isinstance(node[group.name], Empty):
            packed[group.name] = Empty()
        else:
            packed[group.name] = _concatenated(group, node)
    return packed


def _unpack_tree(packing: Packing, subtree: Tree) -> Tree:
    groups = {group.name: group for group in packing.groups}

    def is_flat(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and all(_is_buffer(groups.get(k), v) for k, v in node.items())

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Missed) or is_flat(node)

    return tree.map(lambda node: _unpack_dict(packing, node) if is_flat(node) else node, subtree, is_leaf=is_leaf)


def _unpack_dict(packing: Packing, node: dict[str, Any]) -> dict[str, Any]:
    groups = [group for group in packing.groups if group.name in node]
    if isinstance(next(iter(node.values())), Empty):
        return packing.ordered({slot.name: Empty() for group in groups for slot in group.slots})
    return packing.expand(node)


# `_flat` and `_shaped` make no view of a vector, and no permutation of a contiguous tensor: the graph has fewer nodes.


def _concatenated(group: Group, named: Params) -> Tensor:
    return torch.cat([_flat(named[slot.name], slot) for slot in group.slots], dim=-1)


def _flat(value: Tensor, slot: Slot) -> Tensor:
    members = value.shape[: value.dim() - len(slot.shape)]
    if slot.is_permuted:
        value = value.permute(*range(len(members)), *(len(members) + dim for dim in slot.order))
    return value if len(slot.shape) == 1 else value.reshape(*members, -1)


def _is_slot(slot: Slot | None, value: Any) -> bool:
    if slot is None:
        return False
    return isinstance(value, Empty) or (isinstance(value, Tensor) and _fits(value, slot.shape))


def _is_buffer(group: Group | None, value: Any) -> bool:
    if group is None:
        return False
    size = sum(slot.size for slot in group.slots)
    return isinstance(value, Empty) or (isinstance(value, Tensor) and _fits(value, (size,)))


def _slot(name: str, value: Tensor) -> Slot:
    order = tuple(range(value.dim()))
    if not value.is_contiguous():
        by_stride = tuple(sorted(order, key=lambda dim: -value.stride(dim)))
        order = by_stride if value.permute(by_stride).is_contiguous() else order
    return Slot(name, tuple(value.shape), order, value.numel())


def _shaped(part: Tensor, slot: Slot) -> Tensor:
    if len(slot.shape) == 1:
        return part
    members = part.shape[:-1]
    stored = part.view([*members, *(slot.shape[dim] for dim in slot.order)])
    if not slot.is_permuted:
        return stored
    inverse = sorted(range(len(slot.order)), key=lambda dim: slot.order[dim])
    return stored.permute(*range(len(members)), *(len(members) + dim for dim in inverse))


def _fits(value: Tensor, shape: tuple[int, ...]) -> bool:
    """True if a tensor has this shape, in a stacked state behind the dimension for the members."""
    members = value.dim() - len(shape)
    return members in (0, 1) and tuple(value.shape[members:]) == shape
