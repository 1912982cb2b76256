"""`fit(histograms=n)`: weights, gradients and updates beside a loop by hand, and in the loggers' own files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError
from purestep.events import FitStart, Histogram, Histograms
from purestep.loop import histograms

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [tuple(torch.randn(8, n, generator=GENERATOR) for n in (3, 2)) for _ in range(6)]


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(dropout), nn.Linear(5, 2))


def fitted(every: int, *, program: Any = None, **fields: Any) -> list[Histograms]:
    """The events of a run."""
    found: list[Histograms] = []
    program = program or ps.program(net(), ps.supervised(nn.MSELoss()), optim.adamw(0.1))
    collect = lambda event: found.append(event) if isinstance(event, Histograms) else None  # noqa: E731  # one line
    fields = {"epochs": 1, "sinks": [], "compile": False, "device": "cpu", **fields}
    ps.fit(program.init(), BATCHES, program, histograms=every, callbacks=[collect], **fields)
    return found


def equal(found: Histogram, value: Tensor) -> None:
    """The same numbers, up to the rounding of sums."""
    numbers = value.detach().double()
    assert found.counts.sum() == numbers.numel()
    assert (found.edges[0], found.edges[-1]) == pytest.approx((numbers.min().item(), numbers.max().item()), rel=1e-5)
    assert found.total == pytest.approx(numbers.sum().item(), rel=1e-4, abs=1e-5)
    assert found.squares == pytest.approx(numbers.square().sum().item(), rel=1e-4)


@pytest.mark.parametrize("compile", [False, pytest.param({"backend": "aot_eager"}, marks=pytest.mark.compile)])
def test_the_values_are_those_of_a_loop_by_hand(compile: Any) -> None:
    found = fitted(2, compile=compile)
    assert [event.updates for event in found] == [2, 4, 6]
    model = net()
    optimizer, events = torch.optim.AdamW(model.parameters(), lr=0.1), iter(found)
    for number, (x, y) in enumerate(BATCHES, 1):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if number % 2:
            continue
        values = next(events).values
        assert set(values) == {f"{kind}/{name}" for kind in ("weights", "gradients", "updates") for name in before}
        for name, p in model.named_parameters():
            assert p.grad is not None
            equal(values[f"weights/{name}"], p)
            equal(values[f"gradients/{name}"], p.grad)
            equal(values[f"updates/{name}"], p - before[name])


def test_recording_changes_no_number_of_the_run() -> None:
    def run(every: int) -> ps.FitResult:
        program = ps.program(net(0.5), ps.supervised(nn.MSELoss()), optim.sgd(0.1, 0.9), ema=0.5)
        return ps.fit(program.init(), BATCHES, program, epochs=2, histograms=every, sinks=[], compile=False)

    one, other = run(0), run(1)
    assert all(torch.equal(a, b) for a, b in zip(*(ps.tree.leaves(r.state) for r in (one, other)), strict=True))
    assert one.history == other.history


def test_the_gradient_has_the_dropout_of_the_step() -> None:
    program = ps.program(net(0.5), ps.supervised(nn.MSELoss()), optim.sgd(1.0))
    for event in fitted(1, program=program):  # with this rule an update is the negative gradient
        gradient, update = event.values["gradients/0.weight"], event.values["updates/0.weight"]
        assert gradient.total == pytest.approx(-update.total, rel=1e-3, abs=1e-5)
        assert gradient.squares == pytest.approx(update.squares, rel=1e-3)


def test_an_accumulated_update_is_recorded_once_and_a_scaled_gradient_unscaled() -> None:
    options: dict[str, Any] = {"accumulate": 2, "scaler": ps.scaler.dynamic(1024.0)}
    program = ps.program(net(), ps.supervised(nn.MSELoss()), optim.sgd(0.1), **options)
    found = fitted(1, program=program)
    assert [event.updates for event in found] == [1, 2, 3]
    model = net()
    loss = nn.functional.mse_loss(model(BATCHES[1][0]), BATCHES[1][1])
    (gradient,) = torch.autograd.grad(loss, [model[0].weight])
    equal(found[0].values["gradients/0.weight"], gradient)  # of the last micro-batch


def test_numbers_that_are_not_finite_are_left_out_and_equal_ones_have_a_bin() -> None:
    found = histograms.histogram(torch.tensor([1.0, torch.nan, 3.0, torch.inf]))
    assert found is not None
    assert (found.counts.sum(), found.edges[0], found.edges[-1], found.total) == (2, 1.0, 3.0, 4.0)
    assert histograms.histogram(torch.tensor([torch.nan])) is None
    same = histograms.histogram(torch.zeros(5))
    assert same is not None
    assert (same.counts.sum(), len(same.edges)) == (5, 65)


def test_gradients_that_fail_end_the_run_with_the_cure() -> None:
    program = ps.program(net(), ps.supervised(nn.MSELoss()), optim.sgd(0.1))

    def no_memory(state: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    assert program.static is not None
    broken = program._replace(static=program.static._replace(made=program.static.made._replace(gradient=no_memory)))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(3, program=broken)
    assert "histograms=0" in caught.value.__notes__[0]


def test_a_step_of_ones_own_is_refused() -> None:
    program = ps.program(net(), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    with pytest.raises(ConfigError, match="histograms: the step is not that of a program"):
        fitted(1, program=ps.Program(lambda state, batch: program.train_step(state, batch), init=program.init))
    with pytest.raises(ConfigError, match=r"histograms=-1.*cure: histograms=500"):
        ps.FitConfig(epochs=1, histograms=-1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_has_the_histograms(tmp_path: Path) -> None:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = fitted(3, sinks=[ps.sinks.tensorboard(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    assert set(events.Tags()["histograms"]) == set(found[0].values)
    points = events.Histograms("updates/0.weight")
    assert [point.step for point in points] == [3, 6]
    value, expected = points[1].histogram_value, found[1].values["updates/0.weight"]
    assert value.num == 15
    assert (value.min, value.max, value.sum) == pytest.approx((expected.edges[0], expected.edges[-1], expected.total))
    assert value.bucket == expected.counts.tolist()


def test_weights_and_biases_gets_them_over_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    run = SimpleNamespace(id="a", summary={}, define_metric=lambda *_, **__: None, log=rows.append)
    run.finish = lambda exit_code: None
    client = SimpleNamespace(init=lambda **_: run, Histogram=lambda np_histogram: np_histogram)
    monkeypatch.setitem(sys.modules, "wandb", client)
    sink, histogram = ps.sinks.wandb("digits"), Histogram(np.ones(64), np.arange(65.0), 1.0, 2.0)
    sink(FitStart(None, 0, 0, 1, None, 1, None, False))
    sink(Histograms(7, {"weights/w": histogram}))
    assert rows == [{"weights/w": (histogram.counts, histogram.edges), "updates": 7}]
