"""The events of `fit`, in their order:

``FitStart`` -> per update ``StepEnd``, every ``histograms`` updates ``Histograms``, every ``log_every`` updates
``Logged`` -> per evaluation batch ``EvalStepEnd``, per evaluation ``EvalEnd`` -> ``EpochEnd`` -> ``Saved`` -> ... ->
``FitEnd``.

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
    the last one; from a later event this boundary is the last one.

    Example:
        >>> def at_90_percent(event):
        ...     if isinstance(event, EvalEnd) and event.values["val_accuracy"] >= 0.9:
        ...         return Stop("accurate enough")
    """

    reason: str = "callback"


class Position(NamedTuple):
    """The present position of a run."""

    loader: str  # "train", or the evaluation in progress
    epoch: int  # completed epochs
    batch: int  # completed batches of that loader, in this epoch or evaluation
    updates: int = 0  # optimizer updates so far, including those whose metrics have not arrived


def _at_the_start() -> Position:
    return Position("train", 0, 0)


@dataclass(frozen=True, slots=True)
class FitStart:
    """Once, after restoring. ``epoch`` and ``updates`` count what is already done. ``position()`` may be called at any
    time of the run, from any thread."""

    state: Tree
    epoch: int
    updates: int
    epochs: int | None  # the limits of this run, None without one
    steps: int | None
    batches: int | None  # micro-batches per epoch by len(loader), None without a length
    directory: Path | None  # of the snapshots
    resumed: bool
    history: Mapping[str, list[Any]] = field(default_factory=dict[str, list[Any]])  # of the run so far
    position: Callable[[], Position] = _at_the_start
    view: str | None = None  # "ema" or "params": what is evaluated, of a state with an average


@dataclass(frozen=True, slots=True)
class StepEnd:
    """After every call of train_step or flush that closed an accumulation window. ``metrics`` are on the device, as are
    ``outputs``: `Loss.outputs` of ``batch``, which the run does not keep."""

    state: Tree
    metrics: Metrics
    batch: Any
    epoch: int  # 0-based: completed epochs
    batch_index: int  # 0-based within the epoch
    updates: int  # including those whose metrics have not arrived, which the step may have refused
    outputs: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Histogram(NamedTuple):
    """The finite numbers of a tensor, by size."""

    counts: Any  # numpy, shape=(64,), float64
    edges: Any  # numpy, shape=(65,), float64: rising
    total: float  # the sum of the numbers
    squares: float  # the sum of their squares


@dataclass(frozen=True, slots=True)
class Histograms:
    """Every ``histograms`` updates: ``weights/<name>`` after the update, ``updates/<name>``, by which it changed them,
    and ``gradients/<name>`` of its batch, before the transform."""

    updates: int
    values: Mapping[str, Histogram]


@dataclass(frozen=True, slots=True)
class Logged:
    """Every ``log_every`` updates: means since the last one, read back late so that no step waits. An interrupted run
    that goes on has the same values as the whole one."""

    epoch: int
    updates: int
    values: Mapping[str, float]  # train_loss, lr, grad_norm, ...
    steps_per_second: float
    wait_fraction: float  # share of the time spent waiting for data, in [0, 1]


@dataclass(frozen=True, slots=True)
class EvalStepEnd:
    """After every batch of an evaluation."""

    state: Tree
    loader: str
    metrics: Metrics
    batch: Any
    index: int


@dataclass(frozen=True, slots=True)
class EvalEnd:
    """After an evaluation: its metrics, with the loader's name before theirs (``val_loss``)."""

    loader: str
    epoch: int
    updates: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """After training, flush, evaluation, history, best and early stopping of an epoch (or interval), before its
    snapshot. ``record`` is the row of the history: epoch (1-based), train_loss, val_loss, lr, ..."""

    state: Tree
    epoch: int  # completed epochs, so 1 after the first
    updates: int
    record: Mapping[str, float | int | None]
    improved: bool
    stopping: str | None  # the reason, if the run ends here; not max_time, which is checked later
    steps_per_second: float = 0.0  # updates since the last row, without the time of evaluations; 0.0 if there are none


@dataclass(frozen=True, slots=True)
class Saved:
    """After a snapshot was handed to the writer."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class FitEnd:
    """Once, whatever ended the run. ``error`` is the exception, if one did."""

    state: Tree
    reason: str
    history: Mapping[str, list[Any]]
    best: Mapping[str, Any] | None
    error: BaseException | None = None


Event: TypeAlias = FitStart | StepEnd | Histograms | Logged | EvalStepEnd | EvalEnd | EpochEnd | Saved | FitEnd
Callback: TypeAlias = Callable[[Any], Any]
