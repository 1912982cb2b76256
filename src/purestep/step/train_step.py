"""``train_step`` and ``flush``: from a batch to the next state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import ConfigError, DataError, StateError, StepContractError
from ..metrics import handed_out
from ..optim import unused_parameters
from ..state import stacked
from ..torch_ext import tracing
from ..types import Batch, Empty, Form, Metrics, Params, Steps, TrainState
from . import exchange
from .accumulation import accumulate, close
from .gradient import kept_buffers
from .loss_checks import lacks_gradient, like_loss
from .random_draws import drawn_in_step
from .spec import Accum, Micro, Spec, sum_is_divided
from .update import apply, weight_or_nan


def steps_of(spec: Spec, form: Form) -> Steps:
    """Build a program's ``train_step`` and ``flush`` for one form of its state.

    Raises:
        ConfigError: the objective is a sum, and a step has several parts of a batch; the transform evaluates the loss
            again, and the loss is not that of one call.
    """
    _check_divisible(spec, form)
    _check_evaluable(spec, form)

    def train_step(state: TrainState, batch: Batch, *context: Any) -> tuple[TrainState, Metrics]:
        """``(state, batch, *context) -> (state, metrics)``; the input state does not change.

        Autograd follows the state, the context, learning rates and scheduled values, so that a loss of the new state
        has derivatives by them. A batch is data, also where it requires a gradient (the loss may differentiate by its
        inputs): for derivatives by a batch take `torch.func.grad`.

        It does not wait for the device. With ``accumulate``, `fit`, `run_epoch` and compiled steps count the window's
        position on the host. Any other eager call on a GPU computes both results, for adding and for closing, and
        selects one: about 1.5 times the launches of a step without accumulation.
        """
        if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]  # may be of any type
            raise _no_state(state)
        stacked.check_plain(state, where="train_step", pieces=form.exchange is not None)

        def call(state: TrainState) -> Micro:
            return _drawing(spec, form, state, batch, lambda: spec.gradients(spec, form, state, batch, context))

        def value_and_grad(params: Params) -> tuple[Tensor, Params]:
            found = micro if params is state.params else call(state._replace(params=params))
            return found.mean, found.grads

        _check_evaluates(spec)
        micro = call(state)
        if isinstance(state.accum, Empty):
            micro, verdict, skipped = _whole(spec, form, state, micro)
            new, metrics, counted = apply(
                spec, form, state, micro.grads, micro.weight, verdict, micro.buffers, skipped, value_and_grad
            )
            if micro.buffers:
                if spec.tx.evaluates:  # those of a pass at the accepted parameters, however many were tried
                    micro = micro._replace(buffers=call(state._replace(params=new.params)).buffers)
                new = new._replace(buffers=kept_buffers(state.buffers, micro, counted))
        else:
            new, micro, metrics = accumulate(spec, form, state, micro)
        metrics = like_loss(_joined(micro.metrics, metrics), micro.mean)
        return _count_call(state, new), handed_out.with_outputs(metrics, micro.outputs)

    def flush(state: TrainState) -> tuple[TrainState, Metrics]:
        """Close an open window according to the program's ``tail``."""
        stacked.check_plain(state, where="flush", pieces=form.exchange is not None)
        if isinstance(state.accum, Empty) or spec.tail == "carry":
            return state, {}
        accum = cast(Accum, state.accum)
        weight = accum.weight if spec.tail == "step" else torch.zeros_like(accum.weight)
        new, metrics = close(spec, form, state, accum._replace(weight=weight), spec.reach.ever)
        return _count_call(state, new), like_loss(metrics, metrics["grad_norm"].total)

    return Steps(train_step, flush)


def _check_divisible(spec: Spec, form: Form) -> None:
    if not spec.is_sum:
        return
    counts = {"accumulate": spec.accumulate, "microbatches": spec.microbatches}
    parts = [f"{name}={count}" for name, count in counts.items() if count > 1]
    parts += [] if form.exchange is None else ["several processes"]
    if parts:
        how = f"the program has {' and '.join(parts)}: steps would follow means of sums"
        raise sum_is_divided(how, where="program")


def _check_evaluable(spec: Spec, form: Form) -> None:
    """Check that the loss of a call is a function of the parameters, if the transform evaluates it again."""
    if not spec.tx.evaluates:
        return
    several = {
        "accumulate=": spec.accumulate > 1,
        "sam=": spec.is_sharp,
        "a loss scaler": spec.is_scaled,
        "several processes": form.exchange is not None,
    }
    for what, is_there in several.items():
        if is_there:
            raise ConfigError(
                f"the transform evaluates the loss of a call again, which it cannot do with {what}",
                where="program",
                hint='use microbatches= and the whole batch in one call, sam=None, precision="bf16-mixed" and no '
                "scaler, one process; or optim.adamw(1e-3)",
            )


def _check_evaluates(spec: Spec) -> None:
    if spec.tx.evaluates and (tracing.in_graph() or tracing.transformed()):
        raise StepContractError(
            "the transform evaluates the loss as often as its values say: there is no graph of it, and no torch.func "
            "transform",
            where="train_step",
            hint="call program.train_step in eager mode: compile=False; in an ensemble use optim.adamw(1e-3)",
        )


def _joined(measured: Metrics, own: Metrics) -> Metrics:
    """Merge the objective's metrics with those of the step.

    Raises:
        StepContractError: both have the same name: ``lr/<group>`` depends on the transformation.
    """
    both = measured.keys() & own.keys()
    if both:
        raise StepContractError(
            "the step itself has a metric of this name", where=f"metrics/{min(both)}", hint="choose another name"
        )
    return {**measured, **own}


def _no_state(found: Any) -> StateError:
    return StateError(f"the state is a {type(found).__name__}", where="state", hint="call train_step(state, batch)")


def _drawing(spec: Spec, form: Form, state: TrainState, batch: Batch, call: Callable[[], Micro]) -> Micro:
    """Make a call with the random numbers of this step, unless the host has seeded for a whole graph. Each of several
    processes draws its own.

    Raises:
        DataError: the call failed because a tensor of the batch is on another device. Not checked before the call: an
            operation may need an index on the CPU. Or a share of several processes has one row, of which batch
            normalization has no variance.
        StepContractError: in a graph, the objective differentiates by the batch, which requires no gradient there.
    """
    stream = () if form.exchange is None else form.exchange.stream
    try:
        return drawn_in_step(state, call, *stream)
    except ValueError as error:
        if form.exchange is None or "Expected more than 1 value per channel" not in str(error):
            raise
        raise DataError(
            f"the rows of this process's share are too few for batch normalization: {error}",
            where="batch",
            hint='set drop_last=True in the loader if it is the last batch of an epoch; or batchnorm="sync" '
            "for the statistics of the rows of all processes, which are two or more",
        ) from error
    except RuntimeError as error:
        if tracing.in_graph() and lacks_gradient(error):
            raise StepContractError(
                "the objective differentiates by a tensor that requires no gradient: a batch is data inside a graph",
                where="objective",
                hint="call x = x.detach().requires_grad_() in the objective; it works in eager mode too",
            ) from error
        here = state.step.device
        elsewhere = [path for path, leaf in tree.with_paths(batch) if getattr(leaf, "device", here) != here]
        if not elsewhere or "device" not in str(error):
            raise
        raise DataError(
            f"the tensor is not on {here}, where the state is",
            where="/".join(filter(None, ("batch", elsewhere[0]))),
            hint="call batch = ps.to_device(batch, state)",
        ) from error


def _whole(spec: Spec, form: Form, state: TrainState, micro: Micro) -> tuple[Micro, Tensor, unused_parameters.Reached]:
    """The call of all processes, its verdict, and the parameters without a gradient."""
    stored = form.unreached(micro.unreached)
    if form.exchange is None:
        # The sum is not finite if the loss or the weight is not. `apply` handles a weight of 0.
        return micro, micro.mean + micro.weight, dict.fromkeys(stored)
    verdict = weight_or_nan(micro)
    found = exchange.joined(spec, form, state.buffers, micro, verdict, checks_gradients=False)
    grads = exchange.mean_gradients(form, state, micro.grads, micro.grad_weight, found.micro.weight)
    return found.micro._replace(grads=grads), found.verdict, _reached(stored, found.reached)


def _reached(stored: dict[str, str], flags: dict[str, Tensor]) -> unused_parameters.Reached:
    """Stored names of parameters without a gradient in this process -> True if another process has one."""
    return {place: flags[name] for name, place in sorted(stored.items())}


def _count_call(old: TrainState, new: TrainState) -> TrainState:
    step = old.step + (1 if isinstance(old.halted, Empty) else old.halted == 0)
    return new._replace(step=step, key=old.key if tracing.in_graph() else rng.advance(old.key))
