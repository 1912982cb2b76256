"""Best value and early stopping: pure functions of host numbers.

The rule is a frozen dataclass. Its state is a record, a NamedTuple of plain numbers that JSON can hold; ``after``
returns the next record from a new value. A value that is infinite, nan or None (the history stores None for
both) is never the best value and counts as no improvement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from .errors import ConfigError
from .state import base_name, check_count, check_range, whole

Mode: TypeAlias = Literal["min", "max"]
"""Which values are better: lower or higher ones."""


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Stop after ``patience`` epochs in a row without improvement.

    Example:
        >>> EarlyStopping(patience=20, start_ratio=0.5)
        EarlyStopping(patience=20, min_delta=0.0, start_ratio=0.5)

    Args:
        patience: number of epochs (or evaluations, if they are not once per epoch), at least 1. The run stops after
            this many in a row without improvement.
        min_delta: the amount by which a value must beat the last value that reset the patience, at least 0, in the
            units of the monitored value. It does not affect the best value, which is any strict improvement.
        start_ratio: the share of the run (of its whole epochs or updates, whichever limit is nearer) before the first
            epoch counts, in [0, 1]; rounded down.

    Raises:
        ConfigError: a number is out of its range.
    """

    patience: int
    min_delta: float = 0.0
    start_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_count("EarlyStopping", least=1, patience=self.patience)
        check_range("EarlyStopping", 0, cure="min_delta=0.0", min_delta=self.min_delta)
        check_range("EarlyStopping", 0, 1, ends="[]", start_ratio=self.start_ratio)

    def start(self, total: int | None) -> int:
        """The first epoch, from 1, that may count as bad: ``total * start_ratio``, rounded down.

        Example:
            >>> EarlyStopping(patience=2, start_ratio=0.5).start(100)
            50

        Raises:
            ConfigError: ``start_ratio`` is set, and the number of epochs is unknown.
        """
        if self.start_ratio == 0.0:
            return 1
        if total is None:
            raise ConfigError(
                f"start_ratio={self.start_ratio} is a share of the run, but neither epochs nor steps is set",
                where="EarlyStopping",
                hint="fit(..., epochs=100), or start_ratio=0.0",
            )
        return max(1, whole(total * self.start_ratio))


class Record(NamedTuple):
    """The state of best value tracking and early stopping. Every value is finite or None.

    Example:
        >>> record = Record().after(0.5, epoch=1, mode="min").after(0.7, epoch=2, mode="min")
        >>> record.best, record.best_epoch
        (0.5, 1)
    """

    best: float | None = None  # the best value so far
    best_epoch: int | None = None  # its epoch, from 1
    reference: float | None = None  # the last value that beat the previous reference by more than min_delta
    bad_epochs: int = 0  # epochs in a row without such a value, from start_epoch on
    start_epoch: int = 1  # the first epoch that may count as bad, from 1; in the unit of `total_epochs`

    def after(
        self,
        value: float | None,
        *,
        epoch: int,
        mode: Mode,
        rule: EarlyStopping | None = None,
        total_epochs: int | None = None,
        passed: int | None = None,
    ) -> Record:
        """Return the record after one more value.

        Args:
            value: the monitored metric; None for a value that is not finite.
            epoch: epochs (or evaluations) completed, from 1.
            mode: "min" if small values are good, "max" if large values are.
            rule: early stopping, or None to track only the best value.
            total_epochs: planned epochs; needed only with ``start_ratio``. It may change at a resume, because every
                call computes the start from it.
            passed: the progress in the unit of ``total_epochs``, which may be updates, if ``epoch`` counts evaluations.
                None: ``epoch``.

        Raises:
            ConfigError: ``start_ratio`` is set and the number of epochs is unknown.
        """
        value = None if value is None else float(value)
        is_best = _is_better(value, self.best, mode=mode)
        start = rule.start(total_epochs) if rule else 1
        is_improvement = _is_better(value, self.reference, mode=mode, min_delta=rule.min_delta if rule else 0.0)
        is_before_start = (epoch if passed is None else passed) < start
        return Record(
            best=value if is_best else self.best,
            best_epoch=epoch if is_best else self.best_epoch,
            reference=value if is_improvement else self.reference,
            bad_epochs=0 if is_improvement or is_before_start else self.bad_epochs + 1,
            start_epoch=start,
        )


def _is_better(value: float | None, best: float | None, *, mode: Mode, min_delta: float = 0.0) -> bool:
    """True if ``value`` is strictly better than ``best`` by more than ``min_delta``."""
    if value is None or not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


def default_mode(monitor: str) -> Mode:
    """Return ``"min"`` for a loss, error or perplexity, also of one member of an ensemble: ``"val_loss[3]"``.

    Example:
        >>> default_mode("val_loss")
        'min'

    Raises:
        ConfigError: the metric has another name, which does not show whether small or large values are good.
    """
    if base_name(monitor.lower()).endswith(("loss", "error", "perplexity")):
        return "min"
    raise ConfigError(
        f"monitor={monitor!r} does not say whether small or large values are good",
        where="fit",
        hint=f'monitor={monitor!r}, mode="max"',
    )
