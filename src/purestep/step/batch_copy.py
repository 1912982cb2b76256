"""Copies of batch leaves that the model writes in place, so that the caller's batch does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .. import tree
from ..model import write_check
from ..torch_ext import tracing
from ..types import Batch

_Objective = TypeVar("_Objective", bound=Callable[..., Any])


def untouched(objective: _Objective) -> _Objective:
    """Wrap an objective, or another function of a model and a batch. The model may write its batch in place, as a first
    layer ``nn.ReLU(inplace=True)`` does.

    The first call for each batch structure runs on copies and records which of them the model writes; later calls copy
    only those leaves. Inside our own capture nothing is copied here: `compile.graphs` passes a copy of the batch.
    """
    known: dict[tree.TreeDef, tuple[int, ...]] = {}  # structure of a batch -> the leaves that the model writes

    def on_copies(model: Any, batch: Batch, *context: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the compiler removes copies that are not written
            return objective(model, tree.map(_copy, batch), *context)
        if tracing.in_graph():
            return objective(model, batch, *context)
        leaves, treedef = tree.flatten(batch)
        written = known.get(treedef)
        if written == ():
            return objective(model, batch, *context)
        for index in range(len(leaves)) if written is None else written:
            leaves[index] = _copy(leaves[index])
        given = {str(index): leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        before = write_check.marks(given) if written is None else {}
        loss = objective(model, tree.unflatten(treedef, leaves), *context)
        if written is None:
            after = write_check.marks(given)
            known[treedef] = tuple(int(index) for index, mark in before.items() if after[index] != mark)
        return loss

    on_copies.__wrapped__ = objective  # pyright: ignore[reportFunctionMemberAccess]  # for `inspect.unwrap`
    on_copies.is_sum = getattr(objective, "is_sum", False)  # pyright: ignore[reportFunctionMemberAccess]
    return cast(_Objective, on_copies)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
