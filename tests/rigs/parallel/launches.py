"""A run under torchrun, and what its files say at the end."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import purestep as ps
from purestep import tree

from . import fitting
from .processes import ROOT, free_port


def torchrun(folder: Path, world: int, *args: Any, restarts: int = 0, launch: str = "") -> str:
    """Run `fitting.train` under torchrun, and return its output.

    Args:
        launch: in the names of the files that it writes.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port"]
    command += [str(free_port()), "--max-restarts", str(restarts), "--monitor-interval", "0.05"]
    command += ["-m", "tests.rigs.parallel.fitting", json.dumps([str(folder), *args])]
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "LAUNCH": launch}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=200, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0 or not restarts, text[-6000:]
    return text


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


def far_from_unbroken(folder: Path, epochs: int) -> float:
    """The largest difference of a number of the state from that of one process that was not broken off."""
    end = torch.load(folder / "end.pt", map_location="cpu")
    wanted = dict(tree.with_paths(unbroken(epochs)))
    assert end.keys() == wanted.keys()
    return max(float((end[path].double() - value.cpu().double()).abs().max()) for path, value in wanted.items())


@functools.cache
def unbroken(epochs: int) -> ps.TrainState:
    return fitting.fit(fitting.program(), epochs=epochs).state
