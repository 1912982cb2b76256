"""The accounts of a run: metrics of calls become sums of the history, log lines, and a count of applied updates."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import stopping
from ..compile import MetricVector, states
from ..errors import ConfigError, NonFiniteError, StepContractError
from ..events import Logged
from ..state import base_name, best_name, entry_name, stacked
from ..step import rate_names
from ..types import Metrics, TrainState, Tree
from . import metric_queue
from .loop_state import Call, Cell, LoopState, cell
from .metric_queue import CallMetrics, MetricQueue, Totals
from .nonfinite_steps import can_halt, halt_error, halt_spoilt

if TYPE_CHECKING:
    from .policy import Monitor

_BARE = ("grad_norm", "scale")  # step metrics that do not describe training data: no "train_" before them
_HIDDEN = ("applied",)
_MAX_REFUSALS = 100  # refused updates in a row, after which the run ends or warns
_log = logging.getLogger("purestep")


class Accounting:
    """Takes metrics as tensors; returns loop states and log lines once the numbers have arrived.

    Args:
        log_every: updates between two log lines, 0 for none.
        state, loop: those with which the run begins, or goes on.
    """

    def __init__(self, log_every: int, state: Tree, loop: LoopState) -> None:
        self.rates = {"lr"}.union(*(rate_names(part) for part in states(state)))
        """Metrics that are learning rates: their last value counts, not the mean."""
        self.rates |= {entry_name(name, index) for name in self.rates for index in range(stacked.size(state))}
        self.lines: deque[Logged] = deque()
        """Complete log lines, which the run takes out."""
        self._log_every = log_every
        calls, drawn = (int(state.step.max()), stacked.keys(state)[0][1]) if isinstance(state, TrainState) else (0, 0)
        self._before = calls - loop.calls  # calls of the train state before the first one of this run
        self.key_ahead = drawn - calls
        """Calls that the key counts and ``step`` does not: those that a halted state refused before it went on."""
        self._halts = can_halt(state)  # batches are held until their calls are known to be good
        self._warned = False
        self._refusals = 0  # refused updates in a row
        self._named_members = set[int]()  # of an ensemble, in warnings
        self._queue = MetricQueue()
        self.is_due = self._queue.is_due  # `settle` has something to take in
        self._held: deque[tuple[Call, Any]] = deque()
        self._timer = _Timer()

    def add(self, call: Call, metrics: Metrics | MetricVector, loop: LoopState, batch: Any = None) -> None:
        """Put in the metrics of a call and its batch (None for a flush); ``loop`` is the state after the call."""
        if self._halts:
            self._held.append((call, batch))
        self._queue.add(call, metrics)
        if not call.closing:
            return
        self._timer.steps += 1
        if self._log_every and loop.updates_at_most % self._log_every == 0:
            self._queue.start_copy()

    def settle(self, loop: LoopState, state: Tree, *, wait: bool) -> LoopState:
        """Return the loop state with what has arrived; with ``wait``, wait for everything.

        Raises:
            NonFiniteError: the state halted, or with ``wait`` will halt at the end of its window; or the state skips
                and too many updates in a row were refused.
        """
        arrived = self._queue.arrived(wait=wait)
        settled = self._count(arrived, loop, state) if arrived else loop
        if wait and self._halts and (error := halt_error(halt_spoilt(state), at="in the window open at call")):
            raise error
        if wait and self._queue.kinds:  # a resumed run that has made no call yet does not know the classes
            settled = settled._replace(computed=metric_queue.computed_of(settled.interval, self._queue.kinds))
        return settled

    def _count(self, arrived: list[CallMetrics], loop: LoopState, state: Tree) -> LoopState:
        updates, pending, last = loop.updates, loop.pending, dict(loop.last)
        interval, line = dict(loop.interval), dict(loop.line)
        sums = (interval, line) if self._log_every else (interval,)
        for calls in arrived:
            begun = 0
            for index, applied in enumerate(calls.applied()):
                call: Call = calls.tags[index]
                if not call.closing:
                    continue
                pending -= 1
                if not applied:
                    self._refused(call, calls.values(index), state)
                    continue
                self._refusals = 0
                updates += 1
                if self._log_every and updates % self._log_every == 0:
                    _sum(calls.part(begun, index + 1), sums, last, self.rates)
                    begun = index + 1
                    self.lines.append(self._line(call, updates, line, last))
                    line.clear()
            _sum(calls.part(begun), sums, last, self.rates)
            self._warn_of_loss(calls.tags[-1], interval)
        self._release(arrived, state)
        return loop._replace(updates=updates, pending=pending, interval=interval, line=line, last=last)

    def _warn_of_loss(self, call: Call, sums: Totals) -> None:
        """Warn once if a step without a TrainState returns a loss that is not finite. Its author may intend that."""
        total, weight = sums.get("loss", (0.0, 0.0))
        if self._halts or self._warned or not weight or math.isfinite(total):
            return
        self._warned = True
        _log.warning(
            "the loss is %g up to %s, and the step has no TrainState that would halt at it: the run goes on (cure: in "
            "the step, keep the old state where the loss is not finite; or a callback that returns ps.Stop)",
            *(total / weight, call.place),
        )

    def window(self, number: int) -> list[tuple[Call, Any]]:
        """Return the calls, with their batches, of the update that halted at this call (as the state counts)."""
        held = [(call, batch) for call, batch in self._held if call.number + self._before <= number]
        earlier = [index for index, (call, _) in enumerate(held[:-1]) if call.closing]
        return held[earlier[-1] + 1 :] if earlier else held

    def _release(self, arrived: list[CallMetrics], state: Tree) -> None:
        """Release the batches of calls that are known to be good: those of closed windows."""
        known: Iterator[Call] = (call for calls in reversed(arrived) for call in reversed(calls.tags))
        if not isinstance(state, TrainState):
            self._check_halted(state)  # a user's own step need not say that it refused an update
            good = next(known)
        else:
            good = next((call for call in known if call.closing), None)
        while good is not None and self._held and self._held[0][0].number <= good.number:
            self._held.popleft()

    def _refused(self, call: Call, values: Totals, state: Tree) -> None:
        """Check why an update was not applied: the state may have halted."""
        _check_rates(call, {name: pair for name, pair in values.items() if name in self.rates})
        self._check_halted(state)
        self._refusals += 1
        if self._refusals != _MAX_REFUSALS:
            return
        if self._halts:  # it did not halt, so no target had a weight
            text = "no target counts in %d updates in a row, up to %s (a run limited by steps alone has no end then)"
            _log.warning(text, _MAX_REFUSALS, call.place)
            return
        error = NonFiniteError(
            f"{_MAX_REFUSALS} updates in a row were refused, so nothing is trained: gradients are not finite, or no "
            "target counts",
            where=f"up to {call.place}",
            hint='ps.program(..., nonfinite="raise"), which names what is not finite',
        )
        error.step = call.number + self._before
        raise error

    def row(self, loop: LoopState, state: Tree) -> dict[str, Cell]:
        """Return the metrics since the last row by their names in the history."""
        self._warn_of_members(loop, state)
        return self._named(metric_queue.means(loop.interval, self._queue.kinds, loop.computed), loop.last)

    def _warn_of_members(self, loop: LoopState, state: Tree) -> None:
        """Warn once of a member of an ensemble that has halted, or of which no update since the last row was applied,
        while others go on."""
        many = stacked.size(state)
        halted = state.halted.tolist() if many and self._halts else [0] * many
        applied = [loop.interval.get(entry_name("applied", at), (1.0, 1.0))[0] for at in range(many)]
        stopped = {at for at in range(many) if halted[at] or not applied[at]}
        for at in sorted(stopped - self._named_members) if len(stopped) < many else ():
            self._named_members.add(at)
            reason = (
                f"has halted at call {halted[at]}: its loss, its weight or a gradient is not finite, or its learning "
                "rate is invalid"
                if halted[at]
                else "has not been trained since the last row: its updates were refused, since its gradients are not "
                "finite, or no target counts"
            )
            _log.warning("member %d of the ensemble %s; the others go on", at, reason)

    def _named(self, values: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, Cell]:
        """Return a step's metrics by their names in the history: ``train_`` stands before what training data gave."""
        row: dict[str, Cell] = {}
        for name, value in values.items():
            base = base_name(name)
            if base not in _HIDDEN and name not in self.rates:
                row[name if base in _BARE else f"train_{name}"] = value
        return row | metric_queue.averaged({name: value for name, value in rates.items() if name in self.rates})

    def _line(self, call: Call, updates: int, sums: Totals, rates: Mapping[str, float]) -> Logged:
        named = self._named(metric_queue.means(sums, self._queue.kinds), rates)
        numbers = {name: value for name, value in named.items() if value is not None}
        speed, waiting = self._timer.line()
        return Logged(call.epoch, updates, numbers, speed, waiting)

    def _check_halted(self, state: Tree) -> None:
        # A part of a tree counts its own calls, which do not say where in the data it was.
        error = halt_error(state, self._place) if isinstance(state, TrainState) else halt_error(state)
        if error is not None:
            raise error

    def _place(self, number: int) -> str:
        call = next((call for call, _ in self._held if call.number + self._before == number), None)
        return "" if call is None else call.place

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave the time inside the block out of the speed of training."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._timer.paused += time.monotonic() - start

    def row_speed(self) -> float:
        """Return the updates per second since the last call."""
        return self._timer.row()

    def waited(self, seconds: float) -> None:
        """Add to the time that was spent waiting for batches."""
        self._timer.waited += seconds


class _Timer:
    """Updates, seconds spent waiting for data, and seconds without pauses, since the run began."""

    def __init__(self) -> None:
        self.steps, self.waited, self.paused = 0, 0.0, 0.0
        self._line = self._row = self._now()

    def _now(self) -> tuple[float, float, float]:
        return self.steps, self.waited, time.monotonic() - self.paused

    def line(self) -> tuple[float, float]:
        """Return updates per second and the share of time spent waiting for data, since the last log line."""
        before, self._line = self._line, self._now()
        return _rates(before, self._line)

    def row(self) -> float:
        """Return the updates per second since the last row."""
        before, self._row = self._row, self._now()
        return _rates(before, self._row)[0]


def _rates(before: tuple[float, float, float], now: tuple[float, float, float]) -> tuple[float, float]:
    steps, waited, passed = (new - old for old, new in zip(before, now, strict=True))
    passed = max(passed, 1e-9)
    return steps / passed, min(waited / passed, 1.0)


def _sum(calls: CallMetrics, sums: Iterable[Totals], last: dict[str, float], rates: Collection[str]) -> None:
    """Add the metrics of calls to each of the sums, and take the rates from the last of them."""
    for one in sums:
        metric_queue.add_to(one, calls)
    for name, total, weight in calls.columns:
        if name in rates:
            known = next((row for row in reversed(calls.numbers) if row[weight]), None)
            if known is not None:
                last[name] = known[total] / known[weight]


def _check_rates(call: Call, values: Totals) -> None:
    """Check the learning rates: the step reports one that is invalid as a total without weight."""
    for name, (rate, weight) in values.items():
        if weight or not rate:  # nan is true
            continue
        raise StepContractError(
            f"{name} is {rate:g} at call {call.number}; the state is the one before that call",
            where=f"schedule, {call.place}",
            hint="a schedule that stays in [0, inf), past its end too: schedules.warmup_cosine(...)",
        )


# --- ensembles --------------------------------------------------------------------------------------------------------


def with_best(row: Mapping[str, Cell], monitor: Monitor, members: int) -> dict[str, Cell]:
    """Add ``val_loss[best]``, the best of ``val_loss[0]``, ``val_loss[1]``, ..., for every metric of a row whose name
    says if small values are good, and for the monitored one. An ensemble of one member has the columns of one
    model.

    Args:
        row: of the history.
        monitor: its mode is used for the metric that it monitors.
        members: of the ensemble; 0 for a program of one model.
    """
    found = dict(row)
    for name in row if members else ():
        entries = [cell(found.get(entry_name(name, index))) for index in range(members)]
        known = [value for value in entries if value is not None]
        mode = _mode(name, monitor) if known and not name.endswith("]") else None
        if mode is not None:
            found[best_name(name)] = min(known) if mode == "min" else max(known)
    return found


def _mode(name: str, monitor: Monitor) -> stopping.Mode | None:
    if monitor.metric == best_name(name):
        return monitor.mode
    try:
        return stopping.default_mode(name)
    except ConfigError:
        return None
