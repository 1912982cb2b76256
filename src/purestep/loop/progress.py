"""The account of a run: calls made, metrics on their way, updates that are known to be applied."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .. import tensor_layout, tree
from ..compile import Stacked, is_state, states
from ..errors import NonFiniteError, StepContractError
from ..events import Logged
from ..step import rate_names
from ..types import Empty, Metrics, TrainState, Tree
from . import metric_queue as meter_
from .loop_state import Cell, Record
from .metric_queue import Meter, Rows, Totals

_BARE = ("grad_norm", "scale")  # of a step's metrics, what says nothing about the training data
_HIDDEN = ("applied",)
_DEPTH = 64  # calls whose metrics travel together
_log = logging.getLogger("purestep")
_REFUSALS = 100  # in a row, which end a run, or of which a warning tells
_HELD = 1 << 28  # bytes of batches that are held until it is known that they were good


class Tag(NamedTuple):
    """Which call a row of metrics belongs to."""

    call: int  # from 1, as TrainState.step counts
    epoch: int
    batch: int  # 0-based within the epoch; -1 for a flush
    closing: bool  # it closed an accumulation window


class Ledger:
    """Takes metrics in as tensors and gives records and log lines out as they arrive.

    ``updates`` of the record are those that are known to be applied; ``pending`` windows have been closed since.

    Args:
        log_every: updates between two lines, 0 for none.
        before: calls that the state had been through before this run's first.
        halts: the state may halt, so the batches of calls that are not settled are held.
        rates: the metrics that are learning rates: the last value counts, not the mean.
    """

    def __init__(
        self, log_every: int, *, before: int = 0, halts: bool = False, rates: Collection[str] = ("lr",)
    ) -> None:
        self.pending = 0
        self.rates = rates
        self._halts = halts
        self._warned = False
        self._refusals = 0  # updates in a row that were not applied
        self._before = before
        self._log_every = log_every
        self._meter = Meter()
        self._held: deque[tuple[Tag, Any]] = deque()
        self._timer = Timer()

    @property
    def kinds(self) -> meter_.Kinds:
        """See `Meter.kinds`."""
        return self._meter.kinds

    def add(self, tag: Tag, metrics: Metrics | Stacked, record: Record, batch: Any = None) -> None:
        """A call has been made with this batch; None for a flush."""
        if self._halts:
            if not self._held and batch is not None:
                self._meter.depth = _calls_to_hold(batch)
            self._held.append((tag, batch))
        self._meter.add(tag, metrics)
        if not tag.closing:
            return
        self.pending += 1
        self._timer.steps += 1
        if self._log_every and (record.updates + self.pending) % self._log_every == 0:
            self._meter.ship()

    def settle(self, record: Record, state: Tree, *, wait: bool) -> tuple[Record, list[Logged]]:
        """The record with what has arrived, and the log lines that are complete; ``wait`` for everything.

        Raises:
            NonFiniteError: the state has halted, or with ``wait`` is bound to; or it goes on, and too many updates in a
                row were refused.
        """
        arrived = self._meter.rows(wait=wait)
        found = self._taken_in(arrived, record, state) if arrived else (record, list[Logged]())
        if wait and self._halts:
            _check_windows(state)
        return found

    def _taken_in(self, arrived: list[Rows], record: Record, state: Tree) -> tuple[Record, list[Logged]]:
        lines: list[Logged] = []
        updates, last = record.updates, dict(record.last)
        interval, line = dict(record.interval), dict(record.line)
        sums = (interval, line) if self._log_every else (interval,)
        for rows in arrived:
            self._warn_of_loss(rows)
            begun = 0
            for index, applied in enumerate(rows.totals("applied", 1.0)):
                tag: Tag = rows.tags[index]
                if not tag.closing:
                    continue
                self.pending -= 1
                if not applied:
                    self._refused(tag, rows.values(index), state)
                    continue
                self._refusals = 0
                updates += 1
                if self._log_every and updates % self._log_every == 0:
                    _sum(rows.part(begun, index + 1), sums, last, self.rates)
                    begun = index + 1
                    lines.append(self._line(tag, updates, line, last))
                    line.clear()
            _sum(rows.part(begun), sums, last, self.rates)
        self._let_go(arrived, state)
        return record._replace(updates=updates, interval=interval, line=line, last=last), lines

    def _warn_of_loss(self, rows: Rows) -> None:
        """A step of a user's own that does not stop at a loss is told of, once: who wrote it may want it so."""
        if self._halts or self._warned:
            return
        for tag, (total, weight) in zip(rows.tags, rows.pairs("loss"), strict=False):
            if weight and not math.isfinite(total):
                self._warned = True
                _log.warning(
                    "the loss is %g at epoch %d, batch %d, and the step has no TrainState that would halt at it: the "
                    "run goes on (cure: in the step, keep the old state where the loss is not finite; or a callback "
                    "that returns ps.Stop)",
                    *(total / weight, tag.epoch + 1, tag.batch + 1),
                )
                return

    def forget(self) -> None:
        """What is on its way belongs to calls that are undone."""
        self._meter.rows(wait=True)
        self._held.clear()
        self.pending = self._refusals = 0

    def window(self, call: int) -> list[tuple[Tag, Any]]:
        """The calls, and their batches, of the update that halted at this call (as the state counts)."""
        found = [(tag, batch) for tag, batch in self._held if tag.call + self._before <= call]
        earlier = [index for index, (tag, _) in enumerate(found[:-1]) if tag.closing]
        return found[earlier[-1] + 1 :] if earlier else found

    def _let_go(self, arrived: list[Rows], state: Tree) -> None:
        """Batches of calls that are known to have been good: of windows that are closed."""
        tags: Iterator[Tag] = (tag for rows in reversed(arrived) for tag in reversed(rows.tags))
        if not isinstance(state, TrainState):
            self._check_halted(state)  # a step of a user's own need not say that an update was refused
            good = next(tags)
        else:
            good = next((tag for tag in tags if tag.closing), None)
        while good is not None and self._held and self._held[0][0].call <= good.call:
            self._held.popleft()

    def _refused(self, tag: Tag, values: Totals, state: Tree) -> None:
        """An update was not applied: the state may have halted."""
        _check_rates(tag, {name: pair for name, pair in values.items() if name in self.rates})
        self._check_halted(state)
        self._refusals += 1
        if self._refusals != _REFUSALS:
            return
        place = f"epoch {tag.epoch + 1}" + (f", batch {tag.batch + 1}" if tag.batch >= 0 else "")
        if self._halts:  # it would have, so that there was nothing to learn from
            text = "no target counts in %d updates in a row, up to %s (a run limited by steps alone has no end then)"
            _log.warning(text, _REFUSALS, place)
            return
        error = NonFiniteError(
            f"{_REFUSALS} updates in a row were refused: gradients are not finite, or no target counts; nothing is "
            "trained any more",
            where=f"up to {place}",
            hint='ps.program(..., nonfinite="raise"), which names what is not finite',
        )
        error.step = tag.call + self._before
        raise error

    def named(self, sums: Totals, rates: Mapping[str, float]) -> dict[str, Cell]:
        """A step's metrics by their names in the history: what is measured on training data is called ``train_``."""
        found: dict[str, Cell] = {}
        for name, value in meter_.means(sums, self.kinds).items():
            if name not in _HIDDEN and name not in self.rates:
                found[name if name in _BARE else f"train_{name}"] = value
        return found | {name: value for name, value in rates.items() if name in self.rates}

    def _line(self, tag: Tag, updates: int, sums: Totals, rates: Mapping[str, float]) -> Logged:
        values = self.named(sums, rates)
        numbers = {name: value for name, value in values.items() if value is not None}
        speed, waiting = self._timer.rates()
        return Logged(tag.epoch, updates, numbers, speed, waiting)

    def _check_halted(self, state: Tree) -> None:
        # Inside a tree a part counts calls of its own, which do not say where in the data one was.
        error = halted(state, self._place if isinstance(state, TrainState) else _nowhere)
        if error is not None:
            raise error

    def _place(self, call: int) -> str:
        tag = next((tag for tag, _ in self._held if tag.call + self._before == call), None)
        return "" if tag is None else f"epoch {tag.epoch + 1}, batch {tag.batch + 1}"

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, with the time spent waiting for them on the account."""
        while True:
            start = time.monotonic()
            batch = next(batches, _END)
            self._timer.waited += time.monotonic() - start
            if batch is _END:
                return
            yield batch


_END = object()
CURE = 'a smaller learning rate, optim.clip_by_global_norm(1.0), or ps.program(..., nonfinite="skip")'


def _sum(rows: Rows, sums: Iterable[Totals], last: dict[str, float], rates: Collection[str]) -> None:
    """Add the rows to each of the sums, and take the rates as they are in the last of them."""
    for one in sums:
        meter_.add_to(one, rows)
    for name, total, weight in rows.columns:
        if name in rates:
            known = next((row for row in reversed(rows.numbers) if row[weight]), None)
            if known is not None:
                last[name] = known[total] / known[weight]


def _calls_to_hold(batch: Any) -> int:
    size = tensor_layout.nbytes(tree.leaves(batch))
    return max(1, min(_DEPTH, _HELD // max(size, 1)))


def opened(log_every: int, state: Tree, record: Record) -> Ledger:
    """The account of a run that begins, or goes on, with this state and record."""
    calls = int(state.key[1]) if isinstance(state, TrainState) else 0
    rates = {"lr"}.union(*(rate_names(part) for part in states(state)))
    return Ledger(log_every, before=calls - record.calls, halts=can_halt(state), rates=rates)


def can_halt(state: Tree) -> bool:
    """Whether there is a part that stops at a loss or gradient that is not finite."""
    return any(path.rpartition("/")[2] == "halted" for path in tree.paths(state))


def halts(state: Tree) -> list[tuple[str, int]]:
    """Of every halted TrainState in a tree: its path and the call that halted it."""
    flags = [(path.rpartition("/"), leaf) for path, leaf in tree.with_paths(state)]
    found = [(path[0], leaf) for path, leaf in flags if path[2] == "halted" and leaf.dim() == 0]
    calls = torch.stack([leaf for _, leaf in found]).tolist() if found else []  # each read waits for the device
    return [(path, int(call)) for (path, _), call in zip(found, calls, strict=True) if call]


def _nowhere(_: int) -> str:
    return ""


def halted(state: Tree, place: Callable[[int], str] = _nowhere) -> NonFiniteError | None:
    """The error of a tree with a halted state in it; ``place`` says where in the data a call was."""
    path, call = next(iter(halts(state)), ("", 0))
    if not call:
        return None
    error = NonFiniteError(
        f"the loss or a gradient is not finite at call {call}; the state is what it was before it",
        where=path or place(call),
        hint=CURE,
    )
    error.step = call
    return error


def _check_windows(state: Tree) -> None:
    """A window that stays open is kept, and its end would be blamed for what is in it now.

    Raises:
        NonFiniteError: it is not finite.
    """
    part = next((part for part in states(state) if _is_spoilt(part)), None)
    if part is not None:
        call = int(part.step)
        error = NonFiniteError(
            f"the loss or a gradient is not finite in the accumulation window that is open at call {call}",
            where="accum",
            hint=CURE,
        )
        error.step = call
        raise error


def _is_spoilt(node: TrainState) -> bool:
    """Whether the state would halt at the end of its window. A loss scale rather falls, and the run goes on."""
    halts = isinstance(node.scaler, Empty) and not isinstance(node.halted, Empty)
    if not halts or isinstance(node.accum, Empty):
        return False
    window: Any = node.accum
    weight = float(window.weight)  # nan once a loss was not finite
    if weight == 0:  # nothing has been added: no window is open
        return False
    sums = [leaf for leaf in tree.leaves(window) if leaf.is_floating_point() or leaf.is_complex()]
    # Read at once: each read waits for the device.
    return weight != weight or not bool(torch.stack([leaf.isfinite().all() for leaf in sums]).all())


def halting(state: Tree) -> Tree:
    """The tree with every state that would halt at the end of its window as if the last call had been that end."""

    def one(node: Any) -> Any:
        if not is_state(node) or not _is_spoilt(node):
            return node
        left, *sums = node.accum
        emptied = type(node.accum)(left, *tree.map(torch.zeros_like, sums))
        return TrainState(*node)._replace(halted=node.step.clone(), accum=emptied)

    return tree.map(one, state, is_leaf=is_state)


def thawed(state: Tree) -> Tree:
    """The tree with every halted state as it was before the call that halted it.

    The device has refused everything but the count of the call; the host moves the key on whatever happens.
    """

    def one(node: Any) -> Any:
        if not is_state(node) or isinstance(node.halted, Empty) or not int(node.halted):
            return node
        step = node.halted - 1
        key = torch.tensor([int(node.key[0]), int(step)], dtype=torch.int64)
        return TrainState(*node)._replace(step=step, halted=torch.zeros_like(node.halted), key=key)

    return tree.map(one, state, is_leaf=is_state)


def _check_rates(tag: Tag, values: Totals) -> None:
    """A rate that cannot be used is a total without weight: see the step's metrics."""
    for name, (total, weight) in values.items():
        if not weight and total:  # nan is true
            raise StepContractError(
                f"{name} is {total:g} at call {tag.call}; the state is what it was before it",
                where=f"schedule, epoch {tag.epoch + 1}, batch {tag.batch + 1}",
                hint="a schedule that stays in [0, inf), past its end too: schedules.warmup_cosine(...)",
            )


class Timer:
    """Steps a second and the share of time spent waiting for data, between two lines of the log."""

    def __init__(self) -> None:
        self.steps = 0
        self.waited = 0.0
        self._since = time.monotonic()

    def rates(self) -> tuple[float, float]:
        """Both; starts anew."""
        now = time.monotonic()
        passed = max(now - self._since, 1e-9)
        found = self.steps / passed, min(self.waited / passed, 1.0)
        self.steps, self.waited, self._since = 0, 0.0, now
        return found
