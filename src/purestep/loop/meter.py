"""Metrics read back late: steps hand in tensors, the host sees numbers when they have arrived.

Nothing here waits for the device unless it is told to: what has been handed in is packed into one tensor, copied
without blocking, and turned into rows once the copy is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..types import Mean, Metrics

Totals = dict[str, tuple[float, float]]
"""name -> (total, weight); entries of a vector-valued mean are called ``name[0]``, ``name[1]``, ..."""

Kinds = dict[str, type[Mean]]
"""name -> the class of a mean that is finished in a way of its own (`metrics.from_torchmetrics`)."""
_NO_KINDS: Mapping[str, type[Mean]] = MappingProxyType({})


class Row(NamedTuple):
    """One call's metrics, on the host, with the tag it was handed in under."""

    tag: Any
    values: Totals


class _Shipment(NamedTuple):
    tags: list[Any]
    names: list[list[tuple[str, int]]]  # per call: name, how many numbers
    numbers: Tensor
    event: Any  # torch.cuda.Event, or None where the copy is done


class Meter:
    """A queue of metrics on their way to the host.

    Args:
        depth: calls that are packed at a time, >= 1.
    """

    def __init__(self, depth: int = 64) -> None:
        self.depth = depth
        self._waiting: list[tuple[Any, Metrics]] = []
        self._shipped: deque[_Shipment] = deque()
        self.kinds: Kinds = {}

    def add(self, tag: Any, metrics: Metrics) -> None:
        """Hand in the metrics of a call."""
        self._waiting.append((tag, metrics))
        if any(type(mean) is not Mean for mean in metrics.values()):
            self.kinds |= {name: type(mean) for name, mean in metrics.items() if type(mean) is not Mean}
        if len(self._waiting) >= self.depth:
            self.ship()

    def ship(self) -> None:
        """Start the copy of what was handed in."""
        if not self._waiting:
            return
        tags = [tag for tag, _ in self._waiting]
        named = [list(metrics.items()) for _, metrics in self._waiting]
        self._waiting = []
        parts = [part for items in named for _, mean in items for part in (mean[0], mean[1])]
        alike = len({(part.dim(), part.dtype) for part in parts}) == 1 and parts[0].dim() == 0
        if alike:
            packed, names = torch.stack(parts), [[(name, 1) for name, _ in items] for items in named]
        else:
            packed = torch.cat([part.detach().reshape(-1).to(torch.float64) for part in parts] or [torch.zeros(0)])
            names = [[(name, mean.total.numel()) for name, mean in items] for items in named]
        self._shipped.append(_Shipment(tags, names, *_to_host(packed)))

    def rows(self, *, wait: bool) -> list[Row]:
        """The rows that have arrived, oldest first; with ``wait`` everything that was handed in."""
        if wait:
            self.ship()
        found: list[Row] = []
        while self._shipped and (wait or self._shipped[0].event is None or self._shipped[0].event.query()):
            shipment = self._shipped.popleft()
            if shipment.event is not None:
                shipment.event.synchronize()
            found += _rows(shipment)
        return found


def _to_host(numbers: Tensor) -> tuple[Tensor, Any]:
    if numbers.device.type != "cuda":
        return numbers.cpu(), None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(numbers.device))
    return host, event


def _rows(shipment: _Shipment) -> list[Row]:
    numbers, start = shipment.numbers.tolist(), 0
    rows: list[Row] = []
    for tag, names in zip(shipment.tags, shipment.names, strict=True):
        values: Totals = {}
        for name, count in names:
            if count == 1:
                values[name] = (numbers[start], numbers[start + 1])
            else:
                pairs = zip(numbers[start : start + count], numbers[start + count : start + 2 * count], strict=True)
                values |= {f"{name}[{index}]": pair for index, pair in enumerate(pairs)}
            start += 2 * count
        rows.append(Row(tag, values))
    return rows


def add_to(sums: Totals, right: Totals) -> None:
    """Add totals and weights by name, in place."""
    for name, (total, weight) in right.items():
        before = sums.get(name, _NOTHING)
        sums[name] = (before[0] + total, before[1] + weight)


_NOTHING = (0.0, 0.0)


def add(left: Mapping[str, tuple[float, float]], right: Totals) -> Totals:
    """Sums of totals and weights, by name."""
    merged = dict(left)
    add_to(merged, right)
    return merged


def means(totals: Mapping[str, tuple[float, float]], kinds: Mapping[str, type[Mean]] = _NO_KINDS) -> dict[str, float]:
    """Total over weight by name, nan where nothing counted; of vectors, the mean of the entries that count as well."""
    totals, finished = _finished(totals, kinds)
    found = {name: total / weight if weight else math.nan for name, (total, weight) in totals.items()}
    vectors: dict[str, list[float]] = {}
    for name, value in found.items():
        if name.endswith("]"):
            vectors.setdefault(name.rpartition("[")[0], []).extend([] if math.isnan(value) else [value])
    averaged = {name: sum(values) / len(values) if values else math.nan for name, values in vectors.items()}
    return found | averaged | {name: float(mean) for name, mean in finished.items()}


def as_means(totals: Totals, kinds: Mapping[str, type[Mean]] = _NO_KINDS) -> Metrics:
    """Totals as metrics on the host."""
    plain, finished = _finished(totals, kinds)
    return {name: Mean(torch.tensor(t), torch.tensor(w)) for name, (t, w) in plain.items()} | finished


def _finished(totals: Mapping[str, tuple[float, float]], kinds: Mapping[str, type[Mean]]) -> tuple[Totals, Metrics]:
    """What is left, and the means of a kind of their own, put together again from their entries."""
    left, found = dict(totals), {}
    for name, kind in kinds.items():
        entries = [key for key in totals if key == name or key.startswith(f"{name}[")]
        pairs = [left.pop(key) for key in entries]
        if pairs:
            found[name] = kind(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
    return left, found
