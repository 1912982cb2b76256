"""The cost of snapshots: the time that `save` blocks, and the way back with every byte checked."""

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
    note = "Files are read back from the page cache, by both; restoring checks the checksum of every file."
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
