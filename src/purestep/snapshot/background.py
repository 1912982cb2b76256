"""A thread that runs one job at a time, and that a script's end waits for."""

from __future__ import annotations

import concurrent.futures.thread  # registers its exit hook; ours must be registered later to run earlier
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

_ENDS_EARLY = (3, 12) <= sys.version_info < (3, 12, 3)
"""Whether this Python starts no thread once a script has ended, other threads at work or not (CPython issue 113964)."""


class Background:
    """At most one job in flight; its error waits here until somebody asks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()

    @property
    def busy(self) -> bool:
        """Whether a job of this process is running."""
        return self._thread is not None and self._pid == os.getpid() and self._thread.is_alive()

    def start(self, job: Callable[[], Any], *, holding: object = None) -> BaseException | None:
        """Runs the job when the one before has ended, whose error it returns; ``holding`` lives until the job ends."""
        self.join()
        before = self.take_error()
        _finish_at_exit(self)
        self._thread = threading.Thread(target=self._run, args=(job, holding), name="purestep-snapshot")
        self._thread.start()
        if _ENDS_EARLY:  # orbax needs threads of its own until the end
            self._thread.join()
        return before

    def _run(self, job: Callable[[], Any], holding: object) -> None:
        del holding  # the thread's arguments keep it
        time.sleep(0.001)  # the caller goes on first: it would wait up to 5 ms for the interpreter's lock
        try:
            job()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Returns when no job is running; its error stays for `take_error`. In a forked child at once."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join()
            self._thread = None

    def take_error(self) -> BaseException | None:
        """The error of the last job, once."""
        error, self._error = self._error, None
        return error


_unfinished: weakref.WeakSet[Background] = weakref.WeakSet()
_hooked: list[int] = []


def _finish_at_exit(background: Background) -> None:
    """A script that ends without `close` waits for its last save."""
    _unfinished.add(background)
    if os.getpid() in _hooked:
        return
    _hooked.append(os.getpid())
    assert concurrent.futures.thread
    # atexit comes too late: by then no executor takes work, and orbax uses some. Private, hence the guard; without it
    # the context manager still waits.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_finish_all, os.getpid())


def _finish_all(pid: int) -> None:
    if os.getpid() != pid:  # a forked worker has no such thread, and would wait for ever
        return
    for background in list(_unfinished):
        background.join()
        error = background.take_error()
        if error is not None:
            sys.stdout = cast("Any", _FailingFlush(sys.stdout, error))


class _FailingFlush:
    """Stands in for stdout at the end of a script whose last save failed.

    The interpreter's own last flush is the only thing after the exit hooks that can still turn the exit status (to 120)
    and have an error printed; leaving by `os._exit` would skip the hooks of everybody else.
    """

    closed = False

    def __init__(self, stream: Any, error: BaseException) -> None:
        self._stream = stream
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise self._error
