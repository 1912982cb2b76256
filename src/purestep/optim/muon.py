"""Directions that depend on a parameter's shape or on its norm; none of them is elementwise.

Optimizers that look at a whole parameter at once: its rows and columns, its norm, its singular values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import ConfigError, StateError
from ..model import uncompiled
from ..pickling import recipe
from ..types import Empty, Params, Tree
from .adam import scale_by_adam
from .base import Transform, chain, require, require_rate, require_typed, stateless
from .numerics import (
    Rate,
    Scalar,
    each,
    lerp,
    none_missed,
    own_count,
    rate_at,
    scalar_dtype,
    times,
    wide,
    zero_count,
    zeros_like,
)
from .rmsprop import StepState
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask, decay_mask

Adjust = Literal["original", "match_rms_adamw"]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al., 2024, steepest at 0; `torch.optim.Muon` has the same."""


_MUON_CURE = 'optim.partition({"muon": optim.muon(...), "adamw": optim.adamw(...)}, optim.muon_labels(model))'


class ScaleByMuonState(NamedTuple):
    """State of `scale_by_muon`."""

    mu: Params  # name -> P: running mean of gradients


@recipe
def scale_by_muon(
    momentum: Scalar = 0.95,
    *,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
    ns_steps: int = 5,
    eps: float = 1e-7,
) -> Transform:
    r"""Momentum, then the nearest (semi-)orthogonal matrix by Newton-Schulz steps in bfloat16, as `torch.optim.Muon`.

    Args:
        momentum: decay of the mean of gradients, in [0, 1).
        nesterov: orthogonalize what the mean will be after one more such gradient.
        ns_coefficients: :math:`(a, b, c)` of :math:`X \leftarrow a X + b (X X^\top) X + c (X X^\top)^2 X`.
        ns_steps: in [0, 100).
        eps: the least Frobenius norm to divide by.

    Raises:
        ConfigError: for numbers out of range.
        StateError: at init, for a parameter that is no matrix.

    References:
        Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks.

    Example:
        >>> params = {"w": torch.eye(2)}
        >>> tx = scale_by_muon()
        >>> update = tx.update(params, tx.init(params), params)[0]["w"]
        >>> bool((torch.linalg.svdvals(update) - 1).abs().max() < 0.4)
        True
    """
    require("scale_by_muon", high=1.0, momentum=momentum)
    require("scale_by_muon", high=100, ns_steps=ns_steps)
    require("scale_by_muon", eps=eps)

    def init(params: Params) -> ScaleByMuonState:
        for name, param in params.items():
            if param.ndim != 2:
                raise StateError(
                    f"muon is for matrices, and this parameter has shape {tuple(param.shape)}",
                    where=f"params/{name}",
                    hint=_MUON_CURE,
                )
        return ScaleByMuonState(zeros_like(params))

    def update(updates: Params, state: ScaleByMuonState, params: Params) -> tuple[Params, ScaleByMuonState]:
        del params  # A function of gradients alone.
        mu = {name: lerp(state.mu[name], g, 1 - momentum) for name, g in updates.items()}
        ahead = {name: lerp(g, mu[name], momentum) for name, g in updates.items()} if nesterov else mu
        new = {
            name: _orthogonal(ahead[name], ns_coefficients, ns_steps, eps).to(g.dtype) for name, g in updates.items()
        }
        return new, ScaleByMuonState(mu)

    return Transform(init, update, elementwise=False)


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    # The iteration converges from spectral norms up to 1, and the Frobenius norm is no less.
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@recipe
def scale_by_shape(adjust: Adjust = "original") -> Transform:
    r"""Orthogonal updates times a factor of their matrix's shape, so that one learning rate fits all of them.

    Args:
        adjust: ``"original"``: :math:`\sqrt{\max(1, rows / columns)}`; ``"match_rms_adamw"``:
            :math:`0.2 \sqrt{\max(rows, columns)}`, for which AdamW's learning rate and weight decay fit.

    Raises:
        ConfigError: for another name.

    References:
        Liu et al., 2025, Muon is Scalable for LLM Training.

    Example:
        >>> params = {"w": torch.ones(4, 1)}
        >>> scale_by_shape().update(params, (), params)[0]["w"][0].item()
        2.0
    """
    if adjust not in ("original", "match_rms_adamw"):
        raise ConfigError(f"no adjustment {adjust!r}", where="scale_by_shape", hint='"original" or "match_rms_adamw"')

    def factor(rows: int, columns: int) -> float:
        return math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))

    def fn(updates: Params, params: Params) -> Params:
        del params  # Updates have the same shapes.
        return {name: u * factor(*u.shape[:2]) for name, u in updates.items()}

    return stateless(fn, elementwise=False)


@recipe
def scale_by_trust_ratio() -> Transform:
    r"""Each parameter's update times :math:`\|\theta\| / \|u\|`; as it is where either norm is 0.

    References:
        You et al., 2020, Large Batch Optimization for Deep Learning, algorithm 2 (LAMB).

    Example:
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> scale_by_trust_ratio().update({"w": torch.tensor([0.0, 2.0])}, (), params)[0]["w"].tolist()
        [0.0, 5.0]
    """

    def fn(updates: Params, params: Params) -> Params:
        return {name: times(u, _trust_ratio(wide(params[name]), wide(u))) for name, u in updates.items()}

    return stateless(fn, elementwise=False)


def _trust_ratio(param: Tensor, update: Tensor) -> Tensor:
    size, step = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
    return torch.where((size > 0) & (step > 0), size / torch.where(step > 0, step, 1.0), 1.0)


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
        return ScaleByFactoredRmsState(zero_count(params), row, column, zeros_like(few), none_missed(params))

    def update(
        updates: Params, state: ScaleByFactoredRmsState, params: Params
    ) -> tuple[Params, ScaleByFactoredRmsState]:
        step = state.step + 1
        weights = each(
            torch.pow(own_count(step, state.missed, updates).to(scalar_dtype(updates)), -decay_rate), updates
        )
        row = {name: lerp(old, _mean_square(updates[name], -1), weights[name]) for name, old in state.row.items()}
        column = {name: lerp(old, _mean_square(updates[name], -2), weights[name]) for name, old in state.column.items()}
        full = {name: lerp(old, wide(updates[name]).square(), weights[name]) for name, old in state.full.items()}
        new: Params = {}
        for name, g in updates.items():
            least = torch.finfo(params[name].dtype).eps if eps is None else eps
            variance = _outer(row[name], column[name], least) if name in row else wide(full[name])
            new[name] = (wide(g) * variance.clamp(min=least * least).rsqrt()).to(g.dtype)
        return new, ScaleByFactoredRmsState(step, row, column, full, state.missed)

    return Transform(init, update, elementwise=False)


def _mean_square(update: Tensor, dim: int) -> Tensor:
    return wide(update).square().mean(dim=dim, keepdim=True)


def _outer(row: Tensor, column: Tensor, eps: float) -> Tensor:
    return wide(row) * wide(column) / wide(row).mean(dim=-2, keepdim=True).clamp(min=eps)


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
        return {name: times(u, 1 / (_rms(u) / threshold).clamp(min=1.0)) for name, u in updates.items()}

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
        return {name: times(u, _rms(params[name]).clamp(min=min_scale)) for name, u in updates.items()}

    return stateless(fn, elementwise=False)


def _rms(leaf: Tensor) -> Tensor:
    return torch.linalg.vector_norm(wide(leaf)) / math.sqrt(max(leaf.numel(), 1))


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
        return StepState(zero_count(params), none_missed(params))

    def update(updates: Params, state: StepState, params: Params) -> tuple[Params, StepState]:
        del params  # A function of the count alone.
        bound = own_count(state.step + 1, state.missed, updates).to(scalar_dtype(updates)).rsqrt()
        rate = rate_at(learning_rate, state.step)
        # A rate of 0 makes the ratio infinite and the bound 1, and stays 0 after it.
        factors = each((bound / rate).clamp(max=1.0), updates)
        new = {name: times(u, factors[name]) for name, u in updates.items()}
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
    require_typed("adafactor", learning_rate, decay_rate=decay_rate, weight_decay=weight_decay)
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


@recipe
def lamb(
    learning_rate: Rate = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    *,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""AdamW with steps as long as each layer's weights, as `optax.lamb`; torch has none.

    With :math:`u_t = \hat m_t / (\sqrt{\hat v_t} + \epsilon) + \lambda \theta_{t-1}`, :math:`\theta_t = \theta_{t-1}
    - \gamma u_t \|\theta_{t-1}\| / \|u_t\|`. Not elementwise.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: :math:`\lambda` in [0, inf).
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.

    References:
        You et al., 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes.

    Example:
        >>> tx = lamb(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    require_typed("lamb", learning_rate, below_one={"b1": b1, "b2": b2}, eps=eps, weight_decay=weight_decay)
    return chain(
        scale_by_adam(b1, b2, eps=eps),
        *decay_parts(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )


@recipe
def muon(
    learning_rate: Rate = 1e-3,
    momentum: Scalar = 0.95,
    *,
    nesterov: bool = True,
    weight_decay: Scalar = 0.1,
    ns_coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust: Adjust = "original",
    mask: Mask | None = None,
) -> Transform:
    r"""Momentum whose singular values are all made about 1, as `torch.optim.Muon`: for hidden weight matrices.

    Embeddings, heads, biases and norms belong to another optimizer; see the example. Not elementwise.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        momentum: decay of the mean of gradients, in [0, 1).
        nesterov: orthogonalize what the mean will be after one more such gradient.
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        ns_coefficients: of the Newton-Schulz iteration.
        ns_steps: how many iterations, in [0, 100).
        eps: the least Frobenius norm to divide by.
        adjust: the factor for a matrix's shape: ``"original"``, or ``"match_rms_adamw"``, for which AdamW's
            learning rate and weight decay fit.
        mask: what decays, as in `masked`; None: everything.

    Raises:
        ConfigError: for numbers out of range.
        StateError: at init, for a parameter that is no matrix.

    References:
        Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks; Liu et al., 2025, Muon is
        Scalable for LLM Training.

    Example:
        >>> from purestep.optim import adamw, partition
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> tx = partition({"muon": muon(0.02), "adamw": adamw(3e-4)}, muon_labels(model, skip=("2",)))
        >>> state = tx.init(dict(model.named_parameters()))
        >>> {label: list(group.selected) for label, group in state.groups.items()}
        {'muon': ['1.weight'], 'adamw': ['0.weight', '1.bias', '2.weight', '2.bias']}
    """
    require_typed("muon", learning_rate, below_one={"momentum": momentum}, eps=eps, weight_decay=weight_decay)
    require("muon", high=100, ns_steps=ns_steps)
    if adjust not in ("original", "match_rms_adamw"):
        raise ConfigError(f"no adjustment {adjust!r}", where="muon", hint='"original" or "match_rms_adamw"')
    return chain(
        scale_by_muon(momentum, nesterov=nesterov, ns_coefficients=ns_coefficients, ns_steps=ns_steps, eps=eps),
        scale_by_shape(adjust),
        *decay_parts(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def muon_labels(model: torch.nn.Module, *, skip: Sequence[str] = ()) -> dict[str, str]:
    """Which parameters `muon` is for: ``"muon"`` for weight matrices, ``"adamw"`` for the rest.

    The rest are vectors, scalars, convolutions, the weights of norms and embeddings, and matrices tied to one of these.

    Args:
        model: its parameters' names are the labels' keys, tied ones under each of their names.
        skip: names of further ones for AdamW: full ones, or any part between dots. The output head belongs here.

    Returns:
        name -> ``"muon"`` or ``"adamw"``, for `partition`.

    Raises:
        ConfigError: for an entry of ``skip`` that no parameter has.

    Example:
        >>> muon_labels(torch.nn.Linear(2, 2))
        {'weight': 'muon', 'bias': 'adamw'}
    """
    model = uncompiled(model)
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    rest = {id(module.weight) for module in model.modules() if isinstance(module, tables)}
    named = dict(model.named_parameters(remove_duplicate=False))
    is_weight = decay_mask(model, skip=skip)
    # By identity, since a tied matrix is in the state under one of its names only.
    rest |= {id(param) for name, param in named.items() if param.ndim != 2 or not is_weight[name]}
    return {name: "adamw" if id(param) in rest else "muon" for name, param in named.items()}
