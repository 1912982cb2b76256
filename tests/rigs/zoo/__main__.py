"""The zoo: `PYTHONPATH=src python -m tests.rigs.zoo [--only NAMES] [--table FILE]`, from the root of the repository.

Trains each model for three steps by a loop by hand and in three ways of purestep's (eager, compiled, donated), and
prints a line for it: equal, off by rounding, refused and why, or DIFFERENT. Exits with 1 if a model differs silently,
if its module or a batch has been written to, or if its exported weights do not load strictly. A model takes some
seconds in each way, nearly all of them inductor's. Needs `pip install -e '.[zoo]'`; a package that is not there is
listed as not installed. Nothing is downloaded: weights are random.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib.metadata
import importlib.util
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "timm", "torchvision", "peft", "diffusers")


def main() -> int:
    """Train the models that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names or patterns of models or libraries, with commas")
    parser.add_argument("--table", type=Path, help="write the table into this file, after each model")
    parser.add_argument("--backend", default="inductor", help="of compile_step: inductor or aot_eager")
    parser.add_argument("--ways", default="eager,compiled,donated", help="with commas")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after so many")
    parser.add_argument("--limit", type=int, default=300, help="seconds for a model, after which it is given up")
    parser.add_argument("--list", action="store_true", help="print the names and train none")
    chosen = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Code of another source tree must not pass for this one's.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="zoo"))
    import torch

    from . import compare, families, libraries, models, table

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    entries = [
        *models.PLAIN,
        *(families.entries() if _installed("transformers") else ()),
        *libraries.entries(),
    ]
    entries = [entry for entry in entries if _is_wanted((entry.name, entry.package), chosen.only)]
    if chosen.list:
        print("\n".join(f"{entry.package}: {entry.name}" for entry in entries))
        return 0
    started, rows = time.monotonic(), list[compare.Row]()
    versions = {name: _version(name) for name in LIBRARIES}
    for entry in entries:
        ways = tuple(chosen.ways.split(","))
        if time.monotonic() - started > chosen.seconds:
            break
        if _installed(entry.package):
            row = _within(chosen.limit, entry, chosen.backend, ways)
        else:
            row = compare.Row(entry.name, entry.package, 0, dict.fromkeys(ways, "not installed"))
        rows.append(row)
        print(table.line(row), flush=True)
        if chosen.table:
            chosen.table.write_text(table.text(rows, versions, chosen.backend), encoding="utf-8")
        torch.compiler.reset()
        gc.collect()
    wrong = [row.name for row in rows if row.wrong]
    print(f"{len(rows)} models, {len(wrong)} wrong: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


class _TooLongError(BaseException):
    """No `Exception`, which a model or a compiler might catch."""


def _within(seconds: int, entry: Any, backend: str, ways: tuple[str, ...]) -> Any:
    """The row of an entry, or one that says that it took too long."""
    from . import compare

    def ring(*_: Any) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        return compare.compared(entry, backend=backend, ways=ways)
    except _TooLongError:
        return compare.Row(entry.name, entry.package, 0, dict.fromkeys(ways, f"given up after {seconds} s"))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _is_wanted(names: Iterable[str], only: str | None) -> bool:
    return only is None or any(fnmatch.fnmatchcase(name, each) for name in names for each in only.split(","))


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str:
    return importlib.metadata.version(package) if _installed(package) else "not installed"


if __name__ == "__main__":
    sys.exit(main())
