"""A sink may fail or hang; the run may not."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from ..events import EpochEnd, Event, FitEnd, FitStart

Sink: TypeAlias = Callable[[Any], Any]
"""A callable of events. Optional: ``close()``; ``wants``, the classes of the events it is to see; ``foreground``, True
where it is quick enough to be called by the training thread itself; ``writes_files``, True where a ``fast_dev_run`` is
to go without it."""

_log = logging.getLogger("purestep")
_KEPT = (FitStart, EpochEnd, FitEnd)
"""Never dropped: the rows of a run are in memory anyway, as its history."""
_LINES = 64  # times as many events may wait for a file, which is late rather than lost


class Guarded:
    """A sink behind a queue and a thread of its own; see `guarded`."""

    def __init__(self, sink: Sink, *, capacity: int, patience: float) -> None:
        self.sink = sink
        self.name = getattr(sink, "__name__", type(sink).__name__)
        self.failures: Counter[str] = Counter()  # class of the exception -> events that it cost
        self.dropped = 0  # events for which there was no room
        self._wants: tuple[type, ...] | None = getattr(sink, "wants", None)
        self._foreground = bool(getattr(sink, "foreground", False))
        self.writes_files = bool(getattr(sink, "writes_files", False))
        self._patience = patience
        self._capacity = capacity * (_LINES if self.writes_files else 1)
        self._delivered = 0
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if self._wants is not None and not isinstance(event, self._wants):
            return
        light = _without_tensors(event)
        if self._foreground:
            self._deliver(light)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"purestep sink {self.name}", daemon=True)
            self._thread.start()
        if self._queue.qsize() < self._capacity or isinstance(event, _KEPT):
            self._queue.put(light)
            return
        self.dropped += 1
        if self.dropped == 1:
            _log.warning("sink %s: too slow, events are dropped; training goes on", self.name)

    def close(self) -> None:
        """Deliver what is waiting, for as long as the patience lasts, and close the sink. A sink that writes files is
        waited for as long as it gets on: at least one event in that time."""
        thread, self._thread = self._thread, None
        if thread is None:
            self._finish()
            return
        self._queue.put(None)
        before = -1
        while thread.is_alive() and before != self._delivered and (before < 0 or self.writes_files):
            before = self._delivered
            thread.join(self._patience)
        if thread.is_alive():
            waiting = self._queue.qsize()
            _log.warning("sink %s: still busy after %g s, left with %d events", self.name, self._patience, waiting)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self._deliver(event)
            self._delivered += 1
        self._finish()

    def _deliver(self, event: Event) -> None:
        try:
            self.sink(event)
        except Exception as error:
            self._count(error, type(event).__name__)

    def _finish(self) -> None:
        close = getattr(self.sink, "close", None)
        try:
            if callable(close):
                close()
        except Exception as error:
            self._count(error, "close")
        lost = sum(self.failures.values()) + self.dropped
        if lost:
            _log.warning("sink %s: %d events lost in all", self.name, lost)

    def _count(self, error: Exception, at: str) -> None:
        kind = type(error).__name__
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            text = "sink %s failed at %s with %s: %s; training goes on, said once"
            _log.warning(text, self.name, at, kind, error)


def guarded(sink: Sink, *, capacity: int = 1024, patience: float = 5.0) -> Guarded:
    """A sink that cannot harm the run: what it raises is logged once a kind and counted, what it blocks is a thread.

    Events arrive in their order, without ``state`` and ``batch`` (both are None): those may be overwritten before the
    sink gets to see them.

    Args:
        sink: see `Sink`.
        capacity: events that may wait, >= 1; further ones are dropped and counted, except the start, the rows and the
            end of a run. For a sink that writes files, 64 times as many may wait.
        patience: seconds, > 0, that the end of a run waits for a busy sink; for one that writes files, without any
            event being done.

    Example:
        >>> from purestep.events import Saved
        >>> def broken(event):
        ...     raise OSError("no such host")
        >>> sink = guarded(broken)
        >>> sink(Saved(1, "runs/a"))
        >>> sink.close()
        >>> sink.failures
        Counter({'OSError': 1})
    """
    if isinstance(sink, Guarded):
        return sink
    return Guarded(sink, capacity=capacity, patience=patience)


def _without_tensors(event: Event) -> Event:
    heavy = {name: None for name in ("state", "batch") if getattr(event, name, None) is not None}
    return dataclasses.replace(event, **heavy) if heavy else event
