"""A compiled step: selects the graph for a call, which writes the state's buffers.

A donated call takes the buffers of a live state. Any other state is copied into new buffers; without donation these are
handed out as a plain state, and no later call uses them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import PurestepError, StepContractError
from ..state import packed, stacked
from ..step import Accum, Adding, Closing
from ..torch_ext import draws, tensor_layout, tracing
from ..types import Empty, Metrics, Static, Steps, TrainState
from . import live_state
from .buffers import HostCounters, Slots, StateBuffers, unaliased
from .contract import checked, same_structure
from .cuda_graph import CudaGraphs
from .graphs import CompiledGraph, Graphs, Options
from .guards import (
    check_unfollowed,
    check_untransformed,
    resolved,
    signature,
    without_text,
)
from .outputs import MetricVector, as_dict
from .sizes import Met

Unlike: TypeAlias = Callable[[Any], None] | None
"""Called with a batch whose signature may differ from that of the previous one."""


class _Last(NamedTuple):
    """The graph of the last call of one phase, and the inputs that it is valid for."""

    slots: Slots
    surroundings: tuple[str, str]
    treedef: tree.TreeDef
    only: tuple[type, int] | None  # type and length of a batch that is a single tuple or list of tensors
    guard: Callable[..., bool]  # (*buffers, *batch leaves, *outside) -> same layouts; stricter than `signature`
    graph: CompiledGraph

    def leaves(self, buffers: list[Tensor], batch: tuple[Any, ...]) -> list[Any] | None:
        """The leaves of a batch if this graph is valid for them and for the buffers, else None."""
        given: Any = batch[0] if len(batch) == 1 else None
        if self.only is not None and type(given) is self.only[0] and len(given) == self.only[1]:
            leaves: list[Any] = list(given)  # ten times faster than comparing the structure
        else:
            leaves, treedef = tree.flatten(batch)
            if treedef != self.treedef:
                return None
        return leaves if self.guard(*buffers, *leaves, *self.graph.outside) else None


class CompiledStep:
    """A compiled step. ``graphs`` counts the compiled graphs, ``eager`` is the original step."""

    counts_windows = True
    """It counts the position in an accumulation window on the host: see `step.counting`."""

    def __init__(
        self,
        step: Callable[..., Any],
        static: Static | None,
        *,
        donate: bool | Literal["init"],
        options: Options,
        flush: bool = False,
        cuda_graph: bool | None = False,
        shared_with: CompiledStep | None = None,
    ) -> None:
        self.donate = donate
        self.static = static
        # The functions of one program exchange states.
        self._stream = static.stream if static else ()
        self.packings = shared_with.packings if shared_with else packed.Packings(static.labels if static else None)
        self.eager = step
        self._flush = flush
        self._replays = CudaGraphs(required=bool(cuda_graph)) if cuda_graph is not False and donate else None
        self._is_windowed = static is not None and static.accumulate > 1
        self._steps: dict[packed.Packing | None, Callable[..., Any]] = {None: step}
        self._graphs = Graphs(options, step)
        self._last: dict[tuple[type[Accum], ...], _Last] = self._graphs.last

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._graphs.count

    @property
    def batch_sizes(self) -> Met:
        """The sizes of batches that decide which graphs there are, in their order, as JSON. A process that sets this
        before its first call chooses the same graphs, and so rounds in the same way."""
        return self._graphs.met

    @batch_sizes.setter
    def batch_sizes(self, met: Met) -> None:
        self._graphs.begin(met)

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Metrics]:
        if tracing.in_graph():  # called by a step that is being captured
            return self.eager(state, *batch)
        new, metrics = self.call(state, *batch)
        return new, as_dict(metrics)

    def call(self, state: Any, *batch: Any, unlike: Unlike = None) -> tuple[Any, Metrics | MetricVector]:
        """Call the step and return the metrics as the graph does.

        Args:
            state: as for the step.
            batch: the same.
            unlike: called with the batch before the step runs, unless the batch is known to have the structure,
                shapes, dtypes and devices of the previous one.
        """
        check_untransformed()
        if self.donate != "init":
            check_unfollowed(state)
        if self._flush and self.static is not None and (self.static.accumulate == 1 or self.static.tail == "carry"):
            return state, {}
        store = (self._live_store(state) if self.donate else None) or self._copy_in(state)
        store, metrics = self._call_packed(store, batch, unlike)
        return store.live() if self.donate else store.named, metrics

    def _call_packed(self, store: StateBuffers, batch: tuple[Any, ...], unlike: Unlike) -> tuple[StateBuffers, Any]:
        """Call the step. If it has no gradient for a part of a flat buffer, pack the state in another way before."""
        given, metrics = store if self.donate else None, None
        while metrics is None:
            try:
                metrics = self._call_once(store, batch, unlike)
            except packed.Split as split:
                self.packings.split(split.names)
                store = self._copy_in(store.live())
        if given is not None and store is not given:  # overwritten, as by a call that writes it
            given.begin()
            given.end()
        return store, metrics

    def _call_once(self, store: StateBuffers, batch: tuple[Any, ...], unlike: Unlike) -> Metrics | MetricVector:
        phase = self._phase(store)
        last = self._last.get(phase)
        fits = last and last.slots is store.slots and last.surroundings == self._graphs.surroundings()
        leaves = last.leaves(store.buffers, batch) if last and fits else None
        if last and leaves is not None:
            graph = last.graph
        else:
            if unlike is not None:
                unlike(batch[0])
            graph, leaves = self._find_graph(store, phase, batch)
        outside = graph.outside
        if store.is_read or batch[1:]:  # a context may alias the state's weights
            leaves, outside = store.without_aliases(leaves), store.without_aliases(outside)
        metrics = self._launch(graph, store, leaves, outside)
        store.end()
        if self._is_windowed:
            self._count_window(store)
        return metrics

    def _launch(
        self, graph: CompiledGraph, store: StateBuffers, leaves: list[Any], outside: list[Tensor]
    ) -> Metrics | MetricVector:
        store.begin()
        try:
            if not graph.draws or not store.hosts:
                return self._run(graph, store, leaves, outside)
            with _seeded(store.hosts[0], store.device, self._stream):
                return self._run(graph, store, leaves, outside)
        except BaseException as error:
            if isinstance(error, PurestepError):
                store.undo()
            raise

    def _run(
        self, graph: CompiledGraph, store: StateBuffers, leaves: list[Any], outside: list[Tensor]
    ) -> Metrics | MetricVector:
        if self._replays is None or store.device.type != "cuda" or not (self._replays.required or graph.recordable):
            return graph.run(store.buffers, leaves, outside)
        return self._replays.run(graph.run, store, leaves, outside, _copied)

    def _find_graph(self, store: StateBuffers, phase: Any, batch: tuple[Any, ...]) -> tuple[CompiledGraph, list[Any]]:
        store.check(signature(store.buffers))
        leaves, treedef = batch_leaves(batch)
        key = (store.slots.identity, phase)
        graph = self._graphs.find(key, treedef, leaves, store.buffers, lambda: self._core(store, phase, treedef))
        same = tensor_layout.layout_guard([*store.buffers, *leaves, *graph.outside])
        given: Any = batch[0] if len(batch) == 1 else None
        is_flat = type(given) in (tuple, list) and all(type(leaf) is Tensor for leaf in given)
        only = (type(given), len(given)) if is_flat else None
        self._last[phase] = _Last(store.slots, self._graphs.surroundings(), treedef, only, same, graph)
        return graph, leaves

    def _live_store(self, state: Any) -> StateBuffers | None:
        """The buffers of a live state, if this step can use them and may write all of them; else None."""
        store = live_state.store_of(state)
        if store is not None:
            live_state.check_alive(state)
        if not isinstance(store, StateBuffers) or store.single != isinstance(state, live_state.LiveState):
            return None  # of an eager step, or one of several states that share these buffers
        if (store.holds_callers and self.static is None) or not store.is_unmodified():
            return None
        known = store.packing is None or store.packings is self.packings or self.packings.known(store.packing)
        return store if known else None

    def _copy_in(self, state: Any) -> StateBuffers:
        """Copy a state into new buffers."""
        live_state.check_alive(state)
        given = live_state.plain(state)
        own = self.static is None  # a user-defined step may write leaves that a program's step never writes
        store = StateBuffers(
            given, self.packings.of(given), self.packings, adopt=self.donate == "init", shares_frozen=not own
        )
        if self._replays is not None and self._replays.required and store.structure is None:
            what = "a CUDA graph replays on the memory of its state, and this tree has leaves beside its TrainStates"
            raise StepContractError(
                what, where="cuda_graph", hint="pass them as the step's context, or cuda_graph=None"
            )
        return self._intern_slots(store)

    def _intern_slots(self, store: StateBuffers) -> StateBuffers:
        # States of one structure share a Slots object: its identity is part of the key of a graph.
        store.signature = signature(store.buffers)
        key = (store.packing, store.slots.treedef, store.slots.places, store.slots.keys, store.signature)
        store.slots = self._graphs.slots.setdefault(key, store.slots)
        return store

    def _step_on(self, packing: packed.Packing | None) -> Callable[..., Any]:
        if packing not in self._steps:
            assert packing is not None
            assert self.static is not None
            steps: Steps = self.static.made.steps(packing.form)
            self._steps[packing] = steps.flush if self._flush else steps.train_step
        return self._steps[packing]

    def _phase(self, store: StateBuffers) -> tuple[type[Accum], ...]:
        """The type of accumulator that selects the graph, for each state. The host counts a program's windows. A
        user-defined step may advance a window arbitrarily: its position is read on the CPU, and unknown elsewhere."""
        if self._flush or (self.static is not None and not self._is_windowed):
            return (Accum,) * len(store.hosts)
        if self.static is not None:
            return tuple(_phase_of(host.left) for host in store.hosts)
        if store.device.type != "cpu":
            return (Accum,) * len(store.hosts)
        parts = live_state.states(store.named)
        # A step that the user maps takes stacked states: `vmap` knows no subclass of a NamedTuple.
        unknown = [isinstance(part.accum, Empty) or stacked.size(part) for part in parts]
        return tuple(
            Accum if none else _phase_of(stacked.window_left(part)) for part, none in zip(parts, unknown, strict=True)
        )

    def _count_window(self, store: StateBuffers) -> None:
        assert self.static is not None
        for host in store.hosts:
            if host.left is not None:
                host.left = self.static.accumulate if self._flush or host.left == 1 else host.left - 1

    def _core(self, store: StateBuffers, phase: tuple[type[Accum], ...], treedef: tree.TreeDef) -> Callable[..., Any]:
        slots, step = store.slots, self._step_on(store.packing)

        def core(buffers: list[Tensor], batch: list[Any]) -> Any:
            old = slots.gather(buffers)
            before = tree.unflatten(slots.treedef, old)
            new, metrics = checked(step(_with_phase(before, phase), *tree.unflatten(treedef, batch)))
            new_leaves = same_structure(before, _with_phase(new, phase, back=True))
            kept = tree.map(lambda leaf: unaliased(leaf, buffers), metrics)
            slots.scatter(buffers, old, new_leaves)
            return kept

        return core


# --- helpers ----------------------------------------------------------------------------------------------------------


def batch_leaves(batch: tuple[Any, ...]) -> tuple[list[Any], tree.TreeDef]:
    """The leaves of a batch as inputs of a graph, and its structure."""
    leaves, treedef = tree.flatten(batch)
    if all(type(leaf) is Tensor for leaf in leaves):
        return [resolved(leaf) for leaf in leaves], treedef
    leaves, treedef = tree.flatten(tree.dicts(batch))
    return without_text([resolved(leaf) for leaf in leaves]), treedef


def _copied(metrics: Metrics | MetricVector) -> Metrics | MetricVector:
    return metrics._replace(numbers=metrics.numbers.clone()) if type(metrics) is MetricVector else tree.clone(metrics)


def _seeded(host: HostCounters, device: torch.device, stream: tuple[int, ...]) -> AbstractContextManager[None]:
    if len(host.seeds) == 1 and host.key.dim() == 1:
        return rng.scoped(rng.mix(host.seeds[0], host.calls, "step", *stream), device)
    keys = host.keys()
    numbers = [rng.mix(seed, calls, "step") for seed, calls in keys]
    return draws.scoped(numbers, device, together=rng.mix(*itertools.chain(*keys), "step"))


def _phase_of(left: int | None) -> type[Accum]:
    return Accum if left is None else Closing if left == 1 else Adding


def _with_phase(state: Any, phase: tuple[type[Accum], ...], *, back: bool = False) -> Any:
    """Set the type of each accumulator to the one that selects the graph (``back``: to the plain type)."""
    if all(kind is Accum for kind in phase) and not back:
        return state
    types = iter(phase)

    def with_accum(node: Any) -> Any:
        if not live_state.is_state(node):
            return node
        kind = next(types)
        if isinstance(node.accum, Empty):
            return node
        return TrainState(*node)._replace(accum=(Accum if back else kind)(*node.accum))

    return tree.map(with_accum, state, is_leaf=live_state.is_state)
