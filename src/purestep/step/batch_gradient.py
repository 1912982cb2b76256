"""The gradient of one call, without its update."""

from __future__ import annotations

from collections.abc import Callable

from .. import rng
from ..types import Batch, Params, TrainState
from .sharpness import gradients
from .spec import IDENTITY, Spec, drawn


def batch_gradient_of(spec: Spec) -> Callable[[TrainState, Batch], Params]:
    """Build a function that returns the mean gradient that a call of train_step computes from this state and batch.

    It runs in eager mode, with the call's random numbers. With accumulation it is the gradient of this micro-batch.
    """

    def batch_gradient(state: TrainState, batch: Batch) -> Params:
        number = rng.mix(*state.key.tolist(), "step")
        micro = drawn(
            spec.host,
            lambda: (spec.gradients or gradients)(spec, IDENTITY, state, batch, ()),
            number,
            state.step.device,
        )
        scale = spec.scaler.scale(state.scaler)
        return micro.grads if scale is None else {name: grad.float() / scale for name, grad in micro.grads.items()}

    return batch_gradient
