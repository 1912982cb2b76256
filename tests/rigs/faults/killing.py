"""SIGKILL while snapshots are written: at random times, and at every failpoint in turn."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
import time
from pathlib import Path

from rigs import forkserver
from rigs.faults import failpoints, running
from rigs.faults.trials import ended, finished, goes_on, seeded, wait_for, whole_run

TRIALS = 1000
COUNTED = "files.rename=sleep:0@999999"  # a plan without an effect, for which the passes are counted
MENDED = "snapshot.quarantine"  # there the run itself has damaged a step


def trial(number: int, folder: Path) -> str | None:
    """Even numbers: at a random time; odd ones: at a failpoint."""
    points = list(failpoints.POINTS)
    return (
        at_any_time(number, folder) if number % 2 == 0 else at_point(points[number // 2 % len(points)], number, folder)
    )


def at_any_time(number: int, folder: Path, *, off: str = "") -> str | None:
    """A run that saves without a pause is killed within its first quarter of a second."""
    child = forkserver.shared().start(running.child("save_for_ever", str(folder), off=off))
    wait_for(child, "begun")
    time.sleep(seeded("killing", number).uniform(0.0, 0.25))
    child.kill()
    done = child.wait()
    if done.status != -signal.SIGKILL:
        return f"ended by itself with {done.status}: {done.err}"
    return goes_on(folder, running.last(done.out, "saved"))


@functools.cache
def passes(run: str) -> dict[str, int]:
    """How often a whole run passes each failpoint."""
    with tempfile.TemporaryDirectory() as folder:
        done = forkserver.shared().run(running.child(run, folder), quick=True, PURESTEP_FAILPOINT=COUNTED)
    assert done.status == 0, done.err
    return dict(json.loads(next(running.told(done.out, "points"), ["{}"])[0]))


def at_point(point: str, number: int, folder: Path, *, off: str = "") -> str | None:
    """A run is killed when it passes a failpoint for the n-th time, n drawn from all of its passes."""
    run = "save_in_every_way" if point in passes("save_in_every_way") else "train"
    if point not in passes(run):
        return f"no run passes {point}"
    turn = seeded(point, number).randint(1, passes(run)[point])
    child = forkserver.shared().start(
        running.child(run, str(folder), off=off), PURESTEP_FAILPOINT=f"{point}=kill@{turn}", quick=True
    )
    done = ended(child)
    if done.status != -signal.SIGKILL:
        return f"{point}: ended with {done.status}: {done.err}"
    if run == "train":
        same = finished(folder) == whole_run()
        return None if same else f"{point}, pass {turn}: the resumed run ends in other bits"
    found = goes_on(folder, running.last(done.out, "saved"), mended=point == MENDED or after_the_damage(folder))
    return f"{point}, pass {turn}: {found}" if found else None


def after_the_damage(folder: Path) -> bool:
    """Whether the run had emptied a file of its last step by then."""
    step = folder / "5"
    return step.exists() and os.path.getsize(running.largest_file(step)) == 0
