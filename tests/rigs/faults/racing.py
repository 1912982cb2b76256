"""Two processes that want one directory at the same moment."""

from __future__ import annotations

import re
from pathlib import Path

from rigs import forkserver
from rigs.faults import running
from rigs.faults.trials import ended, restored_quietly, wait_for

TRIALS = 50
SOON = 1.0  # seconds in which the one that may not write is told


def trial(number: int, folder: Path, *, off: str = "", soon: float = SOON) -> str | None:
    """One of them gets it, the other is told by whom; every other time the holder is killed, and a third takes over."""
    run = folder / "run"
    code = running.child("race", str(run), str(folder / "go"), off=off)
    both = [forkserver.shared().start(code, quick=True) for _ in range(2)]
    for child in both:
        wait_for(child, "ready")
    (folder / "go").touch()
    for child in both:
        wait_for(child, "won")
    # Whoever has lost ends by itself; the winner holds the directory until it is told.
    losers = [child for child in both if not list(running.told(child.out(), "won"))]
    if len(losers) != 1:
        for child in both:
            child.kill()
            child.wait()
        return f"{2 - len(losers)} of two have won"
    winner = next(child for child in both if child is not losers[0])
    found = _told(ended(losers[0]), winner.pid, soon)
    wait_for(winner, "saved")
    if number % 2:
        winner.kill()
        winner.wait()
    else:
        (folder / "go").rename(folder / "go.end")
        done = ended(winner)
        if done.status != 0:
            return f"the winner has failed: {done.err}"
    return found or _afterwards(run, killed=bool(number % 2))


def _told(done: forkserver.Done, winner: int, soon: float) -> str | None:
    lost = next(running.told(done.out, "lost"), None)
    if lost is None:
        return f"neither won nor told: {done}"
    text = " ".join(lost[1:])
    if not re.search(rf"pid {winner} on \S+ since \d{{4}}-", text):
        return f"not told by whom: {text}"
    return None if float(lost[0]) < soon else f"told after {lost[0]} s"


def _afterwards(run: Path, *, killed: bool) -> str | None:
    """The winner's steps are whole, and the directory is free."""
    done = forkserver.shared().run(running.child("take_over", str(run)), quick=True)
    if done.status != 0:
        return f"the next one cannot go on: {done.err}"
    if ("did not end normally" in done.err) != killed:
        return f"taking over from a killed holder is said when there was one: {done.err}"
    return None if restored_quietly(run, writer=True).step == 3 else "the winner's steps are gone"
