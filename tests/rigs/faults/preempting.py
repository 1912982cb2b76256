"""SIGTERM at a random moment of a run, and what is lost by it: at most a step."""

from __future__ import annotations

import time
from pathlib import Path

from purestep.loop.signals import TERMINATED
from purestep.snapshot import Snapshots
from rigs import forkserver
from rigs.faults import running
from rigs.faults.trials import ended, finished, seeded, wait_for, whole_run

TRIALS = 200
PAUSE = 0.004  # seconds that each load, step and evaluation batch takes longer
HANGS = 0.1  # seconds after which a load that hangs is asleep
MOMENTS = ("step", "eval", "saving", "load", "hang")


def trial(number: int, folder: Path, *, off: str = "") -> str | None:
    """The moment goes round: in a step, an evaluation, a save, the wait for a loader, and for one that hangs."""
    moment, rng = MOMENTS[number % len(MOMENTS)], seeded("preempting", number)
    # Where nothing hangs earlier, the last load does: however late the signal comes, the run is still there.
    hang = rng.randint(2, running.CALLS) if moment == "hang" else running.CALLS
    code = running.child("train", str(folder), rng.randint(2, 7), PAUSE, hang, off=off)
    plan = f"snapshot.stage=sleep:{rng.uniform(0.0, 0.03):.3f}"
    child = forkserver.shared().start(code, quick=True, PURESTEP_FAILPOINT=plan)
    counts = {"step": 2 * running.BATCHES, "eval": 4, "saving": 2, "load": 2 * running.BATCHES}
    word, count = ("load", hang) if moment == "hang" else (moment, rng.randint(1, counts[moment]))
    wait_for(child, word, count)
    # Python hears a signal in the microseconds before it blocks only when the call returns: here after a minute.
    time.sleep(rng.uniform(0.0, PAUSE) + (HANGS if moment == "hang" else 0.0))
    child.terminate()
    done = ended(child)
    found = _lost(done, folder)
    if found is None and finished(folder) != whole_run():
        found = "the resumed run ends in other bits"
    return f"{word} {count}: {found}" if found else None


def _lost(done: forkserver.Done, folder: Path) -> str | None:
    if done.status != TERMINATED:
        return f"status {done.status}: {done.err}"
    finished_steps, saved = running.last(done.out, "did"), Snapshots(folder, writer=False).latest() or 0
    if finished_steps - saved > 1:
        return f"{finished_steps} steps were done, {saved} are saved"
    begun = running.last(done.out, "step")
    return None if begun == finished_steps else f"step {begun} was begun and not finished"
