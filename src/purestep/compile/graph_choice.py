"""The graphs of one step: lookup by inputs, and compilation of new ones."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import PurestepError, StepContractError
from ..step import NoSetupContext
from ..torch_ext import tracing
from . import capture, captured_values, donation, dynamic_shapes, fx_passes
from .compile_lock import exclusive
from .first_run import first_line, guarded
from .guards import check_layouts, kinds, ranks
from .outputs import builder, numbers


class Options(NamedTuple):
    """Settings of the compilation."""

    capture: str
    backend: Any
    options: Mapping[str, Any] | None


class Graph(NamedTuple):
    """One compiled graph: ``(tensors, batch leaves) -> result of the core``."""

    run: Callable[[list[Tensor], list[Any]], Any]
    draws: bool
    records: bool = False  # see `capture.Traits`; Dynamo's graphs may call anything


class _GeneralGraph(NamedTuple):
    """One graph for batches of many sizes."""

    graph: Graph
    fits: Callable[[list[Tensor], list[Any]], bool]  # (state's tensors, batch leaves) -> the graph accepts them


class _Family:
    """Batches of one structure and any size."""

    def __init__(self) -> None:
        self.seen: list[dynamic_shapes.Shapes] = []
        self.exact: list[Any] = []  # keys of graphs for one size, oldest first
        self.general: list[_GeneralGraph] = []
        self.tried: dynamic_shapes.Varying | None = None  # dynamic dimensions of the last attempt
        self.tries = 0


_MAX_EXACT = 64
"""Maximal number of graphs for one size each in a family; the oldest is evicted."""

_MAX_GENERAL = 4
"""Maximal number of graphs for many sizes in a family: one for each remainder modulo the micro-batches, for example."""


class Graphs:
    """The graphs of one step, by structure and shapes of the batch.

    The first two batch sizes (an epoch's batches, and its last one) get a graph each. The third size compiles a general
    graph for every size. Another general graph is compiled when another dimension begins to vary, or for sizes that the
    guards reject. Sizes that none of at most `_MAX_GENERAL` such graphs accepts get a graph each, at most `_MAX_EXACT`
    at a time.
    """

    def __init__(self, options: Options, step: Callable[..., Any]) -> None:
        self.options = options
        self.count = 0
        self._settings, self._captured = captured_values.TorchSettings(), captured_values.CapturedValues(step)
        self._around: tuple[str, str] = "", ""
        self.slots: dict[Any, donation.Slots] = {}
        self._exact: dict[Any, Graph] = {}
        self._families: dict[Any, _Family] = {}  # structure, dtypes and ranks -> the sizes met

    def surroundings(self) -> tuple[str, str]:
        """Everything that a graph depends on besides its arguments; the same object until something changes."""
        settings, values = self._settings(), self._captured()
        around = self._around
        if around[0] is not settings or around[1] is not values:
            around = self._around = settings, values
        return around

    def find(
        self, structure: Any, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Callable[..., Any]]
    ) -> Graph:
        """Return the graph for these inputs; compile it if there is none yet.

        Args:
            structure: the other dependencies of a graph, including the shapes of ``tensors``.
            leaves: of the batch.
            tensors: of the state.
            build: returns the function to compile.
        """
        exact = ((structure, self.surroundings()), kinds(leaves))
        known = self._exact.get(exact)
        if known is not None:
            return known
        family = self._families.setdefault((exact[0], ranks(leaves)), _Family())
        known = self._find_general(exact, family, tensors, leaves)
        if known is not None:
            return known
        with exclusive():  # another thread may have compiled it in the meantime
            known = self._exact.get(exact) or self._find_general(exact, family, tensors, leaves)
            if known is None:
                known = self._compile(exact, family, leaves, tensors, build)
                self._captured.mark_compiled()
            return known

    def _find_general(self, exact: Any, family: _Family, tensors: list[Tensor], leaves: list[Any]) -> Graph | None:
        general = next((each for each in family.general if each.fits(tensors, leaves)), None)
        if general is None:
            return None
        self._exact[exact] = general.graph
        return general.graph

    def _compile(
        self, exact: Any, family: _Family, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Any]
    ) -> Graph:
        shapes = dynamic_shapes.shapes(leaves)
        varying = dynamic_shapes.varying([*family.seen, shapes])
        example = dynamic_shapes.example(leaves, family.seen, varying) if len(family.seen) >= 2 else None
        # Try again if another dimension varies, or for sizes that the existing graphs reject.
        is_more = example is leaves and family.general and family.tries < _MAX_GENERAL
        is_tried = example is not None and (varying != family.tried or is_more)
        general = (
            self._compile_general(build(), example, tensors, family.seen, varying) if example and is_tried else None
        )
        if general is not None and general.fits(tensors, leaves):
            graph = general.graph
        else:
            graph = self._compile_exact(build(), leaves, tensors)
            family.exact.append(exact)
        # Record the size only now: a batch that cannot be trained on must not count.
        self._exact[exact] = graph
        family.seen = [*family.seen, shapes][-_MAX_EXACT:]
        if general is not None:
            family.general = [general, *family.general]
        if is_tried:
            family.tried, family.tries = varying, family.tries + 1
        if is_tried and general is None and not family.general:
            warnings.warn(
                f"{len(family.seen)} batch sizes, and no single graph accepts them all: each size is compiled "
                "separately (cure: pad the batches to a few sizes)",
                RuntimeWarning,
                stacklevel=2,
            )
        if len(family.exact) > _MAX_EXACT:
            self._exact.pop(family.exact.pop(0), None)
        return graph

    def _compile_exact(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> Graph:
        check_layouts(leaves)
        self.count += 1
        if self.options.capture != "dynamo":
            return self._traced(core, leaves, tensors)
        graph = self._dynamo(core, tensors, leaves)
        return graph._replace(run=_with_cure(graph.run, core))

    def _compile_general(
        self,
        core: Any,
        example: list[Any],
        tensors: list[Tensor],
        seen: list[dynamic_shapes.Shapes],
        varying: dynamic_shapes.Varying,
    ) -> _GeneralGraph | None:
        """Compile one graph for batches of any size; return None if that fails. A traced graph draws like the eager
        step and has known guards. Dynamo's may specialize silently, so it is tried on a second size."""
        if self.options.backend == "inductor":
            check_layouts(example)
        if self.options.capture != "dynamo":
            try:
                made = self._trace_general(core, example, tensors, varying)
            except Exception:  # a size as a Python number, a branch on a value: Dynamo may support it
                made = None
            if made is not None:
                return made
        dynamic_shapes.mark(example, varying)
        graph = self._dynamo(core, tensors, example)
        try:
            _run_on_copies(graph, tensors, example)
        except Exception:  # a graph for each size does the same work
            return None
        graph = graph._replace(run=_with_step_checks(graph.run, core))
        other = next(shapes for shapes in seen if shapes != dynamic_shapes.shapes(example))
        if not _serves(graph, tensors, dynamic_shapes.like(example, other)):
            return None
        self.count += 1
        return _GeneralGraph(graph, functools.partial(_serves, graph))

    def _trace_general(
        self, core: Any, example: list[Any], tensors: list[Tensor], varying: dynamic_shapes.Varying
    ) -> _GeneralGraph | None:
        flat, where, found = _flatten_core(core, example, len(tensors))
        made = capture.trace_sizes(
            flat,
            tensors,
            [example[index] for index in where],
            [varying[index] for index in where],
            backend=self.options.backend,
            options=self.options.options,
        )
        if made is None:
            return None
        run, traits, fits = made
        self.count += 1
        call = _with_own_error(_returning_tree(run, where, len(example), *found), core)
        graph = Graph(guarded(call, tensors), *traits)
        return _GeneralGraph(graph, lambda _, batch: fits([batch[index] for index in where]))

    def _traced(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> Graph:
        flat, where, found = _flatten_core(core, leaves, len(tensors))
        try:
            inputs = [*tensors, *(leaves[index] for index in where)]
            run, traits = capture.trace(flat, inputs, backend=self.options.backend, options=self.options.options)
        except Exception as error:
            # An error of the step itself would fail under Dynamo too, and the trace reports it better.
            for_dynamo = capture.DataDependent, NoSetupContext
            broken = isinstance(error, PurestepError | MemoryError) and not isinstance(error, for_dynamo)
            if broken or self.options.capture == "trace":
                raise capture.capture_error(error, core, tensors, leaves) from error.__cause__
            return self._dynamo_instead(core, leaves, tensors, error)
        call = _with_own_error(_returning_tree(run, where, len(leaves), *found), core)
        return Graph(guarded(call, tensors), *traits)

    def _dynamo_instead(self, core: Any, leaves: list[Any], tensors: list[Tensor], cause: Exception) -> Graph:
        """Compile with Dynamo; if that fails too, raise the error of the trace."""
        graph = self._dynamo(core, tensors, leaves)
        try:
            # Run on copies: an error in the batch is raised here, and the input state stays valid.
            _run_on_copies(graph, tensors, leaves)
        except Exception as error:
            if capture.stopped(error):
                cause.add_note(
                    f"torch.compile cannot capture it either: {first_line(error)} "
                    "(cure: call the step itself, which runs in eager mode)"
                )
                raise capture.capture_error(cause, core, tensors, leaves) from error
            raise
        return graph._replace(run=_with_recapture_error(graph.run, first_line(cause)))

    def _dynamo(self, core: Any, tensors: list[Tensor], leaves: list[Any]) -> Graph:
        # Dynamo skips the contract and the check of which parameters the loss reaches; a run on fake tensors does both.
        capture.dry_run(core, tensors, leaves)
        run = capture.dynamo(core, backend=self.options.backend, options=self.options.options)
        return Graph(guarded(run, tensors), draws=True)


def _flatten_core(core: Any, leaves: list[Any], count: int) -> tuple[capture.Flat, list[int], list[Any]]:
    """Convert the core to a function of tensors (``count`` of the state, then those of the batch) that returns a list.

    Returns:
        The function; the positions of tensors in the batch; and a list that a call of the function fills with the
        structure of the core's result and the flags of its leaves that are stacked in one vector.
    """
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    found: list[Any] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        batch = list(leaves)
        for index, leaf in zip(where, inputs[count:], strict=True):
            batch[index] = fx_passes.copied(leaf)  # a model may write its input in place
        outputs, treedef = tree.flatten(core(list(inputs[:count]), batch))
        stacked = numbers(outputs)
        found[:] = [treedef, stacked]
        scalars = [leaf for leaf, one in zip(outputs, stacked, strict=True) if one]
        rest = [leaf for leaf, one in zip(outputs, stacked, strict=True) if not one]
        return [torch.stack(scalars), *rest] if scalars else rest

    return flat, where, found


def _serves(graph: Graph, tensors: list[Tensor], leaves: list[Any]) -> bool:
    """True if Dynamo's graph accepts a batch of this size without a recompile; tried on copies."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    with dynamo.config.patch(error_on_recompile=True):
        try:
            _run_on_copies(graph, tensors, leaves)
        except Exception:  # Dynamo would recompile, or the step fails: its own graph will raise that error
            return False
    return True


def _with_step_checks(run: Callable[..., Any], core: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``: if Dynamo fails at a check of the step (a batch too short to split), raise that error."""

    def call(tensors: list[Tensor], leaves: list[Any]) -> Any:
        try:
            return run(tensors, leaves)
        except Exception as error:
            if capture.stopped(error):
                capture.dry_run(core, tensors, leaves)
            raise

    return call


def _run_on_copies(graph: Graph, tensors: list[Tensor], leaves: list[Any]) -> None:
    """Call the graph on copies: neither the caller's tensors nor the generators change."""
    with rng.scoped(0, tree.device(tensors)), tracing.rehearsal():
        graph.run([tensor.clone() for tensor in tensors], leaves)


def _returning_tree(
    run: Callable[[list[Tensor]], Any], where: list[int], count: int, treedef: tree.TreeDef, stacked: list[bool]
) -> Callable[[list[Tensor], list[Any]], Any]:
    """Wrap a traced graph: rebuild the result's tree from one vector of scalars and the other tensors."""
    all_tensors, build = len(where) == count, builder(treedef, stacked)

    def call(tensors: list[Tensor], batch: list[Any]) -> Any:
        inputs = batch if all_tensors else [batch[index] for index in where]
        try:
            outputs = run([*tensors, *inputs])
        except RuntimeError as error:
            if note := _explanation(str(error)):
                error.add_note(note)
            raise
        return build(outputs)

    return call


def _with_own_error(run: Callable[..., Any], core: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``: if it fails, and the eager step breaks its contract, raise that error. A trace cannot see a buffer
    that a kernel resizes (fake quantization with a scale for each channel); inductor's code asserts its size."""

    def call(tensors: list[Tensor], leaves: list[Any]) -> Any:
        try:
            return run(tensors, leaves)
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


def _with_cure(run: Callable[..., Any], core: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``: if Dynamo cannot capture the step, raise an error with a cure that works. A trace, which
    compiles nothing, shows whether ``capture="trace"`` is one; if not, it names the line and the cure."""

    def call(tensors: list[Tensor], leaves: list[Any]) -> Any:
        try:
            return run(tensors, leaves)
        except Exception as error:
            if not capture.stopped(error):
                raise
            flat, where, _ = _flatten_core(core, leaves, len(tensors))
            failed = capture.trace_error(flat, [*tensors, *(leaves[index] for index in where)])
            if failed is not None and not isinstance(failed, PurestepError):
                raise capture.capture_error(failed, core, tensors, leaves) from error
            message, place, hint = first_line(error), "step", "pass capture='trace'"
            if failed is not None:
                message, place, hint = failed.what, failed.where, failed.hint
            raise capture.Uncaptured(f"torch.compile cannot capture it: {message}", where=place, hint=hint) from error

    return call


def _with_recapture_error(run: Callable[..., Any], met: str) -> Callable[..., Any]:
    """Wrap ``run``: if Dynamo fails to recapture the step, raise an error that quotes the trace's error. ``met`` is its
    text, since the exception would keep the state and the batch alive."""

    def call(*inputs: Any) -> Any:
        try:
            return run(*inputs)
        except Exception as error:
            if not capture.stopped(error):
                raise
            raise capture.Uncaptured(
                f"torch.compile fails to recapture the step: {first_line(error)}; a trace fails with: {met}",
                where="step",
                hint="call the step itself, which runs in eager mode",
            ) from error

    return call
