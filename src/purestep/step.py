"""Train steps: the order of everything that happens between a batch and the next state.

private copies of buffers -> forward under the precision policy -> mean x scale -> gradients -> accumulate x weight ->
[on the last micro-batch of a window: divide by weight and scale -> finite check -> `tx.update` (clipping is part of it)
-> keep new or old on the finite flag -> EMA -> empty the window] -> counters, scaler.

Everything is decided on the device: nothing here reads a tensor on the host, except the position in an accumulation
window in an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from . import ema as ema_
from . import model as model_
from . import precision as precision_
from . import rng, transform, tree
from .errors import ConfigError, DataError, StateError, StepContractError
from .types import Batch, Empty, Form, Loss, Mean, Metrics, Objective, Params, Program, Static, Steps, TrainState, Tree

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


class _Spec(NamedTuple):
    """A program's parts, resolved."""

    template: model_.Template
    objective: Objective
    tx: transform.Transform
    policy: precision_.Policy
    average: ema_.Average
    accumulate: int
    microbatches: int
    tail: str
    engine: str
    halts: bool


def program(
    model: nn.Module,
    objective: Objective,
    tx: transform.Transform,
    *,
    precision: str | precision_.Policy = "32-true",
    ema: float | ema_.Average | None = None,
    accumulate: int = 1,
    microbatches: int = 1,
    tail: Literal["step", "carry", "drop"] = "step",
    engine: Literal["func", "autograd", "auto"] = "auto",
    nonfinite: Literal["raise", "skip"] = "raise",
    keep_eval: tuple[str, ...] = (),
) -> Program:
    """Pure steps from a module, an objective and a gradient transformation.

    Args:
        model: a template: never written to, its weights are read by ``init`` only. Training runs in train mode
            whatever mode it is in.
        objective: ``(model, batch, *context) -> Loss``; see `supervised`, `hf_loss`, `masked_reconstruction`.
        tx: from `purestep.optim`.
        precision: "32-true", "64-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        ema: decay of the averaged weights in [0, 1), or an `ema.average(...)`; None for none.
        accumulate: micro-batches (calls of train_step) to an optimizer update, >= 1.
        microbatches: parts that each batch is split into inside one call, along the leading dimension, >= 1.
        tail: what ``flush`` does with a window left open at the end of an epoch: apply it with its true weight, carry
            it over, or drop it.
        engine: "func" (`torch.func.grad_and_value`), "autograd" (`torch.autograd.grad`, for activation checkpointing
            and foreign autograd Functions), "auto": func inside a graph, autograd in eager. Gradients are the same.
        nonfinite: what a loss or gradient that is not finite does: "raise" freezes the state until the host has
            looked (`fit` raises), "skip" goes on without that update.
        keep_eval: glob patterns of submodules that stay in eval mode.

    Raises:
        ConfigError: a setting out of range.
        StateError: parameters that cannot be trained.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> state = program.init(seed=0)
        >>> new, metrics = program.train_step(state, (torch.ones(4, 2), torch.ones(4, 1)))
        >>> int(state.step), int(new.step), float(metrics["applied"])
        (0, 1, 1.0)
    """
    _check_choices(accumulate=accumulate, microbatches=microbatches, tail=tail, engine=engine, nonfinite=nonfinite)
    own = getattr(objective, "module", None)
    spec = _Spec(
        template=model_.template(model, objective=own, keep_eval=keep_eval),
        objective=objective,
        tx=tx,
        policy=precision_.policy(precision),
        average=_average(ema),
        accumulate=accumulate,
        microbatches=microbatches,
        tail=tail,
        engine=engine,
        halts=nonfinite == "raise",
    )
    names = spec.template.names
    static = Static(
        trained=names.params,
        frozen=names.frozen,
        ties=names.ties,
        persistent=names.persistent,
        accumulate=accumulate,
        tail=tail,
        has_ema=ema is not None,
        labels=tx.labels if tx.elementwise else None,
        steps=lambda form: _steps(spec, form),
    )
    steps = _steps(spec, IDENTITY)
    # How compile_step, given the bare function, finds what it may pack.
    steps.train_step.static = static  # pyright: ignore[reportFunctionMemberAccess]  # an attribute of our own function
    return Program(
        train_step=steps.train_step,
        flush=steps.flush,
        eval_step=_eval_step(spec),
        init=_init(spec, model, own),
        bind=_bind(spec),
        static=static,
    )


def _check_choices(*, accumulate: int, microbatches: int, tail: str, engine: str, nonfinite: str) -> None:
    for name, value in (("accumulate", accumulate), ("microbatches", microbatches)):
        if value < 1:
            raise ConfigError(f"{name} is {value}", where="program", hint=f"{name}=1, or more")
    for name, value, known in (
        ("tail", tail, ("step", "carry", "drop")),
        ("engine", engine, ("func", "autograd", "auto")),
        ("nonfinite", nonfinite, ("raise", "skip")),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}", where="program", hint=f"one of {known}")


def _average(ema: float | ema_.Average | None) -> ema_.Average:
    if ema is None:
        return ema_.none()
    return ema if isinstance(ema, ema_.Average) else ema_.average(ema)


# --- the state --------------------------------------------------------------------------------------------------------


def _init(spec: _Spec, module: nn.Module, own: nn.Module | None) -> Callable[..., TrainState]:
    def init(seed: int = 0, device: torch.device | str | None = None) -> TrainState:
        """The state before the first step: the module's weights as they are now, on ``device``.

        Args:
            seed: of dropout and data order; the weights do not depend on it.
            device: None takes the module's, or the best one there is if that is the CPU.

        Raises:
            ConfigError: the device cannot compute in the program's precision.
        """
        target = _target(module, device)
        precision_.check(spec.policy, target)
        params, frozen, buffers = (
            _place(named, target, spec.policy.weights) for named in model_.tensors(module, objective=own)
        )
        return TrainState(
            step=_count(target),
            updates=_count(target),
            params=params,
            frozen=frozen,
            buffers=buffers,
            opt_state=spec.tx.init(params),
            ema=spec.average.init(params, buffers),
            scaler=spec.policy.scaler.init(target),
            accum=_open_window(spec, params, target),
            halted=_count(target) if spec.halts else Empty(),
            key=rng.key(seed),
        )

    return init


def _target(module: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = {parameter.device for parameter in module.parameters()}
    if len(found) > 1:
        raise StateError(
            f"parameters are on several devices: {sorted(map(str, found))}",
            where=type(module).__name__,
            hint='program.init(device="cuda")',
        )
    here = found.pop()
    return precision_.auto_device() if here.type in ("cpu", "meta") else here


def _place(named: Params, device: torch.device, dtype: torch.dtype | None) -> Params:
    def leaf(name: str, value: Tensor) -> Tensor:
        if value.device.type == "meta":
            raise StateError("is on the meta device and has no values", where=name, hint="load weights before init")
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        # A copy in any case: the module stays the user's. Dense layouts (channels_last) are kept.
        return value.to(device=device, dtype=wanted, copy=True)

    return {name: leaf(name, value) for name, value in named.items()}


def _count(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _open_window(spec: _Spec, params: Params, device: torch.device) -> Tree:
    if spec.accumulate == 1:
        return Empty()
    grads = {name: torch.zeros_like(p, dtype=_wide(p.dtype)) for name, p in params.items()}
    left = torch.full((), spec.accumulate, dtype=torch.int64, device=device)
    return Accum(left, torch.zeros((), dtype=torch.float32, device=device), grads)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


# --- gradients --------------------------------------------------------------------------------------------------------


def _forward(spec: _Spec, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Callable[[Params], Any]:
    """``named params -> (mean x scale, (loss, buffers))``, to be differentiated."""
    device = state.step.device
    scale = spec.policy.scaler.scale(state.scaler)

    def forward(named: Params) -> tuple[Tensor, tuple[Loss, Params]]:
        bound = model_.bind(spec.template, named, state.frozen, state.buffers, train=True)
        with precision_.autocast(spec.policy, device):
            loss = check_loss(spec.objective(bound, precision_.cast(spec.policy, batch), *context), device)
        _check_connected(loss.mean)
        scaled = loss.mean if scale is None else loss.mean * scale
        return scaled, (tree.detach(loss), tree.detach(bound.buffers))

    return forward


def check_loss(loss: Any, device: torch.device) -> Loss:
    """The objective's result with its mean at least float32 and its weight a 0-d float32 tensor on the device.

    Raises:
        StepContractError: no Loss, or a mean that is no floating scalar.
    """
    cure = "return ps.Loss(mean, weight, metrics), or use ps.supervised"
    if not isinstance(loss, Loss):
        raise StepContractError(f"returned a {type(loss).__name__}, not a Loss", where="objective", hint=cure)
    mean: Any = loss.mean
    if not isinstance(mean, Tensor):
        raise StepContractError(f"the loss is a {type(mean).__name__}, not a tensor", where="objective", hint=cure)
    if mean.dim() != 0 or not mean.is_floating_point():
        raise StepContractError(
            f"the loss has shape {list(mean.shape)} and dtype {mean.dtype}; a floating scalar is needed",
            where="objective",
            hint='reduction="mean", or loss.mean() (loss.real for a complex one)',
        )
    if mean.device != device:
        raise StepContractError(
            f"the loss is on {mean.device}, the state on {device}",
            where="objective",
            hint="batch = ps.to_device(batch, state)",
        )
    weight = loss.weight if isinstance(loss.weight, Tensor) else torch.full((), loss.weight, device=device)
    return Loss(mean.to(_wide(mean.dtype)), weight.to(device=device, dtype=torch.float32), loss.metrics)


def _check_connected(mean: Tensor) -> None:
    # torch.func.grad of a detached loss returns zeros without a word. Dynamo cannot ask, so fit asks before compiling.
    if not torch.compiler.is_compiling() and not mean.requires_grad:
        raise StepContractError(
            "the loss does not depend on the parameters: every gradient would be zero",
            where="objective",
            hint="take out .detach(), .item() or torch.no_grad() between model(...) and the loss",
        )


def _value_and_grad(spec: _Spec, forward: Callable[[Params], Any], named: Params) -> tuple[Params, Any]:
    engine = spec.engine
    if engine == "auto":
        engine = "func" if torch.compiler.is_compiling() else "autograd"
    if engine == "func":
        grads, (_, extra) = torch.func.grad_and_value(forward, has_aux=True)(named)
        return grads, extra
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in named.items()}
        scaled, extra = forward(leaves)
        found = torch.autograd.grad(scaled, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), extra


def _micro(spec: _Spec, form: Form, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Micro:
    """One forward and backward pass."""
    forward = _forward(spec, state, batch, context)
    grads, (loss, buffers) = _value_and_grad(spec, forward, form.expand(state.params))
    metrics = {name: _finite_mean(mean.total, mean.weight) for name, mean in loss.metrics.items()}
    metrics["loss"] = _finite_mean(loss.mean.float() * loss.weight, loss.weight)
    return Micro(form.collect(grads), loss.mean, loss.weight, buffers, metrics)


def _finite_mean(total: Tensor, weight: Tensor) -> Mean:
    # A nan must not poison the mean of an epoch: what is not finite, or counts nothing, is left out on both sides.
    counted = torch.isfinite(total) & (weight > 0)
    zero = torch.zeros_like(total, dtype=torch.float32)
    return Mean(torch.where(counted, total.float(), zero), torch.where(counted, weight.float(), zero))


def _split_micro(spec: _Spec, form: Form, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Micro:
    """The batch in ``microbatches`` parts, their gradients summed by weight, as one."""
    if spec.microbatches == 1:
        return _micro(spec, form, state, batch, context)
    total = None
    for part in _parts(batch, spec.microbatches):
        micro = _micro(spec, form, state, part, context)
        state = state._replace(buffers=micro.buffers)
        weighted = tree.map(lambda g, w=micro.weight: _times(g.to(_wide(g.dtype)), w), micro.grads)
        summed = Micro(weighted, micro.mean * micro.weight, micro.weight, micro.buffers, micro.metrics)
        total = summed if total is None else _add(total, summed)
    assert total is not None
    divisor = total.weight.clamp(min=torch.finfo(torch.float32).tiny)
    grads = {
        name: torch.where(total.weight > 0, g / divisor, g).to(state.params[name].dtype)
        for name, g in total.grads.items()
    }
    return total._replace(grads=grads, mean=torch.where(total.weight > 0, total.mean / divisor, total.mean))


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    leaves, treedef = tree.flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or min(sizes) < count:
        raise DataError(
            f"leading dimensions are {sorted(sizes)}; {count} micro-batches need one common size of at least {count}",
            where="batch",
            hint="pass what must not be split as context, or microbatches=1",
        )
    split = [leaf.tensor_split(count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count for leaf in leaves]
    for index in range(count):
        yield tree.unflatten(treedef, [part[index] for part in split])


def _times(grad: Tensor, weight: Tensor) -> Tensor:
    # A batch without anything to count has a loss of 0/0, and nan x 0 would be nan.
    return torch.where(weight > 0, grad * weight.to(grad.dtype), torch.zeros_like(grad))


def _add(left: Micro, right: Micro) -> Micro:
    metrics = {
        name: Mean(mean.total + right.metrics[name].total, mean.weight + right.metrics[name].weight)
        for name, mean in left.metrics.items()
    }
    grads = {name: grad + right.grads[name] for name, grad in left.grads.items()}
    return Micro(grads, left.mean + right.mean, left.weight + right.weight, right.buffers, metrics)


# --- the steps --------------------------------------------------------------------------------------------------------


def _steps(spec: _Spec, form: Form) -> Steps:
    def train_step(state: TrainState, batch: Batch, *context: Any) -> tuple[TrainState, Metrics]:
        """``(state, batch, *context) -> (state, metrics)``; the state that goes in stays what it is."""
        with _drawing(state):
            micro = _split_micro(spec, form, state, batch, context)
        if isinstance(state.accum, Empty):
            new, metrics = _apply(spec, state, micro.grads, micro.weight, _verdict(micro), micro.buffers)
            new = new._replace(buffers=_kept_buffers(state, micro, metrics["finite"].total > 0))
            del metrics["finite"]
        else:
            new, metrics = _accumulate(spec, state, micro)
        return _count_call(state, new), {**micro.metrics, **metrics}

    def flush(state: TrainState) -> tuple[TrainState, Metrics]:
        """Close a window that is still open, as the program's ``tail`` says."""
        if isinstance(state.accum, Empty) or spec.tail == "carry":
            return state, {}
        accum = cast(Accum, state.accum)
        weight = accum.weight if spec.tail == "step" else torch.zeros_like(accum.weight)
        new, metrics = _close(spec, state, accum._replace(weight=weight))
        return _count_call(state, new), metrics

    return Steps(train_step, flush)


@contextmanager
def _drawing(state: TrainState) -> Iterator[None]:
    """Random numbers of this call, unless the host has seeded for a whole graph."""
    if rng.in_graph():
        yield
        return
    with rng.scoped(rng.mix(*state.key.tolist(), "step"), state.step.device):
        yield


def _verdict(micro: Micro) -> Tensor:
    """The weight, nan where the loss is not finite: it carries the verdict on every loss of a window to its end."""
    bad = ~torch.isfinite(micro.mean) & (micro.weight != 0)
    return torch.where(bad, torch.full_like(micro.weight, torch.nan), micro.weight)


def _kept_buffers(state: TrainState, micro: Micro, finite: Tensor) -> Params:
    return {name: torch.where(finite, new, state.buffers[name]) for name, new in micro.buffers.items()}


def _accumulate(spec: _Spec, state: TrainState, micro: Micro) -> tuple[TrainState, Metrics]:
    """Add to the window, and close it when this was its last micro-batch."""
    old = cast(Accum, state.accum)
    grads = {name: total + _times(micro.grads[name].to(total.dtype), micro.weight) for name, total in old.grads.items()}
    accum = Accum(old.left - 1, old.weight + _verdict(micro), grads)
    state = _with_buffers(state, micro)
    if isinstance(old, Adding):
        return _keep_open(state, accum)
    if isinstance(old, Closing):
        return _close(spec, state, accum)
    if not rng.in_graph():
        return _close(spec, state, accum) if int(old.left) == 1 else _keep_open(state, accum)
    # Nobody outside this graph could tell where the window stands: compute both, keep one.
    (opened, open_metrics), (closed, close_metrics) = _keep_open(state, accum), _close(spec, state, accum)
    last = old.left == 1
    return tree.where(last, closed, opened), tree.where(last, close_metrics, open_metrics)


def _with_buffers(state: TrainState, micro: Micro) -> TrainState:
    """The state with this micro-batch's buffers, unless it is not finite: then they are rolled back."""
    if not micro.buffers:
        return state
    finite = torch.isfinite(transform.global_norm(micro.grads)) & torch.isfinite(micro.mean) & ~_halted(state)
    return state._replace(buffers=_kept_buffers(state, micro, finite))


def _keep_open(state: TrainState, accum: Accum) -> tuple[TrainState, Metrics]:
    zero = torch.zeros((), dtype=torch.float32, device=state.step.device)
    frozen = _halted(state)
    kept = Accum(*(tree.where(frozen, old, new) for old, new in zip(cast(Accum, state.accum), accum, strict=True)))
    metrics = {"lr": Mean(zero, zero), "grad_norm": Mean(zero, zero), "applied": Mean(zero, torch.ones_like(zero))}
    metrics |= {name: Mean(zero, zero) for name in _group_rates(state.opt_state)}
    if not isinstance(state.scaler, Empty):
        metrics["scale"] = Mean(state.scaler.scale, torch.ones_like(zero))
    return state._replace(accum=kept), metrics


def _close(spec: _Spec, state: TrainState, accum: Accum) -> tuple[TrainState, Metrics]:
    """Divide the window by its weight, apply it and empty it."""
    divisor = torch.where(accum.weight > 0, accum.weight, torch.ones_like(accum.weight))
    grads = {name: (g / divisor.to(g.dtype)).to(state.params[name].dtype) for name, g in accum.grads.items()}
    counted = torch.where(torch.isnan(accum.weight), torch.ones_like(accum.weight), accum.weight)
    new, metrics = _apply(spec, state, grads, counted, accum.weight, state.buffers)
    del metrics["finite"]
    left = torch.full_like(accum.left, spec.accumulate)
    empty = Accum(left, torch.zeros_like(accum.weight), tree.map(torch.zeros_like, accum.grads))
    old = cast(Accum, state.accum)
    frozen = _halted(state)
    return new._replace(accum=Accum(*(tree.where(frozen, o, e) for o, e in zip(old, empty, strict=True)))), metrics


def _apply(
    spec: _Spec, state: TrainState, grads: Params, weight: Tensor, verdict: Tensor, buffers: Params
) -> tuple[TrainState, Metrics]:
    """The optimizer update of one window, kept or refused as a whole.

    Args:
        grads: stored form, mean gradient x scale.
        weight: shape=(); 0 where there was nothing to learn from.
        verdict: shape=(); nan where a loss was not finite.
        buffers: as the forward pass left them, for an average of them.
    """
    scale = spec.policy.scaler.scale(state.scaler)
    if scale is not None:
        inverse = scale.reciprocal()
        grads = {name: g * inverse.to(g.dtype) for name, g in grads.items()}
    norm = transform.global_norm(grads)
    nothing = weight == 0
    finite = (torch.isfinite(norm) & torch.isfinite(verdict)) | nothing
    halted = _halted(state)
    applied = finite & ~nothing & ~halted
    deltas, opt_state = spec.tx.update(grads, state.opt_state, state.params)
    params = transform.apply_updates(state.params, deltas)
    average = spec.average.update(state.ema, params, buffers, state.updates)
    kept = tree.where(applied, (params, opt_state, average), (state.params, state.opt_state, state.ema))
    attempted = ~nothing & ~halted
    scaler = tree.where(attempted, spec.policy.scaler.update(state.scaler, finite), state.scaler)
    new = state._replace(
        updates=state.updates + applied,
        params=kept[0],
        opt_state=kept[1],
        ema=kept[2],
        scaler=scaler,
        halted=_halt(spec, state, finite, scaler),
    )
    return new, _update_metrics(state, opt_state, norm, applied, finite & ~halted)


def _halted(state: TrainState) -> Tensor:
    if isinstance(state.halted, Empty):
        return torch.zeros((), dtype=torch.bool, device=state.step.device)
    return state.halted != 0


def _halt(spec: _Spec, state: TrainState, finite: Tensor, scaler: Tree) -> Tree:
    if isinstance(state.halted, Empty):
        return state.halted
    stops = spec.policy.scaler.exhausted(scaler, finite) & (state.halted == 0)
    return torch.where(stops, state.step + 1, state.halted)


def _update_metrics(state: TrainState, opt_state: Tree, norm: Tensor, applied: Tensor, finite: Tensor) -> Metrics:
    one = torch.ones((), dtype=torch.float32, device=state.step.device)
    counted = applied.float()
    metrics = {
        "lr": Mean(_first_rate(opt_state, one) * counted, counted),
        "grad_norm": _finite_mean(torch.where(applied, norm, torch.zeros_like(norm)), counted),
        "applied": Mean(counted, one),
        "finite": Mean(finite.float(), one),
    }
    metrics |= {name: Mean(rate * counted, counted) for name, rate in _group_rates(opt_state).items()}
    if not isinstance(state.scaler, Empty):
        metrics["scale"] = Mean(state.scaler.scale, one)  # the scale this update was made with
    return metrics


def _first_rate(opt_state: Tree, like: Tensor) -> Tensor:
    rates = transform.hyperparams(opt_state)
    found = [rate for name, rate in rates.items() if name.rpartition("/")[2] == "learning_rate"]
    return found[0].float() if found else torch.full_like(like, torch.nan)


def _group_rates(opt_state: Tree) -> dict[str, Tensor]:
    """``lr/<group>`` of every parameter group, where there are several."""
    rates = transform.hyperparams(opt_state)
    found = {name: rate for name, rate in rates.items() if name.endswith("/learning_rate")}
    if len(found) < 2:
        return {}
    return {f"lr/{name.rpartition('/')[0]}": rate.float() for name, rate in found.items()}


def _count_call(old: TrainState, new: TrainState) -> TrainState:
    step = torch.where(_halted(old), old.step, old.step + 1)
    return new._replace(step=step, key=old.key if rng.in_graph() else rng.advance(old.key))


# --- evaluation -------------------------------------------------------------------------------------------------------


def _eval_step(spec: _Spec) -> Callable[..., Metrics]:
    def eval_step(state: TrainState, batch: Batch, *context: Any, index: int = 0) -> Metrics:
        """``(state, batch, *context, index=0) -> metrics`` in eval mode; what it draws depends on seed and index alone,
        so that evaluating twice gives the same numbers and moves nothing."""
        with torch.no_grad(), _evaluating(state, index):
            bound = model_.bind(spec.template, state.params, state.frozen, state.buffers, train=False)
            with precision_.autocast(spec.policy, state.step.device):
                found = spec.objective(bound, precision_.cast(spec.policy, batch), *context)
            loss = check_loss(found, state.step.device)
        weight = torch.where(loss.weight > 0, loss.weight, torch.zeros_like(loss.weight))
        total = torch.where(loss.weight > 0, loss.mean.float() * weight, torch.zeros_like(weight))
        return {**tree.detach(loss.metrics), "loss": Mean(total, weight)}

    return eval_step


@contextmanager
def _evaluating(state: TrainState, index: int) -> Iterator[None]:
    if rng.in_graph():
        yield
        return
    with rng.scoped(rng.mix(int(state.key[0]), "eval", index), state.step.device):
        yield


def _bind(spec: _Spec) -> Callable[..., Callable[..., Any]]:
    def bind(state: TrainState, view: str = "params", train: bool = False) -> Callable[..., Any]:
        """A plain callable with these weights, in the program's precision.

        Args:
            state: of this program.
            view: "params" or "ema".
            train: run in train mode, with gradients; else in eval mode without.
        """
        chosen = ema_.view(state, view)

        def predict(*args: Any, **kwargs: Any) -> Any:
            bound = model_.bind(spec.template, chosen.params, chosen.frozen, chosen.buffers, train=train)
            args, kwargs = precision_.cast(spec.policy, (args, kwargs))
            with torch.set_grad_enabled(train), precision_.autocast(spec.policy, chosen.step.device):
                return bound(*args, **kwargs)

        return predict

    return bind
