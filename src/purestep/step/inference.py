"""Functions that only read a state: eval_step and bind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from .. import rng, tree
from ..errors import StepContractError
from ..model import functional, write_check
from ..state import stacked, views
from ..torch_ext import global_rng, tracing
from ..types import Batch, Carrying, Loss, Mean, Metrics, Params, TrainState
from .loss_checks import check_loss, counted, lacks_gradient, like_loss, rows_of
from .random_draws import drawn
from .spec import Spec


def eval_step_of(spec: Spec) -> Callable[..., Metrics]:
    """Build a program's ``eval_step``."""

    def eval_step(state: TrainState, batch: Batch, *context: Any, index: int = 0) -> Metrics:
        """``(state, batch, *context, index=0) -> metrics`` in eval mode, with the averaged weights if the state has
        some (``ps.view(state, "params")`` has the others). Random numbers depend only on seed and index: a second
        evaluation returns the same metrics, and the state's key does not advance."""

        return measured(state, {}, batch, context, index)[0]

    def carrying(
        state: TrainState, carried: Params, batch: Batch, *context: Any, index: int = 0
    ) -> tuple[Metrics, Params]:
        """As `Carrying.step`."""
        return measured(state, carried, batch, context, index)

    def measured(
        state: TrainState, carried: Params, batch: Batch, context: tuple[Any, ...], index: int
    ) -> tuple[Metrics, Params]:
        stacked.check_plain(state, where="eval_step")
        rows, counts = rows_of(batch)

        def evaluate() -> tuple[Loss, Params]:
            chosen = views.to_evaluate(state)
            buffers = {**chosen.buffers, **carried}
            bound = functional.bind(spec.template, chosen.params, chosen.frozen, buffers, train=False)
            bound.values = spec.values_at(state)
            look = _written_buffers(spec, bound)
            with spec.policy.autocast(state.step.device):
                found = spec.objective(bound, spec.policy.cast(tree.dicts(rows)), *context)
            look()
            loss = counted(check_loss(found, state.step.device, train=False), counts)
            return loss, {name: bound.buffers[name].detach() for name in carried}

        try:
            with torch.no_grad():
                found = evaluate() if tracing.in_graph() else drawn(evaluate, _number(state, index), state.step.device)
        except RuntimeError as error:
            if not lacks_gradient(error):
                raise
            raise _without_gradients() from error
        loss, carried = found
        weight = torch.where(loss.weight > 0, loss.weight, torch.zeros_like(loss.weight))
        total = torch.where(loss.weight > 0, loss.mean * weight, torch.zeros_like(loss.mean))
        return like_loss({**tree.detach(loss.metrics), "loss": Mean(total, weight)}, loss.mean), carried

    if spec.carry:
        vars(eval_step)["carrying"] = Carrying(carrying, spec.carry)
    return eval_step


def _without_gradients() -> StepContractError:
    return StepContractError(
        "the objective differentiates, and an evaluation follows no gradients",
        where="objective",
        hint="write `with torch.enable_grad():` around it, and x = x.detach().requires_grad_() inside",
    )


def _written_buffers(spec: Spec, bound: functional.Bound) -> Callable[[], None]:
    """Return a function that warns of buffers that the model has written since; once for a program."""
    if torch.compiler.is_dynamo_compiling() or spec.reach.is_evaluated:
        return lambda: None
    spec.reach.is_evaluated = True
    given = dict(bound.buffers)
    before = {name: value.clone() for name, value in given.items() if tracing.may_read(value)}
    marks = write_check.marks(given)

    def look() -> None:
        now = write_check.marks(given)
        for name, found in bound.buffers.items():
            is_written = found is not given[name] or now.get(name) != marks.get(name)
            if not is_written or name in spec.carry or (name in before and _is_equal(found, before[name])):
                continue
            warnings.warn(
                f"the model writes the buffer {name} in eval mode, and each batch of an evaluation begins with the one "
                f"that training has left in the state (cure: ps.program(..., carry=({name!r},)) for a value that goes "
                "from batch to batch, such as a hidden state; else write it only if self.training)",
                UserWarning,
                stacklevel=2,
            )
            return

    return look


def _is_equal(found: Any, before: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(before, found)


def _number(state: TrainState, index: int) -> int:
    """The seed of an evaluation's random numbers."""
    seeds = tracing.unwrapped(state.key).reshape(-1, 2)[:, 0].tolist()  # several if states are mapped
    return rng.mix(*seeds, "eval", index)


def bind_of(spec: Spec) -> Callable[..., functional.Inference]:
    """Build a program's ``bind``."""

    def bind(state: TrainState, view: str | None = None, train: bool = False) -> functional.Inference:
        """Return the module as a function with these weights, in the program's precision: ``predict(x)`` calls forward,
        ``predict.call("encode", x)`` another method.

        Args:
            state: of this program.
            view: "params" or "ema". None: "ema" if the state has an average; "params" with ``train``.
            train: run in train mode with gradients, otherwise in eval mode without. The weights leave the module with
                the call, so ``backward()`` fails for a model with activation checkpointing, which repeats the forward
                pass: bind a program of the model without it (same names), or compute the loss in an objective.
        """
        stacked.check_plain(state, where="bind")
        chosen = views.view(state, "params" if train and view is None else view)

        def run(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            start = {name: value.to(chosen.buffers[name]) for name, value in spec.carry.items()}
            buffers = {**chosen.buffers, **start}
            bound = functional.bind(spec.template, chosen.params, chosen.frozen, buffers, train=train)
            args, kwargs = spec.policy.cast((args, kwargs))
            # Threads share the weightless module, which the steps call under the same lock.
            turn = nullcontext() if tracing.in_graph() else global_rng.locked()
            with turn, torch.set_grad_enabled(train), spec.policy.autocast(chosen.step.device):
                return bound.call(method, *args, **kwargs)

        return functional.Inference(run)

    return bind
