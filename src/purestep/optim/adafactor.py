"""Adafactor: second moments of rank one, and steps relative to the weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..pickling import recipe
from ..types import Empty, Params, Tree
from .base import StepState, Transform, chain, require, require_arguments, require_rate, stateless
from .numerics import (
    Rate,
    Scalar,
    by_name,
    lerp,
    multiply,
    no_missed_updates,
    rate_at,
    scalar_dtype,
    upcast,
    update_count,
    zero_count,
    zeros_like,
)
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByFactoredRmsState(NamedTuple):
    """State of `scale_by_factored_rms`: matrices have a row and a column, vectors and scalars a full mean."""

    step: Tensor  # shape=(), dtype=int64: updates done
    row: Params  # name -> [..., rows, 1]: mean over columns of squared gradients; of leaves with at least 2 dimensions
    column: Params  # name -> [..., 1, columns]: mean over rows of squared gradients; of the same leaves
    full: Params  # name -> P: running mean of squared gradients; of the other leaves
    missed: Tree = Empty()  # of the updates, those that a parameter had no gradient in


@recipe
def scale_by_factored_rms(decay_rate: float = 0.8, *, eps: float | None = None) -> Transform:
    r"""Gradients over a root mean square of rank one, as in `torch.optim.Adafactor`.

    :math:`\hat v_t = r_t c_t / \operatorname{mean}(r_t)`, with means that decay by :math:`1 - t^{-decay\_rate}`.

    Args:
        decay_rate: in [0, inf); torch's ``-beta2_decay``.
        eps: the least root mean square; None: the machine epsilon of each parameter's dtype.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Shazeer and Stern, 2018, Adafactor; torch applies eps to the ratio, they to both factors.

    Example:
        >>> params = {"w": torch.ones(3, 5)}
        >>> state = scale_by_factored_rms().init(params)
        >>> tuple(state.row["w"].shape), tuple(state.column["w"].shape)
        ((3, 1), (1, 5))
    """
    require("scale_by_factored_rms", decay_rate=decay_rate)
    if eps is not None:
        require("scale_by_factored_rms", eps=eps)

    def init(params: Params) -> ScaleByFactoredRmsState:
        many = {name: param for name, param in params.items() if param.ndim > 1}
        few = {name: param for name, param in params.items() if param.ndim < 2}
        row = {name: torch.zeros_like(param[..., :1], requires_grad=False) for name, param in many.items()}
        column = {name: torch.zeros_like(param[..., :1, :], requires_grad=False) for name, param in many.items()}
        return ScaleByFactoredRmsState(zero_count(params), row, column, zeros_like(few), no_missed_updates(params))

    def update(
        updates: Params, state: ScaleByFactoredRmsState, params: Params
    ) -> tuple[Params, ScaleByFactoredRmsState]:
        step = state.step + 1
        weights = by_name(
            torch.pow(update_count(step, state.missed, updates).to(scalar_dtype(updates)), -decay_rate), updates
        )
        row = {name: lerp(old, _mean_square(updates[name], -1), weights[name]) for name, old in state.row.items()}
        column = {name: lerp(old, _mean_square(updates[name], -2), weights[name]) for name, old in state.column.items()}
        full = {name: lerp(old, upcast(updates[name]).square(), weights[name]) for name, old in state.full.items()}
        new: Params = {}
        for name, g in updates.items():
            least = torch.finfo(params[name].dtype).eps if eps is None else eps
            variance = _outer(row[name], column[name], least) if name in row else upcast(full[name])
            new[name] = (upcast(g) * variance.clamp(min=least * least).rsqrt()).to(g.dtype)
        return new, ScaleByFactoredRmsState(step, row, column, full, state.missed)

    return Transform(init, update, elementwise=False)


def _mean_square(update: Tensor, dim: int) -> Tensor:
    return upcast(update).square().mean(dim=dim, keepdim=True)


def _outer(row: Tensor, column: Tensor, eps: float) -> Tensor:
    return upcast(row) * upcast(column) / upcast(row).mean(dim=-2, keepdim=True).clamp(min=eps)


@recipe
def clip_by_block_rms(threshold: Scalar = 1.0) -> Transform:
    """Each parameter's update over ``max(1, its root mean square / threshold)``.

    Args:
        threshold: in (0, inf).

    Raises:
        ConfigError: for numbers out of range.

    References:
        Shazeer and Stern, 2018, Adafactor, section 6.

    Example:
        >>> clip_by_block_rms(1.0).update({"w": torch.tensor([4.0, -4.0])}, (), {})[0]["w"].tolist()
        [1.0, -1.0]
    """
    require("clip_by_block_rms", threshold=threshold)
    if not isinstance(threshold, Tensor) and threshold == 0:
        raise ConfigError("threshold is 0, which leaves no update", where="clip_by_block_rms", hint="threshold=1.0")

    def fn(updates: Params, params: Params) -> Params:
        del params  # A bound on updates alone.
        return {name: multiply(u, 1 / (_rms(u) / threshold).clamp(min=1.0)) for name, u in updates.items()}

    return stateless(fn, elementwise=False)


@recipe
def scale_by_param_block_rms(min_scale: Scalar = 1e-3) -> Transform:
    """Each parameter's update times the root mean square of its weights, at least ``min_scale``.

    Args:
        min_scale: in [0, inf).

    Raises:
        ConfigError: for numbers out of range.

    References:
        Shazeer and Stern, 2018, Adafactor, section 8.

    Example:
        >>> params = {"w": torch.tensor([2.0, -2.0])}
        >>> scale_by_param_block_rms().update({"w": torch.ones(2)}, (), params)[0]["w"].tolist()
        [2.0, 2.0]
    """
    require("scale_by_param_block_rms", min_scale=min_scale)

    def fn(updates: Params, params: Params) -> Params:
        return {name: multiply(u, _rms(params[name]).clamp(min=min_scale)) for name, u in updates.items()}

    return stateless(fn, elementwise=False)


def _rms(leaf: Tensor) -> Tensor:
    return torch.linalg.vector_norm(upcast(leaf)) / math.sqrt(max(leaf.numel(), 1))


@recipe
def scale_by_relative_step(learning_rate: Rate) -> Transform:
    r"""Updates times :math:`\min(\gamma, 1 / \sqrt t) / \gamma`, so that the learning rate after it is a bound.

    Args:
        learning_rate: :math:`\gamma`, the one that `scale_by_learning_rate` is given too.

    Raises:
        ConfigError: for a number out of range, or one of torch's schedulers.

    References:
        `torch.optim.Adafactor`; Shazeer and Stern, 2018, section 9.

    Example:
        >>> params = {"w": torch.ones(1)}
        >>> scale_by_relative_step(2.0).update(params, StepState(torch.tensor(0)), params)[0]["w"].item()
        0.5
    """
    require_rate("scale_by_relative_step", learning_rate)

    def init(params: Params) -> StepState:
        return StepState(zero_count(params), no_missed_updates(params))

    def update(updates: Params, state: StepState, params: Params) -> tuple[Params, StepState]:
        del params  # A function of the count alone.
        bound = update_count(state.step + 1, state.missed, updates).to(scalar_dtype(updates)).rsqrt()
        rate = rate_at(learning_rate, state.step)
        # A rate of 0 makes the ratio infinite and the bound 1, and stays 0 after it.
        factors = by_name((bound / rate).clamp(max=1.0), updates)
        new = {name: multiply(u, factors[name]) for name, u in updates.items()}
        return new, StepState(state.step + 1, state.missed)

    return Transform(init, update)


@recipe
def adafactor(
    learning_rate: Rate = 1e-2,
    *,
    decay_rate: float = 0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clipping_threshold: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Second moments of rank one and steps relative to the weights, as `torch.optim.Adafactor`.

    A matrix of r rows and c columns has r + c numbers of state. Not elementwise.

    Args:
        learning_rate: a bound on the relative step :math:`1 / \sqrt t`, in [0, inf), or a schedule.
        decay_rate: squares decay by :math:`1 - t^{-decay\_rate}`; torch's ``-beta2_decay``.
        eps: the least root mean square of gradients (None: the machine epsilon), and that of weights.
        clipping_threshold: of an update's root mean square, in [1, inf); torch's ``d``.
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Shazeer and Stern, 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost.

    Example:
        >>> tx = adafactor(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    require_arguments("adafactor", learning_rate, decay_rate=decay_rate, weight_decay=weight_decay)
    require("adafactor", low=1.0, clipping_threshold=clipping_threshold)
    pair: Any = eps
    if not isinstance(pair, tuple | list) or len(cast(tuple[Any, ...], pair)) != 2:
        raise ConfigError(f"eps is {eps!r}, no pair", where="adafactor", hint="eps=(None, 1e-3)")
    least_gradient, least_weight = eps
    require("adafactor", eps=0.0 if least_gradient is None else least_gradient)
    require("adafactor", eps=least_weight)
    return chain(
        scale_by_factored_rms(decay_rate, eps=least_gradient),
        clip_by_block_rms(clipping_threshold),
        scale_by_param_block_rms(least_weight),
        scale_by_relative_step(learning_rate),
        *decay_parts(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
