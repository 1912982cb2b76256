"""The gradient of one call, without its update."""

from __future__ import annotations

from collections.abc import Callable

from ..types import Batch, Form, Params, TrainState
from . import exchange
from .random_draws import drawn_in_step
from .spec import IDENTITY, Spec
from .update import unscaled


def batch_gradient_of(spec: Spec) -> Callable[..., Params]:
    """Build a function that returns the mean gradient that a call of train_step computes from this state and batch.

    It runs in eager mode, with the call's random numbers. With accumulation it is the gradient of this micro-batch.
    Its argument ``form`` is that of the state; with an exchange it is the gradient of all processes' rows.
    """

    def batch_gradient(state: TrainState, batch: Batch, form: Form = IDENTITY) -> Params:
        stream = () if form.exchange is None else form.exchange.stream
        micro = drawn_in_step(state, lambda: spec.gradients(spec, form, state, batch, ()), *stream)
        grads, scale = micro.grads, spec.scaler.scale(state.scaler)
        if form.exchange is not None:
            (weight,) = form.exchange.sums([micro.weight])
            grads = exchange.mean_gradients(form, state, grads, micro.grad_weight, weight)
        return grads if scale is None else unscaled(grads, scale)

    return batch_gradient
