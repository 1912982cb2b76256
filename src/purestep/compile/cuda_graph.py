"""A donated step as one CUDA graph: a launch instead of a hundred.

A CUDA graph replays kernels on the addresses that they were recorded with. The state of a donated step lies in the
buffers of its store, which never move; a batch is copied into buffers of its own; what the step returns is copied out,
since the next replay writes over it. The first calls run as they are: they are steps like any other, and let inductor
tune its kernels before anything is recorded. Random numbers advance: torch hands the generator's seed and offset to
each replay, and the host seeds it before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import StepContractError
from .donation import DonatedBuffers, memory_of, unshared
from .guards import alike, kinds

Run = Callable[[list[Tensor], list[Any]], Any]
"""``(tensors, batch leaves) -> metrics``, as of `graphs.Graph`."""

_WARM = 2  # calls before one is recorded
_MOST = 16  # recordings of one store: batches of more sizes than that run as they are


class _Recorded:
    """One graph on the buffers of one store, for batches of one layout."""

    def __init__(self, run: Run, leaves: list[Any], *, possible: bool) -> None:
        self.run = run  # held, so that its id is no other function's
        self.fits = alike(leaves)
        self.possible = possible
        self.calls = 0
        self.leaves: list[Any] = []
        self.memory: list[Tensor | None] = []  # of those leaves, where they are no plain arrays
        self.outputs: Any = None
        self.graph: Any = None

    def record(self, run: Run, tensors: list[Tensor], leaves: list[Any], pool: Any) -> None:
        self.leaves = [unshared(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.memory = [_not_plain(leaf) for leaf in self.leaves]
        graph, device = torch.cuda.CUDAGraph(), tensors[0].device
        with torch.cuda.device(device):  # torch records, and seeds, on the current device
            before = torch.cuda.current_stream()
            try:
                # Recording runs nothing: the state is what it was, whatever happens here. What other threads do (a
                # DataLoader's, pinning memory) is none of a graph's business.
                with torch.cuda.graph(graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"):
                    self.outputs = run(tensors, self.leaves)
            except torch.OutOfMemoryError as error:
                raise StepContractError(
                    f"no memory is left to record it as a CUDA graph: {str(error).splitlines()[0]}",
                    where="step",
                    hint="a smaller batch; or cuda_graph=False: a recorded step has intermediates of its own",
                ) from error
            except RuntimeError as error:
                _mend(device, before, pool)
                raise StepContractError(
                    f"cannot be recorded as a CUDA graph: {str(error).strip().splitlines()[0]}",
                    where="step",
                    hint="no copies to or from the host and no synchronization inside a step; or cuda_graph=False",
                ) from error
            finally:
                torch.cuda.set_stream(before)  # which torch leaves as it is where the end of a recording fails
        self.graph = graph

    def replay(self, leaves: list[Any]) -> Any:
        for own, memory, leaf in zip(self.leaves, self.memory, leaves, strict=True):
            if memory is not None:
                memory.copy_(memory_of(leaf), non_blocking=True)
            elif isinstance(own, Tensor):
                own.copy_(leaf, non_blocking=True)
        self.graph.replay()
        return self.outputs


def _not_plain(leaf: Any) -> Tensor | None:
    """The memory of a tensor whose elements do not lie one after another: slices keep what is between them, and an
    expanded one is written once."""
    return memory_of(leaf) if isinstance(leaf, Tensor) and not leaf.is_contiguous() else None


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


def _mend(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """After a recording that was broken off torch's allocator and generator wait for its end, which torch does not tell
    them of where the end itself fails. The generator takes the end of another one for it."""
    torch.cuda.set_stream(stream)
    core: Any = importlib.import_module("torch._C")
    with suppress(RuntimeError, AttributeError):  # where torch has told them, there is no such recording
        core._cuda_endAllocateToPool(device.index, pool)
        core._cuda_releasePool(device.index, pool)
    graph = torch.cuda.CUDAGraph()
    with (
        suppress(RuntimeError),
        torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"),
    ):
        torch.zeros((), device=device)


class _OfStore:
    """The recorded graphs of one store. Memory is theirs: torch gives none to a pool whose graphs are all gone."""

    def __init__(self) -> None:
        self.recorded: dict[Any, _Recorded] = {}
        self.last: dict[int, _Recorded] = {}  # of each function: what its last call has taken
        self.pool: Any = None

    def find(self, run: Run, store: DonatedBuffers, leaves: list[Any]) -> _Recorded | None:
        """What there is of this function for these leaves, made where there is nothing yet; None beyond the limit."""
        last = self.last.get(id(run))
        if last is not None and last.fits(*leaves):
            return last
        key = id(run), kinds(leaves)
        found = self.recorded.get(key)
        if found is None:
            if len(self.recorded) == _MOST:
                return None
            tensors = [leaf for leaf in (*store.buffers, *leaves) if isinstance(leaf, Tensor)]
            possible = all(tensor.device == store.device for tensor in tensors)
            found = self.recorded[key] = _Recorded(run, leaves, possible=possible)
        self.last[id(run)] = found
        return found


class Replays:
    """The recorded graphs of one step."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[DonatedBuffers, _OfStore] = WeakKeyDictionary()

    def run(self, run: Run, store: DonatedBuffers, leaves: list[Any], copied: Callable[[Any], Any]) -> Any:
        """``run(store.buffers, leaves)``: as it is, recorded, or replayed.

        Args:
            run: the same object for the same graph; one for batches of several sizes is recorded for each.
            store: whose buffers it writes.
            leaves: of the batch. Where one is on another device than the store, the step runs as it is: a graph does
                not read again what the host has read.
            copied: makes what is returned independent of the next replay.

        Raises:
            StepContractError: the step cannot be recorded.
        """
        known = self._of.get(store)
        if known is None:
            known = self._of[store] = _OfStore()
        found = known.find(run, store, leaves)
        if found is None or not found.possible:
            return run(store.buffers, leaves)
        found.calls += 1
        if found.calls <= _WARM:
            return run(store.buffers, leaves)
        if found.graph is None:
            known.pool = known.pool or torch.cuda.graph_pool_handle()
            try:
                found.record(run, store.buffers, leaves, known.pool)
            except BaseException:
                known.pool = None  # torch may think of it as in use
                raise
        return copied(found.replay(leaves))
