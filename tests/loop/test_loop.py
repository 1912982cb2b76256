"""fit and its pieces: what is composed, in which order it counts, and what a run leaves behind."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, library, nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import events, metrics, optim, schedules
from purestep.compile import MetricVector
from purestep.errors import ConfigError, DataError, NonFiniteError, StateError, StepContractError
from purestep.loop import metric_queue
from purestep.loop.loop_state import LoopState, from_json, to_json, with_row
from purestep.loop.metric_queue import MetricQueue, add_to
from purestep.loop.train_call import ready_program
from purestep.types import Mean, Program, TrainState

CRITERION = nn.CrossEntropyLoss()
fit = partial(ps.fit, progress=False)
Event = Any


def mlp(tx: optim.Transform | None = None, **options: Any) -> Program:
    objective = ps.supervised(CRITERION, metrics={"accuracy": metrics.accuracy})
    return ps.program(tiny_mlp(), objective, tx or optim.sgd(0.1, momentum=0.9), **options)


def convnet(**options: Any) -> Program:
    return ps.program(tiny_convnet(), ps.supervised(CRITERION), optim.sgd(0.05), **options)


def batches(count: int, rows: int = 8) -> list[Any]:
    return [vector_batch(rows, seed) for seed in range(count)]


def shuffled(rows: int = 28, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*image_batch(rows)), batch_size=batch_size, shuffle=True)


class Heard:
    """A callback that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


class Counting:
    """A list of batches that counts how often each was taken."""

    def __init__(self, source: list[Any]) -> None:
        self.source = source
        self.taken = 0

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Any:
        for batch in self.source:
            self.taken += 1
            yield batch


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_a_loop_of_ones_own_makes_the_same_bits() -> None:
    program, train, val = mlp(ema=0.9), batches(5), batches(2)
    result = fit(program.init(), {"train": train, "val": val}, program, epochs=3)

    state = program.init()
    history: dict[str, list[float]] = {"train_loss": [], "val_loss": []}
    for _ in range(3):
        total = metrics.empty()
        for batch in train:
            state, measured = program.train_step(state, ps.to_device(batch, state))
            total = metrics.merge(total, measured)
        scores = ps.evaluate(ps.view(state, "ema"), val, program.eval_step)
        history["train_loss"].append(metrics.compute(total)["loss"])
        history["val_loss"].append(scores["loss"])

    assert_trees_close(result.state, state, exact=True)
    assert result.history["val_loss"] == history["val_loss"]
    assert result.history["train_loss"] == pytest.approx(history["train_loss"], rel=1e-6)


def test_run_epoch_is_the_inside_of_fit() -> None:
    program, loader = convnet(), shuffled()
    state = program.init(seed=3)
    for epoch in range(2):
        state, measured = ps.run_epoch(state, loader, program.train_step, epoch=epoch, seed=3)
    result = fit(program.init(seed=3), loader, program, epochs=2)
    assert_trees_close(state, result.state, exact=True)
    assert float(measured["loss"]) == pytest.approx(result.history["train_loss"][-1], rel=1e-6)


def test_run_epoch_may_be_entered_in_the_middle() -> None:
    program, loader = convnet(), shuffled()
    whole, _ = ps.run_epoch(program.init(), loader, program.train_step, epoch=1)
    cut = DataLoader(loader.dataset, batch_size=4, shuffle=True)
    half = ps.run_epoch(program.init(), ps.open_feed(cut, first=3), program.train_step, epoch=1)[0]
    found, _ = ps.run_epoch(half, loader, program.train_step, epoch=1, start=3)
    assert_trees_close(found, whole, exact=True)


def test_run_epoch_raises_where_a_loss_was_not_finite_and_gives_the_state_before_it() -> None:
    program, (good, other) = mlp(), batches(2)
    spoilt = good[0] * float("nan"), good[1]
    with pytest.raises(NonFiniteError, match=r"at call 2; .*nonfinite=.skip.") as caught:
        ps.run_epoch(program.init(), [good, spoilt, other], program.train_step)
    expected, _ = program.train_step(program.init(), good)
    assert_trees_close(caught.value.state, expected, exact=True)
    windowed = mlp(accumulate=2)  # the window is open after the last batch
    with pytest.raises(NonFiniteError, match=r"at call 3"):
        ps.run_epoch(windowed.init(), [good, other, spoilt], windowed.train_step)
    skipping = mlp(nonfinite="skip")
    assert int(ps.run_epoch(skipping.init(), [good, spoilt, other], skipping.train_step)[0].updates) == 2


def test_a_step_of_ones_own_that_goes_on_at_a_loss_that_is_not_finite_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step(state: dict[str, Tensor], batch: Tensor) -> tuple[Any, Any]:
        return {"w": state["w"] + 1}, {"loss": Mean(batch.log(), torch.ones(()))}

    losses = [torch.tensor(x) for x in (1.0, -1.0, -1.0)]
    fit({"w": torch.zeros(())}, losses, Program(step), epochs=2, log_every=1)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the loss is nan up to epoch 1, batch 2" in told
    skipping = mlp(nonfinite="skip")  # a call that is skipped has weight 0
    caplog.clear()
    x, y = vector_batch()
    fit(skipping.init(), [(x * float("nan"), y), (x, y)], skipping, epochs=1)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_evaluate_weighs_by_what_a_mean_is_over() -> None:
    program = mlp()
    state = program.init()
    x, y = vector_batch(10)
    whole = ps.evaluate(state, [(x, y)], program.eval_step)
    parts = ps.evaluate(state, [(x[:7], y[:7]), (x[7:], y[7:])], program.eval_step)
    assert parts == pytest.approx(whole, rel=1e-6)
    assert set(whole) == {"loss", "accuracy"}


def test_evaluate_takes_a_step_without_an_index_and_watches() -> None:
    seen: list[int] = []

    def eval_step(state: Tensor, batch: Tensor) -> Any:
        return {"sum": Mean(state * batch, torch.ones(()))}

    found = ps.evaluate(
        torch.tensor(2.0),
        [torch.tensor(1.0), torch.tensor(2.0)],
        eval_step,
        watch=lambda batch, measured, index: seen.append(index),
    )
    assert found == {"sum": 3.0}
    assert seen == [0, 1]


def test_a_program_in_place_of_its_step_is_refused() -> None:
    program = mlp()
    with pytest.raises(ConfigError, match=r"^evaluate: the step is a Program.*cure: pass program\.eval_step\)"):
        ps.evaluate(program.init(), [vector_batch()], program)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^run_epoch: the step is a Program.*cure: pass program\.train_step\)"):
        ps.run_epoch(program.init(), [vector_batch()], program)  # pyright: ignore[reportArgumentType]


def test_evaluating_twice_gives_the_same_numbers_and_leaves_the_training_stream_alone() -> None:
    """A model that draws while it is evaluated (random masks), dropout in training, a shuffled loader."""

    def masked(model: Any, batch: Any) -> ps.Loss:
        keep = torch.rand(batch[0].shape) > 0.3
        loss = CRITERION(model(batch[0] * keep), batch[1])
        return ps.Loss(loss, torch.tensor(float(len(batch[1]))), {})

    program = ps.program(tiny_convnet(), masked, optim.sgd(0.05))
    state, val = program.init(), [image_batch(4, 9), image_batch(4, 10)]
    first = ps.evaluate(state, val, program.eval_step)
    assert ps.evaluate(state, val, program.eval_step) == first
    silent = fit(program.init(), shuffled(), program, epochs=2)
    often = fit(program.init(), {"train": shuffled(), "val": val}, program, epochs=2, evaluate_every=1)
    assert_trees_close(often.state, silent.state, exact=True)
    assert len(often.history["val_loss"]) == 14


# --- loaders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mapping", "pair", "list", "pair without", "iterable", "DataLoader"])
def test_loaders_come_in_several_forms(form: str) -> None:
    train, val = batches(3), batches(1)
    x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
    loaders: dict[str, Any] = {
        "mapping": {"train": train, "val": val},
        "pair": (train, val),
        "list": train,
        "pair without": (train, None),
        "iterable": {"train": Counting(train)},
        "DataLoader": DataLoader(TensorDataset(x, y), batch_size=8),
    }
    program = mlp()
    result = fit(program.init(), loaders[form], program, epochs=2)
    assert int(result.state.updates) == 6
    assert ("val_loss" in result.history) == (form in ("mapping", "pair"))
    assert_trees_close(result.state, fit(program.init(), train, program, epochs=2).state, exact=True)


def test_every_other_key_is_an_evaluation_loader_and_a_prefix() -> None:
    program = mlp()
    loaders = {"train": batches(4), "val": batches(2), "test": batches(1), "shifted": batches(1, rows=3)}
    history = fit(program.init(), loaders, program, epochs=1).history
    for name in ("val", "test", "shifted"):
        assert {f"{name}_loss", f"{name}_accuracy"} <= set(history)


def test_evaluation_loaders_have_intervals_of_their_own() -> None:
    program = mlp()
    loaders = {"train": batches(6), "val": batches(1), "test": batches(1)}
    every = {"val": 4, "test": 2.0}
    history = fit(program.init(), loaders, program, epochs=4, evaluate_every=every).history
    rows = list(zip(history["epoch"], history["step"], history["val_loss"], history["test_loss"], strict=True))
    found = [(epoch, step, val is not None, test is not None) for epoch, step, val, test in rows]
    assert found == [
        (1, 4, True, False),
        (1, 6, False, False),
        (2, 8, True, False),
        (2, 12, True, True),
        (3, 16, True, False),
        (3, 18, False, False),
        (4, 20, True, False),
        (4, 24, True, True),
    ]


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (None, [7, 14, 21, 28]),
        (1.0, [7, 14, 21, 28]),
        (2.0, [14, 28]),
        (0.5, [4, 7, 11, 14, 18, 21, 25, 28]),
        (1 / 3, [3, 6, 7, 10, 13, 14, 17, 20, 21, 24, 27, 28]),
        (10, [10, 20]),
        (7, [7, 14, 21, 28]),
        (100, []),
    ],
)
def test_evaluate_every_counts_updates_or_epochs_by_its_type(every: Any, steps: list[int]) -> None:
    program, heard = mlp(), Heard()
    loaders = {"train": batches(7), "val": batches(1)}
    fit(program.init(), loaders, program, epochs=4, evaluate_every=every, callbacks=[heard])
    assert [event.updates for event in heard.of(events.EvalEnd)] == steps


def test_a_fraction_of_a_loader_without_length_is_an_error_that_says_what_works() -> None:
    program = mlp()

    class Endless:
        def __iter__(self) -> Any:
            return iter(batches(3))

    with pytest.raises(ConfigError, match="evaluate_every=0.5 of a loader without length.*a number of updates"):
        fit(program.init(), {"train": Endless(), "val": batches(1)}, program, epochs=1, evaluate_every=0.5)


def test_an_interval_waits_for_the_accumulation_window() -> None:
    program, heard = mlp(accumulate=2), Heard()
    loaders = {"train": batches(6), "val": batches(1)}
    fit(program.init(), loaders, program, epochs=1, evaluate_every=2, callbacks=[heard], donate=False)
    assert [event.updates for event in heard.of(events.EvalEnd)] == [2]
    assert [int(event.state.step) for event in heard.of(events.EvalStepEnd)] == [4]


@pytest.mark.parametrize(
    ("every", "tail", "updates"),
    [
        (0.25, "step", [1, 2, 3, 4, 5, 6]),  # the marks lie at batches 3, 5, 8 and 10, the windows end at 4, 8 and 10
        (0.5, "step", [2, 3, 5, 6]),
        (0.3, "drop", [1, 2, 2, 3, 4, 4]),
        (0.5, "carry", [2, 2, 4, 5]),  # the windows of the second epoch end at 2, 6 and 10
    ],
)
def test_a_fraction_waits_for_the_accumulation_window_too(every: float, tail: Any, updates: list[int]) -> None:
    program, heard = mlp(accumulate=4, tail=tail), Heard()
    loaders = {"train": batches(10), "val": batches(1)}
    fit(program.init(), loaders, program, epochs=2, evaluate_every=every, callbacks=[heard])
    assert [event.updates for event in heard.of(events.EvalEnd)] == updates


# --- limits -----------------------------------------------------------------------------------------------------------


def test_epochs_limit_a_run() -> None:
    program = mlp()
    result = fit(program.init(), batches(3), program, epochs=4)
    assert (result.epochs, result.stop_reason, int(result.state.updates)) == (4, "epochs", 12)


@pytest.mark.parametrize(("steps", "epochs"), [(4, 1), (6, 2), (7, 2)])
def test_steps_limit_a_run_in_the_middle_of_an_epoch(steps: int, epochs: int) -> None:
    program = mlp()
    result = fit(program.init(), {"train": batches(3), "val": batches(1)}, program, steps=steps)
    assert (int(result.state.updates), result.epochs, result.stop_reason) == (steps, epochs, "steps")
    assert result.history["step"][-1] == steps
    assert result.history["val_loss"][-1] is not None  # the last state is scored


def test_steps_are_optimizer_updates_and_not_calls() -> None:
    program = mlp(accumulate=3)
    result = fit(program.init(), batches(4), program, steps=3)
    # 3 + 1 micro-batches an epoch, the second window closed by the flush.
    assert (int(result.state.updates), int(result.state.step)) == (3, 8)


def test_a_skipped_update_does_not_count() -> None:
    program = mlp(nonfinite="skip")
    train = batches(5)
    train[1] = (train[1][0] * torch.inf, train[1][1])
    result = fit(program.init(), train, program, steps=6)
    assert (int(result.state.updates), int(result.state.step), result.stop_reason) == (6, 8, "steps")
    assert result.history["step"] == [4, 6]


def test_minus_one_is_no_limit_and_some_limit_is_needed() -> None:
    program = mlp()
    result = fit(program.init(), batches(2), program, epochs=-1, steps=5)
    assert (int(result.state.updates), result.stop_reason) == (5, "steps")
    with pytest.raises(ConfigError, match="nothing limits the run.*epochs=10"):
        fit(program.init(), batches(2), program)


def test_max_time_ends_a_run_and_the_minima_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(Counting):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                now[0] += 1.0  # a second a batch
                yield batch

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    program = mlp()
    result = fit(program.init(), Slow(batches(4)), program, epochs=-1, max_time=6.0)
    assert (int(result.state.updates), result.stop_reason) == (6, "max_time")
    now[0] = 0.0
    held = fit(program.init(), Slow(batches(4)), program, epochs=-1, max_time=6.0, min_steps=11)
    assert (int(held.state.updates), held.stop_reason) == (11, "max_time")
    now[0] = 0.0
    held = fit(program.init(), Slow(batches(4)), program, epochs=-1, max_time=6.0, min_epochs=2)
    assert (int(held.state.updates), held.epochs) == (8, 2)


def test_a_run_that_is_over_returns_what_there_is(tmp_path: Path) -> None:
    program = mlp()
    loaders = {"train": batches(3), "val": batches(1)}
    first = fit(program.init(), loaders, program, epochs=3, snapshots=tmp_path / "run")
    again = fit(program.init(), loaders, program, epochs=2, snapshots=tmp_path / "run")
    assert_trees_close(again.state, first.state, exact=True)
    assert (again.best, again.epochs, again.history, again.stop_reason) == (first.best, 3, first.history, "epochs")


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "updates", "steps", "windows"),
    [("step", [3, 6], 16, [3, 3, 1, 3, 3, 1]), ("carry", [2, 4], 14, [3, 3, 3, 3]), ("drop", [2, 4], 16, [3, 3] * 2)],
)
def test_the_tail_of_an_epoch(tail: Any, updates: list[int], steps: int, windows: list[int]) -> None:
    """k=3, 7 batches: a window of one batch is left, and divided by its own weight (B2)."""
    program = mlp(accumulate=3, tail=tail)
    train = batches(7)
    result = fit(program.init(), train, program, epochs=2)
    assert result.history["step"] == updates
    assert int(result.state.step) == steps
    whole = mlp()
    expected, taken = whole.init(), [batch for _ in range(2) for batch in train]
    for size in windows:
        parts, taken = taken[:size], taken[size:]
        if tail == "drop" and len(taken) in (8, 1):
            taken = taken[1:]
        expected, _ = whole.train_step(expected, tuple(map(torch.cat, zip(*parts, strict=True))))
    assert_trees_close(result.state.params, expected.params, rtol=1e-5, atol=1e-6)


def test_a_tail_needs_no_length() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(batches(5))

    program = mlp(accumulate=2)
    result = fit(program.init(), Stream(), program, epochs=2)
    assert result.history["step"] == [3, 6]


# --- what a run leaves behind -----------------------------------------------------------------------------------------


def test_the_history_has_a_column_for_everything_and_a_row_an_epoch() -> None:
    program = mlp(optim.adamw(schedules.linear(1e-2, 0.0, transition_steps=9)))
    result = fit(program.init(), {"train": batches(3), "val": batches(1)}, program, epochs=3)
    assert list(result.history) == [
        *("epoch", "step", "train_accuracy", "train_loss", "grad_norm", "lr", "val_accuracy", "val_loss")
    ]
    assert {len(column) for column in result.history.values()} == {3}
    assert result.history["epoch"] == [1, 2, 3]
    # The rate that the last update of the epoch used, not that of the next one (B50).
    assert result.history["lr"] == pytest.approx([1e-2 * (1 - count / 9) for count in (2, 5, 8)])
    json.dumps(result.history, allow_nan=False)


def test_groups_and_scale_have_columns_too() -> None:
    tx = optim.partition({"slow": optim.sgd(0.01), "fast": optim.sgd(0.1)}, [("^0", "slow"), ("", "fast")])
    program = mlp(tx, precision="16-mixed")
    history = fit(program.init(), batches(2), program, epochs=1).history
    assert history["lr/slow"] == pytest.approx([0.01])
    assert history["lr/fast"] == pytest.approx([0.1])
    assert history["scale"] == [2.0**16]


def test_train_loss_is_weighted_by_rows() -> None:
    program = mlp(optim.sgd(0.0))
    x, y = vector_batch(9)
    result = fit(program.init(), [(x[:8], y[:8]), (x[8:], y[8:])], program, epochs=1)
    expected = float(program.eval_step(program.init(), (x, y))["loss"])
    assert result.history["train_loss"] == pytest.approx([expected], rel=1e-6)


def test_vector_metrics_have_a_column_an_entry_and_their_mean() -> None:
    objective = ps.supervised(CRITERION, metrics={"recall": partial(metrics.recall, average="macro")})
    program = ps.program(tiny_mlp(), objective, optim.sgd(0.1))
    history = fit(program.init(), {"train": batches(2), "val": batches(1)}, program, epochs=1).history
    entries = [history[f"val_recall[{index}]"][0] for index in range(3)]
    assert history["val_recall"][0] == pytest.approx(sum(entries) / 3)


def test_the_summary_is_the_best_epoch_and_the_number_of_epochs() -> None:
    program = mlp()
    result = fit(program.init(), {"train": batches(3), "val": batches(1)}, program, epochs=4)
    best = min(result.history["val_loss"])
    assert result.summary() == {
        "best": {"epoch": result.history["val_loss"].index(best) + 1, "val_loss": best},
        "epochs": 4,
    }
    assert result.best["step"] == 3 * result.summary()["best"]["epoch"]


def test_without_an_evaluation_loader_there_is_no_best() -> None:
    program = mlp()
    result = fit(program.init(), batches(2), program, epochs=1)
    assert (result.best, result.summary()) == (None, {"best": None, "epochs": 1})


def test_training_loss_is_monitored_where_it_is_asked_for() -> None:
    program = mlp()
    result = fit(program.init(), batches(3), program, epochs=3, monitor="train_loss")
    assert result.best["train_loss"] == min(result.history["train_loss"])


@pytest.mark.parametrize("every", [1, 3, 64])
def test_sums_are_the_same_bits_whatever_arrives_together(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_queue, "EVERY", every)
    calls = [{"a": metrics.as_mean(torch.rand(()), 3)} for _ in range(5)]
    calls += [{"a": metrics.as_mean(torch.rand(()), 2), "b": metrics.as_mean(torch.rand(2), torch.ones(2))}] * 4
    calls += [{}, {"b": metrics.as_mean(torch.rand(2).double(), torch.ones(2))}]
    expected: dict[str, tuple[float, float]] = {}
    for call in calls:
        for name, mean in call.items():
            for index, (total, weight) in enumerate(zip(mean.total.view(-1), mean.weight.view(-1), strict=True)):
                key = name if mean.total.numel() == 1 else f"{name}[{index}]"
                before = expected.get(key, (0.0, 0.0))
                expected[key] = before[0] + total.item(), before[1] + weight.item()
    queue, found = MetricQueue(), {}
    for tag, call in enumerate(calls):
        queue.add(tag, call)
        for rows in queue.arrived(wait=False):
            add_to(found, rows)
    late = queue.arrived(wait=True)
    assert [tag for rows in late for tag in rows.tags] == list(range(len(calls) - len(calls) % every, len(calls)))
    for rows in late:
        add_to(found, rows)
    assert found == expected


def test_vectors_of_a_compiled_step_and_means_of_a_flush_are_copied_apart() -> None:
    queue, found = MetricQueue(), {}
    columns = (("loss", 0, 1),)
    queue.add(1, MetricVector(torch.tensor([3.0, 1.0]), columns))
    queue.add(2, {"loss": ps.Mean(torch.tensor(5.0), torch.tensor(2.0))})
    queue.add_to(found, wait=True)
    assert found == {"loss": (8.0, 3.0)}


@pytest.mark.parametrize("weight", [torch.ones(2), torch.ones((), dtype=torch.complex64), 3])
def test_metrics_that_change_are_checked_at_their_call(weight: Any) -> None:
    queue, found = MetricQueue(), {}
    queue.add(1, {"loss": ps.Mean(torch.tensor(3.0), torch.tensor(1.0))})
    with pytest.raises(StepContractError, match="train_step: metric 'loss' is a Mean of"):
        queue.add(2, {"loss": ps.Mean(torch.tensor(3.0), weight)})
    queue.add_to(found, wait=True)
    assert found == {"loss": (3.0, 1.0)}


def test_a_copy_from_a_device_is_read_a_fixed_number_of_calls_after_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read waits for a copy that has not arrived; `query` is never called."""
    event = SimpleNamespace(waits=0)
    event.synchronize = lambda: setattr(event, "waits", event.waits + 1)
    monkeypatch.setattr(metric_queue, "_to_host", lambda numbers: (numbers, event))
    monkeypatch.setattr(metric_queue, "EVERY", 2)
    queue, read = MetricQueue(), dict[int, list[Any]]()
    for call in range(1, 13):
        queue.add(call, {"loss": ps.Mean(torch.ones(()), torch.ones(()))})
        tags = [tag for rows in queue.arrived(wait=False) for tag in rows.tags]
        read |= {call: tags} if tags else {}
    assert read == {
        2 + metric_queue.LAG: [1, 2],
        4 + metric_queue.LAG: [3, 4],
        6 + metric_queue.LAG: [5, 6],
        8 + metric_queue.LAG: [7, 8],
    }
    assert event.waits == 4
    assert [tag for rows in queue.arrived(wait=True) for tag in rows.tags] == list(range(9, 13))


class Watched(list[Any]):
    """Batches, and how often the garbage collector has run when the one at an index is taken."""

    def __init__(self, source: list[Any], *marks: int) -> None:
        super().__init__(source)
        self.marks = dict.fromkeys(marks, 0)

    def __getitem__(self, index: Any) -> Any:
        if index in self.marks:
            self.marks[index] = gc.get_stats()[0]["collections"]
        return super().__getitem__(index)


def collections(leave: Callable[[Any], Any] | None = None) -> int:
    """Of 1,000 compiled steps."""
    program = mlp()
    train = Watched(batches(1) * 1500, 400, 1400)
    stats = {"callbacks": [leave]} if leave else {}
    fit(program.init(), train, program, epochs=1, compile={"backend": "aot_eager"}, sinks=[], **stats)
    return train.marks[1400] - train.marks[400]


@pytest.mark.compile
def test_steps_leave_nothing_to_the_garbage_collector() -> None:
    # It would look at all that torch has loaded: a tenth of a second, some time in a run of steps of 100 us.
    left: list[Any] = []
    assert collections() < 5  # one or two, where objects of before had nearly set one off; with a tuple a number, 20
    assert collections(lambda event: left.extend([event] for _ in range(20))) > 20


def test_records_go_through_json() -> None:
    loop = LoopState(
        epoch=2,
        batch=3,
        calls=9,
        updates=4,
        interval={"loss": (float("inf"), 3.0), "x": (float("nan"), 1.0)},
        line={"loss": (0.1, 2.0)},
        last={"lr": 0.1},
        computed={},
        injected={},
        history=with_row(with_row({}, {"epoch": 1, "a": 1.0}), {"epoch": 2, "b": float("nan")}),
    )
    stored, history = json.loads(json.dumps([to_json(loop), loop.history], allow_nan=False))
    best = {**stored["best"], "of a later version": 1}
    found = from_json({**stored, "best": best, "of a later version": 1}, history)
    assert repr(found._replace(history=dict(found.history))) == repr(loop)
    assert found.history == {"epoch": [1, 2], "a": [1.0, None], "b": [None, None]}
    del stored["line"]  # as earlier versions wrote it
    earlier = from_json(stored, history)
    assert not earlier.line
    assert repr(earlier._replace(line={})) == repr(found._replace(line={}))


# --- which weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [None, "ema", "params"])
def test_evaluation_takes_the_average_where_there_is_one(on: Any) -> None:
    program, val = mlp(ema=0.9), batches(1)
    result = fit(program.init(), {"train": batches(4), "val": val}, program, epochs=2, evaluate_on=on)
    view = "params" if on == "params" else "ema"
    other = "ema" if on == "params" else "params"
    found = result.history["val_loss"][-1]
    assert found == ps.evaluate(ps.view(result.state, view), val, program.eval_step)["loss"]
    assert found != ps.evaluate(ps.view(result.state, other), val, program.eval_step)["loss"]


def test_an_average_that_does_not_exist_cannot_be_evaluated() -> None:
    program = mlp()
    with pytest.raises(ConfigError, match=r'evaluate_on="ema", but the state has no average.*ema=0.999'):
        fit(program.init(), batches(1), program, epochs=1, evaluate_on="ema")


# --- states and programs of one's own ---------------------------------------------------------------------------------


def test_a_state_may_be_a_plain_dict_and_a_program_a_step_alone() -> None:
    def step(state: dict[str, Tensor], batch: Any) -> Any:
        x, y = batch
        error = x @ state["w"] - y
        new = {"w": state["w"] - 0.1 * x.T @ error / len(y), "n": state["n"] + 1}
        return new, {"loss": Mean(error.square().sum(), torch.tensor(float(len(y))))}

    x = torch.randn(16, 3)
    state = {"w": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)}
    result = fit(state, [(x, x.sum(dim=1))] * 5, Program(step), epochs=20)
    assert int(result.state["n"]) == 100
    assert result.history["train_loss"][-1] < 1e-2
    assert result.history["step"][-1] == 100
    assert state["w"].tolist() == [0, 0, 0]


class Pair(NamedTuple):
    """A state of a user's own."""

    left: TrainState
    right: TrainState


def pair_program() -> tuple[Program, Pair]:
    one, two = mlp(), mlp(optim.adam(1e-2))

    def train_step(state: Pair, batch: Any) -> Any:
        left, first = one.train_step(state.left, batch)
        right, second = two.train_step(state.right, batch)
        return Pair(left, right), {"loss": first["loss"], "other": second["loss"]}

    def eval_step(state: Pair, batch: Any) -> Any:
        return one.eval_step(state.left, batch)

    return Program(train_step, eval_step=eval_step), Pair(one.init(), two.init(seed=1))


@pytest.mark.parametrize("compile", [False, pytest.param({"backend": "aot_eager"}, marks=pytest.mark.compile)])
def test_a_named_tuple_of_train_states_goes_through_fit(tmp_path: Path, compile: Any) -> None:
    program, state = pair_program()
    loaders = {"train": batches(3), "val": batches(1)}
    whole = fit(state, loaders, program, epochs=3, compile=compile)
    assert {"train_loss", "train_other", "val_loss"} <= set(whole.history)
    assert [int(part.updates) for part in whole.state] == [9, 9]
    fit(state, loaders, program, epochs=1, compile=compile, snapshots=tmp_path)
    resumed = fit(state, loaders, program, epochs=3, compile=compile, snapshots=tmp_path)
    assert_trees_close(ps.clone(resumed.state), ps.clone(whole.state), exact=True)
    assert resumed.history == whole.history


def test_a_key_may_be_the_name_of_a_parameter() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.key

    program = ps.program(Attention(), ps.supervised(CRITERION), optim.sgd(0.1))
    result = fit(program.init(seed=5), batches(2), program, epochs=1, device="cpu")
    assert int(result.state.updates) == 2
    assert result.state.key.tolist() == [5, 2]


def test_evaluation_loaders_need_an_eval_step() -> None:
    with pytest.raises(ConfigError, match=r"no eval_step for the loaders \['test', 'val'\].*eval_step=\.\.\."):
        fit(
            {"w": torch.zeros(())},
            {"train": [torch.ones(1)], "val": [torch.ones(1)], "test": [torch.ones(1)]},
            Program(lambda state, batch: (state, {})),
            epochs=1,
        )


def test_the_state_that_goes_in_stays_what_it_is() -> None:
    program = convnet(ema=0.9, accumulate=2)
    state = program.init()
    before = ps.clone(state)
    fit(state, shuffled(), program, epochs=1)
    assert_trees_close(state, before, exact=True)


@pytest.mark.compile
@pytest.mark.parametrize("donate", [True, False])
def test_the_state_that_goes_in_stays_valid_when_compiled(donate: bool) -> None:
    program = mlp()
    state = program.init()
    before = ps.clone(state)
    result = fit(state, batches(3), program, epochs=2, compile={"backend": "aot_eager"}, donate=donate)
    assert_trees_close(state, before, exact=True)
    assert int(result.state.updates) == 6
    for compile in ({"backend": "aot_eager"}, False):
        again = fit(result.state, batches(3), program, epochs=1, compile=compile, donate=donate)
        assert int(again.state.updates) == 9
        assert int(result.state.updates) == 6


@pytest.mark.compile
def test_a_state_given_away_trains_the_same() -> None:
    program = mlp()
    kept = fit(program.init(), batches(3), program, epochs=2)
    result = fit(program.init(), batches(3), program, epochs=2, compile={"backend": "aot_eager"}, donate="init")
    assert_trees_close(ps.clone(result.state), kept.state, exact=True)


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.compile
def test_a_compiled_run_makes_the_same_bits() -> None:
    program = convnet(accumulate=3, ema=0.9)
    loaders = {"train": shuffled(), "val": [image_batch(4, 9)]}
    eager = fit(program.init(), loaders, program, epochs=2, compile=False)
    found = fit(program.init(), loaders, program, epochs=2, compile={"backend": "aot_eager"})
    assert_trees_close(ps.clone(found.state), eager.state, exact=True)
    assert found.history.keys() == eager.history.keys()
    for name, column in eager.history.items():
        assert found.history[name] == pytest.approx(column, rel=1e-5), name


def test_auto_is_eager_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("purestep.compile.as_settings.compile_program", refuse)
    program = mlp()
    fit(program.init(), batches(1), program, epochs=1)
    with pytest.raises(AssertionError, match="compiled"):
        fit(program.init(), batches(1), program, epochs=1, compile=True)


@pytest.mark.compile
def test_compile_true_is_an_error_where_a_step_cannot_be_captured() -> None:
    def branching(state: dict[str, Tensor], batch: Tensor) -> Any:
        return ({"w": state["w"] + 1} if state["w"] > 0 else {"w": state["w"] - 1}), {}

    with pytest.raises(Exception, match="reads the value of a tensor"):
        fit({"w": torch.zeros(())}, [torch.ones(1)], Program(branching), epochs=1, compile={"backend": "aot_eager"})
    result = fit({"w": torch.zeros(())}, [torch.ones(1)], Program(branching), epochs=2, compile=False)
    assert result.state["w"].item() == -2


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"compile": False}, {"compile": {"backend": "aot_eager"}}, {"detect_anomaly": True}], ids=str
)
def test_a_program_that_is_compiled_already_runs_as_it_is(donate: bool, fields: Any) -> None:
    """What fit looks at is the step in eager, whose numbers are rounded otherwise."""
    program = mlp(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.01)), accumulate=2)
    fast, first = ps.compile_program(program, donate=donate, backend="aot_eager"), program.init()
    loaders = {"train": batches(5), "val": batches(2)}
    found = fit(first, loaders, fast, epochs=2, **fields)
    expected = fit(first, loaders, program, epochs=2)
    assert_trees_close(ps.clone(found.state), expected.state, rtol=1e-4, atol=1e-5)
    assert found.history["val_loss"] == pytest.approx(expected.history["val_loss"], rel=1e-4)
    assert bool(getattr(fast.train_step, "graphs", 0)) == (not fields or fields == {"compile": False})


@pytest.mark.compile
def test_an_impure_step_that_is_compiled_already_is_found() -> None:
    calls = [0]

    def counting(state: dict[str, Tensor], batch: Tensor) -> Any:
        calls[0] += 1
        return {"w": state["w"] + calls[0]}, {}

    fast = Program(ps.compile_step(counting, backend="aot_eager"))
    with pytest.raises(ps.errors.StepContractError, match="the second call with the same state and batch"):
        fit({"w": torch.zeros(())}, [torch.ones(1)], fast, epochs=1)


@pytest.mark.compile
def test_auto_goes_on_in_eager_with_a_warning_where_a_step_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, that is; here the state only says that it is there."""

    def ready_on_cuda(program: Program, state: Any) -> Program:
        with monkeypatch.context() as patch:
            patch.setattr("purestep.data.device_of", lambda state: torch.device("cuda"))
            return ready_program(program, state, ps.FitConfig(epochs=1))

    def branching(state: dict[str, Tensor], batch: Tensor) -> Any:
        return ({"w": state["w"] + 1} if state["w"] > 0 else {"w": state["w"] - 1}), {}

    def eval_step(state: dict[str, Tensor], batch: Tensor) -> Any:
        return {"up": Mean(torch.ones(()) if state["w"] > 0 else torch.zeros(()), torch.ones(()))}

    state: Any = {"w": torch.zeros(())}
    ready = ready_on_cuda(Program(branching, eval_step=eval_step), state)
    with pytest.warns(RuntimeWarning, match="runs in eager.*compile=False says that this is meant"):
        state, _ = ready.train_step(state, torch.ones(1))
    with pytest.warns(RuntimeWarning, match="runs in eager"):
        assert ps.evaluate(state, [torch.ones(1)], ready.eval_step) == {"up": 0.0}
    state, _ = ready.train_step(state, torch.ones(1))  # said once
    assert ps.evaluate(state, [torch.ones(1)], ready.eval_step) == {"up": 0.0}
    assert state["w"].item() == -2

    def summed(state: dict[str, Tensor], batch: Tensor) -> Any:
        return {"w": state["w"] + batch.sum()}, {}

    with pytest.warns(RuntimeWarning, match="runs in eager: batch: a sparse_coo tensor"):
        state, _ = ready_on_cuda(Program(summed), state).train_step(state, torch.ones(3).to_sparse())
    assert state["w"].item() == 1

    @library.custom_op("purestep_test::kernel", mutates_args=())
    def kernel(value: Tensor) -> Tensor:
        return value + 1

    def asking(state: dict[str, Tensor], batch: Tensor) -> Any:
        """A kernel that nothing is known about; an LSTM on CUDA asks where its weights lie, with the same outcome."""
        return {"w": kernel(state["w"])}, {}

    with pytest.warns(RuntimeWarning, match="runs in eager"):
        state, _ = ready_on_cuda(Program(asking), state).train_step(state, torch.ones(1))
    assert state["w"].item() == 2

    def wrong(state: dict[str, Tensor], batch: Tensor) -> Any:
        return {"w": state["w"].double()}, {}

    with pytest.raises(StepContractError, match="comes out as"):
        ready_on_cuda(Program(wrong), state).train_step(state, torch.ones(1))


def test_an_unknown_option_of_compile_is_named() -> None:
    program = mlp()
    with pytest.raises(ConfigError, match=r"compile has no option 'bakend'.*backend"):
        fit(program.init(), batches(1), program, epochs=1, compile={"bakend": "aot_eager"})


# --- trying a run out -------------------------------------------------------------------------------------------------


def test_a_dev_run_takes_a_few_batches_and_leaves_no_trace(tmp_path: Path) -> None:
    program = mlp()
    state = program.init()
    before = ps.clone(state)
    train, val = Counting(batches(9)), Counting(batches(9))
    result = fit(state, {"train": train, "val": val}, program, fast_dev_run=2, snapshots=tmp_path / "run")
    assert (train.taken, val.taken, int(result.state.updates)) == (2, 2, 2)
    assert (result.epochs, result.stop_reason) == (1, "fast_dev_run")
    assert result.history["val_loss"][0] is not None
    assert list(tmp_path.iterdir()) == []
    assert_trees_close(state, before, exact=True)


def test_a_dev_run_does_not_resume_and_does_not_save(tmp_path: Path) -> None:
    program = mlp()
    fit(program.init(), batches(3), program, epochs=1, snapshots=tmp_path)
    there = sorted(tmp_path.rglob("*"))
    result = fit(program.init(), batches(3), program, epochs=9, fast_dev_run=True, snapshots=tmp_path)
    assert int(result.state.updates) == 1
    assert sorted(tmp_path.rglob("*")) == there


def test_overfitting_takes_the_same_first_batches_unshuffled_for_everything() -> None:
    program, heard = convnet(), Heard()
    loaders = {"train": shuffled(), "val": [image_batch(4, 9)]}
    fit(program.init(), loaders, program, epochs=2, overfit_batches=2, callbacks=[heard])
    x, _ = image_batch(28)
    for event in heard.of(events.StepEnd) + heard.of(events.EvalStepEnd):
        index = event.batch_index if isinstance(event, events.StepEnd) else event.index
        torch.testing.assert_close(event.batch[0], x[4 * index : 4 * index + 4])
    assert len(heard.of(events.StepEnd)) == len(heard.of(events.EvalStepEnd)) == 4


@pytest.mark.parametrize(
    ("limit", "taken"), [(2, (2, 2)), (0.5, (4, 3)), ({"val": 1}, (8, 1)), ({"train": 0.25, "val": 0}, (2, 0))]
)
def test_batches_are_limited_by_number_or_share(limit: Any, taken: tuple[int, int]) -> None:
    program = mlp()
    train, val = Counting(batches(8)), Counting(batches(6))
    result = fit(program.init(), {"train": train, "val": val}, program, epochs=1, limit_batches=limit)
    assert (train.taken, val.taken) == taken
    assert ("val_loss" in result.history) == bool(taken[1])


@pytest.mark.parametrize("field", ["limit_batches", "evaluate_every"])
def test_a_setting_for_a_loader_that_does_not_exist_is_named(field: str) -> None:
    program = mlp()
    with pytest.raises(ConfigError, match=rf"{field} names a loader 'valid'.*\['train', 'val'\]"):
        fit(program.init(), {"train": batches(1), "val": batches(1)}, program, epochs=1, **{field: {"valid": 1}})


# --- surroundings -----------------------------------------------------------------------------------------------------


def switches() -> list[Any]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.is_anomaly_enabled(),
    ]


def test_a_precision_that_is_set_in_the_other_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matmul:
        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError(
                "PyTorch is checking whether allow_tf32 is enabled: mix of the legacy and new APIs\nmore"
            )

    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul())
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    with pytest.raises(ConfigError, match=r"tf32=True, and torch does not return .* new APIs \(cure: leave tf32 out"):
        fit(program.init(), {"train": batches(1)}, program, epochs=1, tf32=True)


@pytest.mark.parametrize(
    ("fields", "inside"),
    [
        ({"deterministic": True}, [True, False, False, None, None, False]),
        ({"deterministic": "warn"}, [True, True, False, None, None, False]),
        ({"tf32": True}, [False, False, None, True, True, False]),
        ({"tf32": False}, [False, False, None, False, False, False]),
        ({"detect_anomaly": True}, [False, False, None, None, None, True]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_switches_hold_inside_and_are_put_back(fields: Any, inside: list[Any], fails: bool) -> None:
    before = switches()
    program, seen = mlp(), []

    def look(event: Event) -> None:
        if isinstance(event, events.StepEnd):
            seen.append(switches())
            if fails:
                raise KeyError("from a callback")

    if fails:
        with pytest.raises(KeyError):
            fit(program.init(), batches(1), program, epochs=1, callbacks=[look], **fields)
    else:
        fit(program.init(), batches(1), program, epochs=1, callbacks=[look], **fields)
    assert [now for now, wanted in zip(seen[0], inside, strict=True) if wanted is not None] == [
        wanted for wanted in inside if wanted is not None
    ]
    assert switches() == before


def test_the_callers_generator_is_left_as_it_was_and_does_not_matter() -> None:
    program = convnet()
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(fit(program.init(), shuffled(), program, epochs=1).state)
        assert torch.equal(torch.get_rng_state(), before)
    assert_trees_close(results[0], results[1], exact=True)


def test_the_seed_decides_order_and_dropout() -> None:
    program = convnet()
    first, other = (fit(program.init(seed=seed), shuffled(), program, epochs=1) for seed in (1, 2))
    assert first.history["train_loss"] != other.history["train_loss"]


def test_the_device_of_a_config_is_where_the_state_goes() -> None:
    program = mlp()
    result = fit(program.init(), batches(1), program, epochs=1, device="cpu")
    assert result.state.step.device.type == "cpu"
    with pytest.raises((StateError, DataError, NotImplementedError, RuntimeError)):
        fit(program.init(), batches(1), program, epochs=1, device="meta")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_come_from_a_config_a_mapping_a_file_or_fields_and_fields_win(tmp_path: Path) -> None:
    program = mlp()
    path = tmp_path / "fit.json"
    path.write_text('{"epochs": 2}')
    for config in (ps.FitConfig(epochs=2), {"epochs": 2}, path):
        assert fit(program.init(), batches(1), program, config).epochs == 2
        assert fit(program.init(), batches(1), program, config, epochs=3).epochs == 3


class OnMps(Tensor):
    """A tensor as on MPS, which has no float64."""

    @property
    def device(self) -> torch.device:
        return torch.device("mps")

    def to(self, *args: Any, **options: Any) -> Tensor:
        if torch.float64 in args:
            raise TypeError("Cannot convert a MPS Tensor to float64")
        return super().to(*args, **options)

    def cpu(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_metrics_of_several_dtypes_arrive_from_a_device_without_float64() -> None:
    queue, sums = MetricQueue(), dict[str, tuple[float, float]]()
    total, weight = torch.tensor(3.0).as_subclass(OnMps), torch.tensor(2).as_subclass(OnMps)
    queue.add(SimpleNamespace(closing=True), {"loss": Mean(total, weight)})
    queue.add_to(sums, wait=True)
    assert sums == {"loss": (3.0, 2.0)}
