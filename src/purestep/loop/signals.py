"""Signals to a running fit: end after this step, end at once, save.

A handler only sets a flag, which the loop reads between steps, so no state is half-updated. There is one exception: a
signal interrupts the wait for a loader (`Signals.until_signal`), since that loses nothing.

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

TERMINATED = 128 + 15  # the exit status that a shell reports after SIGTERM

_MEANINGS: dict[str, Pending] = {"SIGTERM": "terminate", "SIGINT": "interrupt", "SIGUSR1": "snapshot"}
_log = logging.getLogger("purestep")


class Preempted(SystemExit):
    """Raised by `fit` after SIGTERM. A script that does not catch it exits with status 143.

    Args:
        result: the `FitResult` so far.
    """

    def __init__(self, result: Any = None) -> None:
        super().__init__(TERMINATED)
        self.result = result


def interrupted(result: Any = None) -> KeyboardInterrupt:
    """Return the KeyboardInterrupt that ends a run after Ctrl-C; its ``result`` is the `FitResult` so far.

    Example:
        >>> interrupted("so far").result
        'so far'

    The error is not of a subclass: Python exits with status 130 only for KeyboardInterrupt itself.
    """
    error = KeyboardInterrupt("interrupted: the step was finished and the state saved")
    vars(error)["result"] = result
    return error


def is_at_once(error: BaseException) -> bool:
    """True for the error of a second signal, which ends a run without a snapshot.

    Example:
        >>> is_at_once(interrupted("so far"))
        False
    """
    return "at_once" in vars(error)


class _WaitInterrupted(BaseException):
    """Raised by a handler to interrupt the wait for a loader."""


class Signals:
    """Handlers for SIGTERM, SIGINT and SIGUSR1 during a run.

    Example:
        >>> with Signals() as signals:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     signals.pending
        'terminate'

    Python can set them on the main thread only; in another thread this class sets none and logs that. It calls a user's
    handler too, after it has set the flag, and restores it at the end. A signal that is ignored stays ignored.
    """

    pending: Pending | None
    """The request, None most of the time. A request to save does not replace one to end."""

    def __init__(self) -> None:
        self.pending = None
        self._waiting = False
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            _log.info("fit is not on the main thread, so it does not handle SIGTERM, SIGINT and SIGUSR1")
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
            if signal.getsignal(number) == self._handle:  # otherwise another handler was set meanwhile, which stays
                signal.signal(number, previous)
        self._previous.clear()

    @property
    def leaving(self) -> bool:
        """True if the run has to end."""
        return self.pending in ("terminate", "interrupt")

    def saved(self) -> None:
        """Clear a request to save. A request to end stays."""
        if self.pending == "snapshot":
            self.pending = None

    def until_signal(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and end at once if a request to end comes during the wait for one.

        Example:
            >>> list(Signals().until_signal([1, 2]))
            [1, 2]

        The loader's work on that batch is abandoned, so the caller must read ``pending`` afterwards. C code that does
        not return to Python cannot be interrupted; nor can a call that blocks, such as `time.sleep`, by a signal in the
        microseconds before it: Python runs the handler when the call returns.

        Args:
            batches: an iterable, which runs in this thread.
        """
        try:
            iterator = iter(batches)
            while True:
                self._waiting = True
                try:
                    if self.leaving:
                        return  # the request came between two batches
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    self._waiting = False
                yield batch
        except _WaitInterrupted:
            return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        meaning = _MEANINGS[signal.Signals(number).name]
        ending = self.pending in ("terminate", "interrupt")
        # A launcher that gets Ctrl-C together with its children sends them SIGTERM afterwards: no second request.
        again = ending and (meaning == self.pending or meaning == "interrupt")
        if meaning != "snapshot" or not ending:
            self.pending = meaning
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        if again:
            error = Preempted() if meaning == "terminate" else KeyboardInterrupt()
            vars(error)["at_once"] = True
            raise error
        if self._waiting and meaning != "snapshot":
            raise _WaitInterrupted
