"""How a graph returns a tree: scalars as one vector, since a small step spends a tenth of its time on a tensor each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import tree
from ..types import Mean, Metrics


class Stacked(NamedTuple):
    """Metrics as a graph returns them, in one vector: to a small step, a tensor a number is a tenth of its time."""

    numbers: Tensor  # shape=(n,), float32
    columns: tuple[tuple[str, int, int], ...]  # name, where its total and its weight are; one object for all calls

    def metrics(self) -> Metrics:
        """The same as a dict of Means."""
        values, make = self.numbers.unbind(), tuple.__new__  # half the time of calling Mean
        return {name: make(Mean, (values[total], values[weight])) for name, total, weight in self.columns}


def unstacked(metrics: Metrics | Stacked) -> Metrics:
    """A dict of Means, whichever it is."""
    return metrics.metrics() if type(metrics) is Stacked else cast(Metrics, metrics)


def numbers(outputs: list[Tensor]) -> list[bool]:
    """Which outputs go into the one vector: 0-d float32, on the device of the first such."""
    found = [leaf.dim() == 0 and leaf.dtype == torch.float32 for leaf in outputs]
    device = next((leaf.device for leaf, one in zip(outputs, found, strict=True) if one), None)
    return [one and leaf.device == device for leaf, one in zip(outputs, found, strict=True)]


def builder(treedef: tree.TreeDef, stacked: list[bool]) -> Callable[[Any], Any]:
    """From what a graph returns to the tree."""
    if not any(stacked):
        return lambda outputs: tree.unflatten(treedef, list(outputs))
    if all(stacked):
        columns = _columns(tree.unflatten(treedef, list(range(len(stacked)))))
        if columns is None:
            return lambda outputs: tree.unflatten(treedef, outputs[0].unbind())
        return lambda outputs: Stacked(outputs[0], columns)

    def mixed(outputs: Any) -> Any:
        scalars, rest = iter(outputs[0].unbind()), iter(outputs[1:])
        return tree.unflatten(treedef, [next(scalars) if one else next(rest) for one in stacked])

    return mixed


def _columns(positions: Any) -> tuple[tuple[str, int, int], ...] | None:
    """Name and positions of every metric, where the tree is a dict of Means and nothing else."""
    if type(positions) is not dict or not all(type(mean) is Mean for mean in positions.values()):
        return None
    return tuple((name, mean[0], mean[1]) for name, mean in positions.items())
