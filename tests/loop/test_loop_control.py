"""Who may steer a run and how it ends: callbacks, early stopping, what is not finite, sinks that fail, signals."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from rigs.faults.runs import Told, at, batches, fit, mlp, poisoned
from torch import Tensor, nn

import purestep as ps
from purestep import events, optim
from purestep.errors import ConfigError, NonFiniteError, StateError
from purestep.loop import policy
from purestep.loop.loop_state import LoopState
from purestep.loop.signals import Preempted
from purestep.types import Mean, Program, TrainState

CRITERION = nn.CrossEntropyLoss()


def scripted(values: list[float]) -> Program:
    """A program whose ``val_loss`` follows a script, an epoch a value."""

    def train_step(state: dict[str, Tensor], batch: Tensor) -> Any:
        return {"w": state["w"], "epoch": state["epoch"] + 1}, {}

    def eval_step(state: dict[str, Tensor], batch: Tensor) -> Any:
        return {"loss": Mean(torch.tensor(values)[state["epoch"] - 1], torch.ones(()))}

    return Program(train_step, eval_step=eval_step)


def script_state() -> dict[str, Tensor]:
    return {"w": torch.zeros(1), "epoch": torch.zeros((), dtype=torch.int64)}


def play(values: list[float], **fields: Any) -> Any:
    one = [torch.ones(1)]
    return fit(script_state(), {"train": one, "val": one}, scripted(values), **{"epochs": len(values), **fields})


# --- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "updates", "epochs"),
    [
        (events.StepEnd, 2, 2, 0),
        (events.StepEnd, 4, 4, 1),
        (events.StepEnd, 6, 6, 2),
        (events.EvalEnd, 1, 3, 1),
        (events.EpochEnd, 2, 6, 2),
        (events.Logged, 4, 4, 1),
        (events.FitStart, 1, 0, 0),
    ],
)
def test_a_callback_ends_the_run_with_a_reason(kind: type, number: int, updates: int, epochs: int) -> None:
    program = mlp()
    stop = at(kind, number, lambda event: ps.Stop("enough"))
    loaders = {"train": batches(3), "val": batches(1)}
    result = fit(program.init(), loaders, program, epochs=4, callbacks=[stop], log_every=1)
    assert (int(result.state.updates), result.epochs, result.stop_reason) == (updates, epochs, "enough")
    if updates % 3:
        assert result.history["val_loss"][-1] is not None  # the last state is scored


def test_what_a_stop_is_called_when_it_is_not_said() -> None:
    result = fit(mlp().init(), batches(3), mlp(), epochs=4, callbacks=[at(events.EpochEnd, 1, lambda _: ps.Stop())])
    assert result.stop_reason == "callback"


@pytest.mark.parametrize("minimum", [{"min_epochs": 2}, {"min_steps": 6}])
def test_the_minima_hold_against_callbacks(minimum: Any) -> None:
    program = mlp()

    def always(event: Any) -> Any:
        return ps.Stop("now") if isinstance(event, events.StepEnd | events.EpochEnd) else None

    result = fit(program.init(), batches(3), program, epochs=4, callbacks=[always], **minimum)
    assert (int(result.state.updates), result.stop_reason) == (6, "now")


@pytest.mark.parametrize("kind", [events.FitStart, events.StepEnd, events.EvalEnd, events.EpochEnd])
def test_a_callback_may_put_in_another_state(kind: type) -> None:
    program = mlp()

    def halve(event: Any) -> Any:
        found = getattr(event, "state", None) or held[-1]
        return found._replace(params={name: p * 0.5 for name, p in found.params.items()})

    held: list[TrainState] = []

    def keep(event: Any) -> None:
        if getattr(event, "state", None) is not None:
            held.append(event.state)

    loaders = {"train": batches(3), "val": batches(1)}
    callbacks = [keep, at(kind, 1, halve)]
    changed = fit(program.init(), loaders, program, epochs=2, callbacks=callbacks)
    plain = fit(program.init(), loaders, program, epochs=2)
    assert changed.history["train_loss"] != plain.history["train_loss"]
    assert int(changed.state.updates) == 6


def test_a_state_from_a_callback_is_what_a_snapshot_holds(tmp_path: Path) -> None:
    program = mlp()
    zero = at(
        events.EpochEnd,
        1,
        lambda event: event.state._replace(params={k: torch.zeros_like(p) for k, p in event.state.params.items()}),
    )
    result = fit(program.init(), batches(2), program, epochs=1, callbacks=[zero], snapshots=tmp_path)
    stored = ps.Snapshots(tmp_path, writer=False).restore(program.init()).state
    assert all(not p.any() for p in stored.params.values())
    assert_trees_close(stored, result.state, exact=True)


def test_a_state_from_a_callback_brings_its_own_accumulation_window() -> None:
    program = mlp(accumulate=3)
    restart = at(events.StepEnd, 1, lambda event: program.train_step(program.init(), vector_batch(8, 9))[0])
    result = fit(program.init(), batches(8), program, epochs=1, callbacks=[restart])
    # Three calls, then a state whose window has two to come; the flush closes the last one.
    assert int(result.state.updates) == 2
    assert int(result.state.accum.left) == 3


@pytest.mark.compile
@pytest.mark.parametrize("donate", ["init", True])
def test_a_state_from_a_callback_is_still_the_callbacks(donate: Any) -> None:
    """What ``donate="init"`` gives away is the state that went into fit, and no other."""
    program, kept = ps.program(tiny_convnet(), ps.supervised(CRITERION), optim.sgd(0.1)), []

    def answer(event: Any) -> Any:
        kept.append(ps.clone(event.state))
        kept.append(ps.clone(event.state))
        return kept[0]

    data, compiled = [image_batch()] * 2, {"backend": "aot_eager"}
    callback = at(events.EpochEnd, 1, answer)
    fit(program.init(), data, program, epochs=2, compile=compiled, donate=donate, callbacks=[callback])
    assert kept[0].buffers  # which a step writes in place
    assert_trees_close(*kept, exact=True)


def test_a_live_hyperparameter_is_changed_by_a_callback() -> None:
    program = mlp(optim.inject(optim.sgd)(learning_rate=0.1))

    def lower(event: Any) -> Any:
        return event.state._replace(opt_state=optim.set_hyperparams(event.state.opt_state, learning_rate=0.01))

    result = fit(program.init(), batches(3), program, epochs=2, callbacks=[at(events.EpochEnd, 1, lower)])
    assert result.history["lr"] == pytest.approx([0.1, 0.01])


WRONG: dict[str, Callable[[Any], Any]] = {
    "a number": lambda event: 3,
    "True": lambda event: True,
    "params": lambda event: event.state.params,
    "another shape": lambda event: event.state._replace(step=torch.zeros(2, dtype=torch.int64)),
    "another dtype": lambda event: event.state._replace(step=event.state.step.float()),
    "a module": lambda event: tiny_mlp(),
}


@pytest.mark.parametrize("answer", WRONG)
def test_anything_else_that_a_callback_returns_is_an_error(answer: str) -> None:
    program = mlp()
    with pytest.raises(
        StateError, match=r"a callback returned a .*, which is not a state of this run.*ps.Stop\(reason\)"
    ):
        fit(program.init(), batches(2), program, epochs=1, callbacks=[at(events.StepEnd, 1, WRONG[answer])])


def test_a_callback_returns_its_state_on_the_device_of_the_run() -> None:
    program = mlp()

    def moved(event: Any) -> Any:
        return event.state._replace(params={name: p.to("meta") for name, p in event.state.params.items()})

    with pytest.raises(StateError, match=r"params/\S+ on meta, and the run has it on cpu .*ps.to_device"):
        fit(program.init(), batches(2), program, epochs=1, callbacks=[at(events.EpochEnd, 1, moved)])


def test_callbacks_hear_the_end_whatever_it_was() -> None:
    program, heard = mlp(), []

    def listen(event: Any) -> None:
        if isinstance(event, events.FitEnd):
            heard.append((event.reason, type(event.error)))

    fit(program.init(), batches(1), program, epochs=1, callbacks=[listen])
    with pytest.raises(ZeroDivisionError):
        fit(
            program.init(),
            batches(1),
            program,
            epochs=1,
            callbacks=[listen, at(events.StepEnd, 1, lambda event: 1 // 0)],
        )
    assert heard == [("epochs", type(None)), ("error", ZeroDivisionError)]


def test_callbacks_are_called_in_their_order() -> None:
    order: list[str] = []

    def named(name: str) -> Callable[[Any], None]:
        return lambda event: order.append(name) if isinstance(event, events.EpochEnd) else None

    fit(mlp().init(), batches(1), mlp(), epochs=2, callbacks=[named("a"), named("b"), named("c")])
    assert order == ["a", "b", "c"] * 2


# --- best and early stopping ------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "fields", "epochs", "best"),
    [
        ([3, 2, 2, 2, 1], {"early_stopping": 2}, 4, 2),  # equal is no improvement
        ([3, 2, 2, 1, 2, 2], {"early_stopping": 2}, 6, 4),
        ([1, 2, 3, 4], {"early_stopping": 1}, 2, 1),
        ([1, 2, 3, 4], {}, 4, 1),
        ([3, NAN, NAN, 1], {"early_stopping": 2}, 3, 1),
        ([NAN, 3, NAN, 4], {"early_stopping": 2}, 4, 2),
        ([NAN, NAN, NAN], {"early_stopping": 2}, 2, None),
        ([3, 2.9, 2.8, 1], {"early_stopping": {"patience": 2, "min_delta": 0.5}}, 3, 3),  # best is strict all the same
        ([1, 2, 3, 4, 5, 6], {"early_stopping": {"patience": 2, "start_ratio": 0.5}}, 4, 1),
        ([1, 2, 3, 4, 5], {"early_stopping": 1, "min_epochs": 4}, 4, 1),
        ([1, 2, 3, 4, 5], {"early_stopping": 1, "min_steps": 3}, 3, 1),
        ([1, 3, 2, 1], {"mode": "max", "monitor": "val_loss", "early_stopping": 2}, 4, 2),
        ([float("inf"), 2, 3], {}, 3, 2),
    ],
)
def test_best_and_patience_follow_the_monitored_value(
    values: list[float], fields: Any, epochs: int, best: int | None
) -> None:
    result = play(values, **fields)
    stopped = epochs < len(values) or ("early_stopping" in fields and result.stop_reason == "early_stopping")
    assert result.epochs == epochs
    assert result.stop_reason == ("early_stopping" if stopped else "epochs")
    if best is None:
        assert result.best is None
    else:
        assert (result.best["epoch"], result.best["val_loss"]) == (best, pytest.approx(values[best - 1]))
    assert all(value is None or value == value for value in result.history["val_loss"])  # no NaN in what becomes JSON


def test_patience_counts_evaluations_and_not_epochs() -> None:
    one = [torch.ones(1)]
    values = [1, 9, 2, 9, 3, 9, 4, 9]
    result = fit(
        script_state(),
        {"train": one, "val": one},
        scripted(values),
        epochs=8,
        evaluate_every=2.0,
        monitor="val_loss",
        mode="max",
        early_stopping=1,
    )
    assert (result.epochs, result.stop_reason) == (4, "early_stopping")


class Endless:
    """A loader that does not know its length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(1)] * 4)


FOUR = [torch.ones(1)] * 4


@pytest.mark.parametrize(
    ("train", "fields", "updates"),
    [
        (FOUR, {"epochs": 8}, 16),
        (FOUR, {"epochs": 5, "evaluate_every": {"test": 0.25}}, 8),  # whole epochs: 2 of 5
        (FOUR, {"epochs": 8, "evaluate_every": 2.0}, 16),
        (FOUR, {"epochs": 8, "evaluate_every": 0.5}, 16),
        (FOUR, {"epochs": 3, "evaluate_every": 0.25}, 4),
        (FOUR, {"epochs": 8, "evaluate_every": 6}, 18),
        (FOUR, {"steps": 20, "evaluate_every": 2}, 10),
        (FOUR, {"steps": 20, "epochs": 100, "evaluate_every": 2}, 10),  # the limit that is nearer
        (FOUR, {"steps": 1000, "epochs": 4, "evaluate_every": 2}, 8),
        (Endless(), {"epochs": 4, "evaluate_every": 1}, 8),
        (Endless(), {"epochs": -1, "steps": 20, "evaluate_every": 1}, 10),
    ],
)
def test_a_start_is_a_share_of_the_run_however_often_it_is_evaluated(train: Any, fields: Any, updates: int) -> None:
    loaders = {"train": train, "val": FOUR[:1], "test": FOUR[:1]}
    early = {"early_stopping": {"patience": 1, "start_ratio": 0.5}}
    result = fit(script_state(), loaders, scripted([1.0] * 99), **(early | fields))
    assert result.stop_reason == "early_stopping"
    assert result.history["step"][-1] == updates


@pytest.mark.parametrize("end", [5, 7, 8, 9, 12])
def test_a_start_is_where_it_was_after_a_resume_inside_an_epoch(end: int, tmp_path: Path) -> None:
    made = scripted([1.0] * 99)

    def train_step(state: Any, batch: Tensor) -> Any:
        return made.train_step(state, batch)[0], {"seen": Mean(batch.sum(), torch.ones(()))}

    def run(snapshots: Path | None, callbacks: Any = ()) -> Any:
        rule = ps.EarlyStopping(4, start_ratio=0.3)  # 2 of 8 epochs: at 8, 10, 12 and 14
        fields = {"epochs": 8, "evaluate_every": 2, "early_stopping": rule}
        program, loaders = made._replace(train_step=train_step), {"train": FOUR, "val": FOUR[:1]}
        return fit(script_state(), loaders, program, snapshots=snapshots, callbacks=callbacks, **fields)

    def leave(event: Any) -> None:
        raise ZeroDivisionError

    whole = run(None)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, [at(events.StepEnd, end, leave)])
    resumed = run(tmp_path)
    assert (resumed.history, resumed.stop_reason) == (whole.history, "early_stopping")
    assert whole.history["step"][-1] == 14


def test_a_metric_whose_direction_is_not_said_is_refused_before_anything_is_trained() -> None:
    taken = []

    def watch(event: Any) -> None:
        taken.append(event)

    with pytest.raises(ConfigError, match=r"'val_accuracy' does not say whether small or large.*mode=\"max\""):
        fit(mlp().init(), batches(1), mlp(), epochs=1, monitor="val_accuracy", callbacks=[watch])
    assert not taken


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("f1", "val_f1"),
        ("loss", "val_loss"),
        ("train_los", "train_loss"),
    ],
)
def test_the_cure_of_an_unknown_metric_is_a_name_with_it_or_a_similar_one(metric: str, nearest: str) -> None:
    config = ps.FitConfig(epochs=1, monitor=metric, mode="max")
    history = {name: [1.0] for name in ("epoch", "step", "train_loss", "lr", "val_hard_loss", "val_loss", "val_f1")}
    with pytest.raises(ConfigError) as found:
        policy.monitor(config, ["val"]).check(LoopState(history=history), ["val"])
    assert found.value.hint == f"monitor={nearest!r}"


@pytest.mark.parametrize("loaders", [{"train": batches(1)}, {"train": batches(1), "test": batches(1)}])
def test_early_stopping_needs_something_to_look_at(loaders: Any) -> None:
    program = mlp()
    with pytest.raises(ConfigError, match=r"early_stopping without a metric.*monitor='train_loss'"):
        fit(program.init(), loaders, program, epochs=1, early_stopping=3)
    result = fit(program.init(), loaders, program, epochs=1, early_stopping=3, monitor="train_loss")
    assert result.best is not None


def test_a_validation_without_a_loss_is_no_monitor() -> None:
    def eval_step(state: Any, batch: Any) -> Any:
        return {"accuracy": Mean(torch.ones(()), torch.ones(()))}

    program = mlp()._replace(eval_step=eval_step)
    loaders = {"train": batches(1), "val": batches(1)}
    assert fit(program.init(), loaders, program, epochs=1).best is None
    with pytest.raises(ConfigError, match="early_stopping without a metric"):
        fit(program.init(), loaders, program, epochs=1, early_stopping=3)


def test_improvements_are_told_and_saved(tmp_path: Path) -> None:
    improved = []

    def listen(event: Any) -> None:
        if isinstance(event, events.EpochEnd):
            improved.append((event.epoch, event.improved, event.stopping))

    with ps.Snapshots(tmp_path, every_epochs=None, keep=1) as snapshots:
        one = [torch.ones(1)]
        loaders = {"train": one, "val": one}
        result = fit(
            script_state(),
            loaders,
            scripted([3, 2, 4, 5]),
            epochs=4,
            snapshots=snapshots,
            callbacks=[listen],
        )
        assert snapshots.best() == result.best["step"] == 2
        assert snapshots.steps() == [2, 4]  # the best one and the last one
    assert improved == [(1, True, None), (2, True, None), (3, False, None), (4, False, "epochs")]


@pytest.mark.parametrize("fields", [{"epochs": 3}, {"steps": 5}, {"epochs": -1, "max_time": 1e-9}])
def test_the_last_state_is_always_saved(fields: Any, tmp_path: Path) -> None:
    program = mlp()
    with ps.Snapshots(tmp_path, every_epochs=2) as snapshots:
        result = fit(program.init(), batches(2), program, snapshots=snapshots, **fields)
        assert snapshots.latest() == int(result.state.step)
        assert_trees_close(snapshots.restore(program.init()).state, result.state, exact=True)


@pytest.mark.parametrize("kind", [events.EpochEnd, events.EvalEnd])
def test_a_callback_that_fails_behind_the_best_row_does_not_cost_its_snapshot(kind: type, tmp_path: Path) -> None:
    """What is saved then has the row's numbers, by which it is kept."""
    values, one = [0.1, 0.5, 0.4, 0.3, 0.2, 0.6], [torch.ones(1)]

    def fail(event: Any) -> None:
        raise OSError("a disk of the callback's")

    with pytest.raises(OSError, match="of the callback's"):
        play(values, snapshots=tmp_path, callbacks=[at(kind, 1, fail)])
    with ps.Snapshots(tmp_path, keep=1, keep_best=1) as snapshots:
        result = fit(script_state(), {"train": one, "val": one}, scripted(values), epochs=6, snapshots=snapshots)
    assert result.best["step"] == 1
    assert snapshots.steps() == [1, 6]
    assert snapshots.best() == 1


def test_a_loader_is_closed_when_a_step_fails_whoever_holds_the_error() -> None:
    closed: list[int] = []

    def batches_of_mine() -> Iterator[Tensor]:
        try:
            yield from [torch.ones(1)] * 4
        finally:
            closed.append(1)

    class Mine:
        def __iter__(self) -> Iterator[Tensor]:
            return batches_of_mine()

    def step(state: Any, batch: Tensor) -> Any:
        raise OSError("no step")

    with pytest.raises(OSError, match="no step"):  # holds the error, and with it the frames of the loop
        fit(script_state(), {"train": Mine()}, Program(step), epochs=1, check_every=None)
    assert closed


@pytest.mark.parametrize("has_length", [True, False])
def test_an_interval_that_ends_with_the_epoch_makes_one_row(has_length: bool, tmp_path: Path) -> None:
    """That of the epoch's end, also where only a look at the loader tells that it is the end."""

    class WithoutLength:
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.ones(1)] * 4)

    one: list[Tensor] = [torch.ones(1)]
    heard: list[Any] = []
    result = fit(
        script_state(),
        {"train": one * 4 if has_length else WithoutLength(), "val": one},
        scripted([0.1 * left for left in range(8, 0, -1)]),
        epochs=2,
        evaluate_every=2,
        snapshots=tmp_path,
        callbacks=[lambda event: heard.append(event.epoch) if isinstance(event, events.EpochEnd) else None],
    )
    assert result.history["step"] == [2, 4, 6, 8]
    assert None not in result.history["val_loss"]
    assert heard == [0, 1, 1, 2]
    assert ps.Snapshots(tmp_path, writer=False).best() == result.best["step"]


# --- what is not finite -----------------------------------------------------------------------------------------------


def test_an_overflow_under_the_scaler_is_no_error() -> None:
    program = mlp(precision="16-mixed")
    result = fit(program.init(), poisoned(4, 1), program, epochs=1)
    assert (int(result.state.updates), result.state.scaler.scale.item()) == (3, 2.0**15)


# --- sinks ------------------------------------------------------------------------------------------------------------


def test_a_sink_that_raises_or_returns_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    program, told = mlp(), Told()

    def broken(event: Any) -> None:
        raise OSError("disk full")

    def steering(event: Any) -> Any:
        return ps.Stop("a sink has no say")

    expected = fit(program.init(), batches(2), program, epochs=2)
    with caplog.at_level(logging.WARNING, "purestep"):
        result = fit(program.init(), batches(2), program, epochs=2, sinks=[broken, steering, told])
    assert_trees_close(result.state, expected.state, exact=True)
    assert result.stop_reason == "epochs"
    assert caplog.text.count("disk full") == 1
    assert [type(event).__name__ for event in told.events] == ["FitStart", "EpochEnd", "EpochEnd", "FitEnd"]
    assert all(getattr(event, "state", None) is None for event in told.events)


def test_the_history_file_is_that_of_the_run(tmp_path: Path) -> None:
    program = mlp()
    loaders = {"train": batches(2), "val": batches(1)}
    result = fit(program.init(), loaders, program, epochs=2, snapshots=tmp_path)
    rows = json.loads((tmp_path / "training_history.json").read_text())
    assert [row["val_loss"] for row in rows] == result.history["val_loss"]
    longer = fit(program.init(), loaders, program, epochs=3, snapshots=tmp_path)
    rows = json.loads((tmp_path / "training_history.json").read_text())
    assert [row["epoch"] for row in rows] == longer.history["epoch"] == [1, 2, 3]


# --- signals ----------------------------------------------------------------------------------------------------------


def raising(number: signal.Signals) -> Callable[[Any], None]:
    return lambda event: signal.raise_signal(number)


def keyboard_interrupt(run: Callable[[], Any]) -> Any:
    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    return caught.value.result


@pytest.mark.parametrize(
    ("kind", "number", "updates"),
    [
        (events.StepEnd, 1, 1),
        (events.StepEnd, 3, 3),
        (events.StepEnd, 5, 5),
        (events.EvalStepEnd, 1, 3),
        (events.EvalStepEnd, 3, 6),
        (events.EpochEnd, 1, 3),
        (events.Saved, 1, 3),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(kind: type, number: int, updates: int, tmp_path: Path) -> None:
    program = mlp(ema=0.9)
    loaders = {"train": batches(3), "val": batches(2)}
    whole = fit(program.init(), loaders, program, epochs=4, early_stopping=3)
    before = signal.getsignal(signal.SIGINT)
    interrupt = at(kind, number, raising(signal.SIGINT))
    result = keyboard_interrupt(
        lambda: fit(
            program.init(),
            loaders,
            program,
            epochs=4,
            early_stopping=3,
            snapshots=tmp_path,
            callbacks=[interrupt],
        )
    )
    assert signal.getsignal(signal.SIGINT) is before
    assert (int(result.state.updates), result.stop_reason) == (updates, "interrupted")
    assert ps.Snapshots(tmp_path, writer=False).latest() == updates
    again = fit(program.init(), loaders, program, epochs=4, early_stopping=3, snapshots=tmp_path)
    assert_trees_close(again.state, whole.state, exact=True)
    assert again.history == whole.history
    assert again.best == whole.best


def test_an_evaluation_is_broken_off_at_the_next_batch_and_done_again(tmp_path: Path) -> None:
    program, heard = mlp(), []
    loaders = {"train": batches(3), "val": batches(5)}

    def listen(event: Any) -> None:
        heard.append(type(event))

    result = keyboard_interrupt(
        lambda: fit(
            program.init(),
            loaders,
            program,
            epochs=2,
            evaluate_every=2,
            snapshots=tmp_path,
            callbacks=[listen, at(events.EvalStepEnd, 2, raising(signal.SIGINT))],
        )
    )
    assert heard.count(events.EvalStepEnd) == 2
    assert events.EvalEnd not in heard
    assert result.history == {}
    whole = fit(program.init(), loaders, program, epochs=2, evaluate_every=2)
    again = fit(program.init(), loaders, program, epochs=2, evaluate_every=2, snapshots=tmp_path)
    assert again.history == whole.history


@pytest.mark.parametrize("steps", [3, 4, 5, 7, 8, 10])
@pytest.mark.parametrize("event", [events.StepEnd, events.EvalStepEnd])
def test_a_run_broken_off_behind_its_last_update_still_gets_its_last_row(
    steps: int, event: type, tmp_path: Path
) -> None:
    program, loaders = mlp(), {"train": batches(5), "val": batches(2)}
    whole = fit(program.init(), loaders, program, steps=steps)

    def stop(told: Any) -> None:
        if isinstance(told, event) and int(told.state.updates) == steps:
            signal.raise_signal(signal.SIGINT)

    keyboard_interrupt(lambda: fit(program.init(), loaders, program, steps=steps, snapshots=tmp_path, callbacks=[stop]))
    again = fit(program.init(), loaders, program, steps=steps, snapshots=tmp_path)
    assert again.history == whole.history
    assert again.best is not None
    assert whole.best is not None
    assert again.best["epoch"] == whole.best["epoch"]
    assert_trees_close(again.state, whole.state, exact=True)


@pytest.mark.parametrize("has_length", [True, False])
def test_a_run_that_ends_in_the_evaluation_it_is_resumed_in_trains_no_further(has_length: bool, tmp_path: Path) -> None:
    program, given = mlp(), batches(8)
    settings: dict[str, Any] = {"epochs": 3, "evaluate_every": 2, "monitor": "lr", "mode": "min", "early_stopping": 2}

    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(given)

    loaders = {"train": given if has_length else Stream(), "val": batches(2)}

    def stop(told: Any) -> None:
        if isinstance(told, events.EvalStepEnd) and int(told.state.updates) == 6:
            signal.raise_signal(signal.SIGINT)

    whole = fit(program.init(), loaders, program, **settings)
    for _ in range(2):  # and once more in the evaluation that is done again
        keyboard_interrupt(
            lambda: fit(program.init(), loaders, program, snapshots=tmp_path, callbacks=[stop], **settings)
        )
    again = fit(program.init(), loaders, program, snapshots=tmp_path, **settings)
    assert again.history == whole.history
    assert_trees_close(again.state, whole.state, exact=True)


def test_a_step_that_measures_nothing_has_a_last_row_too(tmp_path: Path) -> None:
    one = [torch.ones(1)]
    loaders, program = {"train": one * 4, "val": one}, scripted([0.5] * 9)

    def interrupt(_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    told = Told()
    settings: dict[str, Any] = {"steps": 6, "check_every": None, "snapshots": tmp_path}
    keyboard_interrupt(
        lambda: fit(script_state(), loaders, program, callbacks=[at(events.EvalStepEnd, 2, interrupt)], **settings)
    )
    result = fit(script_state(), loaders, program, sinks=[told], **settings)
    assert result.history == {"epoch": [1, 2], "step": [4, 6], "val_loss": [0.5, 0.5]}
    rows = [event.updates for event in told.events if isinstance(event, events.EpochEnd)]
    assert rows == [6]


def test_an_evaluation_that_was_broken_off_is_done_again_where_nothing_is_measured(tmp_path: Path) -> None:
    one = [torch.ones(1)]
    given = {"train": one * 4, "val": one}, scripted([0.5] * 9)
    settings: dict[str, Any] = {"epochs": 1, "evaluate_every": 0.5, "check_every": None, "snapshots": tmp_path}

    def interrupt(_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    keyboard_interrupt(
        lambda: fit(script_state(), *given, callbacks=[at(events.EvalStepEnd, 1, interrupt)], **settings)
    )
    assert fit(script_state(), *given, **settings).history["step"] == [2, 4]


def test_a_longer_run_over_a_stream_counts_no_epoch_twice(tmp_path: Path) -> None:
    program, given = mlp(), batches(5)

    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(given)

    for steps in (5, 15):
        result = fit(program.init(), {"train": Stream(), "val": given[:1]}, program, steps=steps, snapshots=tmp_path)
        assert result.epochs == steps // 5
        assert result.history["step"] == list(range(5, steps + 1, 5))


def test_another_monitor_of_a_run_that_goes_on_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its best so far is another metric's."""
    program = ps.program(
        tiny_mlp(), ps.supervised(CRITERION, metrics={"accuracy": ps.metrics.accuracy}), optim.sgd(0.1)
    )
    loaders = {"train": batches(4), "val": batches(2)}
    first = fit(program.init(), loaders, program, epochs=2, snapshots=tmp_path)
    settings: dict[str, Any] = {"epochs": 6, "monitor": "val_accuracy", "mode": "max", "early_stopping": 10}
    result = fit(program.init(), loaders, program, snapshots=tmp_path, **settings)
    assert first.best is not None
    assert "val_loss" in first.best
    assert result.best is not None
    assert result.best["val_accuracy"] == max(result.history["val_accuracy"][2:])
    assert "was judged by val_loss min, and goes on with val_accuracy max" in caplog.text


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_skips_everything_ends(accumulate: int, tmp_path: Path) -> None:
    """Limited by steps alone it would have no end."""
    program = mlp(nonfinite="skip", accumulate=accumulate)
    given = [*batches(2), *poisoned(200, *range(200))]
    with pytest.raises(NonFiniteError, match=r"100 updates in a row .* nonfinite=.raise.") as caught:
        fit(program.init(), given, program, steps=100, snapshots=tmp_path)
    result = caught.value.result
    assert caught.value.where == f"up to epoch 1, batch {2 + 100 * accumulate}"
    assert caught.value.step == 2 + 100 * accumulate
    assert int(result.state.updates) == 2 // accumulate
    assert result.stop_reason == "error"


def test_what_was_applied_in_between_breaks_the_row() -> None:
    program = mlp(nonfinite="skip")
    given = poisoned(150, *range(0, 75), *range(76, 150))
    assert int(fit(program.init(), given, program, epochs=1).state.updates) == 1


def test_data_without_targets_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """A state that halts at what is not finite has not: the weight of all batches is 0, which is no error."""
    program = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss(ignore_index=0)), optim.sgd(0.1))
    x, y = batches(1)[0]
    result = fit(program.init(), {"train": [(x, y * 0)] * 150}, program, epochs=1)
    assert int(result.state.updates) == 0
    assert "no target counts in 100 updates in a row, up to epoch 1, batch 100" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_of_rows_has_those_of_the_history_where_the_count_stands_still(kind: str, tmp_path: Path) -> None:
    program = ps.program(tiny_mlp(), ps.supervised(CRITERION), optim.sgd(0.1), accumulate=8, tail="carry")
    path = tmp_path / "rows"
    sinks = [getattr(ps.sinks, kind)(path)]
    result = fit(program.init(), {"train": batches(3), "val": batches(1)}, program, epochs=6, sinks=sinks)
    assert result.history["step"] == [0, 0, 1, 1, 1, 2]
    assert len(path.read_text().splitlines()) == 6 + (kind == "csv")


def test_a_loader_whose_name_begins_like_anothers_has_metrics_of_its_own() -> None:
    program, given = mlp(), batches(5)
    loaders = {"train": given, "val": given[:1], "val_hard": given[1:2]}
    result = fit(program.init(), loaders, program, epochs=4, evaluate_every={"val": 2.0}, monitor="val_loss")
    assert result.best is not None
    assert result.best["val_loss"] == min(value for value in result.history["val_loss"] if value is not None)


@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
def test_a_state_that_was_just_evaluated_does_not_use_up_the_patience(tail: Any) -> None:
    program = ps.program(tiny_mlp(), ps.supervised(CRITERION), optim.sgd(0.005), accumulate=2, tail=tail)
    loaders = {"train": batches(5), "val": batches(2)}
    result = fit(program.init(), loaders, program, epochs=4, evaluate_every=0.5, early_stopping=1)
    assert result.stop_reason == "epochs"


def test_a_script_that_ends_itself_in_a_callback_has_saved(tmp_path: Path) -> None:
    program = mlp()
    with pytest.raises(SystemExit):
        fit(program.init(), {"train": batches(9)}, program, epochs=1, snapshots=tmp_path,
            callbacks=[at(events.StepEnd, 7, lambda event: sys.exit(0))])  # fmt: skip
    assert ps.Snapshots(tmp_path, writer=False).steps() == [7]


def test_a_dev_run_writes_no_file_and_evaluates_everything(tmp_path: Path) -> None:
    program, loaders = mlp(), {"train": batches(5), "val": batches(3)}
    sinks = [ps.sinks.jsonl(tmp_path / "m.jsonl"), ps.sinks.history_json(tmp_path / "h.json")]
    result = fit(program.init(), loaders, program, fast_dev_run=2, evaluate_every=1000, sinks=sinks)
    assert list(tmp_path.iterdir()) == []
    assert len(result.history["val_loss"]) == 1


def test_an_interrupt_without_snapshots_still_gives_the_result() -> None:
    program = mlp()
    interrupt = at(events.StepEnd, 2, raising(signal.SIGINT))
    result = keyboard_interrupt(lambda: fit(program.init(), batches(3), program, epochs=2, callbacks=[interrupt]))
    assert int(result.state.updates) == 2


def test_a_second_interrupt_does_not_wait() -> None:
    program = mlp()

    def twice(event: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(program.init(), batches(3), program, epochs=2, callbacks=[at(events.StepEnd, 2, twice)])
    assert not hasattr(caught.value, "result")


class Left(BaseException):
    """A callback raises it; it is a BaseException and no Exception."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Left])
def test_an_interrupt_that_a_callback_raises_is_saved_like_an_error(error: Any, tmp_path: Path) -> None:
    program = mlp()

    def leave(event: Any) -> None:
        raise error

    with pytest.raises(error) as caught:
        fit(program.init(), batches(3), program, epochs=2, snapshots=tmp_path, callbacks=[at(events.StepEnd, 2, leave)])
    saved = ps.Snapshots(tmp_path, writer=False).restore(program.init())
    assert int(saved.state.updates) == 2
    if error is not Left:
        result = vars(caught.value)["result"]
        assert (int(result.state.updates), result.stop_reason) == (2, "error")
    whole = fit(program.init(), batches(3), program, epochs=2)
    resumed = fit(program.init(), batches(3), program, epochs=2, snapshots=tmp_path)
    assert_trees_close(resumed.state, whole.state, exact=True)


def test_a_run_whose_callback_runs_another_one_is_saved_when_a_signal_ends_that(tmp_path: Path) -> None:
    program = mlp()

    def another(event: Any) -> None:
        callbacks = [at(events.StepEnd, 1, raising(signal.SIGINT))]
        fit(program.init(), batches(3), program, epochs=1, callbacks=callbacks)

    def run() -> None:
        callbacks = [at(events.StepEnd, 2, another)]
        fit(program.init(), batches(3), program, epochs=2, snapshots=tmp_path, callbacks=callbacks)

    assert int(keyboard_interrupt(run).state.updates) == 2
    assert ps.Snapshots(tmp_path, writer=False).latest() == 2


def test_a_termination_exits_with_143_after_a_snapshot(tmp_path: Path) -> None:
    program, sink = mlp(), Told()
    with pytest.raises(Preempted) as caught:
        fit(
            program.init(),
            batches(3),
            program,
            epochs=2,
            snapshots=tmp_path,
            sinks=[sink],
            callbacks=[at(events.StepEnd, 4, raising(signal.SIGTERM))],
        )
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == 143
    assert int(caught.value.result.state.updates) == 4
    assert ps.Snapshots(tmp_path, writer=False).latest() == 4
    assert sink.closed == 1


def test_a_user_signal_saves_and_goes_on(tmp_path: Path) -> None:
    program = mlp()
    expected = fit(program.init(), batches(3), program, epochs=2)
    saved = []

    def listen(event: Any) -> None:
        if isinstance(event, events.Saved):
            saved.append(event.step)

    result = fit(
        program.init(),
        batches(3),
        program,
        epochs=2,
        snapshots=tmp_path,
        callbacks=[listen, at(events.StepEnd, 2, raising(signal.SIGUSR1))],
    )
    assert saved == [2, 3, 6]
    assert_trees_close(result.state, expected.state, exact=True)
    assert result.history == expected.history


def test_a_loader_that_hangs_is_left_at_once(tmp_path: Path) -> None:
    """The signal comes while the loop waits: what it waits for is abandoned, nothing that is done is lost."""
    program = mlp()
    hangs = threading.Event()

    class Hanging:
        def __init__(self, source: list[Any]) -> None:
            self.source = source

        def __len__(self) -> int:
            return len(self.source)

        def __iter__(self) -> Iterator[Any]:
            for index, batch in enumerate(self.source):
                if index == 2 and not hangs.is_set():
                    hangs.set()
                    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                    threading.Event().wait(60)
                yield batch

    result = keyboard_interrupt(lambda: fit(program.init(), Hanging(batches(3)), program, epochs=2, snapshots=tmp_path))
    assert int(result.state.updates) == 2
    again = fit(program.init(), Hanging(batches(3)), program, epochs=2, snapshots=tmp_path)
    assert_trees_close(again.state, fit(program.init(), batches(3), program, epochs=2).state, exact=True)


def test_off_the_main_thread_a_run_is_the_same() -> None:
    program, found = mlp(), []
    thread = threading.Thread(target=lambda: found.append(fit(program.init(), batches(3), program, epochs=2)))
    thread.start()
    thread.join(60)
    assert_trees_close(found[0].state, fit(program.init(), batches(3), program, epochs=2).state, exact=True)
