"""Metrics read back late: steps hand in tensors, the host sees numbers when they have arrived.

Nothing here waits for the device unless it is told to: what has been handed in is packed into one tensor, copied
without blocking, and turned into rows once the copy is there.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..compile import Stacked, unstacked
from ..errors import StepContractError
from ..types import Mean, Metrics

Totals = dict[str, tuple[float, float]]
"""name -> (total, weight); entries of a vector-valued mean are called ``name[0]``, ``name[1]``, ..."""

ENTRY = re.compile(r"(?s).+\[\d+\]")
"""Names of entries, which no other metric may have."""

Kinds = dict[str, type[Mean]]
"""name -> the class of a mean that is finished in a way of its own (`metrics.from_torchmetrics`)."""
_NO_KINDS: Mapping[str, type[Mean]] = MappingProxyType({})


Columns = tuple[tuple[str, int, int], ...]
"""Of every number in a row: its name, and where its total and its weight are."""


class Rows(NamedTuple):
    """Metrics of consecutive calls, on the host, with the tags that they were handed in under."""

    tags: list[Any]
    columns: Columns
    numbers: list[list[float]]  # a list a call

    def values(self, index: int) -> Totals:
        """What one call measured."""
        row = self.numbers[index]
        return {name: (row[total], row[weight]) for name, total, weight in self.columns}

    def totals(self, name: str, default: float) -> list[float]:
        """Of every call, the total of that name."""
        return [total for total, _ in self.pairs(name)] or [default] * len(self.tags)

    def pairs(self, name: str) -> list[tuple[float, float]]:
        """Of every call, total and weight of that name; nothing where there is none."""
        at = next(((total, weight) for known, total, weight in self.columns if known == name), None)
        return [] if at is None else [(row[at[0]], row[at[1]]) for row in self.numbers]

    def part(self, start: int, stop: int | None = None) -> Rows:
        """Some of the calls."""
        return Rows(self.tags[start:stop], self.columns, self.numbers[start:stop])


class _Shipment(NamedTuple):
    tags: list[Any]
    columns: list[Columns]  # a call
    numbers: Tensor  # shape=(n,), one call after the other
    event: Any  # torch.cuda.Event, or None where the copy is done


class Meter:
    """A queue of metrics on their way to the host.

    Args:
        depth: calls that are packed at a time, >= 1.
    """

    def __init__(self, depth: int = 64) -> None:
        self.depth = depth
        self._waiting: list[Metrics | Stacked] = []
        self._tags: list[Any] = []
        self._shipped: deque[_Shipment] = deque()
        self.kinds: Kinds = {}

    def add(self, tag: Any, metrics: Metrics | Stacked) -> None:
        """Hand in the metrics of a call."""
        waiting = self._waiting
        waiting.append(metrics)
        self._tags.append(tag)
        if len(waiting) >= self.depth:
            self.ship()

    def ship(self) -> None:
        """Start the copy of what was handed in."""
        if not self._waiting:
            return
        tags, waiting, self._tags, self._waiting = self._tags, self._waiting, [], []
        if all(type(metrics) is Stacked for metrics in waiting):
            stacked = cast("list[Stacked]", waiting)
            packed, columns = torch.cat([metrics.numbers for metrics in stacked]), [m.columns for m in stacked]
        else:
            packed, columns = self._packed([unstacked(metrics) for metrics in waiting])
        self._shipped.append(_Shipment(tags, columns, *_to_host(packed)))

    def _packed(self, waiting: list[Metrics]) -> tuple[Tensor, list[Columns]]:
        check_devices(waiting, where="metrics")  # what a compiled step returns has not been looked at
        for metrics in waiting:
            self.kinds |= {name: type(mean) for name, mean in metrics.items() if type(mean) is not Mean}
        parts = [part for metrics in waiting for mean in metrics.values() for part in (mean[0], mean[1])]
        alike = len({(part.dim(), part.dtype) for part in parts}) == 1 and parts[0].dim() == 0
        if alike:
            packed = torch.stack(parts)
        else:
            packed = torch.cat([part.detach().reshape(-1).to(torch.float64) for part in parts] or [torch.zeros(0)])
        sizes = [tuple((name, 1 if alike else mean[0].numel()) for name, mean in found.items()) for found in waiting]
        columns = {found: _columns(found) for found in set(sizes)}
        return packed, [columns[found] for found in sizes]

    def rows(self, *, wait: bool) -> list[Rows]:
        """What has arrived, oldest first, as much together as has the same names; with ``wait`` everything."""
        if wait:
            self.ship()
        found: list[Rows] = []
        while self._shipped and (wait or self._shipped[0].event is None or self._shipped[0].event.query()):
            shipment = self._shipped.popleft()
            if shipment.event is not None:
                shipment.event.synchronize()
            found += _rows(shipment)
        return found


def check_devices(calls: Sequence[Metrics], *, where: str) -> None:
    """Nothing, where all totals and weights are on one device: they travel to the host together.

    Raises:
        StepContractError: with a metric on each of the devices.
    """
    if len({part.device for found in calls for mean in found.values() for part in (mean[0], mean[1])}) < 2:
        return
    places: dict[torch.device, str] = {}
    for name, mean in (item for found in calls for item in found.items()):
        places.setdefault(mean.total.device, f"the total of {name!r}")
        places.setdefault(mean.weight.device, f"the weight of {name!r}")
    raise StepContractError(
        f"metrics are on several devices: {', '.join(f'{what} on {device}' for device, what in places.items())}",
        where=where,
        hint="make all of them on the device of the batch: ps.Mean(total, torch.tensor(8.0, device=total.device))",
    )


def _columns(sizes: Iterable[tuple[str, int]]) -> Columns:
    """Where numbers lie that were packed mean by mean: totals, then weights."""
    columns: list[tuple[str, int, int]] = []
    start = 0
    for name, count in sizes:
        names = [name] if count == 1 else [f"{name}[{index}]" for index in range(count)]
        columns += [(one, start + index, start + count + index) for index, one in enumerate(names)]
        start += 2 * count
    return tuple(columns)


def _to_host(numbers: Tensor) -> tuple[Tensor, Any]:
    if numbers.device.type != "cuda":
        return numbers.cpu(), None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(numbers.device))
    return host, event


def _rows(shipment: _Shipment) -> list[Rows]:
    numbers, start = shipment.numbers.tolist(), 0
    found: list[Rows] = []
    for tag, columns in zip(shipment.tags, shipment.columns, strict=True):
        if not found or found[-1].columns is not columns:
            found.append(Rows([], columns, []))
        found[-1].tags.append(tag)
        found[-1].numbers.append(numbers[start : start + 2 * len(columns)])
        start += 2 * len(columns)
    return found


def add_to(sums: Totals, rows: Rows) -> None:
    """Add totals and weights by name, in place: one call after the other, so that the bits do not depend on how many
    of them arrive together."""
    for name, total, weight in rows.columns:
        first, second = sums.get(name, _NOTHING)
        for row in rows.numbers:
            first += row[total]
            second += row[weight]
        sums[name] = (first, second)


_NOTHING = (0.0, 0.0)


def means(totals: Mapping[str, tuple[float, float]], kinds: Mapping[str, type[Mean]] = _NO_KINDS) -> dict[str, float]:
    """Total over weight by name, nan where nothing counted; of vectors, the mean of the entries that count as well."""
    totals, finished = _finished(totals, kinds)
    found = {name: total / weight if weight else math.nan for name, (total, weight) in totals.items()}
    vectors: dict[str, list[float]] = {}
    for name, value in found.items():
        if ENTRY.fullmatch(name):
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
        entries = [key for key in totals if key == name or (ENTRY.fullmatch(key) and key.rpartition("[")[0] == name)]
        pairs = [left.pop(key) for key in entries]
        if pairs:
            found[name] = kind(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
    return left, found
