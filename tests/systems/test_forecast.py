"""A Trainer class for time series, feature by feature: its rows, and what it gets wrong or leaves open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from shipped import load
from systems.trainers import fit, scripted
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import purestep as ps
from purestep import optim, tree
from purestep.errors import ConfigError, StateError

Batch = tuple[Tensor, Tensor]


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Inputs [count, 3] and targets [count, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=dtype)
    return x, x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator, dtype=dtype)


def batches(sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Batch]:
    return [rows(size, seed, dtype) for seed, size in enumerate(sizes)]


def joined(parts: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=dtype)


def program(model: nn.Module | None = None, tx: Any = None, criterion: Any = None, **fields: Any) -> ps.Program:
    objective = ps.supervised(criterion or nn.MSELoss())
    return ps.program(model or linear(), objective, tx or optim.sgd(0.1), **fields)


ONE = [torch.zeros(1)], [torch.zeros(1)]  # loaders of a batch that nobody looks at


def trainer_by_hand(model: nn.Module, train: list[Batch], val: list[Batch], epochs: int, every: int) -> list[Any]:
    """The loop of the description, for loaders whose length is a multiple of ``every``."""
    optimizer, criterion, lines = torch.optim.Adam(model.parameters(), lr=1e-2), nn.MSELoss(), []
    for _ in range(epochs):
        running = 0.0
        optimizer.zero_grad()
        for i, (inputs, targets) in enumerate(train):
            loss = criterion(model(inputs), targets) / every
            loss.backward()
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
            running += loss.item() * every
        with torch.no_grad():
            losses = [criterion(model(inputs), targets).item() for inputs, targets in val]
        lines.append((running / len(train), sum(losses) / len(losses)))
    return lines


@pytest.mark.row("0.1", "0.5", "0.14", "0.17")
def test_the_pieces_of_the_trainer_make_the_same_run():
    train, val = batches([4] * 6), batches([4] * 2)
    by_hand = linear()
    lines = trainer_by_hand(by_hand, train, val, epochs=3, every=2)
    result = fit(program(tx=optim.adam(1e-2), accumulate=2), (train, val), epochs=3)
    assert result.epochs == 3
    assert result.history["train_loss"] == pytest.approx([loss for loss, _ in lines], rel=1e-6)
    assert result.history["val_loss"] == pytest.approx([loss for _, loss in lines], rel=1e-6)
    assert_trees_close(
        result.state.params, {name: p.detach() for name, p in by_hand.named_parameters()}, rtol=1e-10, atol=0
    )


class Scaled(nn.Module):
    """A criterion with a parameter: the uncertainty of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets).square() / self.log_variance.exp() + self.log_variance).mean()


@pytest.mark.row("0.2")
def test_the_criterion_is_any_callable_and_its_parameters_are_trained():
    batch = rows(8)
    as_function, _ = (made := program(criterion=functional.mse_loss)).train_step(made.init(device="cpu"), batch)
    as_lambda, _ = (made := program(criterion=lambda o, t: (o - t).square().mean())).train_step(
        made.init(device="cpu"), batch
    )
    assert_trees_close(as_lambda.params, as_function.params, rtol=1e-12, atol=0)
    made = program(criterion=Scaled())
    state, _ = made.train_step(made.init(device="cpu"), batch)
    assert state.params["objective.log_variance"].item() != 0.0


@pytest.mark.row("0.3")
def test_the_loop_moves_batches_to_where_the_state_is():
    seen: list[str] = []

    def train_step(state: Any, batch: Any) -> Any:
        seen.extend(leaf.device.type for leaf in tree.leaves(batch))
        return {"w": state["w"] + batch[0].sum()}, {}

    state = {"w": torch.zeros((), device="meta")}  # a device that is not the loader's, on any machine
    state, _ = ps.run_epoch(state, batches([2, 2]), train_step)
    assert seen == ["meta"] * 4
    assert state["w"].device.type == "meta"
    arrays = [tuple(part.numpy() for part in batch) for batch in batches([2, 2])]
    found, expected = (fit(program(), {"train": train}, epochs=1) for train in (arrays, batches([2, 2])))
    assert_trees_close(found.state.params, expected.state.params, exact=True)
    batch = rows(2)
    assert ps.to_device(batch, "cpu") is batch
    assert [leaf.device.type for leaf in ps.to_device(batch, torch.device("meta"))] == ["meta", "meta"]


@pytest.mark.row("0.4", "B6")
def test_the_device_is_named_once_and_all_leaves_are_there(monkeypatch: pytest.MonkeyPatch):
    made = program(ema=0.9, accumulate=2, precision="16-mixed")
    state = made.init(seed=3, device="cpu")
    assert {leaf.device.type for leaf in tree.leaves(state)} == {"cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"cuda"):
        made.init(device="cuda")
    mixed = state._replace(updates=state.updates.to("meta"))
    with pytest.raises(StateError, match=r"several devices: .*updates on meta"):
        ps.fit(mixed, [rows(2)], made, epochs=1, progress=False)


class NoLength:
    """Batches without a number of them."""

    def __init__(self, parts: Sequence[Batch]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.parts)


@pytest.mark.row("0.6", "0.7", "B2", "B3", "B4")
def test_a_leftover_window_divides_by_what_is_in_it():
    parts = batches([4, 1, 3, 2, 5, 2])  # of different sizes, in windows of four and two, from a loader without len()
    whole = program()
    expected = whole.init(device="cpu")
    for window in (parts[:4], parts[4:]):
        expected, _ = whole.train_step(expected, joined(window))
    result = fit(program(accumulate=4), {"train": NoLength(parts)}, epochs=1)
    assert int(result.state.updates) == 2
    assert_trees_close(result.state.params, expected.params, rtol=1e-12, atol=0)


class Watching(nn.Linear):
    """Notes the mode and the precision it is called in."""

    seen: list[tuple[bool, bool, torch.dtype]]

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.seen = []

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        SEEN.append((self.training, torch.is_grad_enabled(), out.dtype))
        return out


SEEN: list[tuple[bool, bool, torch.dtype]] = []


@pytest.mark.row("0.8", "0.9", "0.13", "0.16", "B1")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_mode_and_precision_of_training_and_evaluation(precision: str):
    SEEN.clear()
    model = Watching().eval()
    made = program(model, precision=precision)
    state = made.init(device="cpu")
    batch = rows(4, dtype=torch.float32)
    before = tree.clone(state)
    values = ps.evaluate(state, [batch], made.eval_step)
    made.train_step(state, batch)
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}[precision]
    assert list(SEEN) == [(False, False, dtype), (True, True, dtype)]
    assert not model.training  # the template's mode is nobody's business but its owner's
    assert_trees_close(state, before, exact=True)
    assert math.isfinite(values["loss"])
    scaled = precision == "16-mixed"
    assert isinstance(state.scaler, ps.Empty) is not scaled
    if scaled:
        assert (state.scaler.scale.item(), state.scaler.scale.dtype) == (2.0**16, torch.float32)


@pytest.mark.row("0.12")
def test_no_gradient_is_kept_anywhere():
    model = linear()
    made = program(model, accumulate=2)
    start = made.init(device="cpu")
    half, _ = made.train_step(start, rows(4))
    done, _ = made.train_step(half, rows(4, 1))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(grad.any() for grad in half.accum.grads.values())
    assert not any(grad.any() for grad in (*start.accum.grads.values(), *done.accum.grads.values()))
    again, _ = made.train_step(half, rows(4, 1))
    assert_trees_close(again, done, exact=True)


def lines_as_before(event: Any) -> None:
    """A sink of one's own: the lines that the description prints."""
    if isinstance(event, ps.events.EpochEnd):
        print(f"Epoch {event.epoch}, Train Loss: {event.record['train_loss']}")
        print(f"Epoch {event.epoch}, Validation Loss: {event.record['val_loss']}")
    elif isinstance(event, ps.events.FitEnd):
        print(f"Training finished. ({event.reason})")


@pytest.mark.row("0.15", "0.16", "0.20")
def test_the_lines_it_prints_come_from_a_sink():
    said = StringIO()
    lines_as_before.foreground = True  # pyright: ignore[reportFunctionMemberAccess]  # printed at once, in order
    with redirect_stdout(said):
        result = fit(program(), (batches([4]), batches([4])), epochs=2, sinks=[lines_as_before])
    losses = zip(result.history["train_loss"], result.history["val_loss"], strict=True)
    expected = [f"Epoch {n}, {name}: {value}" for n, pair in enumerate(losses, 1)
                for name, value in zip(("Train Loss", "Validation Loss"), pair, strict=True)]  # fmt: skip
    assert said.getvalue().splitlines() == [*expected, "Training finished. (epochs)"]
    assert result.stop_reason == "epochs"


@pytest.mark.row("0.17", "0.18", "B6")
def test_every_strict_improvement_is_saved_before_it_is_said(tmp_path: Path):
    values = [3.0, 2.0, 2.0, 1.0, math.nan, 5.0]
    said: list[int] = []

    def announce(event: Any) -> None:
        if isinstance(event, ps.events.EpochEnd) and event.improved:
            torch.save({"epoch": event.epoch}, tmp_path / "best_model.pth")
            said.append(event.epoch)

    made = scripted(loss=values)
    with ps.Snapshots(tmp_path / "run", keep=1) as snapshots:
        result = fit(made, ONE, epochs=6, callbacks=[announce], snapshots=snapshots)
        assert said == [1, 2, 4]
        assert result.best == {"epoch": 4, "val_loss": 1.0, "step": 4}
        assert snapshots.steps() == [4, 6]
        assert snapshots.best() == 4
        assert int(snapshots.restore(result.state, step=4).state["calls"]) == 4
    assert torch.load(tmp_path / "best_model.pth") == {"epoch": 4}


@pytest.mark.row("0.21")
def test_the_example_has_its_numbers():
    example = load("forecast")
    config = example.Config()
    assert (config.learning_rate, config.epochs, config.accumulate, config.precision) == (1e-4, 10, 4, "16-mixed")
    parts = example.windows(config)
    updates, left = divmod(len(DataLoader(parts["train"], config.batch_size)), config.accumulate)
    assert (updates, left) == (46, 2)  # an epoch ends within a window
    past, future = parts["test"].tensors
    assert past.shape[1:] == (104,)
    assert not past[:, -1].any()  # differences from the last week, so that persistence is a forecast of 0
    known = example.baselines(parts["test"], config.horizon)
    assert known["persistence"] == pytest.approx(25 * future.square().mean().item())
    assert known["the same weeks a year ago"] < known["persistence"]


class Reads(TorchDispatchMode):
    """Counts how often a number is read off a tensor: on an accelerator each is a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.row("B5")
def test_a_step_reads_no_number_and_metrics_are_tensors():
    made = program(linear(torch.float32), optim.adam(0.1), precision="16-mixed", ema=0.9)
    state = made.init(device="cpu")
    with Reads() as planted:
        torch.ones(()).item()
    with Reads() as reads:
        _, metrics = made.train_step(state, rows(4, dtype=torch.float32))
    assert (planted.count, reads.count) == (1, 0)
    assert {type(number) for mean in metrics.values() for number in mean} == {Tensor}
