"""Groups of processes that run the functions of `snapshot_cases`, and kills among them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import purestep as ps

from . import processes, snapshot_cases

CASES = "rigs.parallel.snapshot_cases"


def group(function: str, world: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Run a function of `snapshot_cases` in all processes; return its results in the order of ranks."""
    return [each.value for each in processes.run(f"{CASES}:{function}", world, args=args, timeout=timeout)]


def killed(root: Path, world: int, rank: int, point: str) -> str | None:
    """Kill one process when it passes a point for the second time, or for the nth time (``"point@n"``); returns what is
    wrong afterwards."""
    name, _, times = point.partition("@")
    plan = {rank: {"PURESTEP_FAILPOINT": f"{name}=kill@{times or 2}"}}
    done = processes.run(f"{CASES}:save_three", world, args=[str(root)], own=plan, check=False)
    text = "\n".join(f"--- {r}: {each.code}\n{each.text[-3000:]}" for r, each in enumerate(done))
    if done[rank].code != -signal.SIGKILL:
        return f"was not killed:\n{text}"
    saved = max(int(line.split()[1]) for each in done for line in each.text.splitlines() if line.startswith("saved"))
    for other, each in enumerate(done):
        if other != rank and (each.code or f"process {rank} ended" not in each.text):
            return f"process {other} did not name process {rank}:\n{text}"
    reader = ps.Snapshots(root, writer=False)
    if not set(reader.steps()) <= {1, 2, 3} or saved not in reader.steps():
        return f"step {saved} was saved, there are {reader.steps()}:\n{text}"
    for step in reader.steps():
        found = reader.restore(snapshot_cases.small_whole(0), step=step).state
        if snapshot_cases.digest(found) != snapshot_cases.digest(snapshot_cases.small_whole(step)):
            return f"step {step} has other values"
    with ps.Snapshots(root) as snapshots:
        left = [name for name in os.listdir(root) if name.startswith((".tmp", ".old", ".replaced"))]
        if left:
            return f"left: {left}"
        newest = snapshots.restore(snapshot_cases.small_whole(0))
        snapshots.save(newest.step + 1, newest.state)
    return None
