"""SIGKILL at a random time of a run, and what is lost by it: at most what was done since the last save was due."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from purestep.snapshot import Snapshots
from rigs import forkserver
from rigs.faults import running
from rigs.faults.trials import ended, finished, seeded, wait_for, whole_run

TRIALS = 200
EVERY = 4  # steps between two saves
PAUSE = 0.01  # seconds a load and a step take longer: a save is done before the next one is due


def trial(number: int, folder: Path, *, off: str = "") -> str | None:
    """A run that saves every `EVERY` steps is killed after a random one of them, and resumed."""
    rng = seeded("losing", number)
    child = forkserver.shared().start(running.child("train", str(folder), EVERY, PAUSE, off=off), quick=True)
    wait_for(child, "did", rng.randint(1, running.CALLS - 1))
    time.sleep(rng.uniform(0.0, 2 * PAUSE))
    child.kill()
    done = ended(child)
    if done.status not in (-signal.SIGKILL, 0):
        return f"status {done.status}: {done.err}"
    lost = running.last(done.out, "did") - (Snapshots(folder, writer=False).latest() or 0)
    allowed = EVERY + in_flight(done.out)
    if lost > allowed:
        return f"{lost} steps lost, at most {allowed} may be"
    return None if finished(folder) == whole_run() else "the resumed run ends in other bits"


def in_flight(out: str) -> int:
    """Steps that were done while the last save was still being written."""
    busy = [int(rest[1]) for rest in running.told(out, "did")]
    return next((count for count, is_busy in enumerate(reversed(busy)) if not is_busy), len(busy))
