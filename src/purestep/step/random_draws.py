"""Random numbers of a step: dropout and every other draw are seeded from the state's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from .. import rng
from ..torch_ext import tracing
from ..types import TrainState
from .spec import Spec

if TYPE_CHECKING:  # numpy.random, which `import purestep` does not load
    from ..torch_ext import host_generators

_T = TypeVar("_T")


def drawn(host: host_generators.Host, call: Callable[[], _T], number: int, device: torch.device) -> _T:
    """Return ``call()`` with the generators of torch, numpy and Python seeded by ``number``.

    Args:
        host: detects draws from numpy's and Python's generators; the first such call is repeated.
        call: without other effects.
        number: from `rng.mix`.
        device: its generator is seeded, besides the CPU's.
    """

    def again() -> _T:
        with rng.scoped(number, device):
            return call()

    with rng.scoped(number, device):
        return host.call(call, number, again)


def drawn_in_step(spec: Spec, state: TrainState, call: Callable[[], _T], *stream: int) -> _T:
    """Return ``call()`` with the random numbers of the next step of a state, unless the host has seeded for a whole
    graph. ``stream`` tells apart the processes that draw."""
    if tracing.in_graph():
        return call()
    # If states are mapped with a key each, mix all keys: their numbers are drawn together.
    number = rng.mix(*tracing.unwrapped(state.key).flatten().tolist(), "step", *stream)
    return drawn(spec.host, call, number, state.step.device)
