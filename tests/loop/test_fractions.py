"""Fractions of a count: 0.29 of 100 is 29, though 0.29 * 100 is a little less."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import purestep as ps
from purestep.data import open_feed
from purestep.loop.loop_state import LoopState
from purestep.loop.policy import EvalSchedule
from purestep.state.validation import whole
from purestep.stopping import EarlyStopping

SHORT = [(n, count) for count in (10, 100, 300, 1000) for n in range(1, 100) if int(n / 100 * count) * 100 != n * count]
"""Hundredths and counts whose product is a whole number, which the product in floating point falls short of."""
FAULTY = [(n / 100, count, n * count // 100) for n, count in SHORT if n * count % 100 == 0]


def test_there_are_such_products() -> None:
    assert (0.29, 100, 29) in FAULTY
    assert len(FAULTY) > 5


@given(st.integers(1, 10**6), st.integers(1, 10**9))
def test_a_fraction_of_a_count_is_what_it_reads(n: int, count: int) -> None:
    assert whole(n / 10**6 * count) == n * count // 10**6
    assert whole(Fraction(n, count).__float__() * count) == n


@pytest.mark.parametrize(("share", "count", "expected"), FAULTY)
def test_shares_of_batches_and_of_a_run(share: float, count: int, expected: int) -> None:
    assert len(list(open_feed(list(range(count)), first=share).epoch(0))) == expected
    assert EarlyStopping(patience=1, start_ratio=share).start(count) == expected


@pytest.mark.parametrize("every", [0.29, 0.07, 0.1, 0.57, 1 / 3, 0.14])
@pytest.mark.parametrize("length", [3, 7, 100, 300])
def test_marks_of_an_interval(every: float, length: int) -> None:
    schedule = EvalSchedule({"val": every}, open_feed(list(range(length))), 1)
    places = [LoopState(batch=batch) for batch in range(1, length)]
    found = [place.batch for place in places if schedule.inside(place)]
    assert [place.batch for place in places if schedule.inside(place)] == found  # to ask changes nothing
    part = math.ceil(Fraction(every).limit_denominator(1000) * length)
    assert found == list(range(part, length, part))


def test_fit_trains_on_the_share_that_it_is_told() -> None:
    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.01))
    batch: Any = (torch.ones(1, 1), torch.ones(1, 1))
    found = ps.fit(program.init(), {"train": [batch] * 100}, program, epochs=1, sinks=[], limit_batches=0.29)
    assert int(found.state.updates) == 29


def test_a_loss_needs_no_metrics() -> None:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(model(batch).mean(), torch.tensor(2.0))

    program = ps.program(torch.nn.Linear(1, 1), objective, ps.optim.sgd(0.1))
    _, metrics = program.train_step(program.init(), torch.ones(2, 1))
    assert float(metrics["loss"]) == float(program.eval_step(program.init(), torch.ones(2, 1))["loss"])
    with pytest.raises(TypeError):
        ps.Loss(torch.zeros(()), torch.ones(())).metrics["shared"] = 1  # type: ignore[index]
