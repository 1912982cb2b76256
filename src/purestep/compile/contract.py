"""Checks of what a step returns, made while its graph is captured."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from .. import tree
from ..errors import StepContractError
from ..types import Metrics


def checked(result: Any) -> tuple[Any, Metrics]:
    """Return a step's result after a check that it is a pair of a state and a dict of metrics.

    Raises:
        StepContractError: it is not.
    """
    if not isinstance(result, tuple) or len(cast(tuple[Any, ...], result)) != 2:
        raise StepContractError(
            f"the step returned a {type(result).__name__}", where="step", hint="return (state, metrics): a pair"
        )
    state, metrics = cast(tuple[Any, Any], result)
    if not isinstance(metrics, dict):
        raise StepContractError(
            f"the step returned metrics of type {type(metrics).__name__}",
            where="step",
            hint="return (state, {name: ps.Mean})",
        )
    return state, tensors_alone(cast(Metrics, metrics))


def tensors_alone(metrics: Metrics) -> Metrics:
    """Return the metrics after a check that their leaves are tensors.

    Raises:
        StepContractError: a leaf is a Python number, which a graph cannot return.
    """
    for path, leaf in tree.with_paths(metrics):
        if not isinstance(leaf, Tensor):
            raise StepContractError(
                f"metric {path!r} is a {type(leaf).__name__}, not a tensor",
                where="step",
                hint="return {name: ps.Mean(total, weight)} of two tensors, or ps.metrics.as_mean(value) for a number",
            )
    return metrics


def same_structure(old: Any, new: Any) -> list[Tensor]:
    """Return the leaves of the new state after a check that structure, shapes and dtypes are those of the old one.

    Args:
        old: the state passed to the step.
        new: the state that the step returned.

    Raises:
        StepContractError: they differ; names the first such leaf.
    """
    before, old_def = tree.flatten(old)
    after, new_def = tree.flatten(new)
    if old_def != new_def:
        raise StepContractError(
            f"the structure of the state changes: {_difference(old, new)}",
            where="step",
            hint="return a state of the same structure as the input state",
        )
    for index, (left, right) in enumerate(zip(before, after, strict=True)):
        same = isinstance(right, Tensor) and (left.shape, left.dtype) == (right.shape, right.dtype)
        if not same:
            found = f"{list(right.shape)} {right.dtype}" if isinstance(right, Tensor) else type(right).__name__
            raise StepContractError(
                f"the leaf goes in as {list(left.shape)} {left.dtype} and comes out as {found}",
                where=tree.paths(old)[index],
                hint="keep shape and dtype of every leaf: call .to(old.dtype)",
            )
    return after


def _difference(old: Any, new: Any) -> str:
    before, after = set(tree.paths(old)), set(tree.paths(new))
    gone, come = sorted(before - after)[:3], sorted(after - before)[:3]
    return f"without {gone}, with {come}" if gone or come else "a node has another type, or its keys another order"
