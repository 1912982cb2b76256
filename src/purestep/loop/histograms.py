"""Histograms of weights, gradients and updates, for sinks that plot them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..events import Histogram, Histograms
from ..parallel import placement
from ..torch_ext import complex_numbers
from ..types import Params, Program, TrainState, Tree
from .call_hooks import CallHook
from .loop_state import Call, LoopState

_BINS = 64


def histogram_hook(every: int, program: Program, state: Tree) -> HistogramHook | None:
    """Return the hook of a run; None if ``every`` is 0.

    Args:
        every: updates between two recorded ones.
        program: not compiled.
        state: of the run.

    Raises:
        ConfigError: the state is no TrainState of a program.
    """
    if not every:
        return None
    if not isinstance(state, TrainState) or program.static is None:
        hint = "histograms=0, or a callback that computes them"
        raise ConfigError("the step is not that of a program", where="histograms", hint=hint)
    return HistogramHook(every, program.static.made.gradient)


class HistogramHook(CallHook):
    """Compares the state before and after every n-th update. Of several processes all make the same calls, and hold
    the whole weights and gradients of a recorded update.

    Args:
        every: n >= 1.
        gradient: ``(state, batch) -> gradients``.
    """

    def __init__(self, every: int, gradient: Any) -> None:
        self._every = every
        self._gradient = gradient
        self._before: _Before | None = None

    def before_call(self, state: TrainState, batch: Any, loop: LoopState) -> None:
        """Keep what the comparison needs, if the update of this call is recorded."""
        self._before = None
        update = loop.updates_at_most + 1
        if loop.window_left == 1 and update % self._every == 0:
            self._before = _Before(update, tree.clone(_weights(state)), self._gradients(state, batch))

    def after_call(self, state: TrainState, call: Call) -> Histograms | None:
        """Return the histograms of this update, if it is recorded. Waits for the device."""
        before, self._before = self._before, None
        if before is None:
            return None
        params = _weights(state)
        changes = {name: value - before.params[name] for name, value in params.items()}
        groups = {"weights": params, "gradients": before.gradients, "updates": changes}
        found = {
            f"{group}/{name}": histogram(value) for group, named in groups.items() for name, value in named.items()
        }
        return Histograms(before.updates, {name: one for name, one in found.items() if one is not None})

    def _gradients(self, state: TrainState, batch: Any) -> Params:
        try:
            return self._gradient(state, batch)
        except Exception as error:
            error.add_note("in the gradients of the histograms, a pass in eager mode (cure: histograms=0)")
            raise


def _weights(state: TrainState) -> Params:
    """The whole parameters: a collective where several processes hold pieces."""
    return dict(placement.weights(state).params)


class _Before(NamedTuple):
    """The number of a recorded update, and the values before it."""

    updates: int
    params: Params
    gradients: Params


def histogram(value: Tensor) -> Histogram | None:
    """The histogram of the finite numbers of a tensor, of a complex one of their parts; None if there are none."""
    numbers = complex_numbers.as_real(value.detach()).flatten()
    numbers = numbers[torch.isfinite(numbers)].to("cpu", torch.float64)
    if not len(numbers):
        return None
    low, high = (float(end) for end in numbers.aminmax())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts, edges = torch.histogram(numbers, _BINS, range=(low, high))
    return Histogram(counts.numpy(), edges.numpy(), float(numbers.sum()), float(numbers.square().sum()))
