"""Muon: orthogonalized momentum for weight matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import StateError
from ..model import unwrapped
from ..state import check_choice, known_keywords
from ..types import Params
from .arguments import Decay, NonNegative, NonNegativeFloat, Rate, Scalar, within
from .base import Transform, chain, stateless
from .complex_params import real_only
from .numerics import lerp, multiply, zeros_like
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask, decay_mask


def _check_adjust(where: str, name: str, value: Any, cure: str) -> None:
    if isinstance(value, str) or value is None:
        check_choice(where, ("original", "match_rms_adamw"), also="a number", **{name: value})
    else:
        within()(where, name, value, cure)


Adjust: TypeAlias = Annotated[Literal["original", "match_rms_adamw"] | Scalar, _check_adjust]
_Steps: TypeAlias = Annotated[int, within(0, 100)]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al., 2024, steepest at 0; `torch.optim.Muon` has the same."""

_MUON_CURE = 'optim.partition({"muon": optim.muon(...), "adamw": optim.adamw(...)}, optim.muon_labels(model))'


class ScaleByMuonState(NamedTuple):
    """State of `scale_by_muon`."""

    mu: Params  # name -> P: running mean of gradients


@known_keywords
def scale_by_muon(
    momentum: Decay = 0.95,
    *,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
    ns_steps: _Steps = 5,
    eps: NonNegativeFloat = 1e-7,
    flatten: bool = False,
) -> Transform:
    r"""Momentum, then the nearest (semi-)orthogonal matrix by Newton-Schulz steps in bfloat16, as `torch.optim.Muon`.

    Example:
        >>> params = {"w": torch.eye(2)}
        >>> tx = scale_by_muon()
        >>> update = tx.update(params, tx.init(params), params)[0]["w"]
        >>> bool((torch.linalg.svdvals(update) - 1).abs().max() < 0.4)
        True

    The arguments are those of `muon`.

    Raises:
        StateError: at init, if a parameter is not a matrix (with ``flatten``, has fewer than 2 dimensions).

    References:
        Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks.
    """

    def init(params: Params) -> ScaleByMuonState:
        for name, param in params.items():
            if param.ndim != 2 and not (flatten and param.ndim > 2):
                raise StateError(
                    f"muon needs matrices, but this parameter has shape {tuple(param.shape)}",
                    where=f"params/{name}",
                    hint=_MUON_CURE if flatten or param.ndim < 2 else f"flatten=True for convolutions, or {_MUON_CURE}",
                )
        return ScaleByMuonState(zeros_like(params))

    def update(updates: Params, state: ScaleByMuonState, params: Params) -> tuple[Params, ScaleByMuonState]:
        del params  # Depends on the gradients only.
        mu = {name: lerp(state.mu[name], g, 1 - momentum) for name, g in updates.items()}
        ahead = {name: lerp(g, mu[name], momentum) for name, g in updates.items()} if nesterov else mu
        new = {
            name: _orthogonalize(ahead[name].flatten(1), ns_coefficients, ns_steps, eps).to(g.dtype).view_as(g)
            for name, g in updates.items()
        }
        return new, ScaleByMuonState(mu)

    return real_only(Transform(init, update, elementwise=False), "muon")


def _orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    # The iteration converges for spectral norms up to 1; the Frobenius norm is an upper bound of the spectral norm.
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@known_keywords
def scale_by_shape(adjust: Adjust = "original") -> Transform:
    r"""Multiply orthogonal updates by a factor of the matrix shape, so that one learning rate fits all matrices.

    Example:
        >>> params = {"w": torch.ones(4, 1)}
        >>> scale_by_shape().update(params, (), params)[0]["w"][0].item()
        2.0

    Args:
        adjust: ``"original"``: :math:`\sqrt{\max(1, rows / columns)}`; a number r: :math:`r \sqrt{\max(rows,
            columns)}`, so that the root mean square of every update is r; ``"match_rms_adamw"``: 0.2, which suits the
            learning rate and weight decay of AdamW. Dimensions after the first are columns.

    References:
        Liu et al., 2025, Muon is Scalable for LLM Training.
    """

    def factor(rows: int, columns: int) -> Scalar:
        if adjust == "original":
            return math.sqrt(max(1, rows / columns))
        rms: Any = 0.2 if adjust == "match_rms_adamw" else adjust
        return rms * math.sqrt(max(rows, columns))

    def fn(updates: Params, params: Params) -> Params:
        del params  # Depends on the shapes of the updates only.
        return {name: multiply(u, factor(u.shape[0], math.prod(u.shape[1:]))) for name, u in updates.items()}

    return real_only(stateless(fn, elementwise=False), "scale_by_shape")


@known_keywords
def muon(
    learning_rate: Rate = 1e-3,
    momentum: Decay = 0.95,
    *,
    nesterov: bool = True,
    weight_decay: NonNegative = 0.1,
    ns_coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
    ns_steps: _Steps = 5,
    eps: NonNegativeFloat = 1e-7,
    adjust: Adjust = "original",
    mask: Mask | None = None,
    flatten: bool = False,
) -> Transform:
    r"""Muon, as `torch.optim.Muon`: momentum with all singular values set to about 1, for hidden weight matrices.

    Example:
        >>> from purestep.optim import adamw, partition
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> tx = partition({"muon": muon(0.02), "adamw": adamw(3e-4)}, muon_labels(model, skip=("2",)))
        >>> state = tx.init(dict(model.named_parameters()))
        >>> {label: list(group.selected) for label, group in state.groups.items()}
        {'muon': ['1.weight'], 'adamw': ['0.weight', '1.bias', '2.weight', '2.bias']}

    Train embeddings, heads, biases and norms with another optimizer; see the example. Not elementwise.

    Args:
        learning_rate: :math:`\gamma` in [0, inf), or a schedule.
        momentum: decay of the mean of gradients, in [0, 1).
        nesterov: orthogonalize the interpolation of gradient and mean, instead of the mean.
        weight_decay: :math:`\lambda` in [0, inf), decoupled.
        ns_coefficients: :math:`(a, b, c)` of :math:`X \leftarrow a X + b (X X^\top) X + c (X X^\top)^2 X`.
        ns_steps: number of Newton-Schulz steps, in [0, 100).
        eps: a lower bound on the Frobenius norm to divide by.
        adjust: the factor for the matrix shape, see `scale_by_shape`: ``"original"``; ``"match_rms_adamw"``, which
            suits the learning rate and weight decay of AdamW; or a number, the root mean square of every update.
        mask: the parameters that decay, as in `masked`; None: all.
        flatten: also take parameters of more dimensions, such as the kernels of convolutions, as matrices whose rows
            are the first dimension; ``muon_labels(model, flatten=True)`` labels them.

    Raises:
        StateError: at init, if a parameter is not a matrix (with ``flatten``, has fewer than 2 dimensions).

    References:
        Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks; Liu et al., 2025, Muon is
        Scalable for LLM Training.
    """
    direction = scale_by_muon(
        momentum, nesterov=nesterov, ns_coefficients=ns_coefficients, ns_steps=ns_steps, eps=eps, flatten=flatten
    )
    return chain(
        direction,
        scale_by_shape(adjust),
        *decay_parts(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def muon_labels(model: torch.nn.Module, *, skip: Sequence[str] = (), flatten: bool = False) -> dict[str, str]:
    """Label the parameters of a model for `partition`: ``"muon"`` for weight matrices, ``"adamw"`` for the rest.

    Example:
        >>> muon_labels(torch.nn.Linear(2, 2))
        {'weight': 'muon', 'bias': 'adamw'}

    The rest are vectors, scalars, convolutions without ``flatten``, the weights of norms and embeddings, and matrices
    tied to one of these.

    Args:
        model: a module; a tied parameter is labelled under each of its names.
        skip: further parameters for AdamW, usually the output head: full names, or any part between two dots.
        flatten: label weights of more than 2 dimensions, such as the kernels of convolutions, ``"muon"`` too, for
            ``muon(..., flatten=True)``.

    Returns:
        name -> ``"muon"`` or ``"adamw"``.

    Raises:
        ConfigError: no parameter has a name in ``skip``.
    """
    model = unwrapped(model)
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    rest = {id(module.weight) for module in model.modules() if isinstance(module, tables)}
    named = dict(model.named_parameters(remove_duplicate=False))
    is_weight = decay_mask(model, skip=skip)
    # By identity: the state holds a tied matrix under one of its names only.
    fits = {id(param) for param in named.values() if param.ndim == 2 or (flatten and param.ndim > 2)}
    rest |= {id(param) for name, param in named.items() if id(param) not in fits or not is_weight[name]}
    return {name: "adamw" if id(param) in rest else "muon" for name, param in named.items()}
