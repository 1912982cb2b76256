"""A guide to trainers with hooks and several models, by feature: its rows, and what it gets wrong or leaves open."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from shipped import EXAMPLES, load
from systems.trainers import Batch, batches, classifier, fit
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import purestep as ps
from purestep import events, metrics, optim, schedules, tree
from purestep.errors import Mismatch, RankError, StepContractError


@pytest.fixture
def gan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`examples/gan.py`, which imports `digits.py` beside it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return load("gan")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The fields that the guide's configuration has."""

    n_epochs: int = 3
    compile_model: bool = False
    learning_rate: float = 0.1
    weight_decay: float = 0.01
    g_lr: float = 1e-3
    d_lr: float = 1e-3
    gradient_clip_val: float | None = None
    train_data_dir: str = "train"
    val_data_dir: str = "val"
    train_batch_size: int = 4
    val_batch_size: int = 8
    num_workers: int = 0


# --- steps and loops --------------------------------------------------------------------------------------------------


@pytest.mark.row("2.1", "2.2", "2.6", "2.7", "2.23")
def test_five_functions_and_a_configuration_make_a_trainer_and_its_pieces_a_loop_of_ones_own(tmp_path: Path):
    settings, logged = Settings(), tmp_path / "log.jsonl"
    train, val = batches(4, 4, 2), batches(8)
    model_program = classifier(optim.adamw(settings.learning_rate, weight_decay=settings.weight_decay))
    program = ps.Program(
        train_step=model_program.train_step, eval_step=model_program.eval_step, init=model_program.init
    )

    # The loop of the guide: an epoch, validation where it is due, a line of the log.
    state, log, rows = program.init(device="cpu"), ps.sinks.jsonl(logged), []
    log(events.FitStart(state, 0, 0, settings.n_epochs, None, len(train), None, False))
    for epoch in range(settings.n_epochs):
        state, told = ps.run_epoch(state, train, program.train_step, epoch=epoch)
        row = {"epoch": epoch + 1, **metrics.compute(told, prefix="train_")}
        if (epoch + 1) % 2 == 0:
            row |= {f"val_{name}": value for name, value in ps.evaluate(state, val, program.eval_step).items()}
        log(events.EpochEnd(state, epoch + 1, int(state.updates), row, False, None))
        rows.append(row)
    log.close()

    result = fit(program, (train, val), config=settings, evaluate_every=2.0)
    assert_trees_close(state, result.state, exact=True)
    assert [row.get("val_loss") for row in rows] == result.history["val_loss"]
    assert [row["train_loss"] for row in rows] == pytest.approx(result.history["train_loss"])
    written = [json.loads(line) for line in logged.read_text().splitlines()]
    assert [line.get("val_loss") for line in written] == result.history["val_loss"]


@pytest.mark.row("2.3", "2.4", "2.5", "B18")
def test_a_step_of_ones_own_returns_what_is_logged_and_nobody_calls_backward():
    def training_step(model: ps.Model, batch: Batch) -> ps.Loss:
        inputs, targets = batch
        outputs = model(inputs)
        mean = nn.functional.cross_entropy(outputs, targets)
        confidence = outputs.softmax(1).max(1).values
        return ps.Loss(mean, len(targets), {"confidence": ps.Mean(confidence.sum(), torch.tensor(float(len(targets))))})

    program = ps.program(tiny_mlp(), training_step, optim.sgd(0.1), precision="16-mixed")
    history = fit(program, (batches(4, 4), batches(4)), epochs=2).history
    assert {"train_loss", "train_confidence", "val_loss", "val_confidence", "lr", "scale"} <= set(history)

    state = program.init(device="cpu")
    new, told = program.train_step(state, batches(4)[0])  # scaled, differentiated, unscaled, applied, emptied
    assert (int(new.step), int(new.updates), float(told["scale"])) == (1, 1, 2.0**16)
    assert all(leaf.grad is None for leaf in tree.leaves((state, new)))
    plain = ps.program(tiny_mlp(), training_step, optim.sgd(0.1), precision="32-true")
    unscaled, _ = plain.train_step(plain.init(device="cpu"), batches(4)[0])
    assert_trees_close(new.params, unscaled.params, rtol=2e-2, atol=2e-3)


@pytest.mark.row("B20")
def test_what_a_step_returns_keeps_no_graph_alive():
    program = classifier()
    new, told = program.train_step(program.init(device="cpu"), batches(4)[0])
    assert all(leaf.grad_fn is None and not leaf.requires_grad for leaf in tree.leaves((new, told)))

    def leaks(state: Any, batch: Any) -> Any:
        return state, {"loss": ps.Mean((state["w"].clone().requires_grad_() * 2).sum(), torch.ones(()))}

    with pytest.raises(StepContractError, match=r"metrics/loss/total: has an autograd graph"):
        ps.testing.assert_pure(leaks, {"w": torch.ones(2)}, None)


@pytest.mark.row("2.21")
def test_callbacks_see_every_training_and_validation_batch_in_order():
    seen: list[tuple[Any, ...]] = []

    class MyCallback:
        """The guide's two hooks."""

        def on_train_batch_end(self, state: Any, outputs: ps.Metrics, batch: Batch, batch_idx: int) -> None:
            seen.append(("train", batch_idx, len(batch[0]), round(float(outputs["loss"]), 3)))

        def on_validation_batch_end(self, state: Any, outputs: ps.Metrics, batch: Batch, batch_idx: int) -> None:
            seen.append(("val", batch_idx, len(batch[0]), round(float(outputs["loss"]), 3)))

        def __call__(self, event: Any) -> None:
            if isinstance(event, events.StepEnd):
                self.on_train_batch_end(event.state, event.metrics, event.batch, event.batch_index)
            if isinstance(event, events.EvalStepEnd):
                self.on_validation_batch_end(event.state, event.metrics, event.batch, event.index)

    fit(classifier(), (batches(4, 2), batches(3, 1)), epochs=2, callbacks=[MyCallback(), lambda e: seen.append(())])
    kinds = [entry[:3] for entry in seen if entry]
    epoch = [("train", 0, 4), ("train", 1, 2), ("val", 0, 3), ("val", 1, 1)]
    assert kinds == epoch * 2
    assert all(seen[place + 1] == () for place, entry in enumerate(seen) if entry)  # in the order of the list
    assert seen[1] != seen[0]


@pytest.mark.row("2.22")
def test_a_training_can_be_unit_tested_and_timed():
    program, data = classifier(), batches(4, 4)
    state = program.init(device="cpu")
    ps.testing.assert_pure(program.train_step, state, data[0])
    counter = []

    def impure(state: ps.TrainState, batch: Batch) -> Any:
        counter.append(1)
        new, told = program.train_step(state, batch)
        return new._replace(step=new.step + len(counter)), told

    with pytest.raises(StepContractError, match="state/step: the second call"):
        ps.testing.assert_pure(impure, state, data[0])
    report = ps.benchmark(program.train_step, state, data[0], against=impure, calls=1, blocks=2)
    assert [timing.name for timing in report.timings] == ["train_step", "impure"]
    assert report.ratio is not None


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("2.8", "B21")
def test_one_model_or_several_are_on_the_device_without_anybody_moving_them(gan: Any):
    program = ps.program(tiny_convnet(), ps.supervised(nn.CrossEntropyLoss()), optim.adam(0.1), ema=0.9)
    state = program.init(device="meta")
    assert {leaf.device.type for path, leaf in tree.with_paths(state) if path != "key"} == {"meta"}
    rivals = gan.rivals(gan.Config(width=8), 4, lambda images: images)
    both = rivals.init(0, "meta")
    assert {leaf.device.type for path, leaf in tree.with_paths(both) if "key" not in path} == {"meta"}


@pytest.mark.row("2.9", "2.12", "B27")
def test_two_models_have_their_own_counters_schedules_batches_and_buffers(gan: Any):
    program = gan.rivals(gan.Config(width=8, ratio=3, learning_rate=0.1), 10, lambda images: images)
    state = program.init(0, "cpu")
    batch = [torch.rand(12, 1, 8, 8), torch.arange(12) % 10]
    ps.testing.assert_pure(program.train_step, state, batch)
    new, told = program.train_step(state, batch)
    assert (int(new.generator.updates), int(new.critic.updates)) == (1, 3)
    assert (int(new.generator.step), int(new.critic.step)) == (1, 3)
    assert float(told["generator_lr"]) == pytest.approx(0.1)
    assert float(told["critic_lr"]) == pytest.approx((0 + 0.1 + 0.0999) / 3, rel=0.05)  # its warm-up is one update
    for old, young in zip(state, new, strict=True):  # each wrote its own running statistics as often as it was trained
        name = next(name for name in old.buffers if name.endswith("num_batches_tracked"))
        per_update = 2 if young is new.critic else 1  # the critic looks at scans and at drawings
        assert int(young.buffers[name]) == per_update * int(young.updates)


@pytest.mark.slow
@pytest.mark.row("2.6", "2.9", "2.12", "2.20")
def test_the_example_trains_both_and_goes_on_where_it_was(gan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"epochs": 3, "width": 16, "batch_size": 128, "judge_epochs": 1}
    whole = gan.main(gan.Config(runs=tmp_path / "whole", **small))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "15 updates of the generator, 30 of the critic",
        f"{100 * whole:.0f} % of the drawings recognised with a confidence above 0.9",
    ]
    epochs = [line for line in lines if line.startswith("epoch ") and "critic_loss" in line]
    assert len(epochs) == 3

    run_epoch, calls = gan.ps.run_epoch, []

    def fails_in_the_second(*args: Any, **options: Any) -> Any:
        calls.append(options["epoch"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run_epoch(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gan.ps, "run_epoch", fails_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            gan.main(gan.Config(runs=tmp_path / "parts", **small))
    capsys.readouterr()
    assert gan.main(gan.Config(runs=tmp_path / "parts", **small)) == whole
    again = [line for line in capsys.readouterr().out.splitlines() if "critic_loss" in line]
    assert again == epochs[1:]


@pytest.mark.row("B27")
def test_no_gradient_and_no_buffer_crosses_from_one_network_to_the_other():
    frozen = ps.program(tiny_convnet(dropout=0.0), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    other = frozen.init(device="cpu")
    x, y = image_batch(8)

    def objective(model: ps.Model, batch: Batch, rival: ps.TrainState) -> ps.Loss:
        logits = model(batch[0]) + frozen.bind(rival, train=True)(batch[0])
        return ps.Loss(nn.functional.cross_entropy(logits, batch[1]), len(batch[1]), {})

    mine = ps.program(tiny_convnet(seed=1, dropout=0.0), objective, optim.sgd(0.1))
    before = ps.clone(other)
    new, _ = mine.train_step(mine.init(device="cpu"), (x, y), other)
    assert_trees_close(other, before, exact=True)
    assert set(new.params) == set(mine.init(device="cpu").params)
    assert int(next(v for k, v in new.buffers.items() if k.endswith("tracked"))) == 1


@pytest.mark.compile
@pytest.mark.row("2.10", "B22")
def test_compiling_changes_no_name(tmp_path: Path):
    program = classifier()
    compiled = fit(program, batches(4, 4), epochs=1, compile={"backend": "aot_eager"})
    eager = fit(program, batches(4, 4), epochs=1, compile=False)
    names = [name for name, _ in tiny_mlp().named_parameters()]
    assert list(compiled.state.params) == names
    assert_trees_close(compiled.state.params, eager.state.params)
    ps.export_weights(tmp_path / "model.pt", program, compiled.state)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sorted(saved) == sorted(names)
    assert not any("_orig_mod" in path for path in tree.paths(compiled.state))


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.row("2.11", "2.13", "B26")
def test_adamw_with_a_cosine_over_epochs_is_torchs_with_its_scheduler_stepped():
    epochs, data = 4, batches(4, 4)
    annealed = schedules.per_epoch(schedules.cosine(0.1, epochs), updates_per_epoch=len(data))
    result = fit(classifier(optim.adamw(annealed, weight_decay=0.05)), data, epochs=epochs)

    model = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    assert result.history["lr"] == pytest.approx(rates)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert_trees_close(result.state.params, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.row("2.18", "B19")
@pytest.mark.parametrize("precision", ["64-true", "16-mixed"])
def test_clipping_sees_the_unscaled_gradient_of_the_whole_window_once(precision: str):
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(1.0))
    parts = batches(2, 6)
    program = classifier(tx, precision=precision, accumulate=2)
    state = program.init(device="cpu")
    start = {name: value.double() for name, value in state.params.items()}
    for part in parts:
        state, told = program.train_step(state, part)
    step = {name: start[name] - value.double() for name, value in state.params.items()}
    assert float(optim.global_norm(step)) == pytest.approx(0.1, rel=1e-3)

    whole = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), tx, precision="64-true")
    joined = tuple(torch.cat(part) for part in zip(*parts, strict=True))
    expected, seen = whole.train_step(whole.init(device="cpu"), joined)
    loose = precision == "16-mixed"
    assert float(told["grad_norm"]) == pytest.approx(float(seen["grad_norm"]), rel=1e-2 if loose else 1e-6)
    for name, value in expected.params.items():
        close = {"rtol": 0.0, "atol": 2e-3 if loose else 1e-12}
        torch.testing.assert_close(state.params[name].double(), value.double(), **close)


# --- data and metrics -------------------------------------------------------------------------------------------------


def numbered(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), **options)


def read(loader: Any, epochs: int, seed: int = 0) -> list[list[int]]:
    """The items that each epoch of a run trains on."""
    seen: list[list[int]] = [[] for _ in range(epochs)]

    def note(event: Any) -> None:
        if isinstance(event, events.StepEnd):
            seen[event.epoch] += event.batch[0].tolist()

    def train_step(state: Any, batch: Any) -> Any:
        return state, {"loss": ps.Mean(torch.ones(()), torch.ones(()))}

    state = {"key": ps.rng.key(seed), "w": torch.zeros(())}
    ps.fit(state, loader, ps.Program(train_step), epochs=epochs, progress=False, callbacks=[note])
    return seen


@pytest.mark.row("2.14")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_and_a_validation_loader_with_sizes_and_workers(workers: int):
    settings = Settings(num_workers=workers)
    x, y = vector_batch(12)
    data = TensorDataset(x, y)
    train = DataLoader(data, settings.train_batch_size, shuffle=True, num_workers=settings.num_workers)
    val = DataLoader(data, settings.val_batch_size, shuffle=False, num_workers=settings.num_workers)
    sizes: dict[str, list[int]] = {"StepEnd": [], "EvalStepEnd": []}

    def note(event: Any) -> None:
        if type(event).__name__ in sizes:
            sizes[type(event).__name__].append(len(event.batch[0]))

    fit(classifier(), (train, val), epochs=1, callbacks=[note])
    assert sizes == {"StepEnd": [4, 4, 4], "EvalStepEnd": [8, 4]}


@pytest.mark.row("2.15", "B25")
def test_every_epoch_has_an_order_of_its_own_and_every_example_counts_once():
    sampler = DistributedSampler(range(10), num_replicas=1, rank=0, shuffle=True)  # pyright: ignore[reportArgumentType]
    for loader in (numbered(10, batch_size=4, shuffle=True), numbered(10, batch_size=4, sampler=sampler)):
        first, second, third = read(loader, 3)
        assert sorted(first) == sorted(second) == sorted(third) == list(range(10))
        assert len({tuple(first), tuple(second), tuple(third)}) == 3
        assert read(loader, 3) == [first, second, third]

    counted = ps.evaluate(
        torch.zeros(()),
        numbered(10, batch_size=4),
        lambda state, batch: {"seen": ps.Mean(torch.tensor(float(len(batch[0]))), torch.tensor(1 / 3))},
    )
    assert counted["seen"] == pytest.approx(10)  # nothing is padded


@pytest.mark.row("2.15", "B25")
def test_a_sampler_for_one_process_is_taken_and_one_for_several_is_refused(monkeypatch: pytest.MonkeyPatch):
    data = TensorDataset(*vector_batch(8))

    def loader(count: int) -> DataLoader[Any]:
        return DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=count, rank=count - 1))

    program = classifier()
    state = program.init(device="cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fit(program, (loader(1), loader(1)), epochs=1).epochs == 1
    for where, run in (
        ("train", lambda: fit(program, loader(2), epochs=1)),
        ("val", lambda: fit(program, (loader(1), loader(2)), epochs=1)),
        ("train", lambda: ps.run_epoch(state, loader(2), program.train_step)),
        ("evaluation", lambda: ps.evaluate(state, loader(2), program.eval_step)),
    ):
        with pytest.raises(RankError, match=rf"{where}: its DistributedSampler is for process 1 of 2.*shuffle=True"):
            run()

    monkeypatch.setenv("WORLD_SIZE", "2")
    for run in (
        lambda: fit(program, batches(4), epochs=1),
        lambda: ps.run_epoch(state, batches(4), program.train_step),
    ):
        with pytest.raises(RankError, match=r"this is one of 2 processes.*ps\.distribute.*without torchrun"):
            run()


# --- checkpoints and configuration ------------------------------------------------------------------------------------


@pytest.mark.row("2.20", "B23")
def test_a_checkpoint_holds_every_network_its_optimizer_and_the_configuration_and_no_pickle(gan: Any, tmp_path: Path):
    program = gan.rivals(gan.Config(width=8), 10, lambda images: images)
    batch = [torch.rand(8, 1, 8, 8), torch.arange(8)]
    state, _ = program.train_step(program.init(0, "cpu"), batch)
    settings = dataclasses.asdict(Settings())
    with ps.Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state, loop={"epoch": 1}, meta=settings)
    with ps.Snapshots(tmp_path, writer=False) as snapshots:
        found = snapshots.restore(program.init(5, "cpu"))
        assert_trees_close(found.state, state, exact=True)
        assert (found.loop, found.meta) == ({"epoch": 1}, settings)
        with pytest.raises(Mismatch, match="generator"):
            snapshots.restore(state.critic)
    resumed, _ = program.train_step(found.state, batch)
    assert_trees_close(resumed, program.train_step(state, batch)[0], exact=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(path.read_bytes()[:1] == b"\x80" or path.suffix in (".pkl", ".pt") for path in files)


@pytest.mark.row("B24")
@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_resumed_run_trains_on_each_batch_of_an_epoch_exactly_once(after: int, tmp_path: Path):
    data = batches(4, 4, 4)
    whole = fit(classifier(), data, epochs=3)
    seen: list[int] = []

    def note(event: Any) -> None:
        if isinstance(event, events.StepEnd):
            seen.append(event.epoch * 3 + event.batch_index)

    fit(classifier(), data, epochs=3, steps=after, snapshots=tmp_path, callbacks=[note])
    found = fit(classifier(), data, epochs=3, snapshots=tmp_path, callbacks=[note])
    assert seen == list(range(9))
    assert_trees_close(found.state, whole.state, exact=True)
