"""Bits that flip, files that are cut short or gone: named or harmless, and the step before is there."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
import warnings
from pathlib import Path

from purestep import errors
from purestep.snapshot import Snapshot, Snapshots
from rigs.faults import running
from rigs.faults.trials import same_values, seeded

TRIALS = 1000
NEWEST, BEFORE = 3, 2
KINDS = "fffthd"  # flipped three times as often as cut anywhere, cut to half, or deleted


@functools.cache
def whole() -> Path:
    """Three steps to damage copies of; gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="purestep-whole-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with Snapshots(folder, keep=None) as snapshots:
        for step in (1, BEFORE, NEWEST):
            snapshots.save(step, running.state(step))
    return folder


def damage(step: Path, rng: random.Random, kinds: str) -> str:
    """Flips a bit of one of the files, cuts it (anywhere, or to half) or deletes it; what was done."""
    victim = rng.choice([path for path in running.files_of(step) if path.stat().st_size])
    data, kind = bytearray(victim.read_bytes()), rng.choice(kinds)
    match kind:
        case "f":
            bit = rng.randrange(len(data) * 8)
            data[bit // 8] ^= 1 << bit % 8
            done = f"bit {bit}"
        case "d":
            victim.unlink()
            return f"{victim.name} deleted"
        case _:
            del data[rng.randrange(len(data)) if kind == "t" else len(data) // 2 :]
            done = f"cut to {len(data)} bytes"
    victim.write_bytes(data)
    return f"{victim.relative_to(step)}: {done}"


def trial(number: int, folder: Path, *, kinds: str = KINDS) -> str | None:
    """The newest of three steps is damaged: it comes back right, or it is named and the one before comes back."""
    run = folder / "run"
    shutil.copytree(whole(), run)
    done = damage(run / str(NEWEST), seeded("damaging", number), kinds)
    found = strictly(run)
    if found is None or found.startswith("!"):
        return f"{done}: {found[1:]}" if found else falls_back(run, done, damaged=False)
    return falls_back(run, done, damaged=True)


def strictly(run: Path) -> str | None:
    """None where the newest step comes back bit for bit; where it is named as damaged, by what; "!" and a failure."""
    try:
        found = Snapshots(run, writer=False, strict=True).restore(running.state(0))
    except errors.Corrupt as error:
        place = str(run / str(NEWEST))
        return error.what if error.where.startswith(place) else f"!nobody is told where: {error}"
    except Exception as error:
        return f"!{type(error).__name__}: {error}"
    return None if found.step == NEWEST and same_values(found.state, NEWEST) else "!wrong values, and nobody was told"


def falls_back(run: Path, done: str, *, damaged: bool) -> str | None:
    """What the run that goes on from there does."""
    with warnings.catch_warnings(record=True) as caught, Snapshots(run) as snapshots:
        warnings.simplefilter("always")
        found: Snapshot = snapshots.restore(running.state(0))
    expected = BEFORE if damaged else NEWEST
    if found.step != expected or not same_values(found.state, expected):
        return f"{done}: step {found.step} came back, and not step {expected}"
    told = [str(warning.message) for warning in caught]
    aside = (run / f"{NEWEST}.corrupt").is_dir()
    if aside != damaged or len(told) != damaged:
        return f"{done}: damaged is {damaged}, set aside is {aside}, told: {told}"
    if damaged and f"went back to step {BEFORE}, 1 steps lost" not in told[0]:
        return f"{done}: {told}"
    return None
