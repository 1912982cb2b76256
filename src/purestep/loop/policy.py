"""What a row of the history decides: whether it is the best, and whether the run stops early.

When an evaluation is due: by updates over the whole run, or by a fraction of an epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .. import stopping
from ..errors import ConfigError
from .loop_state import Cell, Record

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig
from .. import data
from ..validation import whole

_log = logging.getLogger("purestep")


class Judge(NamedTuple):
    """The monitored metric and the rules about it."""

    monitor: str | None
    mode: stopping.Mode
    config: FitConfig
    batches: Callable[[int], int | None] | None = None  # of an epoch, where the metric is measured inside of it

    def begun(self, record: Record) -> Record:
        """The record to go on with: the best of another metric says nothing of this one."""
        if self.monitor is None:
            return record
        judged = f"{self.monitor} {self.mode}"
        if record.judged not in ("", judged):
            text = "the run was judged by %s, and goes on with %s: its best so far, and its patience, begin anew"
            _log.warning(text, record.judged, judged)
            record = record._replace(best=stopping.init(), evaluations=0, best_step=None)
        return record._replace(judged=judged)

    def judge(self, record: Record, row: Mapping[str, Cell]) -> Record:
        """The record after this row: best value, patience."""
        if self.monitor is None or self.monitor not in row or self._is_known(record):
            return record
        value = row[self.monitor]
        count = record.evaluations + 1
        passed, planned = self._progress(record) or (count, None)
        best = stopping.observe(
            record.best,
            math.nan if value is None else float(value),
            epoch=count,
            mode=self.mode,
            rule=self.config.early_stopping,
            total_epochs=planned,
            passed=passed,
        )
        step = record.calls if stopping.improved(best, epoch=count) else record.best_step
        return record._replace(best=best, evaluations=count, best_step=step)

    def _is_known(self, record: Record) -> bool:
        """Whether the last row is of the very state of the one before: an epoch may end where it was just evaluated."""
        same = all(len(set(record.history.last(name, 2))) == 1 for name in ("epoch", "step"))
        column = record.history.last(self.monitor or "", 2)
        return same and len(column) > 1 and column[-2] is not None

    def _progress(self, record: Record) -> tuple[int, int] | None:
        """How much of how much has passed, by the limit that is nearer to where counting starts; None where counting
        has no start."""
        rule = self.config.early_stopping
        if rule is None or not rule.start_ratio:
            return None
        epochs, steps = self.config.epochs, self.config.steps
        found: list[tuple[int, int]] = []
        if epochs not in (None, -1):
            parts = (self.batches and self.batches(record.epoch)) or 1  # of an epoch that can be told apart
            found.append((record.epoch * parts + min(record.batch, parts - 1), epochs * parts))
        if steps not in (None, -1):
            found.append((record.updates, steps))
        return max(found, key=lambda place: place[0] / stopping.start_epoch(rule, place[1]))

    def improved(self, before: Record, after: Record) -> bool:
        """Whether the last row is the best so far."""
        return after.evaluations > before.evaluations and stopping.improved(after.best, epoch=after.evaluations)

    def stops(self, record: Record) -> bool:
        """Whether the patience is used up."""
        return stopping.should_stop(record.best, self.config.early_stopping) and not below_minimum(self.config, record)

    def check(self, record: Record, loaders: Iterable[str]) -> Judge:
        """The judge once every loader has been evaluated: a guessed monitor that does not exist is dropped.

        Raises:
            ConfigError: a monitor that was asked for does not exist; the message lists what there is.
        """
        known = set(record.history)
        seen = {_loader_of(name, loaders) for name in known}.issuperset(loaders)
        if self.monitor is None or self.monitor in known or not seen:
            return self
        if self.config.monitor is None:
            _need_monitor(self.config, known)
            return self._replace(monitor=None)
        raise ConfigError(
            f"monitor={self.monitor!r} is not among the metrics: {_metrics(known)}",
            where="fit",
            hint=f"monitor={_nearest(self.monitor, known)!r}",
        )

    def best(self, record: Record) -> dict[str, Cell] | None:
        """``{"epoch", <monitor>, "step"}``; None where nothing has been judged."""
        if self.monitor is None or record.best.best is None:
            return None
        column = record.history.get(self.monitor, [])
        index = next((i for i, value in enumerate(column) if value == record.best.best), None)
        epoch = None if index is None else record.history["epoch"][index]
        return {"epoch": epoch, self.monitor: record.best.best, "step": record.best_step}


def judge(config: FitConfig, loaders: Collection[str], count: Callable[[int], int | None]) -> Judge:
    """The judge of a run: what is monitored, and in which direction it is good.

    Args:
        config: of the run.
        loaders: the names of those that are evaluated.
        count: batches of an epoch (0-based), None where nobody knows them before its end.

    Raises:
        ConfigError: early stopping with nothing to look at.
    """
    monitor = config.monitor or ("val_loss" if "val" in loaders else None)
    if monitor is None:
        _need_monitor(config, {"train_loss"})
    mode = config.mode or stopping.default_mode(monitor or "loss")
    own = [name for name in loaders if monitor and name == _loader_of(monitor, loaders)]
    # What is measured in training has a value in every row, whichever loader it is for.
    is_inside = any(inside(config.interval(name)) for name in own or loaders)
    return Judge(monitor, mode, config, batches=count if is_inside else None)


def ended_before(judge: Judge, record: Record) -> str | None:
    """Why a run that goes on is at its end already, which is told: otherwise it looks as if it had trained."""
    ending = "early_stopping" if judge.stops(record) else limit_reached(judge.config, record)
    if ending == "steps" and record.batch and record.is_ahead:
        return None  # its last row is still to be made
    if ending is not None:
        told = "nothing is trained: the run had ended already, by %s, after %d epochs and %d updates"
        _log.warning(told, ending, record.epoch, record.updates)
    return ending


def _loader_of(name: str, loaders: Iterable[str]) -> str | None:
    """Whose metric this is: of "val" and "val_hard", `val_hard_loss` is the latter's."""
    return max((loader for loader in loaders if name.startswith(f"{loader}_")), key=len, default=None)


def _need_monitor(config: FitConfig, known: Iterable[str]) -> None:
    if config.early_stopping is not None:
        raise ConfigError(
            "early_stopping without a metric to look at: monitor is not set, and there is no val_loss",
            where="fit",
            hint=f"monitor={_likely(known)!r}",
        )


def _metrics(known: Iterable[str]) -> list[str]:
    return sorted(set(known) - {"epoch", "step"})


def _nearest(monitor: str, known: Iterable[str]) -> str:
    """Of the same name in an evaluation first: by "loss" is meant "val_loss" rather than "lr"."""
    from ..config import fields  # late: see above

    names = _metrics(known)
    same = [name for name in names if name.endswith(f"_{monitor}") and not name.startswith("train_")]
    loader = [name for name in names if name.startswith(f"{monitor.partition('_')[0]}_")]
    return next(iter(same), fields.nearest(monitor, loader or names)) or _likely(loader or known)


def _likely(known: Iterable[str]) -> str:
    return next((name for name in sorted(known) if name.endswith("loss")), "val_loss")


def below_minimum(config: FitConfig, record: Record, *, ahead: int = 0) -> bool:
    """Whether min_epochs or min_steps forbid to stop; ``ahead`` updates may have been made since the record."""
    return record.epoch < (config.min_epochs or 0) or record.updates + ahead < (config.min_steps or 0)


def limit_reached(config: FitConfig, record: Record) -> str | None:
    """The limit, of epochs or updates, that the run has reached."""
    if config.fast_dev_run:
        return "fast_dev_run" if record.epoch else None
    if config.epochs not in (None, -1) and record.epoch >= config.epochs:
        return "epochs"
    if config.steps not in (None, -1) and record.updates >= config.steps:
        return "steps"
    return None


_log = logging.getLogger("purestep")


class Plan:
    """When the loaders of a run are evaluated.

    Args:
        intervals: by the name of the loader: an int is updates, a float is epochs.
        feed: what is trained on.
        window: batches of an accumulation window, inside which nothing is evaluated.

    Raises:
        ConfigError: a fraction of a loader without length.
    """

    def __init__(self, intervals: Mapping[str, int | float], feed: data.Feed, window: int) -> None:
        self._intervals = intervals
        self._feed = feed
        self._window = window
        self._seen = 0  # batches of the epoch up to which the marks of fractions have been looked at
        self._whole = 1  # batches that the marks of this epoch are fractions of
        self._fraction = next((every for every in intervals.values() if isinstance(every, float) and every < 1), None)
        if self._fraction is not None and not feed.length:
            told = f"evaluate_every={self._fraction} of a loader without length"
            raise ConfigError(told, where="fit", hint="a number of updates: 1000")
        self.inside = any(map(inside, intervals.values()))
        """Whether any of them may be due inside an epoch."""

    def begin(self, record: Record, left: int) -> None:
        """An epoch begins here, or goes on: with so many batches left of the window."""
        held = self._window - left
        if not held and record.is_ahead:
            held = self._window  # no row has been written here, so that an evaluation may have been broken off
        self._seen = max(0, record.batch - held)
        if self._fraction is not None:
            # A length may be wrong, and then the last epoch knows better.
            self._whole = self._feed.count(record.epoch) or record.counted or self._feed.length or 1

    def counted(self, record: Record) -> int:
        """The batches of the epoch that ends here, where fractions of the next ones hang on them: see `Record`."""
        if self._fraction is None or record.batch == self._whole or self._feed.count(record.epoch) is not None:
            return record.counted
        _log.warning(
            "evaluate_every=%g of epoch %d was taken of %d batches, and there were %d: len(loader) is wrong (cure: a "
            "number of updates)",
            *(self._fraction, record.epoch + 1, self._whole, record.batch),
        )
        return record.batch

    def crossed(self, record: Record, ahead: int) -> bool:
        """Whether an interval of updates has been passed, if the ``ahead`` updates were all applied."""
        return any(isinstance(every, int) and _crossed(every, record, ahead) for every in self._intervals.values())

    def due_inside(self, record: Record) -> list[str]:
        """The loaders to evaluate after the batch just done, where no window is open.

        What an open window had to wait for is due when it closes. Whether the epoch ends here, only the loader says.
        """
        since, self._seen = self._seen, record.batch
        return [name for name, every in self._intervals.items() if self._is_due(every, record, since)]

    def _is_due(self, every: int | float, record: Record, since: int) -> bool:
        if isinstance(every, int):
            return _crossed(every, record)
        return every < 1 and _passed(every, since, record.batch, self._whole)

    def due_at_end(self, record: Record) -> list[str]:
        """The loaders to evaluate at the end of an epoch (``record.epoch`` counts it already)."""
        return [name for name, every in self._intervals.items() if _is_due_at_end(every, record)]


def inside(every: int | float) -> bool:
    """Whether an evaluation may be due inside an epoch."""
    return isinstance(every, int) or every < 1


def _is_due_at_end(every: int | float, record: Record) -> bool:
    if isinstance(every, int):
        return _crossed(every, record)
    return every < 1 or record.epoch % int(every) == 0


def _crossed(every: int, record: Record, ahead: int = 0) -> bool:
    """Whether a multiple of ``every`` updates lies behind the last row of the history.

    Args:
        every: updates.
        record: whose updates have arrived on the host.
        ahead: updates that may have been made since.
    """
    return (record.updates + ahead) // every > record.told // every


def _passed(every: float, since: int, batch: int, count: int) -> bool:
    """Whether a mark of this fraction lies behind the batches ``since`` and up to ``batch``."""
    # A third of 7 batches ends behind batches 3, 5 and 7: the first batch at or past each mark. The last is the end's.
    part, inner = every * count, math.ceil(1 / every - 1e-9) - 1
    return min(whole(batch / part), inner) > min(whole(since / part), inner)
