"""What a long life leaves behind: memory, processes, descriptors, handlers."""

from __future__ import annotations

import json
from pathlib import Path

import forkserver
from faults import running
from faults.trials import ended

TRIALS = 1
SLOPE = 1024.0  # bytes a step


def trial(number: int, folder: Path, *, off: str = "") -> str | None:
    """1,000 steps, 50 saves with a restore each, and 20 calls of fit, half of them with workers, in one process."""
    found, error = measured(folder, off=off)
    if found is None:
        return error
    wrong = {name: value for name, value in found.items() if value > (SLOPE if name == "bytes a step" else 0)}
    return f"{wrong}" if wrong else None


def measured(folder: Path, *, off: str = "") -> tuple[dict[str, float] | None, str]:
    """What has grown, by name."""
    done = ended(forkserver.shared().start(running.child("live_long", str(folder), off=off), quick=True))
    told = next(running.told(done.out, "grown"), None)
    return (json.loads(told[0].replace("_", " ")), "") if told else (None, f"status {done.status}: {done.err}")
