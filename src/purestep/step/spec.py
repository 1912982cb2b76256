"""What the files of a step share: a program's parts, the accumulation window, one call's contribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import ema as ema_
from .. import optim, rng
from .. import precision as precision_
from .. import scaler as scaler_
from ..model import functional as model_
from ..optim import numerics
from ..types import Form, Metrics, Objective, Params, TrainState

if TYPE_CHECKING:  # numpy.random, which `import purestep` does not load
    from .. import host_generators

_T = TypeVar("_T")
IDENTITY = Form(lambda stored: stored, lambda named: named)


class Accum(NamedTuple):
    """An open accumulation window."""

    left: Tensor  # shape=(), dtype=int64: micro-batches still to come; the one that finds 1 closes the window
    weight: Tensor  # shape=(), dtype=float32: summed weight so far; nan once a loss was not finite
    grads: Params  # name -> P, at least float32: summed weight x gradient x scale


class Adding(Accum):
    """A window whose next micro-batch is known to be added only. The type is the message: it selects a graph."""

    __slots__ = ()


class Closing(Accum):
    """A window whose next micro-batch is known to close it."""

    __slots__ = ()


class Micro(NamedTuple):
    """What one call has contributed."""

    grads: Params  # stored form: gradient of mean x scale
    mean: Tensor  # shape=()
    weight: Tensor  # shape=(), dtype=float32
    buffers: Params
    metrics: Metrics
    unreached: frozenset[str]  # named: parameters that the loss does not reach


class Reach:
    """Which parameters the loss of the last call did not reach, for those that cannot see it: Dynamo, whose captures
    follow a run on fake tensors, and a flush, which has no loss."""

    def __init__(self) -> None:
        self.unreached: frozenset[str] = frozenset()
        self.ever: frozenset[str] = frozenset()

    def remember(self, unreached: frozenset[str]) -> None:
        """Of a call's loss."""
        if unreached != self.unreached:
            self.unreached = unreached
            self.ever |= unreached


def last_unreached(reach: Reach) -> tuple[str, ...]:
    """Of the last call, sorted; a constant of each graph that Dynamo makes, not a guard of it."""
    return tuple(sorted(reach.unreached))


class Spec(NamedTuple):
    """A program's parts, resolved."""

    template: model_.Template
    objective: Objective
    tx: optim.Transform
    policy: precision_.Policy
    scaler: scaler_.Scaler
    average: ema_.Average
    accumulate: int
    microbatches: int
    tail: str
    engine: str
    halts: bool
    reach: Reach
    host: host_generators.Host
    values: Mapping[str, numerics.Schedule]

    def values_at(self, state: TrainState) -> dict[str, Tensor]:
        """The scheduled scalars of this state, shape=() each."""
        return {name: numerics.on_count(schedule, state.updates) for name, schedule in self.values.items()}


def drawn(host: host_generators.Host, call: Callable[[], _T], number: int, device: torch.device) -> _T:
    """``call()``, whose random numbers, of torch, numpy and Python, depend on ``number`` alone.

    Args:
        host: whether such calls draw from numpy's and Python's generators; the first one that does is made twice.
        call: without other effects.
        number: from `rng.mix`.
        device: the one that is drawn on, besides the CPU.
    """

    def again() -> _T:
        with rng.scoped(number, device):
            return call()

    with rng.scoped(number, device):
        return host.call(call, number, again)


def is_finite(value: Tensor) -> Tensor:
    """As `torch.isfinite` of a floating tensor, in two operations instead of four: nan is not below anything."""
    return value.abs() < torch.inf


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are kept in: at least float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype
