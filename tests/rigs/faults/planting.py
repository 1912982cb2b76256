"""Directories of runs that somebody has prepared: no code of theirs runs, no byte outside is touched or printed,
nothing waits, and memory stays in bounds. Each is restored, saved into, shown, verified and reported; compiled code in
it is read.

    PYTHONPATH=src python -m tests.rigs.faults.planting --cases 200     # a table: kind, cases, largest memory
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorstore

from purestep.snapshot import manifest
from rigs import forkserver
from rigs.faults import damaging, running
from rigs.faults.trials import contents, ended, seeded

TRIALS = 50
STEP = str(damaging.NEWEST)
ROOM = 1 << 36  # bytes of addresses that reading may take: threads reserve gigabytes, the bombs claim terabytes
MEMORY = 600  # MB by which a process may grow that reads: files of JSON may have 64 MB, and come back as objects
SECRET = "hunter2"  # in a file outside
ESCAPE = "\x1b]52;c;eA==\x07\x1b[2J\u202e[/]"
FILES = ("run.json", ".lock", "training_history.json", "metrics.jsonl", "metrics.csv", f"{STEP}/manifest.json")
FILES += (f"{STEP}/manifest.sha256", f"{STEP}/history.npy", f"{STEP}/state/_METADATA", "mlflow_id.txt")


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


def _instead(run: Path, name: str) -> Path:
    """The path of a file of a run, which is not there."""
    path = run / name
    path.unlink(missing_ok=True)
    return path


def no_file(run: Path, canary: Path, rng: random.Random) -> None:
    """A pipe, a device, or a link to a device or a file outside, where a file of a run is read."""
    path, kind = _instead(run, rng.choice(FILES)), rng.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 4 and os.getuid() == 0:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, rng.choice((3, 5, 8))))  # null, zero, random
    elif kind == 1:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/urandom", "/dev/tty", "/proc/self/environ")))
    else:
        path.symlink_to(canary.parent / "outside" / rng.choice(("secret", "a")))


def a_hole(run: Path, canary: Path, rng: random.Random) -> None:
    """Up to terabytes of zeros that take no room on the disk. Where the manifest claims them too, a checksum takes as
    long as that of a file of this size: a gigabyte is enough."""
    claimed = rng.random() < 0.5
    with (run / rng.choice(FILES)).open("ab") as file:
        file.truncate(1 << rng.randrange(28, 31 if claimed else 42))
    if claimed:
        relist_sizes(run / STEP)


def relist_sizes(step: Path) -> None:
    """The sizes as they are, with wrong checksums: nobody reads a terabyte to make a trial."""
    sizes = {str(path.relative_to(step)): path.stat().st_size for path in running.files_of(step)}

    def change(record: dict[str, Any]) -> None:
        for name, file in record["files"].items():
            file["size"] = sizes[name]

    if (step / manifest.NAME).stat().st_size < 1 << 20:
        forge(step, change)


def rows_of_an_old_format(run: Path, canary: Path, rng: random.Random) -> None:
    """Formats 1 and 2 name a file with rows. The next one had the next number, which a link has already."""
    name = rng.choice(("rows-1.jsonl", "rows-999999999.jsonl"))
    for number in (2, 10**9):
        (run / f"rows-{number}.jsonl").symlink_to(canary.parent / "outside" / "a")
    with (run / name).open("wb") as file:
        file.truncate(1 << rng.randrange(20, 40))
    entry = {"file": name, "rows": 3, "size": rng.choice((1 << 30, -1, 10**30)), "crc32": 0}
    history = rng.choice(({"a": 1}, {"a": [1]}, {"a": [1], "b": "c"}))
    changes = {"format": 2, "earlier": {"loop/record/history": entry}, "loop": {"record": {"history": history}}}
    forge(run / STEP, lambda record: record.update(changes))


def a_claim(run: Path, canary: Path, rng: random.Random) -> None:
    """More bytes, parts or rows than there are, also in the metadata that orbax believes."""
    step, kind = run / STEP, rng.randrange(4)
    if kind == 0:
        forge(step, lambda record: record.update(format=rng.choice((1, 2, 3)), parts=rng.choice((2, 10**6, 10**12))))
    elif kind == 1:
        forge(step, lambda record: record["leaves"]["w"].update(shape=[10**8]))
    else:
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{step / 'state'}/"}).result()
        about = json.loads(store.read("w/zarr.json").result().value)
        about["shape"] = [rng.choice((10**8, 10**12))]
        if kind == 3:
            about["chunk_grid"]["configuration"]["chunk_shape"] = about["shape"]
        store.write("w/zarr.json", json.dumps(about).encode()).result()
        relist(step)


def escapes(run: Path, canary: Path, rng: random.Random) -> None:
    """Names that act on a terminal, or are links of a page."""
    name = ESCAPE + '<a href="javascript:x">'
    about = {"started": "2026-01-01T00:00:00", "ended": "2026-01-01T00:00:00", "reason": None, "error": name}
    about |= {"resumed": False, "pid": 1, "host": name, "settings": {name: name, "monitor": name}}
    (run / "run.json").write_text(json.dumps(about))
    (run / ".lock").write_text(json.dumps({"pid": 1, "host": name, "since": rng.choice((name, "2026-01-01T00:00:00"))}))
    rows = [{"epoch": name, "step": row, name: 1.0 + row, f"val_{name}": 10**400} for row in range(9)]
    (run / "training_history.json").write_text(json.dumps(rows))
    (run / f"9.corrupt.{ESCAPE.replace('/', '')}").mkdir()
    forge(
        run / STEP, lambda record: record["metrics"].update({name: 1.0}) or record["environment"].update({name: name})
    )
    if rng.random() < 0.5:
        forge(run / STEP, lambda record: record["leaves"].update({name: record["leaves"].pop("w")}))


def deep_json(run: Path, canary: Path, rng: random.Random) -> None:
    (run / rng.choice(FILES[:5])).write_text(rng.choice(("[", '{"a":', '[{"a":')) * rng.randrange(900, 200_000))


def planted_names(run: Path, canary: Path, rng: random.Random) -> None:
    """Links under the names that a run is going to write."""
    victim = canary.parent / "outside" / "a"
    for number in range(200):
        (run / f".run.json.{number}.0.tmp").symlink_to(victim)
        (run / f".tmp-99-{number}").symlink_to(victim.parent)
    for name in ("99.corrupt", "nonfinite", ".tmp-probe-1", "run.json", "training_history.json"):
        (run / name).symlink_to(rng.choice((victim, victim.parent)))


def foreign_code(run: Path, canary: Path, rng: random.Random) -> None:
    """A cache of compiled code with a library that another user has written, or could have."""
    cache, outside, kind = run / "cache", canary.parent / "outside", rng.randrange(4)
    library = cache / "purestep" / f"{running.ENTRY}.so"
    library.parent.mkdir(parents=True)
    library.write_text("foreign")
    library.with_suffix(".json").write_text("foreign")
    files = [library, library.with_suffix(".json")]
    victim = rng.choice((cache, library.parent, *files))
    if kind == 0 and os.getuid() == 0:
        os.chown(victim, 65534, 65534)
    elif kind in (0, 1):
        victim.chmod(0o777)
    elif kind == 2:
        victim = rng.choice(files)
        victim.rename(outside / "moved")
        victim.symlink_to(outside / "moved")
    else:
        run.chmod(0o777)


PLANTS = (
    *(a_pickle, a_pickle_for_a_file, an_import_path, a_yaml_tag, foreign_metadata),
    *(a_way_out, a_link, a_bomb, odd_names),
    *(no_file, a_hole, rows_of_an_old_format, a_claim, escapes, deep_json, planted_names),
    foreign_code,
)


PEAKS: dict[str, int] = {}
"""MB by which the process of each kind has grown at most."""


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
    secret = [{"kind": "epoch", "step": row, "epoch": row, SECRET: 1.0} for row in range(99)]
    (outside / "secret").write_text(json.dumps(secret))
    plant(run, canary, seeded("planting", number))
    before = contents(outside)
    reports = plant is escapes or number % 8 == 0  # the import of plotly takes longer than all else
    child = forkserver.shared().start(running.child("read_watched", str(run), ROOM, reports, off=off), quick=True)
    done = ended(child)
    name = plant.__name__.replace("_", " ")
    if canary.exists():
        return f"{name}: code was run"
    if contents(outside) != before:
        return f"{name}: something outside was changed"
    if SECRET in done.out or {"\x1b", "\x07", "\u202e"} & {*done.out, *done.err}:
        return f"{name}: {done.out!r} {done.err!r}"
    peak = running.last(done.out, "peak")
    if peak > MEMORY:
        return f"{name}: grew by {peak} MB"
    PEAKS[plant.__name__] = max(PEAKS.get(plant.__name__, 0), peak)
    watched = [" ".join(rest) for rest in running.told(done.out, "watched")]
    if watched:
        return f"{name}: {watched}"
    ok = done.status == 0 and next(running.told(done.out, "came"), None)
    return None if ok else f"{name}: status {done.status}: {done.out} {done.err}"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--cases", type=int, default=TRIALS)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    failures, counts = list[str](), Counter[str]()
    for number in range(asked.first, asked.first + asked.cases):
        with tempfile.TemporaryDirectory(prefix="purestep-planting-") as folder:
            found = trial(number, Path(folder))
        counts[PLANTS[number % len(PLANTS)].__name__] += 1
        if found is not None:
            failures.append(f"{number}: {found}")
            print(failures[-1], file=sys.stderr, flush=True)
    print("| kind | cases | MB at most |\n|---|---|---|")
    for name, count in counts.items():
        print(f"| {name.replace('_', ' ')} | {count} | {PEAKS.get(name, 0)} |")
    print(f"{sum(counts.values())} cases, {len(failures)} failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
