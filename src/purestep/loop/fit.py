"""fit: what it is given, made ready, and one run of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from .. import data, events
from ..signals import Signals
from ..types import Program, Tree
from . import checkpointing, environment, inputs
from .callbacks import Audience
from .loop_state import FitResult
from .trainer import Run


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
        loaders: ``{"train": loader, "val": loader, ...}``, ``(train, val)``, or one alone to train on. A loader is a
            DataLoader or any iterable of batches. Every key but "train" is evaluated and prefixes its metrics.
        program: from `program`, or `Program(train_step)` around a step of one's own.
        config: a `FitConfig`, a mapping, an object with attributes, or the path of a JSON or TOML file.
        snapshots: a directory, or a `Snapshots` with a policy of its own, which is left open.
        callbacks: ``f(event)``, see `purestep.events`; may return None, a new state, or `Stop`.
        sinks: where numbers go: ``[ps.sinks.jsonl("metrics.jsonl"), ...]``, and nowhere else. None: a progress display
            (``ps.sinks.progress()``), and ``training_history.json`` beside the snapshots (``ps.sinks.history_json``).
        fields: those of `FitConfig`: ``epochs=10, monitor="val_loss", early_stopping=5, ...``; they win over config.
            Where they say nothing, a run goes on from the newest snapshot of its directory (``resume="auto"``), an
            average is what is evaluated, a copy of a state on the CPU is moved to the best device there is (cuda, then
            mps; ``device="cpu"`` stays), and steps are compiled on CUDA alone: ``help(ps.FitConfig)``. The same call
            made again goes on where it was, also one with ``resume="old", snapshots="new"``: what has gone on from
            "old" in "new" is not begun again.

    Runs in several threads of one process give the numbers that each gives alone. Their steps and loaders take turns at
    torch's, numpy's and Python's global generators, of which a process has one each (compiled steps that draw nothing
    do not wait), and graphs are made while no other thread steps in eager. Torch's switches (``deterministic``,
    ``tf32``, ``detect_anomaly``, the default dtype) belong to the process: a run that wants others than one that is at
    work is refused, as is a callback that draws while another thread trains. A thread of one's own that draws, as
    making a model does, takes its turn by ``with ps.rng.scoped(seed):``; without it, it draws from whatever runs at
    that moment and changes the numbers of that. Signals end the run on the main thread alone.

    Returns:
        `FitResult`: the last state, the history, the best epoch, the number of epochs and why it ended.

    Raises:
        ConfigError: settings that do not exist, contradict each other or those of a run in another thread; after an
            epoch, a ``monitor`` that is none.
        StateError: ``init_state``, or what a callback returned, is no state to train.
        DataError: an empty, exhausted or failing loader; a batch of another structure than the first.
        NonFiniteError: a loss or gradient that is not finite (``nonfinite="raise"``); ``error.result`` has the state,
            and `purestep.testing.replay` makes the call again from what is written beside the snapshots. With
            ``nonfinite="skip"``: 100 updates in a row that were refused.
        StepContractError: the step is not pure (see `FitConfig.check_every`), or returns no state and metrics; a
            callback draws from a global generator while another thread trains.
        SnapshotError: a snapshot that does not fit, is damaged or cannot be written; `Locked`: another run's directory.
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
    resolved = inputs.settings(config, fields)
    ready = inputs.checked_program(program)
    given = inputs.checked_state(init_state)
    inputs.check_fits(given, ready)
    state = inputs.placed(given, resolved.device, ready)
    with ExitStack() as stack:
        stack.enter_context(environment.surroundings(resolved, data.device_of(state)))
        feeds = inputs.open_feeds(loaders, resolved, ready, inputs.seed_of(state))
        stack.callback(feeds.close)
        store, owned = checkpointing.open_snapshots(snapshots, resolved, feeds.train)
        if store is not None and owned:
            stack.callback(store.close)
        audience = Audience(inputs.called("callbacks", callbacks), inputs.ready_sinks(sinks, store, resolved))
        signals = stack.enter_context(Signals())
        run = Run(state, ready, feeds, resolved, store, audience, signals, is_callers=state is given)
        del state  # what was moved is nobody else's: its memory is free once it has been stepped
        return run.to_the_end()
