"""A process that ends, fails or hangs ends the others; a run that starts again ends as one that went on."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import purestep as ps
from purestep import tree

from . import fitting
from .processes import ROOT, free_port, run

GONE = {
    "kill": (3, 1),
    "raise": (2, 1),
    "hang": (2, 1),
    "first": (2, 0),
}
"""Processes, and the one that is gone."""


@pytest.mark.parametrize("how", list(GONE))
def test_a_process_that_is_gone_ends_the_others(how: str):
    world, rank = GONE[how]
    kind = "kill" if how == "first" else how
    outputs = run("tests.parallel.fitting:gone", world, args=[kind, rank], check=False, timeout=60)
    for other in set(range(world)) - {rank}:
        message, seconds = outputs[other].value
        assert f"process {other} of {world}: another process ended, failed, did not answer" in message, message
        assert "torchrun --max-restarts" in message
        assert kind != "raise" or "one process alone cannot save the state of several" in outputs[rank].text
        assert seconds < (30 if kind == "hang" else 20)  # no hang; the time itself is in the report of benchmarks


def torchrun(folder: Path, world: int, *args: Any, restarts: int = 0, launch: str = "") -> str:
    """Run `fitting.train` under torchrun, and return its output.

    Args:
        launch: in the names of the files that it writes.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port"]
    command += [str(free_port()), "--max-restarts", str(restarts), "--monitor-interval", "0.05"]
    command += ["-m", "tests.parallel.fitting", json.dumps([str(folder), *args])]
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "LAUNCH": launch}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=200, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0 or not restarts, text[-6000:]
    return text


def test_torchrun_names_the_process_that_failed_first(tmp_path: Path):
    text = torchrun(tmp_path, 2, "shard", 1, {"0": [1, 3]}, {"shard": 2}, 0.0, "raise")
    cause = text[text.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 .*ValueError: of this process alone", cause, re.DOTALL), text[-3000:]
    assert "RankError" not in cause


def last_rows(folder: Path) -> dict[int, list[int]]:
    """The rows of each epoch, counted once for each batch: those of the last life that has computed it."""
    lives: dict[tuple[int, int], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    times: dict[str, float] = {}
    for path in folder.glob("log-*"):
        life = path.name.split("-")[1] + path.parent.name
        for line in path.read_text().splitlines():
            at, epoch, batch, rows = json.loads(line)
            lives[epoch, batch][life] += rows
            times[life] = max(times.get(life, 0.0), at)
    found: dict[int, list[int]] = defaultdict(list)
    for (epoch, _), by_life in sorted(lives.items()):
        found[epoch] += by_life[max(by_life, key=lambda life: times[life])]
    return {epoch: sorted(rows) for epoch, rows in found.items()}


def test_torchrun_starts_a_killed_run_again(tmp_path: Path):
    """Process 0, which writes; `test_a_process_that_is_gone_ends_the_others` kills another one."""
    torchrun(tmp_path, 2, "shard", 3, {"0": [0, 4]}, {"shard": 2}, restarts=3)
    assert last_rows(tmp_path) == {epoch: list(range(37)) for epoch in range(3)}
    check_end(tmp_path, epochs=3)


def check_end(folder: Path, epochs: int) -> None:
    assert far_from_unbroken(folder, epochs) < 1e-14


def far_from_unbroken(folder: Path, epochs: int) -> float:
    """The largest difference of a number of the state from that of one process that was not broken off."""
    end = torch.load(folder / "end.pt", map_location="cpu")
    wanted = dict(tree.with_paths(unbroken(epochs)))
    assert end.keys() == wanted.keys()
    return max(float((end[path].double() - value.cpu().double()).abs().max()) for path, value in wanted.items())


@functools.cache
def unbroken(epochs: int) -> ps.TrainState:
    return fitting.fit(fitting.program(), epochs=epochs).state


def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path: Path):
    """One epoch with two processes, one with three, in pieces of the third kind."""
    for world, mode, epochs in ((2, "shard", 1), (3, "replicate", 2), (1, "shard", 3)):
        sizes = {"shard": world} if mode == "shard" else {}
        run("tests.parallel.fitting:train", world, args=[str(tmp_path), mode, epochs, {}, sizes])
    check_end(tmp_path, epochs=3)
