"""Atomic files, the directory lock and failpoints."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rigs.faults import failpoints
from saving import record_calls

from purestep import errors, files
from purestep.files import atomic


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- whole files --------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "a.json"
    files.write_bytes(path, b"[1.5]")
    files.write_bytes(path, b'{"loss": [0.5]}')
    assert files.read_json(path) == {"loss": [0.5]}
    assert names(path.parent) == ["a.json"]


@pytest.mark.parametrize("point", ["files.write", "files.rename"])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, point):
    path = tmp_path / "a.bin"
    files.write_bytes(path, b"old")
    monkeypatch.setenv("PURESTEP_FAILPOINT", f"{point}=raise:ENOSPC")
    with pytest.raises(errors.WriteFailed, match=r"a\.bin: could not be written.*\[Errno 28\] No space left") as caught:
        files.write_bytes(path, b"new and longer")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.hint == "free space or use another disk"
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_an_exception_in_the_block_leaves_the_old_file(tmp_path):
    files.write_bytes(tmp_path / "a", b"old")

    def half() -> None:
        with files.replacing(tmp_path / "a") as temporary:
            temporary.write_bytes(b"half")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        half()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(errors.WriteFailed, match="the path of a directory, not of a file"):
        files.write_bytes(tmp_path / "run" / "a", b"")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff", "decode"),
        (b"{", "Expecting"),
        (b"1" * 10_000, "digits"),
    ],
)
def test_json_that_cannot_be_read_is_a_value_error(tmp_path, content, text):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=text):
        files.read_json(tmp_path / "a")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_bytes_then_name_then_directory_reach_the_disk(tmp_path, monkeypatch):
    calls = record_calls(monkeypatch)
    files.write_bytes(tmp_path / "a", b"x")
    kinds = [(call, Path(path.split(" -> ")[-1]).name) for call, path in calls]
    assert kinds[0][0] == "fsync"
    assert kinds[0][1].startswith(".a.")
    assert kinds[1:] == [("rename", "a"), ("fsync", tmp_path.name)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs on this system")
def test_only_a_regular_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/stdout")  # which may be a file
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path, tmp_path / "link"):
        with pytest.raises(errors.WriteFailed, match="is a .* and cannot be replaced"):
            files.write_bytes(path, b"")
    assert names(tmp_path) == ["link", "pipe"]


def test_remove_tree_does_not_follow_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "gone" / "deep").mkdir(parents=True)
    (tmp_path / "gone" / "deep" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "file").write_text("x")
    files.remove_tree(tmp_path / "gone")
    files.remove_tree(tmp_path / "never there")
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["file"]


# --- what another user has put there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a device", "a directory", "too large"])
def test_only_a_regular_file_of_a_limited_size_is_read(tmp_path, kind):
    path = tmp_path / "run.json"
    (tmp_path / "secret").write_text("[1]")
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    elif kind == "too large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(tmp_path / "secret" if kind == "a link" else "/dev/zero")
    with pytest.raises(OSError, match=r"is a link|is not a regular file|more than the 67,108,864") as caught:
        files.read_json(path)
    assert str(path) in str(caught.value)


def test_the_limit_is_one_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    assert files.read_regular(tmp_path / "a", 2) == b"12"
    with pytest.raises(OSError, match="has 2 bytes, more than the 1 of such a file"):
        files.read_regular(tmp_path / "a", 1)


def test_json_that_is_too_deep_is_no_json():
    with pytest.raises(ValueError, match="nested too deeply"):
        files.parsed_json("[" * 100_000)


def test_a_link_under_the_temporary_name_is_not_written_through(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".a.{'0' * 16}.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(errors.WriteFailed, match="File exists"):
        files.write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "a").exists()


def test_names_of_temporary_files_cannot_be_foreseen(tmp_path):
    seen = set()
    for _ in range(3):
        with files.replacing(tmp_path / "a") as temporary:
            assert temporary.stat().st_size == 0
            seen.add(temporary.name)
    assert len(seen) == 3
    assert str(os.getpid()) not in "".join(seen)


def test_a_temporary_file_that_becomes_a_link_gets_no_name(tmp_path):
    (tmp_path / "victim").write_text("precious")

    def exchange() -> None:
        with files.replacing(tmp_path / "a") as temporary:
            temporary.unlink()
            temporary.symlink_to(tmp_path / "victim")

    with pytest.raises(errors.WriteFailed, match="is a link, which is not followed"):
        exchange()
    assert names(tmp_path) == ["victim"]
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_directory_that_becomes_a_link_while_it_is_deleted_is_not_entered(tmp_path, monkeypatch):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (tmp_path / "gone" / "sub").mkdir(parents=True)
    real = os.open

    def exchanging(path: Any, *args: Any, **options: Any) -> int:
        if path == "sub" and not (tmp_path / "moved").exists():
            (tmp_path / "gone" / "sub").rename(tmp_path / "moved")
            (tmp_path / "gone" / "sub").symlink_to(tmp_path / "outside")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", exchanging)
    with pytest.raises(OSError, match="symbolic link"):
        files.remove_tree(tmp_path / "gone")
    files.remove_tree(tmp_path / "gone")  # as the next writer does
    assert not (tmp_path / "gone").exists()
    assert names(tmp_path / "outside") == ["kept"]


def test_remove_tree_goes_on_after_a_name_that_vanished(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    for name in "abc":
        (tmp_path / "gone" / name).touch()
    real, vanishing = os.unlink, ["a file that another thread deletes first"]

    def unlink(path, *, dir_fd=None):
        real(path, dir_fd=dir_fd)
        if vanishing:
            raise FileNotFoundError(vanishing.pop())

    monkeypatch.setattr(os, "unlink", unlink)
    files.remove_tree(tmp_path / "gone")
    assert names(tmp_path) == []


def test_trees_are_deleted_without_names_of_one_system(tmp_path, monkeypatch):
    (tmp_path / "gone" / "deep").mkdir(parents=True)
    (tmp_path / "gone" / "deep" / "file").touch()
    for name in ("O_DIRECTORY", "O_NOFOLLOW"):  # Windows lacks both
        monkeypatch.delattr(os, name, raising=False)
    files.remove_tree(tmp_path / "gone")
    assert names(tmp_path) == []


def test_windows_flushes_a_file_that_is_open_for_writing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    flags = []

    def opened(path, how):
        flags.append(how)
        return os.open(path, how)

    monkeypatch.setattr(atomic, "regular", opened)
    with monkeypatch.context() as patched:
        patched.setattr(os, "name", "nt")
        files.sync_file(str(tmp_path / "file"))
    files.sync_file(tmp_path / "file")
    assert flags == [os.O_RDWR, os.O_RDONLY]


@pytest.mark.parametrize(("parent", "made"), [(0o755, 0o700), (0o2775, 0o2755)], ids=["own", "shared with a group"])
def test_a_new_directory_of_a_run_is_private_unless_its_parent_is_shared(tmp_path, parent, made):
    before = os.umask(0o022)
    try:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs").chmod(parent)
        with files.DirectoryLock(tmp_path / "runs" / "a"):
            assert (tmp_path / "runs" / "a").stat().st_mode & 0o7777 == made
        (tmp_path / "mine").mkdir(mode=0o755)
        with files.DirectoryLock(tmp_path / "mine"):  # as the user has made it
            assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)


def test_a_directory_inside_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "nonfinite").symlink_to(tmp_path / "outside")
    with pytest.raises(errors.WriteFailed, match="is a link, which is not followed"):
        files.subdirectory(tmp_path, "nonfinite")
    assert files.subdirectory(tmp_path, "recording").stat().st_mode & 0o777 == 0o700


def test_a_lock_that_is_a_pipe_does_not_wait(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert files.lock_holder(tmp_path) is None
    with pytest.raises(errors.WriteFailed, match="is not a regular file"):
        files.DirectoryLock(tmp_path).acquire()


def test_a_holder_cannot_act_on_the_terminal(tmp_path, caplog):
    text = json.dumps({"pid": 1, "host": "\x1b]0;x\x07", "since": "\x1b[2J"})
    (tmp_path / ".lock").write_text(text)
    with caplog.at_level(logging.WARNING, logger="purestep"), files.DirectoryLock(tmp_path):
        pass
    assert r"pid 1 on \x1b]0;x\x07 since \x1b[2J" in caplog.text


# --- failpoints ---------------------------------------------------------------------------------------------------


def test_a_failpoint_calls_the_hook_that_is_set(monkeypatch):
    monkeypatch.setattr("purestep.files.failpoints._hook", None)
    files.failpoint("files.write")
    passed: list[str] = []
    assert files.set_hook(passed.append) is None
    files.failpoint("files.write")
    assert passed == ["files.write"]


def test_a_plan_hits_the_nth_time(monkeypatch):
    monkeypatch.setattr(failpoints, "hits", Counter())
    monkeypatch.setenv("PURESTEP_FAILPOINT", "files.write=raise:MemoryError@2, files.unlink=raise:EIO")
    files.failpoint("files.write")
    with pytest.raises(MemoryError, match=r"failpoint files\.write"):
        files.failpoint("files.write")
    files.failpoint("files.write")
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            files.failpoint("files.unlink")


@pytest.mark.parametrize("plan", ["files.wrote=kill", "files.write", "files.write=kill@x", "files.unlink=explode"])
def test_a_plan_with_a_typing_error_is_no_quiet_success(monkeypatch, plan):
    monkeypatch.setenv("PURESTEP_FAILPOINT", plan)
    with pytest.raises(ValueError, match="is no failpoint|'explode' is no action"):
        files.failpoint("files.unlink")


def test_every_failpoint_of_the_package_is_in_the_table():
    found = {
        name
        for path in Path(files.__file__).parents[1].rglob("*.py")
        for name in re.findall(r'failpoint\("([a-z.]+)"\)', path.read_text())
    }
    assert found | {"files.unlink"} == set(failpoints.POINTS)  # the rig passes this one itself


# --- the lock -----------------------------------------------------------------------------------------------------


def test_a_second_holder_is_told_who_the_first_is(tmp_path):
    with files.DirectoryLock(tmp_path / "run") as lock:
        lock.acquire()
        with pytest.raises(
            errors.Locked, match=rf"pid {os.getpid()} on .* since 20.*, this very process.*writer=False"
        ):
            files.DirectoryLock(tmp_path / "run").acquire()
        assert lock.held
    assert not lock.held
    with files.DirectoryLock(tmp_path / "run") as second:
        assert second.held


def test_a_lock_goes_with_its_last_reference(tmp_path):
    lock = files.DirectoryLock(tmp_path)
    lock.acquire()
    del lock
    files.DirectoryLock(tmp_path).acquire()


def test_a_holder_that_died_is_named_and_taken_over_from(tmp_path, caplog):
    (tmp_path / ".lock").write_text(json.dumps({"pid": 123, "host": "node7", "since": "then"}))
    with caplog.at_level(logging.WARNING, logger="purestep"), files.DirectoryLock(tmp_path):
        pass
    assert "the previous run did not end normally: pid 123 on node7 since then" in caplog.text
    caplog.clear()
    with files.DirectoryLock(tmp_path):
        pass
    assert caplog.text == ""


def test_a_holder_that_ends_while_another_one_waits_is_not_accused(tmp_path, caplog):
    first = files.DirectoryLock(tmp_path)
    first.acquire()
    end = threading.Timer(0.05, first.release)
    end.start()
    with caplog.at_level(logging.WARNING, logger="purestep"), files.DirectoryLock(tmp_path) as second:
        assert second.held
    end.join()
    assert caplog.text == ""


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 1}', "\0" * 50])
def test_a_lock_file_with_nonsense_in_it(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    with files.DirectoryLock(tmp_path) as lock:
        assert lock.held
        (tmp_path / ".lock").write_text(content)
        with pytest.raises(errors.Locked, match="it has not written its pid yet"):
            files.DirectoryLock(tmp_path).acquire()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(errors.WriteFailed):
        files.DirectoryLock(tmp_path / "run").acquire()
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with caplog.at_level(logging.WARNING, logger="purestep"), files.DirectoryLock(tmp_path) as lock:
        assert lock.held
    assert "this file system has no locks" in caplog.text


def test_a_forked_worker_does_not_keep_the_lock(tmp_path):
    """A worker that outlives a killed trainer must not keep the directory locked."""
    trainer_code = (
        "import os, sys\nfrom purestep import files\nlock = files.DirectoryLock(sys.argv[1])\nlock.acquire()\n"
    )
    trainer_code += (
        "child = os.fork()\nif child == 0:\n    print(lock.held, flush=True)\n    sys.stdin.read()\n    os._exit(0)\n"
    )
    trainer_code += "sys.stdin.readline()"
    command = [sys.executable, "-c", trainer_code, str(tmp_path)]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    with trainer:
        assert trainer.stdout.readline() == "False\n"
        with pytest.raises(errors.Locked, match=f"pid {trainer.pid} on"):
            files.DirectoryLock(tmp_path).acquire()
        trainer.kill()
        trainer.wait()  # its worker still runs: it reads the pipe that is open here
        files.DirectoryLock(tmp_path).acquire()
        assert trainer.poll() is not None


def test_the_end_of_a_forked_worker_leaves_the_lock_and_its_signature(tmp_path):
    with files.DirectoryLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert files.is_locked(lock.path)
        holder = files.lock_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.alive) == (os.getpid(), True)


def test_a_killed_holder_is_not_alive_and_a_look_takes_nothing_away(tmp_path):
    now = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / ".lock").write_text(json.dumps(now))
    for _ in range(2):
        holder = files.lock_holder(tmp_path)
        assert holder is not None
        assert holder.alive is False
    (tmp_path / ".lock").write_text(json.dumps(now | {"host": "node7"}))
    holder = files.lock_holder(tmp_path)
    assert holder is not None
    assert holder.alive is None
    (tmp_path / ".lock").write_text(json.dumps(now | {"since": "then"}))
    assert files.lock_holder(tmp_path) is None
