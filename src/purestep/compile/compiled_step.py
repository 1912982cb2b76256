"""A compiled step: which graph a call takes, and where its state lies, with or without donation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import packed, rng, tracing, tree
from ..errors import PurestepError, StepContractError
from ..step import Accum, Adding, Closing
from ..types import Empty, Metrics, Static, Steps, TrainState
from . import capture, donation, live_state
from .contract import checked, same_structure, unrolled
from .copied_state import Forks
from .cuda_graph import Replays
from .donation import DonatedBuffers, treespec
from .graph_cache import Graph, Graphs, Options
from .guards import alike, check_untransformed, kinds, resolved, without_text
from .outputs import Stacked, unstacked
from .packing import Layouts

Unlike: TypeAlias = Callable[[Any], None] | None
"""Told of a batch that differs from the one before."""


class _Last(NamedTuple):
    """The graph of the last call of one phase, and what it was found for."""

    slots: donation.Slots
    surroundings: tuple[str, str]
    treedef: tree.TreeDef
    only: tuple[type, int] | None  # kind and length of a batch that is one tuple or list of tensors and nothing else
    alike: Callable[..., bool]  # of the store's buffers and the batch's leaves
    graph: Graph

    def leaves(self, buffers: list[Tensor], batch: tuple[Any, ...]) -> list[Any] | None:
        """The tensors of a batch, if this is its graph, and the buffers are what they were."""
        given: Any = batch[0] if len(batch) == 1 else None
        if self.only is not None and type(given) is self.only[0] and len(given) == self.only[1]:
            leaves: list[Any] = list(given)  # a tenth of what the structure costs
        else:
            leaves, treedef = tree.flatten(batch)
            if treedef != self.treedef:
                return None
        return leaves if self.alike(*buffers, *leaves) else None


class CompiledStep:
    """A compiled step. ``graphs`` counts what has been compiled, ``eager`` is the step itself."""

    def __init__(
        self,
        step: Callable[..., Any],
        static: Static | None,
        *,
        donate: bool | Literal["init"],
        options: Options,
        flush: bool = False,
        cuda_graph: bool = False,
        unroll: int = 1,
        beside: CompiledStep | None = None,
    ) -> None:
        self.donate = donate
        self.static = static
        # Of a program, whose states go from one function to the other.
        self.layouts = beside.layouts if beside else Layouts(static.labels if static else None)
        self.forks: Forks = beside.forks if beside else Forks()
        self.eager = step
        self._flush = flush
        self.unroll = unroll
        self._replays = Replays() if cuda_graph else None
        self._windowed = static is not None and static.accumulate > 1
        self._steps: dict[packed.Layout | None, Callable[..., Any]] = {None: step}
        self._graphs = Graphs(options, step)
        self._last: dict[tuple[type[Accum], ...], _Last] = {}

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._graphs.count

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Metrics]:
        if tracing.in_graph():  # of a step that calls this one
            return self._steps_of(self.eager)(state, *batch)
        new, metrics = self.stacked(state, *batch)
        return new, unstacked(metrics)

    def stacked(self, state: Any, *batch: Any, unlike: Unlike = None) -> tuple[Any, Metrics | Stacked]:
        """The call, with metrics as the graph returns them.

        Args:
            state: as the step takes it.
            batch: the same.
            unlike: called with the batch, before anything is done with it, where it is not known to be of the same
                structure, shapes, dtypes and devices as the one before.
        """
        check_untransformed()
        if self._flush and self._nothing_to_flush():
            return state, {}
        if self.unroll > 1:
            self._check_batches(batch)
        return self._donated(state, batch, unlike) if self.donate else self._pure(state, batch, unlike)

    def _check_batches(self, batch: tuple[Any, ...]) -> None:
        if len(batch) != 1 or not isinstance(batch[0], list) or not 1 <= len(batch[0]) <= self.unroll:
            found = f"{len(batch)} arguments"
            if len(batch) == 1:
                size = f" of {len(batch[0])}" if isinstance(batch[0], list | tuple) else ""
                found = f"a {type(batch[0]).__name__}{size}"
            raise StepContractError(
                f"the unrolled step was called with {found}",
                where="batch",
                hint=f"step(state, [batch, ...]): a list of 1 to {self.unroll} batches",
            )

    def _nothing_to_flush(self) -> bool:
        assert self.static is not None  # a flush of the user's own is not compiled
        return self.static.accumulate == 1 or self.static.tail == "carry"

    # --- donated ------------------------------------------------------------------------------------------------------

    def _donated(self, state: Any, batch: tuple[Any, ...], unlike: Unlike) -> tuple[Any, Metrics | Stacked]:
        store, metrics = self._apart(self._live_store(state) or self._enter(state), batch, unlike)
        return store.live(), metrics

    def _apart(self, store: DonatedBuffers, batch: tuple[Any, ...], unlike: Unlike) -> tuple[DonatedBuffers, Any]:
        """The call; where the step has no gradient for a part of a flat buffer, on a state of more buffers."""
        while True:
            try:
                return store, self._stepped(store, batch, unlike)
            except packed.Split as split:
                self._graphs.count -= 1
                if (
                    not self.layouts.split(split.names)
                    and self.layouts.of(live_state.plain(store.named)) is store.layout
                ):
                    raise
                fresh = self._enter(store.live())
                store.begin()  # the state that went in is dead
                store.end(0)
                store = fresh

    def _stepped(self, store: DonatedBuffers, batch: tuple[Any, ...], unlike: Unlike) -> Metrics | Stacked:
        phase = self._phase(store)
        last = self._last.get(phase)
        fits = last and last.slots is store.slots and last.surroundings == self._graphs.surroundings()
        leaves = last.leaves(store.buffers, batch) if last and fits else None
        if last and leaves is not None:
            graph = last.graph
        else:
            if unlike is not None:
                unlike(batch[0])
            graph, leaves = self._found(store, phase, batch)
        if store.is_read or batch[1:]:  # a context, as the weights that the state has
            leaves = store.beside(leaves)
        metrics = self._launched(graph, store, leaves)
        store.end(1 if self.unroll == 1 else len(batch[0]))
        if self._windowed:
            self._count_window(store)
        return metrics

    def _launched(self, graph: Graph, store: DonatedBuffers, leaves: list[Any]) -> Metrics | Stacked:
        store.begin()
        try:
            if not graph.draws or not store.hosts:
                return self._run(graph, store, leaves)
            with _seeded(store.hosts[0], store.device):
                return self._run(graph, store, leaves)
        except BaseException as error:
            # What an attempt to capture met has Dynamo's word as its cause.
            in_capture = any(found is not None and capture.stopped(found) for found in (error, error.__cause__))
            if isinstance(error, PurestepError) or in_capture:
                store.undo()
            raise

    def _run(self, graph: Graph, store: DonatedBuffers, leaves: list[Any]) -> Metrics | Stacked:
        if self._replays is None or store.device.type != "cuda":
            return graph.run(store.buffers, leaves)
        return self._replays.run(graph.run, store, leaves, _copied)

    def _found(self, store: DonatedBuffers, phase: Any, batch: tuple[Any, ...]) -> tuple[Graph, list[Any]]:
        store.check(kinds(store.buffers))
        leaves, treedef = batch_leaves(batch)
        key = (store.slots.identity, phase, treedef)
        graph = self._graphs.find(key, leaves, store.buffers, lambda: self._core(store, phase, treedef))
        same = alike([*store.buffers, *leaves])
        given: Any = batch[0] if len(batch) == 1 else None
        plain = type(given) in (tuple, list) and all(type(leaf) is Tensor for leaf in given)
        only = (type(given), len(given)) if plain else None
        self._last[phase] = _Last(store.slots, self._graphs.surroundings(), treedef, only, same, graph)
        return graph, leaves

    def _live_store(self, state: Any) -> DonatedBuffers | None:
        """The store that a live state stands in, if it is one of this step's, and all of it the step may write."""
        if type(state) is live_state.LiveState:
            state.alive()
            store = state.live_store
            if store is not None and not store.single:
                return None  # one of several, which stay where they are
        else:
            store = live_state.store_of(state)
            if store is not None:
                live_state.check_alive(state)
                store = store if live_state.stands(state, store) else None
        if store is None or (store.holds_callers and self.static is None) or not store.is_as_shown():
            return None
        if store.layout is None or store.layouts is self.layouts:
            return store
        return store if self.layouts.known(store.layout) else None

    def _enter(self, state: Any) -> DonatedBuffers:
        """Copy a plain state into buffers of its own."""
        live_state.check_alive(state)
        given = live_state.plain(state)
        # A step of one's own may write what a program's never does.
        own, adopt = self.static is None, self.donate == "init"
        return self._share_slots(
            DonatedBuffers(given, self.layouts.of(given), self.layouts, adopt=adopt, frozen=not own)
        )

    def _share_slots(self, store: DonatedBuffers) -> DonatedBuffers:
        # Stores of one structure share their slots object, whose identity is the key of the graphs.
        store.kinds = kinds(store.buffers)
        key = (store.layout, store.slots.treedef, store.slots.places, store.kinds)
        store.slots = self._graphs.slots.setdefault(key, store.slots)
        return store

    def _steps_of(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return step if self.unroll == 1 else unrolled(step)

    def _step_on(self, layout: packed.Layout | None) -> Callable[..., Any]:
        if layout not in self._steps:
            assert layout is not None
            assert self.static is not None
            steps: Steps = self.static.steps(layout.form)
            self._steps[layout] = steps.flush if self._flush else steps.train_step
        return self._steps[layout]

    def _phase(self, store: DonatedBuffers) -> tuple[type[Accum], ...]:
        """Which graph each accumulation window asks for. A program's windows are counted on the host; a step of one's
        own may advance a window as it likes, so its position is read where that costs nothing, else left open."""
        if self._flush or (self.static is not None and not self._windowed):
            return (Accum,) * len(store.hosts)
        if self.static is not None:
            return tuple(Accum if host.left is None else _mark(host.left) for host in store.hosts)
        if store.device.type != "cpu":
            return (Accum,) * len(store.hosts)
        return _read_phase(live_state.states(store.named), flush=False)

    def _count_window(self, store: DonatedBuffers) -> None:
        assert self.static is not None
        for host in store.hosts:
            if host.left is not None:
                host.left = self.static.accumulate if self._flush or host.left == 1 else host.left - 1

    def _core(self, store: DonatedBuffers, phase: tuple[type[Accum], ...], treedef: tree.TreeDef) -> Callable[..., Any]:
        slots, step = store.slots, self._steps_of(self._step_on(store.layout))
        whole, parts = treespec.of(slots.treedef), treespec.of(treedef)

        def core(buffers: list[Tensor], batch: list[Any]) -> Any:
            old = slots.gather(buffers)
            before = treespec.fill(whole, old)
            new, metrics = checked(step(_marked(before, phase), *treespec.fill(parts, batch)))
            new_leaves = same_structure(whole, before, _marked(new, phase, back=True))
            kept = tree.map(lambda leaf: donation.apart(leaf, buffers), metrics)
            slots.scatter(buffers, old, new_leaves)
            return kept

        return core

    # --- pure ---------------------------------------------------------------------------------------------------------

    def _pure(self, state: Any, batch: tuple[Any, ...], unlike: Unlike) -> tuple[Any, Metrics | Stacked]:
        if self.static is not None and isinstance(state, TrainState):
            store, metrics = self._apart(self._forked(state), batch, unlike)
            return self.forks.hand_out(store), metrics
        if unlike is not None:
            unlike(batch[0])
        given = live_state.plain(state)
        parts = live_state.states(given)
        phase = _read_phase(parts, flush=self._flush)
        old, state_def = tree.flatten(given)
        donation.check_tensors(old)
        keys = donation.key_positions(state_def)
        positions = [index for index in range(len(old)) if index not in keys]
        leaves, treedef = batch_leaves(batch)
        inputs = [resolved(old[index]) for index in positions]
        key = (state_def, phase, treedef, kinds(inputs))

        def build() -> Callable[..., Any]:
            return self._pure_core(state_def, len(old), positions, phase, treedef)

        graph = self._graphs.find(key, leaves, inputs, build)
        draws = graph.draws and parts
        with _seeded(donation.HostCounters(parts[0]), tree.device(inputs)) if draws else nullcontext():
            outputs, metrics = graph.run(inputs, leaves)
        for index, leaf in zip(positions, outputs, strict=True):
            old[index] = leaf
        calls = 1 if self.unroll == 1 else len(batch[0])
        for index in keys:
            old[index] = rng.advance(old[index], calls)
        return tree.unflatten(state_def, old), metrics

    def _forked(self, state: TrainState) -> DonatedBuffers:
        """A store of the state in memory of its own."""
        if type(state) is live_state.LiveState:
            standing = self._live_store(state)
            found = None if standing is None else self.forks.of_live(standing)
        else:
            found = self.forks.of(state)
        return found or self._enter(state)

    def _pure_core(
        self,
        state_def: tree.TreeDef,
        count: int,
        positions: list[int],
        phase: tuple[type[Accum], ...],
        treedef: tree.TreeDef,
    ) -> Callable[..., Any]:
        step = self._steps_of(self.eager)
        whole, parts = treespec.of(state_def), treespec.of(treedef)

        def core(inputs: list[Tensor], batch: list[Any]) -> Any:
            old: list[Any] = [torch.zeros(2, dtype=torch.int64)] * count
            for index, leaf in zip(positions, inputs, strict=True):
                old[index] = leaf
            before = treespec.fill(whole, old)
            new, metrics = checked(step(_marked(before, phase), *treespec.fill(parts, batch)))
            leaves = same_structure(whole, before, _marked(new, phase, back=True))
            return [leaves[index] for index in positions], metrics

        return core


# --- pieces -----------------------------------------------------------------------------------------------------------


def batch_leaves(batch: tuple[Any, ...]) -> tuple[list[Any], tree.TreeDef]:
    """The tensors of a batch as a graph takes them, and its structure."""
    leaves, treedef = tree.flatten(batch)
    if all(type(leaf) is Tensor for leaf in leaves):
        return [resolved(leaf) for leaf in leaves], treedef
    leaves, treedef = tree.flatten(tree.dicts(batch))
    return without_text([resolved(leaf) for leaf in leaves]), treedef


def _copied(metrics: Metrics | Stacked) -> Metrics | Stacked:
    return metrics._replace(numbers=metrics.numbers.clone()) if type(metrics) is Stacked else tree.clone(metrics)


def _seeded(host: donation.HostCounters, device: torch.device) -> AbstractContextManager[None]:
    return rng.scoped(rng.mix(host.seed, host.calls, "step"), device)


def _mark(left: int) -> type[Accum]:
    return Closing if left == 1 else Adding


def _read_phase(parts: list[TrainState], *, flush: bool) -> tuple[type[Accum], ...]:
    if flush:
        return tuple(Accum for _ in parts)
    return tuple(Accum if isinstance(part.accum, Empty) else _mark(int(part.accum.left)) for part in parts)


def _marked(state: Any, phase: tuple[type[Accum], ...], *, back: bool = False) -> Any:
    """The state with each window's accumulator of the type that selects its graph (``back``: the plain type)."""
    if all(kind is Accum for kind in phase) and not back:
        return state
    kinds = iter(phase)

    def one(node: Any) -> Any:
        if not live_state.is_state(node):
            return node
        kind = next(kinds)
        if isinstance(node.accum, Empty):
            return node
        return TrainState(*node)._replace(accum=(Accum if back else kind)(*node.accum))

    return tree.map(one, state, is_leaf=live_state.is_state)
