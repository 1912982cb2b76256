"""The full figures: every family of trials, as often as the table of RESULTS.md says.

    PYTHONPATH=src python -m tests.rigs.faults.soak                         # everything, and writes RESULTS.md
    PYTHONPATH=src python -m tests.rigs.faults.soak --only killing --scale 0.1
    PYTHONPATH=src python -m tests.rigs.faults.soak --shard 1/2 --record 1.jsonl   # half of it; beside a second process
    PYTHONPATH=src python -m tests.rigs.faults.soak --table 1.jsonl 2.jsonl        # writes RESULTS.md from both

Exits with 1 where a trial has failed, or a family that was asked for is not there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

HERE = Path(__file__).resolve().parent

AIMS = {
    "killing": "kills while saving, half of them at random times, half at every failpoint in turn: "
    "no torn restore, no acknowledged step lost, nothing mended by hand",
    "preempting": "SIGTERM in a step, an evaluation, a save, the wait for a loader: exit 143, at most 1 step lost, "
    "the resumed run ends in the same bits",
    "losing": "SIGKILL in a run: at most one save interval lost (and the steps during a save in flight), "
    "the resumed run ends in the same bits",
    "damaging": "bit flips, truncations, deletions: named or harmless, fallback right, never a wrong value",
    "resuming": "resume configurations, each interrupted 3 times: state, order, metrics and history bit-equal",
    "fuzzing": "bad inputs: a `PurestepError` that names the leaf or the file",
    "filling": "disk faults (file size limit, full 4 MiB tmpfs, quota, read-only) at random writes: "
    "told by the next step, earlier snapshots untouched, goes on once there is space",
    "racing": "races of two processes for one directory: exactly one wins, the other is told in less than 1 s",
    "planting": "hostile directories, restored, saved into, shown and reported: no code run, no byte outside written "
    "or printed, no wait, at most 600 MB",
    "leaking": "run of 1,000 steps, 50 save/restore, 20 fit calls: less than 1 KiB a step, "
    "0 processes, 0 descriptors, handlers as before",
}
PACKAGES = ("torch", "numpy", "orbax-checkpoint", "jax", "tensorstore")


class Count(NamedTuple):
    """What was run of a family."""

    name: str
    aim: int  # trials of the full soak
    run: int
    failures: list[str]
    seconds: float


def family(name: str) -> ModuleType | None:
    """The module, or None where it does not exist."""
    try:
        return importlib.import_module(f"rigs.faults.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"rigs.faults.{name}":
            raise
        return None


def soak(name: str, *, scale: float, shard: int, shards: int) -> Count | None:
    """Runs this shard's trials of a family; the folder of one that fails stays."""
    module = family(name)
    if module is None:
        return None
    aim, failures, began, count = int(module.TRIALS), [], time.monotonic(), 0
    for number in range(max(1, round(aim * scale))):
        if number % shards != shard:
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"purestep-{name}-{number}-"))
        try:
            failure = module.trial(number, folder)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        count += 1
        if failure is None:
            shutil.rmtree(folder)
        else:
            failures.append(f"{number}: {failure}")
            print(f"{name} {number} FAILED in {folder}: {failure}", file=sys.stderr, flush=True)
    return Count(name, aim, count, failures, time.monotonic() - began)


def merged(counts: list[Count]) -> list[Count]:
    """One count a family, in the order of the table."""
    by_name: dict[str, list[Count]] = defaultdict(list)
    for count in counts:
        by_name[count.name].append(count)
    return [
        Count(
            name,
            parts[0].aim,
            sum(part.run for part in parts),
            [failure for part in parts for failure in part.failures],
            sum(part.seconds for part in parts),
        )
        for name in AIMS
        if (parts := by_name[name])
    ]


def table(counts: list[Count], command: str) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = [
        "# Faults: figures reached",
        "",
        f"`{command}`",
        "",
        f"Python {platform.python_version()}, {versions}; {platform.system()} {platform.machine()}, one thread. "
        "Seconds are those of all shards together, on a machine that had other work to do.",
        "",
        "| trials | figure aimed at | reached | seconds |",
        "|---|---|---|---|",
    ]
    for count in counts:
        reached = f"{count.run - len(count.failures):,} of {count.run:,} held"
        lines.append(f"| `{count.name}` | {count.aim:,} {AIMS[count.name]} | {reached} | {count.seconds:,.0f} |")
    failures = [f"- `{count.name}` {failure.splitlines()[0]}" for count in counts for failure in count.failures]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else []), ""])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=AIMS, default=list(AIMS), metavar="NAME", help=", ".join(AIMS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of trials")
    parser.add_argument("--shard", default="1/1", help="2/3: the second of three processes")
    parser.add_argument("--record", type=Path, help="adds what was run to this file, and writes no table")
    parser.add_argument("--table", type=Path, nargs="+", help="runs nothing: the table of what was recorded")
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    logging.disable(logging.WARNING)
    command = f"PYTHONPATH=src python -m tests.rigs.faults.soak {shlex.join(sys.argv[1:])}".rstrip()
    counts, missing = [], []
    if asked.table:
        lines = [line for path in asked.table for line in path.read_text().splitlines()]
        counts = [Count(*json.loads(line)) for line in lines]
    else:
        shard, shards = map(int, asked.shard.split("/"))
        for name in asked.only:
            count = soak(name, scale=asked.scale, shard=shard - 1, shards=shards)
            if count is None:
                missing.append(name)
                continue
            counts.append(count)
            print(f"{name}: {count.run} trials, {len(count.failures)} failed, {count.seconds:.0f} s", flush=True)
            if asked.record:
                with asked.record.open("a") as file:
                    file.write(json.dumps(count) + "\n")
    counts = merged(counts)
    print(table(counts, command))
    if not asked.record:
        (HERE / "RESULTS.md").write_text(table(counts, command))
    if missing:
        print(f"not there: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing) or any(count.failures for count in counts))


if __name__ == "__main__":
    sys.exit(main())
