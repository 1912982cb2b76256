"""Snapshots under faults: what is finer than a row of the matrix; the rows themselves are in tests/faults."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
from rigs import forkserver
from rigs.faults.planting import forge
from rigs.faults.running import state
from saving import assert_same, small

import purestep as ps
from purestep import errors
from purestep.snapshot import Snapshots, manifest, orbax_io, verify, writer
from purestep.snapshot import reader as reader_


@pytest.fixture
def server():
    return forkserver.shared()


SCRIPT = "import sys\nfrom rigs.faults.running import state\nfrom purestep.snapshot import Snapshots"


def saved(folder: Path, *steps: int) -> None:
    with Snapshots(folder, keep=None) as snapshots:
        for step in steps:
            snapshots.save(step, state(step))


# --- second processes -----------------------------------------------------------------------------------------------


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
        print(type(error).__name__, "was created in process" in str(error), flush=True)
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


def test_a_second_writer_is_locked_out_and_a_reader_is_not(tmp_path, server):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state(1))
        snapshots.wait()
        code = f"{SCRIPT}\nprint(Snapshots({str(tmp_path)!r}).restore(state(0)).step, flush=True)\nSnapshots("
        done = server.run(f"{code}{str(tmp_path)!r}).save(2, state(2))")
        assert done.out == "1\n"
        assert done.status == 1
        assert f"errors.Locked: {tmp_path}: another run writes here: pid {os.getpid()} on" in done.err
        snapshots.save(2, state(2))
    assert Snapshots(tmp_path).steps() == [1, 2]


def test_a_step_retired_while_it_is_read_is_not_called_damaged(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    real = reader_.read

    def slow(folder, *args, **kwargs):
        if folder.name == "2":
            shutil.rmtree(folder)
        return real(folder, *args, **kwargs)

    monkeypatch.setattr(reader_, "read", slow)
    assert Snapshots(tmp_path, writer=False).restore(state(0)).step == 1


def test_a_step_saved_while_the_others_are_retired_is_found(tmp_path, monkeypatch):
    writer = Snapshots(tmp_path, keep=1)
    writer.save(1, state(1))
    writer.wait()
    real, reads = reader_.read, []

    def slow(folder, *args, **kwargs):
        reads.append(folder.name)
        if len(reads) == 1:
            writer.save(2, state(2))
            writer.wait()
        return real(folder, *args, **kwargs)

    monkeypatch.setattr(reader_, "read", slow)
    assert Snapshots(tmp_path, writer=False).restore(state(0)).step == 2
    assert reads == ["1", "2"]
    writer.close()


# --- errors in the background -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("times", [1, 2])
def test_a_directory_that_orbax_has_lost_is_written_once_more(tmp_path, monkeypatch, times):
    real, left = orbax_io.write, [times]

    def losing(folder, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            Path(f"{folder}.orbax-checkpoint-tmp").mkdir()  # what a failed attempt leaves
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        real(folder, *args, **kwargs)

    monkeypatch.setattr(orbax_io, "write", losing)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small())
        if times == 1:
            snapshots.wait()
            assert_same(snapshots.restore(small()).state, small())
        else:
            with pytest.raises(errors.WriteFailed, match=r"step 1: could not be written .*No such file"):
                snapshots.wait()
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_failed_save_does_not_hide_what_ended_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.manifest=raise:EIO")

    def run() -> None:
        with Snapshots(tmp_path) as snapshots:
            snapshots.save(1, small())
            raise KeyError("bug")

    with pytest.raises(KeyError, match="bug") as caught:
        run()
    assert "the last save failed too: " in caught.value.__notes__[0]
    assert "step 1: could not be written" in caught.value.__notes__[0]
    Snapshots(tmp_path).open()


def test_no_memory_for_the_host_copy(tmp_path, monkeypatch):
    with Snapshots(tmp_path) as snapshots:
        monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.copy=raise:MemoryError")
        with pytest.raises(errors.WriteFailed, match="step 1: no host copy: MemoryError"):
            snapshots.save(1, small())
        monkeypatch.delenv("PURESTEP_FAILPOINT")
        snapshots.save(1, small())


def test_a_failed_save_is_not_due_again_at_the_next_call(tmp_path, monkeypatch):
    monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.copy=raise:MemoryError")
    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    batches = [(torch.ones(2, 1), torch.ones(2, 1))] * 5
    with Snapshots(tmp_path, every_steps=2, every_epochs=None, on_save_error="continue") as snapshots:
        ps.fit(program.init(), batches, program, epochs=1, snapshots=snapshots, sinks=[])
        assert snapshots.failed == 3  # behind 2 and 4 updates, and at the end


def test_a_step_whose_name_was_not_flushed_is_not_called_unwritten(tmp_path, monkeypatch):
    monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.committed=raise:EIO")
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small(1))
        with pytest.raises(errors.WriteFailed, match=r"step 1: is written, and its name may not survive a power cut"):
            snapshots.wait()
        assert_same(snapshots.restore(small()).state, small(1))


@pytest.mark.parametrize("point", ["snapshot.retire", "snapshot.delete"])
def test_an_old_step_that_cannot_be_deleted_does_not_fail_the_new_one(tmp_path, monkeypatch, caplog, point):
    with Snapshots(tmp_path, keep=1) as snapshots:
        snapshots.save(1, small(1))
        snapshots.wait()
        monkeypatch.setenv("PURESTEP_FAILPOINT", f"{point}=raise:EIO")
        with caplog.at_level(logging.WARNING, logger="purestep"):
            snapshots.save(2, small(2))
            snapshots.wait()
        assert "step 2 is written, but older ones could not be deleted: [Errno 5]" in caplog.text
        assert snapshots.latest() == 2
        monkeypatch.delenv("PURESTEP_FAILPOINT")
        snapshots.save(3, small(3))  # deletes them too
        snapshots.wait()
        assert snapshots.steps() == [3]


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


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A snapshot to damage copies of."""
    folder = tmp_path_factory.mktemp("whole")
    saved(folder, 1)
    return folder


# --- hostile directories ------------------------------------------------------------------------------------------


def leaf(**changes) -> dict[str, object]:
    return {"dtype": "float32", "shape": [2]} | changes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"leaves": {"w": leaf(shape=[-1])}}, "not a manifest: leaves/w/.*greater than or equal to 0"),
        ({"leaves": {"w": leaf(shape=["2"])}}, "not a manifest: leaves/w/.*valid integer"),
        ({"leaves": {"w": leaf(dtype="os.system")}}, "dtype 'os.system'"),
        ({"leaves": {"w": leaf(dtype="python.exec", value="1")}}, "'1' as Python exec"),
        ({"leaves": {"w": leaf(dtype="python.int", value="1")}}, "'1' as Python int"),
        ({"leaves": [1]}, "not a manifest"),
        ({"step": 7}, "the manifest is of step 7, not of"),
        ({"step": "1"}, "not a manifest: step: .*valid integer"),
        ({"format": "3"}, "not a manifest: format"),
        ({"history": {"loss": "float"}}, r"history\.npy: the file cannot be read"),
        ({"history": {"loss": "os.system"}}, "not a manifest: history/loss"),
        ({"files": {"../../outside": {"size": 3, "crc32": None}}}, "missing where 3 bytes were written"),
        ({"metrics": {"loss": "low"}}, "not a manifest"),
        ({"monitor": "loss"}, "not a manifest: monitor"),
        ({"monitor": ["loss", "best"]}, "not a manifest: monitor"),
        ({"leaves": {"w": leaf(shape=[10**12])}}, "4,000,000,000,000 bytes of values in files of [0-9,]* bytes"),
        ({"format": 2, "parts": 10**12}, "1,000,000,000,000 parts in 0 folders"),
    ],
)
def test_manifests_that_lie(tmp_path, whole, changes, text):
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "outside").write_text("abc")
    forge(tmp_path / "copy" / "1", lambda record: record.update(changes))
    with pytest.raises(errors.Corrupt, match=text):
        Snapshots(tmp_path / "copy").restore(state(0), step=1)


@pytest.mark.parametrize("kind", ["more rows", "compressed", "in files"])
def test_metadata_of_arrays_that_lie(tmp_path, whole, kind):
    """Those of orbax's files: a few bytes could claim terabytes, which it would allocate."""
    shutil.copytree(whole, tmp_path / "copy")
    folder = tmp_path / "copy" / "1" / "state"
    if kind == "in files":
        path = folder / "_METADATA"
        path.write_text(path.read_text().replace('"use_ocdbt": true', '"use_ocdbt": false'))
    else:
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
        about = json.loads(store.read("w/zarr.json").result().value)
        if kind == "compressed":
            about["codecs"][0]["configuration"]["codecs"].append({"name": "zstd"})
        else:
            about["shape"][0] *= 10**9
        store.write("w/zarr.json", json.dumps(about).encode()).result()
    listed = {name: file._asdict() for name, file in manifest.inventory(tmp_path / "copy" / "1").items()}
    forge(tmp_path / "copy" / "1", lambda record: record.update(files=listed))
    with pytest.raises(errors.Corrupt, match="not stored as purestep stores|the metadata of w claim"):
        Snapshots(tmp_path / "copy").restore(state(0), step=1)
    assert "ValueError" in str(verify(tmp_path / "copy", 1))


def test_a_history_that_claims_more_than_its_file_has(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state(1), history={"loss": [0.5, None]})
    path = tmp_path / "1" / "history.npy"
    path.write_bytes(path.read_bytes().replace(b"(2, 1)", b"(9999999999, 1)").replace(b" " * 9 + b"\n", b"\n"))
    listed = {name: file._asdict() for name, file in manifest.inventory(tmp_path / "1").items()}
    forge(tmp_path / "1", lambda record: record.update(files=listed))
    with pytest.raises(errors.Corrupt, match=r"history\.npy: the file cannot be read"):
        Snapshots(tmp_path, writer=False).restore(state(0))


def test_bytes_of_a_bool_are_those_of_a_bool():
    leaf, piece = manifest.Leaf("bool", (2,)), manifest.Piece(0, 0, 2)
    manifest.check_values("flags", leaf, piece, np.array([True, False]), where="1")
    with pytest.raises(errors.Corrupt, match="flags has other bytes than those of True and False"):
        manifest.check_values("flags", leaf, piece, np.array([2, 0], np.uint8).view(bool), where="1")


def test_a_link_is_no_staging_directory(tmp_path, monkeypatch):
    """Names of what is being written are random: here one is known, and a link to a directory has it."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / "outside").mkdir()
    with Snapshots(tmp_path / "run") as snapshots:
        (tmp_path / "run" / f".tmp-1-{'0' * 16}").symlink_to(tmp_path / "outside")
        snapshots.save(1, state(1))
        snapshots.wait()
    assert not list((tmp_path / "outside").iterdir())
    assert_same(Snapshots(tmp_path / "run").restore(state(0)).state, state(1))


# --- manners ------------------------------------------------------------------------------------------------------

MANNERS = """
import random, sys
import numpy as np
import torch
import purestep.snapshot as s

def generators():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

drawn_from = generators()
assert not {"jax", "orbax"} & {name.split(".")[0] for name in sys.modules}
snapshots = s.Snapshots(sys.argv[1])
assert snapshots.steps() == [] and snapshots.latest() is None
snapshots.track("loss")
assert not {"jax", "orbax"} & {name.split(".")[0] for name in sys.modules}
snapshots.save(1, {"w": torch.zeros(1)})
assert "orbax.checkpoint" in sys.modules  # not imported while it is written, beside a dataset that draws
snapshots.close()
assert generators() == drawn_from
import jax
print(jax.config.jax_platforms, list(jax._src.xla_bridge.backends()))
"""


@pytest.mark.parametrize(("platforms", "said"), [(None, "cpu ['cpu']"), ("cpu,cpu", "cpu,cpu ['cpu']")])
def test_jax_is_late_stays_on_the_cpu_unless_it_is_set_and_draws_nothing(tmp_path, platforms, said):
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment |= {} if platforms is None else {"JAX_PLATFORMS": platforms}
    command = [sys.executable, "-c", MANNERS, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said)


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
            snapshots.restore(state(0))
        assert snapshots.restore(state(0)).step == 1


def test_closed_read_only_and_strangers(tmp_path):
    snapshots = Snapshots(tmp_path)
    snapshots.close()
    with pytest.raises(errors.SnapshotError, match="is closed"):
        snapshots.save(1, small())
    with pytest.raises(errors.SnapshotError, match="was opened to read"):
        Snapshots(tmp_path, writer=False).save(1, small())
    with Snapshots(tmp_path, writer=False) as reader:
        assert reader.steps() == []


WORKERS = """
import sys, torch, warnings
from torch.utils.data import DataLoader, TensorDataset
{first}
import purestep as ps
def main():
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    ps.fit(program.init(), (loader, loader), program, epochs=2, snapshots=sys.argv[1], progress=False)
    list(loader)
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.parametrize(("first", "is_shown"), [("", False), ("import jax", True)])
def test_jax_warns_of_forks_only_where_the_user_imports_it(first: str, is_shown: bool, tmp_path: Path):
    command = [sys.executable, "-W", "always::RuntimeWarning", "-c", WORKERS.format(first=first), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("os.fork() was called" in done.stderr) == is_shown, done.stderr


def test_what_is_written_while_a_failed_save_is_cleared_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When one array fails, orbax's threads may still write other arrays while the directory is deleted."""
    true, late = writer.remove_tree, [errno.ENOTEMPTY] * 2

    def remove(path: Path) -> None:
        if late and os.path.lexists(path):
            raise OSError(late.pop(), "Directory not empty", str(path))
        true(path)

    monkeypatch.setattr(writer, "remove_tree", remove)
    staging = tmp_path / ".tmp-3-a"
    (tmp_path / ".tmp-3-a.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    writer._clear(tmp_path, 3, staging)
    assert not late
    assert not list(tmp_path.iterdir())
