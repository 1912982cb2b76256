"""Events: what each one carries, and the order in which a run tells them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers import tiny_mlp, vector_batch
from torch import nn

import purestep as ps
from purestep import events, optim
from purestep.types import Program

KINDS = get_args(events.Event)


def program(**options: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1), **options)


def batches(count: int) -> list[Any]:
    return [vector_batch(8, seed) for seed in range(count)]


def told(made: Program, loaders: Any, **fields: Any) -> list[Any]:
    """Every event of a run; sinks and callbacks must hear the same ones, but for those of single steps."""
    heard: list[Any] = []
    sunk: list[Any] = []

    class Sink:
        foreground = True

        def __call__(self, event: Any) -> None:
            sunk.append(event)

    ps.fit(made.init(), loaders, made, sinks=[Sink()], callbacks=[heard.append], **{"log_every": 0, **fields})
    single = (events.StepEnd, events.EvalStepEnd)
    assert [type(event) for event in sunk] == [type(event) for event in heard if not isinstance(event, single)]
    return heard


def names(found: list[Any]) -> list[str]:
    return [type(event).__name__ for event in found]


@pytest.mark.parametrize("kind", [*KINDS, events.Stop])
def test_events_are_frozen_records_with_a_docstring(kind: Any) -> None:
    assert kind.__doc__
    event = kind(**{field.name: None for field in dataclasses.fields(kind)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, dataclasses.fields(kind)[0].name, 1)
    assert not hasattr(event, "__dict__")  # slots: nothing is hung on an event


def test_the_module_tells_of_every_event_in_its_order() -> None:
    words = re.findall(r"``(\w+)``", (events.__doc__ or "").partition("A callback")[0])
    order = [word for word in words if hasattr(events, word)]
    assert order == [kind.__name__ for kind in KINDS]


def test_a_stop_has_a_reason() -> None:
    assert ps.Stop().reason == "callback"
    assert ps.Stop("enough") == events.Stop(reason="enough")


def test_the_order_of_events(tmp_path: Path) -> None:
    loaders = {"train": batches(2), "val": batches(2), "test": batches(1)}
    found = told(program(), loaders, epochs=2, log_every=2, snapshots=tmp_path)
    epoch = [
        *("StepEnd", "StepEnd", "Logged"),
        *("EvalStepEnd", "EvalStepEnd", "EvalEnd"),
        *("EvalStepEnd", "EvalEnd"),
        *("EpochEnd", "Saved"),
    ]
    assert names(found) == ["FitStart", *epoch, *epoch, "FitEnd"]


def test_the_order_inside_an_epoch_with_windows_and_intervals(tmp_path: Path) -> None:
    """Three windows of two, the last one closed by the flush; an evaluation after the second."""
    made = program(accumulate=2)
    with ps.Snapshots(tmp_path, every_steps=1) as snapshots:
        found = told(made, {"train": batches(5), "val": batches(1)}, epochs=1, evaluate_every=2, snapshots=snapshots)
    boundary = ["EvalStepEnd", "EvalEnd", "EpochEnd", "Saved"]
    assert names(found) == [
        "FitStart",
        "StepEnd",
        "Saved",
        "StepEnd",
        *boundary,
        "StepEnd",
        "EpochEnd",
        "Saved",
        "FitEnd",
    ]
    ends = [event for event in found if isinstance(event, events.StepEnd)]
    assert [(event.epoch, event.batch_index, event.updates) for event in ends] == [(0, 1, 1), (0, 3, 2), (0, -1, 3)]
    rows = [event for event in found if isinstance(event, events.EpochEnd)]
    assert [(row.epoch, row.updates, row.record["epoch"], row.record["step"]) for row in rows] == [
        (0, 2, 1, 2),
        (1, 3, 1, 3),
    ]


def test_what_the_first_and_the_last_event_say(tmp_path: Path) -> None:
    made, loaders = program(), {"train": batches(3), "val": batches(1)}
    found = told(made, loaders, epochs=2, snapshots=tmp_path)
    start, end = found[0], found[-1]
    assert (start.epoch, start.updates, start.epochs, start.steps, start.batches) == (0, 0, 2, None, 3)
    assert (start.directory, start.resumed, dict(start.history)) == (tmp_path, False, {})
    assert int(start.state.step) == 0
    assert (end.reason, end.error, int(end.state.step)) == ("epochs", None, 6)
    assert end.history["epoch"] == [1, 2]
    assert end.best["val_loss"] == min(end.history["val_loss"])

    again = told(made, loaders, epochs=-1, steps=7, snapshots=tmp_path)[0]
    assert (again.epoch, again.updates, again.epochs, again.steps, again.resumed) == (2, 6, None, 7, True)
    assert again.history == end.history


def test_what_the_events_of_a_step_say() -> None:
    made = program()
    found = told(made, {"train": batches(2), "val": batches(1)}, epochs=2, donate=False)  # their states are read below
    steps = [event for event in found if isinstance(event, events.StepEnd)]
    assert [(event.epoch, event.batch_index, event.updates) for event in steps] == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 0, 3),
        (1, 1, 4),
    ]
    assert [int(event.state.updates) for event in steps] == [1, 2, 3, 4]
    torch.testing.assert_close(steps[3].batch[0], batches(2)[1][0])
    assert isinstance(steps[0].metrics["loss"], ps.Mean)
    (first, _) = [event for event in found if isinstance(event, events.EvalStepEnd)]
    assert (first.loader, first.index, int(first.state.updates)) == ("val", 0, 2)
    (value, _) = [event for event in found if isinstance(event, events.EvalEnd)]
    assert (value.loader, value.epoch, value.updates, list(value.values)) == ("val", 1, 2, ["val_loss"])


@pytest.mark.parametrize("every", [1, 2, 3, 0])
def test_a_line_of_the_log_has_the_means_since_the_last_one(every: int) -> None:
    made = program()
    found = told(made, {"train": batches(7)}, epochs=1, log_every=every)
    lines = [event for event in found if isinstance(event, events.Logged)]
    losses = [float(event.metrics["loss"]) for event in found if isinstance(event, events.StepEnd)]
    assert [line.updates for line in lines] == ([] if every == 0 else list(range(every, 8, every)))
    for line in lines:
        since = losses[line.updates - every : line.updates]
        assert line.values["train_loss"] == pytest.approx(sum(since) / every)
        assert line.values["lr"] == pytest.approx(0.1)
        assert line.steps_per_second > 0
        assert 0 <= line.wait_fraction <= 1
