"""Every way to spread a state x every way to share a batch x every way to run a step, against one process, as a table.

    python -m tests.rigs.parallel.table                    all but most of the native code; writes table.md
    python -m tests.rigs.parallel.table --all              native code in every row
    python -m tests.rigs.parallel.table --only units       rows whose name has this word; written to the terminal

With PURESTEP_TEST_DEVICE=cuda (see `processes`) it writes table_cuda.md.

A number is the largest absolute difference of any number of the whole state after eight batches, in float64.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from . import processes

PAGE = Path(__file__).parent / ("table.md" if processes.DEVICE == "cpu" else "table_cuda.md")
BACKEND = "gloo" if processes.DEVICE == "cpu" else "NCCL"
SPREADS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (2, {"params": "replicate"}),
    "shard": (2, {"params": "shard", "mesh": {"shard": 2}}),
    "shard + units": (2, {"params": "shard", "mesh": {"shard": 2}, "units": ["blocks.*"]}),
    "hybrid 2 x 2": (4, {"params": "shard", "mesh": {"data": 2, "shard": 2}}),
    "replicate, 3": (3, {"params": "replicate"}),
    "shard, 3": (3, {"params": "shard", "mesh": {"shard": 3}}),
}
SHARES: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"kind": "uneven"},
    "empty rank": {"kind": "empty"},
    "accumulate 3, tail of 2": {"kind": "uneven", "options": {"accumulate": 3}},
    "micro-batches 2": {"kind": "uneven", "options": {"microbatches": 2}},
}
RUNS: dict[str, dict[str, str] | None] = {
    "eager": None,
    "trace": {"backend": "aot_eager"},
    "inductor": {"backend": "inductor"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--all", action="store_true", help="native code in every row")
    parser.add_argument("--only", default="", help="a word of a row's name")
    chosen = parser.parse_args()
    lines = [
        f"torch {torch.__version__}, {BACKEND}, float64, 8 batches of 12 rows, clip + AdamW + EMA, odd sizes, "
        "a tied head.",
        "Written by `python -m tests.rigs.parallel.table" + (" --all`." if chosen.all else "`."),
        "",
        "| state | shares | eager | trace | inductor | collectives a run | numbers at rest |",
        "|---|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for spread, (world, settings) in SPREADS.items():
        cells: dict[str, dict[str, Any]] = {name: {} for name in SHARES}
        for run, compiled in RUNS.items():
            shares = [
                name
                for name in SHARES
                if chosen.only in f"{spread} {name}" and (run != "inductor" or chosen.all or name == "uneven")
            ]
            cases = [{**settings, **SHARES[name], "compiled": compiled} for name in shares]
            if run == "inductor" and world > 2 and not chosen.all:
                cases = []
            if not cases:
                continue
            found = processes.run("rigs.parallel.cases:steps", world, args=[cases], timeout=1800)[0].value
            for name, one in zip(shares, found, strict=True):
                cells[name][run] = one
                worst = max(worst, one["far"])
                print(f"{spread}, {name}, {run}: {one['far']:.1e}", file=sys.stderr, flush=True)
        for name, by_run in cells.items():
            if not by_run:
                continue
            numbers = [f"{by_run[run]['far']:.1e}" if run in by_run else "-" for run in RUNS]
            one = by_run["eager"]
            calls = ", ".join(f"{count} {call.removesuffix('_single')}" for call, count in one["collectives"].items())
            lines.append(f"| {spread} | {name} | {' | '.join(numbers)} | {calls} | {one['rest']} of {one['total']} |")
    lines += ["", f"Largest difference: {worst:.1e}."]
    text = "\n".join(lines) + "\n"
    if chosen.only:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
