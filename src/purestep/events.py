"""The events of `fit`, in their order:

``FitStart`` -> per update ``StepEnd``, every ``log_every`` updates ``Logged`` -> per evaluation batch ``EvalStepEnd``,
per evaluation ``EvalEnd`` -> ``EpochEnd`` -> ``Saved`` -> ... -> ``FitEnd``.

A callback is ``f(event)``. It may return None, a new state (from events that carry one), or `Stop`. Answers to
``EvalStepEnd`` and ``FitEnd`` are ignored. Callbacks run in the order of the list. A sink is a callable of events too,
and runs in its own thread. It gets all events but ``StepEnd`` and ``EvalStepEnd``, without state and batch. Its return
value is ignored; its first error is logged and does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from .types import Metrics, Tree


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the run, as the answer of a callback. From ``FitStart`` nothing is trained; from ``StepEnd`` this update is
    the last one (of several processes, one of the next three); from a later event this boundary is the last one.

    Example:
        >>> def at_90_percent(event):
        ...     if isinstance(event, EvalEnd) and event.values["val_accuracy"] >= 0.9:
        ...         return Stop("accurate enough")
    """

    reason: str = "callback"


class Position(NamedTuple):
    """The present position of a run.

    Args:
        loader: "train", or the evaluation in progress.
        epoch: completed epochs.
        batch: completed batches of that loader, in this epoch or evaluation.
        updates: optimizer updates so far, including those whose metrics have not arrived.
    """

    loader: str
    epoch: int
    batch: int
    updates: int = 0


def _at_the_start() -> Position:
    return Position("train", 0, 0)


@dataclass(frozen=True, slots=True)
class FitStart:
    """Sent once, after restoring.

    Args:
        state: the state that training starts with.
        epoch: completed epochs.
        updates: optimizer updates done.
        epochs: the limit of this run in epochs; None without one.
        steps: the limit of this run in updates; None without one.
        batches: calls of the step in an epoch, by ``len(loader)``; None without a length.
        directory: of the snapshots; None without them.
        resumed: the run continues from a snapshot.
        history: the history of the run so far.
        position: returns the present `Position`, at any time of the run and from any thread.
        view: "ema" or "params": the weights that are evaluated, of a state with an average.
        compiled: the train step is compiled at its first calls.
    """

    state: Tree
    epoch: int
    updates: int
    epochs: int | None
    steps: int | None
    batches: int | None
    directory: Path | None
    resumed: bool
    history: Mapping[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    position: Callable[[], Position] = _at_the_start
    view: str | None = None
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Sent after every call of train_step or flush that closed an accumulation window.

    Args:
        state: the state after the update. A donated step overwrites it: keep ``ps.clone(event.state)``.
        metrics: of this call, on the device; ``float(...)`` waits for it.
        batch: the batch of this call, on the device.
        epoch: completed epochs: 0 in the first one.
        batch_index: the number of the batch in its epoch, from 0.
        updates: optimizer updates, including those whose metrics have not arrived, which the step may have refused.
        outputs: `Loss.outputs` of this call, on the device; the run does not keep them.
    """

    state: Tree
    metrics: Metrics
    batch: Any
    epoch: int
    batch_index: int
    updates: int
    outputs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Logged:
    """Sent every ``log_every`` updates, some calls late, so that no step waits for its metrics.

    Args:
        epoch: completed epochs.
        updates: the update at which the values end.
        values: means since the last event of this kind: ``train_loss``, ``lr``, ``grad_norm``, ... A resumed run has
            the values of the whole run.
        steps_per_second: updates in a second.
        wait_fraction: share of the time spent waiting for data, in [0, 1].
    """

    epoch: int
    updates: int
    values: Mapping[str, float]
    steps_per_second: float
    wait_fraction: float


@dataclass(frozen=True, slots=True)
class EvalStepEnd:
    """Sent after every batch of an evaluation.

    Args:
        state: the state that is evaluated.
        loader: the name of the loader.
        metrics: of this batch, on the device.
        batch: the batch, on the device.
        index: its number, from 0.
    """

    state: Tree
    loader: str
    metrics: Metrics
    batch: Any
    index: int


@dataclass(frozen=True, slots=True)
class EvalEnd:
    """Sent after an evaluation.

    Args:
        loader: the name of the loader.
        epoch: completed epochs.
        updates: optimizer updates done.
        values: the metrics, each with the name of the loader before its own (``val_loss``).
    """

    loader: str
    epoch: int
    updates: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """Sent at the end of an epoch or interval: after evaluation and early stopping, before the snapshot.

    Args:
        state: the state after the epoch.
        epoch: completed epochs, so 1 after the first.
        updates: optimizer updates done.
        record: the row of the history: epoch (from 1), train_loss, val_loss, lr, ... None: not evaluated here.
        improved: the row is the best one so far, by ``monitor``.
        stopping: the reason, if the run ends here. Not "max_time", which is checked later.
        steps_per_second: updates in a second since the last row, without the time of evaluations; 0.0 without updates.
    """

    state: Tree
    epoch: int
    updates: int
    record: Mapping[str, float | int | None]
    improved: bool
    stopping: str | None
    steps_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """Sent after a snapshot was handed to the writer.

    Args:
        step: the name of the snapshot: calls of the step in this run.
        path: its directory.
    """

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class FitEnd:
    """Sent once, at the end of the run.

    Args:
        state: the last state.
        reason: as `FitResult.stop_reason`.
        history: of the whole run.
        best: as `FitResult.best`.
        error: the exception that ended the run, or None.
    """

    state: Tree
    reason: str
    history: Mapping[str, list[Any]]
    best: Mapping[str, Any] | None
    error: BaseException | None = None


Event: TypeAlias = FitStart | StepEnd | Logged | EvalStepEnd | EvalEnd | EpochEnd | Saved | FitEnd
"""Any event."""
Callback: TypeAlias = Callable[[Any], Any]
"""A callback: ``f(event)`` returns None, a new state, or `Stop`."""
