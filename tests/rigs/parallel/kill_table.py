"""SIGKILL of one process in each call of a run, which then goes on; writes ``kills.md``.

    python -m tests.rigs.parallel.kill_table

Same world: one `torchrun --max-restarts=1`. Another world: torchrun without restarts, and once more with other sizes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .fitting import ROWS
from .launches import far_from_unbroken, last_rows, torchrun

PAGE = Path(__file__).with_name("kills.md")
EPOCHS = 3  # of 5 calls
PAUSE = 0.1  # seconds: a writer in the background needs some time
SIZES: dict[str, dict[int, dict[str, int]]] = {"shard": {1: {}, 2: {"shard": 2}, 3: {"shard": 3}}, "replicate": {}}


class Case(NamedTuple):
    """A process is killed in a call, and how many processes go on."""

    mode: str
    rank: int
    call: int
    then: int  # processes


SAME = [Case(("shard", "replicate")[call // 2 % 2], call % 2, call, 2) for call in range(1, 15)]
OTHER = [Case(("shard", "replicate")[call // 2 % 2], call % 2, call, (1, 3)[call // 4 % 2]) for call in range(2, 15, 2)]


class Found(NamedTuple):
    """What a run that was killed and went on shows."""

    heard: float  # seconds from SIGKILL to the error in the other process
    error: str
    resumed: float  # seconds from SIGKILL to the end of the first call afterwards
    place: str  # of that call
    distance: float  # of the whole state at the end from an unbroken run of one process
    exact: bool  # each row once an epoch


def measured(case: Case) -> Found:
    """Run it."""
    sizes = SIZES[case.mode]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        kills = {"0": [case.rank, case.call]}
        if case.then == 2:
            torchrun(folder, 2, case.mode, EPOCHS, kills, sizes.get(2, {}), PAUSE, restarts=1)
        else:
            torchrun(folder, 2, case.mode, EPOCHS, kills, sizes.get(2, {}), PAUSE)
            torchrun(folder, case.then, case.mode, EPOCHS, {}, sizes.get(case.then, {}), launch="then ")
        killed = float((folder / "kill-0").read_text())
        heard, error = (folder / "heard-0").read_text().split()
        later = [line for path in folder.glob("log-*") if not path.name.startswith("log-0-") for line in lines(path)]
        at, epoch, batch, _ = min(later)
        rows = last_rows(folder) == {epoch: list(range(ROWS)) for epoch in range(EPOCHS)}
        place = f"epoch {epoch + 1}, batch {batch + 1}"
        distance = far_from_unbroken(folder, EPOCHS)
        return Found(float(heard) - killed, error, at - killed, place, distance, rows)


def lines(path: Path) -> list[Any]:
    """The calls that a process has logged."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    page = [
        "# One of two processes is killed, and the run goes on",
        "",
        f"torch {torch.__version__}, gloo, CPU. Written by `python -m tests.rigs.parallel.kill_table`.",
        f"{EPOCHS} epochs of 5 calls, {ROWS} rows, a pause of {PAUSE} s after each call, a snapshot every 2 calls.",
        "*heard*: seconds from SIGKILL to the error in the other process. *resumed*: to the end of the first call of",
        "those that go on; with another number of processes a second torchrun starts them. *distance*: of the whole",
        "state at the end from one process that was not killed, float64. *rows*: the log of indices has each row once",
        "in each epoch.",
        "",
        "| state | killed | goes on with | heard | as | resumed | at | distance | rows |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    good, all_found = True, []
    for case in SAME + OTHER:
        found = measured(case)
        all_found.append(found)
        good &= found.distance < 1e-14 and found.exact
        page.append(
            f"| {case.mode} | process {case.rank}, call {case.call} | {case.then} | {found.heard:.2f} s "
            f"| {found.error} | {found.resumed:.1f} s | {found.place} | {found.distance:.1e} "
            f"| {'exact' if found.exact else 'WRONG'} |"
        )
        print(page[-1], flush=True)
    heard, resumed = (max(getattr(found, name) for found in all_found) for name in ("heard", "resumed"))
    page += ["", f"Slowest: heard {heard:.2f} s, resumed {resumed:.1f} s."]
    PAGE.write_text("\n".join(page) + "\n", encoding="utf-8")
    sys.exit(not good)


if __name__ == "__main__":
    main()
