"""`fit`: the outer loop.

restore -> [batches -> flush -> evaluate -> history -> best and early stop -> callbacks -> snapshot -> stop?]

The bracket is a boundary: the end of an epoch, or of an evaluation interval inside one. All decisions at a boundary
depend on `LoopState` alone, which a snapshot stores with the train state, so a resumed run decides like the whole one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import data, ema, events, files
from ..compile import Stacked, unstacked
from ..errors import NonFiniteError, StepContractError
from ..signals import Preempted, Signals, interrupted
from ..snapshot import Snapshots
from ..types import Metrics, Program, Tree
from . import checkpointing, environment, halted, inputs, policy, progress, recovery, train_call
from .callbacks import Callbacks
from .checkpointing import Checkpointer
from .evaluate import eval_means
from .inputs import Feeds
from .loop_state import Call, Cell, FitResult, LoopState, cell, joined, with_row
from .policy import EvalSchedule, Monitor, limit_reached
from .progress import Progress
from .recovery import LastGood, save_on_error
from .train_call import TrainCall

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

_UNSCORED = object()  # stands for the batch before a row that an interrupted run did not write
log = logging.getLogger("purestep")


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

    Args:
        init_state: from ``program.init(seed=0)``, or any pytree of tensors that the program's step takes. It stays
            valid unless ``donate="init"``.
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

    Runs in several threads of one process give the same numbers as each gives alone. Their steps and loaders take turns
    with the global generators of torch, numpy and Python, which the process shares (compiled steps that draw nothing do
    not wait), and graphs are captured while no other thread runs an eager step. Torch's switches (``deterministic``,
    ``tf32``, ``detect_anomaly``, the default dtype) belong to the process: a run that needs other ones than a running
    one raises, and so does a callback that draws while another thread trains. Your own thread that draws, for example
    to build a model, takes its turn with ``with ps.rng.scoped(seed):``; without it, it draws from the running step's
    generator and changes that step's numbers. Signals end only the run on the main thread.

    Returns:
        `FitResult`: the last state, the history, the best epoch, the number of epochs and why it ended.

    Raises:
        ConfigError: settings that do not exist, contradict each other or those of a run in another thread; after an
            epoch, a ``monitor`` that is no metric.
        StateError: ``init_state``, or the answer of a callback, is no state to train.
        DataError: an empty, exhausted or failing loader; a batch with another structure than the first.
        NonFiniteError: a loss or gradient that is not finite (``nonfinite="raise"``); ``error.result`` has the state,
            and `purestep.testing.replay` repeats the call from a file in the directory of the snapshots. With
            ``nonfinite="skip"``: 100 refused updates in a row.
        StepContractError: the step is not pure (see `FitConfig.check_every`), or returns no state and metrics; a
            callback draws from a global generator while another thread trains.
        SnapshotError: a snapshot does not fit, is damaged or cannot be written; `Locked`: another run's directory.
        RankError: more than one process.
        KeyboardInterrupt, SystemExit: Ctrl-C, SIGTERM (status 143); the state is saved, and ``error.result`` has it.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> batch = (torch.ones(4, 2), torch.ones(4, 1))
        >>> result = ps.fit(program.init(), {"train": [batch] * 5, "val": [batch]}, program, epochs=3, progress=False)
        >>> result.epochs, result.stop_reason, len(result.history["val_loss"])
        (3, 'epochs', 3)
    """
    settings = inputs.settings(config, fields)
    ready = inputs.checked_program(program)
    given = inputs.checked_state(init_state)
    inputs.check_fits(given, ready)
    run = Run(inputs.placed(given, settings.device, ready))
    is_callers = run.state is given
    with ExitStack() as stack:
        stack.enter_context(environment.environment(settings, data.device_of(run.state)))
        feeds = inputs.open_feeds(loaders, settings, ready, inputs.seed_of(run.state))
        stack.callback(feeds.close)
        store, owned = checkpointing.open_snapshots(snapshots, settings, feeds.train)
        if store is not None and owned:
            stack.callback(store.close)
        listeners = Callbacks(inputs.callables("callbacks", callbacks), inputs.ready_sinks(sinks, store, settings))
        signals = stack.enter_context(Signals())
        return _train(run, ready, feeds, settings, store, listeners, signals, is_callers=is_callers)


class Services(NamedTuple):
    """What the loop works with. Each of them owns a resource or a queue; none decides from anything but `LoopState`."""

    config: FitConfig
    program: Program  # compiled as the config says
    eager: Program
    feeds: Feeds
    call: TrainCall
    progress: Progress
    schedule: EvalSchedule
    monitor: Monitor
    view: str  # of the state that is evaluated
    last_good: LastGood
    checkpointer: Checkpointer
    callbacks: Callbacks
    signals: Signals
    begun: float  # time.monotonic()


class Run:
    """The present values of a run. Functions replace each as a whole, so an error in between leaves them consistent.

    The frame of `fit` holds no other reference to the state: the memory of a moved one is free after its first step.
    """

    __slots__ = ("before", "loop", "services", "state")
    services: Services

    def __init__(self, state: Tree) -> None:
        self.state = state
        self.loop = LoopState()
        self.before: tuple[Tree, LoopState] | None = None  # to return to if the present boundary is interrupted


# --- the loop ---------------------------------------------------------------------------------------------------------


def _train(
    run: Run,
    program: Program,
    feeds: Feeds,
    config: FitConfig,
    snapshots: Snapshots | None,
    callbacks: Callbacks,
    signals: Signals,
    *,
    is_callers: bool,
) -> FitResult:
    """Run the loop. Do not change the order of its steps: resumed runs, callbacks and snapshots depend on it."""
    # Restore.
    resumed = _restore(run, program, feeds, config, snapshots, callbacks, signals, is_callers=is_callers)
    services = run.services
    monitor, last_good, checkpointer = services.monitor, services.last_good, services.checkpointer
    error: BaseException | None = None
    try:
        with closing(_Epochs(run)) as epochs:
            checkpointer.begin(run.loop)
            run.loop = run.loop.stopped(policy.ended_before(monitor, run.loop))
            _tell(run, _fit_start(run, resumed=resumed))
            while epochs.is_open or run.loop.stop is None:
                # Batches, up to the next boundary.
                at_end, due = True, None  # `due`: loaders to evaluate; None: no row here
                for batch in epochs.batches():
                    if batch is not _UNSCORED:
                        _step(run, batch)
                    due = _due_inside(run, epochs)
                    if due is None:
                        _between_calls(run, epochs)
                        if not _is_cut_off(run, epochs):
                            continue
                        _settle(run, wait=True)
                        due = list(feeds.evaluation) if run.loop.is_ahead else None
                    at_end = False
                    break

                # Flush: the epoch ends. A run that ends inside an epoch keeps its window open, to go on from.
                if at_end:
                    epochs.close()
                    _between_calls(run)  # a signal may have ended the wait for a batch
                    _flush(run)
                    _settle(run, wait=True)
                    files.failpoint("loop.epoch")
                    run.before = run.state, run.loop
                    run.loop = run.loop.next_epoch(services.schedule.counted(run.loop))
                    due = services.schedule.due_at_end(run.loop)

                if due is not None:
                    # Evaluate. An interrupted boundary is repeated by the resumed run, with its callbacks.
                    before = run.loop
                    run.before = run.before or (run.state, before)
                    row: dict[str, Cell] = {"epoch": before.epoch + (before.batch > 0), "step": before.updates}
                    row |= services.progress.row(dict(before.interval), before.last)
                    for name in due:
                        row = joined(row, _evaluate(run, name), loader=name)
                        if signals.leaving:
                            _undo_boundary(run)
                            _between_calls(run)  # raises

                    # History.
                    loop = run.loop._replace(interval={}, history=with_row(before.history, row))

                    # Best and early stop.
                    monitor.check(loop, feeds.evaluation)
                    run.loop = monitor.observed(loop, row)
                    improved = monitor.improved(before, run.loop)
                    last_good.keep(run.state, run.loop)
                    if monitor.should_stop(run.loop):
                        run.loop = run.loop.stopped("early_stopping")

                    # Callbacks.
                    shown = {name: cell(value) for name, value in row.items()}
                    updates, reason = run.loop.updates, run.loop.stop or limit_reached(config, run.loop)
                    _tell(run, events.EpochEnd(run.state, run.loop.epoch, updates, shown, improved, reason))
                    run.before = None

                    # Snapshot.
                    checkpointer.add_row(run.loop, row)
                    is_last = run.loop.stop or limit_reached(config, run.loop)
                    if improved or is_last or checkpointer.is_due(run.loop, services.progress.pending):
                        _save(run)

                # Stop?
                if at_end:
                    _between_calls(run)
                    run.loop = run.loop.stopped(limit_reached(config, run.loop) or _timed_out(run))
                else:
                    _between_calls(run, epochs)
                    if _is_cut_off(run, epochs):
                        _save(run)
                        _between_calls(run)
                        epochs.close()
        _save(run, wait=True)
    except BaseException as caught:
        error = caught
        if not (services.call.broke_donation and _replace_broken(run, caught)) and run.loop.calls:
            save_on_error(caught, lambda: _save_last(run))
        raise
    finally:
        _end(run, error)
    return _result(run)


def _restore(
    run: Run,
    program: Program,
    feeds: Feeds,
    config: FitConfig,
    snapshots: Snapshots | None,
    callbacks: Callbacks,
    signals: Signals,
    *,
    is_callers: bool,
) -> bool:
    """Set the values and services of a run; return True if it goes on from an interrupted one."""
    view = inputs.view_to_evaluate(run.state, config)
    monitor = policy.monitor(config, feeds.evaluation, feeds.train.count)
    window = program.static.accumulate if program.static else 1
    state, loop, resumed = checkpointing.resumed(run.state, snapshots, config, feeds.train)
    run.state = inputs.windowed(state, window, loop.window)
    del state
    run.loop = monitor.resumed(loop)._replace(window=window, left=inputs.window_left(run.state, window))
    eager = train_call.eager_program(program)
    program = train_call.ready_program(program, run.state, config)
    intervals = {name: 1.0 if config.fast_dev_run else config.interval(name) for name in feeds.evaluation}
    is_saved = resumed or run.loop.calls > 0  # also by hand, without a loop state
    start = (run.state, run.loop) if is_callers and not resumed and config.donate != "init" else None
    run.services = Services(
        config,
        program,
        eager,
        feeds,
        train_call.train_call(eager, program, run.state, config),
        progress.opened(config.log_every, run.state, run.loop),
        EvalSchedule(intervals, feeds.train, window),
        monitor,
        view,
        LastGood(config.rollback, start),
        Checkpointer(snapshots, feeds.train, saved=run.loop.calls if is_saved else None),
        callbacks,
        signals,
        time.monotonic(),
    )
    run.services.last_good.keep(run.state, run.loop)
    if snapshots is not None and monitor.metric is not None:
        snapshots.track(monitor.metric, mode=monitor.mode)
    return resumed


def _fit_start(run: Run, *, resumed: bool) -> events.FitStart:
    services, loop = run.services, run.loop
    snapshots, config = services.checkpointer.snapshots, services.config
    epochs, steps = (None if limit == -1 else limit for limit in (config.epochs, config.steps))
    return events.FitStart(
        run.state,
        loop.epoch,
        loop.updates,
        epochs,
        steps,
        services.feeds.train.length,
        None if snapshots is None else snapshots.directory,
        resumed,
        dict(loop.history),
        lambda: services.callbacks.position(run.loop),
    )


def _result(run: Run) -> FitResult:
    loop, best = run.loop, run.services.monitor.best(run.loop)
    return FitResult(run.state, dict(loop.history), best, loop.epoch, loop.stop or "error")


def _end(run: Run, error: BaseException | None) -> None:
    """Dispatch FitEnd, whatever ended the run."""
    if isinstance(error, NonFiniteError | StepContractError):
        run.state = halted.before_halt(run.state)
        vars(error)["result"] = _result(run)
        halted.write_replay_file(error, run.services.checkpointer.snapshots)
    result = _result(run)
    run.services.callbacks.end(events.FitEnd(result.state, result.stop_reason, result.history, result.best, error))


# --- batches and calls ------------------------------------------------------------------------------------------------


class _Epochs:
    """The training batches of a run. An epoch stays open across the boundaries inside it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stack = ExitStack()
        self._ahead: data.Ahead[Any] | None = None
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
            watched = services.signals.watch(services.progress.timed(loaded))
            ahead = data.Ahead(data.prefetch(watched, data.device_of(self._run.state), name="train"))
            # Both stay open as long as there may be a snapshot: a feed may have to ask its loader for more.
            self._stack.enter_context(closing(loaded))
            self._ahead = self._stack.enter_context(closing(ahead))
            is_unscored = loop.batch and loop.is_ahead
            self._batches = chain([_UNSCORED], ahead) if is_unscored else ahead
        return self._batches

    def more(self) -> bool:
        """True if the epoch has another batch."""
        return self._ahead is not None and self._ahead.more()

    def close(self) -> None:
        """Close the epoch, inside or at its end."""
        self._ahead, self._batches = None, iter(())
        self._stack.close()


def _step(run: Run, batch: Any) -> None:
    """Call train_step. Nothing is read from the device."""
    loop = run.loop
    try:
        run.state, metrics = run.services.call(run.state, batch, loop)
    except NonFiniteError as error:  # of detect_anomaly, which reads at once
        if not _went_back(run, error, recovery.past_call(run.state), loop.stepped()):
            raise
        return
    run.loop = loop.stepped()
    _count(run, Call(loop.calls + 1, loop.epoch, loop.batch, loop.left == 1), metrics, batch)


def _flush(run: Run) -> None:
    """Close an open window as the program's tail says. The flush of a user's own program decides itself."""
    program = run.services.program
    if program.static is not None and (program.static.tail == "carry" or not run.loop.is_window_open):
        return
    state, metrics = run.services.call.flush(program.flush, run.state)
    if program.static is None and state is run.state:
        return  # no window was open
    run.state, run.loop = state, run.loop.flushed()
    closing_ = program.static is None or program.static.tail == "step"
    _count(run, Call(run.loop.calls, run.loop.epoch, -1, closing_), metrics, None)


def _count(run: Run, call: Call, metrics: Metrics | Stacked, batch: Any) -> None:
    """Hand the metrics of a call to the progress and the callbacks, and take in what has arrived of earlier ones."""
    progress, callbacks = run.services.progress, run.services.callbacks
    progress.add(call, metrics, run.loop, batch)
    if call.closing and callbacks.exist:
        updates = run.loop.updates + progress.pending
        event = events.StepEnd(run.state, unstacked(metrics), batch, call.epoch, call.batch, updates)
        _heed(run, callbacks.ask(event))
    _settle(run, wait=False)


def _settle(run: Run, *, wait: bool) -> None:
    """Take in the metrics that have arrived; with ``wait``, wait for all of them."""
    try:
        run.loop, lines = run.services.progress.settle(run.loop, run.state, wait=wait)
    except NonFiniteError as error:
        _go_back(run, error)
        return
    for line in lines:
        _tell(run, line)


def _due_inside(run: Run, epochs: _Epochs) -> list[str] | None:
    """Return the loaders to evaluate behind this batch. None: no loader, an open window, or the end of the epoch."""
    schedule, loop = run.services.schedule, run.loop
    if not schedule.has_inside or loop.is_window_open:
        return None
    if schedule.may_be_due(loop, run.services.progress.pending):  # otherwise it does not matter how many were applied
        _settle(run, wait=True)
    due = schedule.due_inside(run.loop)
    if not due or not epochs.more():  # at the end, the epoch's own boundary evaluates
        return None
    _settle(run, wait=True)
    return due


def _evaluate(run: Run, name: str) -> dict[str, float]:
    services = run.services
    step = services.program.eval_step
    assert step is not None
    files.failpoint("loop.evaluate")
    state = run.state if services.view == "params" else ema.view(run.state, services.view)
    watch = services.callbacks.watch(state, name, run.loop.epoch)
    loaded = services.signals.watch(services.feeds.evaluation[name].epoch(0))
    batches = data.prefetch(loaded, data.device_of(state), name=name)
    means = environment.check_draws(
        lambda: eval_means(state, batches, step, name=name, watch=watch), f"eval_step, {name}"
    )
    values = {f"{name}_{key}": value for key, value in means.items()}
    if not services.signals.leaving:
        _tell(run, events.EvalEnd(name, run.loop.epoch, run.loop.updates, values))
    return values


def _is_cut_off(run: Run, epochs: _Epochs) -> bool:
    """True if the run ends inside this epoch. With no batch left, the epoch's own boundary decides."""
    services = run.services
    steps, reason = services.config.steps, None
    if steps not in (None, -1) and run.loop.updates + services.progress.pending >= steps:
        _settle(run, wait=True)
        reason = limit_reached(services.config, run.loop)
    reason = run.loop.stop or reason or _timed_out(run)
    if reason is None or not epochs.more():
        return False
    run.loop = run.loop.stopped(reason)
    return True


def _timed_out(run: Run) -> str | None:
    limit = run.services.config.max_time
    is_over = limit is not None and time.monotonic() - run.services.begun >= limit
    return "max_time" if is_over and not _is_below_minimum(run) else None


def _is_below_minimum(run: Run) -> bool:
    return policy.below_minimum(run.services.config, run.loop, ahead=run.services.progress.pending)


# --- callbacks, signals, snapshots ------------------------------------------------------------------------------------


def _tell(run: Run, event: events.Event) -> None:
    """Dispatch an event and heed the answers."""
    before = run.state
    _heed(run, run.services.callbacks.dispatch(event))
    if run.state is not before and isinstance(event, events.FitStart | events.EpochEnd):
        run.services.last_good.keep(run.state, run.loop)  # going back keeps the state of a callback


def _heed(run: Run, answers: Iterable[Any]) -> None:
    """Take over what callbacks return: a state, or an end."""
    for answer in answers:
        if not isinstance(answer, events.Stop):
            run.state = inputs.checked_answer(run.state, answer, copied=run.services.config.donate == "init")
            run.loop = run.loop._replace(left=inputs.window_left(run.state, run.loop.window))
        elif not _is_below_minimum(run):
            run.loop = run.loop.stopped(answer.reason)


def _between_calls(run: Run, epochs: _Epochs | None = None) -> None:
    """Raise the writer's error, save a snapshot that is due inside an epoch (at its end it is the boundary's), and
    heed signals."""
    services = run.services
    services.checkpointer.check()
    if epochs is not None and services.checkpointer.is_due(run.loop, services.progress.pending) and epochs.more():
        _settle(run, wait=True)
        _save(run)
    if services.signals.pending is not None:
        _heed_signal(run)


def _heed_signal(run: Run) -> None:
    signals = run.services.signals
    pending = signals.pending
    _settle(run, wait=True)
    _save(run, wait=pending != "snapshot")
    signals.saved()
    if pending == "snapshot":
        return
    run.loop = run.loop._replace(stop="interrupted")
    raise Preempted(_result(run)) if pending == "terminate" else interrupted(_result(run))


def _save(run: Run, *, wait: bool = False) -> None:
    services = run.services
    saved = services.checkpointer.save(run.state, run.loop, ahead=services.progress.pending)
    if saved is not None:
        _tell(run, saved)
    if wait:
        services.checkpointer.wait()


# --- errors -----------------------------------------------------------------------------------------------------------


def _save_last(run: Run) -> None:
    """Save the last whole state after an error."""
    _undo_boundary(run)
    run.loop, lines = run.services.progress.settle(run.loop, run.state, wait=True)
    _save(run, wait=True)
    for line in lines:
        _tell(run, line)


def _undo_boundary(run: Run) -> None:
    """Return to the values before an interrupted boundary, but for the reason to stop."""
    if run.before is not None:
        stop = run.loop.stop
        (run.state, loop), run.before = run.before, None
        run.loop = loop._replace(stop=stop, left=inputs.window_left(run.state, loop.window))


def _go_back(run: Run, error: NonFiniteError) -> None:
    """Go back to the last good state, or raise the error with an explanation."""
    if not _went_back(run, error, run.state, run.loop):
        run.state = halted.halt_spoilt(run.state)
        services = run.services
        window = services.progress.window(error.step or 0)
        raise halted.explain(error, halted.before_halt(run.state), window, services.eager, services.feeds.train)


def _went_back(run: Run, error: NonFiniteError, state: Tree, loop: LoopState) -> bool:
    """Go back to the last good state, with the counters of these values; False if the config does not allow it."""
    found = run.services.last_good.back(state, loop)
    if found is None:
        return False
    run.services.progress.discard()
    run.state, loop = found
    run.loop = loop._replace(left=inputs.window_left(run.state, loop.window))
    log.warning("went back to update %d: %s", loop.updates, error)
    return True


def _replace_broken(run: Run, error: BaseException) -> bool:
    """Replace a donated state that a failed step has overwritten; False if the state is whole."""
    services = run.services
    found = recovery.after_failed_donation(
        run.state,
        run.loop,
        error,
        services.last_good,
        services.checkpointer.snapshots,
        adopted=services.config.donate == "init",
    )
    if found is None:
        return False
    services.progress.discard()
    stop = run.loop.stop
    run.state, loop = found
    run.loop = loop._replace(stop=stop)
    vars(error)["result"] = _result(run)
    return True
