"""torch's fused optimizer kernels: an update in one pass over the memory, where separate operations take twenty.

A kernel writes into the memory of weights and moments. So it serves eager steps only: a graph, a transform of
`torch.func` and a derivative through the step use ``Transform.update``, which gives the same numbers within rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from .. import tracing
from ..types import Params, Tree
from .base import Kernel, Transform
from .numerics import Rate, Scalar, by_name, rate_at, update_count, usable
from .scale import rate_leaf

_DTYPES = (torch.float32, torch.float64)


def copied(tensors: Mapping[str, Tensor]) -> Params:
    """Copies of plain tensors with their strides, by few launches on a GPU."""
    if not tensors:
        return {}
    leaves = list(tensors.values())
    # A loop of clones is faster on a CPU; x * 1 is one launch for all tensors elsewhere, and exact.
    copies = [leaf.clone() for leaf in leaves] if leaves[0].device.type == "cpu" else torch._foreach_mul(leaves, 1)  # pyright: ignore[reportPrivateUsage]  # documented
    return dict(zip(tensors, copies, strict=True))


def with_adam(
    whole: Transform,
    learning_rate: Rate,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
    *,
    decoupled: bool,
) -> Transform:
    """Add the kernel of `torch.optim.adam.adam` to adam or adamw. A hyperparameter that is a tensor has none.

    Args:
        whole: the chain, without an option that the kernel lacks.
        learning_rate: a number, a tensor or a schedule.
        b1: decay of the mean.
        b2: decay of the mean of squares.
        eps: outside the root.
        weight_decay: of the parameters that the state of the weight decay selects.
        decoupled: as in AdamW: the weight decay comes after Adam.
    """
    if any(isinstance(number, Tensor) for number in (b1, b2, eps, weight_decay)):
        return whole
    at = 0 if decoupled else -2

    def fits(updates: Params, state: Tree, params: Params) -> bool:
        return _fit(params, updates, state[at].mu, state[at].nu)

    def run(updates: Params, state: Tree, params: Params, ready: Tensor, owned: bool) -> tuple[Params, Tree]:
        moments, scaled = state[at], state[-1]
        decay = state[1 if decoupled else 0] if len(state) == 3 else None
        rate = rate_at(learning_rate, scaled.step)
        if isinstance(rate, Tensor):
            rate = rate.detach().to(ready.device)
            ready = ready & usable(rate)
        mu, nu = moments.mu, moments.nu
        on_host = ready.device.type == "cpu" and tracing.may_read(ready)
        refused = None if on_host else (~ready).float()
        if on_host and not ready:
            return params, _counted(state, at, moments, rate)
        if not owned:
            params, mu, nu = copied(params), copied(mu), copied(nu)
        steps = _own_counts(moments, updates)
        for names, amount in _groups(updates, getattr(decay, "selected", updates), weight_decay):
            torch_adam(
                *([tree[name] for name in names] for tree in (params, updates, mu, nu)),
                [],
                [steps[name] for name in names],
                fused=True,
                found_inf=refused,
                decoupled_weight_decay=decoupled,
                amsgrad=False,
                beta1=b1,
                beta2=b2,
                lr=rate,
                weight_decay=amount,
                eps=eps,
                maximize=False,
            )
        return params, _counted(state, at, moments._replace(mu=mu, nu=nu), rate)

    return whole._replace(kernel=Kernel(fits, run))


def _counted(state: tuple[Tree, ...], at: int, moments: Any, rate: Scalar) -> tuple[Tree, ...]:
    """The state of a chain after one more update."""
    new, scaled = list(state), state[-1]
    new[at] = moments._replace(step=moments.step + 1)
    new[-1] = scaled._replace(step=scaled.step + 1, learning_rate=rate_leaf(rate, scaled.step))
    return tuple(new)


def _own_counts(moments: Any, names: Params) -> Mapping[str, Tensor]:
    """The updates done for each parameter, shape=() and float32, in memory of their own: the kernel advances them."""
    counts = update_count(moments.step, moments.missed, names).float()
    if counts.dim():
        return by_name(counts, names)
    return dict(zip(names, counts.expand(len(names)).clone().unbind(), strict=True))


def _groups(updates: Params, selected: Mapping[str, Any], weight_decay: float) -> list[tuple[list[str], float]]:
    if not weight_decay or len(selected) == len(updates):
        return [(list(updates), weight_decay)]
    decaying, others = [name for name in updates if name in selected], [n for n in updates if n not in selected]
    return [(names, amount) for names, amount in ((decaying, weight_decay), (others, 0.0)) if names]


def _fit(params: Params, *others: Params) -> bool:
    """True if a kernel may write into these tensors: plain ones, of one dtype and layout for each parameter."""
    for name, param in params.items():
        dtype, flat = param.dtype, param.is_contiguous()
        if dtype not in _DTYPES or param.device.type not in ("cpu", "cuda") or not (flat or _is_dense(param)):
            return False
        for other in others:
            leaf = other[name]
            same = leaf.is_contiguous() if flat else leaf.stride() == param.stride()
            if type(leaf) is not Tensor or leaf.dtype is not dtype or not same:
                return False
    return tracing.may_overwrite(params.values())


def _is_dense(leaf: Tensor) -> bool:
    """True if the elements fill a block of memory, each once."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True
