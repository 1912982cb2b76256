"""The best value so far, early stopping, and a learning rate lowered on a plateau: pure rules on host numbers.

A rule is a frozen config, what it remembers is a NamedTuple of plain numbers that goes through JSON unchanged, and
`observe` makes the next record from the last one and a new value. No tensors, no clock. A value that is infinite or
not a number, or None, as which the history holds it, is never the best one and counts as no improvement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from .errors import ConfigError
from .validation import check_count, is_number, whole

Mode: TypeAlias = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Stop after ``patience`` epochs in a row without improvement.

    Args:
        patience: epochs (evaluations, where they are not once an epoch), at least 1. The run stops as soon as that
            many in a row were no improvement.
        min_delta: by how much a value must beat the last one that reset the patience, at least 0, in the units of the
            monitored value. It never decides what is the best value: that is any strict improvement.
        start_ratio: share of the run (of its epochs or updates, whichever limit is nearer) that passes before any is
            counted, in [0, 1]. It is rounded down: to whole epochs where the metric is not measured inside them, or
            the number of their batches is not known before their end (it is of lists and of loaders over a dataset with
            indices; ``len`` of another loader is a hint).

    Raises:
        ConfigError: a number out of its range.

    Example:
        >>> EarlyStopping(patience=20, start_ratio=0.5)
        EarlyStopping(patience=20, min_delta=0.0, start_ratio=0.5)
    """

    patience: int
    min_delta: float = 0.0
    start_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_count("EarlyStopping", least=1, patience=self.patience)
        _check_range("EarlyStopping", "min_delta", self.min_delta, 0.0, math.inf)
        _check_range("EarlyStopping", "start_ratio", self.start_ratio, 0.0, 1.0)


class Record(NamedTuple):
    """What best tracking and early stopping remember. Everything is finite or None."""

    best: float | None  # the best value so far
    best_epoch: int | None  # when it was seen, from 1
    reference: float | None  # the last value that beat its predecessor by more than min_delta
    bad_epochs: int  # epochs in a row, from start_epoch on, that did not
    start_epoch: int  # the first epoch that may count as bad, from 1; in the unit of `observe`'s total_epochs


def init() -> Record:
    """The record of a run that has seen nothing.

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
    """The record after one more value.

    Args:
        record: from `init` or the last `observe`.
        value: the monitored metric; None is what is not finite.
        epoch: epochs (or evaluations) completed, from 1.
        mode: whether small or large values are good.
        rule: early stopping, or None to track the best alone.
        total_epochs: epochs planned in all; only ``start_ratio`` needs it. It may differ from what it was before a
            resume: the start is worked out anew each time.
        passed: of ``total_epochs``, where ``epoch`` counts something else: evaluations. Both of them may then be in a
            smaller unit, batches or updates, so that a start inside an epoch can be told. None: ``epoch``.

    Raises:
        ConfigError: ``start_ratio`` is set and the number of epochs is not known.

    Example:
        >>> record = observe(init(), 0.5, epoch=1, mode="min")
        >>> record = observe(record, 0.7, epoch=2, mode="min")
        >>> record.best, record.best_epoch, improved(record, epoch=2)
        (0.5, 1, False)
    """
    value = None if value is None else float(value)
    best = is_better(value, record.best, mode=mode)
    start = start_epoch(rule, total_epochs)
    progress = is_better(value, record.reference, mode=mode, min_delta=rule.min_delta if rule else 0.0)
    waits = (epoch if passed is None else passed) < start
    bad_epochs = 0 if progress or waits else record.bad_epochs + 1
    return Record(
        best=value if best else record.best,
        best_epoch=epoch if best else record.best_epoch,
        reference=value if progress else record.reference,
        bad_epochs=bad_epochs,
        start_epoch=start,
    )


def is_better(value: float | None, best: float | None, *, mode: Mode, min_delta: float = 0.0) -> bool:
    """Whether ``value`` beats ``best`` strictly, by more than ``min_delta``.

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
    """Whether the value of this epoch is the best one.

    Example:
        >>> improved(observe(init(), 0.5, epoch=1, mode="min"), epoch=1)
        True
    """
    return record.best_epoch == epoch


def should_stop(record: Record, rule: EarlyStopping | None) -> bool:
    """Whether the patience is used up. Without a rule: never.

    Example:
        >>> should_stop(init()._replace(bad_epochs=3), EarlyStopping(patience=3))
        True
    """
    return rule is not None and record.bad_epochs >= rule.patience


def start_epoch(rule: EarlyStopping | None, total_epochs: int | None) -> int:
    """The first epoch, from 1, that may count as bad: ``total_epochs * start_ratio``, rounded down.

    Raises:
        ConfigError: ``start_ratio`` is set and the number of epochs is not known.

    Example:
        >>> start_epoch(EarlyStopping(patience=2, start_ratio=0.5), 100)
        50
    """
    if rule is None or rule.start_ratio == 0.0:
        return 1
    if total_epochs is None:
        raise ConfigError(
            f"start_ratio={rule.start_ratio} is a share of the run, and neither epochs nor steps say how long it is",
            where="EarlyStopping",
            hint="fit(..., epochs=100), or start_ratio=0.0",
        )
    return max(1, whole(total_epochs * rule.start_ratio))


def default_mode(monitor: str) -> Mode:
    """``"min"`` for a loss, error or perplexity; of any other name the direction is not guessed.

    Raises:
        ConfigError: the name does not say which direction is good.

    Example:
        >>> default_mode("val_loss")
        'min'
    """
    if monitor.lower().endswith(("loss", "error", "perplexity")):
        return "min"
    raise ConfigError(
        f"monitor={monitor!r} does not say whether small or large values are good",
        where="fit",
        hint=f'monitor={monitor!r}, mode="max"',
    )


def to_json(record: Record) -> dict[str, float | int | None]:
    """The record as a dict that JSON can hold: its numbers are finite or None by construction.

    Example:
        >>> from_json(to_json(init())) == init()
        True
    """
    return record._asdict()


def from_json(found: Mapping[str, Any]) -> Record:
    """The way back from `to_json`.

    Example:
        >>> from_json(to_json(init())) == init()
        True
    """
    return Record(**{name: found[name] for name in Record._fields})


@dataclass(frozen=True, slots=True)
class Plateau:
    """Lower the learning rate when the monitored value stops improving (torch's ``ReduceLROnPlateau``).

    A schedule is a function of the count of updates alone, so this rule lives in the outer loop: keep a
    `PlateauRecord` in a callback and write ``scale`` times the learning rate into the state (``optim.inject``).

    Args:
        factor: what the scale is multiplied by, in (0, 1).
        patience: epochs without improvement that are put up with; the next one lowers the scale. At least 0.
        threshold: the improvement that counts, at least 0.
        threshold_mode: ``"rel"``: better than ``best * (1 -/+ threshold)``; ``"abs"``: than ``best -/+ threshold``.
        cooldown: epochs after a lowering in which none is counted, at least 0.
        min_scale: the scale is never lowered below this, in [0, 1].

    Raises:
        ConfigError: a number out of its range.

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
        _check_range("Plateau", "factor", self.factor, 0.0, 1.0, open_ends=True)
        check_count("Plateau", least=0, patience=self.patience)
        _check_range("Plateau", "threshold", self.threshold, 0.0, math.inf)
        if self.threshold_mode not in ("rel", "abs"):
            raise ConfigError(f"threshold_mode={self.threshold_mode!r}", where="Plateau", hint='"rel" or "abs"')
        check_count("Plateau", least=0, cooldown=self.cooldown)
        _check_range("Plateau", "min_scale", self.min_scale, 0.0, 1.0)


class PlateauRecord(NamedTuple):
    """What `Plateau` remembers. Everything is finite or None."""

    best: float | None
    bad_epochs: int
    cooldown: int  # epochs left of it
    scale: float  # what to multiply the learning rate by, in [0, 1]


def plateau_init() -> PlateauRecord:
    """The record before the first value: scale 1.

    Example:
        >>> plateau_init().scale
        1.0
    """
    return PlateauRecord(best=None, bad_epochs=0, cooldown=0, scale=1.0)


def plateau_observe(record: PlateauRecord, value: float | None, *, rule: Plateau, mode: Mode) -> PlateauRecord:
    """The record after one more value of the monitored metric; None is what is not finite.

    Args:
        record: from `plateau_init` or the last `plateau_observe`. It follows from the values: a run that goes on makes
            it anew from the history of `FitStart`.
        value: the monitored metric.
        rule: when to lower the scale.
        mode: whether small or large values are good.

    Example:
        >>> record = plateau_init()
        >>> for value in (1.0, 2.0, 2.0):
        ...     record = plateau_observe(record, value, rule=Plateau(factor=0.1, patience=1), mode="min")
        >>> record.scale
        0.1
    """
    value = None if value is None else float(value)
    better = is_better(value, _bar(record.best, rule, mode), mode=mode)
    cooling = record.cooldown > 0
    bad_epochs = 0 if better or cooling else record.bad_epochs + 1
    lower = bad_epochs > rule.patience
    return PlateauRecord(
        best=value if better else record.best,
        bad_epochs=0 if lower else bad_epochs,
        cooldown=rule.cooldown if lower else max(0, record.cooldown - 1),
        scale=max(record.scale * rule.factor, rule.min_scale) if lower else record.scale,
    )


def _bar(best: float | None, rule: Plateau, mode: Mode) -> float | None:
    """What a value must beat, in torch's own arithmetic."""
    if best is None:
        return None
    threshold = rule.threshold if mode == "max" else -rule.threshold
    return best * (1.0 + threshold) if rule.threshold_mode == "rel" else best + threshold


def _check_range(where: str, name: str, value: Any, low: float, high: float, *, open_ends: bool = False) -> None:
    if not is_number(value) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} is no finite number", where=where, hint=f"{name}={_example(low, high)}")
    if value < low or value > high or (open_ends and value in (low, high)):
        ends = "()" if open_ends else "[]"
        raise ConfigError(
            f"{name}={value!r} is outside {ends[0]}{low:g}, {high:g}{ends[1]}",
            where=where,
            hint=f"{name}={_example(low, high)}",
        )


def _example(low: float, high: float) -> float:
    return low if math.isinf(high) else (low + high) / 2
