"""Gradient clipping: by the global norm, by value, and by each unit's weight norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ..state import known_keywords
from ..types import Empty, Params
from .arguments import NonNegative, NonNegativeFloat, Scalar
from .base import Norms, Transform, described, norm_of, stateless
from .complex_params import real_only
from .numerics import multiply, upcast


@known_keywords
def clip_by_global_norm(max_norm: NonNegative) -> Transform:
    """Multiply all updates by ``min(1, max_norm / (norm + 1e-6))``, with the norm of all numbers together.

    Example:
        >>> tx = clip_by_global_norm(1.0)
        >>> updates, _ = tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init({}), {})
        >>> [round(u, 4) for u in updates["w"].tolist()]
        [0.6, 0.8]

    The 1e-6 is taken from `torch.nn.utils.clip_grad_norm_`; optax has none. A norm that is not finite makes every
    update not finite, and the step then skips the update.

    Args:
        max_norm: in [0, inf).

    References:
        Pascanu et al., 2013, On the difficulty of training recurrent neural networks.
    """

    def init(params: Params) -> Empty:
        del params  # No state.
        return Empty()

    def update(updates: Params, state: Empty, params: Params, norms: Norms | None = None) -> tuple[Params, Empty]:
        del params  # The norm depends on the gradients only.
        factor = torch.clamp(max_norm / (norm_of(updates, norms) + 1e-6), max=1.0)
        return {name: multiply(u, factor) for name, u in updates.items()}, state

    return described(Transform(init, update), "clip", takes_norms=True, max_norm=max_norm)


@known_keywords
def clip_by_value(max_value: NonNegative) -> Transform:
    """Clamp each number to ``[-max_value, max_value]``, as `torch.nn.utils.clip_grad_value_`.

    Example:
        >>> tx = clip_by_value(1.0)
        >>> tx.update({"w": torch.tensor([-3.0, 0.5])}, tx.init({}), {})[0]["w"].tolist()
        [-1.0, 0.5]

    Args:
        max_value: in [0, inf).
    """

    def clip(updates: Params, params: Params) -> Params:
        del params  # The bound depends on the gradients only.
        return {name: _clamp(u, max_value) for name, u in updates.items()}

    return real_only(stateless(clip, elementwise=True), "clip_by_value")


def _clamp(leaf: Tensor, limit: Scalar) -> Tensor:
    if isinstance(limit, Tensor):
        bound = limit.to(leaf.dtype)
        return torch.minimum(torch.maximum(leaf, -bound), bound)
    return leaf.clamp(-limit, limit)


@known_keywords
def adaptive_grad_clip(clipping: NonNegative, *, eps: NonNegativeFloat = 1e-3) -> Transform:
    """Clip the gradient norm of each unit to ``clipping * max(weight norm, eps)``.

    Example:
        >>> tx = adaptive_grad_clip(0.1)
        >>> params = {"w": torch.tensor([[3.0, 4.0]])}
        >>> updates, _ = tx.update({"w": torch.tensor([[6.0, 8.0]])}, tx.init(params), params)
        >>> [round(u, 3) for u in updates["w"].flatten().tolist()]
        [0.3, 0.4]

    A unit is one row of a weight matrix, one output channel of a convolution, or a whole vector or scalar.

    Args:
        clipping: in [0, inf); 0.01 in the paper.
        eps: in [0, inf), a lower bound on the weight norm, so that weights at zero can move.

    References:
        Brock et al., 2021, High-Performance Large-Scale Image Recognition Without Normalization, equation 3.
    """

    def clip(updates: Params, params: Params) -> Params:
        return {name: _clip_units(u, params[name], clipping, eps) for name, u in updates.items()}

    return real_only(stateless(clip, elementwise=False), "adaptive_grad_clip")


def _clip_units(update: Tensor, param: Tensor, clipping: Scalar, eps: float) -> Tensor:
    limit = multiply(_unit_norm(param).clamp(min=eps), clipping)
    norm = _unit_norm(update).to(limit.dtype)
    # The clamp avoids 0 / 0 for a unit without gradient.
    factor = torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0)
    value = upcast(update)
    return (value * factor.to(value.dtype)).to(update.dtype)


def _unit_norm(leaf: Tensor) -> Tensor:
    if leaf.ndim < 2:
        return torch.linalg.vector_norm(upcast(leaf))
    return torch.linalg.vector_norm(upcast(leaf), dim=tuple(range(1, leaf.ndim)), keepdim=True)
