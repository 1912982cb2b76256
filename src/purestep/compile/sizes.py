"""Batch sizes: which dimensions vary, and fake tensors with symbolic sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Shapes: TypeAlias = list["tuple[int, ...] | None"]
"""The shape of each leaf of a batch; None for a leaf that is no tensor."""

Layouts: TypeAlias = list["list[list[int]] | None"]
"""Shape and strides of each leaf of a batch, as JSON has them; None for a leaf that is no tensor."""

Met: TypeAlias = dict[str, list[Layouts]]
"""The sizes that a step has met, in this order, for each kind of batch (see `kind`)."""

Varying: TypeAlias = "list[tuple[bool, ...]]"
"""Which dimensions of each leaf vary; empty for a leaf that is no tensor."""


def shapes(leaves: Sequence[Any]) -> Shapes:
    """The shapes of a batch's leaves."""
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]


def layouts(leaves: Sequence[Any]) -> Layouts:
    """The shapes and strides of a batch's leaves."""
    return [[list(leaf.shape), list(leaf.stride())] if isinstance(leaf, Tensor) else None for leaf in leaves]


def shapes_of(layouts: Layouts) -> Shapes:
    """The shapes alone."""
    return [None if each is None else tuple(each[0]) for each in layouts]


def kind(leaves: Sequence[Any]) -> str:
    """A text that is equal for batches with the same number of leaves, dtypes and ranks.

    Example:
        >>> kind([torch.zeros(4, 8), 3])
        'float32 2, -'
    """
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')} {leaf.dim()}" if isinstance(leaf, Tensor) else "-" for leaf in leaves
    )


def varying(seen: Sequence[Shapes]) -> Varying:
    """The dimensions in which batches of one structure differ.

    Example:
        >>> varying([[(4, 8), None], [(3, 8), None]])
        [(True, False), ()]
    """
    return [
        () if of_leaf[0] is None else tuple(len(set(of_dimension)) > 1 for of_dimension in zip(*of_leaf, strict=True))
        for of_leaf in zip(*seen, strict=True)
    ]


def example(met: Sequence[Layouts], varying: Varying) -> Layouts | None:
    """Return the newest sizes whose varying dimensions are at least 2, since torch specializes sizes 0 and 1; None if
    there are none."""
    for given in reversed(met):
        moving = [itertools.compress(shape or (), dims) for shape, dims in zip(shapes_of(given), varying, strict=True)]
        if all(size >= 2 for size in itertools.chain(*moving)):
            return given
    return None


FIRST = 2
"""The number of sizes met first that have a graph each."""


def is_first(met: Sequence[Layouts], leaves: Sequence[Any]) -> bool:
    """True if a batch has one of the sizes met first."""
    return shapes(leaves) in [shapes_of(each) for each in met[:FIRST]]


def extended(met: list[Layouts], leaves: Sequence[Any]) -> list[Layouts]:
    """The list with the sizes of a batch, if they decide which graphs there are: the first sizes, the next ones, and
    those by which another dimension varies. Else the same list.

    Example:
        >>> batches = [[torch.ones(shape)] for shape in ((8, 5), (3, 5), (1, 5), (4, 5), (6, 5), (8, 7))]
        >>> met = []
        >>> for batch in batches:
        ...     met = extended(met, batch)
        >>> [shapes_of(each)[0] for each in met]
        [(8, 5), (3, 5), (4, 5), (8, 7)]
    """
    known, new = [shapes_of(each) for each in met], layouts(leaves)
    if shapes(leaves) in known:
        return met
    wide = varying([*known, shapes(leaves)])
    decides = len(met) < FIRST or ((len(met) == FIRST or wide != varying(known)) and example([new], wide) is not None)
    return [*met, new] if decides else met


def like(leaves: list[Any], given: Layouts) -> list[Any]:
    """Replace the tensors of a batch by tensors of these shapes and strides, whose values are not set."""
    return [
        leaf if layout is None else leaf.new_empty_strided(*layout) for leaf, layout in zip(leaves, given, strict=True)
    ]


class Symbols:
    """Fake tensors with symbols for the varying sizes, and the guards that a trace with them produces.

    Args:
        inputs: tensors whose every size is constant.
        leaves: tensors of the batch.
        dims: which dimensions of each leaf vary.
    """

    def __init__(self, inputs: Sequence[Tensor], leaves: Sequence[Tensor], dims: Varying) -> None:
        # Private modules, which torch.export uses in the same way.
        from torch._dynamo.source import LocalSource
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental import symbolic_shapes as shapes_

        self._env = shapes_.ShapeEnv()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._env)
        constant = [self.mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
        self._leaves: list[Any] = []
        for index, (leaf, moves) in enumerate(zip(leaves, dims, strict=True)):
            kinds = [shapes_.DimDynamic.DYNAMIC if each else shapes_.DimDynamic.STATIC for each in moves]
            context = shapes_.StatelessSymbolicContext(dynamic_sizes=kinds)
            source = LocalSource(f"batch{index}")
            self._leaves.append(self.mode.from_tensor(_at_start(leaf), source=source, symbolic_context=context))
        self.fakes: list[Tensor] = [*constant, *self._leaves]

    def vary(self) -> bool:
        """True if a varying size is still a symbol: code that needs a number specializes it."""
        return any(
            isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None
            for leaf in self._leaves
            for size in leaf.shape
        )

    def fits(self) -> Callable[[list[Tensor]], bool]:
        """Return a check of whether the graph accepts a batch's tensors; call this after the graph was compiled."""
        guards, evaluate = self._env.produce_guards_expression(self._leaves, ignore_static=False), self._env
        if not guards:
            return lambda leaves: True
        return lambda leaves: bool(evaluate.evaluate_guards_expression(guards, [_at_start(leaf) for leaf in leaves]))


def _at_start(leaf: Tensor) -> Tensor:
    """A tensor of the same layout that begins where its memory begins: guards compare offsets, which graphs ignore."""
    if not leaf.storage_offset():
        return leaf
    return leaf.detach().as_strided(leaf.shape, leaf.stride(), 0).requires_grad_(leaf.requires_grad)
