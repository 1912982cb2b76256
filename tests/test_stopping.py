from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from purestep import stopping
from purestep.errors import ConfigError
from purestep.stopping import EarlyStopping, Record

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30)


def run(values: Sequence[float], mode: stopping.Mode = "min", **kwargs: Any) -> list[Record]:
    records = [Record()]
    for epoch, value in enumerate(values, start=1):
        records.append(records[-1].after(value, epoch=epoch, mode=mode, **kwargs))
    return records


def stopped_at(values: Sequence[float], rule: EarlyStopping, **kwargs: Any) -> int | None:
    """The first epoch after which the run stops."""
    records = run(values, rule=rule, **kwargs)
    return next((epoch for epoch, record in enumerate(records) if record.bad_epochs >= rule.patience), None)


def test_the_best_is_a_strict_improvement_in_either_direction():
    small, large = run([0.5, 0.5, 0.4, 0.9])[-1], run([0.5, 0.5, 0.4, 0.9], mode="max")[-1]
    assert (small.best, small.best_epoch) == (0.4, 3)
    assert (large.best, large.best_epoch) == (0.9, 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_never_the_best_and_counts_as_no_improvement(bad: float, mode: stopping.Mode):
    rule = EarlyStopping(patience=3)
    first, then = run([bad], mode, rule=rule)[-1], run([1.0, bad, bad], mode, rule=rule)[-1]
    assert first == Record(None, None, None, 1, 1)
    assert then == Record(1.0, 1, 1.0, 2, 1)


def test_it_stops_when_bad_epochs_reach_the_patience_and_not_one_before():
    assert stopped_at([1.0, 1.0, 1.0, 1.0], EarlyStopping(patience=2)) == 3
    assert stopped_at([1.0, 1.0, 0.9, 0.9, 0.9], EarlyStopping(patience=2)) == 5
    assert stopped_at([1.0, 0.9, 0.8, 0.7], EarlyStopping(patience=1)) is None


def test_min_delta_gates_the_patience_and_not_the_best():
    rule = EarlyStopping(patience=2, min_delta=0.1)
    final = run([1.0, 0.95, 0.93], rule=rule)[-1]
    assert (final.best, final.best_epoch) == (0.93, 3)
    assert final.bad_epochs == rule.patience


def test_small_steps_add_up_to_an_improvement_over_the_value_that_last_reset_the_patience():
    assert stopped_at([1.0, 0.94, 0.88, 0.82, 0.76], EarlyStopping(patience=2, min_delta=0.1)) is None


def test_epochs_before_the_start_do_not_count_as_bad():
    flat = [1.0] * 20
    assert stopped_at(flat, EarlyStopping(patience=3, start_ratio=0.5), total_epochs=20) == 12
    assert stopped_at(flat, EarlyStopping(patience=3), total_epochs=20) == 4


def test_the_start_may_be_in_a_smaller_unit_than_what_is_counted():
    rule, record = EarlyStopping(patience=2, start_ratio=0.5), Record()
    counted: list[int] = []
    for count in range(1, 6):  # an evaluation every three batches, of 20 in all
        record = record.after(1.0, epoch=count, mode="min", rule=rule, total_epochs=20, passed=3 * count)
        counted.append(record.bad_epochs)
    assert counted == [0, 0, 0, 1, 2]
    assert (record.best_epoch, record.start_epoch) == (1, 10)


def test_the_start_is_worked_out_anew_when_the_number_of_epochs_changes():
    rule = EarlyStopping(patience=2, start_ratio=0.5)
    record = run([1.0, 1.0, 1.0], rule=rule, total_epochs=4)[-1]
    assert (record.start_epoch, record.bad_epochs) == (2, 2)
    longer = record.after(1.0, epoch=4, mode="min", rule=rule, total_epochs=100)
    assert (longer.start_epoch, longer.bad_epochs) == (50, 0)


@pytest.mark.parametrize(("total", "ratio", "start"), [(100, 0.5, 50), (3, 0.5, 1), (1, 0.9, 1), (7, 1.0, 7)])
def test_the_start_epoch_is_at_least_the_first(total: int, ratio: float, start: int):
    assert EarlyStopping(patience=1, start_ratio=ratio).start(total) == start


def test_a_start_ratio_of_unknown_epochs_is_refused():
    with pytest.raises(ConfigError, match=r"EarlyStopping: start_ratio=0\.5 is a share of the run, but neither"):
        EarlyStopping(patience=1, start_ratio=0.5).start(None)


@settings(deadline=None)
@given(values=VALUES, cut=st.integers(0, 30))
def test_a_run_that_goes_through_json_ends_with_the_same_record(values: list[float], cut: int):
    rule = EarlyStopping(patience=2, min_delta=0.1)
    record = Record()
    for epoch, value in enumerate(values, start=1):
        if epoch == cut:
            record = Record(**json.loads(json.dumps(record._asdict(), allow_nan=False)))
        record = record.after(value, epoch=epoch, mode="min", rule=rule)
    assert record == run(values, rule=rule)[-1]


@settings(deadline=None)
@given(values=VALUES)
def test_the_best_is_the_first_smallest_finite_value(values: list[float]):
    finite = [(value, epoch) for epoch, value in enumerate(values, start=1) if math.isfinite(value)]
    expected = min(finite, default=(None, None))
    assert run(values)[-1][:2] == expected


def test_a_record_holds_plain_numbers_of_a_tensor():
    value: Any = torch.tensor(0.5)
    record = Record().after(value, epoch=1, mode="min")
    assert [type(each) for each in (record.best, record.reference)] == [float] * 2


def test_observing_leaves_the_record_as_it_was():
    record = run([1.0])[-1]
    before = tuple(record)
    record.after(0.5, epoch=2, mode="min")
    assert tuple(record) == before


@pytest.mark.parametrize("name", ["loss", "val_loss", "train/Loss", "val_error", "test_perplexity"])
def test_a_loss_is_good_when_small(name: str):
    assert stopping.default_mode(name) == "min"


@pytest.mark.parametrize("name", ["val_accuracy", "loss_scale", "f1"])
def test_of_any_other_name_the_direction_is_asked_for(name: str):
    with pytest.raises(ConfigError, match=f"monitor='{name}' does not say .*cure: monitor='{name}', mode=\"max\""):
        stopping.default_mode(name)


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        (EarlyStopping, {"patience": 0}, "patience=0 must be an int of at least 1"),
        (EarlyStopping, {"patience": 2.0}, r"patience=2\.0 must be an int"),
        (EarlyStopping, {"patience": True}, "patience=True must be an int"),
        (EarlyStopping, {"patience": 1, "min_delta": -1.0}, r"min_delta=-1\.0 must be a finite number of at least 0"),
        (EarlyStopping, {"patience": 1, "min_delta": math.nan}, "min_delta=nan must be a finite number"),
        (EarlyStopping, {"patience": 1, "start_ratio": 1.5}, r"start_ratio=1\.5 must be in \[0, 1\]"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, kwargs: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make(**kwargs)
