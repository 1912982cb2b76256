"""Types shared by the modules of a step: a program's parts, the accumulation window, one call's contribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ema as ema_
from .. import optim
from .. import precision as precision_
from .. import scaler as scaler_
from ..errors import ConfigError
from ..model import functional
from ..optim import arguments, numerics
from ..types import Empty, Form, Metrics, Objective, Params, Program, TrainState


def sum_is_divided(how: str, *, where: str) -> ConfigError:
    """The error for an objective that is a sum, where parts of a batch count as means. ``how`` divides the batch."""
    return ConfigError(
        f'the loss has reduction="sum", and {how}',
        where=where,
        hint='reduction="mean"; with SGD multiply the learning rate by the number of elements, with Adam keep it',
    )


IDENTITY = Form(lambda stored: stored, lambda named: named)


class Accum(NamedTuple):
    """An open accumulation window."""

    left: Tensor  # shape=(), dtype=int64: remaining micro-batches; at 1 the next one closes the window
    weight: Tensor  # shape=(), dtype=float32: summed weight so far; nan after a loss that was not finite
    grads: Params  # name -> P, at least float32: summed weight x gradient x scale


class Adding(Accum):
    """A window whose next micro-batch does not close it. Compiled steps select their graph by this type."""

    __slots__ = ()


class Closing(Accum):
    """A window whose next micro-batch closes it."""

    __slots__ = ()


class Micro(NamedTuple):
    """Gradients, loss and metrics of one micro-batch."""

    grads: Params  # stored form: gradient of mean x scale
    mean: Tensor  # shape=()
    weight: Tensor  # shape=(), dtype=float32
    buffers: Params
    metrics: Metrics
    unreached: frozenset[str]  # named: parameters that the loss does not reach
    grad_weight: Tensor  # shape=(): the factor by which gradients of several micro-batches are summed
    outputs: Mapping[str, Any] = MappingProxyType({})  # `Loss.outputs`
    is_weighted: bool = False  # gradients are multiplied by the weight already


class Reach:
    """The parameters that the loss of the last call did not reach. A flush reads this, because it has no loss, and
    Dynamo, in a user's `torch.compile`, because it cannot see autograd's graph. A run stores ``ever`` in its snapshots:
    the first function that a resumed run calls may be flush."""

    def __init__(self) -> None:
        self.unreached: frozenset[str] = frozenset()
        self.ever: frozenset[str] = frozenset()
        self.watches = 2  # calls that look for tensors that require a gradient and are not the program's
        self.others: list[Tensor] = []  # such tensors, in the last of these calls
        self.is_evaluated = False  # a call of eval_step has looked for buffers that forward writes

    def remember(self, unreached: frozenset[str]) -> None:
        """Store the parameters that a call's loss did not reach."""
        if unreached != self.unreached:
            self.unreached = unreached
            self.ever |= unreached


def unreached(program: Program) -> list[str]:
    """The parameters that the loss of a call of this program's steps did not reach, by name."""
    reach = None if program.static is None else program.static.made.reach
    return [] if reach is None else sorted(reach.ever)


def remember_unreached(program: Program, names: Iterable[str]) -> None:
    """Let the functions of a program continue a run in which no gradient has reached these parameters."""
    if program.static is not None and program.static.made.reach is not None:
        program.static.made.reach.ever |= frozenset(names)


class Spec(NamedTuple):
    """A program's parts, with defaults resolved."""

    template: functional.Template
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
    values: Mapping[str, arguments.Schedule]
    gradients: Callable[..., Micro]  # (spec, form, state, batch, context) -> Micro
    is_sharp: bool = False  # `gradients` are those of `Sam`
    carry: Mapping[str, Tensor] = MappingProxyType({})  # as in `Static`

    @property
    def is_scaled(self) -> bool:
        """True if the program scales its loss."""
        return not isinstance(self.scaler.init(torch.device("cpu")), Empty)

    @property
    def is_sum(self) -> bool:
        """True if the loss is a sum over the batch, not a mean."""
        return getattr(self.objective, "is_sum", False)

    def values_at(self, state: TrainState) -> dict[str, Tensor]:
        """The scheduled scalars of this state, shape=() each."""
        found = {name: numerics.on_count(schedule, state.updates) for name, schedule in self.values.items()}
        return functional.Scheduled(found)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of values of ``dtype``: at least float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def times(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient x weight; 0 for weight 0, since the loss of a batch in which nothing counts is 0/0."""
    return torch.where(weight > 0, grad * weight.to(grad.dtype), torch.zeros_like(grad))
