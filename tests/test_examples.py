"""The shipped examples, made small and run: they cannot rot."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from shipped import EXAMPLES, load

FILES = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "first.py")
"""All but the script of README, whose output `test_first.py` compares."""


def run(name: str, tmp_path: Path, **fields: Any) -> float:
    module = load(name)
    return module.main(module.Config(runs=tmp_path / name, **fields))


def test_digits_learns_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"epochs": 3, "width": 8, "batch_size": 32, "ema": 0.9}
    first = run("digits", tmp_path, **small)
    assert first > 0.5  # a guess is right once in ten
    assert capsys.readouterr().out.splitlines()[-1] == f"test accuracy {100 * first:.1f} % (EMA)"
    assert run("digits", tmp_path, **small) == first  # nothing is left to do
    assert run("digits", tmp_path, fresh=True, **small) == first  # the same once more, from the start


def test_sweep_finds_a_rate_and_trains_an_ensemble_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(EXAMPLES)
    small = {"rates": 4, "members": 3, "sweep_epochs": 2, "epochs": 3, "width": 16, "batch_size": 128, "low": 1e-5}
    accuracy = run("sweep", tmp_path, **small)
    assert accuracy > 0.5
    *_, chosen, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"test accuracy {100 * accuracy:.1f} % (ensemble), ")
    assert "best learning rate 1.00e-05" not in chosen  # it hardly learns
    assert {f"val_loss[{index}]" for index in range(4)} <= set(rows(tmp_path / "sweep" / "rates")[-1])
    assert run("sweep", tmp_path, **small) == accuracy  # nothing is left to do


def test_digits_interrupted_and_run_again_is_digits(tmp_path: Path):
    digits = load("digits")
    small = {"width": 4, "batch_size": 256, "ema": 0.5, "epochs": 3}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    accuracy = digits.main(digits.Config(runs=whole, **small))

    def press_ctrl_c(event: Any) -> None:
        if isinstance(event, digits.ps.events.StepEnd) and event.updates == 7:  # inside the second epoch
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits.ps, "fit", functools.partial(digits.ps.fit, callbacks=[press_ctrl_c]))
        with pytest.raises(KeyboardInterrupt):
            digits.main(digits.Config(runs=parts, **small))
    assert rows(parts) == rows(whole)[:1]
    assert digits.main(digits.Config(runs=parts, **small)) == accuracy
    assert rows(parts) == rows(whole)


def rows(directory: Path) -> list[dict[str, float]]:
    """The history that a run has written."""
    return json.loads((directory / "training_history.json").read_text(encoding="utf-8"))


def test_byte_lm_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"updates": 12, "batch_size": 4, "context": 32, "width": 32, "heads": 2, "layers": 1, "sample": 20}
    bits = run("byte_lm", tmp_path, **small)
    assert bits < 7.9  # 8 is a uniform guess
    sample, *_, last = capsys.readouterr().out.split("def ")[-1], f"held-out bits per byte {bits:.2f}"
    assert last in sample


def test_custom_step_trains_both_networks(tmp_path: Path):
    assert 0 <= run("custom_step", tmp_path, epochs=1, points=1024, width=8) <= 1


@pytest.mark.compile
def test_custom_step_compiled_is_custom_step(tmp_path: Path):
    small = {"epochs": 2, "points": 1024, "width": 8, "learning_rate": 0.01}
    graphs = {"backend": "aot_eager"}  # needs no C++ compiler
    assert run("custom_step", tmp_path / "graphs", compile=graphs, **small) >= 0
    run("custom_step", tmp_path / "eager", **small)
    losses = [[row["train_loss"] for row in rows(tmp_path / way / "custom_step")] for way in ("graphs", "eager")]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # not the same noise, the same training


def last_line(capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The numbers in it."""
    return [float(number) for number in re.findall(r"\d+\.\d+", capsys.readouterr().out.splitlines()[-1])]


@pytest.mark.row("0.21")
def test_forecast_beats_persistence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"epochs": 2, "width": 16, "batch_size": 16, "learning_rate": 3e-3}
    error = run("forecast", tmp_path, **small)
    found, persistence, year_ago = last_line(capsys)
    assert found == round(error, 2) < persistence
    assert (persistence, year_ago) == (4.48, 0.62)
    assert {"best_model.pth", "training_history.json"} <= {p.name for p in (tmp_path / "forecast").iterdir()}
    assert run("forecast", tmp_path, **small) == error  # nothing is left to do


@pytest.mark.row("4.27")
def test_masked_reconstruction_beats_the_mean_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    small = {"width": 32, "layers": 1, "hidden": 8, "learning_rate": 4e-3, "warmup_epochs": 1, "ema": 0.9}
    summary = run("masked_reconstruction", tmp_path, epochs=12, **small)
    error, mean_error = last_line(capsys)
    assert error < mean_error / 2
    assert set(summary) == {"best", "epochs"}
    assert set(summary["best"]) == {"epoch", "val_loss"}
    runs = tmp_path / "masked_reconstruction"
    assert [row["epoch"] for row in rows(runs)] == list(range(1, 13))
    assert {"best_model.pt", "checkpoints"} <= {path.name for path in runs.iterdir()}
    assert run("masked_reconstruction", tmp_path, epochs=12, **small) == summary


@pytest.mark.row("4.21")
def test_masked_reconstruction_stops_early(tmp_path: Path):
    small = {"width": 8, "layers": 1, "learning_rate": 1e-12, "precision": "32-true", "ema": 0.0}
    summary = run("masked_reconstruction", tmp_path, epochs=8, patience=1, start_ratio=0.5, **small)
    assert summary["epochs"] < 8  # weights that do not move: from the fourth epoch on, none may be bad


@pytest.mark.row("1.12", "1.19", "1.22", "1.23", "1.25")
@pytest.mark.parametrize("by_epoch", [False, True], ids=["schedule by batch", "by epoch"])
def test_finetune_hf_beats_the_frequency_of_words(by_epoch: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"width": 32, "layers": 1, "vocabulary": 200, "every": 6, "epochs": 2, "learning_rate": 1e-2}
    fields = {"classifier_epochs": 2, "scheduler_step_per_epoch": by_epoch, **small}
    share, right = run("finetune_hf", tmp_path, **fields)
    assert share < 0.95
    assert 0 < right < 1
    nats, entropy = last_line(capsys)
    assert nats / entropy == pytest.approx(share, abs=0.01)
    rates = [row["lr"] for row in rows(tmp_path / "finetune_hf" / "language")]
    assert (rates[1] == pytest.approx(rates[0] / 2)) == by_epoch
    assert run("finetune_hf", tmp_path, **fields) == (share, right)  # nothing is left to do


def test_distillation_learns_from_few_labels_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(EXAMPLES)
    small = {"epochs": 3, "width": 4, "ema": 0.8, "batch_size": 128, "learning_rate": 2e-2}
    taught, alone = found = run("distillation", tmp_path, **small)
    assert min(found) > 0.3  # of ten classes, from three labels each
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith(f"test accuracy {100 * taught:.0f} % with a mean teacher")
    )
    runs = tmp_path / "distillation"
    apart = [rows(runs / name)[-1]["train_disagreement"] for name in ("mean_teacher", "labels_alone")]
    assert apart[0] < apart[1]  # it does what the teacher does
    assert run("distillation", tmp_path, **small) == (taught, alone)  # nothing is left to do


def test_reinforcement_learns_to_balance_and_goes_on_where_it_was(tmp_path: Path):
    small = {"carts": 16, "steps": 100, "width": 32, "learning_rate": 1e-2}
    first, balanced = run("reinforcement", tmp_path / "whole", updates=16, **small)
    assert balanced > 2 * first
    run("reinforcement", tmp_path / "parts", updates=6, **small)
    assert run("reinforcement", tmp_path / "parts", updates=16, **small) == (first, balanced)


def test_lora_adapts_and_both_are_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"updates": 60, "adapter_updates": 60, "width": 32, "layers": 1, "context": 32, "size": 40_000}
    small |= {"learning_rate": 1e-2, "adapter_learning_rate": 3e-2}
    before, after = run("lora", tmp_path, **small)
    assert after < before - 0.1 < 8  # 8 bits a byte is a uniform guess
    assert last_line(capsys) == pytest.approx([before, after], abs=0.051)
    runs = tmp_path / "lora"
    assert {path.name for path in (runs / "adapters").iterdir()} == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors"),
    }
    assert run("lora", tmp_path, **small) == (before, after)  # nothing is left to do


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_setting_of_an_example_is_an_option(path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tyro", reason="tyro is not installed: pip install 'purestep[cli]'")
    monkeypatch.syspath_prepend(str(EXAMPLES))  # one example imports another
    module = load(path.stem)
    settings = vars(module.Config())
    options: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--no-{option}" if value else f"--{option}")
        elif value is not None:
            options += [f"--{option}", str(value)]
    found = vars(module.ps.config.cli(module.Config, options))
    assert found == {name: not value if isinstance(value, bool) else value for name, value in settings.items()}


def test_hypergradients_raise_rates_that_are_too_small(tmp_path: Path):
    small = {"windows": 4, "inner_steps": 3, "width": 16}
    tuned = run("hypergradients", tmp_path / "a", **small)
    (row,) = rows(tmp_path / "a" / "hypergradients")
    assert min(row[f"train_rate_layer{i}"] for i in (0, 2, 4)) > 1.1e-3
    assert run("hypergradients", tmp_path / "b", checkpoint=False, **small) == tuned
    (whole,) = rows(tmp_path / "b" / "hypergradients")
    assert row == whole  # what is recomputed is the same, bit for bit
    run("hypergradients", tmp_path / "c", tune=False, **small)
    (still,) = rows(tmp_path / "c" / "hypergradients")
    assert still["val_loss"] > row["val_loss"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_one_short_file_that_says_how_to_run_it(path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"`{path.name}`" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
