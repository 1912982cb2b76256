"""Hostile values in every place where something can be handed in: a diagnosis of ours, or it works.

What is asked of each: the error is a `PurestepError` whose text names the place (the leaf, the loader, the setting), or
the value is accepted, which means that the run comes to its end with a state of dense tensors. Code of the caller's own
may fail in its own words (a model whose product has the wrong shape), and then the place is a note on the error. And
within five seconds, without a new file, a child process, or a number drawn from the caller's generators.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import random
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import tiny_mlp
from torch import Tensor, nn

import purestep as ps
from purestep import events, optim, tree
from purestep.errors import PurestepError
from purestep.types import Mean, Program
from rigs.faults.hostile import VALUES
from rigs.faults.runs import batches, fit, mlp

TRIALS = 500
SECONDS = 5.0

Place = Callable[[Any, Path], Any]
"""Hands a value in, in a folder of its own, and returns what came of it."""


# --- places -----------------------------------------------------------------------------------------------------------


def _trained(state: Any, train: Any = None, program: Any = None, **given: Any) -> Any:
    return fit(state, batches(3) if train is None else train, program or mlp(), **{"epochs": 1, "sinks": [], **given})


def _replaced(path: str, value: Any) -> Any:
    """The reference state with another leaf."""
    state = mlp(ema=0.9).init()
    field, _, name = path.partition("/")
    if not name:
        return state._replace(**{field: value})
    return state._replace(**{field: {**getattr(state, field), name: value}})


def _leaf(path: str) -> Place:
    return lambda value, folder: _trained(_replaced(path, value), program=mlp(ema=0.9))


def _batch(number: int, item: int | None) -> Place:
    def place(value: Any, folder: Path) -> Any:
        train: list[Any] = batches(4)
        if item is None:
            train[number] = value
        else:
            train[number] = (value, train[number][1]) if item == 0 else (train[number][0], value)
        return _trained(mlp().init(), train)

    return place


def _returns(make: Callable[[Any, Any], Any]) -> Place:
    """A step of one's own that returns ``make(state, value)``."""

    def place(value: Any, folder: Path) -> Any:
        step = Program(lambda state, batch: make(state, value))
        return _trained({"w": torch.ones(2)}, program=step)

    return place


def _loss(make: Callable[[Any, Any], Any]) -> Place:
    def place(value: Any, folder: Path) -> Any:
        program = mlp(objective=lambda model, batch: make(model(batch[0]).mean(), value))
        return _trained(program.init(), program=program)

    return place


def _setting(name: str) -> Place:
    return lambda value, folder: _trained(mlp().init(), **{name: value})


def _loader(name: str) -> Place:
    def place(value: Any, folder: Path) -> Any:
        return fit(mlp().init(), {"train": batches(2), name: value}, mlp(), epochs=1, sinks=[])

    return place


def _built(name: str) -> Place:
    def place(value: Any, folder: Path) -> Any:
        parts: dict[str, Any] = {"model": tiny_mlp(), "tx": optim.sgd(0.1)}
        parts["objective"] = ps.supervised(nn.CrossEntropyLoss())
        program = ps.program(**{**parts, name: value})
        return _trained(program.init(), program=program)

    return place


def _answer(kind: type) -> Place:
    def place(value: Any, folder: Path) -> Any:
        answers = lambda event: value if isinstance(event, kind) else None  # noqa: E731
        return _trained(mlp().init(), callbacks=[answers])

    return place


def _schedule(value: Any, folder: Path) -> Any:
    program = mlp(optim.sgd(lambda count: value))
    return _trained(program.init(), program=program)


def _template(path: str) -> Place:
    def place(value: Any, folder: Path) -> Any:
        with ps.Snapshots(folder / "s") as snapshots:
            snapshots.save(1, mlp(ema=0.9).init())
            return snapshots.restore(_replaced(path, value))

    return place


def _saved(name: str) -> Place:
    def place(value: Any, folder: Path) -> Any:
        with ps.Snapshots(folder / "s") as snapshots:
            given: dict[str, Any] = {"step": 1, "state": {"w": torch.ones(2)}}
            snapshots.save(**{**given, name: {"w": torch.ones(2), "x": value} if name == "state" else value})
            snapshots.wait()
            return None

    return place


ONE = torch.ones(())
PLACES: dict[str, tuple[Place, str]] = {
    # name: how a value is handed in there, and what a message has to say (a pattern)
    **{f"state {p}": (_leaf(p), p) for p in ("params/0.weight", "params/2.bias", "step", "key", "ema", "opt_state")},
    "state": (lambda value, folder: _trained(value), "init_state|fit|train"),
    "batch 1": (_batch(0, None), "batch"),
    "batch 1/0": (_batch(0, 0), "batch"),
    "batch 1/1": (_batch(0, 1), "batch"),
    "batch 3": (_batch(2, None), "batch"),
    "batch 3/0": (_batch(2, 0), "batch"),
    "batch 3/1": (_batch(2, 1), "batch"),
    "step result": (_returns(lambda state, value: value), "train_step"),
    "step state": (_returns(lambda state, value: (value, {})), "train_step"),
    "step leaf": (_returns(lambda state, value: ({"w": value}, {})), "train_step.*w"),
    "step metrics": (_returns(lambda state, value: (state, value)), "train_step"),
    "step metric": (_returns(lambda state, value: (state, {"m": value})), "train_step.*m"),
    "step total": (_returns(lambda state, value: (state, {"m": Mean(value, ONE)})), "m"),
    "step weight": (_returns(lambda state, value: (state, {"m": Mean(ONE, value)})), "m"),
    "loss": (_loss(lambda mean, value: value), "objective"),
    "loss mean": (_loss(lambda mean, value: ps.Loss(value, ONE, {})), "objective|loss"),
    "loss weight": (_loss(lambda mean, value: ps.Loss(mean, value, {})), "objective|loss|batch"),
    "loss metrics": (_loss(lambda mean, value: ps.Loss(mean, ONE, value)), "metrics|metric"),
    "loss metric": (_loss(lambda mean, value: ps.Loss(mean, ONE, {"m": value})), "m"),
    "loss total": (_loss(lambda mean, value: ps.Loss(mean, ONE, {"m": Mean(value, ONE)})), "m"),
    **{
        f"setting {name}": (_setting(name), name)
        for name in ps.FitConfig.model_fields
        if name not in ("epochs", "compile")  # a run without end; half a minute of compiling
    },
    "loader train": (_loader("train"), "train"),
    "loader val": (_loader("val"), "val"),
    "loaders": (lambda value, folder: fit(mlp().init(), value, mlp(), epochs=1, sinks=[]), "train|loader"),
    "snapshots": (lambda value, folder: _trained(mlp().init(), snapshots=value), "snapshots|fit|directory|x|words|a"),
    "callbacks": (lambda value, folder: _trained(mlp().init(), callbacks=value), "callbacks"),
    "sinks": (lambda value, folder: fit(mlp().init(), batches(1), mlp(), epochs=1, sinks=value), "sinks"),
    "program": (lambda value, folder: fit(mlp().init(), batches(1), value, epochs=1, sinks=[]), "program"),
    **{
        f"program {name}": (_built(name), name if name in ("precision", "scaler", "ema") else "program|" + name)
        for name in (
            *("model", "objective", "tx", "precision", "ema", "accumulate", "microbatches", "tail", "engine"),
            *("nonfinite", "keep_eval", "scaler"),
        )
    },
    "answer at EpochEnd": (_answer(events.EpochEnd), "callback"),
    "answer at StepEnd": (_answer(events.StepEnd), "callback"),
    "schedule": (_schedule, "schedule|lr"),
    "template": (
        lambda value, folder: _template("params/0.weight")(value, folder),
        "params/0.weight|nested too deeply",
    ),
    "template ema": (lambda value, folder: _template("ema")(value, folder), "ema|nested too deeply|without end"),
    **{
        f"save {name}": (_saved(name), name if name != "state" else "x|nested too deeply")
        for name in ("state", "loop", "meta")
    },
    "save step": (_saved("step"), "step"),
    "save metrics": (_saved("metrics"), "metric"),
}


def cases() -> list[tuple[str, str]]:
    """Every value in every place, in an order of its own."""
    found = [(place, value) for place in PLACES for value in VALUES]
    random.Random("purestep fuzzing").shuffle(found)
    return found


# --- a trial ----------------------------------------------------------------------------------------------------------


def trial(number: int, folder: Path) -> str | None:
    """None where the case of that number is diagnosed or works; else what went wrong."""
    place, value = cases()[number]
    found = check(place, value, folder)
    return found if found is None else f"{value!r} as {place}: {found}"


def check(place: str, value: str, folder: Path) -> str | None:
    """One value in one place."""
    hand_in, pattern = PLACES[place]
    held, here = VALUES[value](), folder / "here"
    here.mkdir()
    before, began = _generators(), time.monotonic()
    with contextlib.chdir(here), warnings.catch_warnings(action="ignore"), _quiet():
        found = _outcome(lambda: hand_in(held, folder), pattern)
    if found is None and _generators() != before:
        found = "the caller's generators have moved"
    if found is None and any(here.iterdir()) and place not in ("snapshots", "setting resume"):
        found = f"new files: {sorted(path.name for path in here.rglob('*'))}"
    if found is None and multiprocessing.active_children():
        found = "processes are left behind"
    if found is None and time.monotonic() - began > SECONDS:
        found = f"{time.monotonic() - began:.1f} s"
    return found


def _outcome(run: Callable[[], Any], pattern: str) -> str | None:
    try:
        result = run()
    except PurestepError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return None if re.search(pattern, text, re.DOTALL) else f"no {pattern!r} in {error!r}"
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        own = any(note.startswith(("in train_step, ", "in callback ", "in eval_step, ")) for note in notes)
        return None if own else f"{type(error).__name__}: {error}"
    state = getattr(result, "state", {})
    odd = [path for path, leaf in tree.with_paths(state) if not isinstance(leaf, Tensor)]
    return f"accepted, and the state has {odd}" if odd else None


def _generators() -> tuple[Any, ...]:
    numpys = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), numpys["key"].tolist(), numpys["pos"], random.getstate()


@contextlib.contextmanager
def _quiet() -> Any:
    log = logging.getLogger("purestep")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
