"""The copy of a state that a save makes before it returns.

Of a state that is laid out like the last one (every state of a run but its first) no leaf is looked at by itself: one
call of torch's guards compares them all, and one call copies them, into the memory of the last copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tensor_layout, tree
from ..types import Tree
from . import manifest as manifests
from . import staging
from .manifest import Leaf


class Layout(NamedTuple):
    """What is known of all states that are laid out alike."""

    paths: list[str]
    records: dict[str, Leaf]
    device: torch.device
    stored: list[int]
    """which leaves have values that orbax holds"""
    is_of: Callable[..., bool] | None
    """asks of leaves whether they are laid out like this; None: they have to be looked at one by one"""


class Look(NamedTuple):
    """A state before it is copied."""

    leaves: list[Any]
    layout: Layout


class Copies:
    """Copies of one state after another."""

    def __init__(self) -> None:
        self._paths = tree.Paths()
        self._layout: Layout | None = None  # of what is in `_spare`
        self._spare: staging.Buffers = {}

    def look(self, state: Tree) -> Look:
        """What there is to copy.

        Raises:
            StateError: a leaf that cannot be stored.
        """
        paths, leaves = self._paths(state)
        last = self._layout
        if last is not None and last.is_of is not None and last.paths is paths and last.is_of(*leaves):
            return Look(leaves, last)
        return Look(leaves, _layout(paths, leaves))

    def make(self, look: Look) -> staging.Buffers:
        """The copy, by path, in the memory of the last one, which nobody may be reading any more."""
        leaves, layout = look
        (spare, self._spare), (last, self._layout) = (self._spare, {}), (self._layout, None)
        tensors = [leaves[index] for index in layout.stored]
        if layout is last:
            staging.stage_again(tensors, spare)
        else:
            names = [layout.paths[index] for index in layout.stored]
            spare = staging.stage(dict(zip(names, tensors, strict=True)), spare)
        self._spare, self._layout = spare, layout
        return spare

    def clear(self) -> None:
        """Give the memory back."""
        self._spare, self._layout = {}, None


def _layout(paths: list[str], leaves: list[Any]) -> Layout:
    records = manifests.describe(list(zip(paths, leaves, strict=True)))
    stored = [index for index, path in enumerate(paths) if records[path].is_stored]
    near = all(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in leaves)
    return Layout(paths, records, tree.device(leaves), stored, tensor_layout.layout_guard(leaves) if near else None)
