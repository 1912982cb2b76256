"""The pair of functions, how pairs compose, and what all of them check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, StateError
from ..pickling import recipe
from ..types import Empty, Labels, Params, Tree
from ..validation import is_number
from .numerics import Rate, scalar_dtype

# Norms of larger leaves are taken row by row: one running float32 sum over 34 million numbers is 0.2 % off on a CPU.
_NORM_ROW = 1024


def _alike(params: Params) -> Labels:
    return dict.fromkeys(params, ())


class Transform(NamedTuple):
    """A gradient transformation: two pure functions, and what packing needs to know about them.

    Args:
        init: ``params -> state``. Makes every tensor of the state; scalars are 0-d int64 or float32. Masks are
            resolved here, on the named tree, and kept as the state's structure.
        update: ``(updates, state, params) -> (updates, state)``. The first updates of a chain are the gradients, the
            last are added to the parameters. Inputs are left as they are; structure and dtypes are kept.
        elementwise: each number of the update depends on the same number of the inputs, on scalars, and on reductions
            over all values, so that ``update`` may be given flat concatenations instead of the named tensors.
        labels: ``params -> {name: label}``; parameters with equal labels and dtypes are treated alike, and so may be
            concatenated.

    Example:
        >>> double = Transform(lambda params: Empty(), lambda updates, state, params: (
        ...     {name: 2 * u for name, u in updates.items()}, state))
        >>> params = {"w": torch.ones(2)}
        >>> double.update(params, double.init(params), params)[0]["w"].tolist()
        [2.0, 2.0]
    """

    init: Callable[[Params], Tree]
    update: Callable[[Params, Tree, Params], tuple[Params, Tree]]
    elementwise: bool = True
    labels: Callable[[Params], Labels] = _alike


@recipe
def identity() -> Transform:
    """Updates as they come.

    Example:
        >>> identity().init({"w": torch.ones(2)})
        Empty()
    """
    return stateless(lambda updates, params: updates, elementwise=True)


@recipe
def stateless(fn: Callable[[Params, Params], Params], *, elementwise: bool = False) -> Transform:
    """A transform without state from ``fn(updates, params) -> updates``.

    Args:
        fn: a pure function of the updates and the parameters.
        elementwise: see `Transform`. Compiled steps are smaller where it is True, and wrong where ``fn`` goes by names
            or by whole tensors.

    Example:
        >>> halve = stateless(lambda updates, params: {name: u / 2 for name, u in updates.items()})
        >>> halve.update({"w": torch.ones(1)}, Empty(), {})[0]["w"].item()
        0.5
    """

    def init(params: Params) -> Empty:
        del params  # There is nothing to remember.
        return Empty()

    def update(updates: Params, state: Empty, params: Params) -> tuple[Params, Empty]:
        return fn(updates, params), state

    return Transform(init, update, elementwise)


@recipe
def chain(*transforms: Transform) -> Transform:
    """One transform after another; the state is the tuple of their states.

    Args:
        transforms: applied from left to right. Chains nest.

    Raises:
        ConfigError: a part that is no transform.
        StateError: at update, for a state of another number of parts.

    Example:
        >>> tx = chain(identity(), identity())
        >>> tx.init({"w": torch.ones(2)})
        (Empty(), Empty())
    """
    given: tuple[Any, ...] = transforms
    for number, part in enumerate(given):
        if not isinstance(part, Transform):
            many = isinstance(part, list | tuple)
            raise ConfigError(
                f"part {number} is a {type(part).__name__}",
                where="chain",
                hint="optim.chain(first, second), not a list of them" if many else "optim.adamw(1e-3), called",
            )

    def init(params: Params) -> tuple[Tree, ...]:
        return tuple(tx.init(params) for tx in transforms)

    def update(updates: Params, state: tuple[Tree, ...], params: Params) -> tuple[Params, tuple[Tree, ...]]:
        if len(state) != len(transforms):
            raise StateError(
                f"a chain of {len(transforms)} transforms was given a state of {len(state)} parts",
                where="opt_state",
                hint="opt_state = tx.init(params)",
            )
        new_state: list[Tree] = []
        for tx, part in zip(transforms, state, strict=True):
            updates, new_part = tx.update(updates, part, params)
            new_state.append(new_part)
        return updates, tuple(new_state)

    def labels(params: Params) -> Labels:
        parts = [tx.labels(params) for tx in transforms]
        return {name: tuple(part[name] for part in parts) for name in params}

    return Transform(init, update, all(tx.elementwise for tx in transforms), labels)


class StepState(NamedTuple):
    """State of a transform that only counts."""

    step: Tensor  # shape=(), dtype=int64: updates done
    missed: Tree = Empty()  # of the updates, those that a parameter had no gradient in


def apply_updates(params: Params, updates: Params) -> Params:
    """``params + updates``, each in its parameter's dtype, rounded once.

    Args:
        params: name -> P.
        updates: name -> P, in the parameter's dtype or a wider one.

    Example:
        >>> apply_updates({"w": torch.ones(2)}, {"w": torch.full((2,), -0.5)})["w"].tolist()
        [0.5, 0.5]
    """
    return {name: (param + updates[name]).to(param.dtype) for name, param in params.items()}


def global_norm(updates: Params) -> Tensor:
    """The 2-norm of all numbers together, accumulated in at least float32.

    Args:
        updates: name -> P, on one device; may be empty (norm 0).

    Returns:
        shape=(); float64 where a leaf is float64, else float32.

    Example:
        >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}).item()
        5.0
    """
    if not updates:
        return torch.zeros(())
    dtype = scalar_dtype(updates)
    norms = [_leaf_norm(leaf, dtype) for leaf in updates.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _leaf_norm(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    if leaf.numel() < 64 * _NORM_ROW:
        return torch.linalg.vector_norm(leaf, dtype=dtype)
    # In the order that it lies in, so that a turned weight has the same norm as in a packed state.
    flat = leaf.permute(sorted(range(leaf.dim()), key=lambda dim: -leaf.stride(dim))).flatten()
    rows, rest = flat.split([flat.numel() // _NORM_ROW * _NORM_ROW, flat.numel() % _NORM_ROW])
    norms = torch.linalg.vector_norm(rows.view(-1, _NORM_ROW), dim=1, dtype=dtype)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(part, dtype=dtype) for part in (norms, rest)])
    )


def require(where: str, /, *, low: float = 0.0, high: float = math.inf, **values: Any) -> None:
    """Numbers in ``[low, high)``; tensors are taken on trust, since reading one would wait for the device.

    Raises:
        ConfigError: naming the argument, its value and the range.

    Example:
        >>> require("scale_by_adam", high=1.0, b1=1.5)
        Traceback (most recent call last):
        purestep.errors.ConfigError: scale_by_adam: b1 is 1.5, outside [0.0, 1.0) (cure: b1=0.0)
    """
    for name, value in values.items():
        if isinstance(value, Tensor):
            continue
        if callable(value):
            raise ConfigError(
                f"{name} is a schedule, and only learning_rate takes one",
                where=where,
                hint=f"optim.inject(optim.{where})(..., {name}=schedule)",
            )
        if not is_number(value) or not low <= value < high:
            found = (
                f"outside [{low}, {high})" if is_number(value) else f"a {type(value).__name__}, no int, float or tensor"
            )
            hint = f"{name}={1e-3 if name == 'learning_rate' else 1.0 if math.isinf(low) else low}"
            raise ConfigError(f"{name} is {value!r}, {found}", where=where, hint=hint)


def require_rate(where: str, learning_rate: Rate) -> None:
    """A learning rate that is a schedule, a tensor or a number of at least 0; else a `ConfigError`."""
    given: Any = learning_rate
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"learning_rate is a {type(given).__name__}, which counts its own steps",
            where=where,
            hint=f"schedules.from_torch_scheduler({type(given).__name__}, 1e-3, steps=10_000, ...)",
        )
    if not callable(learning_rate):
        require(where, learning_rate=learning_rate)


def require_arguments(
    where: str, /, learning_rate: Rate, *, below_one: Mapping[str, Any] | None = None, **values: Any
) -> None:
    """What a named optimizer was called with, under the names of its own arguments, which its parts do not know.

    Raises:
        ConfigError: naming the optimizer, the argument, its value and the range.

    Example:
        >>> require_arguments("sgd", 0.1, momentum=-0.9)
        Traceback (most recent call last):
        purestep.errors.ConfigError: sgd: momentum is -0.9, outside [0.0, inf) (cure: momentum=0.0)
    """
    require_rate(where, learning_rate)
    require(where, high=1.0, **(below_one or {}))
    require(where, **values)
