"""What a step has to keep to, checked while its graph is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import tree
from ..errors import StepContractError
from ..metrics import merge
from ..types import Metrics
from . import treespec


def checked(result: Any) -> tuple[Any, Metrics]:
    """What a step returned, if it is a state and a dict of metrics.

    Raises:
        StepContractError: it is not.
    """
    if not isinstance(result, tuple) or len(cast(tuple[Any, ...], result)) != 2:
        raise StepContractError(
            f"returned a {type(result).__name__}", where="step", hint="return (state, metrics): a pair"
        )
    state, metrics = cast(tuple[Any, Any], result)
    if not isinstance(metrics, dict):
        raise StepContractError(
            f"returned metrics of type {type(metrics).__name__}", where="step", hint="return (state, {name: ps.Mean})"
        )
    return state, tensors_alone(cast(Metrics, metrics))


def tensors_alone(metrics: Metrics) -> Metrics:
    """The metrics, if they are tensors.

    Raises:
        StepContractError: one has a number of Python's, which a graph does not return.
    """
    if torch.compiler.is_dynamo_compiling():
        return metrics  # a run on fake tensors has asked
    for path, leaf in tree.with_paths(metrics):
        if not isinstance(leaf, Tensor):
            raise StepContractError(
                f"metric {path!r} is a {type(leaf).__name__}, not a tensor",
                where="step",
                hint="{name: ps.Mean(total, weight)}, two tensors; ps.metrics.as_mean(value) of a number",
            )
    return metrics


def same_structure(bare: tree.Tree, old: Any, new: Any) -> list[Tensor]:
    """The leaves of the new state, if it is one of the same structure, shapes and dtypes.

    Args:
        bare: from `skeleton.of`.
        old: the state that went in.
        new: the state that came out.

    Raises:
        StepContractError: the first leaf that differs.
    """
    if torch.compiler.is_dynamo_compiling():
        # Dynamo can neither compare structures nor raise; fit and the trace check them.
        return treespec.collect(bare, new)
    before, old_def = tree.flatten(old)
    after, new_def = tree.flatten(new)
    if old_def != new_def:
        raise StepContractError(
            f"the structure of the state changes: {_difference(old, new) or _other_node(old_def, new_def)}",
            where="step",
            hint="return a state of the structure that went in",
        )
    for index, (left, right) in enumerate(zip(before, after, strict=True)):
        same = isinstance(right, Tensor) and (left.shape, left.dtype) == (right.shape, right.dtype)
        if not same:
            found = f"{list(right.shape)} {right.dtype}" if isinstance(right, Tensor) else type(right).__name__
            raise StepContractError(
                f"goes in as {list(left.shape)} {left.dtype} and comes out as {found}",
                where=tree.paths(old)[index],
                hint="keep shape and dtype of every leaf (.to(old.dtype))",
            )
    return after


def _difference(old: Any, new: Any) -> str:
    before, after = set(tree.paths(old)), set(tree.paths(new))
    gone, come = sorted(before - after)[:3], sorted(after - before)[:3]
    return f"without {gone}, with {come}" if gone or come else ""


def _other_node(old: tree.TreeDef, new: tree.TreeDef, path: str = "state") -> str:
    """Where two structures whose leaves have the same paths differ."""
    if old.type is not new.type:
        before, after = (getattr(found.type, "__name__", "leaf") for found in (old, new))
        return f"{path} goes in as {before} and comes out as {after}"
    if old.entries() == new.entries():
        for entry, one, other in zip(old.entries(), old.children(), new.children(), strict=True):
            if one != other:
                return _other_node(one, other, f"{path}/{entry}")
    return f"{path} comes out with its keys in another order, or made with something else"


def unrolled(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step once a batch of a list, metrics merged."""

    def steps(state: Any, batches: Sequence[Any]) -> tuple[Any, Metrics]:
        total: Metrics = {}
        for batch in batches:
            state, metrics = checked(step(state, batch))
            total = merge(total, metrics)
        return state, total

    return steps
