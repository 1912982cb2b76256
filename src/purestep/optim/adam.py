"""Adam and its relatives: adam, adamw, nadam, radam, adamax."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import Decay, NonNegative, Rate, Scalar
from .base import Transform, chain, described
from .complex_params import on_pairs
from .counts import bias_corrections, no_updates, update_counts, zero_count
from .numerics import (
    adam_quotients,
    by_name,
    complement_power,
    decay_square,
    divide,
    exact_dtype,
    lerp,
    multiply,
    safe_sqrt,
    upcast,
    zeros_like,
    zeros_like_squares,
)
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu: Params  # name -> P: running mean of gradients
    nu: Params  # name -> P: running mean of their squares
    nu_max: Tree  # name -> P: running maximum of nu; Empty without amsgrad
    missed: Tree = Empty()  # see `counts`


@known_keywords
def scale_by_adam(
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    *,
    eps: NonNegative = 1e-8,
    amsgrad: bool = False,
    mu_dtype: torch.dtype | None = None,
    nu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Adam's direction, :math:`\frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}`.

    Args:
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean of squares, in [0, 1).
        eps: in [0, inf), outside the root, as in torch.
        amsgrad: divide by the running maximum of :math:`v`.
        mu_dtype: dtype of the mean; None: each parameter's.
        nu_dtype: dtype of the mean of squares; None: each parameter's, but float32 for float16, where the square of
            any number below 2e-4 is 0. In bfloat16 the mean of squares stops changing close to its limit, because
            1 - b2 is smaller than the rounding error.

    References:
        Kingma and Ba, 2015, Adam; Reddi et al., 2018, On the Convergence of Adam and Beyond.

    Example:
        >>> tx = scale_by_adam(eps=0.0)
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [1.0, -1.0]
    """

    def init(params: Params) -> ScaleByAdamState:
        nu_max = zeros_like_squares(params, nu_dtype) if amsgrad else Empty()
        nu = zeros_like_squares(params, nu_dtype)
        return ScaleByAdamState(**no_updates(params), mu=zeros_like(params, mu_dtype), nu=nu, nu_max=nu_max)

    def update(updates: Params, state: ScaleByAdamState, params: Params) -> tuple[Params, ScaleByAdamState]:
        del params  # Depends on the gradients only.
        state = state._replace(step=state.step + 1)
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        nu_max = {name: torch.maximum(state.nu_max[name], nu[name]) for name in nu} if amsgrad else state.nu_max
        mean_weight, square_weight = bias_corrections(state, updates, b1, b2)
        new = adam_quotients(updates, mu, nu_max if amsgrad else nu, mean_weight, square_weight.sqrt(), eps)
        return new, state._replace(mu=mu, nu=nu, nu_max=nu_max)

    tx = on_pairs(Transform(init, update))
    return tx if amsgrad else described(tx, "adam", beta1=b1, beta2=b2, eps=eps)


@known_keywords
def adam(
    learning_rate: Rate = 1e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
    amsgrad: bool = False,
    mu_dtype: torch.dtype | None = None,
    nu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Adam, as `torch.optim.Adam`: :math:`\theta_t = \theta_{t-1} - \gamma \hat m_t / (\sqrt{\hat v_t} + \epsilon)`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient. `adamw` decouples it.
        mask: the parameters that decay, as in `masked`; None: all.
        amsgrad: divide by the running maximum of the mean of squares.
        mu_dtype: dtype of the mean of gradients; None: each parameter's.
        nu_dtype: dtype of the mean of squares; None: each parameter's, but float32 for float16.

    References:
        Kingma and Ba, 2015, Adam: A Method for Stochastic Optimization.

    Example:
        >>> tx = adam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    return chain(
        *decay_parts(weight_decay, mask),
        scale_by_adam(b1, b2, eps=eps, amsgrad=amsgrad, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        scale_by_learning_rate(learning_rate),
    )


@known_keywords
def adamw(
    learning_rate: Rate = 1e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 1e-2,
    mask: Mask | None = None,
    *,
    amsgrad: bool = False,
    mu_dtype: torch.dtype | None = None,
    nu_dtype: torch.dtype | None = None,
) -> Transform:
    r"""Adam with decoupled weight decay, as `torch.optim.AdamW`.

    .. math:: \theta_t = \theta_{t-1} - \gamma (\hat m_t / (\sqrt{\hat v_t} + \epsilon) + \lambda \theta_{t-1})

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: :math:`\lambda` in [0, inf).
        mask: the parameters that decay, as in `masked`; None: all. See `decay_mask`.
        amsgrad: divide by the running maximum of the mean of squares.
        mu_dtype: dtype of the mean of gradients; None: each parameter's.
        nu_dtype: dtype of the mean of squares; None: each parameter's, but float32 for float16.

    References:
        Loshchilov and Hutter, 2019, Decoupled Weight Decay Regularization.

    Example:
        >>> tx = adamw(0.1, weight_decay=0.0)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    return chain(
        scale_by_adam(b1, b2, eps=eps, amsgrad=amsgrad, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        *decay_parts(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


class ScaleByNadamState(NamedTuple):
    """State of `scale_by_nadam`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu_product: Tensor  # shape=(), dtype=float32: product of all momentum coefficients so far
    mu: Params  # name -> P: running mean of gradients
    nu: Params  # name -> P: running mean of their squares


@known_keywords
def scale_by_nadam(
    b1: Decay = 0.9, b2: Decay = 0.999, *, eps: NonNegative = 1e-8, momentum_decay: NonNegative = 4e-3
) -> Transform:
    r"""Adam's direction with Nesterov momentum that warms up, as in `torch.optim.NAdam`.

    .. math:: \left( \frac{(1 - \mu_t) g_t}{1 - \pi_t} + \frac{\mu_{t+1} m_t}{1 - \pi_{t+1}} \right)
        \Big/ (\sqrt{\hat v_t} + \epsilon), \quad
        \mu_t = \beta_1 (1 - 0.96^{t \psi} / 2), \quad \pi_t = \prod_{i \le t} \mu_i

    Args:
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean of squares, in [0, 1).
        eps: in [0, inf), outside the root.
        momentum_decay: :math:`\psi` in [0, inf).

    References:
        Dozat, 2016, Incorporating Nesterov Momentum into Adam.

    Example:
        >>> params = {"w": torch.ones(2)}
        >>> tx = scale_by_nadam()
        >>> tx.init(params).mu_product.item()
        1.0
    """

    def init(params: Params) -> ScaleByNadamState:
        step = zero_count(params)
        return ScaleByNadamState(
            step, torch.ones_like(step, dtype=torch.float32), zeros_like(params), zeros_like_squares(params)
        )

    def update(updates: Params, state: ScaleByNadamState, params: Params) -> tuple[Params, ScaleByNadamState]:
        del params  # Depends on the gradients only.
        step, dtype = state.step + 1, exact_dtype(updates)
        now = b1 * (1 - 0.5 * torch.pow(0.96, step.to(dtype) * momentum_decay))
        following = b1 * (1 - 0.5 * torch.pow(0.96, (step + 1).to(dtype) * momentum_decay))
        product = state.mu_product * now.float()
        gradient_weight = (1 - now) / (1 - product.to(dtype))
        mean_weight = following / (1 - product.to(dtype) * following)
        root_weight = complement_power(b2, step, dtype).sqrt()
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        new: Params = {}
        for name, g in updates.items():
            ahead = multiply(upcast(g), gradient_weight) + multiply(upcast(mu[name]), mean_weight)
            new[name] = (ahead / (divide(safe_sqrt(nu[name]), root_weight) + eps)).to(g.dtype)
        return new, ScaleByNadamState(step, product, mu, nu)

    return on_pairs(Transform(init, update))


@known_keywords
def nadam(
    learning_rate: Rate = 2e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    momentum_decay: NonNegative = 4e-3,
    weight_decay: NonNegative = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Mask | None = None,
) -> Transform:
    r"""Adam with Nesterov momentum, as `torch.optim.NAdam`; the direction is that of `scale_by_nadam`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        momentum_decay: :math:`\psi`, the rate at which the momentum warms up, in [0, inf).
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient, unless decoupled.
        decoupled_weight_decay: add the decay after the moments, as AdamW does.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Dozat, 2016, Incorporating Nesterov Momentum into Adam.

    Example:
        >>> import torch
        >>> tx = nadam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1056
    """
    decay = decay_parts(weight_decay, mask)
    direction = scale_by_nadam(b1, b2, eps=eps, momentum_decay=momentum_decay)
    return _chain_with_decay(direction, decay, decoupled_weight_decay, learning_rate)


class MomentsState(NamedTuple):
    """State of `scale_by_radam` and `scale_by_adamax`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu: Params  # name -> P: running mean of gradients
    nu: Params  # name -> P: running mean of their squares; for Adamax the decaying maximum of their magnitudes
    missed: Tree = Empty()  # see `counts`


@known_keywords
def scale_by_radam(b1: Decay = 0.9, b2: Decay = 0.999, *, eps: NonNegative = 1e-8) -> Transform:
    r"""Adam's direction with a rectifier for the large variance of :math:`v` in early updates, as `torch.optim.RAdam`.

    With :math:`\rho_t = \rho_\infty - 2 t \beta_2^t / (1 - \beta_2^t)`: :math:`\hat m_t` where
    :math:`\rho_t \le 5`, else :math:`r_t \hat m_t \sqrt{1 - \beta_2^t} / (\sqrt{v_t} + \epsilon)`.

    Args:
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean of squares, in [0, 1).
        eps: in [0, inf), added before the bias correction.

    References:
        Liu et al., 2020, On the Variance of the Adaptive Learning Rate and Beyond.

    Example:
        >>> params = {"w": torch.tensor([3.0])}
        >>> tx = scale_by_radam()
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)  # not yet adaptive
        3.0
    """

    def update(updates: Params, state: MomentsState, params: Params) -> tuple[Params, MomentsState]:
        del params  # Depends on the gradients only.
        state, dtype = state._replace(step=state.step + 1), exact_dtype(updates)
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        counts = update_counts(state, updates)
        mean_weight, square_weight = complement_power(b1, counts, dtype), complement_power(b2, counts, dtype)
        is_adaptive, rectifier = _rectifier(counts.to(dtype), b2, square_weight)
        mean_weights, adaptive = by_name(mean_weight, updates), by_name(is_adaptive, updates)
        factors = by_name(rectifier * square_weight.sqrt(), updates)
        new: Params = {}
        for name, g in updates.items():
            mean, divisor = divide(upcast(mu[name]), mean_weights[name]), safe_sqrt(nu[name]) + eps
            new[name] = torch.where(adaptive[name], multiply(mean, factors[name]) / divisor, mean).to(g.dtype)
        return new, state._replace(mu=mu, nu=nu)

    return on_pairs(Transform(_init_moments, update))


def _rectifier(step: Tensor, b2: Scalar, square_weight: Tensor) -> tuple[Tensor, Tensor]:
    last = 2 / (1 - b2) - 1
    rho = last - 2 * step * (1 - square_weight) / square_weight
    is_adaptive = rho > 5
    # Below the threshold the radicand may be negative; the result is not used there.
    rho = torch.where(is_adaptive, rho, 5.0)
    return is_adaptive, ((rho - 4) * (rho - 2) * last / ((last - 4) * (last - 2) * rho)).sqrt()


@known_keywords
def radam(
    learning_rate: Rate = 1e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Mask | None = None,
) -> Transform:
    r"""Rectified Adam, as `torch.optim.RAdam`; the direction is that of `scale_by_radam`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient, unless decoupled.
        decoupled_weight_decay: add the decay after the moments, as AdamW does.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Liu et al., 2020, On the Variance of the Adaptive Learning Rate and Beyond.

    Example:
        >>> import torch
        >>> tx = radam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    decay = decay_parts(weight_decay, mask)
    return _chain_with_decay(scale_by_radam(b1, b2, eps=eps), decay, decoupled_weight_decay, learning_rate)


@known_keywords
def scale_by_adamax(b1: Decay = 0.9, b2: Decay = 0.999, *, eps: NonNegative = 1e-8) -> Transform:
    r"""Adam's direction with a decaying maximum instead of the root mean square, as in `torch.optim.Adamax`.

    .. math:: \frac{m_t}{(1 - \beta_1^t) u_t}, \quad u_t = \max(\beta_2 u_{t-1}, |g_t| + \epsilon)

    Args:
        b1: decay of the mean, in [0, 1).
        b2: decay of the maximum, in [0, 1).
        eps: in [0, inf).

    References:
        Kingma and Ba, 2015, Adam, section 7.1.

    Example:
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx = scale_by_adamax()
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [1.0, -1.0]
    """

    def update(updates: Params, state: MomentsState, params: Params) -> tuple[Params, MomentsState]:
        del params  # Depends on the gradients only.
        state = state._replace(step=state.step + 1)
        mu = {name: lerp(state.mu[name], g, 1 - b1) for name, g in updates.items()}
        nu = {name: _decay_max(state.nu[name], g, b2, eps) for name, g in updates.items()}
        weights = by_name(bias_corrections(state, updates, b1)[0], updates)
        new = {n: (divide(upcast(mu[n]), weights[n]) / upcast(nu[n])).to(g.dtype) for n, g in updates.items()}
        return new, state._replace(mu=mu, nu=nu)

    return on_pairs(Transform(_init_moments, update))


def _decay_max(peak: Tensor, update: Tensor, decay: Scalar, eps: Scalar) -> Tensor:
    return torch.maximum(multiply(upcast(peak), decay), upcast(update.abs()) + eps).to(peak.dtype)


@known_keywords
def adamax(
    learning_rate: Rate = 2e-3,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
) -> Transform:
    r"""Adam in the infinity norm, as `torch.optim.Adamax`; the direction is that of `scale_by_adamax`.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the maximum, in [0, 1).
        eps: in [0, inf), added to each gradient's magnitude.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient.
        mask: the parameters that decay, as in `masked`; None: all.

    References:
        Kingma and Ba, 2015, Adam, section 7.1.

    Example:
        >>> import torch
        >>> tx = adamax(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1
    """
    return _chain_with_decay(scale_by_adamax(b1, b2, eps=eps), decay_parts(weight_decay, mask), False, learning_rate)


def _init_moments(params: Params) -> MomentsState:
    return MomentsState(**no_updates(params), mu=zeros_like(params), nu=zeros_like_squares(params))


def _chain_with_decay(direction: Transform, decay: list[Transform], decoupled: bool, learning_rate: Rate) -> Transform:
    parts = [direction, *decay] if decoupled else [*decay, direction]
    return chain(*parts, scale_by_learning_rate(learning_rate))
