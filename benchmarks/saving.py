"""What snapshots cost: the time that `save` blocks, the way back with every byte checked, and the steps between."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import purestep as ps

from . import measure, works
from .contestants import ours


def table(leaves: int, size: int, device: str = "cpu", rounds: int = 7) -> dict[str, Any]:
    """A state of that many leaves of ``size`` float32 numbers, beside torch.save, fsync, torch.load and a clone."""
    generator = torch.Generator().manual_seed(0)
    state = {f"leaf{i:04d}": torch.randn(size, generator=generator).to(device) for i in range(leaves)}
    names = ("torch.save + fsync", "save, blocking", "save, until written", "torch.load + clone", "restore, verified")
    spent: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIR")) as directory:
        file = Path(directory) / "state.pt"
        with ps.Snapshots(Path(directory) / "snapshots", keep=1, keep_best=0) as snapshots:
            for number in range(1, rounds + 2):
                for name, seconds in _round(number, state, file, snapshots).items():
                    spent[name].append(seconds)
    rows = [{"name": name, "unit": "s", "values": found[1:]} for name, found in spent.items()]  # the first warms up
    total = leaves * size * 4
    note = "Files are read back from the page cache, by both; restoring checks the digest of every leaf."
    return {"title": f"{total / 1e6:,.0f} MB in {leaves:,} leaves", "rows": rows, "note": note}


def _round(number: int, state: dict[str, Tensor], file: Path, snapshots: ps.Snapshots) -> dict[str, float]:
    def restore() -> None:
        restored = snapshots.restore(state, step=number).state
        if number == 1 and not all(torch.equal(restored[name], leaf) for name, leaf in state.items()):
            raise AssertionError("what comes back is not what was saved")

    found = {
        "torch.save + fsync": _seconds(lambda: _saved(state, file)),
        "save, blocking": _seconds(lambda: snapshots.save(number, state)),
    }
    waited = _seconds(snapshots.wait)
    found["save, until written"] = found["save, blocking"] + waited
    found["torch.load + clone"] = _seconds(lambda: ps.clone(torch.load(file)))
    found["restore, verified"] = _seconds(restore)
    return found


def _saved(state: dict[str, Tensor], file: Path) -> None:
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# --- steps ------------------------------------------------------------------------------------------------------------

EVERY = 100  # updates between two snapshots, and calls of a turn


def steps(device: str = "cpu", seconds: float = 40.0, work: str = "mlp") -> dict[str, Any]:
    """A step of fit: without snapshots, with some that never come due, and with one in every hundred updates."""
    chosen, place = works.WORKS[work], torch.device(device)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIR")) as directory:
        runners = [ours.fitted("fit", chosen, place)]
        for name, every in (("fit, snapshots open", 1 << 40), (f"fit, one in {EVERY}", EVERY)):
            folder = Path(directory) / str(every)
            snapshots = ps.Snapshots(folder, every_steps=every, every_epochs=None)
            runners.append(ours.fitted(name, chosen, place, snapshots=snapshots))
        spent = measure.interleave(runners, measure.Plan(seconds=seconds, calls=EVERY, lead=0))
        for runner in runners:
            runner.close()
    rows = [{"name": name, "unit": "s", "values": values} for name, values in spent.items()]
    note = f"Turns of {EVERY} steps. The last row has the writer's work on the same cores in it."
    return {"title": chosen.about, "threads": torch.get_num_threads(), "rows": rows, "note": note}
