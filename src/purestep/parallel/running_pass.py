"""The forward and backward pass that is running: read by layers that communicate inside of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor


class Call:
    """One forward and backward pass."""

    def __init__(self, counts: Tensor | None) -> None:
        self.counts = counts  # shape=(): 0 if the rows only stand in for an empty share; None: they count
        self.weight: Tensor | None = None  # shape=(): of the loss; set at the end of the forward pass


_running: list[Call] = []  # not by thread: on CUDA another thread runs the backward pass


@contextmanager
def running(counts: Tensor | None) -> Generator[Call]:
    """Make `current` return a new call inside the block."""
    call = Call(counts)
    _running.append(call)
    try:
        yield call
    finally:
        _running.remove(call)


def current() -> Call:
    """The call that is running; outside of one, a call in which all rows count."""
    return _running[-1] if _running else Call(None)
