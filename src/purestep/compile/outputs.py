"""Results of a graph: scalars come in one vector, since a tensor for each takes a tenth of a small step's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import tree
from ..types import Mean, Metrics


class MetricVector(NamedTuple):
    """Metrics as one vector, as the graph returns them."""

    numbers: Tensor  # shape=(n,), float32, or float64
    columns: tuple[tuple[str, int, int], ...]  # (name, index of total, index of weight); the same object at every call

    def metrics(self) -> Metrics:
        """Convert to a dict of Means."""
        values, make = self.numbers.unbind(), tuple.__new__  # twice as fast as calling Mean
        return {name: make(Mean, (values[total], values[weight])) for name, total, weight in self.columns}


def as_dict(metrics: Metrics | MetricVector) -> Metrics:
    """Convert `MetricVector` metrics to a dict of Means; return a dict unchanged."""
    return metrics.metrics() if type(metrics) is MetricVector else cast(Metrics, metrics)


def numbers(outputs: list[Tensor]) -> list[bool]:
    """For each output, True if it goes into the vector: 0-d float32 or float64, and of the dtype and on the device of
    the first such output."""
    scalar = [leaf.dim() == 0 and leaf.dtype in (torch.float32, torch.float64) for leaf in outputs]
    first = next(((leaf.dtype, leaf.device) for leaf, one in zip(outputs, scalar, strict=True) if one), None)
    return [one and (leaf.dtype, leaf.device) == first for leaf, one in zip(outputs, scalar, strict=True)]


def builder(treedef: tree.TreeDef, is_scalar: list[bool]) -> Callable[[Any], Any]:
    """Return a function from a graph's outputs to the tree."""
    if not any(is_scalar):
        return lambda outputs: tree.unflatten(treedef, list(outputs))
    if all(is_scalar):
        columns = _columns(tree.unflatten(treedef, list(range(len(is_scalar)))))
        if columns is None:
            return lambda outputs: tree.unflatten(treedef, outputs[0].unbind())
        return lambda outputs: MetricVector(outputs[0], columns)

    def mixed(outputs: Any) -> Any:
        scalars, rest = iter(outputs[0].unbind()), iter(outputs[1:])
        return tree.unflatten(treedef, [next(scalars) if one else next(rest) for one in is_scalar])

    return mixed


def _columns(positions: Any) -> tuple[tuple[str, int, int], ...] | None:
    """Name and positions of every metric if the tree is a dict of Means, else None."""
    if type(positions) is not dict or not all(type(mean) is Mean for mean in positions.values()):
        return None
    return tuple((name, mean[0], mean[1]) for name, mean in positions.items())
