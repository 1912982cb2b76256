"""The copy of a state that `save` makes before it returns.

If a state has the same layout as the last one (every state of a run but its first), one call of torch's guards compares
all leaves, and one call copies them into the memory of the last copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..torch_ext import tensor_layout
from ..types import Tree
from . import manifest as manifests
from . import parts, staging
from .manifest import Leaf
from .parts import Spread


class Layout(NamedTuple):
    """Facts about all states with the same layout."""

    paths: list[str]
    records: dict[str, Leaf]
    """of whole tensors"""
    device: torch.device
    spread: Spread
    stored: list[int]
    """indices of the leaves whose values orbax stores, in this process"""
    matches: Callable[..., bool] | None
    """``matches(*leaves)`` is True for leaves with this layout; None: check each leaf"""


class Described(NamedTuple):
    """The leaves of a state and their layout."""

    leaves: list[Any]
    layout: Layout


class StateCopies:
    """Copies one state after another, into the same memory."""

    def __init__(self) -> None:
        self._paths = tree.Paths()
        self._layout: Layout | None = None  # of the tensors in `_spare`
        self._spare: staging.Buffers = {}

    def describe(self, state: Tree) -> Described:
        """Check that the state can be stored, and return its leaves and layout.

        Raises:
            StateError: a leaf cannot be stored.
            RankError: the state is in pieces that the open mesh does not have.
        """
        paths, leaves = self._paths(state)
        last = self._layout
        if last is not None and last.matches is not None and last.paths is paths and last.matches(*leaves):
            return Described(leaves, last)
        return Described(leaves, _layout(paths, leaves, parts.spread(state)))

    def copy(self, described: Described) -> staging.Buffers:
        """Copy the tensors, by path, into the memory of the last copy, which must be unused."""
        leaves, layout = described
        (spare, self._spare), (last, self._layout) = (self._spare, {}), (self._layout, None)
        cuts = layout.spread.cuts
        tensors = [parts.own_rows(leaves[index], cuts.get(layout.paths[index])) for index in layout.stored]
        if layout is last:
            staging.stage_again(tensors, spare)
        else:
            names = [layout.paths[index] for index in layout.stored]
            spare = staging.stage(dict(zip(names, tensors, strict=True)), spare)
        self._spare, self._layout = spare, layout
        return spare

    def clear(self) -> None:
        """Free the memory."""
        self._spare, self._layout = {}, None


def _layout(paths: list[str], leaves: list[Any], spread: Spread) -> Layout:
    records = described(list(zip(paths, leaves, strict=True)), spread)
    stored = [index for index, path in enumerate(paths) if records[path].is_stored and spread.writes(path)]
    near = all(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in leaves)
    return Layout(
        paths, records, tree.device(leaves), spread, stored, tensor_layout.layout_guard(leaves) if near else None
    )


def described(leaves: list[tuple[str, Any]], spread: Spread) -> dict[str, Leaf]:
    """`manifest.describe`, with the shapes of whole tensors."""
    records = manifests.describe(leaves)
    return records | {path: records[path]._replace(shape=rows.shape) for path, rows in spread.cuts.items()}
