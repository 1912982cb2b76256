"""A sink may fail or hang; the run may not."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from ..events import Event, FitEnd

Sink: TypeAlias = Callable[[Any], Any]
"""A callable of events. Optional: ``close()``; ``wants``, the classes of the events it is to see; ``foreground``, True
where it is quick enough to be called by the training thread itself; ``writes_files``, True where a ``fast_dev_run`` is
to go without it."""

_log = logging.getLogger("purestep")


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
        self._queue: queue.Queue[Event | None] = queue.Queue(capacity)
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
        self._put(light, self._patience if isinstance(event, FitEnd) else 0.0)

    def close(self) -> None:
        """Deliver what is waiting, for as long as the patience lasts, and close the sink."""
        thread, self._thread = self._thread, None
        if thread is None:
            self._finish()
            return
        self._put(None, self._patience)
        thread.join(self._patience)
        if thread.is_alive():
            waiting = self._queue.qsize()
            _log.warning("sink %s: still busy after %g s, left with %d events", self.name, self._patience, waiting)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self._deliver(event)
        self._finish()

    def _put(self, event: Event | None, timeout: float) -> None:
        try:
            self._queue.put(event, block=timeout > 0, timeout=timeout or None)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                _log.warning("sink %s: too slow, events are dropped; training goes on", self.name)

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
        capacity: events that may wait, >= 1; further ones are dropped and counted.
        patience: seconds, > 0, that the end of a run waits for a busy sink.

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
