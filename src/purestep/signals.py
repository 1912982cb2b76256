"""What other people want of a running fit: end, end now, save.

A handler only sets a flag, which the loop reads between steps; a state is never half-updated. The one exception is a
loop that waits for its loader (`Signals.watch`): there the wait itself is broken off, since nothing is lost by it.

==========  ====================================  ==============================================================
signal      first                                 second
==========  ====================================  ==============================================================
SIGTERM     ``pending = "terminate"``             `Preempted` at once: exit status 143
SIGINT      ``pending = "interrupt"``             KeyboardInterrupt at once (after SIGTERM too)
SIGUSR1     ``pending = "snapshot"``              the same again
==========  ====================================  ==============================================================
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Literal, TypeAlias, TypeVar

T = TypeVar("T")
Pending: TypeAlias = Literal["terminate", "interrupt", "snapshot"]

TERMINATED = 128 + 15  # what a shell reports of a process that SIGTERM ended

_MEANINGS: dict[str, Pending] = {"SIGTERM": "terminate", "SIGINT": "interrupt", "SIGUSR1": "snapshot"}
_log = logging.getLogger("purestep")


class Preempted(SystemExit):
    """The run was told by SIGTERM to end. A script that does not catch it exits with status 143.

    Args:
        result: what fit had so far.
    """

    def __init__(self, result: Any = None) -> None:
        super().__init__(TERMINATED)
        self.result = result


def interrupted(result: Any = None) -> KeyboardInterrupt:
    """The KeyboardInterrupt that ends a run after Ctrl-C, with what fit had so far as its ``result``.

    Not a class of its own: Python exits with status 130 for KeyboardInterrupt itself only.

    Example:
        >>> interrupted("so far").result
        'so far'
    """
    error = KeyboardInterrupt("interrupted: the step was finished and the state saved")
    vars(error)["result"] = result
    return error


class _Woken(BaseException):
    """Raised by a handler in a wait for the loader."""


class Signals:
    """Handlers for SIGTERM, SIGINT and SIGUSR1 while a run lasts.

    On the main thread only: elsewhere Python cannot set any, which is logged. A user's handler is called as well, after
    the flag is set, and put back at the end. A signal that is ignored stays ignored.

    Example:
        >>> with Signals() as signals:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     signals.pending
        'terminate'
    """

    pending: Pending | None
    """What is asked for, None most of the time. A wish to end is not replaced by one to save."""

    def __init__(self) -> None:
        self.pending = None
        self._waiting = False
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            _log.info("fit is not on the main thread: SIGTERM, SIGINT and SIGUSR1 are left as they are")
            return self
        for name in _MEANINGS:
            number = getattr(signal, name, None)  # Windows has no SIGUSR1
            previous = None if number is None else signal.getsignal(number)
            if number is not None and previous is not None and previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:  # else somebody has set another one since, to stay
                signal.signal(number, previous)
        self._previous.clear()

    @property
    def leaving(self) -> bool:
        """Whether the run is to end."""
        return self.pending in ("terminate", "interrupt")

    def saved(self) -> None:
        """The wish to save has been met; one to end stays."""
        if self.pending == "snapshot":
            self.pending = None

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, ending at once when the run is told to end while it waits for one.

        What the loader was doing is abandoned, so this is for a loop that reads ``pending`` after it. Code in C that
        does not return to Python cannot be woken.

        Args:
            batches: an iterable, run in this thread.

        Example:
            >>> list(Signals().watch([1, 2]))
            [1, 2]
        """
        try:
            iterator = iter(batches)
            while True:
                self._waiting = True
                try:
                    if self.leaving:
                        return  # it came between two batches
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    self._waiting = False
                yield batch
        except _Woken:
            return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        meaning = _MEANINGS[signal.Signals(number).name]
        ending = self.pending in ("terminate", "interrupt")
        # A launcher that gets Ctrl-C together with its children sends them SIGTERM afterwards: that is no second wish.
        again = ending and (meaning == self.pending or meaning == "interrupt")
        if meaning != "snapshot" or not ending:
            self.pending = meaning
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        if again:
            raise Preempted if meaning == "terminate" else KeyboardInterrupt
        if self._waiting and meaning != "snapshot":
            raise _Woken
