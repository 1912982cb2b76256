"""The packed form of a state: a few flat buffers per dtype and parameter group instead of hundreds of small tensors.

An elementwise update of a whole group is one expression over one buffer: it compiles once instead of once a parameter,
and a compiled call passes a handful of tensors. What users, snapshots and evaluation see stays the named tree, as
zero-copy views of the buffers. A flat buffer goes by the name of the first parameter of its group, so that a name-keyed
dict keeps its shape in either form.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree
from .errors import StepContractError
from .types import Empty, Form, Labels, Missed, Params, TrainState, Tree


class Slot(NamedTuple):
    """Where a parameter lies in its group's buffer."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the slowest to the fastest in memory: channels_last survives packing
    size: int

    @property
    def is_turned(self) -> bool:
        """Whether it lies in memory in another order than that of its dimensions."""
        return self.order != tuple(range(len(self.order)))


class Group(NamedTuple):
    """Parameters of one dtype that the transform treats alike."""

    name: str  # key of the buffer: its first parameter, in the module's order
    slots: tuple[Slot, ...]  # in the buffer's


class Layout(NamedTuple):
    """The groups of a program's parameters."""

    groups: tuple[Group, ...]
    names: tuple[str, ...]  # in the module's order

    @property
    def form(self) -> Form:
        """For a program's ``static.steps``."""
        return Form(self.expand, self.collect, self.unreached)

    def expand(self, stored: Params) -> Params:
        """Flat buffers as named views, in the module's order."""
        named: Params = {}
        for group in self.groups:
            if group.name in stored:
                parts = stored[group.name].split([slot.size for slot in group.slots])
                named |= {slot.name: _shaped(part, slot) for slot, part in zip(group.slots, parts, strict=True)}
        return self.ordered(named)

    def unreached(self, names: frozenset[str]) -> dict[str, str]:
        """Of every parameter without a gradient, the buffer that it lies in.

        Raises:
            Split: a buffer holds parameters with a gradient, too.
        """
        found = {slot.name: group.name for group in self.groups for slot in group.slots if slot.name in names}
        held = {slot.name for group in self.groups if group.name in found.values() for slot in group.slots}
        if held != found.keys():
            raise Split(names)
        return found

    def ordered(self, named: dict[str, Any]) -> dict[str, Any]:
        """The same dict in the module's order."""
        return {name: named[name] for name in self.names if name in named}

    def collect(self, named: Params) -> Params:
        """Named tensors as flat buffers (copied)."""
        return {group.name: _concatenated(group, named) for group in self.groups}


def layout(params: Params, labels: Labels) -> Layout:
    """The groups of equal (dtype, label), in the order of their first parameters.

    Inside a group the parameters that are aligned best come first: each begins at a multiple of the largest power of
    two that divides its size, up to 64, so that it is as aligned in the buffer as it would be alone, without padding.

    Args:
        params: named tree.
        labels: name -> hashable, of the transform.

    Example:
        >>> import torch
        >>> found = layout({"a": torch.ones(2, 2), "b": torch.zeros(3)}, {"a": 0, "b": 0})
        >>> found.collect({"a": torch.ones(2, 2), "b": torch.zeros(3)})["a"].shape
        torch.Size([7])
    """
    grouped: dict[Any, list[Slot]] = {}
    for name, value in params.items():
        grouped.setdefault((value.dtype, labels[name]), []).append(_slot(name, value))
    groups = [Group(s[0].name, tuple(sorted(s, key=lambda slot: -_alignment(slot.size)))) for s in grouped.values()]
    return Layout(tuple(groups), tuple(params))


def _alignment(size: int) -> int:
    """The largest power of two, up to 64, that divides a size."""
    return math.gcd(size, 64)


def pack(layout: Layout, state: TrainState) -> TrainState | None:
    """The state with every parameter-shaped dict flat (copied); None where a dict holds part of a group only."""
    try:
        return _convert(state, lambda subtree: _pack_tree(layout, subtree))
    except _Uneven:
        return None


def unpack(layout: Layout, state: TrainState) -> TrainState:
    """The named tree of a packed state: views of its buffers."""
    return _convert(state, lambda subtree: _unpack_tree(layout, subtree))


class Split(StepContractError):
    """Parameters of one buffer must be treated apart: some have a gradient in this step, others have none."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__("no gradient, and others in their buffer have one", where=", ".join(sorted(names)))
        self.names = names


class _Uneven(Exception):
    """A name-keyed dict cuts through a group."""


def _convert(state: TrainState, one: Any) -> TrainState:
    accum = state.accum
    if not isinstance(accum, Empty):
        accum = accum._replace(grads=one(accum.grads))
    # ema.buffers, frozen and buffers go by other names and are left as they are.
    ema = state.ema if isinstance(state.ema, Empty) else state.ema._replace(params=one(state.ema.params))
    return TrainState(*state)._replace(params=one(state.params), opt_state=one(state.opt_state), ema=ema, accum=accum)


def _pack_tree(layout: Layout, subtree: Tree) -> Tree:
    slots = {slot.name: slot for group in layout.groups for slot in group.slots}

    def named(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and all(_fits(slots.get(k), v) for k, v in node.items())

    def whole(node: Any) -> bool:
        return isinstance(node, Missed) or named(node)  # counts are those of parameters in either form

    return tree.map(lambda node: _pack_dict(layout, node) if named(node) else node, subtree, is_leaf=whole)


def missed(state: TrainState) -> dict[str, tuple[int, ...]]:
    """Of every parameter that has missed an update, how many of each count: they tell apart what may share a buffer.
    Reads them on the host."""
    found: dict[str, list[int]] = {}
    nodes = tree.flatten(state.opt_state, is_leaf=lambda node: isinstance(node, Missed))[0]
    for node in nodes:
        if isinstance(node, Missed):
            for name, count in zip(sorted(node.names), node.counts.tolist(), strict=True):
                found.setdefault(name, []).append(count)
    return {name: tuple(counts) for name, counts in found.items() if any(counts)}


def _pack_dict(layout: Layout, node: dict[str, Any]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for group in layout.groups:
        held = [slot for slot in group.slots if slot.name in node]
        if not held:
            continue
        if len(held) < len(group.slots):
            raise _Uneven
        if isinstance(node[group.name], Empty):
            packed[group.name] = Empty()
        else:
            packed[group.name] = _concatenated(group, node)
    return packed


def _unpack_tree(layout: Layout, subtree: Tree) -> Tree:
    groups = {group.name: group for group in layout.groups}

    def flat(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and all(_holds(groups.get(k), v) for k, v in node.items())

    def whole(node: Any) -> bool:
        return isinstance(node, Missed) or flat(node)

    return tree.map(lambda node: _unpack_dict(layout, node) if flat(node) else node, subtree, is_leaf=whole)


def _unpack_dict(layout: Layout, node: dict[str, Any]) -> dict[str, Any]:
    groups = [group for group in layout.groups if group.name in node]
    if isinstance(next(iter(node.values())), Empty):
        return layout.ordered({slot.name: Empty() for group in groups for slot in group.slots})
    return layout.expand(node)


# A vector is its own piece, and what lies in the order of its dimensions is not turned: a view less for every leaf of
# the graph, and of the record that code is found by.


def _concatenated(group: Group, named: Params) -> Tensor:
    return torch.cat([_flat(named[slot.name], slot) for slot in group.slots])


def _flat(value: Tensor, slot: Slot) -> Tensor:
    if slot.is_turned:
        value = value.permute(slot.order)
    return value if len(slot.shape) == 1 else value.reshape(-1)


def _fits(slot: Slot | None, value: Any) -> bool:
    if slot is None:
        return False
    return isinstance(value, Empty) or (isinstance(value, Tensor) and tuple(value.shape) == slot.shape)


def _holds(group: Group | None, value: Any) -> bool:
    if group is None:
        return False
    size = sum(slot.size for slot in group.slots)
    return isinstance(value, Empty) or (isinstance(value, Tensor) and tuple(value.shape) == (size,))


def _slot(name: str, value: Tensor) -> Slot:
    order = tuple(range(value.dim()))
    if not value.is_contiguous():
        by_stride = tuple(sorted(order, key=lambda dim: -value.stride(dim)))
        order = by_stride if value.permute(by_stride).is_contiguous() else order
    return Slot(name, tuple(value.shape), order, value.numel())


def _shaped(part: Tensor, slot: Slot) -> Tensor:
    if len(slot.shape) == 1:
        return part
    stored = part.view([slot.shape[dim] for dim in slot.order])
    if not slot.is_turned:
        return stored
    back = sorted(range(len(slot.order)), key=lambda dim: slot.order[dim])
    return stored.permute(back)
