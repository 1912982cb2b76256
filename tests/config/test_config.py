from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from purestep import config
from purestep.config import FitConfig, from_lightning, sources
from purestep.config import fields as config_values
from purestep.errors import ConfigError, RankError
from purestep.stopping import EarlyStopping

FIELDS = {
    *("epochs steps min_epochs min_steps max_time evaluate_every evaluate_on monitor mode early_stopping".split()),
    *("log_every resume compile donate device deterministic cudnn_benchmark tf32 detect_anomaly fast_dev_run".split()),
    *("overfit_batches limit_batches progress check_every".split()),
}

# Every argument in the signature of lightning 2.6.6's Trainer.
TRAINER = set(
    """accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs max_steps
    min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
    val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing
    enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm
    deterministic benchmark inference_mode use_distributed_sampler profiler detect_anomaly barebones plugins
    sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams model_registry""".split()
)


def test_the_fields_are_those_that_are_documented():
    assert set(FitConfig.model_fields) == FIELDS


def test_a_field_has_a_default_for_type_checkers_too():
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(config.settings))) if isinstance(node, ast.Call)]
    found = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Field"]
    assert len(found) > 15
    # They take a field as required if its default has no name.
    assert all("default" in {keyword.arg for keyword in call.keywords} for call in found)


def test_a_config_is_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        FitConfig(epochs=1).epochs = 2  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test


def test_an_unknown_field_names_the_nearest_and_lists_what_there_is():
    with pytest.raises(
        ConfigError, match=r"'epoch' is not a setting of fit; the settings are epochs, steps.*cure: epochs"
    ):
        FitConfig(epoch=3)  # pyright: ignore[reportCallIssue]  # the point of the test


@pytest.mark.parametrize(
    ("field", "builder"),
    [("precision", "program"), ("learning_rate", "adamw"), ("snapshots", "fit"), ("gradient_clip_val", "optim.chain"),
     ("logger", "sinks"), ("patience", "early_stopping=5"), ("optimizer", "ps.program"), ("criterion", "supervised")],
)  # fmt: skip
def test_a_setting_of_another_builder_is_sent_there(field: str, builder: str):
    with pytest.raises(ConfigError, match=rf"'{field}' is not a setting of fit \(cure: .*{builder}"):
        FitConfig.from_dict({"epochs": 1, field: 1})


def test_one_limit_is_required_and_minus_one_says_that_none_is_wanted():
    with pytest.raises(ConfigError, match=r"nothing limits the run.*cure: pass epochs=10"):
        FitConfig()
    assert FitConfig(epochs=-1).epochs == -1
    assert FitConfig(max_time=60).epochs is None
    assert FitConfig(fast_dev_run=True).fast_dev_run == 1


BAD = [
    ({"epochs": 0}, r"epochs=0: must be a whole number of at least 1, or -1 for no limit"),
    ({"epochs": 1.0}, r"epochs=1\.0: must be a whole number"),
    ({"epochs": True}, r"epochs=True: must be a whole number of at least 1, or -1"),
    ({"steps": "many"}, r"steps='many': must be a whole number"),
    ({"epochs": 1, "min_epochs": 0}, r"min_epochs=0: must be a whole number of at least 1, or None"),
    ({"epochs": 2, "min_epochs": 3}, r"min_epochs=3 is more than epochs=2"),
    ({"steps": 2, "min_steps": 3}, r"min_steps=3 is more than steps=2"),
    ({"max_time": 0}, r"max_time=0: must be seconds > 0"),
    ({"max_time": float("nan")}, r"max_time=nan: must be seconds > 0"),
    ({"max_time": "1:30"}, r"max_time='1:30': must be seconds > 0, a timedelta"),
    ({"max_time": {"hour": 1}}, r"max_time=\{'hour': 1\}: must be seconds"),
    ({"epochs": 1, "evaluate_every": 0}, r"evaluate_every=0: must be a number of updates"),
    ({"epochs": 1, "evaluate_every": 1.5}, r"evaluate_every=1\.5: must be a number of updates"),
    ({"epochs": 1, "evaluate_every": {"val": 0.0}}, r"evaluate_every=\{'val': 0\.0\}: must be a number of updates"),
    ({"epochs": 1, "evaluate_every": {1: 1}}, r"evaluate_every=\{1: 1\}: must have names of loaders as its keys"),
    ({"epochs": 1, "evaluate_on": "raw"}, r"evaluate_on='raw': must be 'params' or 'ema'"),
    ({"epochs": 1, "monitor": ""}, r"monitor='': must be the name of a metric"),
    ({"epochs": 1, "monitor": "val_accuracy"}, r"monitor='val_accuracy' does not say .*mode=\"max\""),
    ({"epochs": 1, "monitor": "x", "mode": "up"}, r"mode='up': must be 'min' or 'max'"),
    ({"epochs": 1, "mode": "max"}, r"mode='max' without a metric"),
    ({"epochs": 1, "early_stopping": 0}, r"early_stopping=0: patience=0 must be an int of at least 1"),
    (
        {"epochs": 1, "early_stopping": {"patience": 1, "delta": 1}},
        r"has no setting 'delta'; the settings are patience.*cure: early_stopping=\{'patience': 1, 'min_delta': 1\}",
    ),
    (
        {"epochs": 1, "early_stopping": {"patience": 3, "mindelta": 2}},
        r"has no setting 'mindelta'.*cure: early_stopping=\{'patience': 3, 'min_delta': 2\}",
    ),
    ({"epochs": 1, "early_stopping": {"x": 2}}, r"has no setting 'x'; the settings.*cure: early_stopping=10"),
    (
        {"epochs": 1, "early_stopping": {"min_delta": 1.0}},
        r"early_stopping=\{'min_delta': 1\.0\}: the mapping has no patience .*'patience': 10, 'min_delta': 1\.0",
    ),
    ({"epochs": 1, "early_stopping": {"patients": 3}}, r"cure: early_stopping=\{'patience': 3\}"),
    ({"epochs": 1, "early_stopping": {"patience": 1, "min_delta": -1}}, r"min_delta=-1 must be"),
    ({"epochs": 1, "log_every": -1}, r"log_every=-1: must be a whole number of at least 0"),
    ({"epochs": 1, "resume": 3}, r"resume=3: must be \"auto\", the path of a snapshot, or None"),
    ({"epochs": 1, "resume": torch.ones(2)}, r"resume=tensor\(.*\): must be \"auto\""),
    ({"epochs": 1, "resume": True}, r"resume=True: must be \"auto\""),
    ({"epochs": 1, "resume": "a\0"}, r"must be \"auto\""),
    ({"epochs": 1, "compile": "always"}, r"compile='always': must be \"auto\", True, False or a mapping"),
    ({"epochs": 1, "donate": "all"}, r"donate='all': must be True or False or 'init'"),
    ({"epochs": 1, "device": "gpu"}, r"device='gpu': must be a torch device"),
    ({"epochs": 1, "deterministic": "loud"}, r"deterministic='loud': must be True or False or 'warn'"),
    ({"epochs": 1, "tf32": 1}, r"tf32=1: must be True, False or None"),
    ({"epochs": 1, "detect_anomaly": 1}, r"detect_anomaly=1: must be True or False"),
    ({"epochs": 1, "detect_anomaly": True, "compile": True}, r"detect_anomaly works only in eager mode"),
    ({"fast_dev_run": -1}, r"fast_dev_run=-1: must be a whole number of at least 0"),
    ({"epochs": 1, "overfit_batches": 1.5}, r"overfit_batches=1\.5: must be a number of batches"),
    ({"epochs": 1, "overfit_batches": 1, "limit_batches": 1}, r"overfit_batches already sets the batches"),
    ({"epochs": 1, "limit_batches": 0}, r"limit_batches=0: must be a number of batches \(an int of at least 1\)"),
    ({"epochs": 1, "limit_batches": 2.0}, r"limit_batches=2\.0: must be a number of batches"),
    ({"epochs": 1, "limit_batches": {"train": 0}}, r"limit_batches leaves no batch to train on"),
    ({"epochs": 1, "log_every": True}, r"log_every=True: must be a whole number"),
    ({"epochs": 1, "check_every": -1}, r"check_every=-1: must be a whole number of at least 0"),
    ({"epochs": 2**63}, r"epochs=9223372036854775808: must be a whole number of at least 1, or -1 for no limit \(cure"),
    ({"epochs": 1, "device": 2**63}, r"device=9223372036854775808: must be a torch device"),
    ({"epochs": 1, "max_time": {"days": 1e12}}, r"max_time=\{'days': 1000000000000.0\}: must be seconds > 0"),
    ({"epochs": 1, "compile": {1: 2}}, r"compile=\{1: 2\}: must be \"auto\", True, False or a mapping"),
    ({"epochs": 1, "progress": "bar"}, r"progress='bar': must be True or False"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_value_is_an_error_that_names_the_field_the_value_and_the_cure(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        FitConfig(**fields)
    assert caught.value.where == "fit" or caught.value.hint
    assert caught.value.hint
    assert "pydantic" not in str(caught.value)


NO_NUMBERS = [np.int64(1), np.int64(100), np.True_, np.float32(0.5), torch.tensor(1), torch.tensor(0.5), True]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["evaluate_every", "limit_batches", "overfit_batches", "max_time"])
def test_a_number_of_another_library_does_not_become_a_share(name: str, value: Any):
    with pytest.raises(ConfigError, match=rf"{name}=.*: must be "):
        FitConfig(**{"epochs": 1, name: value})
    lightning = {"evaluate_every": "val_check_interval", "limit_batches": "limit_train_batches"}.get(name, name)
    with pytest.raises(ConfigError, match=rf"{lightning}=.*: must be "):
        from_lightning({"max_epochs": 1, lightning: value})


@pytest.mark.parametrize("name", ["evaluate_every", "limit_batches", "overfit_batches"])
def test_a_count_above_all_counts_does_not_become_a_share(name: str):
    with pytest.raises(ConfigError, match=rf"{name}=9223372036854775808: must be a number of"):
        FitConfig(**{"epochs": 1, name: 2**63})
    assert getattr(FitConfig(**{"epochs": 1, name: 2**63 - 1}), name) == 2**63 - 1


@pytest.mark.parametrize("name", FitConfig.model_fields)
def test_the_cure_of_every_setting_is_accepted(name: str):
    others = {"epochs": 1, "monitor": "val_loss"}
    with pytest.raises(ConfigError) as found:
        FitConfig(**{**others, name: object()})
    cure: dict[str, Any] = eval(f"dict({found.value.hint})")
    assert getattr(FitConfig(**{**others, **cure}), name) is not None


def test_every_finding_is_in_one_message():
    with pytest.raises(ConfigError, match=r"epochs=0: .*; log_every=-1: .*; 'epoch' is not"):
        FitConfig.from_dict({"epochs": 0, "log_every": -1, "epoch": 1})


def test_numbers_keep_their_type_because_it_says_what_they_count():
    updates, epochs = FitConfig(epochs=1, evaluate_every=1), FitConfig(epochs=1, evaluate_every=1.0)
    assert (type(updates.interval("val")), type(epochs.interval("val"))) == (int, float)
    assert type(FitConfig.from_dict({"epochs": 1, "evaluate_every": "1"}).evaluate_every) is int
    assert type(FitConfig.from_dict({"epochs": 1, "evaluate_every": "1.0"}).evaluate_every) is float


@pytest.mark.parametrize("value", [5400, 5400.0, "5400", timedelta(hours=1.5), {"minutes": 90}, "00:01:30:00"])
def test_a_duration_is_read_in_each_of_its_forms(value: Any):
    assert FitConfig(max_time=value).max_time == 5400.0


def test_intervals_and_limits_of_one_loader():
    each = FitConfig(epochs=1, evaluate_every={"val": 100, "slow": 2.0}, limit_batches={"train": 0.5, "slow": 0})
    assert [each.interval(name) for name in ("val", "slow", "other")] == [100, 2.0, 1.0]
    assert [each.limit(name) for name in ("train", "slow", "other")] == [0.5, 0, None]
    both = FitConfig(epochs=1, limit_batches=3)
    assert (both.interval("val"), both.limit("train"), both.limit("val")) == (1.0, 3, 3)


def test_a_share_of_the_run_needs_its_length_before_it_begins():
    late = EarlyStopping(patience=2, start_ratio=0.5)
    for limit in ({"epochs": 4}, {"steps": 100}, {"epochs": -1, "steps": 100}):
        assert FitConfig(early_stopping=late, **limit).early_stopping == late
    for limit in ({"max_time": 60}, {"epochs": -1}, {"epochs": -1, "steps": -1}):
        with pytest.raises(ConfigError, match=r"start_ratio=0\.5 is a share of the run, but neither epochs nor steps"):
            FitConfig(early_stopping=late, **limit)


def test_another_monitor_does_not_keep_the_direction_of_the_first():
    with pytest.raises(ConfigError, match="does not say"):
        sources.resolve(FitConfig(epochs=1, monitor="val_loss"), {"monitor": "val_f1"})


FULL = FitConfig(
    epochs=100,
    steps=-1,
    min_steps=5,
    max_time="01:00:00:00",  # pyright: ignore[reportArgumentType]  # any of its forms
    evaluate_every={"val": 1.0, "slow": 500},
    monitor="val_f1",
    mode="max",
    early_stopping=EarlyStopping(20, 0.01, 0.5),
    resume=None,
    compile={"backend": "aot_eager"},
    donate="init",
    device="cuda:1",
    deterministic="warn",
    tf32=True,
    limit_batches={"train": 0.25, "val": 3},
    progress=False,
)


@pytest.mark.parametrize("one", [FULL, FitConfig(epochs=3), FitConfig(steps=9, early_stopping=EarlyStopping(2))])
def test_a_config_comes_back_from_json_as_it_was(one: FitConfig, tmp_path: Path):
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(one.to_dict(), allow_nan=False))
    back = sources.resolve(path)
    assert back == one
    assert {name: type(value) for name, value in back} == {name: type(value) for name, value in one}


@settings(deadline=None)
@given(
    fields=st.fixed_dictionaries(
        {"epochs": st.integers(1, 9) | st.just(-1)},
        optional={
            "evaluate_every": st.integers(1, 9) | st.sampled_from([0.25, 1.0, 3.0]),
            "limit_batches": st.dictionaries(st.text(min_size=1), st.integers(1, 9) | st.floats(0.01, 1.0)),
            "early_stopping": st.builds(EarlyStopping, st.integers(1, 9), st.floats(0, 1)),
            "max_time": st.floats(1, 1e6),
            "donate": st.sampled_from([True, False, "init"]),
        },
    )
)
def test_any_config_comes_back_from_its_dict(fields: dict[str, Any]):
    one = FitConfig(**fields)
    back = FitConfig.from_dict(json.loads(json.dumps(one.to_dict())))
    assert back == one
    assert type(back.evaluate_every) is type(one.evaluate_every)


def test_toml_is_read_too(tmp_path: Path):
    path = tmp_path / "fit.toml"
    path.write_text("epochs = 3\nevaluate_every = 1.0\n[early_stopping]\npatience = 2\n")
    assert sources.resolve(path) == FitConfig(epochs=3, evaluate_every=1.0, early_stopping=EarlyStopping(2))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("fit.yaml", "epochs: 3", r"fit\.yaml: the suffix '\.yaml' is unknown \(cure: pass a \.json or \.toml file"),
        ("fit.json", "{epochs: 3}", r"fit\.json: the file does not parse"),
        ("fit.toml", "epochs =", r"fit\.toml: the file does not parse"),
        ("fit.json", "[1]", r"fit\.json: the file holds a list"),
        ("fit.json", None, r"fit\.json: the file cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, text: str | None, message: str, tmp_path: Path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        sources.resolve(tmp_path / name)


class Named(NamedTuple):
    n_epochs: int = 5
    learning_rate: float = 0.1


@dataclasses.dataclass
class Plain:
    n_epochs: int = 5
    learning_rate: float = 0.1


@dataclasses.dataclass(slots=True)
class Slotted:
    n_epochs: int = 5
    learning_rate: float = 0.1


class Modelled(pydantic.BaseModel):
    n_epochs: int = 5
    learning_rate: float = 0.1


@pytest.mark.parametrize(
    "one", [Named(), Plain(), Slotted(), Modelled(), argparse.Namespace(n_epochs=5, learning_rate=0.1)]
)
def test_an_object_of_the_callers_own_is_read_and_its_other_builders_settings_left_alone(one: object):
    assert sources.resolve(one) == FitConfig(epochs=5)


def test_a_typo_in_an_object_is_found():
    with pytest.raises(ConfigError, match=r"'log_evry' is not a setting of fit.*cure: log_every"):
        sources.resolve(argparse.Namespace(epochs=5, log_evry=1))


def test_a_mapping_must_mean_something_by_every_key():
    with pytest.raises(ConfigError, match="'weight_decay' is not a setting of fit"):
        sources.resolve({"epochs": 5, "weight_decay": 0.1})


def test_names_of_other_trainers_are_understood_in_a_mapping_and_not_as_a_keyword():
    found = sources.resolve({"max_epochs": 5, "compile_model": True, "early_stopping_patience": 3})
    assert (found.epochs, found.compile, found.early_stopping) == (5, True, EarlyStopping(3))
    with pytest.raises(ConfigError, match=r"'max_epochs' is not a setting of fit.*cure: epochs"):
        sources.resolve(None, {"max_epochs": 5})


def test_two_names_for_one_setting_that_differ_are_an_error():
    assert sources.resolve({"max_epochs": 5, "n_epochs": 5}).epochs == 5
    with pytest.raises(ConfigError, match=r"'epochs' has two values, under two names: 5 and 6"):
        sources.resolve({"max_epochs": 5, "n_epochs": 6})


def test_fields_win_over_the_config():
    base = FitConfig(epochs=5, log_every=10)
    assert sources.resolve(base, {"epochs": 7}) == FitConfig(epochs=7, log_every=10)
    assert base.epochs == 5
    assert sources.resolve(None, {"steps": 3}) == FitConfig(steps=3)


@pytest.mark.parametrize("one", [3, [("epochs", 3)], FitConfig, object()])
def test_what_holds_no_settings_is_refused(one: object):
    with pytest.raises(ConfigError, match="holds no settings"):
        sources.resolve(one)


def test_a_config_nests_in_a_bigger_one():
    class Experiment(pydantic.BaseModel):
        trainer: FitConfig

    assert Experiment.model_validate({"trainer": {"epochs": 3}}).trainer == FitConfig(epochs=3)
    with pytest.raises(pydantic.ValidationError, match="'epoch' is not a setting of fit"):
        Experiment.model_validate({"trainer": {"epoch": 3}})


def test_text_is_read_as_what_it_spells():
    assert config_values.literal(" 1.0 ") == 1.0
    assert config_values.literal("01:00:00:00") == "01:00:00:00"
    assert config_values.literal(None) is None


# ---- from_lightning


def plan(**settings: Any) -> config.Plan:
    return from_lightning({"max_epochs": 3, **settings})


def test_every_argument_of_the_trainer_is_known():
    from purestep.config.lightning import DEFAULTS

    assert set(DEFAULTS) == TRAINER


def test_the_arguments_are_those_of_the_installed_lightning():
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    import inspect

    from purestep.config.lightning import DEFAULTS

    signature = inspect.signature(lightning.Trainer.__init__).parameters
    theirs = {name: parameter.default for name, parameter in signature.items() if name != "self"}
    assert set(theirs) <= set(DEFAULTS)
    assert {name: DEFAULTS[name] for name in theirs} == theirs


def test_a_trainer_left_at_its_defaults_is_a_plain_fit():
    from purestep.config.lightning import DEFAULTS

    found = from_lightning({**DEFAULTS, "max_epochs": 3})
    assert found.fit == FitConfig(epochs=3, evaluate_every=1.0)
    assert found.program == {"precision": "32-true", "accumulate": 1}
    assert (found.device, found.run) == (None, {})


def test_what_is_honoured_reaches_its_builder():
    found = from_lightning(
        {
            "accelerator": "cpu",
            "devices": 1,
            "precision": "bf16",
            "max_epochs": 10,
            "min_epochs": 2,
            "max_steps": 100,
            "min_steps": 5,
            "max_time": "00:00:10:00",
            "limit_train_batches": 0.5,
            "limit_val_batches": 3,
            "val_check_interval": 0.25,
            "log_every_n_steps": 10,
            "enable_progress_bar": False,
            "accumulate_grad_batches": 4,
            "deterministic": "warn",
            "detect_anomaly": True,
            "default_root_dir": "runs/x",
            "logger": False,
        }
    )
    assert found.fit == FitConfig(
        epochs=10,
        min_epochs=2,
        steps=100,
        min_steps=5,
        max_time=600.0,
        limit_batches={"train": 0.5, "val": 3},
        evaluate_every=0.25,
        log_every=10,
        progress=False,
        deterministic="warn",
        detect_anomaly=True,
        device="cpu",
    )
    assert found.program == {"precision": "bf16-mixed", "accumulate": 4}
    assert found.device == "cpu"
    assert found.run == {"snapshots": "runs/x", "sinks": ()}


GRADIENTS = {"w": torch.tensor([3.0, 4.0])}


@pytest.mark.parametrize(
    ("settings", "clipped"),
    [
        ({}, [3.0, 4.0]),
        ({"gradient_clip_val": 0}, [3.0, 4.0]),
        ({"gradient_clip_val": 0.0, "gradient_clip_algorithm": "value"}, [3.0, 4.0]),
        ({"gradient_clip_val": 1}, [0.6, 0.8]),
        ({"gradient_clip_val": "1.0", "gradient_clip_algorithm": "norm"}, [0.6, 0.8]),
        ({"gradient_clip_val": 3.5, "gradient_clip_algorithm": "value"}, [3.0, 3.5]),
    ],
)
def test_clipping_is_by_norm_unless_said_and_zero_is_off(settings: dict[str, Any], clipped: list[float]):
    clip = plan(**settings).clip
    updates, _ = clip.update(GRADIENTS, clip.init(GRADIENTS), GRADIENTS)
    torch.testing.assert_close(updates["w"], torch.tensor(clipped))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        *((None, "32-true"), (64, "64-true"), ("64", "64-true"), (32, "32-true"), (16, "16-mixed"), ("16", "16-mixed")),
        *(("bf16", "bf16-mixed"), ("bf16-true", "bf16-true"), ("16-true", "16-true"), ("64-true", "64-true")),
    ],
)
def test_precision_by_any_of_its_names(value: Any, name: str):
    assert plan(precision=value).program["precision"] == name


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({"val_check_interval": 1.0}, 1.0),
        ({"val_check_interval": 1}, 1),
        ({"val_check_interval": "1.0"}, 1.0),
        ({"val_check_interval": "1"}, 1),
        ({"val_check_interval": 0.25}, 0.25),
        ({"check_val_every_n_epoch": 3}, 3.0),
        ({"val_check_interval": 100, "check_val_every_n_epoch": None}, 100),
        ({"val_check_interval": 100, "check_val_every_n_epoch": None, "accumulate_grad_batches": 4}, 25),
    ],
)
def test_the_validation_interval_goes_by_type(settings: dict[str, Any], every: int | float):
    found = plan(**settings).fit.evaluate_every
    assert (found, type(found)) == (every, type(every))


def test_an_interval_that_lightning_counts_from_each_epoch_is_said():
    with pytest.warns(UserWarning, match=r"val_check_interval=100 is counted over the whole run") as caught:
        assert plan(val_check_interval=100).fit.evaluate_every == 100
    assert caught[0].filename == __file__


@pytest.mark.parametrize("limit", [{}, {"max_epochs": None}, {"max_steps": -1}, {"max_steps": "-1"}])
def test_no_limit_is_an_error(limit: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"from_lightning: max_epochs=None and max_steps=-1: nothing limits the run"):
        from_lightning(limit)


def test_other_limits_will_do():
    assert from_lightning({"max_epochs": -1}).fit.epochs == -1
    assert from_lightning({"max_steps": 5}).fit.steps == 5
    assert from_lightning({"max_time": {"hours": 1}}).fit.max_time == 3600.0
    assert from_lightning({"fast_dev_run": True}).fit.fast_dev_run == 1


def test_debugging_modes_win_over_limits_as_in_lightning():
    dev = plan(fast_dev_run=7, limit_train_batches=2, val_check_interval=0.5).fit
    assert dev == FitConfig(epochs=3, fast_dev_run=7)
    overfit = plan(overfit_batches=10, limit_train_batches=2).fit
    assert overfit == FitConfig(epochs=3, overfit_batches=10, evaluate_every=1.0)


def test_callables_become_callbacks_and_sinks():
    assert plan(callbacks=print, logger=[print]).run == {"callbacks": [print], "sinks": [print]}


class EarlyStoppingOfLightning:
    pass


EarlyStoppingOfLightning.__name__ = "EarlyStopping"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"accelerator": "tpu"}, r"accelerator='tpu' is not supported; there are auto, cpu"),
    ({"accelerator": object()}, r"accelerator=<object .* is not supported"),
    ({"strategy": "fast"}, r"strategy='fast' is unknown"),
    ({"strategy": object()}, r"strategy=<object.*> is unknown \(cure: strategy=\"ddp\" or \"fsdp\"; pieces inside"),
    ({"barebones": True}, r"barebones=True: fit has no switch .*cure: logger=False, enable_progress_bar=False"),
    ({"devices": 0}, r"devices=0 names no device"),
    ({"devices": []}, r"devices=\[\] names no device"),
    ({"devices": "none"}, r"devices='none' names no device"),
    ({"devices": "two"}, r"devices='two' names no device"),
    ({"accelerator": "cpu", "devices": [1]}, r"devices=\[1\]: a CPU has no index"),
    ({"precision": "8"}, r"precision='8' is unknown \(cure: \"64-true\""),
    ({"precision": "transformer-engine"}, r"precision='transformer-engine' is unknown"),
    ({"logger": object()}, r"logger holds a object, which cannot be called"),
    ({"callbacks": [EarlyStoppingOfLightning()]}, r"callbacks holds a EarlyStopping.*cure: fit\(.*early_stopping=10"),
    ({"fast_dev_run": -1}, r"fast_dev_run=-1: must be a whole number of at least 0"),
    ({"max_epochs": 0}, r"max_epochs=0: must be a whole number of at least 1, or -1 for no limit"),
    ({"max_epochs": 2.5}, r"max_epochs=2\.5: must be a whole number"),
    ({"min_epochs": 5}, r"from_lightning: min_epochs=5 is more than epochs=3"),
    ({"min_steps": -1}, r"min_steps=-1: must be a whole number of at least 0"),
    ({"max_steps": 0}, r"max_steps=0: must be a whole number of at least 1"),
    ({"max_time": "soon"}, r"max_time='soon': must be seconds > 0"),
    ({"limit_train_batches": 2.0}, r"limit_train_batches=2\.0: must be a number of batches"),
    ({"limit_train_batches": 0}, r"limit_batches leaves no batch to train on"),
    ({"limit_val_batches": -1}, r"limit_val_batches=-1: must be a number of batches"),
    ({"limit_test_batches": 1}, r"limit_test_batches=1: fit does not test"),
    (
        {"limit_predict_batches": 0.5},
        r"limit_predict_batches=0\.5: fit does not predict.*cure: ps\.predict\(program, state, itertools",
    ),
    ({"overfit_batches": -1}, r"overfit_batches=-1: must be a number of batches"),
    ({"val_check_interval": 2.0}, r"val_check_interval=2\.0: must be a number of batches .* or a share"),
    ({"val_check_interval": "00:01:00:00"}, r"evaluation is counted in batches or epochs, not in time"),
    ({"val_check_interval": timedelta(1)}, r"evaluation is counted in batches or epochs, not in time"),
    ({"check_val_every_n_epoch": None}, r"check_val_every_n_epoch=None counts batches, and val_check_interval=1\.0"),
    ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, r"val_check_interval=0\.5 inside one of 2 epochs"),
    ({"check_val_every_n_epoch": 2, "val_check_interval": 1}, r"val_check_interval=1 inside one of 2 epochs"),
    (
        {"check_val_every_n_epoch": None, "val_check_interval": 10, "accumulate_grad_batches": 4},
        r"val_check_interval=10 must be a multiple of.*cure: val_check_interval=8",
    ),
    ({"num_sanity_val_steps": 2}, r"num_sanity_val_steps=2: fit evaluates nothing before training"),
    ({"log_every_n_steps": -1}, r"log_every_n_steps=-1: must be a whole number of at least 0"),
    ({"enable_checkpointing": True}, r"enable_checkpointing=True without default_root_dir"),
    ({"enable_checkpointing": 1}, r"enable_checkpointing=1: must be True or False"),
    (
        {"enable_model_summary": True},
        r"fit prints no summary of the model \(cure: print\(ps.summary\(program, state, batch\)\)\)",
    ),
    ({"accumulate_grad_batches": {0: 8}}, r"accumulate_grad_batches=\{0: 8\}: must be a whole number"),
    ({"gradient_clip_val": -1}, r"gradient_clip_val=-1 must be a finite number of at least 0"),
    ({"gradient_clip_val": True}, r"gradient_clip_val=True is a bool, not a number"),
    ({"gradient_clip_val": 1, "gradient_clip_algorithm": "agc"}, r"gradient_clip_algorithm='agc' is unknown"),
    ({"deterministic": "loud"}, r"deterministic='loud': must be True or False or 'warn'"),
    ({"benchmark": True, "deterministic": True}, r"cudnn_benchmark picks algorithms by timing"),
    ({"profiler": "simple"}, r"profiler='simple': fit has no profiler"),
    ({"plugins": [object()]}, r"purestep has no plugins"),
    ({"reload_dataloaders_every_n_epochs": 1}, r"fit gets its loaders once"),
    ({"default_root_dir": "s3://bucket/x"}, r"default_root_dir='s3://bucket/x' is not on this machine"),
    ({"model_registry": "x"}, r"model_registry='x': purestep uploads nothing"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_cure(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        plan(**settings)
    assert caught.value.where == "from_lightning"
    assert caught.value.hint


SEVERAL: list[tuple[dict[str, Any], dict[str, int], str]] = [
    ({"devices": 2}, {"data": 2}, "replicate"),
    ({"devices": "2"}, {"data": 2}, "replicate"),
    ({"devices": [0, 1]}, {"data": 2}, "replicate"),
    ({"devices": "0,1"}, {"data": 2}, "replicate"),
    ({"accelerator": "cpu", "devices": 2, "num_nodes": 3}, {"data": 6}, "replicate"),
    ({"strategy": "ddp"}, {}, "replicate"),  # all that torchrun has started
    ({"strategy": "ddp_find_unused_parameters_true", "devices": 4}, {"data": 4}, "replicate"),
    ({"strategy": "fsdp", "devices": 4}, {"data": 1, "shard": 4}, "shard"),
    ({"strategy": "deepspeed_stage_2", "devices": 4, "num_nodes": 2}, {"data": 1, "shard": 8}, "shard"),
    ({"strategy": "deepspeed_stage_3", "devices": 2}, {"data": 1, "shard": 2}, "shard"),
]


@pytest.mark.parametrize(("settings", "mesh", "params"), SEVERAL)
def test_several_processes_are_a_mesh_and_a_placement(settings: dict[str, Any], mesh: dict[str, int], params: str):
    found = plan(**settings)
    assert (found.mesh, found.distribute) == (mesh, {"params": params, "batchnorm": "average"})
    assert found.device in (None, "cpu")  # each process takes its own
    assert plan(**settings, sync_batchnorm=True).distribute["batchnorm"] == "sync"


NO_EQUAL: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "ddp_spawn"}, "start them with torchrun"),
    ({"strategy": "deepspeed_stage_3_offload", "devices": 2}, "deepspeed_stage_3"),
    ({"strategy": "model_parallel", "devices": 2}, "tensor="),
    ({"strategy": "fsdp"}, "devices=8"),
    ({"strategy": "ddp", "use_distributed_sampler": False}, "ps.parallel.sharded"),
]


@pytest.mark.parametrize(("settings", "cure"), NO_EQUAL)
def test_a_strategy_without_an_equal_is_refused_with_the_cure(settings: dict[str, Any], cure: str):
    with pytest.raises(RankError, match=cure):
        plan(**settings)


def test_one_device_contradicts_several():
    with pytest.raises(ConfigError, match=r"strategy='single_device', devices=2"):
        plan(strategy="single_device", devices=2)


@pytest.mark.parametrize("value", ["auto", 1, "1", -1])
def test_one_device_by_any_of_its_names(value: Any):
    assert plan(accelerator="cpu", devices=value).device == "cpu"


def test_the_index_of_the_one_device():
    assert plan(accelerator="cuda", devices=[1]).device == "cuda:1"
    assert plan(accelerator="cuda", devices="1,").device == "cuda:1"


HONOURED: dict[str, Any] = {
    "strategy": "single_device",
    "num_nodes": 1,
    "inference_mode": False,
    "use_distributed_sampler": False,
    "sync_batchnorm": True,
    "enable_autolog_hparams": False,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "limit_test_batches": 1.0,
    "limit_predict_batches": 1.0,
    "plugins": [],
}


@pytest.mark.parametrize("name", HONOURED)
def test_what_asks_for_nothing_else_than_what_happens_is_accepted(name: str):
    assert plan(**{name: HONOURED[name]}).fit == plan().fit


def test_cudnns_search_is_on_off_or_as_it_was():
    found = [plan(benchmark=value).fit.cudnn_benchmark for value in (True, "false", None)]
    assert found == [True, False, None]
    assert plan().fit.cudnn_benchmark is None
    with pytest.raises(ConfigError, match=r"benchmark='fast': must be True or False"):
        plan(benchmark="fast")


def test_an_unknown_key_is_warned_about_with_the_nearest_name_or_refused():
    with pytest.warns(UserWarning, match=r"'max_epoch' is not an argument .* did you mean 'max_epochs'\?") as caught:
        plan(max_epoch=5)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"'xyzzy' is not an argument of Lightning's Trainer and is ignored$"):
        plan(xyzzy=1)
    with pytest.raises(ConfigError, match=r"'max_epoch' is not an argument .*cure: max_epochs"):
        from_lightning({"max_epochs": 1, "max_epoch": 5}, strict=True)


def test_a_pydantic_dataclass_with_extra_fields_is_read():
    @pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(extra="allow"))
    class BaseTrainerConfig:
        accelerator: str = "auto"
        precision: str = "32-true"
        max_epochs: int | None = None

    found = from_lightning(BaseTrainerConfig(accelerator="cpu", max_epochs=100, precision="16-mixed", min_epochs=2))  # pyright: ignore[reportCallIssue]  # an extra field
    assert (found.fit.epochs, found.fit.min_epochs, found.program["precision"]) == (100, 2, "16-mixed")


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (".json", '{"max_epochs": 3, "val_check_interval": 1.0, "gradient_clip_val": null}'),
        (".toml", "max_epochs = 3\nval_check_interval = 1.0\n"),
    ],
)
def test_the_arguments_in_a_file(ending: str, text: str, tmp_path: Path):
    path = tmp_path / f"trainer{ending}"
    path.write_text(text)
    assert from_lightning(path).fit == FitConfig(epochs=3, evaluate_every=1.0)


def test_the_settings_are_left_as_they_were():
    given: Mapping[str, Any] = {"max_epochs": "3", "limit_val_batches": "0.5"}
    before = dict(given)
    from_lightning(given)
    assert given == before


def test_attributes_of_a_class_are_settings_too():
    class Base:
        early_stopping = 5

    class Settings(Base):
        monitor = "val_loss"
        _private = 1

        def __init__(self) -> None:
            self.epochs = 3

        def method(self) -> None: ...

    found = sources.resolve(Settings(), {"epochs": 2})
    assert (found.epochs, found.monitor) == (2, "val_loss")
    assert found.early_stopping is not None
    assert found.early_stopping.patience == 5
