"""Decisions at a row: which is the best, when to stop; when to evaluate. Those about snapshots are in `snapshot`."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .. import data, stopping
from ..errors import ConfigError
from ..files import of_run
from ..snapshot import Snapshots
from ..state import nearest, whole
from ..types import Program
from .loop_state import Cell, LoopState

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

_log = logging.getLogger("purestep")


# --- best and early stop ----------------------------------------------------------------------------------------------


def monitor(config: FitConfig, loaders: Collection[str]) -> Monitor:
    """Return the monitor of a run with these evaluation loaders.

    Raises:
        ConfigError: early stopping without a metric.
    """
    metric = config.monitor or ("val_loss" if "val" in loaders else None)
    if metric is None:
        _need_metric(config)
    return Monitor(metric, config.mode or stopping.default_mode(metric or "loss"), config)


class Monitor(NamedTuple):
    """The monitored metric and the rules about it."""

    metric: str | None
    mode: stopping.Mode
    config: FitConfig

    def resumed(self, loop: LoopState) -> LoopState:
        """Return the state to go on with, without the best of another metric."""
        if self.metric is None:
            return loop
        judged = f"{self.metric} {self.mode}"
        if loop.judged not in ("", judged):
            text = "the run was judged by %s, and goes on with %s: its best and its patience start again"
            _log.warning(text, loop.judged, judged)
            loop = loop._replace(best=stopping.Record(), evaluations=0, best_step=None)
        return loop._replace(judged=judged)

    def observed(self, loop: LoopState, row: Mapping[str, Cell]) -> LoopState:
        """Return the state after this row, which is the last one of its history: best value, patience."""
        if self.metric is None or self.metric not in row or self._is_repeated(loop):
            return loop
        value = row[self.metric]
        count = loop.evaluations + 1
        passed, planned = self._passed(loop) or (count, None)
        best = loop.best.after(
            math.nan if value is None else float(value),
            epoch=count,
            mode=self.mode,
            rule=self.config.early_stopping,
            total_epochs=planned,
            passed=passed,
        )
        step = loop.calls if best.best_epoch == count else loop.best_step
        return loop._replace(best=best, evaluations=count, best_step=step)

    def _is_repeated(self, loop: LoopState) -> bool:
        """True if the last two rows are of one state: an epoch may end right after an evaluation inside it."""
        same = all(len(set(loop.history.get(name, [])[-2:])) == 1 for name in ("epoch", "step"))
        column = loop.history.get(self.metric or "", [])
        return same and len(column) > 1 and column[-2] is not None

    def _passed(self, loop: LoopState) -> tuple[int, int] | None:
        """Return (passed, total) of the limit that is nearer to `start_ratio`; None without a ratio or a limit."""
        rule = self.config.early_stopping
        if rule is None or not rule.start_ratio:
            return None
        limits = (loop.epoch, self.config.epochs), (loop.updates, self.config.steps)
        places = [(passed, limit) for passed, limit in limits if limit is not None and limit != -1]
        return max(places, key=lambda place: place[0] / rule.start(place[1]))

    def improved(self, before: LoopState, after: LoopState) -> bool:
        """True if the last row is the best so far."""
        return before.evaluations < after.evaluations == after.best.best_epoch

    def should_stop(self, loop: LoopState) -> bool:
        """True if the patience is used up."""
        rule = self.config.early_stopping
        return rule is not None and loop.best.bad_epochs >= rule.patience and not below_minimum(self.config, loop)

    def kept_by(self, snapshots: Snapshots | None) -> Snapshots | None:
        """Return the snapshots if they keep the one of the best row, else None."""
        keeps = snapshots is not None and snapshots.keeps_best(self.metric or "", mode=self.mode)
        return snapshots if keeps else None

    def check(self, loop: LoopState, loaders: Iterable[str]) -> None:
        """Check that the metric exists, once every loader has been evaluated. A guessed one need not exist.

        Raises:
            ConfigError: the config names a metric that does not exist; the message lists those that do.
        """
        known = set(loop.history)
        evaluated = {_loader_of(name, loaders) for name in known}.issuperset(loaders)
        if self.metric is None or self.metric in known or not evaluated:
            return
        if self.config.monitor is None:
            _need_metric(self.config)
            return
        metrics = sorted(known - {"epoch", "step"})
        raise ConfigError(
            f"monitor={self.metric!r} is not among the metrics: {metrics}",
            where="fit",
            hint=f"monitor={nearest(self.metric, metrics, likeness=0.0)!r}",
        )

    def best(self, loop: LoopState) -> dict[str, Cell] | None:
        """Return ``{"epoch", <metric>, "step"}``; None if there is no best row."""
        if self.metric is None or loop.best.best is None:
            return None
        column = loop.history.get(self.metric, [])
        index = next((i for i, value in enumerate(column) if value == loop.best.best), None)
        epoch = None if index is None else loop.history["epoch"][index]
        return {"epoch": epoch, self.metric: loop.best.best, "step": loop.best_step}


def _loader_of(name: str, loaders: Iterable[str]) -> str | None:
    """Return the loader of a metric. With "val" and "val_hard", `val_hard_loss` belongs to the latter."""
    return max((loader for loader in loaders if name.startswith(f"{loader}_")), key=len, default=None)


def _need_metric(config: FitConfig) -> None:
    if config.early_stopping is not None:
        raise ConfigError(
            "early_stopping without a metric: monitor is not set, and there is no val_loss",
            where="fit",
            hint="monitor='train_loss'",
        )


# --- limits -----------------------------------------------------------------------------------------------------------


def limit_reached(config: FitConfig, loop: LoopState) -> str | None:
    """Return the name of the limit, of epochs or updates, that the run has reached."""
    if config.fast_dev_run:
        return "fast_dev_run" if loop.epoch else None
    if config.epochs not in (None, -1) and loop.epoch >= config.epochs:
        return "epochs"
    if config.steps not in (None, -1) and loop.updates >= config.steps:
        return "steps"
    return None


def below_minimum(config: FitConfig, loop: LoopState) -> bool:
    """True if min_epochs or min_steps forbid to stop."""
    return loop.epoch < (config.min_epochs or 0) or loop.updates_at_most < (config.min_steps or 0)


def ended_before(monitor: Monitor, loop: LoopState, directory: Path | None) -> str | None:
    """Return why a resumed run has ended already, with a warning: otherwise it would look trained. ``directory`` is
    that of its snapshots."""
    reason = "early_stopping" if monitor.should_stop(loop) else limit_reached(monitor.config, loop)
    if reason == "steps" and loop.batch and loop.lacks_row:
        return None  # its last row is missing
    if reason is not None:
        text = "nothing is trained: the run%s had ended already, by %s, after %d epochs and %d updates"
        _log.warning(text, of_run(directory), reason, loop.epoch, loop.updates)
    return reason


def warn_of_no_update(loop: LoopState) -> None:
    """Warn at the end of the first epoch if it has updated nothing. ``loop`` is that of the epoch, with all metrics."""
    if loop.epoch == 0 and loop.batch and not loop.updates and not loop.is_window_open:
        _log.warning(
            "epoch 1 has made no update: no target counted, no loss was finite, or tail='drop' dropped its window "
            "(cure: labels other than -100; a weight above 0 in ps.Loss; a smaller learning rate; accumulate= of at "
            "most the batches of an epoch)"
        )


_TOO_MUCH = 0.05  # share of the first weights in the average, above which it is no average of the end of the run


def warn_of_short_average(program: Program, config: FitConfig, feed: data.Feed) -> None:
    """Warn of a run whose average would still hold much of its first weights at the end."""
    static = program.static
    if static is None or static.first_share is None or config.fast_dev_run:
        return
    limits = [] if config.steps in (None, -1) else [config.steps]
    batches = feed.length
    if config.epochs not in (None, -1) and batches:
        limits.append(config.epochs * batches // static.accumulate)
    updates = min(limits, default=0)
    share = static.first_share(updates) if updates else 0.0
    if share > _TOO_MUCH:
        _log.warning(
            "the average holds %.0f %% of the first weights after about %d updates, those of this run: too few for its "
            "decay (cure: warmup=True in ps.ema.average, or a smaller decay)",
            *(100 * share, updates),
        )


# --- when to evaluate -------------------------------------------------------------------------------------------------


class EvalSchedule:
    """When the evaluation loaders are due: every n updates, or every fraction or number of epochs.

    A fraction of an epoch is a number of batches, rounded up.

    Args:
        intervals: loader name -> int (updates) or float (epochs).
        feed: of the training batches.
        window: micro-batches of an accumulation window. Nothing is evaluated inside one.

    Raises:
        ConfigError: a fraction of a loader without length.
    """

    def __init__(self, intervals: Mapping[str, int | float], feed: data.Feed, window: int) -> None:
        self._intervals = intervals
        self._window = window
        self._batches: dict[str, int] = {}  # of the fractions
        for name, every in intervals.items():
            if isinstance(every, float) and every < 1:
                length = feed.length
                if not length:
                    text = f"evaluate_every={every} of a loader without length"
                    raise ConfigError(text, where="fit", hint="a number of updates: 1000")
                self._batches[name] = -whole(-every * length)
        self.has_inside = bool(self._batches) or any(isinstance(every, int) for every in intervals.values())
        """True if an evaluation may be due inside an epoch."""

    def depends_on_pending(self, loop: LoopState) -> bool:
        """True if an interval of updates has passed, provided that all pending ones are applied."""
        return any(isinstance(every, int) and _crossed(every, loop) for every in self._intervals.values())

    def inside(self, loop: LoopState) -> list[str]:
        """Return the loaders to evaluate after the last batch, with no window open.

        An evaluation that falls into an open window is due when the window closes. Only the loader says if the epoch
        ends here.
        """
        since = max(0, loop.batch - self._window)  # the last place in this epoch without an open window
        due = {name for name, part in self._batches.items() if loop.batch // part > since // part}
        due |= {name for name, every in self._intervals.items() if isinstance(every, int) and _crossed(every, loop)}
        return [name for name in self._intervals if name in due]

    def at_end(self, loop: LoopState) -> list[str]:
        """Return the loaders to evaluate at the end of an epoch, which ``loop.epoch`` counts already."""
        return [
            name
            for name, every in self._intervals.items()
            if (_crossed(every, loop) if isinstance(every, int) else every < 1 or loop.epoch % int(every) == 0)
        ]


def _crossed(every: int, loop: LoopState) -> bool:
    """True if a multiple of ``every`` updates has passed since the last row."""
    return loop.updates_at_most // every > loop.updates_at_row // every
