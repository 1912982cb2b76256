"""A queue that reads metrics back late: steps put tensors in, the host takes numbers out once they have arrived.

The metrics of `EVERY` calls are packed into one tensor, copied without blocking, and read `LAG` calls later: which call
reads them depends on no clock, no device and no size of a batch, so a run is repeated exactly, on several processes
too. By then the copy has arrived, unless the host is `LAG` calls ahead of the device, where it waits. A copy from the
CPU's memory is read at once.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import metrics as metrics_
from ..compile import MetricVector
from ..errors import StepContractError
from ..metrics import handed_out
from ..state import base_name, entry_name, vector_name
from ..types import Mean, Metrics

EVERY = 16
"""Calls whose metrics are copied together."""
LAG = 4
"""Calls between the start of a copy from a device and its read."""

Totals = dict[str, tuple[float, float]]
"""name -> (total, weight); each entry of a vector-valued mean has a name (`state.entry_names`)."""

Kinds = dict[str, type[Mean]]
"""name -> the class of a mean that has its own `compute` (`metrics.from_torchmetrics`)."""
_NO_KINDS: Mapping[str, type[Mean]] = MappingProxyType({})

Columns = tuple[tuple[str, int, int], ...]
"""(name, index of the total, index of the weight) of every metric in a row."""


class CallMetrics(NamedTuple):
    """Metrics of consecutive calls, on the host, with the tags that the caller passed."""

    tags: list[Any]
    columns: Columns
    numbers: list[list[float]]  # one list per call

    def values(self, index: int) -> Totals:
        """Return the metrics of one call."""
        row = self.numbers[index]
        return {name: (row[total], row[weight]) for name, total, weight in self.columns}

    def applied(self) -> list[float]:
        """Return for every call whether an update was applied, by some member of an ensemble at least."""
        at = [total for name, total, _ in self.columns if base_name(name) == "applied"]
        return [max(row[total] for total in at) for row in self.numbers] if at else [1.0] * len(self.tags)

    def part(self, start: int, stop: int | None = None) -> CallMetrics:
        """Return some of the calls."""
        return CallMetrics(self.tags[start:stop], self.columns, self.numbers[start:stop])


class _Copy(NamedTuple):
    """Packed metrics on their way to the host."""

    tags: list[Any]
    columns: Columns
    numbers: Tensor  # shape=(calls, n)
    event: Any  # torch.cuda.Event, or None if the copy is complete
    read_at: int  # the call


class MetricQueue:
    """A queue of metrics on their way to the host. Metrics unlike those of the calls before are checked.

    Args:
        where: the step, for messages.
    """

    def __init__(self, where: str = "train_step") -> None:
        self.kinds: Kinds = {}
        self._where = where
        self._known: dict[Any, Columns] = {}  # by the names, classes, shapes, dtypes and devices that are checked
        self._calls = 0
        self._waiting: list[tuple[Any, Metrics | MetricVector, Columns]] = []  # for the start of their copy
        self._copies: deque[_Copy] = deque()

    def add(self, tag: Any, metrics: Metrics | MetricVector) -> None:
        """Put in the metrics of a call.

        Raises:
            StepContractError: see `check_metrics`.
        """
        if not isinstance(metrics, MetricVector):
            metrics = handed_out.measured(metrics)
        self._waiting.append((tag, metrics, self._columns_of(metrics)))
        self._calls += 1
        if len(self._waiting) == EVERY:
            self.start_copy()

    def start_copy(self) -> None:
        """Start to copy all metrics that wait for it: those of consecutive calls with the same columns together."""
        begun: list[_Copy] = []
        for (_, columns), group in itertools.groupby(self._waiting, key=lambda entry: (type(entry[1]), entry[2])):
            tags, calls, _ = zip(*group, strict=True)
            numbers, event = _to_host(_packed(calls).view(len(tags), 2 * len(columns)))
            read_at = self._calls + (0 if event is None else LAG)
            begun.append(_Copy(list(tags), columns, numbers, event, read_at))
        self._copies.extend(begun)
        self._waiting = []  # only now: after an error nothing is taken for counted

    def _columns_of(self, metrics: Metrics | MetricVector) -> Columns:
        """The columns of packed metrics: for each mean its totals, then its weights."""
        if isinstance(metrics, MetricVector):
            return metrics.columns
        try:
            kind = tuple(
                (name, type(mean), *((part.shape, part.dtype, part.device) for part in mean))
                for name, mean in metrics.items()
            )
        except Exception:  # they are no Means
            check_metrics(metrics, where=self._where)
            raise
        if kind not in self._known:
            check_metrics(metrics, where=self._where)
            self._known[kind] = _columns([(name, tuple(mean.total.shape)) for name, mean in metrics.items()])
            self.kinds |= {name: type(mean) for name, mean in metrics.items() if type(mean) is not Mean}
        return self._known[kind]

    def is_due(self) -> bool:
        """True if a copy is to be read now."""
        return bool(self._copies) and self._copies[0].read_at <= self._calls

    def arrived(self, *, wait: bool) -> list[CallMetrics]:
        """Take out the copies that are due, oldest first; with ``wait``, all.

        Consecutive calls with the same names are in one `CallMetrics`.
        """
        if wait:
            self.start_copy()
        arrived: list[CallMetrics] = []
        while self.is_due() or (wait and self._copies):
            copy = self._copies.popleft()
            if copy.event is not None:
                copy.event.synchronize()
            arrived.append(CallMetrics(copy.tags, copy.columns, copy.numbers.tolist()))
        return arrived

    def add_to(self, sums: Totals, *, wait: bool) -> None:
        """Add what is due to the sums, in place; with ``wait``, all."""
        for calls in self.arrived(wait=wait):
            add_to(sums, calls)


def check_metrics(metrics: Any, *, where: str) -> None:
    """Check that the metrics of a step are a dict of Means, on one device, since they are copied together.

    Raises:
        StepContractError: they are not, they are on several devices, or one has a reserved name.
    """
    wrong = {"": metrics} if not isinstance(metrics, dict) else {k: v for k, v in metrics.items() if not _is_mean(v)}
    for name, value in wrong.items():
        kind = type(value).__name__
        if isinstance(value, Mean):
            kind += (
                f" of a {type(value.total).__name__} and a {type(value.weight).__name__}, not two real tensors alike"
            )
        raise StepContractError(
            f"metric {name!r} is a {kind}" if isinstance(metrics, dict) else f"the step returned a {kind}",
            where=where,
            hint="{name: ps.Mean(total, weight)}, two tensors",
        )
    entries = (name for name, value in metrics.items() if type(value) is Mean and vector_name(str(name)))
    if entry := next(entries, None):  # a metric of a subclass has one name for each member of an ensemble
        raise StepContractError(
            f"metric {entry!r} has the name of an entry of a metric that is a vector", where=where, hint="another name"
        )
    places: dict[torch.device, str] = {}
    for name, mean in metrics.items():
        places.setdefault(mean.total.device, f"the total of {name!r}")
        places.setdefault(mean.weight.device, f"the weight of {name!r}")
    if len(places) > 1:
        raise StepContractError(
            f"metrics are on several devices: {', '.join(f'{what} on {device}' for device, what in places.items())}",
            where=where,
            hint="make all of them on the device of the batch: ps.Mean(total, torch.tensor(8.0, device=total.device))",
        )


def _is_mean(value: Any) -> bool:
    known = isinstance(value, Mean) and _is_real(value.total) and _is_real(value.weight)
    return known and value.total.numel() == value.weight.numel()


def _is_real(value: Any) -> bool:
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return plain and not (value.is_complex() or value.is_quantized or value.is_nested)


def _columns(shapes: list[tuple[str, tuple[int, ...]]]) -> Columns:
    columns: list[tuple[str, int, int]] = []
    start = 0
    for name, shape in shapes:
        count, names = math.prod(shape), [name]
        if count != 1:
            names = [entry_name(name, *place) for place in itertools.product(*map(range, shape))]
        columns += [(one, start + index, start + count + index) for index, one in enumerate(names)]
        start += 2 * count
    return tuple(columns)


def _packed(calls: Sequence[Metrics | MetricVector]) -> Tensor:
    """The numbers of calls with the same columns in one vector."""
    if isinstance(calls[0], MetricVector):
        return torch.cat([cast(MetricVector, one).numbers for one in calls])
    parts = [part for one in calls for mean in cast(Metrics, one).values() for part in (mean[0], mean[1])]
    kinds = {(part.dim(), part.dtype) for part in parts}
    if len(kinds) == 1 and parts[0].dim() == 0:
        return torch.stack(parts)
    flat = [part.detach().reshape(-1) for part in parts]
    # MPS has no float64.
    flat = [part.cpu() if part.device.type == "mps" else part for part in flat]
    return torch.cat([part.to(torch.float64) for part in flat] or [torch.zeros(0)])


def _to_host(numbers: Tensor) -> tuple[Tensor, Any]:
    if numbers.device.type != "cuda":
        return numbers.cpu(), None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(numbers.device))
    return host, event


def add_to(sums: Totals, calls: CallMetrics) -> None:
    """Add totals and weights by name, in place.

    One call after the other, so that the bits do not depend on how many calls arrive together.
    """
    for name, total, weight in calls.columns:
        first, second = sums.get(name, (0.0, 0.0))
        for row in calls.numbers:
            first += row[total]
            second += row[weight]
        sums[name] = (first, second)


def means(
    totals: Mapping[str, tuple[float, float]],
    kinds: Mapping[str, type[Mean]] = _NO_KINDS,
    computed: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> dict[str, float]:
    """Return total / weight by name, nan if the weight is 0. A vector also gets the mean of its counted entries.

    Args:
        totals: sums by name.
        kinds: classes of means that compute themselves.
        computed: their values as `computed_of` returned them, for a class that is not in ``kinds``.
    """
    plain, finished = _finished(totals, kinds)
    stored = {name: values for name, values in computed.items() if name not in kinds}
    for name in stored:
        for key in _entries_of(name, plain):
            del plain[key]
    values = {name: total / weight if weight else math.nan for name, (total, weight) in plain.items()}
    found = averaged(values) | metrics_.compute(finished)
    for named in stored.values():
        found |= named
    return averaged(found) if any(map(vector_name, {**kinds, **stored})) else found


def computed_of(totals: Mapping[str, tuple[float, float]], kinds: Mapping[str, type[Mean]]) -> dict[str, Any]:
    """Return the values of the means that compute themselves: name of the metric -> names in the history -> value."""
    return {name: metrics_.compute({name: mean}) for name, mean in _finished(totals, kinds)[1].items()}


def averaged(values: Mapping[str, float]) -> dict[str, float]:
    """Add the mean of the entries that are not nan to the values, for every vector without one: ``f1`` for ``f1[0]``,
    ``f1[1]``, ...; for a matrix first that of each row."""
    vectors: dict[str, list[float]] = {}
    for name, value in values.items():
        if (vector := vector_name(name)) is not None and vector not in values:
            vectors.setdefault(vector, []).extend([] if math.isnan(value) else [value])
    if not vectors:
        return dict(values)
    means = {name: sum(entries) / len(entries) if entries else math.nan for name, entries in vectors.items()}
    return averaged({**values, **means})


def as_means(totals: Totals, kinds: Mapping[str, type[Mean]]) -> Metrics:
    """Return totals as metrics on the host, in float64."""
    plain, finished = _finished(totals, kinds)
    made = {name: Mean(*(torch.tensor(part, dtype=torch.float64) for part in sums)) for name, sums in plain.items()}
    return made | finished


def _finished(totals: Mapping[str, tuple[float, float]], kinds: Mapping[str, type[Mean]]) -> tuple[Totals, Metrics]:
    """Split off the means that have a class of their own, rebuilt from their entries."""
    left, rebuilt = dict(totals), {}
    for name, kind in kinds.items():
        pairs = [left.pop(key) for key in _entries_of(name, totals)]
        if pairs:
            rebuilt[name] = kind(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
    return left, rebuilt


def _entries_of(name: str, totals: Mapping[str, Any]) -> list[str]:
    return [key for key in totals if key == name or vector_name(key) == name]
