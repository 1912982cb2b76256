"""`fit`: the outer loop.

restore -> [batches -> flush -> evaluate -> history -> best and early stop -> callbacks -> snapshot -> stop?]

The bracket is a boundary: the end of an epoch, or of an evaluation interval inside one. All decisions at a boundary
depend on `LoopState` alone, which a snapshot stores with the train state, so a resumed run decides like the whole one.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from .. import data, events, files, parallel
from ..compile import (
    LiveState,
    MetricVector,
    Uncaptured,
    as_dict,
    eager_program,
    is_compiled,
    released,
    set_batch_sizes,
    states,
)
from ..errors import NonFiniteError, SnapshotError, StateError, StepContractError
from ..metrics import handed_out
from ..snapshot import Snapshots
from ..state import views
from ..step import remember_unreached
from ..types import Metrics, Program, Tree
from . import (
    decisions,
    environment,
    inputs,
    nonfinite_steps,
    policy,
    ranks,
    resume,
    train_call,
)
from .accounting import Accounting, with_best
from .callbacks import Callbacks
from .decisions import Decisions, JointDecisions
from .evaluate import eval_means
from .inputs import Feeds
from .loop_state import Call, Cell, FitResult, LoopState, cell, joined, with_row
from .policy import EvalSchedule, limit_reached
from .saving import BestState, Checkpointer
from .signals import Preempted, Signals, interrupted, is_at_once

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

_log = logging.getLogger("purestep")
_END = object()
_UNTRUSTED = (NonFiniteError, StateError, StepContractError, SnapshotError)
"""Errors that say that the state or the directory of snapshots cannot be trusted."""


def fit(
    init_state: Tree,
    loaders: Any,
    program: Program | None = None,
    config: object = None,
    *,
    snapshots: Any = None,
    callbacks: Iterable[events.Callback] = (),
    sinks: Iterable[Any] | None = None,
    **fields: Any,
) -> FitResult:
    """Train: compose a program's steps, evaluation and snapshots.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> batch = (torch.ones(4, 2), torch.ones(4, 1))
        >>> result = ps.fit(program.init(), {"train": [batch] * 5, "val": [batch]}, program, epochs=3, progress=False)
        >>> result.epochs, result.stop_reason, len(result.history["val_loss"])
        (3, 'epochs', 3)

    Args:
        init_state: from ``program.init(seed=0)``, or any pytree of tensors that the program's step takes. It stays
            valid unless a compiled step has ``donate="init"``.
        loaders: ``{"train": loader, "val": loader, ...}``, ``(train, val)``, or one loader to train on. A loader is a
            DataLoader or any iterable of batches. Every key but "train" is evaluated and prefixes its metrics.
        program: from `program`, or `Program(train_step)` with a step of your own.
        config: a `FitConfig`, a mapping, an object with attributes, or the path of a JSON or TOML file.
        snapshots: a directory, or a `Snapshots` with its own policy, which stays open.
        callbacks: ``f(event)``, see `purestep.events`; may return None, a new state, or `Stop`.
        sinks: the only receivers of numbers: ``[ps.sinks.jsonl("metrics.jsonl"), ...]``. None: a progress display
            (``ps.sinks.progress()``), and ``training_history.json`` in the directory of the snapshots
            (``ps.sinks.history_json``).
        fields: those of `FitConfig`: ``epochs=10, monitor="val_loss", early_stopping=5, ...``; they override config.
            By default a run goes on from the newest snapshot of its directory (``resume="auto"``), evaluates the
            average if there is one, trains a copy of a CPU state on the best device (cuda, then mps; ``device="cpu"``
            stays), and compiles steps on CUDA only: ``help(ps.FitConfig)``. The same call, repeated, goes on where it
            stopped. So does one with ``resume="old", snapshots="new"``: it does not start again from "old" once "new"
            has a snapshot.

    One run at a time: a `fit` in another thread of the process is refused while this one trains; one inside a callback
    works. So does a run off the main thread, where no signal ends it.

    In several processes every process makes the same call, with a program of `purestep.distribute` and whole loaders:
    all draw one order and load their rows of each batch, as `types.Share`. History, monitor and best are those of one
    process, and a run may go on with another number of processes. Callbacks run in every process, with its part of the
    state and its share of a batch; if they return a state, they do so in all. Sinks, the log and the directory belong
    to the first process. If one process gets a signal or `Stop`, comes to the end of ``max_time`` or has an error of
    the writer, or if a snapshot is due by the first one's clock, all act on it together: at the same call, at most
    three calls later. An error in one process ends the others with a RankError, without a snapshot, which would take
    all of them.

    Returns:
        `FitResult`: the last state, the history, the best epoch, the number of epochs and why it ended;
        ``result.best_state`` is the state of the best epoch. The module is not written.

    Raises:
        ConfigError: settings that do not exist or contradict each other; a run in another thread of this process; after
            an epoch, a ``monitor`` that is no metric.
        StateError: ``init_state``, or the answer of a callback, is no state to train.
        DataError: an empty, exhausted or failing loader; a batch with another structure than the first.
        NonFiniteError: a loss or gradient that is not finite (``nonfinite="raise"``); ``error.result`` has the state,
            and `purestep.testing.replay` repeats the call from a file in the directory of the snapshots. A
            run on several processes writes no file. With ``nonfinite="skip"``: 100 refused updates in a row.
        StepContractError: the step is not pure (see `FitConfig.check_every`), or returns no state and metrics.
        SnapshotError: a snapshot does not fit, is damaged or cannot be written; `Locked`: another run's directory.
        RankError: several processes without `purestep.distribute`; processes with different programs, settings, data
            or snapshots; a loader that cannot be divided among them; a process that ended or does not answer.
        KeyboardInterrupt, SystemExit: Ctrl-C, SIGTERM (status 143), or raised by a callback; the state is saved, and
            ``error.result`` has it. A second Ctrl-C or SIGTERM ends the run at once, without either.
    """
    settings = inputs.settings(config, fields)
    ready = inputs.checked_program(program)
    given = inputs.checked_state(init_state)
    inputs.check_fits(given, ready)
    run = _Run(inputs.placed(given, settings.device, ready))
    mesh = ranks.mesh_of(run.state, where="fit")
    with ExitStack() as stack:
        stack.enter_context(ranks.quiet(mesh))
        stack.enter_context(environment.applied(settings, data.device_of(run.state)))
        feeds = inputs.open_feeds(loaders, settings, ready, inputs.seed_of(run.state), mesh)
        stack.callback(feeds.close)
        decisions.check_alike(mesh, lambda: {"snapshots": "None" if snapshots is None else "a directory"})
        store, owned = resume.open_snapshots(snapshots, settings)
        if store is not None and owned:
            stack.push(store)  # an error of its last save becomes a note on the error of the run
        listeners = Callbacks(
            inputs.callables("callbacks", callbacks), inputs.ready_sinks(sinks, store, settings, mesh)
        )
        signals = stack.enter_context(Signals())
        run.restore(settings, ready, feeds, store, listeners, signals, mesh)
        return run.train()


class _Run:
    """A run of `fit`: the state, the position, and the parts that own a resource or a queue.

    `state` and `loop` are replaced together, each as a whole, so an error leaves them consistent. No other reference to
    the state exists here, so the memory of a state that was moved is free after the first call.
    """

    def __init__(self, state: Tree) -> None:
        self.state: Any = state
        self.loop = LoopState()
        self._has_saved = False  # a signal ends the run: the state is saved, and the error has the result

    # --- restore ------------------------------------------------------------------------------------------------------

    def restore(
        self,
        config: FitConfig,
        program: Program,
        feeds: Feeds,
        snapshots: Snapshots | None,
        callbacks: Callbacks,
        signals: Signals,
        mesh: parallel.Mesh | None,
    ) -> None:
        """Take the state and the position of an interrupted run, if there is one, and open the other parts."""
        decisions.check_alike(mesh, lambda: decisions.facts_of(self.state, program, config, feeds))
        self.config, self.feeds, self.callbacks = config, feeds, callbacks
        self.view = inputs.view_to_evaluate(self.state, config)
        self.monitor = policy.monitor(config, feeds.evaluation)
        window = program.static.accumulate if program.static else 1
        start = resume.starting_point(self.state, snapshots, config, feeds.train)
        self.state, loop, self.is_resumed = start.state, start.loop, start.is_resumed
        inputs.check_window(self.state, window, loop.window)
        loop = self.monitor.resumed(loop)._replace(window=window, window_left=inputs.window_left(self.state, window))
        self.loop = loop
        self.eager = eager_program(program)
        self.program = program = train_call.ready_program(program, self.state, config)
        set_batch_sizes(program, start.sizes)
        remember_unreached(program, start.unreached)
        self.members = program.static.members if program.static is not None else 0
        self.call = train_call.TrainCall(self.eager, program, self.state, config)
        if snapshots is not None and self.monitor.metric is not None:
            snapshots.track(self.monitor.metric, mode=self.monitor.mode)
        place = {"restored step": loop.calls, "epoch": loop.epoch, "batch": loop.batch, "updates": loop.updates}
        decisions.check_alike(mesh, lambda: place)
        intervals = {name: 1.0 if config.fast_dev_run else config.interval(name) for name in feeds.evaluation}
        self.schedule = EvalSchedule(intervals, feeds.train, window)
        self.accounting = Accounting(config.log_every, self.state, loop)
        self.checkpointer = Checkpointer(snapshots, feeds.train, program, saved=start.saved)
        self.best_state = BestState(self.monitor.kept_by(snapshots), config.resume, self.state)
        deciding = signals, self.checkpointer, config.max_time
        self.decisions = Decisions(*deciding) if mesh is None else JointDecisions(*deciding, mesh, feeds.train)
        if not self.is_resumed:
            policy.warn_of_short_average(program, config, feeds.train)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def train(self) -> FitResult:
        """Run the loop. Do not change the order of its parts: resumed runs, callbacks and snapshots depend on it."""
        error: BaseException | None = None
        try:
            self.checkpointer.count_from(self.loop)
            self.loop = self.loop.stopped(policy.ended_before(self.monitor, self.loop, self.checkpointer.directory))
            self._dispatch(self._fit_start())
            self.loop = self.decisions.compare(self.loop, self.state)
            while self.loop.stop is None:
                with self._open_epoch() as batches:
                    is_whole = self._train_epoch(batches)
                if is_whole:
                    self._end_epoch()
            self._save(wait=True)
        except BaseException as caught:
            error = caught
            if self.call.broke_donation:
                self._lose_donated(caught)
            else:
                self._save_on_error(caught)
            raise
        finally:
            try:
                self._end(error)
            finally:
                error = None  # its traceback holds this frame, and would keep the state and the lock of the snapshots
        return self._result()

    @contextmanager
    def _open_epoch(self) -> Generator[data.Prefetched]:
        """Open the batches of the epoch of `LoopState` that are left."""
        if not self.loop.batch:
            self.state = self.program.begin(self.state)
        loaded = self.feeds.train.epoch(self.loop.epoch, self.loop.batch)
        device, waited = data.device_of(self.state), self.accounting.waited
        moved = data.Prefetched(self.decisions.training(loaded), device, name="train", waited=waited)
        # Both stay open as long as there may be a snapshot: a feed may have to ask its loader for more.
        with closing(loaded), closing(moved) as batches:
            yield batches

    def _train_epoch(self, batches: data.Prefetched) -> bool:
        """Train on the batches that are left; False if the run ends before the last one."""
        is_due = self.loop.batch > 0 and self.loop.lacks_row  # a restored run first does what is due at its position
        while True:
            if is_due and self._ends_here(batches):
                return False
            batch = next(batches, _END)
            if batch is _END:
                return True
            self._call_step(batch)
            is_due = True

    def _ends_here(self, batches: data.Prefetched) -> bool:
        """Do what is due at this position inside an epoch; True if the run ends here."""
        loaders = self._evaluated_here(batches)
        if loaders:
            self._boundary(self.loop, loaders)
        self._decide(batches)
        if not self._is_cut_off(batches):
            return False
        self._settle(wait=True)
        # The window stays open, to go on from. If the time is up or a callback stops the run, a run that goes on from
        # here has no row here, as if it had never been stopped.
        if not loaders and self.loop.lacks_row:
            is_pause = limit_reached(self.config, self.loop) is None
            if is_pause:
                self._save()
            self._boundary(self.loop, list(self.feeds.evaluation), is_pause=is_pause)
        self._save()
        self._decide()
        return True

    def _end_epoch(self) -> None:
        """Flush, and do what is due at the end of an epoch."""
        self._decide()  # a signal may have ended the wait for a batch
        self._flush()
        self._settle(wait=True)
        files.failpoint("loop.epoch")
        policy.warn_of_no_update(self.loop)
        loop = self.loop.next_epoch()
        self._boundary(loop, self.schedule.at_end(loop))
        self._decide()
        self.loop = self.loop.stopped(limit_reached(self.config, self.loop) or self._timed_out())

    def _boundary(self, loop: LoopState, loaders: list[str], *, is_pause: bool = False) -> None:
        """Evaluate, write a row of the history, judge it, ask the callbacks, save.

        `state` and `loop` of the run stay those before the boundary until the callbacks have answered. So a boundary
        that a signal or an error interrupts is repeated by the resumed run, with its callbacks.

        Args:
            loop: at the boundary.
            loaders: to evaluate.
            is_pause: the row is no part of a run that goes on.
        """
        # Evaluate.
        state = self.state
        row: dict[str, Cell] = {"epoch": loop.epoch + (loop.batch > 0), "step": loop.updates}
        row |= self.accounting.row(loop, state)
        history = loop.history
        for name in loaders:
            values = self._evaluate(state, loop, name)
            if self.decisions.leaving:
                self._decide()  # raises
            row = joined(row, values, loader=name)
            state, loop = self._answered(state, loop, events.EvalEnd(name, loop.epoch, loop.updates, values))

        # History.
        row = with_best(row, self.monitor, self.members)
        loop = loop._replace(interval={}, computed={}, history=with_row(history, row))

        # Best and early stop.
        self.monitor.check(loop, self.feeds.evaluation)
        before, loop = loop, self.monitor.observed(loop, row)
        improved = self.monitor.improved(before, loop)
        if self.monitor.should_stop(loop):
            loop = loop.stopped("early_stopping")

        # Callbacks.
        shown = {name: cell(value) for name, value in row.items()}
        reason, speed = loop.stop or limit_reached(self.config, loop), self.accounting.row_speed()
        event = events.EpochEnd(state, loop.epoch, loop.updates, shown, improved, reason, speed)
        state, loop = self._answered(state, loop, event)
        loop = self.decisions.compare(loop, state)
        self.state, self.loop = state, loop

        # Snapshot.
        if not is_pause:
            self.checkpointer.add_row(loop, row)
        if improved:
            self.best_state.keep(state)
        if improved or loop.stop or limit_reached(self.config, loop) or self.decisions.is_snapshot_due(loop):
            self._save()

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call_step(self, batch: Any) -> None:
        """Call train_step. Nothing is read from the device."""
        loop = self.loop
        self.state, metrics = self.call(self.state, batch, loop)
        self.loop = loop.stepped()
        self._count(Call(loop.calls + 1, loop.epoch, loop.batch, loop.window_left == 1), metrics, batch)
        self.checkpointer.check_position(self.loop)

    def _flush(self) -> None:
        """Close an open window as the program's tail says. The flush of a user's own program decides itself."""
        static = self.program.static
        if static is not None and (static.tail == "carry" or not self.loop.is_window_open):
            return
        if static is not None and static.tail == "drop":
            self._settle(wait=True)  # raises the error of a window that is not finite, before it is dropped
        state, metrics = self.call.flush(self.program.flush, self.state)
        if static is None and state is self.state:
            return  # no window was open
        closes = static is None or static.tail == "step"
        self.state, self.loop = state, self.loop.flushed(updates=closes)
        self._count(Call(self.loop.calls, self.loop.epoch, -1, closes), metrics, None)

    def _count(self, call: Call, metrics: Metrics | MetricVector, batch: Any) -> None:
        """Hand the metrics of a call to the accounts and the callbacks, and take in what is due of earlier ones."""
        self.accounting.add(call, metrics, self.loop, batch)
        if call.closing and self.callbacks.has_callbacks:
            outputs: dict[str, Any] = {}
            if not isinstance(metrics, MetricVector):  # which has none
                outputs, metrics = handed_out.outputs(metrics), handed_out.measured(metrics)
            updates = self.loop.updates_at_most
            event = events.StepEnd(self.state, as_dict(metrics), batch, call.epoch, call.batch, updates, outputs)
            self.state, self.loop = self._with_answers(self.state, self.loop, self.callbacks.ask(event))
        if self.accounting.is_due():
            self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        """Take in the metrics that are due; with ``wait``, all."""
        try:
            self.loop = self.accounting.settle(self.loop, self.state, wait=wait)
        except NonFiniteError as error:
            raise self._explained(error) from error
        finally:
            self._dispatch_lines()

    def _dispatch_lines(self) -> None:
        """Dispatch the log lines that are complete, also those before a call that is not finite."""
        while self.accounting.lines:
            self._dispatch(self.accounting.lines.popleft())

    def _explained(self, error: NonFiniteError) -> NonFiniteError:
        """Return the error of a halted state with an explanation."""
        self.state = nonfinite_steps.halt_spoilt(self.state)
        window, frozen = (
            self.accounting.window(error.step or 0),
            nonfinite_steps.before_halt(self.state, self.accounting.key_ahead),
        )
        return nonfinite_steps.explain(error, frozen, window, self.eager, self.feeds.train)

    def _evaluate(self, state: Tree, loop: LoopState, name: str) -> dict[str, float]:
        """Evaluate a loader; return its means with its name before theirs."""
        step = self.program.eval_step
        assert step is not None
        files.failpoint("loop.evaluate")
        state = views.to_evaluate(state, self.view)
        watch = self.callbacks.watch(state, name, loop.epoch)
        loaded = self.decisions.evaluation(self.feeds.evaluation[name].epoch(0))
        batches = data.Prefetched(loaded, data.device_of(state), name=name)
        with self.accounting.paused():
            means = eval_means(state, batches, step, name=name, watch=watch)
        return {f"{name}_{key}": value for key, value in means.items()}

    # --- what is due --------------------------------------------------------------------------------------------------

    def _evaluated_here(self, batches: data.Prefetched) -> list[str]:
        """Return the loaders to evaluate at this position: none in an open window, or at the end of the epoch."""
        if not self.schedule.has_inside or self.loop.is_window_open:
            return []
        if self.schedule.depends_on_pending(self.loop):
            self._settle(wait=True)
        loaders = self.schedule.inside(self.loop)
        if not loaders or not batches.more():  # at the end, the epoch's own boundary evaluates
            return []
        self._settle(wait=True)
        return loaders

    def _is_cut_off(self, batches: data.Prefetched) -> bool:
        """True if the run ends inside this epoch. With no batch left, the epoch's own boundary decides."""
        steps, reason = self.config.steps, None
        if steps not in (None, -1) and self.loop.updates_at_most >= steps:
            self._settle(wait=True)
            reason = limit_reached(self.config, self.loop)
        reason = self.loop.stop or reason or self._timed_out()
        if reason is None or not batches.more():
            return False
        self.loop = self.loop.stopped(reason)
        return True

    def _timed_out(self) -> str | None:
        """Return "max_time" if that has passed and the run may stop."""
        return "max_time" if self.decisions.is_over() and not policy.below_minimum(self.config, self.loop) else None

    def _decide(self, batches: data.Prefetched | None = None) -> None:
        """Take the decisions of this place: raise the writer's error, save a snapshot that is due inside an epoch (at
        its end the boundary saves it), act on a signal."""
        self.loop = self.decisions.take(self.loop, inside=batches is not None)
        if batches is not None and self.decisions.is_snapshot_due(self.loop) and batches.more():
            self._settle(wait=True)
            self._save()
        signal = self.decisions.signal
        if signal is None:
            return
        self._settle(wait=True)
        self._save(wait=signal != "snapshot")
        self.decisions.clear_request()
        if signal != "snapshot":
            self.loop, self._has_saved = self.loop._replace(stop="interrupted"), True
            raise Preempted(self._result()) if signal == "terminate" else interrupted(self._result())

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: events.Event) -> None:
        """Dispatch an event to sinks and callbacks, and take over the answers."""
        self.state, self.loop = self._answered(self.state, self.loop, event)

    def _answered(self, state: Tree, loop: LoopState, event: events.Event) -> tuple[Tree, LoopState]:
        return self._with_answers(state, loop, self.callbacks.dispatch(event))

    def _with_answers(self, state: Tree, loop: LoopState, answers: Iterable[Any]) -> tuple[Tree, LoopState]:
        """Return state and position after the answers of callbacks: a state, or an end."""
        for answer in answers:
            if not isinstance(answer, events.Stop):
                state = inputs.checked_answer(state, answer, copied=self.config.donate == "init")
                loop = loop._replace(window_left=inputs.window_left(state, loop.window))
                self.decisions.count_answer()
            elif not policy.below_minimum(self.config, loop):
                loop = self.decisions.stop(loop, answer.reason)
        return state, loop

    def _fit_start(self) -> events.FitStart:
        loop = self.loop
        epochs, steps = (None if limit == -1 else limit for limit in (self.config.epochs, self.config.steps))
        return events.FitStart(
            self.state,
            loop.epoch,
            loop.updates,
            epochs,
            steps,
            self.feeds.train.length,
            self.checkpointer.directory,
            self.is_resumed,
            dict(loop.history),
            lambda: self.callbacks.position(self.loop),
            self.view if self.feeds.evaluation else None,
            is_compiled(self.program),
        )

    # --- snapshots and the end ----------------------------------------------------------------------------------------

    def _save(self, *, wait: bool = False) -> None:
        """Save a snapshot, unless this call of the step has one; with ``wait``, wait until all are committed."""
        saved = self.checkpointer.save(self.state, self.loop)
        if saved is not None:
            self._dispatch(saved)
        if wait:
            self.checkpointer.wait()

    def _save_on_error(self, error: BaseException) -> None:
        """Save the last whole state, unless the error says that it cannot be trusted, or a second signal ends the run.

        Of several processes one alone may have failed, or be gone: nothing is saved, since that takes all of them. An
        error while saving becomes a note on ``error``, which it must not hide.
        """
        is_whole = isinstance(error, Uncaptured) or not isinstance(error, _UNTRUSTED)
        if not self.loop.calls or self._has_saved or is_at_once(error) or not is_whole:
            return
        if self.decisions.size > 1:
            error.add_note(
                "one process alone cannot save the state of several: go on from the last snapshot, if there is one"
            )
            return
        try:
            self.loop = self.accounting.settle(self.loop, self.state, wait=True)
            self._save(wait=True)
            self._dispatch_lines()
        except Exception as second:
            error.add_note(f"the last state is not saved: {type(second).__name__}: {second}")
            _log.warning("the last state is not saved: %s: %s", type(second).__name__, second)

    def _lose_donated(self, error: BaseException) -> None:
        """Drop a donated state that a failed step has overwritten, and name the snapshots to go on from."""
        for part in states(self.state):
            if not isinstance(part, LiveState) or part.live_store is None:
                continue
            if part.live_store.generation == part.live_generation:
                part.live_store.begin()  # whoever holds this state gets an error from here on, instead of numbers
        self.state = None
        place, directory = "no snapshot has an earlier one", self.checkpointer.directory
        if directory is not None:
            try:
                if self.decisions.rank == 0:
                    self.checkpointer.wait()
            except SnapshotError as failed:
                _log.warning("the last snapshot is not saved: %s", failed)
            place = f"fit with resume='auto' goes on from the last snapshot in {directory}, if there is one"
        call = self.loop.calls + 1
        note = f"the state was donated at step {call}, which failed and may have written half of it: {place}"
        error.add_note(note)
        _log.warning("%s", note)
        vars(error)["result"] = self._result()

    def _result(self) -> FitResult:
        """Return the result so far."""
        loop, view = self.loop, self.view or "params"
        best, stop = self.monitor.best(loop), loop.stop or "error"
        return FitResult(released(self.state), dict(loop.history), best, loop.epoch, stop, view, self.best_state)

    def _end(self, error: BaseException | None) -> None:
        """Dispatch FitEnd, whatever ended the run."""
        self.best_state.end(self.loop)
        if isinstance(error, NonFiniteError | StepContractError):
            self.state = nonfinite_steps.before_halt(self.state, self.accounting.key_ahead)
            vars(error)["result"] = self._result()
            if self.decisions.size == 1:
                nonfinite_steps.write_replay_file(error, self.checkpointer.snapshots)
        if isinstance(error, KeyboardInterrupt | SystemExit) and not self._has_saved and not is_at_once(error):
            vars(error)["result"] = self._result()  # it may have that of a run inside a callback
        result = self._result()
        self.callbacks.end(events.FitEnd(result.state, result.stop_reason, result.history, result.best, error))
