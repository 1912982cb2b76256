"""A donated step as one CUDA graph: a launch instead of a hundred.

A CUDA graph replays kernels on the addresses that they were recorded with. The state of a donated step lies in the
buffers of its store, which never move; a batch is copied into buffers of its own; what the step returns is copied out,
since the next replay writes over it. The first calls run as they are: they are steps like any other, and let inductor
tune its kernels before anything is recorded. Random numbers advance: torch hands the generator's seed and offset to
each replay, and the host seeds it before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import StepContractError
from .live import Store

Run = Callable[[list[Tensor], list[Any]], Any]
"""``(tensors, batch leaves) -> metrics``, as of `graphs.Graph`."""

_WARM = 2  # calls before one is recorded


class _Recorded:
    """One graph on the buffers of one store."""

    def __init__(self) -> None:
        self.calls = 0
        self.leaves: list[Any] = []
        self.outputs: Any = None
        self.graph: Any = None

    def record(self, run: Run, tensors: list[Tensor], leaves: list[Any], pool: Any) -> None:
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        try:
            # Recording runs nothing: the state is what it was, whatever happens here.
            with torch.cuda.graph(graph, pool=pool):
                self.outputs = run(tensors, self.leaves)
        except RuntimeError as error:
            raise StepContractError(
                f"cannot be recorded as a CUDA graph: {str(error).strip().splitlines()[0]}",
                where="step",
                hint="no copies to or from the host and no synchronization inside a step; or cuda_graph=False",
            ) from error
        self.graph = graph

    def replay(self, leaves: list[Any]) -> Any:
        for own, leaf in zip(self.leaves, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(leaf, non_blocking=True)
        self.graph.replay()
        return self.outputs


class Replays:
    """The recorded graphs of one step."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Store, dict[int, _Recorded]] = WeakKeyDictionary()
        self._pool: Any = None

    def run(self, run: Run, store: Store, leaves: list[Any], copied: Callable[[Any], Any]) -> Any:
        """``run(store.buffers, leaves)``: as it is, recorded, or replayed.

        Args:
            run: the same object for the same graph.
            store: whose buffers it writes.
            leaves: of the batch, on the store's device.
            copied: makes what is returned independent of the next replay.

        Raises:
            StepContractError: the step cannot be recorded.
        """
        found = self._of.setdefault(store, {}).setdefault(id(run), _Recorded())
        found.calls += 1
        if found.calls <= _WARM:
            return run(store.buffers, leaves)
        if found.graph is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            found.record(run, store.buffers, leaves, self._pool)
        return copied(found.replay(leaves))
