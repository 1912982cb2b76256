"""A run of fit: steps, evaluation and snapshots composed, in one fixed order.

restore -> [batches -> flush -> evaluate -> history -> best and early stop -> callbacks -> snapshot -> stop?]

The bracket is a boundary: the end of an epoch, or of an evaluation interval inside one. Everything that decides about
a boundary lies in `Record`, which a snapshot holds beside the state; so a resumed run decides as the whole one did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from .. import data, events, files
from .. import ema as ema_
from ..compile import Stacked, unstacked
from ..errors import NonFiniteError, StepContractError
from ..signals import Preempted, Signals, interrupted
from ..snapshot import Snapshots
from ..types import Metrics, Program, Tree
from . import checkpointing, environment, halted, inputs, policy, progress, recovery, train_call
from .callbacks import Audience
from .checkpointing import Saver
from .evaluate import scores
from .loop_state import Cell, FitResult, Record, cell, joined, with_row
from .policy import Judge, below_minimum, ended_before, judge, limit_reached
from .progress import Tag
from .recovery import Keeper, rescue, salvaged
from .train_call import caller

if TYPE_CHECKING:  # see setup
    from ..config import FitConfig

log = logging.getLogger("purestep")


class Run:
    """One call of fit."""

    def __init__(
        self,
        state: Tree,
        program: Program,
        feeds: inputs.Feeds,
        config: FitConfig,
        snapshots: Snapshots | None,
        audience: Audience,
        signals: Signals,
        *,
        is_callers: bool,
    ) -> None:
        self.config = config
        self.feeds = feeds
        self.snapshots = snapshots
        self.audience = audience
        self.signals = signals
        self.view = inputs.view_to_evaluate(state, config)
        self.judge: Judge = judge(config, feeds.evaluation, feeds.train.count)
        self.window = program.static.accumulate if program.static else 1
        state, record, self.resumed = checkpointing.resumed(state, snapshots, config, feeds.train)
        self.state = inputs.windowed(state, self.window, record.window)
        self.record = self.judge.begun(record)._replace(window=self.window)
        self.eager = train_call.in_eager(program)
        self.program = train_call.ready_program(program, self.state, config)
        self.call = caller(self.eager, self.program, self.state, config)
        intervals = {name: 1.0 if config.fast_dev_run else config.interval(name) for name in feeds.evaluation}
        self.plan = policy.Plan(intervals, feeds.train, self.window)
        self.left = inputs.window_left(self.state, self.window)
        self.ledger = progress.opened(config.log_every, self.state, self.record)
        whole = not self.resumed and config.donate != "init" and is_callers
        self.start = (self.state, self.record) if whole else None  # the caller's own: it costs no memory to remember
        self.keeper = Keeper(config.rollback)
        self.keeper.keep(self.state, self.record)
        self.ending: str | None = None
        self.before: tuple[Tree, Record] | None = None  # where to go on if a boundary is not told to the end
        self.begun = time.monotonic()
        is_saved = self.resumed or self.record.calls > 0  # also by hand, without a loop's record
        self.saver = Saver(snapshots, feeds.train, saved=self.record.calls if is_saved else None)
        if snapshots is not None and self.judge.monitor is not None:
            snapshots.track(self.judge.monitor, mode=self.judge.mode)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def to_the_end(self) -> FitResult:
        """Run, and tell everybody the end whatever it is."""
        error: BaseException | None = None
        try:
            self._start()
            while self.ending is None:
                self._epoch()
                self.ending = self.ending or limit_reached(self.config, self.record) or self._timed_out()
            self._save(wait=True)  # where no boundary has done it
        except BaseException as caught:
            error = caught
            if not (self.call.failed and self._salvaged(caught)) and self.record.calls:
                rescue(caught, self._save_what_is_done)
            raise
        finally:
            self._finish(error)
        return self.result()

    def _start(self) -> None:
        record, directory = self.record, None
        if self.snapshots is not None:
            directory = self.snapshots.directory
            self.snapshots.begin(updates=record.updates, epoch=record.epoch)
        self.ending = ended_before(self.judge, record)
        epochs, steps = (None if limit == -1 else limit for limit in (self.config.epochs, self.config.steps))
        told = self.state, record.epoch, record.updates, epochs, steps, self.feeds.train.length, directory, self.resumed
        self._tell(events.FitStart(*told, dict(record.history), lambda: self.audience.position(self.record)))

    def _epoch(self) -> None:
        """The batches of one epoch, with a boundary at its end and at every interval inside."""
        self.plan.begin(self.record, self.left)
        loaded = self.feeds.train.epoch(self.record.epoch, self.record.batch)
        fed = self.signals.watch(self.ledger.timed(loaded))
        fed = data.prefetch(fed, data.device_of(self.state), name="train")
        # Open as long as there may be a snapshot, for which a feed may have to ask its loader for more.
        with closing(loaded), closing(data.Ahead(fed)) as batches:
            if self.record.batch and self.record.is_ahead and self._ends_behind_batch(batches):
                return  # the run was told to end in this evaluation, which was to be its last
            for batch in batches:
                self._step(batch)
                if self._ends_behind_batch(batches):
                    return
        self._between()  # the wait for a batch may have been broken off
        self._flush()
        self._settle(wait=True)
        files.failpoint("loop.epoch")
        self.before = self.state, self.record
        counted = self.plan.counted(self.record)
        self.record = self.record._replace(epoch=self.record.epoch + 1, batch=0, counted=counted)
        self._boundary(self.plan.due_at_end(self.record))
        self._between()

    def _ends_behind_batch(self, batches: data.Ahead[Any]) -> bool:
        """What follows a batch; True where the run ends inside this epoch."""
        at_end = self._inside(batches)
        self._between(batches)
        ending = self.ending
        if at_end or not self._cut_off():
            return False
        if not batches.more():  # only the loader says so, and the epoch's boundary follows
            self.ending = ending
            return False
        self._last_row()
        self._between()
        return True

    def _step(self, batch: Any) -> None:
        """One call of train_step. Nothing is read from the device."""
        record = self.record
        try:
            self.state, metrics = self.call(self.state, batch, record)
        except NonFiniteError as error:  # of the anomaly mode, which does not wait until metrics are read
            if not self._went_back(error, recovery.past(self.state), record.stepped()):
                raise
            return
        closes = self.left == 1
        self.left = self.window if closes else self.left - 1
        self.record = record.stepped()
        self._measured(Tag(record.calls + 1, record.epoch, record.batch, closes), metrics, batch)

    def _flush(self) -> None:
        """Close a window that the epoch left open, as the program's tail says; one of the user's own knows itself."""
        static, flush = self.program.static, self.program.flush
        if static is not None and (static.tail == "carry" or self.left == self.window):
            return
        state, metrics = self.call.flush(flush, self.state)
        if static is None and state is self.state:
            return  # nothing was open
        self.state, self.left = state, self.window
        record = self.record = self.record._replace(calls=self.record.calls + 1)
        self._measured(Tag(record.calls, record.epoch, -1, static is None or static.tail == "step"), metrics, None)

    def _measured(self, tag: Tag, metrics: Metrics | Stacked, batch: Any) -> None:
        self.ledger.add(tag, metrics, self.record, batch)
        if tag.closing and self.audience.listens:
            updates = self.record.updates + self.ledger.pending
            shown = unstacked(metrics)
            self._heed(self.audience.ask(events.StepEnd(self.state, shown, batch, tag.epoch, tag.batch, updates)))
        self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        """Take in the metrics that have arrived."""
        try:
            self.record, lines = self.ledger.settle(self.record, self.state, wait=wait)
        except NonFiniteError as error:
            self._go_back(error)
            return
        for line in lines:
            self._tell(line)

    def _go_back(self, error: NonFiniteError) -> None:
        if not self._went_back(error, self.state, self.record):
            self.state = progress.halting(self.state)
            window = self.ledger.window(error.step or 0)
            raise halted.explained(error, progress.thawed(self.state), window, self.eager, self.feeds.train)

    def _went_back(self, error: NonFiniteError, state: Tree, record: Record) -> bool:
        """To the last good state, behind what this state and record have been through; False where it may not."""
        found = self.keeper.back(state, record)
        if found is None:
            return False
        self.ledger.forget()
        self.state, self.record = found
        self.left = inputs.window_left(self.state, self.window)
        log.warning("went back to update %d: %s", self.record.updates, error)
        return True

    def _salvaged(self, error: BaseException) -> bool:
        adopted = self.config.donate == "init"
        found = salvaged(self.state, self.record, error, self.keeper, self.snapshots, self.start, adopted=adopted)
        if found is None:
            return False
        self.ledger.forget()
        self.state, self.record = found
        vars(error)["result"] = self.result()
        return True

    # --- boundaries ---------------------------------------------------------------------------------------------------

    def _inside(self, batches: data.Ahead[Any]) -> bool:
        """An evaluation where an interval asks for one and no window is open; True where the epoch has just ended."""
        if not self.plan.inside or self.left != self.window:
            return False
        if self.plan.crossed(self.record, self.ledger.pending):  # else it is not worth to ask how many were applied
            self._settle(wait=True)
        if due := self.plan.due_inside(self.record):
            if not batches.more():
                return True  # its boundary evaluates
            self._settle(wait=True)
            self._boundary(due)
        return False

    def _boundary(self, due: list[str]) -> None:
        """Evaluate, write the row, decide, tell, save, in this order.

        What is broken off before everybody was told is done again on resuming: callbacks are asked again, so what they
        have answered so far is forgotten.
        """
        before = self.record
        self.before = self.before or (self.state, before)
        row: dict[str, Cell] = {"epoch": before.epoch + (before.batch > 0), "step": before.updates}
        row |= self.ledger.named(dict(before.interval), before.last)
        for name in due:
            row = joined(row, self._evaluate(name), loader=name)
            if self.signals.leaving:
                return self._undo_boundary()
        record = before._replace(interval={}, history=with_row(before.history, row))
        self.judge = self.judge.check(record, self.feeds.evaluation)
        self.record = self.judge.judge(record, row)
        improved = self.judge.improved(before, self.record)
        self.keeper.keep(self.state, self.record)
        if self.judge.stops(self.record):
            self.ending = self.ending or "early_stopping"
        shown = {name: cell(value) for name, value in row.items()}
        self._tell(events.EpochEnd(self.state, self.record.epoch, before.updates, shown, improved, self._ends()))
        self.before = None
        self.saver.scored(self.record, row)
        if improved or self._ends() or self.saver.due(self.record, self.ledger.pending):
            self._save()

    def _undo_boundary(self) -> None:
        if self.before is not None:
            (self.state, self.record), self.before = self.before, None
            self.left = inputs.window_left(self.state, self.window)

    def _ends(self) -> str | None:
        return self.ending or limit_reached(self.config, self.record)

    def _evaluate(self, name: str) -> dict[str, float]:
        assert self.program.eval_step is not None
        files.failpoint("loop.evaluate")
        state = self.state if self.view == "params" else ema_.view(self.state, self.view)
        watch = self.audience.watching(state, name, self.record.epoch)
        fed = data.prefetch(self.signals.watch(self.feeds.evaluation[name].epoch(0)), data.device_of(state), name=name)
        step = self.program.eval_step
        values = environment.watched(lambda: scores(state, fed, step, name=name, watch=watch), f"eval_step, {name}")
        found = {f"{name}_{key}": value for key, value in values.items()}
        if not self.signals.leaving:
            self._tell(events.EvalEnd(name, self.record.epoch, self.record.updates, found))
        return found

    def _cut_off(self) -> bool:
        """Whether the run ends inside this epoch."""
        steps = self.config.steps
        if steps not in (None, -1) and self.record.updates + self.ledger.pending >= steps:
            self._settle(wait=True)
            self.ending = self.ending or limit_reached(self.config, self.record)
        self.ending = self.ending or self._timed_out()
        return self.ending is not None

    def _last_row(self) -> None:
        """The run ends inside an epoch: score the last state and save it. An open window stays open, to go on from."""
        self._settle(wait=True)
        if self.record.is_ahead:
            self._boundary(list(self.feeds.evaluation))
        self._save()

    def _timed_out(self) -> str | None:
        limit = self.config.max_time
        is_over = limit is not None and time.monotonic() - self.begun >= limit
        return "max_time" if is_over and not self._below_minimum() else None

    def _below_minimum(self) -> bool:
        return below_minimum(self.config, self.record, ahead=self.ledger.pending)

    # --- saving and signals -------------------------------------------------------------------------------------------

    def _between(self, batches: data.Ahead[Any] | None = None) -> None:
        """After every call: the writer's errors, signals, snapshots due inside an epoch (its end has a boundary's)."""
        if self.snapshots is not None:
            self.snapshots.check()
            if batches is not None and self.saver.due(self.record, self.ledger.pending) and batches.more():
                self._settle(wait=True)
                self._save()
        if self.signals.pending is not None:
            self._signalled()

    def _signalled(self) -> None:
        wish = self.signals.pending
        self._settle(wait=True)
        self._save(wait=wish != "snapshot")
        self.signals.saved()
        if wish == "snapshot":
            return
        self.ending = "interrupted"
        raise Preempted(self.result()) if wish == "terminate" else interrupted(self.result())

    def _save(self, *, wait: bool = False) -> None:
        saved = self.saver.save(self.state, self.record, ahead=self.ledger.pending)
        if saved is not None:
            self._tell(saved)
        if wait:
            self.saver.wait()

    def _save_what_is_done(self) -> None:
        self._undo_boundary()
        self.record, lines = self.ledger.settle(self.record, self.state, wait=True)
        self._save(wait=True)
        for line in lines:
            self._tell(line)

    # --- telling ------------------------------------------------------------------------------------------------------

    def _tell(self, event: events.Event) -> None:
        before = self.state
        self._heed(self.audience.tell(event))
        if self.state is not before and isinstance(event, events.FitStart | events.EpochEnd):
            self.keeper.keep(self.state, self.record)  # what a callback has put in, going back keeps

    def _heed(self, answers: Iterable[Any]) -> None:
        """What callbacks answer: an end, or another state."""
        for answer in answers:
            if not isinstance(answer, events.Stop):
                self.state = inputs.checked_answer(self.state, answer, copied=self.config.donate == "init")
                self.left = inputs.window_left(self.state, self.window)
            elif not self._below_minimum():
                self.ending = self.ending or answer.reason

    def result(self) -> FitResult:
        """What there is so far."""
        record, best = self.record, self.judge.best(self.record)
        return FitResult(self.state, dict(record.history), best, record.epoch, self.ending or "error")

    def _finish(self, error: BaseException | None) -> None:
        if isinstance(error, NonFiniteError | StepContractError):
            self.state = progress.thawed(self.state)
            vars(error)["result"] = self.result()
            halted.write_down(error, self.snapshots)
        result = self.result()
        self.audience.end(events.FitEnd(result.state, result.stop_reason, result.history, result.best, error))
