"""A donated step as one CUDA graph: one launch instead of a hundred.

A CUDA graph replays kernels on the addresses of its recording. The buffers of a donated state never move. Each batch is
copied into static buffers, and results are copied out, since the next replay overwrites them. The first calls run
without a CUDA graph, so that inductor tunes its kernels before the recording. Random numbers advance: torch passes the
generator's seed and offset to each replay, and the host seeds the generator before.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import StepContractError
from ..torch_ext import tensor_layout
from .buffers import StateBuffers, memory_of, strided_clone
from .guards import signature

Run = Callable[[list[Tensor], list[Any], list[Tensor]], Any]
"""``(tensors, batch leaves, outside) -> metrics``, like `graphs.CompiledGraph`."""

_WARM = 2  # calls before the recording
_MOST = 16  # recordings of one store; batches of further sizes run without a CUDA graph
_SHARE = 8  # of the device's memory: a step that takes this part of it keeps the device busy without a CUDA graph

_log = logging.getLogger("purestep")


class _Recording:
    """One graph on the buffers of one store, for batches of one layout; it reads the tensors outside where they lie."""

    def __init__(self, leaves: list[Any], places: list[int], *, possible: bool) -> None:
        self.places = places  # addresses of the tensors outside
        self.fits = tensor_layout.layout_guard(leaves)
        self.possible = possible
        self.calls = 0
        self.leaves: list[Any] = []
        self.memory: list[Tensor | None] = []  # of each leaf: one copy covers gaps and expanded dimensions
        self.outputs: Any = None
        self.graph: Any = None

    def record(self, run: Run, tensors: list[Tensor], leaves: list[Any], outside: list[Tensor], pool: Any) -> None:
        self.leaves = [strided_clone(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.memory = [memory_of(leaf) if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        graph, device = torch.cuda.CUDAGraph(), tensors[0].device
        with torch.cuda.device(device):  # torch records, and seeds, on the current device
            before = torch.cuda.current_stream()
            try:
                # Recording runs no kernel, so a failure leaves the state unchanged. thread_local: other threads may
                # call CUDA meanwhile, such as a DataLoader that pins memory.
                with torch.cuda.graph(graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"):
                    self.outputs = run(tensors, self.leaves, outside)
            except torch.OutOfMemoryError as error:
                raise StepContractError(
                    f"no memory is left to record it as a CUDA graph: {str(error).splitlines()[0]}",
                    where="step",
                    hint="use a smaller batch, or cuda_graph=False: a recorded step allocates its own intermediates",
                ) from error
            except RuntimeError as error:
                _reset_capture(device, before, pool)
                raise StepContractError(
                    f"the step cannot be recorded as a CUDA graph: {str(error).strip().splitlines()[0]}",
                    where="step",
                    hint="remove host copies and synchronization from the step, or set cuda_graph=False",
                ) from error
            finally:
                torch.cuda.set_stream(before)  # torch does not reset it if the end of a recording fails
        self.graph = graph

    def drop(self) -> None:
        """Give its memory back; further calls run without it."""
        self.possible = False
        self.graph = self.outputs = None
        self.leaves, self.memory = [], []

    def replay(self, leaves: list[Any]) -> Any:
        for memory, leaf in zip(self.memory, leaves, strict=True):
            if memory is not None:
                memory.copy_(memory_of(leaf), non_blocking=True)
        self.graph.replay()
        return self.outputs


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for each device: cuBLAS allocates a workspace for every stream."""
    return torch.cuda.Stream(device)


def _reset_capture(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """Reset torch's allocator and generator after a recording that failed: torch skips this if the end of the recording
    itself fails. The generator is reset by the end of another recording."""
    torch.cuda.set_stream(stream)
    core: Any = importlib.import_module("torch._C")
    with suppress(RuntimeError, AttributeError):  # raised if torch did reset them
        core._cuda_endAllocateToPool(device.index, pool)
        core._cuda_releasePool(device.index, pool)
    graph = torch.cuda.CUDAGraph()
    with (
        suppress(RuntimeError),
        torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"),
    ):
        torch.zeros((), device=device)


class _StoreGraphs:
    """The recorded graphs of one store, which share a memory pool, by function; they go with it."""

    def __init__(self) -> None:
        self.recorded: WeakKeyDictionary[Run, dict[Any, _Recording]] = WeakKeyDictionary()
        self.last: WeakKeyDictionary[Run, _Recording] = WeakKeyDictionary()  # that of the last call
        self.pool: Any = None

    def find(self, run: Run, store: StateBuffers, leaves: list[Any], outside: list[Tensor]) -> _Recording | None:
        """Return the recording of this function for these leaves, a new one if needed; None beyond the limit."""
        last, places = self.last.get(run), [leaf.data_ptr() for leaf in outside]
        if last is not None and last.places == places and last.fits(*leaves):
            return last
        key, of_run = (signature(leaves), tuple(places)), self.recorded.setdefault(run, {})
        found = of_run.get(key)
        if found is None:
            if len(self.all()) == _MOST:
                return None
            tensors = [leaf for leaf in (*store.buffers, *leaves, *outside) if isinstance(leaf, Tensor)]
            possible = all(tensor.device == store.device for tensor in tensors)
            found = of_run[key] = _Recording(leaves, places, possible=possible)
        self.last[run] = found
        return found

    def all(self) -> list[_Recording]:
        """The recordings of all functions."""
        return [each for of_run in self.recorded.values() for each in of_run.values()]


class CudaGraphs:
    """The recorded graphs of one step.

    Args:
        required: raise if a graph cannot be recorded, and keep it however much memory it takes. Otherwise such a graph
            runs without a recording.
    """

    def __init__(self, *, required: bool) -> None:
        self.required = required
        self._has_warned = False
        self._stores: WeakKeyDictionary[StateBuffers, _StoreGraphs] = WeakKeyDictionary()

    def run(
        self,
        run: Run,
        store: StateBuffers,
        leaves: list[Any],
        outside: list[Tensor],
        copied: Callable[[Any], Any],
    ) -> Any:
        """Call ``run(store.buffers, leaves, outside)`` directly, record it, or replay its recording.

        Args:
            run: the same object for the same graph; recorded once for each batch size.
            store: its buffers are written.
            leaves: of the batch. If one is on another device than the store, ``run`` is called directly: a replay would
                not read host values again.
            outside: tensors that are read where they lie.
            copied: copies the result, which the next replay overwrites.

        Raises:
            StepContractError: the step cannot be recorded, if a recording is required.
        """
        known = self._stores.get(store)
        if known is None:
            known = self._stores[store] = _StoreGraphs()
        found = known.find(run, store, leaves, outside)
        if found is None or not found.possible:
            return run(store.buffers, leaves, outside)
        found.calls += 1
        if found.calls <= _WARM:
            return run(store.buffers, leaves, outside)
        if found.graph is None:
            if known.pool is None or not any(each.graph for each in known.all()):  # torch may have given it back
                known.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()  # a recording begins with it
            before = torch.cuda.memory_reserved(store.device)
            try:
                found.record(run, store.buffers, leaves, outside, known.pool)
            except BaseException as error:
                known.pool = None  # torch may count it as in use
                if self.required or not isinstance(error, StepContractError):
                    raise
                if not self._has_warned:
                    _log.warning("a step runs without a CUDA graph: it %s", error.what)
                self._has_warned = True
                found.drop()
                return run(store.buffers, leaves, outside)
            taken = torch.cuda.memory_reserved(store.device) - before
            if not self.required and taken * _SHARE > torch.cuda.get_device_properties(store.device).total_memory:
                found.drop()
                return run(store.buffers, leaves, outside)
        return copied(found.replay(leaves))
