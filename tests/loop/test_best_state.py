"""The state of the best row comes back, from snapshots and from memory; and the view of a state that was scored is the
default of all that reads a state.
"""

from __future__ import annotations

import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import nn

import purestep as ps
from purestep import events, optim
from purestep.errors import ConfigError, Corrupt, StateError
from purestep.types import Program, TrainState

fit = partial(ps.fit, progress=False)
CRITERION = nn.CrossEntropyLoss()


def mlp(**options: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(CRITERION), optim.sgd(0.5), **options)


TRAIN, VAL = [vector_batch(8, seed) for seed in range(4)], [vector_batch(8, 9)]


class Worse:
    """A callback that spoils the weights of later epochs, so that an earlier row is the best one."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen: dict[int, Any] = {}

    def __call__(self, event: Any) -> Any:
        if isinstance(event, events.EpochEnd):
            self.seen[event.epoch] = ps.clone(event.state)
        if isinstance(event, events.StepEnd) and event.epoch >= self.after:
            return event.state._replace(params={k: -3.0 * p for k, p in event.state.params.items()})
        return None


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize("snapshots", [False, True])
def test_the_best_state_is_that_of_the_best_row(snapshots: bool, compiled: bool, tmp_path: Path):
    program, worse = mlp(), Worse(2)
    options: dict[str, Any] = {"compile": {"backend": "aot_eager"} if compiled else False}
    if snapshots:
        options["snapshots"] = ps.Snapshots(tmp_path / "run", keep=1)
    result = fit(program.init(), (TRAIN, VAL), program, epochs=4, callbacks=[worse], **options)
    assert result.best is not None
    assert result.best["epoch"] == 2
    assert_trees_close(result.best_state, worse.seen[2], exact=True)
    assert int(result.state.step) == 16
    assert ps.evaluate(result.best_state, VAL, program.eval_step)["loss"] == result.best["val_loss"]
    live = ps.compile_step(program.train_step, donate=True, backend="aot_eager") if compiled else program.train_step
    live(result.state, TRAIN[0])  # donates it
    assert isinstance(result.best_state, TrainState)


@pytest.mark.parametrize("how", [{"keep_best": 0, "keep": 1}, {"monitor": "train_loss", "keep": 1, "keep_best": 1}])
def test_snapshots_that_delete_the_best_one_are_no_place_for_it(how: dict[str, Any], tmp_path: Path):
    program, worse = mlp(), Worse(1)
    with ps.Snapshots(tmp_path, **how) as snapshots:
        result = fit(program.init(), (TRAIN, VAL), program, epochs=3, callbacks=[worse], snapshots=snapshots)
    assert_trees_close(result.best_state, worse.seen[1], exact=True)


def test_without_a_metric_there_is_none():
    program = mlp()
    result = fit(program.init(), TRAIN, program, epochs=1)
    assert result.best is result.best_state is None
    with pytest.raises(ConfigError, match="early_stopping without a metric") as caught:
        fit(program.init(), TRAIN, program, epochs=1, early_stopping=1)
    assert caught.value.hint == "monitor='train_loss'"
    result = fit(program.init(), TRAIN, program, epochs=2, monitor="train_loss")
    assert result.best is not None
    assert int(result.best_state.step) == 4 * result.best["epoch"]


def test_a_best_state_that_is_damaged_is_an_error(tmp_path: Path):
    program = mlp()
    result = fit(program.init(), TRAIN, program, epochs=2, monitor="train_loss", snapshots=tmp_path)
    assert result.best is not None
    for file in (tmp_path / str(result.best["step"]) / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(Corrupt):
        _ = result.best_state


def test_a_result_can_be_pickled_with_its_best_state(tmp_path: Path):
    program = mlp()
    for options in ({}, {"snapshots": tmp_path / "run"}):
        result = fit(program.init(), (TRAIN, VAL), program, epochs=2, **options)
        loaded = pickle.loads(pickle.dumps(result))
        assert_trees_close(loaded.best_state, result.best_state, exact=True)


def test_a_run_that_is_interrupted_has_the_best_so_far():
    program = mlp()

    def stop(event: Any) -> None:
        if isinstance(event, events.StepEnd) and event.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(program.init(), (TRAIN, VAL), program, epochs=4, callbacks=[stop])
    result = getattr(caught.value, "result", None)
    assert result is None or result.best_state is not None


# --- one view ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_what_is_scored_is_what_is_shipped(buffers: Any, tmp_path: Path):
    net = tiny_convnet()
    average = ps.ema.average(0.9, buffers=buffers)
    program = ps.program(net, ps.supervised(CRITERION), optim.sgd(0.5), ema=average)
    x = [image_batch(8, seed) for seed in range(4)]
    result = fit(program.init(), (x, x[:1]), program, epochs=2)
    state, (inputs, labels) = result.state, x[0]
    scored = result.history["val_loss"][-1]
    raw = ps.evaluate(state, x[:1], program.eval_step, view="params")["loss"]
    assert result.view == "ema"
    assert raw != scored
    assert ps.evaluate(state, x[:1], program.eval_step)["loss"] == scored
    assert float(program.eval_step(state, x[0])["loss"]) == pytest.approx(scored, rel=1e-6)  # type: ignore[misc]
    for view, loss in ((None, scored), ("ema", scored), ("params", raw)):
        assert float(CRITERION(program.bind(state, view=view)(inputs), labels)) == pytest.approx(loss, rel=1e-6)  # type: ignore[misc]
        ps.load_into(net, state, view)
        assert CRITERION(net.eval()(inputs), labels).item() == pytest.approx(loss, rel=1e-6)
        ps.export_weights(tmp_path / "w.pt", program, state, view)
        net.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
        assert CRITERION(net.eval()(inputs), labels).item() == pytest.approx(loss, rel=1e-6)
        if view:  # a view of the state is a state with that view
            shown = ps.view(state, view)
            assert ps.evaluate(shown, x[:1], program.eval_step)["loss"] == pytest.approx(loss)
            assert ps.evaluate(shown, x[:1], program.eval_step, view="ema")["loss"] == pytest.approx(loss)
    ours = program.bind(state, train=True)  # type: ignore[misc]
    theirs = program.bind(state, view="params", train=True)  # type: ignore[misc]
    found = []
    for call in (ours, theirs):
        with ps.rng.scoped(0):
            found.append(call(inputs))
    assert torch.equal(*found)


@pytest.mark.compile
@pytest.mark.parametrize("on", ["ema", "params"])
def test_a_compiled_run_scores_the_same_view(on: Any):
    program = mlp(ema=0.9)
    options: dict[str, Any] = {"epochs": 2, "evaluate_on": on}
    eager = fit(program.init(), (TRAIN, VAL), program, **options)
    compiled = fit(program.init(), (TRAIN, VAL), program, compile={"backend": "aot_eager"}, **options)
    assert compiled.history["val_loss"] == pytest.approx(eager.history["val_loss"], rel=1e-5)
    assert eager.view == compiled.view == on
    both = ps.compile_program(program, backend="aot_eager", donate=True)
    live, _ = both.train_step(ps.clone(eager.state), TRAIN[0])
    for view in ("params", "ema", None):
        expected = ps.evaluate(TrainState(*live), VAL, program.eval_step, view=view)["loss"]
        assert ps.evaluate(live, VAL, both.eval_step, view=view)["loss"] == pytest.approx(expected, rel=1e-5)  # type: ignore[arg-type]


def test_a_view_that_a_state_has_not():
    program = mlp()
    state = program.init()  # type: ignore[misc]
    assert ps.evaluate(state, VAL, program.eval_step, view="params") == ps.evaluate(state, VAL, program.eval_step)  # type: ignore[arg-type]
    for call in (
        lambda: ps.evaluate(state, VAL, program.eval_step, view="ema"),  # type: ignore[arg-type]
        lambda: program.bind(state, view="ema"),  # type: ignore[misc]
        lambda: ps.load_into(tiny_mlp(), state, "ema"),
    ):
        with pytest.raises(StateError, match="no average"):
            call()
    with pytest.raises(ConfigError, match='"params" or "ema"'):
        ps.evaluate(state, VAL, program.eval_step, view="best")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="not a TrainState"):
        ps.evaluate({"w": torch.ones(1)}, VAL, lambda state, batch: {}, view="ema")


class Pair(NamedTuple):
    maker: TrainState
    other: TrainState


def test_a_tree_of_states_is_evaluated_as_it_is():
    program = mlp(ema=0.9)
    pair = Pair(program.init(), program.init())  # type: ignore[misc]
    seen: list[Any] = []
    ps.evaluate(pair, VAL, lambda state, batch: seen.append(state) or {})
    assert seen == [pair]


def test_the_console_names_the_view(capsys: pytest.CaptureFixture[str]):
    for options, line in (({}, "averaged weights (ema)"), ({"evaluate_on": "params"}, 'pass view="params"')):
        program = mlp(ema=0.5)
        ps.fit(program.init(), (TRAIN, VAL), program, epochs=1, **options)
        said = capsys.readouterr().out.splitlines()
        assert line in said[0]
        assert max(map(len, said)) < 120
    for loaders, average in ((TRAIN, 0.5), ((TRAIN, VAL), None)):
        program = mlp(ema=average)
        ps.fit(program.init(), loaders, program, epochs=1)
        assert "evaluates" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("average", "limits", "is_short"),
    [
        (0.99, {"epochs": 4}, True),
        (0.99, {"steps": 12}, True),
        (0.99, {"epochs": -1, "steps": 10}, True),
        (0.5, {"epochs": 4}, False),
        (ps.ema.average(0.99, warmup=True), {"epochs": 4}, False),
        (None, {"epochs": 4}, False),
        (0.99, {"fast_dev_run": True}, False),
    ],
)
def test_a_run_too_short_for_its_average_says_so(
    average: Any, limits: dict[str, Any], is_short: bool, caplog: pytest.LogCaptureFixture
):
    program = mlp(ema=average)
    with caplog.at_level(logging.WARNING, "purestep"):
        fit(program.init(), (TRAIN, VAL), program, **limits)
    said = [line for line in caplog.messages if "of the first weights" in line]
    assert len(said) == is_short
    assert all("warmup=True in ps.ema.average" in line for line in said)


def test_a_run_without_updates_is_not_warned_of_its_average(caplog: pytest.LogCaptureFixture) -> None:
    program = mlp(ema=0.99, accumulate=5, tail="drop")
    assert int(fit(program.init(), TRAIN, program, epochs=1).state.updates) == 0
    assert "of the first weights" not in caplog.text
