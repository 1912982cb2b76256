"""A lock that allows one writer for each directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ..errors import Locked
from .atomic import write_failed

try:
    import fcntl
except ImportError:  # Windows has no flock: directories are not locked there
    fcntl = None

_log = logging.getLogger("purestep")


class DirectoryLock:
    """A lock for writing into a directory. One object on this machine holds it at a time; on NFS, one of all machines.

    The lock is an flock on ``.lock``, so the kernel releases it when its holder dies. The file contains the pid, the
    host and the start time of the holder. A forked process (a DataLoader worker) does not hold it.

    Args:
        directory: the directory; `acquire` creates it.
        name: of the file. The other processes of a mesh that write into the directory hold one each.

    Example:
        >>> import tempfile
        >>> with DirectoryLock(tempfile.mkdtemp()) as lock:
        ...     lock.held, is_locked(lock.path)
        (True, True)
    """

    def __init__(self, directory: Path | str, name: str = ".lock") -> None:
        self.path = Path(directory) / name
        self._descriptor: int | None = None
        self._finalizer: weakref.finalize[..., DirectoryLock] | None = None

    @property
    def held(self) -> bool:
        """True while this object holds the lock, in this process."""
        return self._descriptor is not None

    def acquire(self, *, patience: float = 0.2) -> None:
        """Acquire the lock. Does nothing if this object holds it already.

        Args:
            patience: seconds to retry.

        Raises:
            Locked: another object holds it; the message has its pid, host and start time.
            WriteFailed: the directory cannot be created or written to.
        """
        if self.held:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            raise write_failed(self.path.parent, error) from error
        try:
            self._flock(descriptor, time.monotonic() + patience)
            self._sign(descriptor)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and not isinstance(error, Locked):
                raise write_failed(self.path, error) from error
            raise
        self._descriptor = descriptor
        # A lock without references, in a notebook for example, is released.
        self._finalizer = weakref.finalize(self, _unlock, descriptor)
        _held.add(self)

    def _flock(self, descriptor: int, deadline: float) -> None:
        while fcntl is not None:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    _log.warning("%s: this file system has no locks (cure: let only one run write here)", self.path)
                    return
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() > deadline:
                holder, is_mine = self._holder(descriptor)
                others = "use another directory, or read with Snapshots(directory, writer=False)"
                if is_mine:
                    message = f"another object of this process writes here: {holder}"
                    first = "call close() of the earlier Snapshots, or pass fit the path, which it closes itself"
                else:
                    message, first = f"another run writes here: {holder}", "end that run"
                raise Locked(message, where=str(self.path.parent), hint=f"{first}; {others}")
            time.sleep(0.01)

    def _sign(self, descriptor: int) -> None:
        last = _read(descriptor)
        if last.strip(b"\0 \n"):
            _log.warning("%s: the previous run did not end normally: %s", self.path, self._holder(descriptor)[0])
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now})
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, text.encode())

    @staticmethod
    def _holder(descriptor: int) -> tuple[str, bool]:
        """Return who has signed the file, and True if it is this process."""
        try:
            found = json.loads(_read(descriptor))
            is_mine = found["pid"] == os.getpid()
            mine = ", this very process" if is_mine else ""
            return f"pid {found['pid']} on {found['host']} since {found['since']}{mine}", is_mine
        except (ValueError, TypeError, KeyError):
            return "it has not written its pid yet", False

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        self._descriptor = None
        _held.discard(self)
        if self._finalizer is not None:
            self._finalizer()

    def abandon(self) -> None:
        """Close a forked child's copy of the lock. The parent keeps its lock."""
        descriptor, self._descriptor = self._descriptor, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(path: Path | str) -> bool:
    """True while a `DirectoryLock` holds this file, in any process, or if the file system has no locks.

    Example:
        >>> is_locked("missing/.lock")
        False
    """
    if fcntl is None:
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not see each other
    except OSError:
        return True
    finally:
        os.close(descriptor)  # and with it the lock
    return False


class Holder(NamedTuple):
    """The process that holds the lock of a directory, or held it when it was killed."""

    pid: int
    host: str
    since: str  # ISO 8601
    alive: bool | None  # None: on another machine


def lock_holder(directory: Path | str) -> Holder | None:
    """Read who holds the lock of a directory, without taking it. None: nobody, and the last holder ended normally.

    Example:
        >>> import tempfile
        >>> with DirectoryLock(tempfile.mkdtemp()) as lock:
        ...     lock_holder(lock.path.parent).alive
        True
        >>> lock_holder(lock.path.parent) is None
        True
    """
    try:
        found = json.loads((Path(directory) / ".lock").read_bytes()[:4096])
        pid, host, since = int(found["pid"]), str(found["host"]), str(found["since"])
        signed = datetime.fromisoformat(since).timestamp()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    alive = _runs_since_before(pid, signed) if host == socket.gethostname() else None
    return Holder(pid, host, since, alive)


def _runs_since_before(pid: int, moment: float) -> bool:
    """True if a process of this number runs, and started before that moment, in seconds since the epoch."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        pass
    except (OSError, OverflowError):
        return False
    try:  # the kernel uses the numbers of dead processes again
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return True
    if fields[0] in "ZX":  # dead, until its parent reads its status
        return False
    return booted + ticks / os.sysconf("SC_CLK_TCK") < moment + 2.0  # the signature has whole seconds


def _read(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 4096)


def _unlock(descriptor: int) -> None:
    with suppress(OSError):  # a failing disk must not hide the error that ended the run
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in list(_held):
        lock.abandon()
    _held.clear()


if hasattr(os, "register_at_fork"):
    # A forked worker shares the open file, and with it the flock: a worker that outlives a killed trainer would keep
    # the directory locked.
    os.register_at_fork(after_in_child=_forget_locks)
