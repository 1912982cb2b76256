"""Copies of batch leaves that the model writes in place, so that the caller's batch does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .. import tree
from ..errors import StepContractError
from ..model import write_check
from ..torch_ext import tensor_layout, tracing
from ..types import Batch

_Objective = TypeVar("_Objective", bound=Callable[..., Any])


def untouched(objective: _Objective) -> _Objective:
    """Wrap an objective, or another function of a model and a batch. The model may write its batch in place, as a first
    layer ``nn.ReLU(inplace=True)`` does.

    The first call for each batch structure, in train and in eval mode, runs on copies and records which of them the
    model writes; later calls copy only those leaves. Inside our own capture nothing is copied here: `compile.graphs`
    passes a copy of the batch.

    Raises:
        StepContractError: from the wrapped function: a later call writes a leaf that the first call did not.
    """
    known: dict[tuple[bool, tree.TreeDef], set[int]] = {}  # (train mode, structure of a batch) -> the written leaves

    def on_copies(model: Any, batch: Batch, *context: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the compiler removes copies that are not written
            return objective(model, tree.map(_copy, batch), *context)
        if tracing.in_graph():
            return objective(model, batch, *context)
        leaves, treedef = tree.flatten(batch)
        kind = getattr(model, "training", False), treedef
        copied = known.get(kind, set(range(len(leaves))))
        for index in copied:
            leaves[index] = _copy(leaves[index])
        given = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        before = write_check.marks(given)
        loss = objective(model, tree.unflatten(treedef, leaves), *context)
        after = write_check.marks(given)
        written = {index for index, mark in before.items() if after[index] != mark} if after != before else set[int]()
        if not written <= copied:
            raise _written(tree.with_paths(batch)[min(written - copied)][0])
        known.setdefault(kind, written)
        return loss

    on_copies.__wrapped__ = objective  # pyright: ignore[reportFunctionMemberAccess]  # for `inspect.unwrap`
    on_copies.is_sum = getattr(objective, "is_sum", False)  # pyright: ignore[reportFunctionMemberAccess]
    return cast(_Objective, on_copies)


def _written(path: str) -> StepContractError:
    return StepContractError(
        "this call writes the tensor in place, and the first one did not: the batch of the caller has changed",
        where="/".join(filter(None, ("batch", path))),
        hint="call x = x.clone() before the write, in the model or in the objective",
    )


def _copy(leaf: Any) -> Any:
    """Copy a leaf with its strides: a reduction over others may round in another way."""
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.clone()
    if not tensor_layout.is_dense(leaf) or copied.stride() == leaf.stride() or tensor_layout.overlaps(leaf):
        return copied
    return copied.new_empty_strided(leaf.shape, leaf.stride()).copy_(leaf)
