"""`program`: build pure steps from a module, an objective and a gradient transformation."""

# pyright: reportUnnecessaryIsInstance=false
# Arguments may be of any type, whatever the annotations say.

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from torch import nn

from .. import ema as ema_
from .. import optim
from .. import precision as precision_
from .. import scaler as scaler_
from ..errors import ConfigError
from ..model import check_uncut, functional, unwrapped, wrappers
from ..optim import arguments
from ..state import at_least, is_number, known_keywords
from ..torch_ext import hidden
from ..types import Empty, Made, Objective, Program, Static
from .batch_copy import untouched
from .differentiable import parts_of
from .gradient import gradients
from .inference import bind_of, eval_step_of
from .init_state import init_of, kept_whole
from .loss_checks import OWN_METRICS
from .sharpness import Sam, checked, gradients_of
from .spec import IDENTITY, Reach, Spec
from .statistics import Statistics
from .train_step import steps_of


@known_keywords
def program(
    model: nn.Module,
    objective: Objective,
    tx: optim.Transform,
    *,
    precision: str | precision_.Policy = "32-true",
    ema: float | ema_.Average | None = None,
    accumulate: Annotated[int, at_least(1)] = 1,
    microbatches: Annotated[int, at_least(1)] = 1,
    tail: Literal["step", "carry", "drop"] = "step",
    engine: Literal["func", "autograd", "auto"] = "auto",
    nonfinite: Literal["raise", "skip"] = "raise",
    keep_eval: tuple[str, ...] = (),
    carry: tuple[str, ...] = (),
    scaler: scaler_.Scaler | None = None,
    values: Mapping[str, arguments.Schedule] | None = None,
    sam: float | Sam | None = None,
) -> Program:
    """Build pure steps from a module, an objective and a gradient transformation.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> state = program.init(seed=0)
        >>> new, metrics = program.train_step(state, (torch.ones(4, 2), torch.ones(4, 1)))
        >>> int(state.step), int(new.step), float(metrics["applied"])
        (0, 1, 1.0)

    Threads of one process may share a program: its steps and the callables of ``bind`` take turns, since they draw from
    torch's global generator and put the weights of their state into one weightless copy of the module.

    Args:
        model: a template, never written; only ``init`` reads its weights. Training runs in train mode, whatever the
            module's mode. Wrappers (`torch.compile`, `DataParallel`, `DistributedDataParallel`) are removed, with one
            UserWarning.
        objective: ``(model, batch, *context) -> Loss``; see `supervised`, `hf_loss`, `masked_reconstruction`. The
            context is the other arguments of train_step, passed on unchanged and never split; `fit` passes none. It may
            read tensors of its closure (a teacher); `compile_step` says which changes a compiled step follows.
        tx: from `purestep.optim`.
        precision: "32-true", "64-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        ema: decay of the averaged weights in [0, 1), an `ema.average(...)` or an `ema.swa(...)`; None disables the
            average. Evaluation, ``bind`` and exports then use the averaged weights by default: see `view`.
        accumulate: number of calls of train_step for one optimizer update, >= 1.
        microbatches: number of parts, >= 1, into which each call splits its batch along the leading dimension: tensors,
            arrays, and lists with one entry for each row (names, tensors of different sizes, a detector's labels with
            one mapping for each image). A list of tensors that all have as many rows as the batch is a list of columns.
            Values without rows go to every part. The objective's weights of the parts weight their gradients.
        tail: ``flush`` applies the window left open at the end of an epoch with its true weight ("step"), carries it
            over ("carry"), or drops it ("drop").
        engine: "func" (`torch.func.grad_and_value`), "autograd" (torch's backward pass, for activation checkpointing
            and autograd Functions of other libraries; `torch.func` can neither map nor differentiate such a step, and
            with activation checkpointing autograd cannot differentiate it either),
            "auto": func in `torch.compile` or a transform of torch.func, else autograd, also in `compile_step`.
            Gradients are the same.
        nonfinite: for a loss or gradient that is not finite, "raise" freezes the state: later calls update nothing, and
            `fit` raises; `TrainState` says how to go on. "skip" skips the update, with ``accumulate`` that of the whole
            window, and `fit` raises after 100 skipped in a row. An infinite update from finite gradients (Adam with
            ``eps=0`` and a gradient of 0) is applied, and detected by the next loss.
        keep_eval: glob patterns of submodules that stay in eval mode.
        carry: glob patterns of buffers that forward writes and that go from batch to batch, such as the hidden state of
            a language model. At the beginning of each epoch and of each evaluation, and in ``bind``, they have the
            values that the module has now. An evaluation carries them from batch to batch and then drops them, so that
            training goes on with its own. A buffer that forward writes in eval mode and that is not carried is said.
        values: schedules of scalars that the objective reads as ``model.values[name]``, shape=(), float32, such as the
            weight of a term or a temperature. They depend on the count of updates in the state, so they never cause a
            recompile and a resumed run continues them; each is also a metric of its name. A value that a callback sets
            belongs in a buffer of the state that it returns.
        sam: sharpness-aware minimization, two gradients per step: a `Sam`, or its ``rho``. None: off.
        scaler: loss scaler; None means `scaler.dynamic()` for "16-mixed" and no scaler otherwise.

    Raises:
        ConfigError: a setting is out of range, or an argument is not a model, objective or transformation.
        StateError: a parameter cannot be trained.
        DataError: from train_step: the batch is on another device than the state, or cannot be split.
        StepContractError: from train_step: the objective does not return a `Loss` with a scalar mean, or the
            transformation does not return an update for each parameter.
    """
    _check_parts(model, objective, tx)
    if scaler is not None and not isinstance(scaler, scaler_.Scaler):
        raise ConfigError(f"the scaler is a {type(scaler).__name__}", where="program", hint="ps.scaler.dynamic(...)")
    for name, given, example in (("keep_eval", keep_eval, "backbone.*"), ("carry", carry, "hidden")):
        if not isinstance(given, str | tuple | list) or not all(isinstance(each, str) for each in given):
            what = f"{name}={given!r} is not a tuple of names"
            raise ConfigError(what, where="program", hint=f'pass {name}=("{example}",)')
    if kinds := wrappers(model):
        warnings.warn(
            f"the model is wrapped by {' and '.join(kinds)}: the step uses the module inside, under its own names "
            "(pass it without the wrapper; ps.fit(..., compile=True) and ps.compile_step compile the whole step)",
            UserWarning,
            stacklevel=3,
        )
    own = getattr(objective, "module", None)
    policy, sharp = precision_.policy(precision), checked(sam, accumulate)

    spec = Spec(
        template=functional.template(model, objective=own, keep_eval=keep_eval),
        objective=untouched(objective),
        tx=tx,
        policy=policy,
        scaler=scaler or (scaler_.dynamic() if policy.scaled else scaler_.none()),
        average=_average(ema),
        accumulate=accumulate,
        microbatches=microbatches,
        tail=tail,
        engine=engine,
        halts=nonfinite == "raise",
        reach=Reach(),
        values=_checked_values(values),
        gradients=gradients if sharp is None else gradients_of(sharp),
        is_sharp=sharp is not None,
        carry=functional.matching_buffers(model, own, carry),
    )
    return _assembled(spec, model, own)


def _assembled(spec: Spec, model: nn.Module, own: nn.Module | None) -> Program:
    def rewritten(change: Callable[[nn.Module], None]) -> Program:
        """The program with changed copies of its modules, and gradients by `torch.autograd`."""
        template = functional.rewritten(spec.template, change)
        return _assembled(spec._replace(template=template, engine="autograd", reach=Reach()), model, own)

    made = Made(
        steps=lambda form: steps_of(spec, form),
        statistics=functools.partial(Statistics, spec),
        parts=parts_of(spec, lambda gradients: _assembled(spec._replace(gradients=gradients), model, own)),
        rewritten=rewritten,
        init_with=lambda module=None, keep=kept_whole: init_of(spec, module or model, own, keep),
        reach=spec.reach,
    )
    static = _static(spec, made, _versions(unwrapped(model)))
    steps = steps_of(spec, IDENTITY)
    for function in steps:  # read by compile_step
        vars(function)["static"] = static
    return Program(
        train_step=steps.train_step,
        flush=steps.flush,
        eval_step=eval_step_of(spec),
        init=init_of(spec, model, own),
        bind=bind_of(spec),
        static=static,
        begin=functools.partial(begun, static),
    )


def begun(static: Static | None, state: Any) -> Any:
    """The state with the carried buffers of a program as at the beginning of an epoch."""
    if static is None or not static.carry:
        return state
    buffers = state.buffers
    start = {name: value.to(buffers[name], copy=True) for name, value in static.carry.items()}
    return state._replace(buffers={**buffers, **start})


def static_of(function: Any) -> Static | None:
    """Return the static description of a program's train_step or flush; None for any other function, also for a
    wrapper that copied its attributes by `functools.wraps`."""
    return None if hasattr(function, "__wrapped__") else getattr(function, "static", None)


def _versions(model: nn.Module) -> dict[str, Any]:
    """Versions of the submodules' state_dict formats, by name, as `load_state_dict` checks them."""
    named = model.named_modules(remove_duplicate=False)
    return {name: hidden.state_dict_version(module) for name, module in named}


def _static(spec: Spec, made: Made, versions: dict[str, Any]) -> Static:
    names = spec.template.names
    return Static(
        trained=names.params,
        frozen=names.frozen,
        ties=names.ties,
        persistent=names.persistent,
        accumulate=spec.accumulate,
        tail=spec.tail,
        has_ema=not isinstance(spec.average.init({}, {}), Empty),
        labels=spec.tx.labels if spec.tx.elementwise else None,
        made=made,
        versions=versions,
        precision=spec.policy.name,
        first_share=spec.average.first,
        tx=spec.tx,
        module=spec.template.train.model,
        carry=spec.carry,
    )


def _check_parts(model: Any, objective: Any, tx: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}", where="program", hint="pass a torch.nn.Module")
    check_uncut(model)
    if isinstance(objective, nn.Module) or not callable(objective):
        raise ConfigError(
            f"the objective is a {type(objective).__name__}",
            where="program",
            hint="pass ps.supervised(criterion), or a function (model, batch) -> ps.Loss",
        )
    if not isinstance(tx, optim.Transform):
        raise ConfigError(
            f"tx is of type {type(tx).__name__}, not a Transform",
            where="program",
            hint="pass ps.optim.adamw(3e-4), or ps.optim.from_torch(torch.optim.AdamW, lr=3e-4)",
        )


def _checked_values(values: Any) -> dict[str, arguments.Schedule]:
    for name, schedule in (values or {}).items():
        if not isinstance(name, str) or name in OWN_METRICS or not callable(schedule):
            raise ConfigError(
                f"values has {name!r}: a {type(schedule).__name__}",
                where="program",
                hint=f'pass values={{"kl": ps.schedules.linear(...)}}, with names other than {sorted(OWN_METRICS)}',
            )
    return dict(values or {})


def _average(ema: float | ema_.Average | None) -> ema_.Average:
    if ema is None:
        return ema_.none()
    if not is_number(ema) and not isinstance(ema, ema_.Average):
        raise ConfigError(f"ema is a {type(ema).__name__}", where="program", hint="pass ema=0.999, or ema.average(...)")
    return ema if isinstance(ema, ema_.Average) else ema_.average(ema)
