"""Atomic files, the directory lock and failpoints."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from purestep import errors, files


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@contextmanager
def file_size_limit(size: int):
    """A disk that takes no file larger than so many bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


# --- whole files --------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "a.json"
    files.write_json(path, {"loss": [1.5, float("inf")]})
    files.write_json(path, {"loss": [0.5]}, indent=None)
    assert files.read_json(path) == {"loss": [0.5]}
    assert path.read_bytes() == b'{"loss": [0.5]}\n'
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
        (b"[0]" + b" " * 2000, "more than 1,000"),
    ],
)
def test_json_that_cannot_be_read_is_a_value_error(tmp_path, content, text):
    (tmp_path / "a").write_bytes(content)
    limit = 1000 if b"[0]" in content else 1 << 20
    with pytest.raises(ValueError, match=text):
        files.read_json(tmp_path / "a", limit=limit)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What reaches the kernel, in order: (call, path)."""
    calls: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real["fsync"](descriptor)

    def rename(source, target) -> None:
        calls.append(("rename", f"{source} -> {target}"))
        real["rename"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", rename)
    return calls


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_bytes_then_name_then_directory_reach_the_disk(tmp_path, monkeypatch):
    calls = record_calls(monkeypatch)
    files.write_bytes(tmp_path / "a", b"x")
    kinds = [(call, Path(path.split(" -> ")[-1]).name) for call, path in calls]
    assert kinds[0][0] == "fsync"
    assert kinds[0][1].startswith(".a.")
    assert kinds[1:] == [("rename", "a"), ("fsync", tmp_path.name)]


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


# --- failpoints ---------------------------------------------------------------------------------------------------


def test_a_failpoint_hits_the_nth_time(monkeypatch):
    monkeypatch.setattr("purestep.files.failpoints._hits", Counter())
    monkeypatch.setenv("PURESTEP_FAILPOINT", "files.write=raise:MemoryError@2, files.unlink=raise:EIO")
    files.failpoint("files.write")
    with pytest.raises(MemoryError, match=r"failpoint files\.write"):
        files.failpoint("files.write")
    files.failpoint("files.write")
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            files.failpoint("files.unlink")


@pytest.mark.parametrize("plan", ["files.wrote=kill", "files.write", "files.write=kill@x"])
def test_a_plan_with_a_typing_error_is_no_quiet_success(monkeypatch, plan):
    monkeypatch.setenv("PURESTEP_FAILPOINT", plan)
    with pytest.raises(errors.ConfigError, match=r"is no failpoint .*files\.rename"):
        files.failpoint("files.unlink")


def test_an_action_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("PURESTEP_FAILPOINT", "files.unlink=explode")
    with pytest.raises(errors.ConfigError, match="'explode' is no action"):
        files.failpoint("files.unlink")


def test_a_point_that_is_not_in_the_table():
    with pytest.raises(AssertionError, match=r"files\.wrote"):
        files.failpoint("files.wrote")


# --- the lock -----------------------------------------------------------------------------------------------------


def test_a_second_holder_is_told_who_the_first_is(tmp_path):
    with files.DirectoryLock(tmp_path / "run") as lock:
        lock.acquire()
        with pytest.raises(
            errors.Locked, match=rf"pid {os.getpid()} on .* since 20.*, this very process.*writer=False"
        ):
            files.DirectoryLock(tmp_path / "run").acquire(patience=0)
        assert lock.held
    assert not lock.held
    with files.DirectoryLock(tmp_path / "run") as second:
        assert second.held


def test_a_lock_goes_with_its_last_reference(tmp_path):
    lock = files.DirectoryLock(tmp_path)
    lock.acquire()
    del lock
    files.DirectoryLock(tmp_path).acquire(patience=0)


def test_a_holder_that_died_is_named_and_taken_over_from(tmp_path, caplog):
    (tmp_path / ".lock").write_text(json.dumps({"pid": 123, "host": "node7", "since": "then"}))
    with caplog.at_level(logging.WARNING, logger="purestep"), files.DirectoryLock(tmp_path):
        pass
    assert "the previous run did not end normally: pid 123 on node7 since then" in caplog.text
    caplog.clear()
    with files.DirectoryLock(tmp_path):
        pass
    assert caplog.text == ""


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 1}', "\0" * 50])
def test_a_lock_file_with_nonsense_in_it(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    with files.DirectoryLock(tmp_path) as lock:
        assert lock.held
        (tmp_path / ".lock").write_text(content)
        with pytest.raises(errors.Locked, match="it has not written its pid yet"):
            files.DirectoryLock(tmp_path).acquire(patience=0)


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

    monkeypatch.setattr("purestep.files.lock.fcntl.flock", flock)
    with caplog.at_level(logging.WARNING, logger="purestep"), files.DirectoryLock(tmp_path) as lock:
        assert lock.held
    assert "this file system has no locks" in caplog.text


@pytest.mark.parametrize("guarded", [True, False])
def test_a_forked_worker_does_not_keep_the_lock(tmp_path, monkeypatch, guarded):
    """A worker that outlives a killed trainer must not keep the directory locked; without the guard it does."""
    if not guarded:
        monkeypatch.setattr("purestep.files.lock._held", set())
    lock = files.DirectoryLock(tmp_path)
    lock.acquire()
    if not guarded:
        files.lock._held.clear()
    to_child, from_child = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(from_child[1], b"held" if lock.held else b"free")
        os.read(to_child[0], 1)
        os._exit(0)
    try:
        assert os.read(from_child[0], 4) == (b"free" if guarded else b"held")
        # What the kernel does when the parent dies: its own descriptor closes, nobody unlocks.
        os.close(lock._descriptor)
        lock._finalizer.detach()
        if guarded:
            files.DirectoryLock(tmp_path).acquire(patience=0)
        else:
            with pytest.raises(errors.Locked):
                files.DirectoryLock(tmp_path).acquire(patience=0)
    finally:
        os.write(to_child[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*to_child, *from_child):
            os.close(descriptor)
