"""Random numbers of a step: dropout and every other draw are seeded from the state's key.

numpy's and Python's generators are seeded in every call too, from which some models draw (SpecAugment, layer drop): a
check for draws would be too late at the first one, and costs as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from .. import rng
from ..torch_ext import tracing
from ..types import TrainState

_T = TypeVar("_T")


def drawn(call: Callable[[], _T], number: int, device: torch.device) -> _T:
    """Return ``call()`` with the generators of torch, numpy and Python seeded by ``number``.

    Args:
        call: without other effects.
        number: from `rng.mix`.
        device: its generator is seeded, besides the CPU's.
    """
    from ..torch_ext import host_generators  # numpy.random, which `import purestep` does not load

    with rng.scoped(number, device), host_generators.scoped(number):
        return call()


def drawn_in_step(state: TrainState, call: Callable[[], _T], *stream: int) -> _T:
    """Return ``call()`` with the random numbers of the next step of a state, unless the host has seeded for a whole
    graph. ``stream`` tells apart the processes that draw."""
    if tracing.in_graph():
        return call()
    # If states are mapped with a key each, mix all keys: their numbers are drawn together.
    number = rng.mix(*tracing.unwrapped(state.key).flatten().tolist(), "step", *stream)
    return drawn(call, number, state.step.device)
