"""Measure purestep beside what one would use instead.

    python benchmarks/run.py [--device cpu|cuda] [--only NAME ...] [--quick] [--list]

Prints tables and writes them, with a plot, under benchmarks/results/<device>/. A job that is measured again replaces
what stands there; each says when it was taken, at which commit and on what.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # a plain checkout will do

import torch  # noqa: E402

from benchmarks import jobs, machine, report  # noqa: E402  # behind the line that makes them found
from benchmarks.alone import Failed  # noqa: E402


def main(device: str, only: list[str], *, quick: bool, folder: Path) -> int:
    """Run the chosen jobs, one after the other, writing after each. Returns how many failed."""
    chosen = jobs.chosen(device, only, quick=quick)
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here")
    record = report.load(folder / "results.json") or {"device": device, "jobs": {}}
    record["machine"] = machine.describe(device)
    for key, value in record["machine"].items():
        print(f"{key}: {value}")
    failed = 0
    for name, job in chosen.items():
        begun = time.monotonic()
        try:
            result = job.run(device, quick=quick)
        except Failed as error:
            failed += 1
            print(f"\n{name}: {error}")
            result = {"title": "failed", "absent": [{"name": name, "why": str(error).splitlines()[-1]}]}
        record["jobs"][name] = {"stamp": _stamp(quick, begun, record["machine"]), "result": result}
        print(report.terminal(name, result), flush=True)
        written = report.write(record, folder)
    print("\n" + report.figures_table(record))
    print("\n" + "\n".join(written))
    return failed


def _stamp(quick: bool, begun: float, place: Mapping[str, Any]) -> dict[str, Any]:
    """When, of what and on what: the jobs of one record may have run on several machines."""
    return {
        "date": machine.now(),
        "commit": machine.commit(),
        "quick": quick,
        "seconds": round(time.monotonic() - begun, 1),
        "processor": place.get("gpu", place["processor"]),
        "torch": place["versions"]["torch"],
    }


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="of a job, or how its name begins")
    parser.add_argument("--quick", action="store_true", help="shortened; ten minutes on CUDA")
    parser.add_argument("--list", action="store_true", help="names of the jobs")
    parser.add_argument("--out", type=Path, help="another folder than benchmarks/results/<device>")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parsed()
    if given.list:
        print("\n".join(f"{name:<18} {job.about}" for name, job in jobs.all_jobs(given.device).items()))
        sys.exit()
    target = given.out or report.RESULTS / given.device
    sys.exit(1 if main(given.device, given.only, quick=given.quick, folder=target) else 0)
