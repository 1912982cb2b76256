"""Optimizers that look at a whole parameter at once: its rows and columns, its norm, its singular values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ..errors import ConfigError
from ..hollow import uncompiled
from ..recipes import recipe
from ..transform import (
    NEWTON_SCHULZ,
    Adjust,
    Mask,
    Rate,
    Scalar,
    Transform,
    chain,
    clip_by_block_rms,
    decay_mask,
    decay_parts,
    require,
    require_typed,
    scale_by_adam,
    scale_by_factored_rms,
    scale_by_learning_rate,
    scale_by_muon,
    scale_by_param_block_rms,
    scale_by_relative_step,
    scale_by_shape,
    scale_by_trust_ratio,
)


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
