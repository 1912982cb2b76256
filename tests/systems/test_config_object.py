"""A configuration for Lightning's Trainer, feature by feature: its rows, and what it gets wrong or leaves open."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from helpers import assert_trees_close, tiny_mlp
from shipped import load
from systems.trainers import batches
from torch import nn

import purestep as ps
from purestep import config, events, metrics, optim
from purestep.config import from_lightning
from purestep.errors import ConfigError, NonFiniteError
from purestep.types import Empty

Settings = dict[str, Any]


TRAIN, VAL = batches(4, 4, 4, 4), batches(4, 4)


def program(plan: config.Plan, learning_rate: float = 0.1) -> ps.Program:
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    return ps.program(tiny_mlp(), objective, optim.chain(plan.clip, optim.sgd(learning_rate)), **plan.program)


def train(settings: Any, loaders: Any = (TRAIN, VAL), **fields: Any) -> ps.FitResult:
    """The run that a Trainer's arguments describe."""
    if isinstance(settings, dict):
        settings = {"max_epochs": 2, "enable_progress_bar": False, **settings}
    plan = from_lightning(settings)
    made = program(plan)
    assert made.init is not None
    return ps.fit(made.init(0), loaders, made, plan.fit, **plan.run, **fields)


def steps_of(history: dict[str, list[Any]]) -> list[int]:
    """Updates at which the validation set was scored."""
    scored = zip(history["step"], history["val_loss"], strict=True)
    return [step for step, loss in scored if loss is not None]


# --- what it is -------------------------------------------------------------------------------------------------------


class SomeConfig(pydantic.BaseModel):
    trainer: ps.FitConfig
    name: str = "x"


@pytest.mark.row("3.1", "3.20", "B29")
def test_a_mapping_an_object_or_a_file_describes_a_run_and_unknown_keys_are_warned_of(tmp_path: Path):
    class Trainer(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")
        max_epochs: int = 2
        precision: str = "bf16-mixed"
        accumulate_grad_batches: int = 2

    settings = Trainer().model_dump()
    (tmp_path / "trainer.json").write_text(json.dumps(settings))
    results = [train(one, progress=False) for one in (Trainer(), settings, tmp_path / "trainer.json")]
    for result in results:
        assert int(result.state.updates) == 4
        assert_trees_close(result.state, results[0].state, exact=True)

    with pytest.warns(UserWarning, match=r"'max_epoch' is not an argument.*did you mean 'max_epochs'"):
        from_lightning(Trainer(max_epoch=3))  # pyright: ignore[reportCallIssue]  # an extra
    with pytest.raises(ConfigError, match=r"'max_epoch' is not an argument.*cure: max_epochs"):
        from_lightning(Trainer(max_epoch=3), strict=True)  # pyright: ignore[reportCallIssue]  # an extra

    whole = SomeConfig(trainer=from_lightning(settings).fit)
    again = SomeConfig.model_validate(json.loads(whole.model_dump_json()))
    assert again == whole
    assert ps.FitConfig.from_dict(whole.trainer.to_dict()) == whole.trainer


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("3.2")
def test_an_accelerator_is_a_device_or_an_error_that_lists_what_there_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    found = {name: from_lightning({"max_epochs": 1, "accelerator": name}).device for name in ("cpu", "gpu", "auto")}
    assert found == {"cpu": "cpu", "gpu": "cuda", "auto": None}
    monkeypatch.setattr("purestep.loop.inputs.auto_device", lambda: torch.device("meta"))  # which nothing trains on
    assert train({"accelerator": "cpu"}).state.step.device.type == "cpu"
    for name in ("tpu", "hpu"):
        with pytest.raises(ConfigError, match=rf"accelerator='{name}' is not supported; there are auto, cpu"):
            from_lightning({"max_epochs": 1, "accelerator": name})


@pytest.mark.row("3.3", "3.4", "3.5")
@pytest.mark.parametrize(
    ("one", "several", "mesh"),
    [
        ({"strategy": "auto"}, {"strategy": "ddp"}, {}),
        ({"strategy": "auto"}, {"strategy": "fsdp", "devices": 2}, {"data": 1, "shard": 2}),
        ({"devices": 1}, {"devices": 2}, {"data": 2}),
        ({"devices": "auto"}, {"devices": "0,1"}, {"data": 2}),
        ({"devices": "1"}, {"devices": [0, 1]}, {"data": 2}),
        ({"num_nodes": 1}, {"num_nodes": 2, "devices": 4}, {"data": 8}),
    ],
)
def test_one_process_trains_and_several_are_a_mesh(one: Settings, several: Settings, mesh: dict[str, int]):
    assert train({"accelerator": "cpu", **one}).epochs == 2
    plan = from_lightning({"max_epochs": 1, "accelerator": "gpu", **several})
    assert dict(plan.mesh) == mesh
    assert plan.distribute["params"] == ("shard" if "shard" in mesh else "replicate")


@pytest.mark.row("3.6")
@pytest.mark.parametrize("name", ["64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"])
def test_each_precision_trains_and_only_one_has_a_scaler(name: str):
    state = train({"precision": name}).state
    dtype = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}
    assert {value.dtype for value in state.params.values()} == {dtype.get(name, torch.float32)}
    assert isinstance(state.scaler, Empty) == (name != "16-mixed")
    assert int(state.updates) == 8


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("3.8", "3.9")
@pytest.mark.parametrize(
    ("settings", "updates", "reason"),
    [
        ({"max_epochs": 3}, 12, "epochs"),
        ({"max_epochs": -1, "max_steps": 5}, 5, "steps"),
        ({"max_epochs": 3, "max_steps": 5}, 5, "steps"),
        ({"max_epochs": 1, "max_steps": 5}, 4, "epochs"),
        ({"max_epochs": 3, "max_time": {"microseconds": 1}, "min_epochs": 2}, 8, "max_time"),
        ({"max_epochs": 3, "max_time": "00:00:00:01", "min_steps": 12}, 12, "epochs"),
    ],
)
def test_the_first_limit_ends_the_run_but_not_before_the_minimum(settings: Settings, updates: int, reason: str):
    result = train(settings)
    assert (int(result.state.updates), result.stop_reason) == (updates, reason)


@pytest.mark.row("B30")
def test_a_run_without_a_limit_is_an_error_and_minus_one_says_that_it_is_meant():
    with pytest.raises(ConfigError, match=r"nothing limits the run \(Lightning would train 1000 epochs.*max_epochs=-1"):
        from_lightning({"max_steps": -1})
    assert from_lightning({"max_epochs": -1}).fit.epochs == -1


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.row("3.10", "3.11", "B31")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"val_check_interval": 1.0}, [4, 8]),
        ({"val_check_interval": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"val_check_interval": "1.0"}, [4, 8]),
        ({"val_check_interval": "1"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"val_check_interval": 0.5}, [2, 4, 6, 8]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6]),
        ({"val_check_interval": 6, "check_val_every_n_epoch": None}, [6]),
        ({"check_val_every_n_epoch": 2}, [8]),
    ],
)
def test_an_interval_goes_by_its_type_as_a_number_and_as_text(settings: Settings, steps: list[int]):
    assert steps_of(train(settings).history) == steps


@pytest.mark.row("3.11", "B31")
def test_an_interval_that_would_be_read_in_two_ways_is_explained():
    with pytest.warns(
        UserWarning, match=r"val_check_interval=6 is counted over the whole run.*check_val_every_n_epoch=None"
    ):
        from_lightning({"max_epochs": 1, "val_check_interval": 6})
    with pytest.raises(ConfigError, match=r"val_check_interval=0\.5 is a share of an epoch.*val_check_interval=100"):
        from_lightning({"max_epochs": 1, "val_check_interval": 0.5, "check_val_every_n_epoch": None})
    with pytest.raises(ConfigError, match=r"val_check_interval=2\.0: must be a number of batches"):
        from_lightning({"max_epochs": 1, "val_check_interval": 2.0})


@pytest.mark.row("3.12")
@pytest.mark.parametrize(("train_limit", "val_limit", "counts"), [(2, 1, (2, 1)), (0.5, 0.5, (2, 1)), (9, 1.0, (4, 2))])
def test_limits_are_numbers_or_shares_of_batches(train_limit: Any, val_limit: Any, counts: tuple[int, int]):
    seen: list[str] = []
    settings = {"max_epochs": 1, "limit_train_batches": train_limit, "limit_val_batches": val_limit}
    train(settings, callbacks=[lambda event: seen.append(type(event).__name__)])
    assert (seen.count("StepEnd"), seen.count("EvalStepEnd")) == counts
    assert "val_loss" not in train({"limit_val_batches": 0}).history


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.row("3.13", "B33")
def test_accumulation_makes_the_updates_of_whole_batches_and_steps_count_updates():
    whole = [tuple(torch.cat(part) for part in zip(*pair, strict=True)) for pair in (TRAIN[:2], TRAIN[2:])]
    parts = train({"accumulate_grad_batches": 2, "precision": "64-true"}).state
    assert_trees_close(parts.params, train({"precision": "64-true"}, (whole, VAL)).state.params, rtol=1e-6, atol=1e-8)
    assert int(train({"accumulate_grad_batches": 2, "max_epochs": -1, "max_steps": 3}).state.updates) == 3


# --- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("3.15")
@pytest.mark.parametrize("benchmark", [True, False])
def test_switches_of_torch_are_as_wanted_during_the_run_only(benchmark: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not benchmark)
    seen: list[tuple[bool, bool]] = []

    def note(event: Any) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))

    train({"deterministic": not benchmark, "benchmark": benchmark}, callbacks=[note])
    assert set(seen) == {(not benchmark, benchmark)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark is not benchmark
    with pytest.raises(ConfigError, match=r"cudnn_benchmark picks algorithms by timing.*cure: cudnn_benchmark=None"):
        from_lightning({"max_epochs": 1, "deterministic": True, "benchmark": True})


@pytest.mark.row("3.7", "3.16")
def test_loggers_are_off_one_or_several_and_hear_how_fast_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = ps.sinks.csv(tmp_path / "a.csv"), ps.sinks.jsonl(tmp_path / "b.jsonl")
    train({"logger": [first, second], "log_every_n_steps": 4})
    assert "steps_per_second" in (tmp_path / "a.csv").read_text().splitlines()[0]
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [4, 8]
    assert all(0 <= line["wait_fraction"] <= 1 for line in lines if line["kind"] == "step")

    heard: list[Any] = []
    train({"logger": heard.append})
    assert any(isinstance(event, events.FitEnd) for event in heard)
    capsys.readouterr()
    train({"logger": False})
    assert capsys.readouterr().out == ""
    train({"logger": True, "enable_progress_bar": True, "default_root_dir": str(tmp_path / "run")})
    assert "epoch 2/2" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "run" / "training_history.json").read_text())) == 2


@pytest.mark.row("3.19")
def test_an_anomaly_is_an_error_where_it_arises_and_the_mode_ends_with_the_run():
    spoiled = [(x.clone(), y) for x, y in TRAIN]
    spoiled[2][0][1, 0] = math.inf
    with pytest.raises(NonFiniteError, match=r"epoch 1, batch 3"):
        train({"detect_anomaly": True}, (spoiled, VAL))
    assert not torch.is_anomaly_enabled()
    seen: list[bool] = []
    train({"detect_anomaly": True}, callbacks=[lambda event: seen.append(torch.is_anomaly_enabled())])
    assert set(seen) == {True}


ACCEPTED: Settings = {
    "callbacks": [lambda event: None],
    "inference_mode": False,
    "use_distributed_sampler": False,
    "sync_batchnorm": True,
    "enable_autolog_hparams": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
    "limit_test_batches": 1.0,
    "limit_predict_batches": 1.0,
    "enable_checkpointing": False,
    "plugins": [],
    "benchmark": True,
}


@pytest.mark.row("B32")
def test_every_argument_of_the_trainer_is_honoured_or_refused_with_the_cure():
    from purestep.config.lightning import DEFAULTS

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, value in {**DEFAULTS, **ACCEPTED}.items():
            if name != "max_epochs":
                from_lightning({"max_epochs": 1, name: value})
        assert train(ACCEPTED).epochs == 2
    for name, value in {
        "profiler": "simple",
        "num_sanity_val_steps": 2,
        "plugins": ["x"],
        "limit_test_batches": 3,
    }.items():
        with pytest.raises(ConfigError, match=rf"{name}=.*cure: ."):
            from_lightning({"max_epochs": 1, name: value})


# --- the example ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Any:
    return load("from_config")


# A pair: settings added to the file, and the same settings as arguments of fit.
SWITCHES: list[tuple[Settings, Settings]] = [
    ({}, {}),
    ({"fast_dev_run": 2}, {"fast_dev_run": 2}),
    ({"overfit_batches": 1}, {"overfit_batches": 1}),
    ({"limit_train_batches": 0.5}, {"limit_batches": {"train": 0.5}}),
    ({"limit_val_batches": 2}, {"limit_batches": {"val": 2}}),
    ({"val_check_interval": 0.5}, {"evaluate_every": 0.5}),
    # Two batches are one update here; 1 batch would be half of one, and 1.0 is an epoch.
    ({"val_check_interval": 2, "check_val_every_n_epoch": None}, {"evaluate_every": 1}),
    ({"check_val_every_n_epoch": 3}, {"evaluate_every": 3.0}),
    ({"max_steps": 20}, {"steps": 20}),
    # Time is up at once, but not before the least number of epochs.
    ({"max_time": {"milliseconds": 1}}, {"max_time": 0.001}),
    ({"detect_anomaly": True}, {"detect_anomaly": True}),
    ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"clip": optim.clip_by_value(0.01)}),
    ({"gradient_clip_val": 0}, {"clip": optim.identity()}),
]
IN_CODE: Settings = {
    "precision": "16-mixed",
    "min_epochs": 10,
    "evaluate_every": 1.0,
    "accumulate": 2,
    "clip": optim.clip_by_global_norm(1.0),
    "deterministic": True,
}
"""The example's file in code."""


def from_code(example: Any, clip: optim.Transform, precision: str, accumulate: int, **fields: Any) -> ps.FitResult:
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    tx = optim.chain(clip, optim.adamw(1e-3))
    made = ps.program(example.network(0), objective, tx, precision=precision, accumulate=accumulate)
    return ps.fit(made.init(0), example.loaders(), made, progress=False, sinks=(), **fields)


def same(one: ps.FitResult, other: ps.FitResult) -> bool:
    """Every number of the state and of the history."""
    leaves = zip(ps.tree.leaves(one.state), ps.tree.leaves(other.state), strict=True)
    return one.history == other.history and all(torch.equal(left, right) for left, right in leaves)


@pytest.mark.row("3.10", "3.14", "3.17", "3.18", "B33")
@pytest.mark.slow
@pytest.mark.parametrize(("settings", "fields"), SWITCHES, ids=lambda value: "+".join(value) or "file")
def test_the_file_of_the_example_and_code_make_the_same_run(settings: Settings, fields: Settings, example: Any):
    file = config.read(example.FILE)
    found = example.train(file | {"max_epochs": 12} | settings, 0)
    assert same(found, from_code(example, **IN_CODE | {"epochs": 12} | fields))


@pytest.mark.slow
def test_the_example_learns_and_goes_on_where_it_was(example: Any, tmp_path: Path):
    accuracy = example.main(example.Config(runs=tmp_path, epochs=12))
    assert accuracy > 0.9  # 63 % are of the larger class
    assert example.main(example.Config(runs=tmp_path, epochs=12)) == accuracy  # nothing is left to do


def test_two_different_runs_of_the_example_are_told_apart(example: Any):
    file = config.read(example.FILE) | {"max_epochs": 2, "min_epochs": None}
    code = {**IN_CODE, "epochs": 2, "min_epochs": None}
    found = example.train(file, 0)
    assert same(found, from_code(example, **code))
    for change in ({"accumulate": 1}, {"precision": "32-true"}, {"clip": optim.identity()}, {"evaluate_every": 0.5}):
        assert not same(found, from_code(example, **{**code, **change}))
