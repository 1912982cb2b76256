"""`find_learning_rate`: the range test, and that it disturbs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Placed, assert_trees_close
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim
from purestep.data import Feed, shares
from purestep.errors import ConfigError, DataError, StateError, StepContractError
from purestep.parallel import mesh as meshes
from purestep.tools import rate_finder

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.randn(4, 1, generator=torch.Generator().manual_seed(1))
BATCHES = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
TX = optim.inject(optim.sgd)(learning_rate=0.1)


def made(tx: Any = TX, **options: Any) -> tuple[ps.Program, ps.TrainState]:
    torch.manual_seed(0)
    program = ps.program(nn.Linear(4, 1), ps.supervised(nn.MSELoss()), tx, **options)
    return program, program.init(seed=3)


def by_hand(rates: list[float]) -> list[float]:
    """Losses of torch.optim.SGD on the same batches."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for index, rate in enumerate(rates):
        x, y = BATCHES[index % 3]
        optimizer.param_groups[0]["lr"] = rate
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def smoothed(losses: list[float], beta: float) -> list[float]:
    """Lightning's formula."""
    average, found = 0.0, []
    for index, loss in enumerate(losses):
        average = beta * average + (1 - beta) * loss
        found.append(average / (1 - beta ** (index + 1)))
    return found


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.98])
def test_rates_losses_and_suggestion_are_those_of_the_formulas(beta: float) -> None:
    program, state = made()
    before = ps.clone(state)
    found = ps.find_learning_rate(program, state, BATCHES, low=1e-4, high=0.1, steps=30, smoothing=beta)
    assert found.rates == pytest.approx(np.geomspace(1e-4, 0.1, 30).tolist())
    assert found.losses == pytest.approx(smoothed(by_hand(found.rates), beta), rel=1e-4)
    inner = np.array(found.losses)[10:-1]
    assert found.suggestion == found.rates[10:-1][int(np.gradient(inner).argmin())]
    assert found.diverged is None
    assert_trees_close(state, before, exact=True)


def test_the_sweep_stops_where_the_loss_diverges() -> None:
    program, state = made()
    found = ps.find_learning_rate(program, state, BATCHES, low=1e-3, high=1e6, steps=50, smoothing=0.5)
    assert found.diverged == found.rates[-1] < 1e6
    assert found.losses[-1] > 4 * min(found.losses)
    assert all(loss <= 4 * min(found.losses[: at + 1]) for at, loss in enumerate(found.losses[:-1]))
    further = ps.find_learning_rate(program, state, BATCHES, low=1e-3, high=1e30, steps=50, divergence=None)
    assert further.diverged is not None
    assert further.diverged > found.diverged
    assert all(map(math.isfinite, further.losses))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_loss_that_is_not_finite_ends_the_sweep(nonfinite: str) -> None:
    program, state = made(nonfinite=nonfinite)
    batches = [*BATCHES, (X[:4] * torch.nan, Y[:4])]
    found = ps.find_learning_rate(program, state, batches, steps=9)
    assert len(found.rates) == 3
    assert found.diverged == pytest.approx(1e-7 * 1e7 ** (3 / 8))


def test_a_loss_that_never_falls_has_no_suggestion() -> None:
    sweep = rate_finder._result([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], None)
    assert sweep.suggestion is None
    assert str(sweep).startswith("no suggestion; 4 learning rates")


def test_a_step_that_donates_its_state_takes_a_copy() -> None:
    program, state = made()
    before = ps.clone(state)

    def donating(old: Any, batch: Any) -> Any:
        new = program.train_step(old, batch)
        for leaf in old.params.values():
            leaf.zero_()
        return new

    ps.find_learning_rate(program._replace(train_step=donating), state, BATCHES, steps=3)
    assert_trees_close(state, before, exact=True)


def test_a_window_has_one_rate() -> None:
    program, state = made(accumulate=3)
    found = ps.find_learning_rate(program, state, BATCHES, low=0.05, high=0.1, steps=4, smoothing=0.0)
    whole, start = made()
    losses = []
    for rate in found.rates:
        start = start._replace(opt_state=optim.set_hyperparams(start.opt_state, learning_rate=rate))
        start, metrics = whole.train_step(start, (X, Y))
        losses.append(float(metrics["loss"]))
    assert found.losses == pytest.approx(losses, rel=1e-4)


class Rotating:
    """An iterable that shuffles its batches in place."""

    def __init__(self) -> None:
        self.batches = list(BATCHES)

    def __iter__(self) -> Iterator[Any]:
        self.batches.append(self.batches.pop(0))
        return iter(self.batches)


class Restarting:
    """An iterator whose ``__iter__`` begins an epoch, as DALI's."""

    def __iter__(self) -> Iterator[Any]:
        self.left = iter(BATCHES)
        return self

    def __next__(self) -> Any:
        return next(self.left)


def test_an_iterator_that_restarts_is_a_loader() -> None:
    found, wanted = (ps.find_learning_rate(*made(), loader, steps=5) for loader in (Restarting(), BATCHES))
    assert found == wanted


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "with a state": lambda: Placed(lambda at: BATCHES[at % 2], 3),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_fit_sees_the_data_that_it_would_have_seen(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for sweeps in (False, True):
        program, state = made()
        loader = LOADERS[kind]()
        if sweeps:
            torch.manual_seed(5)
            before = torch.get_rng_state()
            caplog.clear()
            ps.find_learning_rate(program, state, loader, steps=7)
            assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
            assert torch.equal(before, torch.get_rng_state())
        result = ps.fit(state, loader, program, epochs=2, sinks=[], device="cpu")
        found.append(result.state.params)
    assert_trees_close(*found, exact=True)


@pytest.mark.parametrize(
    "tx", [optim.sgd(0.1), optim.inject(optim.sgd)(learning_rate=lambda count: count * 0.1), optim.adamw(1e-3)]
)
def test_a_rate_that_cannot_change_is_an_error_with_the_line_to_write(tx: Any) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate.*optim\.inject\(ps\.optim\.adamw\)\(learning_rate=1e-3\)"):
        ps.find_learning_rate(*made(tx), BATCHES)


def test_a_group_can_be_swept_alone() -> None:
    groups = {"w": optim.inject(optim.sgd)(learning_rate=0.1), "b": optim.sgd(0.0)}
    program, state = made(optim.partition(groups, [("weight", "w"), ("", "b")]))
    found = ps.find_learning_rate(program, state, BATCHES, leaf="w/learning_rate", steps=5)
    assert len(found.rates) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.0}, "low=0.0"),
        ({"high": 1e-8}, "high=1e-08"),
        ({"steps": 1}, "steps=1"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"divergence": 1.0}, "divergence=1.0"),
    ],
)
def test_numbers_out_of_range_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^find_learning_rate: {message}"):
        ps.find_learning_rate(*made(), BATCHES, **options)


def test_other_wrong_arguments_say_what_to_pass() -> None:
    program, state = made()
    for made_of in (iter, lambda batches: ps.open_feed(iter(batches)), lambda batches: (each for each in batches)):
        given = made_of(BATCHES)
        with pytest.raises(DataError, match="an iterator, whose .* once only.*pass the loader itself"):
            ps.find_learning_rate(program, state, given)
        left = given.epoch(0) if isinstance(given, Feed) else given
        assert next(left) is BATCHES[0]  # none was loaded
    given, mesh = ps.open_feed(iter(BATCHES)), meshes.here()
    divided = shares.RowsFeed(given, mesh, checks_end=True), shares.OwnFeed(given, mesh)
    assert not any(feed.restarts for feed in divided)
    with pytest.raises(StateError, match="not a TrainState"):
        ps.find_learning_rate(program, {}, BATCHES)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="halted"):
        ps.find_learning_rate(program, state._replace(halted=state.halted + 1), BATCHES)
    with pytest.raises(StepContractError, match="no loss"):
        ps.find_learning_rate(ps.Program(lambda s, b: (s, {})), state, BATCHES)


def test_a_sweep_is_one_line() -> None:
    sweep = rate_finder.RateSweep([1e-3, 1e-2, 1e-1], [3.0, 1.0, 2.0], 1e-2, 0.1)
    assert str(sweep) == "suggestion 1.00e-02; 3 learning rates, 1.0e-03 to 1.0e-01, diverged at 1.00e-01"


def test_a_loader_that_keeps_something_is_told(caplog: pytest.LogCaptureFixture) -> None:
    program, state = made()
    ps.find_learning_rate(program, state, Rotating(), steps=7)
    assert "train: this pass starts with another batch than the first pass" in caplog.text
