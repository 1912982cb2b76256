"""Many cases: `PYTHONPATH=src python -m tests.rigs.fuzz --cases 2000 --seed 0`, from the root of the repository.

Prints a line for every mismatch, with the seed, and at the end how many cases there were and how many differed; exits
with 1 if any did. ``--seed 7 --cases 1`` runs that case again. Two processes with other ``--seed`` share no case as
long as these are further apart than ``--cases``. A case takes some seconds, nearly all of them inductor's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings


def main() -> int:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has the next one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--device", default="cpu", help='"cuda": layers that draw nothing, compared on the GPU')
    chosen = parser.parse_args()
    # Code of another source tree must not pass for this one's.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="fuzz"))
    import time

    import torch

    from . import cases, compare

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started, count, wrong, broken = time.monotonic(), 0, 0, 0
    for seed in range(chosen.seed, chosen.seed + chosen.cases):
        if time.monotonic() - started > chosen.seconds:
            break
        case = cases.case(seed, quiet=chosen.device != "cpu")
        try:
            found = compare.mismatches(case, chosen.device)
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:300]}", flush=True)
            broken += 1
        else:
            print("\n".join(found), end="\n" if found else "", flush=True)
            wrong += bool(found)
        count += 1
        torch.compiler.reset()
        if count % 10 == 0:
            print(f"{count} cases, {wrong} mismatches, {broken} errors so far", file=sys.stderr, flush=True)
    print(f"{count} cases, {wrong} mismatches, {broken} errors, {time.monotonic() - started:.0f} s")
    return int(wrong + broken > 0)


if __name__ == "__main__":
    sys.exit(main())
