"""The graphs of one step: lookup by inputs, and compilation of new ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import PurestepError, StepContractError
from . import capture, fx_passes, sizes
from .buffers import Slots
from .capture import exclusive
from .captured_values import CapturedValues
from .first_run import guarded
from .guards import TorchSettings, check_layouts, ranks, signature
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

    graph: CompiledGraph
    fits: Callable[[list[Any]], bool]  # batch leaves -> the graph accepts them


class _Family:
    """Batches of one structure and any size."""

    def __init__(self) -> None:
        self.seen: list[sizes.Shapes] = []
        self.exact: list[Any] = []  # keys of graphs for one size, oldest first
        self.general: list[_GeneralGraph] = []
        self.is_tried = False  # a general graph has been compiled, or could not be


_MAX_EXACT = 64
"""Maximal number of graphs for one size each in a family; the oldest is evicted."""

_MAX_GENERAL = 4
"""Maximal number of graphs for many sizes in a family: one for each remainder modulo the micro-batches, for example."""


class Graphs:
    """The graphs of one step, by structure and shapes of the batch.

    The first two batch sizes (an epoch's batches, and its last one) get a graph each. The third size compiles a general
    graph, with a symbol for every size that has varied; a batch that it rejects (its length varies too) compiles
    another one, up to `_MAX_GENERAL`. Further sizes, and all sizes if there can be no general graph, get a graph each,
    at most `_MAX_EXACT` at a time.
    """

    def __init__(self, options: Options, step: Callable[..., Any]) -> None:
        self.options = options
        self.count = 0
        self._settings, self._captured = TorchSettings(), CapturedValues(step)
        self._objects = 0
        self._around: tuple[str, str] = "", ""
        self.slots: dict[Any, Slots] = {}
        self._exact: dict[Any, CompiledGraph] = {}
        self._families: dict[Any, _Family] = {}  # structure, dtypes and ranks -> the sizes met

    def surroundings(self) -> tuple[str, str]:
        """Everything that a graph depends on besides its arguments; the same object until something changes."""
        settings, values = self._settings(), self._captured()
        around = self._around
        if around[0] is not settings or around[1] is not values:
            around = self._around = settings, values
        if self._captured.objects != self._objects:  # graphs of a former teacher would keep its weights
            self._objects = self._captured.objects
            self._exact.clear()
            self._families.clear()
        return around

    def find(
        self, structure: Any, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Callable[..., Any]]
    ) -> CompiledGraph:
        """Return the graph for these inputs; compile it if there is none yet.

        Args:
            structure: the other dependencies of a graph, including the shapes of ``tensors``.
            leaves: of the batch.
            tensors: of the state.
            build: returns the function to compile.
        """
        exact = ((structure, self.surroundings()), signature(leaves))
        known = self._exact.get(exact)
        if known is not None and known.is_valid():
            return known
        family = self._families.setdefault((exact[0], ranks(leaves)), _Family())
        known = self._find_general(exact, family, leaves)
        if known is not None:
            return known
        with exclusive():  # another thread may have compiled it in the meantime
            known = self._exact.get(exact)
            if known is None or not known.is_valid():
                known = self._find_general(exact, family, leaves) or self._compile(
                    exact, family, leaves, tensors, build
                )
                self._captured.mark_compiled()
            return known

    def _find_general(self, exact: Any, family: _Family, leaves: list[Any]) -> CompiledGraph | None:
        general = next((each for each in family.general if each.graph.is_valid() and each.fits(leaves)), None)
        if general is None:
            return None
        self._exact[exact] = general.graph
        return general.graph

    def _compile(
        self, exact: Any, family: _Family, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Any]
    ) -> CompiledGraph:
        example, varying = self._general_example(family, leaves)
        general = None if example is None else self._compile_general(build(), example, tensors, varying)
        if general is not None:
            family.general.append(general)
        graph = self._find_general(exact, family, leaves)
        if graph is None:
            graph = self._exact[exact] = self._compile_exact(build(), leaves, tensors)
            family.exact = [*(key for key in family.exact if key != exact), exact]
            if len(family.exact) > _MAX_EXACT:
                self._exact.pop(family.exact.pop(0), None)
        # Only now: a batch that cannot be trained on must not count.
        shapes = sizes.shapes(leaves)
        family.seen = [*(each for each in family.seen if each != shapes), shapes][-_MAX_EXACT:]
        if example is not None:
            family.is_tried = True
            if not family.general:
                warnings.warn(
                    f"{len(family.seen)} batch sizes, and no single graph accepts them all: each size is compiled "
                    "separately (cure: pad the batches to a few sizes; read a size as x.shape[0], not len(x))",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return graph

    def _general_example(self, family: _Family, leaves: list[Any]) -> tuple[list[Any] | None, sizes.Varying]:
        """The batch to trace a general graph with, and its varying dimensions. None before the third size, if there can
        be no general graph, or if torch would specialize all batches."""
        is_possible = not family.is_tried or 0 < len(family.general) < _MAX_GENERAL
        if len(family.seen) < 2 or not is_possible:
            return None, []
        varying = sizes.varying([*family.seen, sizes.shapes(leaves)])
        example = sizes.example(leaves, family.seen, varying)
        return (None if family.is_tried and example is not leaves else example), varying

    def _compile_exact(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> CompiledGraph:
        check_layouts(leaves)
        flat, where, found = _flatten_core(core, leaves, len(tensors))
        try:
            inputs = [*tensors, *(leaves[index] for index in where)]
            run, traits, outside = capture.trace(
                flat, inputs, backend=self.options.backend, options=self.options.options
            )
        except Exception as error:
            raise capture.capture_error(error, core, tensors, leaves) from error.__cause__
        self.count += 1
        call = _with_own_error(_returning_tree(run, where, len(leaves), *found), core)
        return CompiledGraph(guarded(call, tensors), outside, signature(outside), *traits)

    def _compile_general(
        self, core: Any, example: list[Any], tensors: list[Tensor], varying: sizes.Varying
    ) -> _GeneralGraph | None:
        """Compile one graph for batches of any size; return None if that fails."""
        if self.options.backend == "inductor":
            check_layouts(example)
        flat, where, found = _flatten_core(core, example, len(tensors))
        try:
            made = capture.trace_sizes(
                flat,
                tensors,
                [example[index] for index in where],
                [varying[index] for index in where],
                backend=self.options.backend,
                options=self.options.options,
            )
        except Exception:  # a size as a Python number, a branch on a value: a graph for this size raises the error
            made = None
        if made is None:
            return None
        run, traits, outside, fits = made
        self.count += 1
        call = _with_own_error(_returning_tree(run, where, len(example), *found), core)
        graph = CompiledGraph(guarded(call, tensors), outside, signature(outside), *traits)
        return _GeneralGraph(graph, lambda batch: fits([batch[index] for index in where]))


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


def _returning_tree(
    run: Callable[[list[Tensor]], Any], where: list[int], count: int, treedef: tree.TreeDef, is_scalar: list[bool]
) -> Callable[[list[Tensor], list[Any], list[Tensor]], Any]:
    """Wrap a traced graph: rebuild the result's tree from one vector of scalars and the other tensors."""
    all_tensors, build = len(where) == count, builder(treedef, is_scalar)

    def call(tensors: list[Tensor], batch: list[Any], outside: list[Tensor]) -> Any:
        inputs = batch if all_tensors else [batch[index] for index in where]
        try:
            outputs = run([*tensors, *inputs, *outside])
        except RuntimeError as error:
            if note := _explanation(str(error)):
                error.add_note(note)
            raise
        return build(outputs)

    return call


def _with_own_error(run: Callable[..., Any], core: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``: if it fails, and the eager step breaks its contract, raise that error. A trace cannot see a buffer
    that a kernel resizes (fake quantization with a scale for each channel); inductor's code asserts its size."""

    def call(tensors: list[Tensor], leaves: list[Any], outside: list[Tensor]) -> Any:
        try:
            return run(tensors, leaves, outside)
        except (RuntimeError, AssertionError) as error:
            if not isinstance(error, PurestepError | torch.OutOfMemoryError):
                own = capture.capture_error(error, core, tensors, leaves)
                if isinstance(own, StepContractError) and not isinstance(own, capture.Uncaptured):
                    raise own from error
            raise

    return call


def _explanation(native: str) -> str:
    """The cause of an error raised by inductor's code; empty for other errors, which explain themselves."""
    if "index out of bounds" in native:
        return (
            "an index is out of range: a class in the targets, a token, or a position (cure: give the model as many "
            "outputs, or embedding rows, as the data has; the same call in eager mode names the operation)"
        )
    if "API call failed" in native:
        return "call the step itself, in eager mode, with the same arguments: its error names the operation"
    return ""
