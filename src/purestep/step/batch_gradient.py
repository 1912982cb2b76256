"""The gradient of one call, without its update."""

from __future__ import annotations

from collections.abc import Callable

from ..types import Batch, Params, TrainState
from .random_draws import drawn_in_step
from .spec import IDENTITY, Spec
from .update import unscaled


def batch_gradient_of(spec: Spec) -> Callable[[TrainState, Batch], Params]:
    """Build a function that returns the mean gradient that a call of train_step computes from this state and batch.

    It runs in eager mode, with the call's random numbers. With accumulation it is the gradient of this micro-batch.
    """

    def batch_gradient(state: TrainState, batch: Batch) -> Params:
        micro = drawn_in_step(spec, state, lambda: spec.gradients(spec, IDENTITY, state, batch, ()))
        scale = spec.scaler.scale(state.scaler)
        return micro.grads if scale is None else unscaled(micro.grads, scale)

    return batch_gradient
