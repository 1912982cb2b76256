"""What a long life leaves behind: memory, processes, descriptors, handlers."""

from __future__ import annotations

import json
from pathlib import Path

from rigs import forkserver
from rigs.faults import running
from rigs.faults.trials import ended

TRIALS = 1
SLOPE = 1024  # bytes a step
STEPS, SAVES, FITS = 1000, 50, 20


def trial(number: int, folder: Path) -> str | None:
    """`STEPS` steps, `SAVES` saves with a restore each, `FITS` calls of fit, half of them with a worker."""
    del number
    return grown(folder, STEPS, SAVES, FITS)


def grown(folder: Path, *amounts: int, off: str = "") -> str | None:
    """What a process has more of than it may, after so many steps, saves and fits."""
    code = running.child("live_long", str(folder / "run"), *amounts, off=off)
    done = ended(forkserver.shared().start(code, quick=True))
    told = next(running.told(done.out, "grown"), None)
    if told is None:
        return f"status {done.status}: {done.err}"
    found: dict[str, int] = json.loads(told[0])
    wrong = {name: value for name, value in found.items() if value > (SLOPE if name == "bytes" else 0)}
    return f"{wrong}" if wrong else None
