"""Where the accumulation window of an eager step stands, counted on the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..compile import CompiledStep
from ..step import Accum, Adding, Closing, static_of
from ..types import Metrics, TrainState, TrainStep, Tree


def counting(step: TrainStep) -> TrainStep:
    """The step of a loop, which counts where the window of the state stands.

    An eager step on a GPU does not read `Accum.left`, which would wait for the device: without being told it computes
    the micro-batch that adds and the one that closes. A compiled step counts itself, and a step that somebody has
    wrapped may make several calls of the program's: both are returned as they are, as is a step without accumulation.

    Args:
        step: ``(state, batch) -> (state, metrics)``.
    """
    static = None if isinstance(step, CompiledStep) else static_of(step)
    return step if static is None or static.accumulate == 1 else _Counting(step, static.accumulate)


class _Counting:
    """A program's own train_step. Position and state go together by the tensors `left` and `halted`: any other state
    than the one that was returned last is read, once."""

    def __init__(self, step: TrainStep, window: int) -> None:
        self._step = step
        self._window = window
        self._returned: tuple[Tensor, Tree] | None = None
        self._left = 0

    def __call__(self, state: Tree, batch: Any) -> tuple[Tree, Metrics]:
        if not isinstance(state, TrainState) or type(state.accum) is not Accum:
            return self._step(state, batch)  # which names what is wrong
        left = self._left_of(state)
        kind = Closing if left == 1 else Adding
        new, metrics = self._step(TrainState(*state)._replace(accum=kind(*state.accum)), batch)
        # A halted state stays where it is, and this count goes on: the kind of a micro-batch means nothing to it.
        self._returned, self._left = (new.accum.left, new.halted), self._window if left == 1 else left - 1
        return new, metrics

    def _left_of(self, state: TrainState) -> int:
        if self._returned and state.accum.left is self._returned[0] and state.halted is self._returned[1]:
            return self._left
        return int(state.accum.left)
