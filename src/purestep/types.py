"""The types: the state, the arguments and results of a step, and the program, a NamedTuple of functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Any
"""Any nesting of dicts, lists, tuples and NamedTuples with tensors as leaves."""
Params: TypeAlias = dict[str, Tensor]
"""A flat dict with the dotted names of `torch.nn.Module.named_parameters`."""
Batch: TypeAlias = Any
Device: TypeAlias = torch.device
Labels: TypeAlias = dict[str, Hashable]


class Empty(NamedTuple):
    """The state of a disabled component: a pytree node without leaves.

    Example:
        >>> import purestep as ps
        >>> ps.tree.leaves({"w": 1, "ema": Empty()})
        [1]
    """


class Mean(NamedTuple):
    """A weighted mean that can be merged: the total and the weight.

    Example:
        >>> mean = Mean(torch.tensor(6.0), torch.tensor(4.0))
        >>> float(mean), mean < 2, f"{mean:.3f}"
        (1.5, True, '1.500')

    Both fields may be vectors with one mean for each class; ``float()`` then returns the mean over the classes whose
    weight is not 0. ``<`` and `format` use this number. `metrics.merge` adds Means; ``==`` compares the two tensors.

    Args:
        total: shape=() or (n,), dtype=float32; float64 in a program whose loss is float64, and from `run_epoch`.
        weight: the same shape and dtype.
    """

    total: Tensor
    weight: Tensor

    def compute(self) -> Tensor:
        """``total / weight``, shape=() or (n,); nan where the weight is 0."""
        return self.total / self.weight

    def __float__(self) -> float:
        pairs = zip(self.total.reshape(-1).tolist(), self.weight.reshape(-1).tolist(), strict=True)
        means = [total / weight for total, weight in pairs if weight]
        return sum(means) / len(means) if means else math.nan

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    # A tuple would compare totals, and + would concatenate.
    def __lt__(self, other: Any) -> bool:
        return float(self) < _number(other)

    def __le__(self, other: Any) -> bool:
        return float(self) <= _number(other)

    def __gt__(self, other: Any) -> bool:
        return float(self) > _number(other)

    def __ge__(self, other: Any) -> bool:
        return float(self) >= _number(other)

    def __add__(self, other: Any) -> NoReturn:
        raise TypeError("Means cannot be added; merge the dicts that contain them: metrics.merge(first, second)")


def _number(other: Any) -> float:
    if isinstance(other, Mean | Tensor | float | int):
        return float(other)
    raise TypeError(f"a Mean can be compared with a Mean or a number, not with a {type(other).__name__}")


Metrics: TypeAlias = dict[str, Mean]
"""The metrics of a step, by name."""
Metric: TypeAlias = Callable[[Any, Any], Any]
"""``metric(outputs, targets)`` returns a Mean, a ``(total, weight)`` pair, or a 0-d tensor: a mean over the batch."""


def _refused(*_: Any, **__: Any) -> Any:
    raise TypeError("this is a shared default: pass ps.Loss(mean, weight, {name: mean}), or its outputs")


class _NoMetrics(dict[str, Mean]):
    """An empty dict that refuses writes: a default of `Loss`, which all losses share."""

    __setitem__ = setdefault = update = __ior__ = _refused


class Loss(NamedTuple):
    """The result of an objective.

    Example:
        >>> def objective(model, batch):
        ...     error = (model(batch["x"]) - batch["y"]).square()
        ...     return Loss(error.mean(), torch.tensor(float(error.numel())))
        >>> objective(lambda x: 2 * x, {"x": torch.ones(4), "y": torch.zeros(4)}).mean
        tensor(4.)

    A step differentiates ``mean``, accumulates gradient x ``weight``, and divides once by the summed weight, so that
    micro-batches of different sizes give the gradient of the whole batch. A weight of 0 skips the update.

    ``outputs`` are tensors that a train step hands out beside its metrics (TD errors, hidden states, images to log), by
    name, in any nesting: ``metrics["outputs"]["td_errors"]``, or `metrics.outputs`. They are copies without a gradient,
    and belong to this call: they are neither averaged nor kept, and `fit` passes them to callbacks, in
    ``StepEnd.outputs``. A call with ``microbatches`` joins those of its parts along the first dimension, which must be
    the rows; with ``accumulate`` each call has its own; of several processes each has those of the rows it computes,
    and one without rows those of the row that stands in for them. Evaluations drop them: use `predict`.

    Args:
        mean: the loss, shape=(), floating.
        weight: the number of examples, tokens or elements that ``mean`` averages, shape=().
        metrics: by name, as from `purestep.metrics`.
        outputs: tensors by name, in any nesting.
    """

    mean: Tensor
    weight: Tensor
    metrics: Mapping[str, Mean] = _NoMetrics()
    outputs: Mapping[str, Any] = _NoMetrics()  # name -> tensors


class TrainState(NamedTuple):
    """Everything that changes while a model trains, as one immutable pytree of tensors.

    Example:
        >>> import purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> state = program.init(seed=0)
        >>> state
        TrainState(step=0, updates=0, params=2 (3 numbers), frozen=0, buffers=0, seed=0, device=cpu)
        >>> colder = state._replace(params={name: p / 2 for name, p in state.params.items()})

    All leaves are on one device except ``key``, which is on the CPU. The field of a disabled component is `Empty`.

    After a loss or gradient that is not finite, ``halted`` is the number of that call (with ``accumulate``, of the call
    that closes its window), and later calls update nothing. `fit` and `run_epoch` then raise. In your own loop read
    ``int(state.halted)`` (which waits for the device), and continue with
    ``state._replace(halted=torch.zeros_like(state.halted))``. With
    ``ps.program(..., nonfinite="skip")`` a state never halts.

    Args:
        step: calls of train_step and flush, shape=(), dtype=int64.
        updates: optimizer updates applied, shape=(), dtype=int64.
        params: the trained parameters by name, floating.
        frozen: the parameters with ``requires_grad=False``, by name.
        buffers: the buffers by name, of any shape and dtype.
        opt_state: the state of the transform, as ``tx.init`` made it.
        ema: the averaged weights (`ema.EmaState`), or Empty.
        scaler: the loss scale (`scaler.ScalerState`), or Empty.
        accum: the gradients of an open accumulation window, or Empty.
        halted: 0, or the call (from 1) whose update was refused, shape=(), dtype=int64; Empty with
            ``nonfinite="skip"``.
        key: the seed and the number of calls, from which random numbers follow: shape=(2,), dtype=int64, on the CPU.
        placement: how several processes hold this state (`parallel.Placement`), without leaves; Empty for one process.
    """

    step: Tensor
    updates: Tensor
    params: Params
    frozen: Params
    buffers: Params
    opt_state: Tree
    ema: Tree
    scaler: Tree
    accum: Tree
    halted: Tree
    key: Tensor
    placement: Tree = Empty()

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.params.values())
        device = next(iter(self.params.values())).device if self.params else self.step.device
        parts = [
            f"step={_text(self.step)}",
            f"updates={_text(self.updates)}",
            f"params={len(self.params)} ({count:,} numbers)",
            f"frozen={len(self.frozen)}",
            f"buffers={len(self.buffers)}",
        ]
        parts += [name for name in ("ema", "scaler", "accum") if not isinstance(getattr(self, name), Empty)]
        if not isinstance(self.halted, Empty) and _text(self.halted) != _text(torch.zeros_like(self.halted)):
            parts.append(f"HALTED at call {_text(self.halted)}, not finite")
        return f"TrainState({', '.join(parts)}, seed={_text(self.key[..., 0])}, device={device})"


def _text(number: Tensor) -> Any:
    """The number, a list of numbers for stacked states, or "?" inside a transform of `torch.func`."""
    try:
        return number.tolist()
    except RuntimeError:
        return "?"


class Model(Protocol):
    """The first argument of an objective: the module as a pure function of its weights.

    Example:
        >>> def objective(model: Model, batch: Tensor) -> Loss:
        ...     penalty = sum(p.square().sum() for p in model.params.values())
        ...     return Loss(model(batch).mean() + 1e-4 * penalty, torch.tensor(float(len(batch))), {})

    ``model(...)`` calls forward, ``model.call("encode", x)`` another method or a submodule (by its dotted name:
    ``"encoder.layers.0"``). ``model.params`` are the weights by name, ``model.training`` is the mode.
    """

    params: Mapping[str, Tensor]
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward."""
        ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call another method or a submodule, with the same weights."""
        ...


class Objective(Protocol):
    """``objective(model, batch, *context) -> Loss``."""

    def __call__(self, model: Any, batch: Any, /, *context: Any) -> Loss: ...


TrainStep: TypeAlias = Callable[..., tuple[Any, Metrics]]
EvalStep: TypeAlias = Callable[..., Metrics]


class Missed(NamedTuple):
    """For each parameter, the number of updates without a gradient; its count of updates is lower by it."""

    names: dict[str, Empty]  # no leaves
    counts: Tensor  # shape=(n,), dtype=int64: in the order of the sorted names


class Share(NamedTuple):
    """The rows of a batch that one of several processes computes.

    Args:
        rows: a batch of the same structure. A process without rows holds one row of the batch in their place, since a
            model may not run on an empty batch.
        counts: shape=(), dtype=float32: 0 if the row only stands in for an empty share, else 1.
    """

    rows: Any
    counts: Tensor


class Exchange(NamedTuple):
    """The collectives of a step on several processes. Every process makes the same calls in the same order.

    Args:
        reduce: named gradients x weight of this process's examples -> their sum over all processes, in the stored form.
        once: True if an accumulation window is reduced when it closes, False if every call is.
        sums: tensors that are small -> their sums over the processes with other examples; one collective.
        buffers: (buffers before a pass, after it, weight) -> the buffers of all processes; the weight of this process's
            rows is 0-d, and 0 where they do not count.
        total: a sum over the numbers that this process stores, shape=() -> the sum over all numbers.
        norm: `optim.global_norm` of pieces; None where every process holds all numbers.
        update: (tx, gradients, opt_state, params, norm of the gradients) -> the transform's result.
        stream: folded into the seed of a step's draws: which process this is.
        call: (flag of a `Share` or None) -> the context of a forward and backward pass. Its value has ``mixes``, True
            after a forward pass if gradients of several processes mix in the backward pass, so that the loss is
            multiplied by its weight before it; ``is_checked``; and, if one of these is True, ``end_forward(weight)`` is
            called with the weight of the loss.
        watched: buffers before a forward pass -> a function that takes those after it, and checks that they can be
            joined.
    """

    reduce: Callable[[Params], Params]
    once: bool
    sums: Callable[[list[Tensor]], list[Tensor]]
    buffers: Callable[[Params, Params, Tensor], Params]
    total: Callable[[Tensor], Tensor]
    norm: Callable[[Params], Tensor] | None
    update: Callable[[Any, Params, Tree, Params, Tensor], Any]
    stream: tuple[int, ...]
    call: Callable[[Tensor | None], AbstractContextManager[Any]]
    watched: Callable[[Params], Callable[[Params], None]] = lambda before: lambda after: None


class Form(NamedTuple):
    """How a step stores parameter-shaped trees, and what happens to them on the way.

    `step.IDENTITY` is the named tree, `state.packed` a few flat buffers, `parallel` the pieces of one of several
    processes with an ``exchange``, `compile.eager_donation` the memory of the input state. Checks of a run read the
    gradients by ``collect`` (`loop.purity_check`, `loop.nonfinite_steps`).
    """

    expand: Callable[[Params], Params]  # stored -> named, as views
    collect: Callable[[Params], Params]  # named -> stored; named gradients, where an exchange reduces them
    # Names without a gradient -> stored names.
    unreached: Callable[[frozenset[str]], dict[str, str]] = lambda names: {name: name for name in sorted(names)}
    exchange: Exchange | None = None  # None: one process
    shown: Callable[[Params], Params] = lambda params: params  # expanded -> ``model.params`` of an objective
    # An eager step may write into the memory of parameters, optimizer state and average; it calls this before it does.
    before_write: Callable[[], None] | None = None
    frozen: Callable[[Params], Params] = lambda frozen: frozen  # ``state.frozen`` -> as the forward pass reads them


class Steps(NamedTuple):
    """The two functions of a program that return a new state."""

    train_step: TrainStep
    flush: Callable[[Any], tuple[Any, Metrics]]


class Made(NamedTuple):
    """Functions that are made of a program's parts besides its steps."""

    steps: Callable[[Form], Steps]  # the same steps for another form of the state
    statistics: Callable[..., Any] | None = None  # (state, view) -> step.Statistics, for `refresh_batchnorm`
    parts: Any = None  # `step.Parts`: the loss as a function of the parameters, for derivatives
    rewritten: Callable[[Callable[[Any], None]], Program] | None = None  # the program with its modules' copies changed
    # (module or None for the program's own, (name, tensor) -> the part that is kept) -> `init` with its weights
    init_with: Callable[..., Callable[..., Any]] | None = None
    reach: Any = None  # `step.Reach`: the parameters without a gradient, which a flush leaves as they are


class Static(NamedTuple):
    """Constants of a program, for packing, compiling and export."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    ties: dict[str, str]  # alias -> trained name
    persistent: frozenset[str]  # buffers that a state_dict contains
    accumulate: int
    tail: str
    has_ema: bool
    labels: Callable[[Params], Labels] | None  # None: the transform is not elementwise and needs the named tree
    made: Made
    versions: Mapping[str, Any] = MappingProxyType({})  # submodule -> version, from a state_dict's ``_metadata``
    stream: tuple[int, ...] = ()  # as in `Exchange`
    precision: str = "32-true"
    first_share: Callable[[int], float] | None = None  # `ema.Average.first`
    tx: Any = None  # the transform
    module: Any = None  # the weightless module in train mode; not to be changed
    members: int = 0  # of `ensemble`: states are stacked; 0 for a program of one model
    member: Program | None = None  # of `ensemble`: the program of one member
    carry: Mapping[str, Tensor] = MappingProxyType({})  # carried buffer -> its value at the beginning of an epoch


class Carrying(NamedTuple):
    """The eval_step of a program that carries buffers from batch to batch, as its attribute ``carrying``.

    Args:
        step: ``(state, carried, batch, *context, index=0) -> (metrics, carried)``.
        start: the carried buffers at the first batch.
    """

    step: Callable[..., tuple[Metrics, Params]]
    start: Mapping[str, Tensor]


def _same(state: Any) -> Any:
    return state


def _no_flush(state: Any) -> tuple[Any, Metrics]:
    return state, {}


class Program(NamedTuple):
    """A model, an objective and a transform as pure functions. `fit` needs only ``train_step``.

    Example:
        >>> import torch
        >>> def train_step(state, batch):
        ...     return {"w": state["w"] + batch}, {}
        >>> program = Program(train_step)
        >>> program.train_step({"w": torch.zeros(())}, 1)[0]["w"].item()
        1.0

    Args:
        train_step: ``(state, batch, *context) -> (state, metrics)``, where ``metrics["outputs"]`` are `Loss.outputs`.
        flush: ``(state) -> (state, metrics)``: apply an accumulation window that the end of an epoch left open.
        eval_step: ``(state, batch, *context, index=0) -> metrics``; ``index`` numbers the batches.
        init: ``(seed=0, device=None, weights=None) -> state`` with the module's current weights, on the module's device
            unless ``device`` names another. Load pretrained weights into the module before. ``seed`` sets only the key.
            For a module on the meta device ``weights`` is a function of a name that returns the tensor.
        bind: ``(state, view=None, train=False) -> callable``: the module as a function of its inputs, with the
            weights of a state; ``.call("encode", x)`` of it calls another method. ``view`` is "params" or "ema", by
            default "ema" if the state has an average and ``train`` is False.
        static: names, masks and ties, for packing and export.
        begin: ``(state) -> state``: the state at the beginning of an epoch, with the buffers of ``carry=`` as in the
            module. `fit` and `run_epoch` call it; call it in a loop of your own.
    """

    train_step: TrainStep  # (state, batch, *context) -> (state, metrics)
    flush: Callable[[Any], tuple[Any, Metrics]] = _no_flush  # (state) -> (state, metrics)
    eval_step: Any = None  # Any: a program by hand may have None, and users of ps.program need no check
    init: Any = None
    bind: Any = None
    static: Static | None = None
    begin: Callable[[Any], Any] = _same
