"""A compiled eval_step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import rng, tree
from ..state import stacked, views
from ..torch_ext import draws, tracing
from ..types import Carrying, EvalStep, TrainState
from . import live_state
from .buffers import key_positions
from .compiled_step import batch_leaves
from .contract import tensors_alone
from .graphs import Graphs, Options
from .guards import INDEX, check_untransformed, resolved, signature
from .outputs import as_dict
from .sizes import Met


def takes_index(eval_step: EvalStep) -> bool:
    """True if an eval_step has a parameter for the number of the batch."""
    if isinstance(getattr(eval_step, "compiled", eval_step), CompiledEval):
        return True
    try:
        return "index" in inspect.signature(eval_step).parameters
    except (TypeError, ValueError):
        return False


class CompiledEval:
    """A compiled eval_step: ``(state, batch, *context, index=0) -> metrics``; ``eager`` is the original function."""

    def __init__(self, step: Callable[..., Any], options: Options) -> None:
        self.eager = step
        self._takes_index = takes_index(step)
        self._graphs = Graphs(options, step)
        carrying: Carrying | None = getattr(step, "carrying", None)
        self.carrying = None if carrying is None else Carrying(CompiledEval(carrying.step, options), carrying.start)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._graphs.count

    @property
    def batch_sizes(self) -> Met:
        """As of a compiled step."""
        return self._graphs.met

    @batch_sizes.setter
    def batch_sizes(self, met: Met) -> None:
        self._graphs.begin(met)

    def __call__(self, state: Any, *batch: Any, index: int = 0) -> Any:
        if tracing.in_graph():  # called by a step that is being captured
            return self.eager(state, *batch)
        check_untransformed()
        given = live_state.plain(state)
        parts = live_state.states(given)
        old, state_def = tree.flatten(_to_evaluate(given))
        keys = key_positions(state_def)
        inputs = [leaf for index, leaf in enumerate(old) if index not in keys]
        if live_state.store_of(state) is None:  # a live state's memory needs no conversion
            inputs = [resolved(leaf) for leaf in inputs]
        shapes = [old[index].shape if index in keys else None for index in range(len(old))]
        leaves, treedef = batch_leaves(batch)
        step = functools.partial(self.eager, index=INDEX) if self._takes_index else self.eager

        def build() -> Callable[..., Any]:
            def core(tensors: list[Tensor], batch: list[Any]) -> Any:
                rest = iter(tensors)
                filled = [next(rest) if key is None else torch.zeros(key, dtype=torch.int64) for key in shapes]
                return tensors_alone(step(tree.unflatten(state_def, filled), *tree.unflatten(treedef, batch)))

            return core

        graph = self._graphs.find(
            (state_def, signature([*inputs, *(old[at] for at in sorted(keys))])), treedef, leaves, inputs, build
        )
        if not graph.draws or not parts:
            return as_dict(graph.run(inputs, leaves, graph.outside))
        numbers = [rng.mix(seed, "eval", index) for seed, _ in stacked.keys(parts[0])]
        device = tree.device(inputs)
        is_plain = parts[0].key.dim() == 1
        with rng.scoped(numbers[0], device) if is_plain else draws.scoped(numbers, device, together=rng.mix(*numbers)):
            return as_dict(graph.run(inputs, leaves, graph.outside))


def _to_evaluate(state: Any) -> Any:
    return views.for_evaluation(views.to_evaluate(state)) if isinstance(state, TrainState) else state
