"""What reads a state and changes nothing: eval_step and bind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import ema as ema_
from .. import precision as precision_
from .. import rng, tracing, tree
from ..model import functional as model_
from ..types import Batch, Loss, Mean, Metrics, TrainState
from .gradient import check_loss
from .spec import Spec, drawn


def eval_step_of(spec: Spec) -> Callable[..., Metrics]:
    """A program's ``eval_step``."""

    def eval_step(state: TrainState, batch: Batch, *context: Any, index: int = 0) -> Metrics:
        """``(state, batch, *context, index=0) -> metrics`` in eval mode; what it draws depends on seed and index alone,
        so that evaluating twice gives the same numbers and moves nothing."""

        def evaluate() -> Loss:
            bound = model_.bind(spec.template, state.params, state.frozen, state.buffers, train=False)
            bound.values = spec.values_at(state)
            with precision_.autocast(spec.policy, state.step.device):
                found = spec.objective(bound, precision_.cast(spec.policy, tree.dicts(batch)), *context)
            return check_loss(found, state.step.device)

        with torch.no_grad():
            loss = (
                evaluate()
                if tracing.in_graph()
                else drawn(spec.host, evaluate, _number(state, index), state.step.device)
            )
        weight = torch.where(loss.weight > 0, loss.weight, torch.zeros_like(loss.weight))
        total = torch.where(loss.weight > 0, loss.mean.float() * weight, torch.zeros_like(weight))
        return {**tree.detach(loss.metrics), "loss": Mean(total, weight)}

    return eval_step


def _number(state: TrainState, index: int) -> int:
    """What an evaluation's random numbers depend on."""
    return rng.mix(int(state.key[0]), "eval", index)


def bind_of(spec: Spec) -> Callable[..., Callable[..., Any]]:
    """A program's ``bind``."""

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
