"""Adam and AdamW."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Empty, Params, Tree
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain, described
from .complex_params import on_pairs
from .counts import bias_corrections, no_updates
from .numerics import adam_quotients, decay_square, lerp, zeros_like, zeros_like_squares
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

    Example:
        >>> tx = scale_by_adam(eps=0.0)
        >>> params = {"w": torch.tensor([2.0, -3.0])}
        >>> tx.update(params, tx.init(params), params)[0]["w"].round(decimals=4).tolist()
        [1.0, -1.0]

    The arguments are those of `adam`.

    References:
        Kingma and Ba, 2015, Adam; Reddi et al., 2018, On the Convergence of Adam and Beyond.
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

    Example:
        >>> tx = adam(0.1)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), coupled: ``weight_decay * weights`` is added to the gradient. `adamw` decouples it.
        mask: the parameters that decay, as in `masked`; None: all.
        amsgrad: divide by the running maximum of the mean of squares.
        mu_dtype: dtype of the mean of gradients; None: each parameter's.
        nu_dtype: dtype of the mean of squares; None: each parameter's, but float32 for float16, where the square of
            any number below 2e-4 is 0. In bfloat16 the mean of squares stops changing close to its limit, because
            1 - b2 is smaller than the rounding error.

    References:
        Kingma and Ba, 2015, Adam: A Method for Stochastic Optimization.
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

    Example:
        >>> tx = adamw(0.1, weight_decay=0.0)
        >>> params = {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

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
    """
    return chain(
        scale_by_adam(b1, b2, eps=eps, amsgrad=amsgrad, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        *decay_parts(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
