"""A batch that stays what it was, whatever the model does with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import rng, tree, writes
from ..types import Batch, Loss, Objective


class Untouched:
    """An objective whose model may write the batch in place, as a first layer ``nn.ReLU(inplace=True)`` does.

    The first call with a batch of some structure runs on copies and notes which of them the model writes; later calls
    copy those leaves alone. Inside a graph nothing is copied here: `compile.graphs` hands a batch on as copies.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._written: dict[tree.TreeDef, tuple[int, ...]] = {}

    def __call__(self, model: Any, batch: Batch, *context: Any) -> Loss:
        """The objective's loss of the batch."""
        if torch.compiler.is_dynamo_compiling():  # the compiler drops copies that nobody writes
            return self.objective(model, tree.map(_copy, batch), *context)
        if rng.in_graph():
            return self.objective(model, batch, *context)
        leaves, treedef = tree.flatten(batch)
        known = self._written.get(treedef)
        if known == ():
            return self.objective(model, batch, *context)
        copied = range(len(leaves)) if known is None else known
        for index in copied:
            leaves[index] = _copy(leaves[index])
        given = {str(index): leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        before = writes.marks(given) if known is None else {}
        loss = self.objective(model, tree.unflatten(treedef, leaves), *context)
        if known is None:
            after = writes.marks(given)
            self._written[treedef] = tuple(int(index) for index, mark in before.items() if after[index] != mark)
        return loss


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
