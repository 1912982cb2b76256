"""Sharpness-aware minimization: the gradient at the worst weights nearby."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import optim
from ..errors import ConfigError
from ..optim import numerics
from ..state import check_range, is_number
from ..types import Batch, Form, Params, TrainState
from . import exchange, gradient
from .spec import Micro, Spec


class Sam(NamedTuple):
    r"""Sharpness-aware minimization, for ``ps.program(..., sam=...)``.

    Example:
        >>> import purestep as ps
        >>> objective, tx = ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1)
        >>> program = ps.program(torch.nn.Linear(2, 1), objective, tx, sam=Sam(0.5, adaptive=True))
        >>> state, metrics = program.train_step(program.init(), (torch.ones(4, 2), torch.ones(4, 1)))
        >>> int(state.updates)
        1

    A call computes the gradient :math:`g` of its batch at the weights :math:`w`, and then a second one of the same
    batch at :math:`w + \rho \, g / \|g\|`, which the transform gets. The transform starts from :math:`w`. So a step
    costs two forward and two backward passes, and the memory of one more copy of the weights.

    Loss, metrics and the statistics of BatchNorm are those of the first pass; ``grad_norm`` is that of the second
    gradient. Dropout draws for each pass. With ``microbatches``, and on several processes, both gradients are those of
    the whole batch.

    Args:
        rho: the size of the neighbourhood, > 0: 0.05 is usual, with ``adaptive`` 0.5 to 2.
        adaptive: the neighbourhood of a weight grows with its size (ASAM): at
            :math:`w + \rho \, w^2 g / \| w g \|`, entry by entry.

    References:
        Foret et al., 2021, Sharpness-Aware Minimization for Efficiently Improving Generalization; adaptive: Kwon et
        al., 2021, ASAM.
    """

    rho: float = 0.05
    adaptive: bool = False


def checked(sam: Any, accumulate: int) -> Sam | None:
    """Return the setting of a program.

    Raises:
        ConfigError: a number is out of range, or the program accumulates.
    """
    if sam is None:
        return None
    found = Sam(sam) if is_number(sam) else sam
    if not isinstance(found, Sam):
        raise ConfigError(f"sam is a {type(sam).__name__}", where="program", hint="pass sam=0.05, or sam=ps.Sam(0.05)")
    check_range("sam", 0, ends="()", cure="ps.Sam(0.05)", rho=found.rho)
    if not isinstance(found.adaptive, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # may be of any type
        raise ConfigError(
            f"adaptive={found.adaptive!r} must be True or False", where="sam", hint="ps.Sam(0.5, adaptive=True)"
        )
    if accumulate > 1:
        raise ConfigError(
            f"sam with accumulate={accumulate}: each call would look for the worst weights of its own micro-batch",
            where="program",
            hint=f"pass microbatches={accumulate} and the whole batch to each call, or accumulate=1",
        )
    return found


def gradients_of(sam: Sam) -> Callable[..., Micro]:
    """Build `gradient.gradients` at the worst weights nearby."""

    def gradients(spec: Spec, form: Form, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Micro:
        first = gradient.gradients(spec, form, state, batch, context)
        grads = first.grads
        if form.exchange is not None:
            weight = form.exchange.sums([first.weight])[0]
            grads = exchange.mean_gradients(form, state, grads, first.grad_weight, weight)
        worst = state._replace(params=_worst(sam, form, state.params, grads))
        second = gradient.gradients(spec, form, worst, batch, context)
        return second._replace(mean=first.mean, buffers=first.buffers, metrics=first.metrics, outputs=first.outputs)

    return gradients


def _worst(sam: Sam, form: Form, params: Params, grads: Params) -> Params:
    """The weights in the neighbourhood at which the linearized loss is highest. A gradient that is not finite makes
    all of them nan, and so the second gradient, which the step refuses."""
    sizes = {name: param.abs() for name, param in params.items()} if sam.adaptive else None
    scaled = grads if sizes is None else {name: grad * sizes[name].to(grad.dtype) for name, grad in grads.items()}
    norm_of = optim.global_norm if form.exchange is None or form.exchange.norm is None else form.exchange.norm
    norm = norm_of(scaled)
    factor = torch.where(norm == 0, torch.zeros_like(norm), sam.rho / norm)

    def moved(name: str, param: Tensor) -> Tensor:
        step = scaled[name] if sizes is None else scaled[name] * sizes[name].to(scaled[name].dtype)
        return numerics.add_scaled(numerics.upcast(param), step, factor).to(param.dtype)

    return {name: moved(name, param) for name, param in params.items()}
