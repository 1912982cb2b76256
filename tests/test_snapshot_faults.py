"""Snapshots under kills, damaged files, full disks, second writers and hostile directories."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from forkserver import ForkServer
from test_files import file_size_limit, record_calls
from test_snapshot import assert_same, small

from purestep import errors, files, tree
from purestep.snapshot import Snapshots, host, manifest, reading, store


@pytest.fixture(scope="module")
def server():
    with ForkServer() as running:
        yield running


SCRIPT = """
import sys, torch
from purestep.snapshot import Snapshots
def state(step):
    return {"w": torch.arange(1000.0) + step, "b": torch.full((2,), float(step))}
"""


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1000.0) + step, "b": torch.full((2,), float(step))}


def saved(folder: Path, *steps: int, **options) -> None:
    with Snapshots(folder, keep=None, **options) as snapshots:
        for step in steps:
            snapshots.save(step, state_of(step))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def largest(folder: Path) -> Path:
    return max(files_of(folder), key=lambda path: path.stat().st_size)


# --- kills --------------------------------------------------------------------------------------------------------

TRAIN = f"""{SCRIPT}
with Snapshots(sys.argv[1] if len(sys.argv) > 1 else FOLDER, keep=1) as snapshots:
    for step in (1, 2, 3):
        snapshots.save(step, state(step))
        snapshots.wait()
        print(step, flush=True)
    snapshots.save(3, state(3), overwrite=True)
"""
SAVE_POINTS = [name for name in files.POINTS if name.startswith("snapshot.") and name != "snapshot.quarantine"]


@pytest.mark.parametrize("point", [*SAVE_POINTS, "files.unlink"])
def test_a_kill_at_any_point_loses_nothing_acknowledged(tmp_path, server, point):
    turn = {
        "files.rename": 4,
        "files.unlink": 5,
        "snapshot.replace": 1,
        "snapshot.retire": 1,
        "snapshot.delete": 1,
    }.get(point, 2)
    done = server.run(TRAIN.replace("FOLDER", repr(str(tmp_path))), PURESTEP_FAILPOINT=f"{point}=kill@{turn}")
    assert done.status == -9, done.err
    acknowledged = max(int(line) for line in done.out.split())
    # A writer sweeps; what a reader sees before is whole as well, except between the two renames of an overwrite.
    seen = Snapshots(tmp_path, writer=False).steps()
    assert seen
    assert max(seen) >= acknowledged
    with Snapshots(tmp_path, keep=1) as snapshots:
        found = snapshots.restore(state_of(0))
        assert found.step >= acknowledged
        assert_same(found.state, state_of(found.step))
        snapshots.save(10, state_of(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "10"]


def test_a_kill_between_the_renames_of_an_overwrite(tmp_path, server):
    train = TRAIN.replace("FOLDER", repr(str(tmp_path)))
    assert server.run(train, PURESTEP_FAILPOINT="snapshot.commit=kill@4").status == -9
    with Snapshots(tmp_path) as snapshots:
        assert_same(snapshots.restore(state_of(0)).state, state_of(3))


def test_a_kill_while_a_damaged_step_is_renamed(tmp_path, server):
    saved(tmp_path, 1, 2)
    largest(tmp_path / "2").write_bytes(b"")
    code = f"{SCRIPT}\nSnapshots({str(tmp_path)!r}).restore(state(0))"
    assert server.run(code, PURESTEP_FAILPOINT="snapshot.quarantine=kill").status == -9
    with pytest.warns(RuntimeWarning, match="went back to step 1"), Snapshots(tmp_path) as snapshots:
        assert snapshots.restore(state_of(0)).step == 1


# --- the end of a script ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise KeyError('bug')"])
def test_a_script_that_ends_without_close_loses_nothing(tmp_path, server, ending):
    code = f"{SCRIPT}\nSnapshots({str(tmp_path)!r}).save(1, state(1))\n{ending}"
    done = server.run(code, PURESTEP_FAILPOINT="snapshot.stage=sleep:0.2")
    assert done.status == {"": 0, "sys.exit(3)": 3}.get(ending, 1), done.err
    assert "snapshot" not in done.err
    assert (tmp_path / ".lock").read_text() == ""
    assert_same(Snapshots(tmp_path, writer=False).restore(state_of(0)).state, state_of(1))


def test_a_script_whose_last_save_fails_says_so_and_exits_otherwise_than_0(tmp_path, server):
    code = f"{SCRIPT}\nprint('trained')\nSnapshots({str(tmp_path)!r}).save(1, state(1))"
    done = server.run(code, PURESTEP_FAILPOINT="snapshot.sync=raise:ENOSPC")
    assert done.status not in (0, 1)
    assert done.out == "trained\n"
    assert "step 1: could not be written (4,008 bytes): [Errno 28] No space left on device" in done.err


def test_a_worker_forked_during_a_save_neither_hangs_nor_writes(tmp_path, server):
    code = f"""{SCRIPT}
import os
snapshots = Snapshots({str(tmp_path)!r})
snapshots.save(1, state(1))
while not os.path.exists({str(tmp_path / "go")!r} + ".reached"):
    pass
child = os.fork()
if child == 0:
    try:
        snapshots.save(2, state(2))
    except Exception as error:
        print(type(error).__name__, "was made in process" in str(error), flush=True)
    snapshots.close()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
open({str(tmp_path / "go")!r}, "w").close()
snapshots.close()
print(snapshots.steps())
"""
    done = server.run(code, PURESTEP_FAILPOINT=f"snapshot.stage=wait:{tmp_path / 'go'}")
    assert done.status == 0, done.err
    assert done.out == "SnapshotError True\n0\n[1]\n"


# --- second writers -----------------------------------------------------------------------------------------------


def test_a_second_writer_is_locked_out_and_a_reader_is_not(tmp_path, server):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state_of(1))
        snapshots.wait()
        code = f"{SCRIPT}\nprint(Snapshots({str(tmp_path)!r}).restore(state(0)).step, flush=True)\nSnapshots("
        done = server.run(f"{code}{str(tmp_path)!r}).save(2, state(2))")
        assert done.out == "1\n"
        assert done.status == 1
        assert f"errors.Locked: {tmp_path}: another run writes here: pid {os.getpid()} on" in done.err
        snapshots.save(2, state_of(2))
    assert Snapshots(tmp_path).steps() == [1, 2]


def test_a_killed_writer_leaves_no_lock(tmp_path, server, caplog):
    code = f"{SCRIPT}\nheld = Snapshots({str(tmp_path)!r})\nheld.open()\nimport os\nos.kill(os.getpid(), 9)"
    assert server.run(code).status == -9
    saved(tmp_path, 1)
    assert "taking over from a run that did not end well: pid" in caplog.text


def test_a_step_retired_while_it_is_read_is_not_called_damaged(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    real = reading.read

    def slow(folder, *args, **kwargs):
        if folder.name == "2":
            shutil.rmtree(folder)
        return real(folder, *args, **kwargs)

    monkeypatch.setattr(reading, "read", slow)
    assert Snapshots(tmp_path, writer=False).restore(state_of(0)).step == 1


# --- errors in the background -------------------------------------------------------------------------------------


def test_a_background_error_comes_once_and_the_next_save_goes_on(tmp_path, monkeypatch):
    with Snapshots(tmp_path) as snapshots:
        monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.digest=raise:EDQUOT")
        snapshots.save(1, small())
        snapshots._background.join()
        monkeypatch.delenv("PURESTEP_FAILPOINT")
        with pytest.raises(
            errors.WriteFailed, match=r"1: step 1: could not be written .*Disk quota exceeded"
        ) as caught:
            snapshots.save(2, small(2))
        assert caught.value.errno == 122
        snapshots.wait()
        snapshots.check()
        assert snapshots.steps() == [2]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "2"]


@pytest.mark.parametrize("ask", ["wait", "check", "close"])
def test_every_way_to_ask_raises_it(tmp_path, monkeypatch, ask):
    snapshots = Snapshots(tmp_path)
    monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.manifest=raise:MemoryError")
    snapshots.save(1, small())
    snapshots._background.join()
    with pytest.raises(errors.WriteFailed, match=r"step 1: could not be written .*MemoryError"):
        getattr(snapshots, ask)()
    snapshots.close()
    Snapshots(tmp_path).open()


def test_a_failed_save_does_not_hide_what_ended_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.manifest=raise:EIO")

    def run() -> None:
        with Snapshots(tmp_path) as snapshots:
            snapshots.save(1, small())
            raise KeyError("bug")

    with pytest.raises(KeyError, match="bug") as caught:
        run()
    assert "the last save failed: " in caught.value.__notes__[0]
    assert "step 1: could not be written" in caught.value.__notes__[0]
    Snapshots(tmp_path).open()


def test_no_memory_for_the_host_copy(tmp_path, monkeypatch):
    with Snapshots(tmp_path) as snapshots:
        monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.copy=raise:MemoryError")
        with pytest.raises(errors.WriteFailed, match="step 1: no host copy: MemoryError"):
            snapshots.save(1, small())
        monkeypatch.delenv("PURESTEP_FAILPOINT")
        snapshots.save(1, small())


@pytest.mark.parametrize("point", ["snapshot.commit", "snapshot.replace"])
def test_a_failed_overwrite_leaves_the_old_step(tmp_path, monkeypatch, point):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small(1))
        snapshots.wait()
        monkeypatch.setenv("PURESTEP_FAILPOINT", f"{point}=raise:EIO")
        snapshots.save(1, small(2), overwrite=True)
        with pytest.raises(errors.WriteFailed, match="Input/output error"):
            snapshots.wait()
        assert_same(snapshots.restore(small()).state, small(1))


def test_a_disk_that_is_full(tmp_path, capfd):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small(1))
        snapshots.wait()
        with file_size_limit(1 << 16):
            snapshots.save(2, {"w": torch.randn(100_000)})
            with pytest.raises(errors.WriteFailed, match=r"step 2: .*\(400,000 bytes\): .*File too large.*ulimit -f"):
                snapshots.wait()
        assert snapshots.steps() == [1]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "1"]
        snapshots.save(3, {"w": torch.randn(100_000)})
    assert "Traceback" not in capfd.readouterr().err


def test_no_room_is_foreseen(tmp_path, monkeypatch):
    state = {"w": torch.zeros(1000)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 15_000}))
    with pytest.warns(RuntimeWarning, match=r"snapshots need 0\.00 GB, the disk has 0\.00 GB"):
        Snapshots(tmp_path / "not yet", keep=2, keep_best=1).check_space(state)
    Snapshots(tmp_path, keep=1, keep_best=0).check_space(state)


def test_a_directory_that_cannot_be_written_is_told_before_the_first_save(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.WriteFailed, match="the path of a directory, not of a file"):
        Snapshots(tmp_path / "file").open()
    assert Snapshots(tmp_path / "file").steps() == []

    def mkdir(self, *args, **kwargs):
        raise OSError(30, "Read-only file system", str(self))

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        with pytest.raises(errors.WriteFailed, match="not mounted read-only"):
            Snapshots(tmp_path / "run").open()
    files.DirectoryLock(tmp_path / "run").acquire(patience=0)


# --- the copy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [True, False])
def test_the_writer_sees_the_values_at_the_call(tmp_path, monkeypatch, copied):
    """With the copy planted away, the stored values are those of later: the test can fail."""
    if not copied:
        monkeypatch.setattr(host, "stage", lambda tensors, spare: {k: host._bits(v) for k, v in tensors.items()})
    monkeypatch.setenv("PURESTEP_FAILPOINT", f"snapshot.stage=wait:{tmp_path / 'go'}")
    state = {"w": torch.zeros(10), "h": torch.zeros(3, dtype=torch.bfloat16)}
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, state)
        tree.map(lambda x: x.add_(1), state)
        (tmp_path / "go").touch()
        found = snapshots.restore(state).state
    assert [leaf.float().sum().item() for leaf in tree.leaves(found)] == ([0, 0] if copied else [3, 10])


def test_bytes_then_name_then_directory_reach_the_disk(tmp_path, monkeypatch):
    calls = record_calls(monkeypatch)
    with Snapshots(tmp_path, keep=1) as snapshots:
        snapshots.save(1, small())
    staging = str(tmp_path / ".tmp-1-")
    commit = next(i for i, (call, path) in enumerate(calls) if call == "rename" and path.endswith("/1"))
    synced = {path.replace(path[len(staging) :].split("/")[0], "") for call, path in calls[:commit] if call == "fsync"}
    for path in [tmp_path / "1", *(tmp_path / "1").rglob("*")]:
        assert str(path).replace(str(tmp_path / "1"), staging) in synced, path
    assert calls[commit + 1] == ("fsync", str(tmp_path))


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A snapshot to damage copies of."""
    folder = tmp_path_factory.mktemp("whole")
    saved(folder, 1)
    return folder


def outcome(folder: Path) -> str:
    try:
        found = Snapshots(folder, writer=False).restore(state_of(0), step=1)
    except errors.Corrupt as error:
        return "corrupt" if str(folder / "1") in error.where else f"corrupt, nobody knows where: {error}"
    assert_same(found.state, state_of(1))
    assert found.loop is None
    return "harmless"


def test_no_flipped_bit_gives_wrong_values(tmp_path, whole, caplog):
    rng = random.Random(0)
    seen = {"corrupt": 0, "harmless": 0}
    for trial in range(60):
        folder = tmp_path / str(trial)
        shutil.copytree(whole, folder)
        victims = [path for path in files_of(folder / "1") if path.stat().st_size]
        victim = victims[trial % len(victims)]
        flip(victim, rng.randrange(victim.stat().st_size * 8))
        seen[outcome(folder)] += 1
    assert seen["corrupt"] > 40
    assert "Task exception was never retrieved" not in caplog.text


def test_without_digests_flipped_bits_would_go_unnoticed(tmp_path, whole, monkeypatch):
    shutil.copytree(whole, tmp_path / "copy")
    victim = largest(tmp_path / "copy" / "1")
    flip(victim, victim.stat().st_size * 4)
    assert outcome(tmp_path / "copy") == "corrupt"
    monkeypatch.setattr(manifest, "check_values", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError):
        outcome(tmp_path / "copy")


def test_every_file_cut_short_emptied_or_gone(tmp_path, whole):
    names = [path.relative_to(whole) for path in files_of(whole / "1")]
    for name, cut in itertools.product(names, ("empty", "half", "last", "gone")):
        folder = tmp_path / f"{cut}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(whole, folder)
        victim = folder / name
        data = victim.read_bytes()
        if cut == "gone":
            victim.unlink()
        else:
            victim.write_bytes({"empty": b"", "half": data[: len(data) // 2], "last": data[:-1]}[cut])
        changed = cut == "gone" or (len(data) > 0 and (cut, name.name) != ("last", manifest.DIGEST_NAME))
        assert outcome(folder) == ("corrupt" if changed else "harmless"), (name, cut)
        assert Snapshots(folder).steps() == ([] if changed else [1]), (name, cut)


def test_a_file_too_many_is_harmless(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "1" / "state" / "notes.txt").write_text("x")
    (tmp_path / "copy" / "readme").write_text("x")
    (tmp_path / "copy" / "02").mkdir()
    assert outcome(tmp_path / "copy") == "harmless"


def test_a_damaged_newest_falls_back_and_is_kept_aside(tmp_path):
    saved(tmp_path, 1, 2, 3)
    victim = largest(tmp_path / "3")
    flip(victim, victim.stat().st_size * 4)
    reader = Snapshots(tmp_path, writer=False)
    with pytest.warns(RuntimeWarning, match="went back to step 2, 1 steps lost") as caught:
        assert reader.restore(state_of(0)).step == 2
    assert "the values of w are not those that were saved" in str(caught[0].message)
    assert reader.steps() == [1, 2, 3]
    with pytest.raises(errors.Corrupt, match="the values of w"):
        Snapshots(tmp_path, writer=False, strict=True).restore(state_of(0))
    with pytest.raises(errors.Corrupt, match="the values of w"):
        reader.restore(state_of(0), step=3)
    with Snapshots(tmp_path) as snapshots:
        with pytest.warns(RuntimeWarning, match=r"renamed to 3\.corrupt"):
            assert_same(snapshots.restore(state_of(0)).state, state_of(2))
        assert snapshots.steps() == [1, 2]
        snapshots.save(3, state_of(3))
    assert Snapshots(tmp_path).steps() == [1, 2, 3]
    assert (tmp_path / "3.corrupt" / manifest.NAME).exists()


def test_all_damaged_is_never_a_fresh_start(tmp_path):
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / str(step) / manifest.NAME).unlink()
    for _ in range(2):
        with (
            pytest.raises(errors.Corrupt, match=r"every snapshot here is damaged\n  2: .*missing.*\n  1: .*missing"),
            Snapshots(tmp_path) as snapshots,
        ):
            snapshots.restore(state_of(0))
    (tmp_path / "1").rename(tmp_path / "1.corrupt")
    shutil.rmtree(tmp_path / "2")
    with pytest.raises(errors.Corrupt, match=r"1\.corrupt: set aside"):
        Snapshots(tmp_path).restore(state_of(0))


# --- hostile directories ------------------------------------------------------------------------------------------


def forge(folder: Path, **changes) -> None:
    """Rewrites a manifest, its digest included."""
    path = folder / manifest.NAME
    record = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps(record))
    (folder / manifest.DIGEST_NAME).write_text(hashlib.sha256(path.read_bytes()).hexdigest())


def leaf(**changes) -> dict[str, object]:
    return {"dtype": "float32", "shape": [2], "crc32": 0, "value": None} | changes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"leaves": {"w": leaf(shape=[-1])}}, "-1 where a count was expected"),
        ({"leaves": {"w": leaf(dtype="os.system")}}, "dtype 'os.system'"),
        ({"leaves": {"w": leaf(dtype="python.exec", value="1")}}, "KeyError: 'exec'"),
        ({"leaves": {"w": leaf(crc32=None)}}, "with digest None"),
        ({"leaves": {"w": leaf(dtype="python.int", value="1")}}, "'1' as Python int"),
        ({"leaves": [1]}, "not a manifest"),
        ({"step": 7}, "holds step 7"),
        ({"step": "1"}, "'1' where a count"),
        ({"files": {"../../outside": {"size": 3, "crc32": None}}}, "missing where 3 bytes were written"),
        ({"metrics": {"loss": "low"}}, "not a manifest"),
        ({"monitor": "loss"}, "harmless"),
        ({"monitor": 3}, "not a manifest"),
    ],
)
def test_manifests_that_lie(tmp_path, whole, changes, text):
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "outside").write_text("abc")
    forge(tmp_path / "copy" / "1", **changes)
    if text == "harmless":
        assert outcome(tmp_path / "copy") == text
    else:
        with pytest.raises(errors.Corrupt, match=text):
            Snapshots(tmp_path / "copy").restore(state_of(0), step=1)


def test_a_newer_format_is_refused_by_name(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    forge(tmp_path / "copy" / "1", format=2)
    with pytest.raises(errors.Mismatch, match=r"format 2, written by a newer purestep.*pip install -U purestep"):
        Snapshots(tmp_path / "copy").restore(state_of(0))
    assert (tmp_path / "copy" / "1").exists()


def test_claims_of_terabytes_are_refused_before_allocation(tmp_path, whole, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("allocated")

    shutil.copytree(whole, tmp_path / "manifest")
    forge(tmp_path / "manifest" / "1", leaves={"w": leaf(shape=[10**13]), "b": leaf()})
    with pytest.raises(errors.Mismatch, match=r"w: float32 \[10000000000000\] in the snapshot"):
        Snapshots(tmp_path / "manifest").restore(state_of(0))

    # The manifest is right, the arrays' own metadata are those of a larger one.
    other = tmp_path / "other"
    values = {"w": ("float32", np.zeros(5000, np.float32)), "b": ("float32", np.zeros(2, np.float32))}
    store.write(other, values, platforms="cpu")
    shutil.copytree(whole, tmp_path / "arrays")
    victim = tmp_path / "arrays" / "1"
    shutil.rmtree(victim / "state")
    shutil.copytree(other / "state", victim / "state")
    forge(victim, files={name: file._asdict() for name, file in manifest.inventory(victim).items()})
    monkeypatch.setattr(store, "read", never)
    with pytest.raises(errors.Corrupt, match=r"own metadata claim \[5000\].* for w, float32 \[1000\] was written"):
        Snapshots(tmp_path / "arrays").restore(state_of(0), step=1)


def test_links_are_refused(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "real")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1").symlink_to(tmp_path / "real" / "1")
    assert Snapshots(tmp_path / "run").steps() == []
    with pytest.raises(errors.Corrupt, match="a symbolic link, which is not followed"):
        Snapshots(tmp_path / "run").restore(state_of(0), step=1)
    victim = largest(tmp_path / "real" / "1")
    shutil.copy(victim, tmp_path / "bytes")
    victim.unlink()
    victim.symlink_to(tmp_path / "bytes")
    with pytest.raises(errors.Corrupt, match="links are not followed"):
        Snapshots(tmp_path / "real").restore(state_of(0), step=1)


def test_planted_code_is_not_run(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    payload = f"cos\nsystem\n(S'touch {tmp_path / 'canary'}'\ntR.".encode()
    for name in ("state.pkl", "state/data.pkl", "metrics", "_strategy"):
        (tmp_path / "copy" / "1" / name).write_bytes(payload)
    forge(tmp_path / "copy" / "1", meta={"_target_": "os.system", "args": [f"touch {tmp_path / 'canary'}"]})
    assert outcome(tmp_path / "copy") == "harmless"
    assert not (tmp_path / "canary").exists()


# --- manners ------------------------------------------------------------------------------------------------------

MANNERS = """
import sys
import torch
import purestep.snapshot as s
assert not {"jax", "orbax"} & {name.split(".")[0] for name in sys.modules}
snapshots = s.Snapshots(sys.argv[1], jax_platforms=None if sys.argv[2] == "None" else sys.argv[2])
assert snapshots.steps() == [] and snapshots.latest() is None
snapshots.track("loss")
assert not {"jax", "orbax"} & {name.split(".")[0] for name in sys.modules}
snapshots.save(1, {"w": torch.zeros(1)})
snapshots.close()
import jax
print(jax.config.jax_platforms, list(jax._src.xla_bridge.backends()))
"""


@pytest.mark.parametrize(("platforms", "said"), [("cpu", "cpu ['cpu']"), ("None", "None ")])
def test_jax_is_late_and_stays_on_the_cpu(tmp_path, platforms, said):
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", MANNERS, str(tmp_path), platforms]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said)


def test_a_changed_number_of_threads_is_said(tmp_path, whole, caplog):
    def said() -> str:
        return "".join(record.getMessage() for record in caplog.records if record.name == "purestep")

    shutil.copytree(whole, tmp_path / "copy")
    record = json.loads((tmp_path / "copy" / "1" / manifest.NAME).read_bytes())["environment"]
    Snapshots(tmp_path / "copy").restore(state_of(0))
    assert said() == ""
    forge(tmp_path / "copy" / "1", environment=record | {"threads": 99, "torch": "1.0"})
    Snapshots(tmp_path / "copy", writer=False).restore(state_of(0))
    assert said() == ""
    Snapshots(tmp_path / "copy").restore(state_of(0))
    assert "may differ in the last bits: torch 1.0 then" in said()
    assert "threads 99 then" in said()


def test_orbax_does_not_chatter(tmp_path, caplog):
    with caplog.at_level(logging.INFO), Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small())
        snapshots.restore(small())
    assert [record for record in caplog.records if record.name == "absl"] == []


def test_inside_a_running_event_loop(tmp_path):
    async def main() -> int:
        with Snapshots(tmp_path) as snapshots:
            snapshots.save(1, small())
            return snapshots.restore(small()).step

    assert asyncio.run(main()) == 1


def test_saves_that_are_faster_than_the_disk_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("PURESTEP_FAILPOINT", f"snapshot.stage=wait:{tmp_path / 'go'}@1")
    monkeypatch.setattr("purestep.files.failpoints._hits", Counter())
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, small())
        threading.Timer(0.1, (tmp_path / "go").touch).start()
        snapshots.save(2, small())
        snapshots.wait()
        assert snapshots.waits == 1
        assert snapshots.steps() == [1, 2]


def test_nothing_is_left_behind(tmp_path):
    state = {"w": torch.zeros(1000)}
    with Snapshots(tmp_path, keep=1) as snapshots:
        for step in range(3):
            snapshots.save(step, state)
            snapshots.restore(state)
        files_before, threads_before = len(os.listdir("/proc/self/fd")), threading.active_count()
        for step in range(3, 13):
            snapshots.save(step, state)
            snapshots.restore(state)
        # orbax's threads end a little after their work: what counts is that ten rounds do not leave ten of anything.
        assert len(os.listdir("/proc/self/fd")) < files_before + 5
        assert threading.active_count() < threads_before + 5


def test_warnings_as_errors_do_not_stop_the_second_restore(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "2" / manifest.NAME).unlink()
    with Snapshots(tmp_path) as snapshots, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="went back to step 1"):
            snapshots.restore(state_of(0))
        assert snapshots.restore(state_of(0)).step == 1


def test_closed_read_only_and_strangers(tmp_path):
    snapshots = Snapshots(tmp_path)
    snapshots.close()
    with pytest.raises(errors.SnapshotError, match="is closed"):
        snapshots.save(1, small())
    with pytest.raises(errors.SnapshotError, match="was opened to read"):
        Snapshots(tmp_path, writer=False).save(1, small())
    with Snapshots(tmp_path, writer=False) as reader:
        assert reader.steps() == []
