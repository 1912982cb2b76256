"""Guard a run against its sinks, which may fail or hang."""

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
"""A callable of events. Optional attributes: ``close()``; ``wants``, the classes of the events that it gets;
``foreground``, True if it is fast enough for the training thread; ``writes_files``, True if a ``fast_dev_run`` leaves
it out."""

_log = logging.getLogger("purestep")
_KEPT = (FitStart, EpochEnd, FitEnd)
"""Events that are never dropped: their rows are in memory anyway, as the history."""


class Guarded:
    """A sink behind a queue, in its own thread; see `guarded`."""

    def __init__(self, sink: Sink, *, capacity: int, patience: float) -> None:
        self.sink = sink
        self.name = getattr(sink, "__name__", type(sink).__name__)
        self.failures: Counter[str] = Counter()  # class of the exception -> events lost by it
        self.dropped = 0  # events lost because the queue was full
        self._wants: tuple[type, ...] | None = getattr(sink, "wants", None)
        self._foreground = bool(getattr(sink, "foreground", False))
        self.writes_files = bool(getattr(sink, "writes_files", False))
        self._patience = patience
        self._capacity = capacity
        self._delivered = 0
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if self._wants is not None and not isinstance(event, self._wants):
            return
        heavy = {name: None for name in ("state", "batch") if getattr(event, name, None) is not None}
        light = dataclasses.replace(event, **heavy) if heavy else event
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
        """Deliver the events in the queue and close the sink, within ``patience`` seconds. A sink that writes files
        gets that time again as long as it finishes at least one event."""
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
            _log.warning("sink %s: still busy after %g s, so %d events are lost", self.name, self._patience, waiting)

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
            text = "sink %s failed at %s with %s: %s; training goes on; this is logged once"
            _log.warning(text, self.name, at, kind, error)


def guarded(sink: Sink, *, capacity: int = 1 << 16, patience: float = 5.0) -> Guarded:
    """Wrap a sink so that it cannot harm the run: its errors are counted and logged once per class, and it runs in its
    own thread.

    Example:
        >>> from purestep.events import Saved
        >>> def broken(event):
        ...     raise OSError("no such host")
        >>> sink = guarded(broken)
        >>> sink(Saved(1, "runs/a"))
        >>> sink.close()
        >>> sink.failures
        Counter({'OSError': 1})

    Events arrive in order, without ``state`` and ``batch`` (both are None): the run may overwrite those before the sink
    reads them.

    Args:
        sink: see `Sink`.
        capacity: events in the queue, >= 1. Further ones are dropped and counted, except for the start, the rows and
            the end of a run.
        patience: seconds, > 0, that the end of a run waits for a busy sink; for one that writes files, for each event.
    """
    if isinstance(sink, Guarded):
        return sink
    return Guarded(sink, capacity=capacity, patience=patience)
