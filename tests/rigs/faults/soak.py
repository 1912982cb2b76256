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
import json
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
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


def merged(parts: list[Count]) -> Count:
    """The count of a family from those of its shards."""
    return Count(
        parts[0].name,
        parts[0].aim,
        sum(part.run for part in parts),
        [failure for part in parts for failure in part.failures],
        sum(part.seconds for part in parts),
    )


def in_processes(names: list[str], scale: float, processes: int, limit: float) -> list[Count]:
    """Runs the families in several processes, each of which makes a share of the trials of every one."""
    with tempfile.TemporaryDirectory(prefix="purestep-soak-") as folder:
        files = [Path(folder) / f"{shard}.jsonl" for shard in range(processes)]
        given = ["--only", *names, "--scale", str(scale), "--limit", str(limit)]
        shards = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.rigs.faults.soak", *given, "--shard", f"{at}/{processes}", str(file)]
            )
            for at, file in enumerate(files)
        ]
        for shard in shards:
            shard.wait()
        counts = [Count(*json.loads(line)) for file in files if file.exists() for line in file.read_text().splitlines()]
    by_name = {name: [count for count in counts if count.name == name] for name in names}
    return [merged(parts) for parts in by_name.values() if parts]


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
    parser.add_argument("--shard", nargs=2, metavar=("1/2", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    logging.disable(logging.WARNING)
    if asked.shard is None and asked.processes > 1:
        counts = in_processes(asked.only, asked.scale, asked.processes, asked.limit)
    else:
        at, shards = map(int, asked.shard[0].split("/")) if asked.shard else (0, 1)
        counts, end = list[Count](), time.monotonic() + 60 * asked.limit
        for name in asked.only:
            counts.append(soak(name, scale=asked.scale, shard=at, shards=shards, end=end))
            if asked.shard:
                with Path(asked.shard[1]).open("a") as file:
                    file.write(json.dumps(counts[-1]) + "\n")
    if asked.shard:
        return 0
    when = measured()
    for count in counts:
        print(
            f"{count.name}: {count.run:,} of {count.aim:,} trials, {len(count.failures)} failed, {count.seconds:.0f} s"
        )
    whole = [count for count in counts if count.run == count.aim and asked.scale == 1]
    if whole:
        PAGE.write_text(updated(PAGE.read_text(), {count.name: row(count, when) for count in whole}))
    is_short = len(counts) < len(asked.only) or any(one.run < max(1, round(one.aim * asked.scale)) for one in counts)
    return int(is_short or any(count.failures for count in counts))


if __name__ == "__main__":
    sys.exit(main())
