"""The full figures: every family of trials, as often as the table of RESULTS.md says.

    PYTHONPATH=src python -m tests.rigs.faults.soak --processes 2               # everything
    PYTHONPATH=src python -m tests.rigs.faults.soak --only killing resuming --limit 20
    PYTHONPATH=src python -m tests.rigs.faults.soak --scale 0.01                # a look; RESULTS.md stays as it is

A family that made all its trials gets a new row in RESULTS.md; the other rows stay. Says every ten seconds how far it
is. Exits with 1 where a trial has failed, or the time was over before all were made.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PAGE = HERE / "RESULTS.md"
EVERY = 10.0  # seconds between two lines about the progress

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


class Count(NamedTuple):
    """What was run of a family."""

    name: str
    aim: int  # trials of the full soak
    run: int
    failures: list[str]
    seconds: float


def soak(name: str, *, scale: float, shard: int, shards: int, end: float) -> Count:
    """Runs this shard's trials of a family, up to a time; the folder of one that fails stays."""
    module = importlib.import_module(f"rigs.faults.{name}")
    aim, failures, count = int(module.TRIALS), list[str](), 0
    began = told = time.monotonic()
    numbers = range(shard, max(1, round(aim * scale)), shards)
    for number in numbers:
        if time.monotonic() > end:
            break
        if time.monotonic() > told + EVERY:
            told = time.monotonic()
            print(f"  {name}: {count} of {len(numbers)}, {len(failures)} failed, {told - began:.0f} s", flush=True)
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
            print(f"{name} {number} FAILED in {folder}: {failure[:500]}", file=sys.stderr, flush=True)
    return Count(name, aim, count, failures, time.monotonic() - began)


def shared(pool: Executor, name: str, *, scale: float, processes: int, end: float) -> Count:
    """Runs a family in several processes, each of which makes a share of its trials."""
    shares = [pool.submit(soak, name, scale=scale, shard=at, shards=processes, end=end) for at in range(processes)]
    parts = [share.result() for share in shares]
    failures = [failure for part in parts for failure in part.failures]
    seconds = sum(part.seconds for part in parts)
    return Count(name, parts[0].aim, sum(part.run for part in parts), failures, seconds)


def row(count: Count, when: str) -> str:
    """The line of a family in the table."""
    reached = f"{count.run - len(count.failures):,} of {count.run:,} held"
    return f"| `{count.name}` | {count.aim:,} {AIMS[count.name]} | {reached} | {count.seconds:,.0f} | {when} |"


def updated(page: str, rows: dict[str, str]) -> str:
    """The page with these rows, by family, in place of those that it had."""
    lines = page.splitlines()
    known = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"\| `(\w+)` \|", line))}
    for name, text in rows.items():
        lines[known[name]] = text
    return "\n".join([*lines, ""])


def measured() -> str:
    """When, of what and on what."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "no commit"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "orbax-checkpoint"))
    return f"{time.strftime('%Y-%m-%d')}, {commit}, Python {platform.python_version()}, {packages}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=AIMS, default=list(AIMS), metavar="NAME", help=", ".join(AIMS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of trials")
    parser.add_argument("--processes", type=int, default=1, help="that share the trials")
    parser.add_argument("--limit", type=float, default=120.0, help="minutes, after which no trial begins")
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    end = time.monotonic() + 60 * asked.limit
    with ProcessPoolExecutor(asked.processes, get_context("spawn"), logging.disable, (logging.WARNING,)) as pool:
        how = {"scale": asked.scale, "processes": asked.processes, "end": end}
        counts = [shared(pool, name, **how) for name in asked.only]
    when = measured()
    for count in counts:
        print(
            f"{count.name}: {count.run:,} of {count.aim:,} trials, {len(count.failures)} failed, {count.seconds:.0f} s"
        )
    whole = [count for count in counts if count.run == count.aim and asked.scale == 1]
    if whole:
        PAGE.write_text(updated(PAGE.read_text(), {count.name: row(count, when) for count in whole}))
    is_short = any(one.run < max(1, round(one.aim * asked.scale)) for one in counts)
    return int(is_short or any(count.failures for count in counts))


if __name__ == "__main__":
    sys.exit(main())
