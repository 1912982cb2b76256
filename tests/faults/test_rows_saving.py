"""Rows 1 to 11 of the fault matrix: what can happen while a snapshot is saved."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs import forkserver
from rigs.faults import failpoints, filling, killing, losing, racing, running
from rigs.faults.running import steps_of_a_fit
from rigs.faults.trials import fails_without, first_failure
from saving import assert_same, record_calls, small

from purestep import errors, files, tree
from purestep.snapshot import Snapshots
from purestep.snapshot import staging as staging_

pytestmark = pytest.mark.filterwarnings(
    # Where a write fails orbax leaves at once, and tensorstore's threads then tell a closed event loop of the others.
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)

KILLS_AT_RANDOM = range(0, 54, 2)  # with those at the failpoints 50


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plans faults, counted from now on."""

    def set_plan(text: str) -> None:
        monkeypatch.setattr("rigs.faults.failpoints.hits", Counter())
        monkeypatch.setenv("PURESTEP_FAILPOINT", text)

    return set_plan


# --- 1, 2: kills ------------------------------------------------------------------------------------------------------


def test_row_01_killed_at_random_times(tmp_path: Path) -> None:
    assert first_failure(killing.trial, KILLS_AT_RANDOM, tmp_path) is None


def test_row_01_a_step_acknowledged_too_early_is_noticed(tmp_path: Path) -> None:
    def trial(number: int, folder: Path) -> str | None:
        return killing.at_any_time(number, folder, off="acknowledge_at_once")

    found = first_failure(trial, range(5), tmp_path)
    assert re.search("was acknowledged|no snapshot here", str(found))


def test_row_01_no_more_than_an_interval_is_lost(tmp_path: Path) -> None:
    assert first_failure(losing.trial, range(2), tmp_path / "on") is None

    def never_due(number: int, folder: Path) -> str | None:
        return losing.trial(number, folder, off="purestep.loop.decisions.Decisions.is_snapshot_due")

    assert "steps lost" in str(first_failure(never_due, range(5), tmp_path / "off"))


@pytest.mark.parametrize("point", failpoints.POINTS)
def test_row_02_killed_at_every_failpoint(point: str, tmp_path: Path) -> None:
    assert killing.at_point(point, 0, tmp_path) is None


@pytest.mark.parametrize(
    ("fault", "point"),
    [("write_under_the_final_name", "snapshot.manifest"), ("delete_in_place", "files.unlink")],
)
def test_row_02_a_half_written_or_half_deleted_step_is_noticed(fault: str, point: str, tmp_path: Path) -> None:
    def trial(number: int, folder: Path) -> str | None:
        return killing.at_point(point, number, folder, off=fault)

    assert first_failure(trial, range(9), tmp_path) is not None


def test_row_02_what_a_killed_writer_leaves_is_swept(tmp_path: Path) -> None:
    with fails_without("purestep.snapshot.directory.sweep"):
        assert killing.at_point("snapshot.sync", 0, tmp_path) is None


def test_row_02_killed_between_the_two_names_of_an_overwritten_step(tmp_path: Path, plan: Any) -> None:
    """There a directory that keeps one step holds it under neither name: a reader finds it all the same."""
    code = running.child("save_in_every_way", str(tmp_path))
    done = forkserver.shared().run(code, PURESTEP_FAILPOINT="snapshot.commit=kill@5", quick=True)
    assert done.status == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".replaced")] == [".replaced-4"]
    for writer in (False, True):
        with Snapshots(tmp_path, writer=writer) as snapshots:
            assert snapshots.steps() == [4]
            assert_same(snapshots.restore(running.state(0)).state, running.state(4))


# --- 3, 4: disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_row_03_a_disk_that_takes_no_more(number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Too large, full, over quota, read-only: told, with file and errno; what was there stays; then it goes on."""
    assert filling.trial(number, tmp_path) is None
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("guard", ["purestep.snapshot.writer.Background.take_error", "purestep.snapshot.writer._clear"])
def test_row_03_an_error_that_is_swallowed_or_leaves_rubbish_is_noticed(guard: str, tmp_path: Path) -> None:
    with fails_without(guard):
        assert filling.trial(0, tmp_path) is None


def test_row_03_a_disk_too_small_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 500}))

    def check() -> None:
        with pytest.warns(RuntimeWarning, match=r"snapshots need 0\.00 GB, the disk has 0\.00 GB \(cure: pass keep=1"):
            steps_of_a_fit(tmp_path / "not yet")

    check()
    with fails_without("purestep.snapshot.directory.check_room"):
        check()
    Snapshots(tmp_path, keep=1, keep_best=0).check_space({"w": torch.zeros(60)})


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
def test_row_03_fit_ends_at_the_next_step_or_goes_on_as_asked(
    code: str, tmp_path: Path, plan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    plan(f"snapshot.digest=raise:{code}@2")
    with Snapshots(tmp_path / "raise", every_steps=1, keep=None) as snapshots:
        with pytest.raises(errors.WriteFailed, match=r"raise/2: step 2: could not be written \(.*bytes\)") as caught:
            steps_of_a_fit(snapshots, done=done)
        assert caught.value.errno in (28, 122)
        assert len(done) in (2, 3)
    plan(f"snapshot.digest=raise:{code}@2")
    with Snapshots(tmp_path / "on", every_steps=1, keep=None, on_save_error="continue") as snapshots:
        assert len(steps_of_a_fit(snapshots)) == 4
        assert snapshots.steps() == [1, 3, 4]
        assert snapshots.failed == 1
    assert "the run continues without a snapshot: " in caplog.text
    with pytest.raises(errors.ConfigError, match="on_save_error='ignore'"):
        Snapshots(tmp_path, on_save_error="ignore")


def test_row_04_no_directory_to_write_into_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()

    real = os.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path).name == ".lock":
            raise OSError(30, "Read-only file system", str(path))
        return real(path, *args, **kwargs)

    def check(folder: Path, text: str) -> None:
        done: list[int] = []
        with pytest.raises(errors.WriteFailed, match=text):
            steps_of_a_fit(folder, done=done)
        assert done == []

    check(tmp_path / "file", "the path of a directory, not of a file")
    check(tmp_path / "file" / "below", "the path of a directory, not of a file")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        check(tmp_path / "run", "not mounted read-only")
        with fails_without("purestep.files.lock.DirectoryLock.acquire"):
            check(tmp_path / "run", "not mounted read-only")
    files.DirectoryLock(tmp_path / "run").acquire()
    assert steps_of_a_fit(tmp_path / "made" / "on" / "the" / "way")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX")
def test_row_04_a_directory_that_is_read_only(tmp_path: Path) -> None:
    if os.geteuid() == 0 and not filling.can_mount(tmp_path):
        pytest.skip("root may write everywhere, and may not mount here")
    done: list[int] = []
    with filling.read_only(tmp_path), pytest.raises(errors.WriteFailed, match="may write to|not mounted read-only"):
        steps_of_a_fit(tmp_path, done=done)
    assert done == []


# --- 5 to 9 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1], ids=["and one is told", "and the holder is killed"])
def test_row_05_two_runs_one_directory(number: int, tmp_path: Path) -> None:
    assert racing.trial(number, tmp_path, soon=60) is None  # how soon on a quiet machine is for the soak to tell


def test_row_05_two_writers_without_a_lock_are_noticed(tmp_path: Path) -> None:
    """Both win; or one, sweeping, takes away what the other is about to use, and that one fails."""
    found = racing.trial(0, tmp_path, off="purestep.files.lock.DirectoryLock._take")
    assert re.match("[02] of two have won|neither won nor told|the winner has failed", str(found))


def test_row_06_the_same_step_twice(tmp_path: Path) -> None:
    def check() -> None:
        with pytest.raises(errors.SnapshotError, match="step 5 exists already"):
            snapshots.save(5, small(1))

    with Snapshots(tmp_path) as snapshots:
        snapshots.save(5, small(0))
        check()
        snapshots.save(5, small(2), overwrite=True)
        assert_same(snapshots.restore(small()).state, small(2))
        assert snapshots.steps() == [5]
        with fails_without("purestep.snapshot.directory.check_order"):
            check()
        with pytest.raises(errors.WriteFailed):  # and even then nothing is replaced without a word
            snapshots.wait()
        assert_same(snapshots.restore(small()).state, small(2))


def test_row_06_a_step_that_goes_backwards(tmp_path: Path) -> None:
    with Snapshots(tmp_path) as snapshots:
        for step in (3, 6, 9):
            snapshots.save(step, small(step))
        with pytest.raises(
            errors.SnapshotError, match=r"step 5 is not newer than the existing step 9 .*start_over\(after=3\)"
        ):
            snapshots.save(5, small(5))
        assert snapshots.start_over(after=3) == [6, 9]
        snapshots.save(6, small(60))
        snapshots.save(7, small(70))
        snapshots.wait()
        assert snapshots.steps() == [3, 6, 7]
        assert_same(snapshots.restore(small(), step=6).state, small(60))
        assert {"6.archived", "9.archived"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("step", [7, 10, 15, 20])
def test_row_06_a_run_that_went_back_says_so_before_it_saves(step: int, tmp_path: Path) -> None:
    """Else a damaged step would be replaced by another run's, and the best one might be that run's, too."""

    def check() -> None:
        with pytest.raises(
            errors.SnapshotError, match=r"step 5 was restored, and the newer steps 10, 15 exist"
        ) as told:
            snapshots.save(step, small(step), overwrite=True)
        assert "call start_over(after=5), which renames them to <step>.archived" in told.value.hint

    with Snapshots(tmp_path, monitor="val_loss") as snapshots:
        for there, loss in ((5, 0.5), (10, 0.1), (15, 0.3)):
            snapshots.save(there, small(there), metrics={"val_loss": loss})
        snapshots.restore(small(), step=5)
        check()
        assert snapshots.steps() == [5, 10, 15]  # nothing is taken away
        if step == 20:
            with fails_without("purestep.snapshot.directory.check_order"):
                check()
            snapshots.wait()
            return
        assert snapshots.start_over(after=5) == [10, 15]
        snapshots.save(step, small(step), metrics={"val_loss": 0.4})
        snapshots.wait()
        assert (snapshots.steps(), snapshots.best()) == ([5, step], step)
        assert {"10.archived", "15.archived"} <= {path.name for path in tmp_path.iterdir()}


def test_row_06_a_look_at_an_older_step_takes_nothing_away(tmp_path: Path) -> None:
    with Snapshots(tmp_path) as snapshots:
        for step in (5, 10):
            snapshots.save(step, small(step))
        snapshots.wait()
        Snapshots(tmp_path, writer=False).restore(small(), step=5)
        snapshots.save(15, small(15))
        snapshots.restore(small(), step=5)
        snapshots.restore(small())  # the newest one: the last restore counts
        snapshots.save(20, small(20))
        snapshots.wait()
        assert snapshots.steps() == [10, 15, 20]


def test_row_07_an_error_in_the_background_comes_once_and_the_next_save_is_tried(tmp_path: Path, plan: Any) -> None:
    def check(folder: Path) -> None:
        plan("snapshot.digest=raise:EDQUOT@1")
        with Snapshots(folder) as snapshots:
            snapshots.save(1, small())
            snapshots._background.join()
            with pytest.raises(errors.WriteFailed, match=r"1: step 1: could not be written .*Disk quota") as caught:
                snapshots.save(2, small(2))
            assert caught.value.errno == 122
            snapshots.wait()
            snapshots.check()
            assert snapshots.steps() == [2]
            assert sorted(path.name for path in folder.iterdir()) == [".lock", "2"]

    check(tmp_path / "on")
    with fails_without("purestep.snapshot.writer.Background.take_error"):
        check(tmp_path / "off")


def test_row_07_fit_does_not_return_before_the_last_save_has_failed(tmp_path: Path, plan: Any) -> None:
    def check(folder: Path) -> None:
        plan("snapshot.commit=sleep:0.2,snapshot.commit=raise:EIO")
        with pytest.raises(errors.WriteFailed, match="step 4: could not be written"):
            steps_of_a_fit(folder)

    check(tmp_path / "on")
    with fails_without("purestep.snapshot.writer.Background.take_error"):
        check(tmp_path / "off")


@pytest.mark.parametrize("copied", [True, False])
def test_row_08_what_is_saved_is_what_was_there_at_the_call(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the copy planted away, the stored values are those of later: the test can fail."""
    if not copied:
        monkeypatch.setattr(staging_, "stage", lambda tensors, spare: tensors)
    monkeypatch.setenv("PURESTEP_FAILPOINT", f"snapshot.stage=wait:{tmp_path / 'go'}")
    state = {"w": torch.zeros(10), "h": torch.zeros(3, dtype=torch.bfloat16)}
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, state)
        tree.map(lambda x: x.add_(1), state)
        (tmp_path / "go").touch()
        found = snapshots.restore(state).state
    assert [leaf.float().sum().item() for leaf in tree.leaves(found)] == ([0, 0] if copied else [3, 10])


def test_row_09_saves_that_come_faster_than_the_disk_wait(tmp_path: Path, plan: Any) -> None:
    def check(folder: Path) -> None:
        plan(f"snapshot.stage=wait:{folder / 'first'}@1,snapshot.stage=wait:{folder / 'second'}@2")
        folder.mkdir()
        with Snapshots(folder / "run") as snapshots:
            snapshots.save(1, small())
            first = snapshots._background._thread
            assert first is not None
            join = first.join
            first.join = lambda timeout=None: ((folder / "first").touch(), join(timeout))  # who waits lets it go on
            while not (folder / "first.reached").exists():
                time.sleep(0.001)
            snapshots.save(2, small())
            writers = [thread for thread in threading.enumerate() if thread.name == "purestep-snapshot"]
            first.join(60)
            (folder / "second").touch()
            for thread in writers:  # one after the other in any case: orbax leaves no garbage
                thread.join(60)
            assert len(writers) <= 1
            assert snapshots.waits == 1
            assert snapshots.steps() == [1, 2]

    check(tmp_path / "on")
    with fails_without("purestep.snapshot.writer.Background.join"):
        check(tmp_path / "off")


def test_row_09_no_memory_for_the_copy(tmp_path: Path) -> None:
    def child(off: str) -> forkserver.Done:
        code = running.child("save_without_memory", str(tmp_path / f"run{len(off)}"), 64, off=off)
        return forkserver.shared().run(code, quick=True)

    done = child("")
    assert done.status == 0, done.err
    assert next(running.told(done.out, "steps")) == ["1", "3"]
    assert "step 2: no host copy: " in done.out
    assert "told" not in child("purestep.snapshot.snapshots._no_memory").out


# --- 10, 11 -----------------------------------------------------------------------------------------------------------

SAVE_AND_END = "from rigs.faults import planted, running\nfrom purestep.snapshot import Snapshots\n{off}\n"
SAVE_AND_END += "Snapshots({folder!r}).save(1, running.state(1))\n{ending}"


def save_and_end(
    folder: Path, ending: str, *, off: str = "", plan: str = "snapshot.stage=sleep:0.2"
) -> forkserver.Done:
    code = SAVE_AND_END.format(folder=str(folder), ending=ending, off=off and f"planted.switch_off({off!r})")
    return forkserver.shared().run(code, PURESTEP_FAILPOINT=plan)


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(3)", "raise KeyError('bug')"])
def test_row_10_a_script_that_ends_without_close_loses_nothing(tmp_path: Path, ending: str) -> None:
    done = save_and_end(tmp_path, ending)
    assert done.status == (1 if "raise" in ending else 3 if ending else 0), done.err
    assert "snapshot" not in done.err
    assert (tmp_path / ".lock").read_text() == ""
    assert_same(Snapshots(tmp_path, writer=False).restore(running.state(0)).state, running.state(1))


def test_row_10_without_the_wait_at_the_end_the_save_is_lost(tmp_path: Path) -> None:
    save_and_end(tmp_path, "", off="purestep.snapshot.writer._finish_at_exit", plan="snapshot.stage=sleep:1")
    assert Snapshots(tmp_path, writer=False).steps() == []


def test_row_10_a_last_save_that_fails_is_told(tmp_path: Path) -> None:
    done = save_and_end(tmp_path, "print('trained')", plan="snapshot.sync=raise:ENOSPC")
    assert (done.status, done.out) == (0, "trained\n")
    assert "the last save failed: " in done.err
    assert "step 1: could not be written (4,008 bytes): [Errno 28] No space left on device" in done.err
    assert "cure: end with snapshots.close(), which raises" in done.err


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_row_11_bytes_then_name_then_directory_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(folder: Path) -> None:
        calls = record_calls(monkeypatch)
        with Snapshots(folder, keep=1) as snapshots:
            snapshots.save(1, small())
        staging = str(folder / ".tmp-1-")
        commit = next(i for i, (call, path) in enumerate(calls) if call == "rename" and path.endswith("/1"))
        synced = {p.replace(p[len(staging) :].split("/")[0], "") for call, p in calls[:commit] if call == "fsync"}
        for path in [folder / "1", *(folder / "1").rglob("*")]:
            assert str(path).replace(str(folder / "1"), staging) in synced, path
        assert calls[commit + 1 : commit + 2] == [("fsync", str(folder))]

    check(tmp_path / "on")
    for name in ("sync_tree", "sync_directory"):
        with fails_without(f"purestep.snapshot.writer.{name}"):
            check(tmp_path / name)
