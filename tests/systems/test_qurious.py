"""A Trainer class that subclasses extend, feature by feature: its rows, and what it gets wrong or leaves open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from systems.trainers import Batch, batches, classifier, fit, scripted
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import events, optim, schedules
from purestep.errors import ConfigError, DataError, NotFound

ONE = {"train": [torch.zeros(1)], "eval": [torch.zeros(1)]}  # loaders of a batch that nobody looks at


# --- making a trainer -------------------------------------------------------------------------------------------------


@pytest.mark.row("1.1", "1.7", "1.13")
def test_the_first_example_returns_its_history_as_lists_by_name():
    torch.manual_seed(0)
    x = torch.randn(64, 10)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    settings = SimpleNamespace(num_epochs=5)
    tx = optim.adam(schedules.linear(2e-2, 1e-2, transition_steps=20))
    program = ps.program(model, ps.supervised(nn.MSELoss()), tx)
    loaders = {"train": DataLoader(data, batch_size=16, shuffle=True), "eval": DataLoader(data, batch_size=64)}
    history = fit(program, loaders, config=settings).history
    assert {"epoch", "train_loss", "eval_loss", "lr"} <= set(history)
    assert {len(column) for column in history.values()} == {5}
    assert history["epoch"] == [1, 2, 3, 4, 5]
    assert history["eval_loss"][-1] < history["eval_loss"][0] / 2


@pytest.mark.row("1.3", "1.4")
def test_single_steps_are_public_and_pure():
    program, (x, y) = classifier(), vector_batch(8)
    model, criterion = tiny_mlp(), nn.CrossEntropyLoss()
    state = program.init(device="cpu")
    before = ps.clone(state)

    scores = program.eval_step(state, (x, y))
    assert float(scores["loss"]) == pytest.approx(criterion(model(x), y).item())
    new, told = program.train_step(state, (x, y))
    assert float(told["loss"]) == pytest.approx(float(scores["loss"]))
    assert_trees_close(state, before, exact=True)

    criterion(model(x), y).backward()
    by_hand = {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}
    assert_trees_close(new.params, by_hand)


@pytest.mark.row("1.5", "1.6", "1.24", "B11")
def test_an_epoch_and_an_evaluation_weigh_every_example_the_same():
    def accuracy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        _, predicted = torch.max(outputs, 1)
        return (predicted == targets).sum(), len(targets)

    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": accuracy})
    program = ps.program(tiny_mlp(), objective, optim.sgd(0.0))
    data = batches(8, 8, 1)
    state, told = ps.run_epoch(program.init(device="cpu"), data, program.train_step)
    scores = ps.evaluate(state, data, program.eval_step)

    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    right = (tiny_mlp()(x).argmax(1) == y).float()
    naive = sum(part.mean().item() for part in right.split([8, 8, 1])) / 3
    assert scores["accuracy"] == pytest.approx(right.mean().item())
    assert scores["accuracy"] != pytest.approx(naive, abs=1e-3)
    assert float(told["accuracy"]) == pytest.approx(scores["accuracy"])
    assert float(told["loss"]) == pytest.approx(nn.functional.cross_entropy(tiny_mlp()(x), y).item())
    with pytest.raises(DataError, match="empty"):
        ps.evaluate(state, [], program.eval_step)


# --- a whole training -------------------------------------------------------------------------------------------------


@pytest.mark.row("1.8")
def test_nothing_is_written_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    fit(classifier(), {"train": batches(4), "eval": batches(4)}, epochs=2)
    assert list(tmp_path.iterdir()) == []
    fit(classifier(), {"train": batches(4), "eval": batches(4)}, epochs=2, snapshots="here")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.row("1.9", "1.10")
def test_every_second_epoch_is_kept_and_the_best_by_a_metric_of_ones_choice(tmp_path: Path):
    f1 = [0.1, 0.9, 0.3, 0.2, 0.3, 0.4]
    program = scripted(loss=[1.0] * 6, f1=f1)
    with ps.Snapshots(tmp_path, every_epochs=2, keep=None) as snapshots:
        result = fit(program, ONE, epochs=6, monitor="eval_f1", mode="max", snapshots=snapshots)
        assert snapshots.steps() == [1, 2, 4, 6]  # 1 was the best when it was written
        assert snapshots.best() == 2
    assert result.best == {"epoch": 2, "eval_f1": pytest.approx(0.9), "step": 2}


@pytest.mark.row("1.11", "B12", "0.19")
@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 4), (3, 8)])
def test_the_run_stops_when_as_many_epochs_in_a_row_as_the_patience_were_no_better(patience: int, epochs: int):
    program = scripted(loss=[3.0, 2.0, 2.0, 2.5, 1.9, 1.9, 1.9, 1.9, 1.9], other=[float(n) for n in range(9)])
    result = fit(program, ONE, epochs=9, monitor="eval_loss", early_stopping=patience)
    assert (result.epochs, result.stop_reason) == (epochs, "early_stopping")


@pytest.mark.row("1.12", "B16")
def test_callbacks_of_three_arguments_get_the_state_the_epoch_from_0_and_the_metrics():
    seen: list[tuple[int, float]] = []

    def log_metrics(state: ps.TrainState, epoch: int, values: dict[str, float]) -> None:
        assert isinstance(state, ps.TrainState)
        seen.append((epoch, values["train_loss"]))

    def each_epoch(callback: Callable[..., None]) -> Callable[[Any], None]:
        def on_event(event: Any) -> None:
            if isinstance(event, events.EpochEnd):
                callback(event.state, event.epoch - 1, dict(event.record))

        return on_event

    history = fit(classifier(), batches(4, 4), epochs=3, callbacks=[each_epoch(log_metrics)]).history
    assert seen == list(enumerate(history["train_loss"]))
    assert history["epoch"] == [1, 2, 3]


@pytest.mark.row("B17")
def test_evaluation_history_decision_callbacks_snapshot_and_stop_come_in_this_order(tmp_path: Path):
    seen: list[str] = []

    def note(event: Any) -> None:
        name = type(event).__name__
        if isinstance(event, events.EpochEnd):
            assert event.record["eval_loss"] is not None
            assert str(event.epoch) not in {path.name for path in tmp_path.iterdir()}
            name += f" {event.improved} {event.stopping}"
        seen.append(name)

    program = scripted(loss=[2.0, 2.0])
    fit(program, ONE, epochs=9, monitor="eval_loss", early_stopping=1, snapshots=tmp_path, callbacks=[note])
    epoch = ["StepEnd", "EvalStepEnd", "EvalEnd"]
    first, last = [*epoch, "EpochEnd True None", "Saved"], [*epoch, "EpochEnd False early_stopping", "Saved"]
    assert seen == ["FitStart", *first, *last, "FitEnd"]


@pytest.mark.row("B9")
def test_the_direction_is_known_for_a_loss_and_asked_for_otherwise():
    values = [0.2, 0.5, 0.4]
    program = scripted(loss=values, error=values, f1=values)
    best = {name: fit(program, ONE, epochs=3, monitor=name).best for name in ("eval_loss", "eval_error")}
    assert [found["epoch"] for found in best.values() if found] == [1, 1]
    with pytest.raises(ConfigError, match=r"monitor='eval_f1' does not say.*mode=\"max\""):
        fit(program, ONE, epochs=3, monitor="eval_f1")
    found = fit(program, ONE, epochs=3, monitor="eval_f1", mode="max").best
    assert found is not None
    assert found["epoch"] == 2


@pytest.mark.row("B10")
def test_without_an_evaluation_loader_nothing_is_best_unless_the_training_loss_is_asked_for():
    data = {"train": batches(4, 4)}
    assert fit(classifier(), data, epochs=2).best is None
    found = fit(classifier(), data, epochs=2, monitor="train_loss").best
    assert found is not None
    assert found["epoch"] == 2
    with pytest.raises(ConfigError, match=r"monitor='eval_loss' is not among the metrics"):
        fit(classifier(), data, epochs=2, monitor="eval_loss")


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.row("1.14", "1.15")
def test_a_checkpoint_has_its_epoch_and_metric_and_is_loaded_wholly_or_the_weights_alone(tmp_path: Path):
    program = classifier(optim.adam(0.1))
    fresh = program.init(device="cpu")
    trained, _ = ps.run_epoch(fresh, batches(4, 4), program.train_step)
    with ps.Snapshots(tmp_path) as snapshots:
        snapshots.save(2, trained, metrics={"eval_loss": 0.25}, meta={"epoch": 1})
        whole = snapshots.restore(fresh)
        weights = snapshots.restore(fresh, only="params").state
    assert (whole.step, whole.metrics, whole.meta) == (2, {"eval_loss": 0.25}, {"epoch": 1})
    assert_trees_close(whole.state, trained, exact=True)
    assert_trees_close(weights.params, trained.params, exact=True)
    assert_trees_close(weights.buffers, trained.buffers, exact=True)
    assert_trees_close(weights.opt_state, fresh.opt_state, exact=True)
    with pytest.raises(NotFound, match=r"no snapshot of step 3 .*one of: 2"):
        snapshots.restore(fresh, step=3)


# --- what subclasses replace ------------------------------------------------------------------------------------------


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.row("1.20", "1.21", "B14")
def test_weight_decay_and_clipping_go_to_their_builders_and_to_nobody_else():
    settings = SimpleNamespace(num_epochs=1, weight_decay=0.5, max_grad_norm=0.25, scheduler_step_per_batch=True)
    clip = optim.clip_by_global_norm(settings.max_grad_norm)
    batch = batches(8)
    clipped = fit(classifier(optim.chain(clip, optim.sgd(1.0))), batch, config=settings).state.params
    start = {name: p.detach() for name, p in tiny_mlp().named_parameters()}
    moved = float(optim.global_norm({name: value - start[name] for name, value in clipped.items()}))
    assert moved == pytest.approx(0.25, rel=1e-4)

    decayed = fit(classifier(optim.adamw(0.1, weight_decay=settings.weight_decay)), batch, config=settings).state.params
    plain = fit(classifier(optim.adamw(0.1, weight_decay=0.0)), batch, config=settings).state.params
    for name, value in plain.items():
        torch.testing.assert_close(decayed[name], value - 0.1 * 0.5 * start[name])
    with pytest.raises(ConfigError, match=r"'weight_decay' is not a setting of fit.*cure: optim.adamw"):
        fit(classifier(), batch, config=vars(settings))
    with pytest.raises(ConfigError, match=r"'scheduler_step_per_batch' is not.*cure: schedules.per_epoch"):
        fit(classifier(), batch, config={"num_epochs": 1, "scheduler_step_per_batch": True})


@pytest.mark.row("1.22", "1.23", "B13")
def test_one_word_says_whether_a_schedule_goes_by_the_batch_or_by_the_epoch():
    def rates(schedule: Any) -> list[float]:
        seen: list[float] = []

        def note(event: Any) -> None:
            if isinstance(event, events.StepEnd):
                seen.append(float(event.metrics["lr"]))

        fit(classifier(optim.sgd(schedule)), batches(4, 4, 4), epochs=2, callbacks=[note])
        return seen

    halving = schedules.exponential(0.8, 0.5)
    assert rates(halving) == pytest.approx([0.8 * 0.5**n for n in range(6)])
    assert rates(schedules.per_epoch(halving, updates_per_epoch=3)) == pytest.approx([0.8] * 3 + [0.4] * 3)

    theirs = torch.optim.SGD([torch.zeros(1)], lr=0.8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=1.0, total_steps=6)
    expected = []
    for _ in range(6):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        scheduler.step()
    kind = torch.optim.lr_scheduler.OneCycleLR
    ours = schedules.from_torch_scheduler(kind, 0.8, steps=6, max_lr=1.0, total_steps=6, cycle_momentum=False)
    assert rates(ours) == pytest.approx(expected)


@pytest.mark.row("1.26")
def test_the_largest_batch_is_found_and_larger_ones_are_made_of_micro_batches():
    program, seen = classifier(), []
    state = program.init(device="cpu")
    before = ps.clone(state)

    def small_machine(error: Exception) -> Any:
        def step(state: ps.TrainState, batch: Batch) -> Any:
            seen.append(len(batch[0]))
            if len(batch[0]) > 24:
                raise error
            return program.train_step(state, batch)

        return step

    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("you can't allocate memory"),
        MemoryError(),
    ):
        seen.clear()
        assert ps.find_batch_size(small_machine(error), state, vector_batch(4)) == 16
        assert seen == [4, 4, 8, 8, 16, 16, 32]
    assert_trees_close(state, before, exact=True)
    assert ps.find_batch_size(program.train_step, state, vector_batch(4), most=9) == 8
    with pytest.raises(ps.errors.ConfigError, match=r"most is 3, but the batch has 4 rows .*most=4 or more"):
        ps.find_batch_size(program.train_step, state, vector_batch(4), most=3)
    with pytest.raises(ValueError, match="another"):
        ps.find_batch_size(small_machine(ValueError("another")), state, vector_batch(16))
    with pytest.raises(MemoryError):
        ps.find_batch_size(small_machine(MemoryError()), state, vector_batch(64))
    with pytest.raises(DataError, match="3 rows in 0 and 4 rows in 1"):
        ps.find_batch_size(program.train_step, state, (torch.ones(3, 4), torch.zeros(4)))

    whole, _ = program.train_step(state, vector_batch(32))
    parts = classifier(microbatches=2)
    same, _ = parts.train_step(parts.init(device="cpu"), vector_batch(32))
    assert_trees_close(same.params, whole.params)
    assert fit(classifier(microbatches=2, accumulate=2, precision="bf16-mixed"), batches(8, 8), epochs=1).epochs == 1


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.row("1.28")
def test_the_log_says_how_fast_it_goes_and_how_much_of_it_is_waiting(monkeypatch: pytest.MonkeyPatch):
    from purestep.data import device
    from purestep.loop import accounting

    clock = 0.0
    for module in (accounting, device):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))

    class Slow:
        """Three seconds a batch."""

        def __iter__(self) -> Iterator[Batch]:
            nonlocal clock
            for batch in batches(4, 4, 4, 4):
                clock += 3.0
                yield batch

    def train_step(state: Any, batch: Any) -> Any:
        nonlocal clock
        clock += 1.0
        return state, {"loss": ps.Mean(torch.ones(()), torch.ones(()))}

    seen: list[events.Logged] = []

    def note(event: Any) -> None:
        if isinstance(event, events.Logged):
            seen.append(event)

    program = ps.Program(train_step)
    fields = {"epochs": 1, "log_every": 2, "progress": False, "check_every": None}
    ps.fit({"w": torch.zeros(())}, Slow(), program, callbacks=[note], **fields)
    assert [round(line.wait_fraction, 2) for line in seen] == [0.75, 0.75]
    assert [line.steps_per_second for line in seen] == pytest.approx([0.25, 0.25])
