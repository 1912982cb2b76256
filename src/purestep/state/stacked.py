"""Stacked states: the states of several models as one, whose leaves have a leading dimension for the models.

`ensembles` trains them. Code that reads a number of a state on the host comes here, because in a stacked state it is a
vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from .. import tree
from ..errors import StateError
from ..types import Empty, TrainState, Tree


def stack(states: Sequence[Tree]) -> Tree:
    """Stack states of one structure into one state, as `purestep.ensemble` trains it.

    Example:
        >>> both = stack([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])
        >>> both["w"].shape, member(both, 1)["w"].tolist()
        (torch.Size([2, 3]), [1.0, 1.0, 1.0])

    Args:
        states: at least one tree of tensors. Each leaf has the same shape, dtype and device in all of them.

    Returns:
        A tree of the same structure: a leaf of shape S becomes a leaf of shape ``(len(states), *S)``, also the key. The
        memory is new.

    Raises:
        StateError: there is no state, or a leaf differs; the message has its path.
    """
    if not states:
        raise StateError("there is no state to stack", where="stack", hint="ps.stack([program.init(0), ...])")
    plain = [tree.map(lambda leaf: leaf, state) for state in states]  # a live state becomes a plain one
    (first, treedef), *rest = [tree.flatten(state) for state in plain]
    for index, (leaves, other) in enumerate(rest, 1):
        if other != treedef:
            paths = sorted({*tree.paths(plain[0])} ^ {*tree.paths(plain[index])})
            raise StateError(
                f"state {index} has another structure than state 0: {', '.join(paths[:3]) or 'other nodes'}",
                where="stack",
                hint="stack states of one program",
            )
        for path, one, leaf in zip(tree.paths(plain[0]), first, leaves, strict=True):
            if _kind(one) != _kind(leaf):
                raise StateError(
                    f"the leaf is {_kind(one)} in state 0 and {_kind(leaf)} in state {index}",
                    where=path,
                    hint="stack states of one program, on one device",
                )
    columns = zip(first, *(leaves for leaves, _ in rest), strict=True)
    return tree.unflatten(treedef, [torch.stack(column) for column in columns])


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')} on {leaf.device}"


def member(state: Tree, index: int) -> Tree:
    """Return the state of one member of an ensemble: a plain state of the program that the ensemble was built from.

    Example:
        >>> member({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, -1)["w"].tolist()
        [3.0, 4.0]

    Args:
        state: stacked, from `stack`, or of a program of `purestep.ensemble`.
        index: an int in [-members, members).

    Returns:
        A tree of the same structure without the leading dimension, in memory of its own.

    Raises:
        StateError: the state is not stacked, or has no such member.
    """
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree.leaves(state)}
    size = next(iter(sizes)) if len(sizes) == 1 else 0
    if not isinstance(index, SupportsIndex):  # pyright: ignore[reportUnnecessaryIsInstance]  # may be of any type
        raise StateError(
            f"the index is a {type(index).__name__}", where="member", hint="pass an int: ps.member(state, 0)"
        )
    index = index.__index__()
    if not -size <= index < size:
        found = f"has {size} members" if size else "is not stacked: its leaves have no common leading dimension"
        raise StateError(
            f"the state has no member {index}: it {found}", where="state", hint="pass a state of ps.ensemble"
        )
    return tree.map(lambda leaf: leaf[index].clone(), state)


def size(state: Tree) -> int:
    """Return the number of members of a stacked TrainState, 0 for any other state.

    Example:
        >>> size({"w": torch.zeros(3)})
        0
    """
    step: Any = state.step if isinstance(state, TrainState) else None
    return step.shape[0] if isinstance(step, Tensor) and step.dim() == 1 else 0


def check_train_state(state: Any, *, where: str) -> None:
    """Raise StateError for anything else than a TrainState."""
    if not isinstance(state, TrainState):
        what = f"the state is a {type(state).__name__}, not a TrainState"
        raise StateError(what, where=where, hint="program.init()")


def check_plain(state: Any, *, where: str, pieces: bool = False) -> None:
    """Raise StateError for anything else than the whole TrainState of one model; with ``pieces``, the part of a state
    that one of several processes holds is valid."""
    check_train_state(state, where=where)
    if size(state):
        raise StateError(
            f"the state is that of an ensemble of {size(state)} members",
            where=where,
            hint="pass ps.member(state, 0), with the program of one member",
        )
    if not pieces and not isinstance(state.placement, Empty):
        raise StateError(
            "the state is the part of one of several processes, and the program that of one process",
            where=where,
            hint="pass ps.full(state), which every process calls inside `with ps.parallel.start(...)`, or use the "
            "program that ps.distribute returned; Snapshots stores the whole state",
        )


def window_left(state: TrainState) -> int | None:
    """Return the micro-batches until the accumulation window of a state closes; None if the members differ in it. Waits
    for the device.

    The windows of the members of an ensemble close together, unless states of several positions were stacked, or a
    halted member goes on. A halted member stays where it was, and does not count.
    """
    left: Tensor = state.accum.left
    if not left.dim():
        return int(left)
    lefts = left.tolist()
    halted = [0] * len(lefts) if isinstance(state.halted, Empty) else state.halted.tolist()
    going = {one for one, call in zip(lefts, halted, strict=True) if not call} or {lefts[0]}
    return going.pop() if len(going) == 1 else None


def keys(state: TrainState) -> list[tuple[int, int]]:
    """Return (seed, calls) of every member; of a plain state, a list of one pair."""
    return [(seed, calls) for seed, calls in state.key.reshape(-1, 2).tolist()]
