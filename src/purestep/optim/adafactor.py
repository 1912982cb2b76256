"""Adafactor: second moments of rank one, and steps relative to the weights."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import NonNegative, NonNegativeFloat, Rate, Scalar, within
from .base import Transform, chain, stateless
from .complex_params import real_only
from .counts import StepState, no_updates, update_counts
from .numerics import by_name, lerp, multiply, rate_at, scalar_dtype, upcast, zeros_like
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByFactoredRmsState(NamedTuple):
    """State of `scale_by_factored_rms`: a row and a column for a matrix, a full mean for a vector or scalar."""

    step: Tensor  # shape=(), dtype=int64: updates done
    row: Params  # name -> [..., rows, 1]: squared gradients, mean over columns; for leaves of at least 2 dimensions
    column: Params  # name -> [..., 1, columns]: squared gradients, mean over rows; for the same leaves
    full: Params  # name -> P: running mean of squared gradients; for the other leaves
    missed: Tree = Empty()  # see `counts`


@known_keywords
def scale_by_factored_rms(decay_rate: NonNegativeFloat = 0.8, *, eps: NonNegativeFloat | None = None) -> Transform:
    r"""Gradients over a root mean square of rank one, as in `torch.optim.Adafactor`.

    Example:
        >>> params = {"w": torch.ones(3, 5)}
        >>> state = scale_by_factored_rms().init(params)
        >>> tuple(state.row["w"].shape), tuple(state.column["w"].shape)
        ((3, 1), (1, 5))

    :math:`\hat v_t = r_t c_t / \operatorname{mean}(r_t)`; the means decay by :math:`1 - t^{-decay\_rate}`.

    Args:
        decay_rate: in [0, inf); torch's ``-beta2_decay``.
        eps: a lower bound on the root mean square; None: the machine epsilon of each parameter's dtype.

    References:
        Shazeer and Stern, 2018, Adafactor. The paper applies eps to both factors; torch and this function to the ratio.
    """

    def init(params: Params) -> ScaleByFactoredRmsState:
        factored = {name: param for name, param in params.items() if param.ndim > 1}
        full = {name: param for name, param in params.items() if param.ndim < 2}
        row = {name: torch.zeros_like(param[..., :1], requires_grad=False) for name, param in factored.items()}
        column = {name: torch.zeros_like(param[..., :1, :], requires_grad=False) for name, param in factored.items()}
        return ScaleByFactoredRmsState(**no_updates(params), row=row, column=column, full=zeros_like(full))

    def update(
        updates: Params, state: ScaleByFactoredRmsState, params: Params
    ) -> tuple[Params, ScaleByFactoredRmsState]:
        state = state._replace(step=state.step + 1)
        weights = by_name(torch.pow(update_counts(state, updates).to(scalar_dtype(updates)), -decay_rate), updates)
        row = {name: lerp(old, _mean_square(updates[name], -1), weights[name]) for name, old in state.row.items()}
        column = {name: lerp(old, _mean_square(updates[name], -2), weights[name]) for name, old in state.column.items()}
        full = {name: lerp(old, upcast(updates[name]).square(), weights[name]) for name, old in state.full.items()}
        new: Params = {}
        for name, g in updates.items():
            least = torch.finfo(params[name].dtype).eps if eps is None else eps
            variance = _outer(row[name], column[name], least) if name in row else upcast(full[name])
            new[name] = (upcast(g) * variance.clamp(min=least * least).rsqrt()).to(g.dtype)
        return new, state._replace(row=row, column=column, full=full)

    return real_only(Transform(init, update, elementwise=False), "adafactor")


def _mean_square(update: Tensor, dim: int) -> Tensor:
    return upcast(update).square().mean(dim=dim, keepdim=True)


def _outer(row: Tensor, column: Tensor, eps: float) -> Tensor:
    return upcast(row) * upcast(column) / upcast(row).mean(dim=-2, keepdim=True).clamp(min=eps)


@known_keywords
def clip_by_block_rms(threshold: Annotated[Scalar, within(ends="()")] = 1.0) -> Transform:
    """Divide each parameter's update by ``max(1, rms / threshold)``, where rms is the update's root mean square.

    Example:
        >>> clip_by_block_rms(1.0).update({"w": torch.tensor([4.0, -4.0])}, (), {})[0]["w"].tolist()
        [1.0, -1.0]

    Args:
        threshold: in (0, inf).

    References:
        Shazeer and Stern, 2018, Adafactor, section 6.
    """

    def fn(updates: Params, params: Params) -> Params:
        del params  # Depends on the updates only.
        return {name: multiply(u, 1 / (_rms(u) / threshold).clamp(min=1.0)) for name, u in updates.items()}

    return real_only(stateless(fn, elementwise=False), "clip_by_block_rms")


@known_keywords
def scale_by_param_block_rms(min_scale: NonNegative = 1e-3) -> Transform:
    """Multiply each parameter's update by the root mean square of its weights, at least ``min_scale``.

    Example:
        >>> params = {"w": torch.tensor([2.0, -2.0])}
        >>> scale_by_param_block_rms().update({"w": torch.ones(2)}, (), params)[0]["w"].tolist()
        [2.0, 2.0]

    Args:
        min_scale: in [0, inf).

    References:
        Shazeer and Stern, 2018, Adafactor, section 8.
    """

    def fn(updates: Params, params: Params) -> Params:
        return {name: multiply(u, _rms(params[name]).clamp(min=min_scale)) for name, u in updates.items()}

    return real_only(stateless(fn, elementwise=False), "scale_by_param_block_rms")


def _rms(leaf: Tensor) -> Tensor:
    return torch.linalg.vector_norm(upcast(leaf)) / math.sqrt(max(leaf.numel(), 1))


@known_keywords
def scale_by_relative_step(learning_rate: Rate) -> Transform:
    r"""Make the learning rate an upper bound. The factor is :math:`\min(\gamma, 1 / \sqrt t) / \gamma`.

    Example:
        >>> params = {"w": torch.ones(1)}
        >>> scale_by_relative_step(2.0).update(params, StepState(torch.tensor(0)), params)[0]["w"].item()
        0.5

    Args:
        learning_rate: :math:`\gamma`, the same as in the `scale_by_learning_rate` that follows.

    References:
        `torch.optim.Adafactor`; Shazeer and Stern, 2018, section 9.
    """

    def init(params: Params) -> StepState:
        return StepState(**no_updates(params))

    def update(updates: Params, state: StepState, params: Params) -> tuple[Params, StepState]:
        del params  # Depends on the count only.
        rate, state = rate_at(learning_rate, state.step), state._replace(step=state.step + 1)
        bound = update_counts(state, updates).to(scalar_dtype(updates)).rsqrt()
        # A rate of 0 makes the ratio inf and the factor 1; the update is still multiplied by the rate 0 later.
        factors = by_name((bound / rate).clamp(max=1.0), updates)
        new = {name: multiply(u, factors[name]) for name, u in updates.items()}
        return new, state

    return Transform(init, update)


def _check_pair(where: str, name: str, value: Any, cure: str) -> None:
    if not isinstance(value, tuple | list) or len(cast(tuple[Any, ...], value)) != 2:
        raise ConfigError(f"{name}={value!r} must be a pair", where=where, hint=cure)
    least_gradient, least_weight = cast(tuple[Any, Any], value)
    check = within()
    check(where, name, 0.0 if least_gradient is None else least_gradient, cure)
    check(where, name, least_weight, cure)


@known_keywords
def adafactor(
    learning_rate: Rate = 1e-2,
    *,
    decay_rate: NonNegativeFloat = 0.8,
    eps: Annotated[tuple[float | None, float], _check_pair] = (None, 1e-3),
    clipping_threshold: Annotated[Scalar, within(1.0)] = 1.0,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Adafactor, as `torch.optim.Adafactor`: second moments of rank one, and steps relative to the weights.

    Example:
        >>> tx = adafactor(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    The state of a matrix with r rows and c columns has r + c numbers. Not elementwise.

    Args:
        learning_rate: an upper bound on the relative step :math:`1 / \sqrt t`, in [0, inf), or a schedule.
        decay_rate: the means of squares decay by :math:`1 - t^{-decay\_rate}`; torch's ``-beta2_decay``.
        eps: lower bounds on the root mean square of gradients (None: the machine epsilon) and of weights.
        clipping_threshold: upper bound on an update's root mean square, in [1, inf); torch's ``d``.
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Shazeer and Stern, 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost.
    """
    least_gradient, least_weight = eps
    return chain(
        scale_by_factored_rms(decay_rate, eps=least_gradient),
        clip_by_block_rms(clipping_threshold),
        scale_by_param_block_rms(least_weight),
        scale_by_relative_step(learning_rate),
        *decay_parts(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
