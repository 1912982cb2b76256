"""A lock that allows one writer for each directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import filelock

from ..errors import Locked, printable
from .atomic import make_directory, write_failed
from .reading import regular

_log = logging.getLogger("purestep")
_PATIENCE = 0.2  # seconds to retry
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class Holder(NamedTuple):
    """The process that holds the lock of a directory, or held it when it was killed."""

    pid: int
    host: str
    since: str  # ISO 8601
    alive: bool | None  # None: on another machine, or of another user

    @property
    def is_mine(self) -> bool:
        """True if it is this process."""
        return self.pid == os.getpid() and self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}" + (", this very process" if self.is_mine else "")


class DirectoryLock:
    """A lock for writing into a directory. One object on this machine holds it at a time; on NFS, one of all machines.

    Example:
        >>> import tempfile
        >>> with DirectoryLock(tempfile.mkdtemp()) as lock:
        ...     lock.held, is_locked(lock.path)
        (True, True)

    The operating system releases the lock on ``.lock`` when its holder dies. The file contains the pid, the host and
    the start time of the holder. A forked process (a DataLoader worker) does not hold it.

    Args:
        directory: the directory; `acquire` creates it.
    """

    def __init__(self, directory: Path | str) -> None:
        self.path = Path(directory) / ".lock"
        self._lock = filelock.FileLock(self.path, thread_local=False, fallback_to_soft=False, poll_interval=0.01)
        # A lock without references, in a notebook for example, is released.
        self._end = weakref.finalize(self, _release, self._lock)
        self._unguarded = False  # held on a file system without locks

    @property
    def held(self) -> bool:
        """True while this object holds the lock, in this process."""
        return self._lock.is_locked or self._unguarded

    def acquire(self) -> None:
        """Acquire the lock. Does nothing if this object holds it already.

        Raises:
            Locked: another object holds it; the message has its pid, host and start time.
            WriteFailed: the directory cannot be created or written to.
        """
        if self.held:
            return
        try:
            make_directory(self.path.parent)
            self._take()
            self._sign()
        except OSError as error:
            self.release()
            if isinstance(error, Locked):
                raise
            raise write_failed(self.path.parent, error) from error

    def _take(self) -> None:
        try:
            self._lock.acquire(timeout=_PATIENCE)
        except filelock.Timeout:
            found = _parsed(_text(self.path))
            who, hint = "another run", "end that run"
            if found is not None and found.is_mine:
                who, hint = "another object of this process", "call close() of the earlier Snapshots"
            raise Locked(
                f"{who} writes here: {found or 'it has not written its pid yet'}",
                where=str(self.path.parent),
                hint=f"{hint}; use another directory, or read with Snapshots(directory, writer=False)",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s: this file system has no locks (cure: let only one run write here)", self.path)
            self._unguarded = True

    def _sign(self) -> None:
        last = _text(self.path)  # a holder that ends normally clears it before it releases the lock
        if last.strip(b"\0 \n"):
            who = _parsed(last) or "it has not written its pid"
            _log.warning("%s: the previous run did not end normally: %s", self.path, who)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with open(self.path, "w", encoding="utf-8", opener=regular) as file:
            json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now}, file)

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        self._unguarded = False
        _release(self._lock)

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _release(lock: filelock.BaseFileLock) -> None:
    if lock.is_locked:  # not in a forked child
        # a failing disk must not hide the error that ended the run
        with suppress(OSError), open(lock.lock_file, "r+b", opener=regular) as file:
            file.truncate(0)
        lock.release()


def is_locked(path: Path | str) -> bool:
    """True while a `DirectoryLock` holds this file, in any process, or if the file system has no locks.

    Example:
        >>> is_locked("missing/.lock")
        False
    """
    if not os.path.exists(path):
        return False
    lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except OSError:  # held (a Timeout is one), or not to be seen
        return True
    lock.release()
    return False


def lock_holder(directory: Path | str) -> Holder | None:
    """Read who holds the lock of a directory. None: nobody, and the last holder ended normally.

    Example:
        >>> import tempfile
        >>> with DirectoryLock(tempfile.mkdtemp()) as lock:
        ...     lock_holder(lock.path.parent).alive
        True
        >>> lock_holder(lock.path.parent) is None
        True
    """
    path = Path(directory) / ".lock"
    found = _parsed(_text(path))
    try:
        if found is not None:
            found = found._replace(since=datetime.fromisoformat(found.since).astimezone().isoformat())
    except (ValueError, OverflowError):
        return None
    if found is None or found.host != socket.gethostname() or not os.access(path, os.W_OK):
        return found
    return found._replace(alive=is_locked(path))


def _text(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read(4096)
    except OSError:
        return b""


def _parsed(text: bytes) -> Holder | None:
    try:
        found = json.loads(text)
        host, since = (printable(str(found[name])[:255]) for name in ("host", "since"))
        return Holder(int(found["pid"]), host, since, None)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
