"""`program`: a module, an objective and a transformation made into pure steps."""

# pyright: reportUnnecessaryIsInstance=false
# What is handed in here may be anything, whatever the annotations say.

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from .. import ema as ema_
from .. import optim
from .. import precision as precision_
from .. import scaler as scaler_
from ..errors import ConfigError
from ..model import functional as model_
from ..optim import numerics
from ..pickling import recipe
from ..types import Empty, Objective, Program, Static
from ..validation import is_count, is_number
from .batch_copy import untouched
from .gradient import OWN_METRICS
from .inference import bind_of, eval_step_of
from .init_state import init_of
from .spec import IDENTITY, Reach, Spec
from .update import steps_of


@recipe
def program(
    model: nn.Module,
    objective: Objective,
    tx: optim.Transform,
    *,
    precision: str | precision_.Policy = "32-true",
    ema: float | ema_.Average | None = None,
    accumulate: int = 1,
    microbatches: int = 1,
    tail: Literal["step", "carry", "drop"] = "step",
    engine: Literal["func", "autograd", "auto"] = "auto",
    nonfinite: Literal["raise", "skip"] = "raise",
    keep_eval: tuple[str, ...] = (),
    scaler: scaler_.Scaler | None = None,
    values: Mapping[str, numerics.Schedule] | None = None,
) -> Program:
    """Pure steps from a module, an objective and a gradient transformation.

    Threads of one process may share a program: its steps take turns, since they draw from torch's one generator and put
    the weights of their state into one hollow copy of the module. What ``bind`` returns is for one thread at a time.

    `pickle` stores a program as this call: the module with its weights as they are then, and the other arguments.
    Unpickling makes the program again, in another process too. Functions and classes among the arguments are stored by
    their names, so a lambda or a local function raises a ConfigError there. A pickle is for another process; to
    keep a state, use `Snapshots`.

    Args:
        model: a template: never written to, its weights are read by ``init`` only. Training runs in train mode
            whatever mode it is in.
        objective: ``(model, batch, *context) -> Loss``; see `supervised`, `hf_loss`, `masked_reconstruction`. Context
            is what else train_step is called with, handed on as it is and not split; `fit` gives none.
        tx: from `purestep.optim`.
        precision: "32-true", "64-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        ema: decay of the averaged weights in [0, 1), or an `ema.average(...)`; None for none.
        accumulate: micro-batches (calls of train_step) to an optimizer update, >= 1.
        microbatches: parts that each batch is split into inside one call, along the leading dimension, >= 1: tensors,
            arrays, and lists of one entry a row: names, tensors of different sizes, or a detector's labels, one mapping
            a picture. A list of tensors that all have as many rows as the batch is a list of columns. What has no rows
            goes to every part. The weights of the parts are what the objective counts in each.
        tail: what ``flush`` does with a window left open at the end of an epoch: apply it with its true weight, carry
            it over, or drop it.
        engine: "func" (`torch.func.grad_and_value`), "autograd" (`torch.autograd.grad`, for activation checkpointing
            and foreign autograd Functions; `torch.func` can neither map nor differentiate such a step), "auto": func
            inside a graph or a transform, else autograd. Gradients are the same.
        nonfinite: what a loss or gradient that is not finite does: "raise" freezes the state until the host has
            looked (`fit` raises), "skip" goes on without that update (`fit` raises once 100 in a row were refused). An
            update that finite gradients make infinite (Adam's with ``eps=0`` where one is 0) is applied, and found by
            the loss after it.
        keep_eval: glob patterns of submodules that stay in eval mode.
        values: schedules of scalars that the objective reads as ``model.values[name]``, shape=(), float32: the weight
            of a term, a temperature. They follow the count of updates in the state, so a compiled step has them
            without compiling again and a resumed run goes on with them; each is a metric of its name. What a callback
            decides instead belongs into a buffer, in the state that it returns.
        scaler: of the loss; None: `scaler.dynamic()` for "16-mixed", none for the others.

    Raises:
        ConfigError: a setting out of range, or what is no model, objective or transformation.
        StateError: parameters that cannot be trained.
        DataError: from train_step: a batch on another device than the state, or that cannot be split.
        StepContractError: from train_step: the objective returns no `Loss` of a scalar, or the transformation no
            updates of the parameters.

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
    _check_parts(model, objective, tx)
    if scaler is not None and not isinstance(scaler, scaler_.Scaler):
        raise ConfigError(f"the scaler is a {type(scaler).__name__}", where="program", hint="ps.scaler.dynamic(...)")
    if not isinstance(keep_eval, str | tuple | list) or not all(isinstance(name, str) for name in keep_eval):
        raise ConfigError(f"keep_eval is {keep_eval!r}", where="program", hint='keep_eval=("backbone.*",)')
    own = getattr(objective, "module", None)
    policy = precision_.policy(precision)
    from .. import host_generators  # which loads numpy.random

    spec = Spec(
        template=model_.template(model, objective=own, keep_eval=keep_eval),
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
        host=host_generators.Host(),
        values=_checked_values(values),
    )
    static = _static(spec, _versions(model))
    steps = steps_of(spec, IDENTITY)
    for function in steps:  # how compile_step, given the bare function, finds what it may pack
        vars(function)["static"] = static
    return Program(
        train_step=steps.train_step,
        flush=steps.flush,
        eval_step=eval_step_of(spec),
        init=init_of(spec, model, own),
        bind=bind_of(spec),
        static=static,
    )


def static_of(function: Any) -> Static | None:
    """What is known of a program's own train_step or flush; nothing of one that somebody has wrapped, which does
    something else (`functools.wraps` hands on its attributes)."""
    return None if hasattr(function, "__wrapped__") else getattr(function, "static", None)


def _versions(model: nn.Module) -> dict[str, Any]:
    """The format that each submodule saves itself in, by its name: what `load_state_dict` asks for."""
    named = model.named_modules(remove_duplicate=False)
    return {name: getattr(module, "_version", None) for name, module in named}


def _static(spec: Spec, versions: dict[str, Any]) -> Static:
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
        steps=lambda form: steps_of(spec, form),
        versions=versions,
        check=functools.partial(precision_.check, spec.policy),
    )


def _check_parts(model: Any, objective: Any, tx: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}", where="program", hint="a torch.nn.Module")
    if isinstance(objective, nn.Module) or not callable(objective):
        raise ConfigError(
            f"the objective is a {type(objective).__name__}",
            where="program",
            hint="ps.supervised(criterion), or a function (model, batch) -> ps.Loss",
        )
    if not isinstance(tx, optim.Transform):
        raise ConfigError(
            f"the transformation is a {type(tx).__name__}",
            where="program",
            hint="ps.optim.adamw(3e-4), or ps.optim.from_torch(torch.optim.AdamW, lr=3e-4)",
        )


def _check_choices(*, accumulate: int, microbatches: int, tail: str, engine: str, nonfinite: str) -> None:
    for name, value in (("accumulate", accumulate), ("microbatches", microbatches)):
        if not is_count(value, 1):
            raise ConfigError(f"{name} is {value!r}", where="program", hint=f"{name}=1, or more")
    for name, value, known in (
        ("tail", tail, ("step", "carry", "drop")),
        ("engine", engine, ("func", "autograd", "auto")),
        ("nonfinite", nonfinite, ("raise", "skip")),
    ):
        if not isinstance(value, str) or value not in known:
            raise ConfigError(f"{name} is {value!r}", where="program", hint=f"one of {known}")


def _checked_values(values: Any) -> dict[str, numerics.Schedule]:
    for name, schedule in (values or {}).items():
        if not isinstance(name, str) or name in OWN_METRICS or not callable(schedule):
            raise ConfigError(
                f"values has {name!r}: a {type(schedule).__name__}",
                where="program",
                hint=f'values={{"kl": ps.schedules.linear(...)}}, under another name than {sorted(OWN_METRICS)}',
            )
    return dict(values or {})


def _average(ema: float | ema_.Average | None) -> ema_.Average:
    if ema is None:
        return ema_.none()
    if not is_number(ema) and not isinstance(ema, ema_.Average):
        raise ConfigError(f"ema is a {type(ema).__name__}", where="program", hint="ema=0.999, or ema.average(...)")
    return ema if isinstance(ema, ema_.Average) else ema_.average(ema)
