"""`fit`: the outer loop.

restore -> [batches -> flush -> evaluate -> history -> best and early stop -> callbacks -> snapshot -> stop?]

The bracket is a boundary: the end of an epoch, or of an evaluation interval inside one. All decisions at a boundary
depend on `LoopState` alone, which a snapshot stores with the train state, so a resumed run decides like the whole one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import data, events, files
from ..errors import ConfigError
from ..parallel import Mesh
from ..snapshot import Snapshots
from ..types import Program, Tree
from . import environment, histograms, inputs, policy, processes, profiling, ranks, resume, train_call
from . import progress as progress_
from .best_state import BestState
from .callbacks import Callbacks
from .inputs import Feeds
from .loop_state import Cell, FitResult, cell, joined, with_row
from .member_columns import with_best
from .policy import EvalSchedule, limit_reached
from .recorder import BatchRecorder
from .recovery import save_on_error
from .resume import Checkpointer
from .signals import Signals
from .transitions import (
    UNSCORED,
    Epochs,
    Run,
    Services,
    between_calls,
    call_flush,
    call_step,
    dispatch,
    due_inside,
    end_run,
    evaluate_loader,
    is_cut_off,
    lose_donated,
    result_of,
    save,
    save_last,
    settle,
    timed_out,
    undo_boundary,
)

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig


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

    One run at a time: a `fit` in another thread of the process is refused while this one trains; one inside a callback
    works. So does a run off the main thread, where no signal ends it.

    In several processes every process makes the same call, with a program of `purestep.distribute` and whole loaders:
    all draw one order and load their rows of each batch, as `types.Share`. History, monitor and best are those of one
    process, and a run may go on with another number of processes. Callbacks run in every process, with its part of the
    state and its share of a batch; if they return a state, they do so in all. Sinks, the log and the directory belong
    to the first process. If one process gets a signal or `Stop`, comes to the end of ``max_time`` or to a snapshot due
    by the clock, or has an error of the writer, all processes act on it together; inside an epoch, one call later. An
    error in one process ends the others with a RankError, without a snapshot, which would take all of them.

    Returns:
        `FitResult`: the last state (with ``restore_best=True`` the best one), the history, the best epoch, the number
        of epochs and why it ended; ``result.best_state`` is the state of the best epoch. The module is not written.

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
    mesh = ranks.mesh_of(run.state, where="fit")
    with ExitStack() as stack:
        stack.enter_context(ranks.quiet(mesh))
        stack.enter_context(environment.applied(settings, data.device_of(run.state)))
        feeds = inputs.open_feeds(loaders, settings, ready, inputs.seed_of(run.state), mesh)
        stack.callback(feeds.close)
        processes.check_alike(mesh, lambda: {"snapshots": "None" if snapshots is None else "a directory"})
        store, owned = resume.open_snapshots(snapshots, settings)
        if store is not None and owned:
            stack.callback(store.close)
        listeners = Callbacks(
            inputs.callables("callbacks", callbacks), inputs.ready_sinks(sinks, store, settings, mesh)
        )
        signals = stack.enter_context(Signals())
        return _train(run, Opened(settings, ready, feeds, store, listeners, signals, mesh))


class Opened(NamedTuple):
    """The inputs of the loop, checked and opened by `fit`."""

    config: FitConfig
    program: Program
    feeds: Feeds
    snapshots: Snapshots | None
    callbacks: Callbacks
    signals: Signals
    mesh: Mesh | None  # of several processes


# --- the loop ---------------------------------------------------------------------------------------------------------


def _train(run: Run, opened: Opened) -> FitResult:
    """Run the loop. Do not change the order of its steps: resumed runs, callbacks and snapshots depend on it."""
    # Restore.
    services = run.services = _restore(run, opened)
    config, feeds, monitor, checkpointer = services.config, services.feeds, services.monitor, services.checkpointer
    error: BaseException | None = None
    try:
        with closing(Epochs(run)) as epochs:
            checkpointer.begin(run.loop)
            run.loop = run.loop.stopped(policy.ended_before(monitor, run.loop))
            dispatch(run, _fit_start(run))
            while epochs.is_open or run.loop.stop is None:
                # Batches, up to the next boundary.
                # `due`: loaders to evaluate; None: no row here.
                at_end, due, is_pause = True, None, False
                for batch in epochs.batches():
                    if batch is not UNSCORED:
                        call_step(run, batch)
                    due = due_inside(run, epochs)
                    if due is None:
                        between_calls(run, epochs)
                        if not is_cut_off(run, epochs):
                            continue
                        settle(run, wait=True)
                        due = list(feeds.evaluation) if run.loop.is_ahead else None
                        # The time is up, or a callback stops the run: one that goes on from here has no row here, as if
                        # it had never been stopped.
                        is_pause = limit_reached(config, run.loop) is None
                        if is_pause:
                            save(run)
                    at_end = False
                    break

                # Flush: the epoch ends. A run that ends inside an epoch keeps its window open, to go on from.
                if at_end:
                    epochs.close()
                    between_calls(run)  # a signal may have ended the wait for a batch
                    call_flush(run)
                    settle(run, wait=True)
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
                        row = joined(row, evaluate_loader(run, name), loader=name)
                        if services.processes.leaving:
                            undo_boundary(run)
                            between_calls(run)  # raises

                    row = with_best(row, monitor, services.members)

                    # History.
                    loop = run.loop._replace(interval={}, history=with_row(before.history, row))

                    # Best and early stop.
                    monitor.check(loop, feeds.evaluation)
                    run.loop = monitor.observed(loop, row)
                    improved = monitor.improved(before, run.loop)
                    if monitor.should_stop(run.loop):
                        run.loop = run.loop.stopped("early_stopping")

                    # Callbacks.
                    shown = {name: cell(value) for name, value in row.items()}
                    updates, reason = run.loop.updates, run.loop.stop or limit_reached(config, run.loop)
                    speed = services.progress.row_speed()
                    dispatch(run, events.EpochEnd(run.state, run.loop.epoch, updates, shown, improved, reason, speed))
                    run.before = None

                    # Snapshot.
                    if not is_pause:
                        checkpointer.add_row(run.loop, row)
                    is_last = run.loop.stop or limit_reached(config, run.loop)
                    if improved:
                        services.best_state.keep(run.state, run.loop)
                    if improved or is_last or services.processes.is_due(run.loop):
                        save(run)

                # Stop?
                if at_end:
                    between_calls(run)
                    run.loop = run.loop.stopped(limit_reached(config, run.loop) or timed_out(run))
                else:
                    between_calls(run, epochs)
                    if is_cut_off(run, epochs):
                        save(run)
                        between_calls(run)
                        epochs.close()
        save(run, wait=True)
    except BaseException as caught:
        error = caught
        is_whole = not (services.call.broke_donation and lose_donated(run, caught))
        if is_whole and run.loop.calls and not run.heeded:
            save_on_error(caught, lambda: save_last(run), processes=services.processes.size)
        raise
    finally:
        try:
            end_run(run, error)
        finally:
            error = None  # its traceback holds this frame, and would keep the state and the lock of the snapshots
    return result_of(run)


def _restore(run: Run, opened: Opened) -> Services:
    """Set the values of a run to those of an interrupted one, if there is one; return the services."""
    config, program, feeds, snapshots, callbacks, signals, mesh = opened
    if config.record and mesh is not None:
        raise ConfigError("record keeps the batches of one process alone", where="fit", hint="record=0")
    processes.check_alike(mesh, lambda: processes.facts_of(run.state, program, config, feeds))
    view = inputs.view_to_evaluate(run.state, config)
    monitor = policy.monitor(config, feeds.evaluation, feeds.train.count)
    window = program.static.accumulate if program.static else 1
    state, loop, resumed = resume.resumed(run.state, snapshots, config, feeds.train)
    run.state = inputs.windowed(state, window, loop.window)
    del state
    run.loop = monitor.resumed(loop)._replace(window=window, left=inputs.window_left(run.state, window))
    eager = train_call.eager_program(program)
    program = train_call.ready_program(program, run.state, config)
    intervals = {name: 1.0 if config.fast_dev_run else config.interval(name) for name in feeds.evaluation}
    if snapshots is not None and monitor.metric is not None:
        snapshots.track(monitor.metric, mode=monitor.mode)
    processes.check_alike(mesh, lambda: processes.place_of(run.loop))
    is_saved = resumed or run.loop.calls > 0  # also by hand, without a loop state
    progress = progress_.opened(config.log_every, run.state, run.loop)
    checkpointer = Checkpointer(snapshots, feeds.train, saved=run.loop.calls if is_saved else None)
    services = Services(
        config=config,
        program=program,
        eager=eager,
        feeds=feeds,
        call=train_call.train_call(eager, program, run.state, config),
        schedule=EvalSchedule(intervals, feeds.train, window),
        progress=progress,
        monitor=monitor,
        view=view,
        best_state=BestState(monitor.kept_by(snapshots)),
        checkpointer=checkpointer,
        recorder=BatchRecorder(config.record),
        callbacks=callbacks,
        processes=processes.opened(mesh, signals, checkpointer, progress, config, feeds.train),
        profiler=profiling.profiler(
            config,
            None if snapshots is None else snapshots.directory,
            updates=run.loop.updates,
            rank=0 if mesh is None else mesh.rank,
        ),
        histograms=histograms.recorder(config.histograms, eager, run.state),
        resumed=resumed,
    )
    if not resumed:
        policy.warn_of_short_average(program, config, feeds.train)
    return services


def _fit_start(run: Run) -> events.FitStart:
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
        services.resumed,
        dict(loop.history),
        lambda: services.callbacks.position(run.loop, ahead=services.progress.pending),
        services.view if services.feeds.evaluation else None,
    )
