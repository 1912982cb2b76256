"""Snapshot directories that somebody has prepared: no code of theirs runs, no byte outside is touched."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from purestep.snapshot import manifest
from rigs import forkserver
from rigs.faults import damaging, running
from rigs.faults.trials import contents, ended, seeded

TRIALS = 50
STEP = str(damaging.NEWEST)
ROOM = 1 << 36  # bytes of addresses that reading may take: threads reserve gigabytes, the bombs claim terabytes


def forge(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a manifest, and its digest with it: whoever can write one can write the other."""
    path = step / manifest.NAME
    record = json.loads(path.read_bytes())
    change(record)
    path.write_text(json.dumps(record))
    (step / manifest.DIGEST_NAME).write_text(hashlib.sha256(path.read_bytes()).hexdigest())


def relist(step: Path) -> None:
    """Enters the files as they are now into the manifest."""
    listed = {name: file._asdict() for name, file in manifest.inventory(step).items()}
    forge(step, lambda record: record.update(files=listed))


# --- what is planted --------------------------------------------------------------------------------------------------


def a_pickle(run: Path, canary: Path, rng: random.Random) -> None:
    name = rng.choice(("state.pkl", "state/data.pkl", "metrics", "_strategy", "model.pt", "state/_sharding", ".lock"))
    (run / STEP / name).write_bytes(payload(canary))


def payload(canary: Path) -> bytes:
    return f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()


def a_pickle_for_a_file(run: Path, canary: Path, rng: random.Random) -> None:
    """Every digest is right, and the content is not what orbax expects."""
    victim = rng.choice([path for path in running.files_of(run / STEP) if not path.name.startswith("manifest.")])
    victim.write_bytes(payload(canary))
    relist(run / STEP)


def an_import_path(run: Path, canary: Path, rng: random.Random) -> None:
    target = {"_target_": "os.system", "args": [f"touch {canary}"], "py/reduce": [{"py/type": "os.system"}]}
    key = rng.choice(("loop", "meta", "environment", "monitor", "metrics"))
    forge(run / STEP, lambda record: record.update({key: target, "class": "os.system"}))


def a_yaml_tag(run: Path, canary: Path, rng: random.Random) -> None:
    text = f"!!python/object/apply:os.system ['touch {canary}']\n"
    for path in running.files_of(run / STEP):
        if path.name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", ".zarray") and rng.random() < 0.7:
            path.write_text(text)
    relist(run / STEP)


def foreign_metadata(run: Path, canary: Path, rng: random.Random) -> None:
    """orbax's own metadata name classes and handlers by their import path."""
    for path in running.files_of(run / STEP):
        if path.name in ("_METADATA", "_CHECKPOINT_METADATA"):
            text = path.read_text()
            for word in ("jax.Array", "np.ndarray", "PyTreeHandler", "orbax", "DictKey"):
                text = text.replace(word, rng.choice(("os.system", "builtins.eval", "subprocess.Popen")))
            path.write_text(text)
    relist(run / STEP)


def a_way_out(run: Path, canary: Path, rng: random.Random) -> None:
    """Names that lead out of the directory, or are none."""
    name = rng.choice(("../../outside/a", "/etc/passwd", "..", "", "a\0b", "x" * 300, "state/../../../outside/a"))

    def change(record: dict[str, Any]) -> None:
        if rng.random() < 0.5:
            record["leaves"][name] = record["leaves"].pop("w")
        else:
            record["files"][name] = {"size": 3, "crc32": rng.choice((None, 0))}

    forge(run / STEP, change)


def a_link(run: Path, canary: Path, rng: random.Random) -> None:
    outside = canary.parent / "outside"
    kind = rng.randrange(5)
    if kind == 0:
        (run / STEP).rename(outside / STEP)
        (run / STEP).symlink_to(outside / STEP)
    elif kind == 1:
        victim = rng.choice(running.files_of(run / STEP))
        shutil.move(victim, outside / "moved")
        victim.symlink_to(outside / "moved")
    elif kind == 2:
        (run / ".lock").unlink(missing_ok=True)
        (run / ".lock").symlink_to(outside / "a")
    elif kind == 3:
        (run / rng.choice((".tmp-9-1", ".old-9-1", ".replaced-9", "9"))).symlink_to(outside)
    else:
        (run / ".tmp-9-1").mkdir()
        (run / ".tmp-9-1" / "deep").symlink_to(outside)


def a_bomb(run: Path, canary: Path, rng: random.Random) -> None:
    """A few bytes that claim terabytes, or that take for ever."""
    step, kind = run / STEP, rng.randrange(4)
    if kind == 0:
        forge(step, lambda record: record["leaves"]["w"].update(shape=[10**12]))
    elif kind == 1:
        forge(step, lambda record: record["files"].update({"d": {"size": 10**15, "crc32": None}}))
    elif kind == 2:
        (step / manifest.NAME).write_text("[" * 200_000)
        digest = hashlib.sha256((step / manifest.NAME).read_bytes()).hexdigest()
        (step / manifest.DIGEST_NAME).write_text(digest)
    else:
        for path in running.files_of(step):
            if path.name == "_METADATA":
                path.write_text(path.read_text().replace("1000", str(10**12)))
        relist(step)


def odd_names(run: Path, canary: Path, rng: random.Random) -> None:
    for name in ("٣", "9" * 40, "-1", "007", "9.corrupt.x", "9\n", ".tmp-", ".replaced-", ".replaced-x", ".old-"):
        (run / name).mkdir(exist_ok=True)
    (run / "8").write_text("a file")
    os.mkfifo(run / STEP / "pipe") if rng.random() < 0.5 else None


PLANTS = (
    *(a_pickle, a_pickle_for_a_file, an_import_path, a_yaml_tag, foreign_metadata),
    *(a_way_out, a_link, a_bomb, odd_names),
)


# --- the trial --------------------------------------------------------------------------------------------------------


def trial(number: int, folder: Path) -> str | None:
    """The plants in turn, each restored, and saved beside, by a run that is watched; then every file outside is held
    against what it was."""
    return restored(PLANTS[number % len(PLANTS)], number, folder)


def restored(
    plant: Callable[[Path, Path, random.Random], None], number: int, folder: Path, *, off: str = ""
) -> str | None:
    run, canary, outside = folder / "run", folder / "canary", folder / "outside"
    shutil.copytree(damaging.whole(), run)
    outside.mkdir()
    (outside / "a").write_text("abc")
    plant(run, canary, seeded("planting", number))
    before = contents(outside)
    child = forkserver.shared().start(running.child("read_watched", str(run), ROOM, off=off), quick=True)
    done = ended(child)
    name = plant.__name__.replace("_", " ")
    if canary.exists():
        return f"{name}: code was run"
    if contents(outside) != before:
        return f"{name}: something outside was changed"
    watched = [" ".join(rest) for rest in running.told(done.out, "watched")]
    if watched:
        return f"{name}: {watched}"
    ok = done.status == 0 and next(running.told(done.out, "came"), None)
    return None if ok else f"{name}: status {done.status}: {done.out} {done.err}"
