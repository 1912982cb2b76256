"""Best value, early stopping, and learning rate reduction on a plateau: pure functions of host numbers.

A rule is a frozen dataclass. Its state is a record, a NamedTuple of plain numbers that JSON can hold. `observe` returns
the next record from the last one and a new value. A value that is infinite, nan or None (the history stores None for
both) is never the best value and counts as no improvement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from .errors import ConfigError
from .state import check_choice, check_count, check_range, whole

Mode: TypeAlias = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Stop after ``patience`` epochs in a row without improvement.

    Args:
        patience: number of epochs (or evaluations, if they are not once per epoch), at least 1. The run stops after
            this many in a row without improvement.
        min_delta: the amount by which a value must beat the last value that reset the patience, at least 0, in the
            units of the monitored value. It does not affect the best value, which is any strict improvement.
        start_ratio: the share of the run (of its epochs or updates, whichever limit is nearer) before the first epoch
            counts, in [0, 1]. It is rounded down to whole epochs if the metric is not measured inside of epochs, or if
            the number of batches is unknown before an epoch ends. The number is known for lists and for loaders over a
            dataset with indices; ``len`` of another loader is only a hint.

    Raises:
        ConfigError: a number is out of its range.

    Example:
        >>> EarlyStopping(patience=20, start_ratio=0.5)
        EarlyStopping(patience=20, min_delta=0.0, start_ratio=0.5)
    """

    patience: int
    min_delta: float = 0.0
    start_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_count("EarlyStopping", least=1, patience=self.patience)
        check_range("EarlyStopping", 0, cure="min_delta=0.0", min_delta=self.min_delta)
        check_range("EarlyStopping", 0, 1, ends="[]", start_ratio=self.start_ratio)


class Record(NamedTuple):
    """The state of best value tracking and early stopping. Every value is finite or None."""

    best: float | None  # the best value so far
    best_epoch: int | None  # its epoch, from 1
    reference: float | None  # the last value that beat the previous reference by more than min_delta
    bad_epochs: int  # epochs in a row without such a value, from start_epoch on
    start_epoch: int  # the first epoch that may count as bad, from 1; in the unit of `observe`'s total_epochs


def init() -> Record:
    """Return the record before the first value.

    Example:
        >>> init().best is None
        True
    """
    return Record(best=None, best_epoch=None, reference=None, bad_epochs=0, start_epoch=1)


def observe(
    record: Record,
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
        record: from `init` or the last `observe`.
        value: the monitored metric; None for a value that is not finite.
        epoch: epochs (or evaluations) completed, from 1.
        mode: "min" if small values are good, "max" if large values are.
        rule: early stopping, or None to track only the best value.
        total_epochs: planned epochs; needed only with ``start_ratio``. It may change at a resume, because every call
            computes the start from it.
        passed: the progress in the unit of ``total_epochs``, if ``epoch`` counts evaluations. The unit may be batches
            or updates, so that the start may be inside of an epoch. None: ``epoch``.

    Raises:
        ConfigError: ``start_ratio`` is set and the number of epochs is unknown.

    Example:
        >>> record = observe(init(), 0.5, epoch=1, mode="min")
        >>> record = observe(record, 0.7, epoch=2, mode="min")
        >>> record.best, record.best_epoch, improved(record, epoch=2)
        (0.5, 1, False)
    """
    value = None if value is None else float(value)
    best = is_better(value, record.best, mode=mode)
    start = start_epoch(rule, total_epochs)
    is_improvement = is_better(value, record.reference, mode=mode, min_delta=rule.min_delta if rule else 0.0)
    is_before_start = (epoch if passed is None else passed) < start
    bad_epochs = 0 if is_improvement or is_before_start else record.bad_epochs + 1
    return Record(
        best=value if best else record.best,
        best_epoch=epoch if best else record.best_epoch,
        reference=value if is_improvement else record.reference,
        bad_epochs=bad_epochs,
        start_epoch=start,
    )


def is_better(value: float | None, best: float | None, *, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return True if ``value`` is strictly better than ``best`` by more than ``min_delta``.

    Example:
        >>> is_better(0.5, 0.5, mode="min"), is_better(float("nan"), None, mode="min")
        (False, False)
    """
    if value is None or not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


def improved(record: Record, *, epoch: int) -> bool:
    """Return True if the value of this epoch is the best value.

    Example:
        >>> improved(observe(init(), 0.5, epoch=1, mode="min"), epoch=1)
        True
    """
    return record.best_epoch == epoch


def should_stop(record: Record, rule: EarlyStopping | None) -> bool:
    """Return True if the patience is used up; False without a rule.

    Example:
        >>> should_stop(init()._replace(bad_epochs=3), EarlyStopping(patience=3))
        True
    """
    return rule is not None and record.bad_epochs >= rule.patience


def start_epoch(rule: EarlyStopping | None, total_epochs: int | None) -> int:
    """Return the first epoch, from 1, that may count as bad: ``total_epochs * start_ratio``, rounded down.

    Raises:
        ConfigError: ``start_ratio`` is set and the number of epochs is unknown.

    Example:
        >>> start_epoch(EarlyStopping(patience=2, start_ratio=0.5), 100)
        50
    """
    if rule is None or rule.start_ratio == 0.0:
        return 1
    if total_epochs is None:
        raise ConfigError(
            f"start_ratio={rule.start_ratio} is a share of the run, but neither epochs nor steps is set",
            where="EarlyStopping",
            hint="fit(..., epochs=100), or start_ratio=0.0",
        )
    return max(1, whole(total_epochs * rule.start_ratio))


def default_mode(monitor: str) -> Mode:
    """Return ``"min"`` for a loss, error or perplexity, also of one member of an ensemble: ``"val_loss[3]"``.

    Raises:
        ConfigError: the metric has another name, which does not show whether small or large values are good.

    Example:
        >>> default_mode("val_loss")
        'min'
    """
    if re.sub(r"(\[\w+\])+$", "", monitor.lower()).endswith(("loss", "error", "perplexity")):
        return "min"
    raise ConfigError(
        f"monitor={monitor!r} does not say whether small or large values are good",
        where="fit",
        hint=f'monitor={monitor!r}, mode="max"',
    )


def to_json(record: Record) -> dict[str, float | int | None]:
    """Convert a record to a dict for JSON. Its numbers are finite or None.

    Example:
        >>> from_json(to_json(init())) == init()
        True
    """
    return record._asdict()


def from_json(found: Mapping[str, Any]) -> Record:
    """Restore the record of `to_json`.

    Example:
        >>> from_json(to_json(init())) == init()
        True
    """
    return Record(**{name: found[name] for name in Record._fields})


@dataclass(frozen=True, slots=True)
class Plateau:
    """Reduce the learning rate when the monitored value stops improving (torch's ``ReduceLROnPlateau``).

    A schedule depends on the count of updates only, so this rule belongs in a callback: `reduce_on_plateau` is one for
    `fit`. A loop of your own keeps a `PlateauRecord`, and writes ``scale * learning_rate`` into the state
    (``optim.inject`` and ``optim.set_hyperparams``).

    Args:
        factor: each reduction multiplies the scale by it, in (0, 1).
        patience: epochs without improvement before a reduction, at least 0; the next such epoch reduces the scale.
        threshold: the least improvement that counts, at least 0.
        threshold_mode: ``"rel"``: better than ``best * (1 -/+ threshold)``; ``"abs"``: than ``best -/+ threshold``.
        cooldown: epochs after a reduction that do not count, at least 0.
        min_scale: lower bound of the scale, in [0, 1].

    Raises:
        ConfigError: a number is out of its range.

    Example:
        >>> rule, record = Plateau(factor=0.5, patience=0), plateau_init()
        >>> for value in (1.0, 1.0):
        ...     record = plateau_observe(record, value, rule=rule, mode="min")
        >>> record.scale
        0.5
    """

    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_scale: float = 0.0

    def __post_init__(self) -> None:
        check_range("Plateau", 0, 1, ends="()", factor=self.factor)
        check_count("Plateau", least=0, patience=self.patience)
        check_range("Plateau", 0, cure="threshold=0.0", threshold=self.threshold)
        check_choice("Plateau", ("rel", "abs"), threshold_mode=self.threshold_mode)
        check_count("Plateau", least=0, cooldown=self.cooldown)
        check_range("Plateau", 0, 1, ends="[]", min_scale=self.min_scale)


class PlateauRecord(NamedTuple):
    """The state of `Plateau`. Every value is finite or None."""

    best: float | None
    bad_epochs: int
    cooldown: int  # remaining epochs that do not count
    scale: float  # factor for the learning rate, in [0, 1]


def plateau_init() -> PlateauRecord:
    """Return the record before the first value, with scale 1.

    Example:
        >>> plateau_init().scale
        1.0
    """
    return PlateauRecord(best=None, bad_epochs=0, cooldown=0, scale=1.0)


def plateau_observe(record: PlateauRecord, value: float | None, *, rule: Plateau, mode: Mode) -> PlateauRecord:
    """Return the record after one more value.

    Args:
        record: from `plateau_init` or the last `plateau_observe`. A resumed run can recompute it from the values in the
            history of `FitStart`.
        value: the monitored metric; None for a value that is not finite.
        rule: the plateau rule.
        mode: "min" if small values are good, "max" if large values are.

    Example:
        >>> record = plateau_init()
        >>> for value in (1.0, 2.0, 2.0):
        ...     record = plateau_observe(record, value, rule=Plateau(factor=0.1, patience=1), mode="min")
        >>> record.scale
        0.1
    """
    value = None if value is None else float(value)
    better = is_better(value, _limit(record.best, rule, mode), mode=mode)
    bad_epochs = 0 if better or record.cooldown > 0 else record.bad_epochs + 1
    reduce = bad_epochs > rule.patience
    return PlateauRecord(
        best=value if better else record.best,
        bad_epochs=0 if reduce else bad_epochs,
        cooldown=rule.cooldown if reduce else max(0, record.cooldown - 1),
        scale=max(record.scale * rule.factor, rule.min_scale) if reduce else record.scale,
    )


def _limit(best: float | None, rule: Plateau, mode: Mode) -> float | None:
    """Return the value that an improvement must beat, with torch's arithmetic."""
    if best is None:
        return None
    threshold = rule.threshold if mode == "max" else -rule.threshold
    return best * (1.0 + threshold) if rule.threshold_mode == "rel" else best + threshold
