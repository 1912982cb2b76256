"""One call's contributions of all processes: gradients, loss, metrics and buffers as one process would compute them."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from .. import optim, tree
from ..torch_ext import is_finite
from ..types import Exchange, Form, Metrics, Params, TrainState
from .spec import Micro, Spec, times, wide


class Joined(NamedTuple):
    """The contributions of all processes to one call."""

    micro: Micro
    verdict: Tensor  # shape=(), dtype=float32: the summed weight, or nan if a loss was not finite
    reached: dict[str, Tensor]  # parameters without a gradient in this process -> True if another process has one
    finite: Tensor  # shape=(), dtype=bool: the gradients of every process are finite


def joined(spec: Spec, form: Form, before: Params, micro: Micro, verdict: Tensor, *, checks_gradients: bool) -> Joined:
    """Sum the small tensors of a call over all processes, in one collective, and join the buffers.

    Args:
        spec: of the program.
        form: with an exchange.
        before: the buffers before the call.
        micro: this process's contribution; its gradients are returned unchanged, for `reduced`.
        verdict: this process's weight, or nan.
        checks_gradients: compute ``finite`` from the gradients; otherwise it is True.
    """
    exchange = cast(Exchange, form.exchange)
    names, device = spec.template.names.params, micro.weight.device
    has_gradient = torch.ones(len(names), dtype=torch.float32, device=device)
    if micro.unreached:
        places = [index for index, name in enumerate(names) if name in micro.unreached]
        has_gradient[torch.tensor(places, device=device)] = 0.0
    bad = torch.zeros((), device=device)
    if checks_gradients:
        bad = (~is_finite(optim.global_norm(micro.grads))).float()
    leaves, treedef = tree.flatten(micro.metrics)
    own = [micro.weight, verdict, times(micro.mean, micro.weight), bad, has_gradient]
    weight, verdict, total, bad, counts, *sums = exchange.sums([*own, *leaves])
    metrics: Metrics = tree.unflatten(treedef, [new.to(old.dtype) for new, old in zip(sums, leaves, strict=True)])
    divisor = torch.where(weight > 0, weight, torch.ones_like(weight))
    buffers = exchange.buffers(before, micro.buffers, micro.weight) if micro.buffers else micro.buffers
    whole = micro._replace(mean=(total / divisor).to(micro.mean.dtype), weight=weight, buffers=buffers, metrics=metrics)
    flags = counts > 0
    reached = {name: flags[index] for index, name in enumerate(names) if name in micro.unreached}
    return Joined(whole, verdict, reached, bad == 0)


def weighted(grads: Params, weight: Tensor) -> Params:
    """Gradients x weight, at least float32."""
    return {name: times(grad.to(wide(grad.dtype)), weight) for name, grad in grads.items()}


def mean_gradients(form: Form, state: TrainState, grads: Params, local: Tensor, weight: Tensor) -> Params:
    """The mean gradient over the examples of all processes, in the stored form and the dtypes of the parameters.

    Args:
        form: with an exchange.
        state: before the update.
        grads: the mean gradients of this process.
        local: shape=(): their `Micro.grad_weight`.
        weight: shape=(): the weight of all processes.
    """
    return divided(state, cast(Exchange, form.exchange).reduce(weighted(grads, local)), weight)


def divided(state: TrainState, summed: Params, weight: Tensor) -> Params:
    """Summed gradients over their weight (over 1 if it is not positive), in the dtypes of the parameters."""
    divisor = torch.where(weight > 0, weight, torch.ones_like(weight))
    return {name: (grad / divisor.to(grad.dtype)).to(state.params[name].dtype) for name, grad in summed.items()}
