"""The vocabulary: the state, what a step takes and returns, and the record of functions that is a program.

Nothing here computes. Shapes and dtypes stand beside the fields; ``P`` is the shape of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Any
"""Any nesting of dicts, lists, tuples and NamedTuples with tensors as leaves."""
Params: TypeAlias = dict[str, Tensor]
"""Flat, by the dotted names of `torch.nn.Module.named_parameters`."""
Batch: TypeAlias = Any
Device: TypeAlias = torch.device
Labels: TypeAlias = dict[str, Hashable]


class Empty(NamedTuple):
    """What is switched off: a node without leaves, where `None` would mean different things to different trees.

    Example:
        >>> import purestep as ps
        >>> ps.tree.leaves({"w": 1, "ema": Empty()})
        [1]
    """


class Mean(NamedTuple):
    """A weighted mean that can be merged: the sum and what to divide it by.

    Both may be vectors, one mean a class; as a number they are then the mean over the classes that were counted. Order
    and format are those of the number; `metrics.merge` adds, and ``==`` compares the pair, as of any tuple.

    Example:
        >>> mean = Mean(torch.tensor(6.0), torch.tensor(4.0))
        >>> float(mean), mean < 2, f"{mean:.3f}"
        (1.5, True, '1.500')
    """

    total: Tensor  # shape=() or (n,), dtype=float32
    weight: Tensor  # the same shape, dtype=float32

    def compute(self) -> Tensor:
        """``total / weight``, shape=() or (n,); nan where nothing was counted."""
        return self.total / self.weight

    def __float__(self) -> float:
        pairs = zip(self.total.reshape(-1).tolist(), self.weight.reshape(-1).tolist(), strict=True)
        means = [total / weight for total, weight in pairs if weight]
        return sum(means) / len(means) if means else math.nan

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    # As a tuple, it would compare sums, and adding would make it longer.
    def __lt__(self, other: Any) -> bool:
        return float(self) < _number(other)

    def __le__(self, other: Any) -> bool:
        return float(self) <= _number(other)

    def __gt__(self, other: Any) -> bool:
        return float(self) > _number(other)

    def __ge__(self, other: Any) -> bool:
        return float(self) >= _number(other)

    def __add__(self, other: Any) -> NoReturn:
        raise TypeError("two Means are merged, not added: metrics.merge(first, second) of the dicts that they are in")


def _number(other: Any) -> float:
    if isinstance(other, Mean | Tensor | float | int):
        return float(other)
    raise TypeError(f"a Mean is compared with a Mean or a number, not with a {type(other).__name__}")


Metrics: TypeAlias = dict[str, Mean]
Metric: TypeAlias = Callable[[Any, Any], Any]
"""``metric(outputs, targets)``: a Mean, a ``(total, weight)`` pair, or a 0-d tensor that is a mean over the batch."""


class Loss(NamedTuple):
    """What an objective returns.

    ``mean`` is differentiated; its gradient is accumulated times ``weight`` and divided once by the summed weight, so
    that micro-batches of different sizes add up to the gradient of the whole batch. Weight 0 means: no update.

    Example:
        >>> def objective(model, batch):
        ...     error = (model(batch["x"]) - batch["y"]).square()
        ...     return Loss(error.mean(), torch.tensor(float(error.numel())))
        >>> objective(lambda x: 2 * x, {"x": torch.ones(4), "y": torch.zeros(4)}).mean
        tensor(4.)
    """

    mean: Tensor  # shape=(), floating
    weight: Tensor  # shape=(), number of examples, tokens or elements that `mean` is a mean over
    metrics: Mapping[str, Mean] = MappingProxyType({})


class TrainState(NamedTuple):
    """Everything that changes while a model trains, as one immutable pytree of tensors.

    All leaves are on one device except ``key``, which is on the CPU. What is switched off is an `Empty`.

    A state that has ``halted`` refuses every update: its last loss or gradient was not finite. `fit` and `run_epoch`
    raise then. In a loop of one's own ``int(state.halted)`` says which call it was (reading it waits for the device),
    and ``state._replace(halted=torch.zeros_like(state.halted))`` goes on; or ``ps.program(..., nonfinite="skip")``
    never halts.

    Example:
        >>> import purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> state = program.init(seed=0)
        >>> state
        TrainState(step=0, updates=0, params=2 (3 numbers), frozen=0, buffers=0, seed=0, device=cpu)
        >>> colder = state._replace(params={name: p / 2 for name, p in state.params.items()})
    """

    step: Tensor  # shape=(), dtype=int64: calls of train_step and flush
    updates: Tensor  # shape=(), dtype=int64: optimizer updates applied
    params: Params  # name -> P, floating: what is trained
    frozen: Params  # name -> P: parameters with requires_grad=False
    buffers: Params  # name -> any shape and dtype
    opt_state: Tree  # what tx.init made
    ema: Tree  # ema.EmaState or Empty
    scaler: Tree  # scaler.ScalerState or Empty
    accum: Tree  # step.Accum or Empty: gradients of an open accumulation window
    halted: Tree  # shape=(), dtype=int64: 0, or the call (from 1) that was not finite; Empty with nonfinite="skip"
    key: Tensor  # shape=(2,), dtype=int64, CPU: [seed, calls]

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.params.values())
        device = next(iter(self.params.values())).device if self.params else self.step.device
        parts = [
            f"step={_told(self.step)}",
            f"updates={_told(self.updates)}",
            f"params={len(self.params)} ({count:,} numbers)",
            f"frozen={len(self.frozen)}",
            f"buffers={len(self.buffers)}",
        ]
        parts += [name for name in ("ema", "scaler", "accum") if not isinstance(getattr(self, name), Empty)]
        if not isinstance(self.halted, Empty) and _told(self.halted) != _told(torch.zeros_like(self.halted)):
            parts.append(f"HALTED at call {_told(self.halted)}, not finite")
        return f"TrainState({', '.join(parts)}, seed={_told(self.key[..., 0])}, device={device})"


def _told(number: Tensor) -> Any:
    """A number, a list of them for stacked states, or "?" where `torch.func` has put something else."""
    try:
        return number.tolist()
    except RuntimeError:
        return "?"


class Model(Protocol):
    """The bound pure call that an objective is given: weights are arguments in disguise, nothing is mutated.

    ``model(...)`` is the module's forward, ``model.call("encode", x)`` another method or a submodule of it (a dotted
    name: ``"encoder.layers.0"``), ``model.params`` its weights by name, ``model.training`` its mode.

    Example:
        >>> def objective(model: Model, batch: Tensor) -> Loss:
        ...     penalty = sum(p.square().sum() for p in model.params.values())
        ...     return Loss(model(batch).mean() + 1e-4 * penalty, torch.tensor(float(len(batch))), {})
    """

    params: Mapping[str, Tensor]
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Another method, or a submodule, with the same weights."""
        ...


class Objective(Protocol):
    """``objective(model, batch, *context) -> Loss``."""

    def __call__(self, model: Any, batch: Any, /, *context: Any) -> Loss: ...


TrainStep: TypeAlias = Callable[..., tuple[Any, Metrics]]
EvalStep: TypeAlias = Callable[..., Metrics]


class Missed(NamedTuple):
    """Of each parameter, how many updates it had no gradient in: its own count of updates is lower by that."""

    names: dict[str, Empty]  # no leaves
    counts: Tensor  # shape=(n,), dtype=int64: in the order of the sorted names


def _themselves(names: frozenset[str]) -> dict[str, str]:
    return {name: name for name in sorted(names)}


class Form(NamedTuple):
    """How a step holds parameter-shaped trees: as the named tree (all identity), or as a few flat buffers."""

    expand: Callable[[Params], Params]  # stored -> named; views, nothing is copied
    collect: Callable[[Params], Params]  # named -> stored
    unreached: Callable[[frozenset[str]], dict[str, str]] = _themselves  # names without a gradient -> stored names


class Steps(NamedTuple):
    """The two functions of a program that write a state."""

    train_step: TrainStep
    flush: Callable[[Any], tuple[Any, Metrics]]


class Static(NamedTuple):
    """What is fixed about a program: names, and what packing and export need."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    ties: dict[str, str]  # alias -> trained name
    persistent: frozenset[str]  # buffers that belong into a state_dict
    accumulate: int
    tail: str
    has_ema: bool
    labels: Callable[[Params], Labels] | None  # None: the transform is not elementwise and needs the named tree
    steps: Callable[[Form], Steps]  # the same steps on another form of the state
    check: Callable[[torch.device], None]  # raises ConfigError for a device that cannot compute in this precision
    versions: Mapping[str, Any] = MappingProxyType({})  # of a state_dict's ``_metadata``: submodule -> its version


def _no_flush(state: Any) -> tuple[Any, Metrics]:
    return state, {}


class Program(NamedTuple):
    """A model, an objective and a transformation as pure functions. Only ``train_step`` is needed by `fit`.

    Args:
        train_step: ``(state, batch, *context) -> (state, metrics)``.
        flush: ``(state) -> (state, metrics)``: applies an accumulation window that an epoch left open.
        eval_step: ``(state, batch, *context, index=0) -> metrics``; ``index`` numbers the batches of an evaluation.
        init: ``(seed=0, device=None) -> state`` from the module's weights as they are at this call, on the module's
            device: pretrained ones are loaded into the module before it. ``seed`` sets only the key.
        bind: ``(state, view="params", train=False) -> callable``: the module with the weights of a state; ``view`` is
            "params" or "ema".
        static: names, masks and ties: what packing and export need.

    Example of one's own:
        >>> import torch
        >>> def train_step(state, batch):
        ...     return {"w": state["w"] + batch}, {}
        >>> program = Program(train_step)
        >>> program.train_step({"w": torch.zeros(())}, 1)[0]["w"].item()
        1.0
    """

    train_step: TrainStep  # (state, batch, *context) -> (state, metrics)
    flush: Callable[[Any], tuple[Any, Metrics]] = _no_flush  # (state) -> (state, metrics)
    eval_step: EvalStep | None = None  # (state, batch, *context, index=0) -> metrics
    init: Callable[..., Any] | None = None  # (seed=0, device=None) -> state
    bind: Callable[..., Any] | None = None  # (state, view="params", train=False) -> callable
    static: Static | None = None
