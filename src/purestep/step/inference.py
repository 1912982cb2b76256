"""Functions that only read a state: eval_step and bind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import rng, tree
from ..errors import StepContractError
from ..model import functional
from ..state import stacked, views
from ..torch_ext import tracing
from ..types import Batch, Loss, Mean, Metrics, TrainState
from .loss_checks import check_loss, counted, like_loss, rows_of
from .random_draws import drawn
from .spec import Spec


def eval_step_of(spec: Spec) -> Callable[..., Metrics]:
    """Build a program's ``eval_step``."""

    def eval_step(state: TrainState, batch: Batch, *context: Any, index: int = 0) -> Metrics:
        """``(state, batch, *context, index=0) -> metrics`` in eval mode, with the averaged weights if the state has
        some (``ps.view(state, "params")`` has the others). Random numbers depend only on seed and index: a second
        evaluation returns the same metrics, and the state's key does not advance."""

        stacked.check_single(state, where="eval_step")
        rows, counts = rows_of(batch)

        def evaluate() -> Loss:
            chosen = views.to_evaluate(state)
            bound = functional.bind(spec.template, chosen.params, chosen.frozen, chosen.buffers, train=False)
            bound.values = spec.values_at(state)
            with spec.policy.autocast(state.step.device):
                found = spec.objective(bound, spec.policy.cast(tree.dicts(rows)), *context)
            return counted(check_loss(found, state.step.device, train=False), counts)

        try:
            with torch.no_grad():
                loss = evaluate() if tracing.in_graph() else drawn(evaluate, _number(state, index), state.step.device)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise _without_gradients() from error
        weight = torch.where(loss.weight > 0, loss.weight, torch.zeros_like(loss.weight))
        total = torch.where(loss.weight > 0, loss.mean * weight, torch.zeros_like(loss.mean))
        return like_loss({**tree.detach(loss.metrics), "loss": Mean(total, weight)}, loss.mean)

    return eval_step


def _without_gradients() -> StepContractError:
    return StepContractError(
        "the objective differentiates, and an evaluation follows no gradients",
        where="objective",
        hint="write `with torch.enable_grad():` around it, and x = x.detach().requires_grad_() inside",
    )


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
        stacked.check_single(state, where="bind")
        chosen = views.view(state, "params" if train and view is None else view)

        def run(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = functional.bind(spec.template, chosen.params, chosen.frozen, chosen.buffers, train=train)
            args, kwargs = spec.policy.cast((args, kwargs))
            with torch.set_grad_enabled(train), spec.policy.autocast(chosen.step.device):
                return bound.call(method, *args, **kwargs)

        return functional.Inference(run)

    return bind
