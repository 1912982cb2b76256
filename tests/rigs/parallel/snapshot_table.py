"""Every case of snapshots in several processes; writes ``SNAPSHOTS.md``.

PYTHONPATH=src python -m tests.rigs.parallel.snapshot_table
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rigs.faults import failpoints

from .snapshot_groups import group, killed

WORLDS = (1, 2, 3, 4)
KINDS = ("shard", "replicate", "rules")
RARE = {f"snapshot.{name}": f"snapshot.{name}@1" for name in ("replace", "retire", "delete", "quarantine")}
"""Points that the saves pass once, if at all."""
TARGET = Path(__file__).with_name("SNAPSHOTS.md")


def square(kind: str) -> list[str]:
    """A row for each world that writes: whether each world reads the same bits."""
    rows: list[str] = []
    for writer in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            expected = set(group("write", writer, folder, kind, timeout=300))
            cells = []
            for reader in WORLDS:
                found = set(group("read", reader, folder, kind, timeout=300))
                cells.append("equal" if found == expected and len(expected) == 1 else "DIFFERS")
        rows.append(f"| {kind} | {writer} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def kills(world: int) -> list[str]:
    """A row for each failpoint of a save: what is wrong after each process was killed there."""
    rows: list[str] = []
    points = [point for point in failpoints.POINTS if point.startswith("snapshot.")]
    for point in [RARE.get(point, point) for point in points] + ["snapshot.commit@4"]:
        cells = []
        for rank in range(world):
            with tempfile.TemporaryDirectory() as folder:
                found = killed(Path(folder), world, rank, point)
            cells.append("whole" if found is None else "not passed" if "was not killed" in found else found)
        rows.append(f"| {point} | {world} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    lines = [
        "# Snapshots of several processes",
        "",
        "Written by `python -m tests.rigs.parallel.snapshot_table` (gloo, CPU). Four processes are a hybrid mesh,",
        "`data=2, shard=2`; the state has an open accumulation window. *equal*: the whole state has the same bits.",
        "",
        "| placement | written by | read by 1 | by 2 | by 3 | by 4 |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        lines += square(kind)
    lines += [
        "",
        "SIGKILL of one process when it passes a point for the second time (@1: the first; @4: the fourth, when it",
        "replaces a step by another of the same number). *whole*: only whole steps are listed, with",
        "their values, the steps that were saved among them; each other process ends with an error that names the",
        "killed one; the next run removes what is left and saves. *not passed*: this process does not pass the point.",
        "",
        "| point | processes | process 0 | 1 | 2 |",
        "|---|---|---|---|---|",
    ]
    for world in (2, 3):
        lines += kills(world)
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(any("DIFFERS" in line or "\n" in line for line in lines))


if __name__ == "__main__":
    main()
