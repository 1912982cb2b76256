"""`ps.config.cli`: defaults, then a file, then options; and what a wrong one says."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

import purestep as ps
from purestep.errors import ConfigError

needs_tyro = pytest.mark.skipif(
    importlib.util.find_spec("tyro") is None, reason="tyro is not installed: pip install 'purestep[cli]'"
)

if importlib.util.find_spec("tyro"):  # it hashes what is in builtins, where a doctest puts its last result
    importlib.import_module("tyro._docstrings")


class Kind(Enum):
    SMALL = "small"
    LARGE = "large"


@dataclass(frozen=True)
class Model:
    width: int = 8  # of the hidden layers
    sizes: tuple[int, ...] = (1, 2)
    norm: Literal["batch", "layer"] = "layer"


@dataclass(frozen=True)
class Config:
    """A run."""

    runs: Path = Path("runs/x")
    fresh: bool = False
    shuffle: bool = True
    device: str | None = None
    learning_rate: float = 1e-3
    kind: Kind = Kind.SMALL
    names: list[str] = field(default_factory=list)
    model: Model = Model(width=16)
    fit: ps.FitConfig = ps.FitConfig(epochs=3, monitor="val_loss")  # noqa: RUF009  # it is frozen


@dataclass(frozen=True)
class Strict:
    data: Path  # must be given
    rate: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.data, Path):  # pyright: ignore[reportUnnecessaryIsInstance]  # the point of the class
            raise TypeError("built before it was complete")


def toml(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return ["--config", str(path)]


@needs_tyro
def test_without_options_it_is_the_dataclass() -> None:
    assert ps.config.cli(Config, []) == Config()


@needs_tyro
def test_options_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        'learning_rate = 1\nruns = "b"\nkind = "LARGE"\nnames = ["x", "y"]\nfresh = true\n'
        "[model]\nsizes = [4, 5]\n[fit]\nepochs = 7\nlimit_batches = {train = 0.5}\nearly_stopping = {patience = 2}\n",
    )
    options = ["--fit.epochs", "9", "--model.norm", "batch", "--learning-rate", "3e-4", "--no-fresh", "--device", "cpu"]
    found = ps.config.cli(Config, [*file, *options])
    fit = ps.FitConfig(
        epochs=9, monitor="val_loss", limit_batches={"train": 0.5}, early_stopping=ps.EarlyStopping(patience=2)
    )
    model = Model(width=16, sizes=(4, 5), norm="batch")
    assert found == Config(Path("b"), False, True, "cpu", 3e-4, Kind.LARGE, ["x", "y"], model, fit)
    assert ps.config.cli(Config, file).fit.epochs == 7
    assert ps.config.cli(Config, file).learning_rate == 1.0


@needs_tyro
def test_settings_of_fit_take_the_text_that_they_take_elsewhere(tmp_path: Path) -> None:
    texts = {
        "early-stopping": "5",
        "max-time": "00:01:00:00",
        "compile": "true",
        "limit-batches": '{"val": 3}',
        "evaluate-every": "0.25",
        "steps": "-1",
    }
    options = [part for name, text in texts.items() for part in (f"--fit.{name}", text)]
    found = ps.config.cli(Config, options).fit
    fields: dict[str, Any] = {"early_stopping": 5, "max_time": 3600, "compile": True, "steps": -1}
    fields |= {"limit_batches": {"val": 3}, "evaluate_every": 0.25}
    assert found == ps.FitConfig(epochs=3, monitor="val_loss", **fields)


@needs_tyro
def test_a_json_file_and_the_programs_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": {"width": 3}, "device": None}))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(path), "--model.width", "4"])
    assert ps.config.cli(Config).model.width == 4


@needs_tyro
def test_a_field_without_a_default_may_come_from_either(tmp_path: Path) -> None:
    assert ps.config.cli(Strict, ["--data", "a"]) == Strict(Path("a"))
    assert ps.config.cli(Strict, [*toml(tmp_path, 'data = "b"'), "--rate", "2"]) == Strict(Path("b"), 2.0)
    assert ps.config.cli(Strict, [*toml(tmp_path, "rate = -1e-3"), "--data", "c"]) == Strict(Path("c"), -1e-3)


@dataclass(frozen=True)
class Kinds:
    weights: dict[str, float] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ()
    known: bool | None = None
    name: str | None = "a"
    fit: ps.FitConfig = ps.FitConfig(epochs=3, compile=True)  # noqa: RUF009


@needs_tyro
def test_a_file_holds_what_an_option_takes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    fit = {"compile": False, "evaluate_every": 0.5, "monitor": "val_loss", "limit_batches": {"train": 2, "val": 0.5}}
    given = {"weights": {"a": 1, "b": -2.5}, "sizes": [[1, 2], [3, 4]], "known": True, "name": None, "fit": fit}
    path.write_text(json.dumps(given))
    found = ps.config.cli(Kinds, ["--config", str(path), "--fit.evaluate-every", "2"])
    settings = ps.FitConfig(epochs=3, **{**fit, "evaluate_every": 2})  # type: ignore[arg-type]
    assert found == Kinds({"a": 1.0, "b": -2.5}, ((1, 2), (3, 4)), True, None, settings)


@dataclass(frozen=True)
class Needy:
    data: str  # must be given
    fit: ps.FitConfig = ps.FitConfig(epochs=3, monitor="val_f1", mode="max", early_stopping=5)  # noqa: RUF009
    model: Model = Model(width=64)


@needs_tyro
def test_a_table_of_the_file_keeps_the_default_of_its_group_where_another_field_has_none(tmp_path: Path) -> None:
    file = toml(tmp_path, 'data = "a"\n[fit]\nepochs = 5\n[model]\nsizes = [4]\n')
    fit = ps.FitConfig(epochs=5, monitor="val_f1", mode="max", early_stopping=5)
    assert ps.config.cli(Needy, file) == Needy("a", fit, Model(width=64, sizes=(4,)))
    assert ps.config.cli(Needy, [*file, "--model.norm", "batch"]).model == Model(64, (4,), "batch")


@needs_tyro
def test_none_switches_a_setting_of_fit_off_also_against_its_default(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    names = ("early_stopping", "mode", "monitor", "resume", "check_every", "device")
    path.write_text(json.dumps({"fit": dict.fromkeys(names)}))
    fit = ps.FitConfig(epochs=3, **dict.fromkeys(names))  # type: ignore[arg-type]
    assert ps.config.cli(Needy, ["--data", "a", "--config", str(path)]).fit == fit
    options = [part for name in names for part in (f"--fit.{name.replace('_', '-')}", "none")]
    assert ps.config.cli(Needy, ["--data", "a", *options]).fit == fit


@needs_tyro
def test_none_is_refused_by_a_setting_of_fit_without_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"fit": {"log_every": None}}))
    with pytest.raises(SystemExit):
        ps.config.cli(Config, ["--config", str(path)])
    assert "log_every=None" in capsys.readouterr().err


@dataclass
class Derived:
    batch: int = 32
    rate: float | None = None  # 1e-3 for 32
    twice: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.twice = 2 * self.batch
        self.rate = 1e-3 * self.batch / 32 if self.rate is None else self.rate


@dataclass
class Outer(Derived):
    group: Derived = field(default_factory=Derived)
    other: Derived | None = None


@needs_tyro
@pytest.mark.parametrize(
    ("text", "options", "batch"),
    [
        ("", [], 32),
        ("batch = 64\ngroup = {batch = 64}", [], 64),
        ("batch = 64\ngroup = {batch = 64}", ["--batch", "128", "--group.batch", "128"], 128),
        ("batch = 64", ["--group.batch", "64"], 64),
        (None, ["--batch", "128", "--group.batch", "128"], 128),
    ],
)
def test_what_a_class_derives_is_derived_from_the_file_and_the_options(
    text: str | None, options: list[str], batch: int, tmp_path: Path
) -> None:
    file = [] if text is None else toml(tmp_path, text)
    found = ps.config.cli(Outer, [*file, *options])
    rate = 1e-3 * batch / 32
    assert (found.batch, found.rate, found.twice) == (batch, rate, 2 * batch)
    assert found.group == Derived(batch, rate)
    assert ps.config.cli(Outer, [*file, *options, "other:derived"]).other == Derived()
    assert ps.config.cli(Outer, [*toml(tmp_path, "rate = 0.5"), "--batch", "64"]).rate == 0.5


@dataclass(frozen=True)
class Wide(Model):
    depth: int = 1


@dataclass(frozen=True)
class Either:
    model: Model = Wide(width=3)
    one: Wide | Needy = field(default_factory=lambda: Needy("a"))


@needs_tyro
def test_a_default_may_be_of_a_derived_class_or_one_of_several(tmp_path: Path) -> None:
    file = toml(tmp_path, "[model]\nsizes = [4]\ndepth = 2\n")
    assert ps.config.cli(Either, file) == Either(model=Wide(3, (4,), depth=2))
    found = ps.config.cli(Either, [*file, "one:needy", "--one.model.width", "7"])
    assert found.one == Needy("a", model=Model(7))


@needs_tyro
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat = 1", "--learning-rate"),
        ("[model]\nwidht = 1", "--model.width"),
        ("[fit]\nepoch = 1", "--fit.epochs"),
        ('[fit]\nepochs = "few"', "epochs='few': must be a whole number"),
        ("[fit]\nlr = 1", "Unrecognized options: --fit.lr"),
        ('learning_rate = "fast"', "--learning-rate"),
        ('[model]\nnorm = "group"', "--model.norm"),
        ("model = 3", "Unrecognized options: --model"),
        ("fit = 3", "Unrecognized options: --fit"),
        ("[learning_rate]\na = 1", "Unrecognized options: 1"),
        ("fresh = 1", "Unrecognized options: 1"),
        ("[model]\nwidth = true", "--model.width"),
        ("learning_rate = ", "does not parse"),
    ],
)
def test_a_wrong_file_says_where_and_the_nearest_name(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ps.config.cli(Config, toml(tmp_path, text), prog="train.py")
    assert caught.value.code == 2
    found = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in found
    assert "train.py: " in found
    assert "run.toml" in found


@needs_tyro
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--learning-rat", "1"], "--learning-rate"),
        (["--fit.epoch", "1"], "--fit.epochs"),
        (["--learning-rate", "fast"], "--learning-rate"),
        (["--fit.epochs", "few"], "epochs='few': must be a whole number"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_a_wrong_option_says_which_and_the_nearest_name(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ps.config.cli(Config, options)
    assert caught.value.code == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


@needs_tyro
def test_help_lists_every_field_and_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ps.config.cli(Config, ["--help"], description="Trains.")
    assert not caught.value.code
    said = capsys.readouterr().out
    for text in (
        "Trains.",
        "--config FILE",
        "--learning-rate",
        "--fresh, --no-fresh",
        "--model.width",
        "of the hidden",
    ):
        assert text in said
    assert all(f"--fit.{name.replace('_', '-')}" in said for name in ps.FitConfig.model_fields)


def test_what_is_no_dataclass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a dataclass .*@dataclass above"):
        ps.config.cli(int, [])

    @dataclass
    class Own:
        config: str = ""

    with pytest.raises(ConfigError, match=r"has a field config .*rename it"):
        ps.config.cli(Own, [])


def test_a_missing_tyro_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(ConfigError, match=r"tyro is not installed .*purestep\[cli\]"):
        ps.config.cli(Config, [])
