"""The examples under torchrun, as they are: the command lines of their first pages, made small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rigs.parallel.processes import ROOT, free_port
from shipped import load

LM = {"batch_size": 4, "context": 32, "width": 32, "heads": 2, "layers": 1, "sample": 4}


def example(name: str, folder: Path, world: int, **options: Any) -> list[str]:
    """Run it, and return the lines that the processes print together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-port", str(free_port())]
    command += [str(ROOT / "examples" / f"{name}.py"), "--runs", str(folder)]
    command += [text for option, value in options.items() for text in (f"--{option.replace('_', '-')}", str(value))]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=200, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout.splitlines()


@pytest.mark.soak  # `test_fit` compares processes with one, and the run below shows that lines are printed once
@pytest.mark.row("2.8")
def test_byte_lm_in_two_processes_is_byte_lm_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options: dict[str, Any] = {**LM, "updates": 12}
    module = load("byte_lm")
    module.main(module.Config(runs=tmp_path / "1", **options))
    one, two = capsys.readouterr().out.splitlines(), example("byte_lm", tmp_path / "2", 2, **options)
    assert one[-1].startswith("held-out bits per byte ")
    assert two[-2:] == one[-2:]  # the same text and the same score, printed once
    assert sum(line.startswith("held-out") for line in two) == 1


@pytest.mark.slow
@pytest.mark.row("2.9", "2.15", "2.16")
def test_gan_trains_two_models_in_two_processes_and_goes_on(tmp_path: Path):
    options = {"width": 16, "judge_epochs": 1}
    first = example("gan", tmp_path, 2, epochs=1, **options)
    assert first[-2] == "10 updates of the generator, 20 of the critic"
    assert sum("critic_loss" in line for line in first) == 1  # by the first process
    again = example("gan", tmp_path, 2, epochs=2, **options)
    assert again[-2] == "20 updates of the generator, 40 of the critic"
    assert [line.split()[1] for line in again if "critic_loss" in line] == ["2"]
