"""Count the position in the accumulation window of an eager step on the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..state import stacked
from ..types import Metrics, TrainState, TrainStep, Tree
from .program import static_of
from .spec import Accum, Adding, Closing


def counting(step: TrainStep) -> TrainStep:
    """Return the step for a loop, which counts the micro-batches of a window on the host.

    An eager step on a GPU does not read `Accum.left`, since that would wait for the device. Without the count it
    computes both kinds of micro-batch, the one that adds and the one that closes the window. A compiled step counts
    itself, and a wrapped step may call the program's several times: both are returned as they are, and so is a step
    without accumulation.

    Args:
        step: ``(state, batch) -> (state, metrics)``.
    """
    static = None if getattr(step, "counts_windows", False) else static_of(step)
    return step if static is None or static.accumulate == 1 else _Counting(step, static.accumulate)


class _Counting:
    """A program's own train_step with a count for the state that it returned last.

    The tensors `left` and `halted` identify that state. The position of any other state is read, once.
    """

    def __init__(self, step: TrainStep, window: int) -> None:
        self._step = step
        self._window = window
        self._returned: tuple[Tensor, Tree] | None = None
        self._left: int | None = 0

    def __call__(self, state: Tree, batch: Any) -> tuple[Tree, Metrics]:
        if not isinstance(state, TrainState) or type(state.accum) is not Accum:
            return self._step(state, batch)  # raises the error
        left = self._left_of(state)
        kind = Accum if left is None else Closing if left == 1 else Adding
        new, metrics = self._step(TrainState(*state)._replace(accum=kind(*state.accum)), batch)
        # A halted state does not move while this count goes on: the kind of a micro-batch does not matter to it.
        self._returned = new.accum.left, new.halted
        self._left = None if left is None else self._window if left == 1 else left - 1
        return new, metrics

    def _left_of(self, state: TrainState) -> int | None:
        if self._returned and state.accum.left is self._returned[0] and state.halted is self._returned[1]:
            return self._left
        return stacked.window_left(state)
