"""The graphs of one step: lookup by inputs, and compilation of new ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import PurestepError
from . import capture, fx_passes, sizes
from .buffers import Slots
from .capture import exclusive, log
from .captured_values import CapturedValues
from .guards import TEXT, TorchSettings, check_layouts, constant, leaf_name, ranks, signature
from .outputs import builder, numbers


class Options(NamedTuple):
    """Settings of the compilation."""

    backend: Any
    options: Mapping[str, Any] | None


class CompiledGraph(NamedTuple):
    """One compiled graph: ``(tensors, batch leaves, outside) -> result of the core``."""

    run: Callable[[list[Tensor], list[Any], list[Tensor]], Any]
    outside: list[Tensor]  # tensors that the step reads besides its arguments
    outside_signature: tuple[Any, ...]  # `signature` of these
    draws: bool
    recordable: bool  # see `capture.Traits`

    def is_valid(self) -> bool:
        """True if the tensors outside have the layouts that the graph was compiled for: ``.data`` may be assigned."""
        return not self.outside or signature(self.outside) == self.outside_signature


class _GeneralGraph(NamedTuple):
    """One graph for batches of many sizes."""

    decided_by: list[sizes.Layouts]  # the list of sizes that it was compiled for
    graph: CompiledGraph | None  # None: no graph serves many sizes
    fits: Callable[[list[Any]], bool]  # batch leaves -> the graph accepts them


_MAX_EXACT = 64
"""Maximal number of graphs for one size each; the oldest is evicted."""

_MAX_CHANGES = 16
"""Maximal number of changes of the numbers in a batch, each of which compiles a graph."""

_STORED_CURE = "return it as a metric or in Loss(..., outputs={...}), or hold it in a buffer of the model"
_VALUE_CURE = "pass a number that changes as a tensor: torch.tensor(0.5), in the loader"


def _copied(met: sizes.Met) -> sizes.Met:
    return {kind: list(of_kind) for kind, of_kind in met.items()}


class Graphs:
    """The graphs of one step, by structure and shapes of the batch.

    The first two batch sizes (an epoch's batches, and its last one) get a graph each. The third size compiles a general
    graph, with a symbol for every size that has varied; a size by which another dimension varies compiles it again. A
    size that the general graph rejects gets a graph, as do all sizes if there can be no general one.

    ``met`` lists the sizes that decide: the first two, and those that compiled a general graph. The graph for a size
    depends on this list alone, so a process that gets the list compiles the same graphs.
    """

    def __init__(self, options: Options, step: Callable[..., Any]) -> None:
        self.options = options
        self.count = 0
        self._settings, self._captured = TorchSettings(), CapturedValues(step)
        self._objects = 0
        self._around: tuple[str, str] = "", ""
        self.slots: dict[Any, Slots] = {}
        self.last: dict[Any, Any] = {}  # the caller's; emptied when another graph may serve a size
        self._met: sizes.Met = {}
        self._exact: dict[Any, CompiledGraph] = {}  # for one size each, also of earlier runs
        self._general: dict[Any, _GeneralGraph] = {}  # by structure, dtypes and ranks
        self._chosen: dict[Any, CompiledGraph] = {}  # by structure and size
        self._has_warned = False
        self._values: dict[tuple[int, ...], list[list[Any]]] = {}  # places of numbers in a batch -> those met there

    @property
    def met(self) -> sizes.Met:
        """A copy of the list."""
        return _copied(self._met)

    def begin(self, met: sizes.Met) -> None:
        """Continue a run that has met these sizes."""
        self._met = _copied(met)
        self._chosen.clear()
        self.last.clear()

    def surroundings(self) -> tuple[str, str]:
        """Everything that a graph depends on besides its arguments; the same object until something changes."""
        settings, values = self._settings(), self._captured()
        around = self._around
        if around[0] is not settings or around[1] is not values:
            around = self._around = settings, values
        if self._captured.objects != self._objects:  # graphs of a former teacher would keep its weights
            self._objects = self._captured.objects
            self._forget()
        return around

    def _forget(self) -> None:
        for graphs in (self._exact, self._general, self._chosen, self.last):
            graphs.clear()

    def find(
        self,
        structure: Any,
        batch: tree.TreeDef,
        leaves: list[Any],
        tensors: list[Tensor],
        build: Callable[[], Callable[..., Any]],
    ) -> CompiledGraph:
        """Return the graph for these inputs; compile it if there is none yet.

        Args:
            structure: the other dependencies of a graph, including the shapes of ``tensors``.
            batch: the structure of the batch and the context.
            leaves: of both.
            tensors: of the state.
            build: returns the function to compile.

        Raises:
            Uncaptured: a number in the batch changed too often, and each change would compile a graph.
        """
        exact = ((structure, batch, self.surroundings()), signature(leaves))
        known = self._known(exact)
        if known is not None:
            return known
        self._watch_values(batch, leaves)
        with exclusive():  # another thread may have compiled it in the meantime
            known = self._known(exact)
            if known is None:
                try:
                    known = self._compile(exact, leaves, tensors, build)
                finally:
                    stored = self._captured.take_out()
                    if stored:
                        self._forget()
                if stored:
                    raise capture.Uncaptured(
                        "the step stores a tensor here, but Python runs once for a graph, and no later call writes it",
                        where=stored[0],
                        hint=_STORED_CURE,
                    )
                self._captured.mark_compiled()
                self._rename(exact[0][2], self.surroundings())
            return known

    def _rename(self, was: tuple[str, str], now: tuple[str, str]) -> None:
        """Give graphs their key of now: it leaves out the values that their own traces have changed."""
        tables: list[dict[Any, Any]] = [self._exact, self._general, self._chosen]
        for graphs in tables if was != now else ():
            for key in [key for key in graphs if key[0][2] == was]:
                graphs[(*key[0][:2], now), key[1]] = graphs.pop(key)

    def _known(self, exact: Any) -> CompiledGraph | None:
        known = self._chosen.get(exact)
        return known if known is not None and known.is_valid() else None

    def _watch_values(self, batch: tree.TreeDef, leaves: list[Any]) -> None:
        """Log the first change of a number in the batch, and raise after `_MAX_CHANGES`. So of any other leaf that is
        not a tensor."""
        others = ((at, leaf) for at, leaf in enumerate(leaves) if not isinstance(leaf, Tensor) and leaf is not TEXT)
        found = {at: constant(leaf) for at, leaf in others}
        met, values = self._values.setdefault(tuple(found), []), list(found.values())
        if values in met:
            return
        if met:
            at, (_, was), (_, now) = next(
                each for each in zip(found, met[-1], values, strict=True) if each[1] != each[2]
            )
            name = leaf_name(tree.paths(tree.unflatten(batch, [*range(len(leaves))]))[at])
            if len(met) > _MAX_CHANGES:
                what = f"the value has changed {len(met)} times; each value would compile a graph"
                raise capture.Uncaptured(what, where=name, hint=_VALUE_CURE)
            if all(len(each) < 2 for each in self._values.values()):
                text = "%s was %.40s, is %.40s: a graph holds it, so the step is recompiled (cure: %s)"
                log.warning(text, name, was, now, _VALUE_CURE)
        met.append(values)

    def _compile(self, exact: Any, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Any]) -> CompiledGraph:
        """Compile what the size of a batch needs; see the class."""
        check_layouts(leaves)
        kind = sizes.kind(leaves)
        met = self._met.get(kind, [])
        decided_by = sizes.extended(met, leaves)
        general = None
        if not sizes.is_first(decided_by, leaves) and len(decided_by) > sizes.FIRST:
            general = self._general_graph((exact[0], ranks(leaves)), decided_by, leaves, tensors, build)
        graph = general.graph if general is not None and general.fits(leaves) else None
        graph = graph or self._exact_graph(exact, leaves, tensors, build)
        if decided_by is not met:  # only now: a batch that cannot be trained on does not count
            self._met[kind] = decided_by
            self._chosen.clear()
            self.last.clear()
        if general is not None and general.graph is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{len(decided_by)} batch sizes, and no single graph accepts them all: each size is compiled "
                "separately (cure: pad the batches to a few sizes; read a size as x.shape[0], not len(x))",
                RuntimeWarning,
                stacklevel=2,
            )
        self._chosen[exact] = graph
        return graph

    def _exact_graph(
        self, exact: Any, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Any]
    ) -> CompiledGraph:
        """The graph for one size, which may be that of an earlier run; the oldest one of many is evicted."""
        graph = self._exact.get(exact)
        if graph is None or not graph.is_valid():
            graph = self._exact[exact] = self._compile_exact(build(), leaves, tensors)
        if len(self._exact) > _MAX_EXACT:
            oldest = next(iter(self._exact))
            del self._exact[oldest]
            self._chosen.pop(oldest, None)
        return graph

    def _general_graph(
        self,
        structure: Any,
        decided_by: list[sizes.Layouts],
        leaves: list[Any],
        tensors: list[Tensor],
        build: Callable[[], Any],
    ) -> _GeneralGraph:
        """The graph for all sizes that these decide."""
        known = self._general.get(structure)
        if known is None or known.decided_by != decided_by or (known.graph and not known.graph.is_valid()):
            known = self._general[structure] = self._compile_general(build(), decided_by, leaves, tensors, known)
        return known

    def _compile_exact(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> CompiledGraph:
        flat, where, found = _flatten_core(core, leaves, len(tensors))
        try:
            inputs = [*tensors, *(leaves[index] for index in where)]
            run, traits, outside = capture.compile_graph(
                flat, inputs, backend=self.options.backend, options=self.options.options
            )
        except (PurestepError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise capture.failed(error) from error
        self.count += 1
        return _compiled(run, traits, outside, where, len(leaves), *found)

    def _compile_general(
        self,
        core: Any,
        decided_by: list[sizes.Layouts],
        leaves: list[Any],
        tensors: list[Tensor],
        before: _GeneralGraph | None,
    ) -> _GeneralGraph:
        """Compile one graph for batches of any size; without a graph if that fails. Where the last size makes it fail,
        it is the graph for those before, which may be there (``before``)."""
        none = _GeneralGraph(decided_by, None, lambda batch: False)
        for count in range(len(decided_by), sizes.FIRST, -1):
            if before and before.decided_by == decided_by[:count] and before.graph and before.graph.is_valid():
                return before._replace(decided_by=decided_by)
            made = self._general_for(core, decided_by[:count], leaves, tensors)
            if made is not None:
                return made._replace(decided_by=decided_by)
        return none

    def _general_for(
        self, core: Any, decided_by: list[sizes.Layouts], leaves: list[Any], tensors: list[Tensor]
    ) -> _GeneralGraph | None:
        varying = sizes.varying([sizes.shapes_of(each) for each in decided_by])
        given = sizes.example(decided_by, varying)
        if given is None:
            return None
        example = sizes.like(leaves, given)
        flat, where, found = _flatten_core(core, example, len(tensors))
        made = None
        with suppress(Exception):  # a size as a Python number, a branch on a value: an exact graph raises the error
            made = capture.compile_sizes(
                flat,
                tensors,
                [example[index] for index in where],
                [varying[index] for index in where],
                backend=self.options.backend,
                options=self.options.options,
            )
        if made is None:
            return None
        run, traits, outside, fits = made
        graph = _compiled(run, traits, outside, where, len(example), *found)
        general = _GeneralGraph(decided_by, graph, lambda batch: fits([batch[index] for index in where]))
        if not all(general.fits(sizes.like(leaves, each)) for each in decided_by[sizes.FIRST :]):
            return None  # it takes one number in a dimension that varies
        self.count += 1
        return general


def _flatten_core(core: Any, leaves: list[Any], count: int) -> tuple[capture.Flat, list[int], list[Any]]:
    """Convert the core to a function of tensors (``count`` of the state, then those of the batch) that returns a list.

    Returns:
        The function; the positions of tensors in the batch; and a list that a call of the function fills with the
        structure of the core's result and a flag for each of its leaves, True if it goes into one vector.
    """
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    found: list[Any] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        batch = list(leaves)
        for index, leaf in zip(where, inputs[count:], strict=True):
            batch[index] = fx_passes.copied(leaf)  # a model may write its input in place
        outputs, treedef = tree.flatten(core(list(inputs[:count]), batch))
        is_scalar = numbers(outputs)
        found[:] = [treedef, is_scalar]
        scalars = [leaf for leaf, one in zip(outputs, is_scalar, strict=True) if one]
        rest = [leaf for leaf, one in zip(outputs, is_scalar, strict=True) if not one]
        return [torch.stack(scalars), *rest] if scalars else rest

    return flat, where, found


def _compiled(
    run: capture.Compiled,
    traits: capture.Traits,
    outside: list[Tensor],
    where: list[int],
    count: int,
    treedef: tree.TreeDef,
    is_scalar: list[bool],
) -> CompiledGraph:
    """A graph whose calls rebuild the result's tree from one vector of scalars and the other tensors."""
    all_tensors, build = len(where) == count, builder(treedef, is_scalar)

    def call(tensors: list[Tensor], batch: list[Any], outside: list[Tensor]) -> Any:
        inputs = batch if all_tensors else [batch[index] for index in where]
        try:
            return build(run([*tensors, *inputs, *outside]))
        except Exception as error:
            if not isinstance(error, PurestepError | torch.OutOfMemoryError):
                error.add_note(_explanation(str(error)))
            raise

    return CompiledGraph(call, outside, signature(outside), *traits)


def _explanation(native: str) -> str:
    """The cause of an error raised by the code of a graph, and the cure."""
    if "index out of bounds" in native:
        return (
            "an index is out of range: a class in the targets, a token, or a position (cure: give the model as many "
            "outputs, or embedding rows, as the data has; the same call in eager mode names the operation)"
        )
    return (
        "the error comes from compiled code (cure: call the step itself, in eager mode, with the same arguments; "
        "in fit: compile=False)"
    )
