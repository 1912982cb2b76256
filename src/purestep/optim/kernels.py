"""torch's fused optimizer kernels: an update in one pass over the memory, where separate operations take twenty.

A kernel writes into the memory of weights and moments. So it serves eager steps only: a graph, a transform of
`torch.func` and a derivative through the step use ``Transform.update``, which gives the same numbers within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..torch_ext import foreach, tensor_layout, tracing
from ..types import Params, Tree
from .arguments import Rate, Scalar
from .base import Fast, Launch, Transform
from .numerics import by_name, rate_at, update_count
from .scale import ScaleByLearningRateState, rate_leaf
from .wrappers import MaskedState

_DTYPES = (torch.float32, torch.float64)


def copied(tensors: Mapping[str, Tensor]) -> Params:
    """Copies of plain tensors with their strides, by few launches on a GPU."""
    return dict(zip(tensors, foreach.clone(list(tensors.values())), strict=True))


class _Moments(NamedTuple):
    """Where a chain keeps its running means, and how a kernel writes them."""

    read: Callable[[Tree], tuple[Params, ...]]  # state of the chain -> trees by parameter
    write: Callable[[Tree, tuple[Params, ...]], Tree]  # the state after one more update, with these trees
    launch: Callable[..., None]  # ([params, updates, *moments] as lists, counts; lr, weight_decay, found_inf)
    counts: Callable[
        [Tree, list[str]], Mapping[str, Tensor]
    ]  # (state, names) -> updates of each with this one, if used


def adam(
    whole: Transform,
    learning_rate: Rate,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
    *,
    decoupled: bool,
) -> Fast | None:
    """The kernel of ``torch.optim.Adam(fused=True)`` for adam or adamw; None if a hyperparameter is a tensor.

    Args:
        whole: the chain, without an option that the kernel lacks.
        learning_rate: a number, a tensor or a schedule.
        b1: decay of the mean.
        b2: decay of the mean of squares.
        eps: outside the root.
        weight_decay: of the parameters that the state of the weight decay selects.
        decoupled: as in AdamW: the weight decay comes after Adam.
    """
    if any(isinstance(number, Tensor) for number in (b1, b2, eps)):
        return None
    at = 0 if decoupled else -2

    def read(state: Tree) -> tuple[Params, ...]:
        return state[at].mu, state[at].nu

    def write(state: Tree, moments: tuple[Params, ...]) -> Tree:
        own = state[at]._replace(step=state[at].step + 1, mu=moments[0], nu=moments[1])
        return (own, *state[1:]) if decoupled else (*state[:-2], own, state[-1])

    fixed = cast(Any, {"beta1": b1, "beta2": b2, "eps": eps, "decoupled": decoupled})

    def launch(lists: list[list[Tensor]], counts: list[Tensor], **options: Any) -> None:
        params, updates, mu, nu = lists
        foreach.adam_(params, updates, mu, nu, counts, **fixed, **options)

    def counted(state: Tree, names: list[str]) -> dict[str, Tensor]:
        return by_name((update_count(state[at].step, state[at].missed, names) + 1).float(), names)

    return _fast(whole, learning_rate, weight_decay, _Moments(read, write, launch, counted))


def sgd(whole: Transform, learning_rate: Rate, momentum: Scalar, nesterov: bool, weight_decay: Scalar) -> Fast | None:
    """The kernel of ``torch.optim.SGD(fused=True)`` for sgd without dampening; None if a hyperparameter is a tensor.

    Args:
        whole: the chain.
        learning_rate: a number, a tensor or a schedule.
        momentum: 0 for a chain without a `trace`.
        nesterov: as in the `trace`.
        weight_decay: of the parameters that the state of the weight decay selects.
    """
    if isinstance(momentum, Tensor):
        return None

    def read(state: Tree) -> tuple[Params, ...]:
        return (state[-2].trace,) if momentum else ()

    def write(state: Tree, moments: tuple[Params, ...]) -> Tree:
        return (*state[:-2], state[-2]._replace(trace=moments[0]), state[-1]) if momentum else state

    def launch(lists: list[list[Tensor]], counts: list[Tensor], **options: Any) -> None:
        del counts
        params, updates, *sums = lists
        foreach.sgd_(params, updates, sums[0] if sums else [], momentum=momentum, nesterov=nesterov, **options)

    return _fast(whole, learning_rate, weight_decay, _Moments(read, write, launch, lambda state, names: {}))


def _fast(whole: Transform, learning_rate: Rate, weight_decay: Scalar, moments: _Moments) -> Fast | None:
    """A kernel for a chain whose last part is `scale_by_learning_rate`."""
    if isinstance(weight_decay, Tensor):
        return None

    def kernel(updates: Params, state: Tree, params: Params) -> Launch | None:
        trees, scaled = moments.read(state), cast(ScaleByLearningRateState, state[-1])
        if not _fit(params, updates, *trees):
            return None
        rate = rate_at(learning_rate, scaled.step)
        if isinstance(rate, Tensor):
            if tracing.followed([rate]):
                return None
            rate = rate.detach().to(scaled.step.device)
            rate = rate if rate.device.type == "cpu" else rate.float()  # the kernels on a GPU read a float32
        elif not 0 <= rate < math.inf:  # a schedule's number: the tree's update reports it, and is refused
            return None

        def run(updates: Params, ready: Any, owned: bool, unused: Collection[str]) -> tuple[Params, Tree]:
            new, written = params, trees
            if ready is not False:
                if not owned:
                    new, *written = [copied(tree) for tree in (params, *trees)]
                refused = (~ready).float() if isinstance(ready, Tensor) else None
                counts = moments.counts(state, list(updates))
                for group, amount in _groups(updates, state, weight_decay):
                    names = [name for name in group if name not in unused]
                    if not names:
                        continue
                    lists = [[tree[name] for name in names] for tree in (new, updates, *written)]
                    own = [counts[name] for name in names] if counts else []
                    moments.launch(lists, own, lr=rate, weight_decay=amount, found_inf=refused)
            counted = scaled._replace(step=scaled.step + 1, learning_rate=rate_leaf(rate, scaled.step))
            return new, (*moments.write(state, tuple(written))[:-1], counted)

        return Launch([rate] if isinstance(rate, Tensor) else [], run)

    return Fast(whole.update, kernel=kernel)


def _groups(updates: Params, state: Tree, weight_decay: float) -> list[tuple[list[str], float]]:
    """The parameters that decay, and those that do not, each with its weight decay."""
    selected = next((part.selected for part in state if isinstance(part, MaskedState)), updates)
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
            if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.layout is not torch.strided:
                return False
            if not (leaf.is_contiguous() if flat else leaf.stride() == param.stride()):
                return False
    return tracing.may_overwrite(leaf for tree in (params, *others) for leaf in tree.values())


def _is_dense(leaf: Tensor) -> bool:
    """True if the elements fill a block of memory, each once."""
    return tensor_layout.extent(leaf) == leaf.numel() and not tensor_layout.overlaps(leaf)
