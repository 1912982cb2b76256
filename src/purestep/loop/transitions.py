"""The values of a run and the transitions between them: a call of the step, arrived metrics, an answer of a callback, a
signal, a snapshot, a recovery."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import data, ema, events, files
from ..compile import MetricVector, as_dict, released
from ..diagnostics import purity
from ..errors import NonFiniteError, StepContractError
from ..types import Metrics, Program, Tree
from . import inputs, nonfinite_steps, policy, recovery
from .best_state import BestState
from .callbacks import Callbacks
from .evaluate import eval_means
from .histograms import Recorder
from .inputs import Feeds
from .loop_state import Call, FitResult, LoopState
from .policy import EvalSchedule, Monitor, limit_reached
from .processes import Alone
from .profiling import Profiler
from .progress import Progress
from .recorder import BatchRecorder
from .resume import Checkpointer
from .signals import Preempted, interrupted, is_at_once
from .train_call import TrainCall

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

UNSCORED = object()
"""Stands for the batch before a row of the history that an interrupted run did not write."""
log = logging.getLogger("purestep")


class Services(NamedTuple):
    """The parts of a run that own a resource or a queue. `LoopState` has the values that their decisions depend on."""

    config: FitConfig
    program: Program  # compiled as the config says
    eager: Program
    feeds: Feeds
    call: TrainCall
    progress: Progress
    schedule: EvalSchedule
    monitor: Monitor
    view: str | None  # of the state that is evaluated; None without an average
    checkpointer: Checkpointer
    best_state: BestState
    recorder: BatchRecorder
    callbacks: Callbacks
    processes: Alone  # the decisions of the boundaries
    profiler: Profiler | None
    histograms: Recorder | None
    resumed: bool  # goes on from an interrupted run

    @property
    def members(self) -> int:
        """The number of members of an ensemble, 0 for a program of one model."""
        return self.program.static.members if self.program.static is not None else 0


class Run:
    """The present values of a run. Functions replace each as a whole, so an error in between leaves them consistent.

    `fit` holds no other reference to a state that it moved, so its memory is free after the first step.
    """

    __slots__ = ("before", "heeded", "loop", "services", "state")
    services: Services

    def __init__(self, state: Tree) -> None:
        self.state = state
        self.loop = LoopState()
        self.before: tuple[Tree, LoopState] | None = None  # to return to if the present boundary is interrupted
        self.heeded = False  # a signal ends the run: the state is saved, and the error has the result


# --- batches and calls ------------------------------------------------------------------------------------------------


class Epochs:
    """The training batches of a run. An epoch stays open across the boundaries inside it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stack = ExitStack()
        self._ahead: data.Prefetched | None = None
        self._batches: Iterator[Any] = iter(())

    @property
    def is_open(self) -> bool:
        """True inside an epoch."""
        return self._ahead is not None

    def batches(self) -> Iterator[Any]:
        """Return the batches of the epoch of `LoopState` that are left."""
        if self._ahead is None:
            services, loop = self._run.services, self._run.loop
            services.schedule.begin(loop)
            loaded = services.feeds.train.epoch(loop.epoch, loop.batch)
            watched = services.processes.watch(services.progress.timed(loaded))
            ahead = data.prefetch(watched, data.device_of(self._run.state), name="train")
            # Both stay open as long as there may be a snapshot: a feed may have to ask its loader for more.
            self._stack.enter_context(closing(loaded))
            self._ahead = self._stack.enter_context(closing(ahead))
            is_unscored = loop.batch and loop.is_ahead
            self._batches = chain([UNSCORED], ahead) if is_unscored else ahead
        return self._batches

    def more(self) -> bool:
        """True if the epoch has another batch."""
        return self._ahead is not None and self._ahead.more()

    def close(self) -> None:
        """Close the epoch, inside or at its end."""
        self._ahead, self._batches = None, iter(())
        self._stack.close()


def call_step(run: Run, batch: Any) -> None:
    """Call train_step. Nothing is read from the device."""
    loop, profiler, recorder = run.loop, run.services.profiler, run.services.recorder
    recorder.add(run.state, batch, loop.calls + 1)
    if profiler is not None:
        profiler.before_call()
    if run.services.histograms is not None:
        updates = loop.updates + run.services.progress.pending
        run.services.histograms.before_call(run.state, batch, updates=updates, closes=loop.left == 1)
    run.state, metrics = run.services.call(run.state, batch, loop)
    recorder.returned(run.state)
    run.loop = loop.stepped()
    call = Call(loop.calls + 1, loop.epoch, loop.batch, loop.left == 1, purity.versions(batch))
    _count(run, call, metrics, batch)


def call_flush(run: Run) -> None:
    """Close an open window as the program's tail says. The flush of a user's own program decides itself."""
    program = run.services.program
    if program.static is not None and (program.static.tail == "carry" or not run.loop.is_window_open):
        return
    state, metrics = run.services.call.flush(program.flush, run.state)
    if program.static is None and state is run.state:
        return  # no window was open
    run.state, run.loop = state, run.loop.flushed()
    closes = program.static is None or program.static.tail == "step"
    _count(run, Call(run.loop.calls, run.loop.epoch, -1, closes), metrics, None)


def _count(run: Run, call: Call, metrics: Metrics | MetricVector, batch: Any) -> None:
    """Hand the metrics of a call to the progress and the callbacks, and take in what has arrived of earlier ones."""
    progress, callbacks, profiler = run.services.progress, run.services.callbacks, run.services.profiler
    if profiler is not None and call.closing:
        profiler.after_update()
    progress.add(call, metrics, run.loop, batch)
    if call.closing and callbacks.has_callbacks:
        updates = run.loop.updates + progress.pending
        event = events.StepEnd(run.state, as_dict(metrics), batch, call.epoch, call.batch, updates)
        _heed(run, callbacks.ask(event))
    if call.closing and run.services.histograms is not None:
        found = run.services.histograms.after_update(run.state, updates=run.loop.updates + progress.pending)
        if found is not None:
            dispatch(run, found)
    settle(run, wait=False)


def settle(run: Run, *, wait: bool) -> None:
    """Take in the metrics that have arrived; with ``wait``, wait for all of them."""
    try:
        run.loop, lines = run.services.progress.settle(run.loop, run.state, wait=wait)
    except NonFiniteError as error:
        raise _explained(run, error) from error
    for line in lines:
        dispatch(run, line)


def due_inside(run: Run, epochs: Epochs) -> list[str] | None:
    """Return the loaders to evaluate behind this batch. None: no loader, an open window, or the end of the epoch."""
    schedule, loop = run.services.schedule, run.loop
    if not schedule.has_inside or loop.is_window_open:
        return None
    if schedule.may_be_due(loop, run.services.progress.pending):  # otherwise it does not matter how many were applied
        settle(run, wait=True)
    due = schedule.due_inside(run.loop)
    if not due or not epochs.more():  # at the end, the epoch's own boundary evaluates
        return None
    settle(run, wait=True)
    return due


def evaluate_loader(run: Run, name: str) -> dict[str, float]:
    """Evaluate a loader; return its means with its name before theirs."""
    services = run.services
    step = services.program.eval_step
    assert step is not None
    files.failpoint("loop.evaluate")
    state = ema.to_evaluate(run.state, services.view)
    watch = services.callbacks.watch(state, name, run.loop.epoch)
    loaded = services.processes.watch_evaluation(services.feeds.evaluation[name].epoch(0))
    batches = data.prefetch(loaded, data.device_of(state), name=name)
    with services.progress.paused():
        means = eval_means(state, batches, step, name=name, watch=watch)
    values = {f"{name}_{key}": value for key, value in means.items()}
    if not services.processes.leaving:
        dispatch(run, events.EvalEnd(name, run.loop.epoch, run.loop.updates, values))
    return values


def is_cut_off(run: Run, epochs: Epochs) -> bool:
    """True if the run ends inside this epoch. With no batch left, the epoch's own boundary decides."""
    services = run.services
    steps, reason = services.config.steps, None
    if steps not in (None, -1) and run.loop.updates + services.progress.pending >= steps:
        settle(run, wait=True)
        reason = limit_reached(services.config, run.loop)
    reason = run.loop.stop or reason or timed_out(run)
    if reason is None or not epochs.more():
        return False
    run.loop = run.loop.stopped(reason)
    return True


def timed_out(run: Run) -> str | None:
    """Return "max_time" if that has passed and the run may stop."""
    return "max_time" if run.services.processes.is_over() and not _is_below_minimum(run) else None


def _is_below_minimum(run: Run) -> bool:
    return policy.below_minimum(run.services.config, run.loop, ahead=run.services.progress.pending)


# --- callbacks, signals, snapshots ------------------------------------------------------------------------------------


def dispatch(run: Run, event: events.Event) -> None:
    """Dispatch an event and heed the answers."""
    _heed(run, run.services.callbacks.dispatch(event))
    if isinstance(event, events.FitStart | events.EpochEnd):
        run.loop = run.services.processes.meet(run.loop, run.state)


def _heed(run: Run, answers: Iterable[Any]) -> None:
    """Take over what callbacks return: a state, or an end."""
    for answer in answers:
        if not isinstance(answer, events.Stop):
            run.state = inputs.checked_answer(run.state, answer, copied=run.services.config.donate == "init")
            run.loop = run.loop._replace(left=inputs.window_left(run.state, run.loop.window))
            run.services.processes.count_answer()
        elif not _is_below_minimum(run):
            run.loop = run.services.processes.wish(run.loop, answer.reason)


def between_calls(run: Run, epochs: Epochs | None = None) -> None:
    """Take the decisions of this boundary: raise the writer's error, save a snapshot that is due inside an epoch (at
    its end it is the boundary's), and heed signals."""
    processes = run.services.processes
    run.loop = processes.agree(run.loop, wait=epochs is None)
    if epochs is not None and processes.is_due(run.loop) and epochs.more():
        settle(run, wait=True)
        save(run)
    if processes.pending is not None:
        _heed_signal(run)


def _heed_signal(run: Run) -> None:
    processes = run.services.processes
    pending = processes.pending
    settle(run, wait=True)
    save(run, wait=pending != "snapshot")
    processes.saved()
    if pending == "snapshot":
        return
    run.loop = run.loop._replace(stop="interrupted")
    run.heeded = True
    raise Preempted(result_of(run)) if pending == "terminate" else interrupted(result_of(run))


def save(run: Run, *, wait: bool = False) -> None:
    """Save a snapshot, unless this call of the step has one; with ``wait``, wait until all are committed."""
    services = run.services
    saved = services.checkpointer.save(run.state, run.loop, ahead=services.progress.pending)
    if saved is not None:
        dispatch(run, saved)
    if wait:
        services.checkpointer.wait()


# --- errors -----------------------------------------------------------------------------------------------------------


def save_last(run: Run) -> None:
    """Save the last whole state after an error."""
    undo_boundary(run)
    run.loop, lines = run.services.progress.settle(run.loop, run.state, wait=True)
    save(run, wait=True)
    for line in lines:
        dispatch(run, line)


def undo_boundary(run: Run) -> None:
    """Return to the values before an interrupted boundary, but for the reason to stop."""
    if run.before is not None:
        stop = run.loop.stop
        (run.state, loop), run.before = run.before, None
        run.loop = loop._replace(stop=stop, left=inputs.window_left(run.state, loop.window))


def _explained(run: Run, error: NonFiniteError) -> NonFiniteError:
    """Return the error of a halted state with an explanation."""
    services = run.services
    run.state = nonfinite_steps.halt_spoilt(run.state)
    error, window = nonfinite_steps.without_written(error, services.progress.window(error.step or 0))
    frozen = nonfinite_steps.before_halt(run.state)
    return services.processes.explained(error, frozen, window, services.eager, services.feeds.train)


def lose_donated(run: Run, error: BaseException) -> bool:
    """Drop a donated state that a failed step has overwritten; False if the state is whole."""
    services = run.services
    adopted = services.config.donate == "init"
    if not recovery.is_lost(run.state, adopted=adopted):
        return False
    run.state = None
    snapshots = services.checkpointer.snapshots if services.processes.rank == 0 else None
    recovery.note_lost(error, run.loop.calls + 1, snapshots)
    vars(error)["result"] = result_of(run)
    return True


# --- the end ----------------------------------------------------------------------------------------------------------


def result_of(run: Run) -> FitResult:
    """Return the result so far."""
    loop, services = run.loop, run.services
    best, view = services.monitor.best(loop), services.view or "params"
    stop, recording = loop.stop or "error", services.recorder.parts()
    state = released(run.state)
    return FitResult(state, dict(loop.history), best, loop.epoch, stop, view, services.best_state, recording)


def _restore_best(run: Run) -> None:
    best = run.services.best_state()
    if best is None:
        log.warning("restore_best: there is no best state, so the result has the last one")
    else:
        run.state = best


def end_run(run: Run, error: BaseException | None) -> None:
    """Dispatch FitEnd, whatever ended the run."""
    if run.services.profiler is not None:
        run.services.profiler.close()
    run.services.best_state.end(run.state, run.loop)
    if error is None and run.services.config.restore_best:
        _restore_best(run)
    if isinstance(error, NonFiniteError | StepContractError):
        run.state = nonfinite_steps.before_halt(run.state)
        vars(error)["result"] = result_of(run)
        if run.services.processes.size == 1:
            nonfinite_steps.write_replay_file(error, run.services.checkpointer.snapshots)
    if isinstance(error, KeyboardInterrupt | SystemExit) and not run.heeded and not is_at_once(error):
        vars(error)["result"] = result_of(run)  # it may have that of a run inside a callback
    if error is not None:
        run.services.recorder.write(error, run.services.checkpointer.snapshots)
    result = result_of(run)
    run.services.callbacks.end(events.FitEnd(result.state, result.stop_reason, result.history, result.best, error))
