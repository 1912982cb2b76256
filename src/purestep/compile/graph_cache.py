"""The graphs of one step: which there are, and how a new one is made."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import PurestepError
from ..step import NoSetupContext
from . import capture, captured_values, donation, dynamic_shapes, fx_passes
from .compile_lock import alone
from .first_run import first_line, guarded
from .guards import check_layouts, kinds, ranks
from .outputs import builder, numbers


class Options(NamedTuple):
    """How graphs are made."""

    capture: str
    backend: Any
    options: Mapping[str, Any] | None


class Graph(NamedTuple):
    """One compiled graph: ``(tensors, batch leaves) -> what the core returns``."""

    run: Callable[[list[Tensor], list[Any]], Any]
    draws: bool


class _AllSizes(NamedTuple):
    """One graph for batches of many sizes."""

    graph: Graph
    fits: Callable[[list[Tensor], list[Any]], bool]  # (state's tensors, batch leaves) -> whether it serves them


class _Family:
    """Batches of one structure, whatever their sizes."""

    def __init__(self) -> None:
        self.seen: list[dynamic_shapes.Shapes] = []
        self.exact: list[Any] = []  # keys of graphs of one size, the oldest first
        self.general: list[_AllSizes] = []
        self.tried: dynamic_shapes.Varying | None = None  # the dimensions of the last attempt at a graph for all sizes
        self.tries = 0


_MOST = 64
"""Graphs of one size each that a family keeps; the oldest one goes when another is made."""

_GENERAL = 4
"""Attempts at a graph for many sizes, of each remainder by the number of micro-batches, say."""


class Graphs:
    """The graphs of one step, by structure and by the shapes of the batch.

    The first two sizes of a batch (an epoch's batches, and its last one) get a graph each. The third size makes one
    graph for every size; another one is made when another dimension begins to vary, or for sizes that its guards
    refuse. Sizes that none of `_GENERAL` such graphs serves get a graph each, at most `_MOST` at a time.
    """

    def __init__(self, options: Options, step: Callable[..., Any]) -> None:
        self.options = options
        self.count = 0
        self._settings, self._outside = captured_values.Surroundings(), captured_values.Outside(step)
        self._around: tuple[str, str] = "", ""
        self.slots: dict[Any, donation.Slots] = {}
        self._exact: dict[Any, Graph] = {}
        self._families: dict[Any, _Family] = {}  # structure, dtypes and ranks -> the sizes met

    def surroundings(self) -> tuple[str, str]:
        """What a graph depends on besides its arguments; the same object as long as nothing changes."""
        settings, values = self._settings(), self._outside()
        around = self._around
        if around[0] is not settings or around[1] is not values:
            around = self._around = settings, values
        return around

    def find(
        self, structure: Any, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Callable[..., Any]]
    ) -> Graph:
        """The graph for these inputs, compiled when there is none yet.

        Args:
            structure: everything else that a graph depends on, the shapes of ``tensors`` included.
            leaves: of the batch.
            tensors: the state's.
            build: makes the function to compile.
        """
        exact = ((structure, self.surroundings()), kinds(leaves))
        known = self._exact.get(exact)
        if known is not None:
            return known
        family = self._families.setdefault((exact[0], ranks(leaves)), _Family())
        known = self._served(exact, family, tensors, leaves)
        if known is not None:
            return known
        with alone():  # another thread may have made it by now
            known = self._exact.get(exact) or self._served(exact, family, tensors, leaves)
            if known is None:
                known = self._new(exact, family, leaves, tensors, build)
                self._outside.settle()
            return known

    def _served(self, exact: Any, family: _Family, tensors: list[Tensor], leaves: list[Any]) -> Graph | None:
        general = next((each for each in family.general if each.fits(tensors, leaves)), None)
        if general is None:
            return None
        self._exact[exact] = general.graph
        return general.graph

    def _new(
        self, exact: Any, family: _Family, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Any]
    ) -> Graph:
        shapes = dynamic_shapes.shapes(leaves)
        varying = dynamic_shapes.varying([*family.seen, shapes])
        example = dynamic_shapes.example(leaves, family.seen, varying) if len(family.seen) >= 2 else None
        # Another one where another dimension varies, or for sizes that the ones there are do not serve.
        is_more = example is leaves and family.general and family.tries < _GENERAL
        is_tried = example is not None and (varying != family.tried or is_more)
        general = self._for_all_sizes(build(), example, tensors, family.seen, varying) if example and is_tried else None
        if general is not None and general.fits(tensors, leaves):
            graph = general.graph
        else:
            graph = self._make(build(), leaves, tensors)
            family.exact.append(exact)
        # Here it is known that the batch can be trained on: one that cannot is no size, and says nothing of others.
        self._exact[exact] = graph
        family.seen = [*family.seen, shapes][-_MOST:]
        if general is not None:
            family.general = [general, *family.general]
        if is_tried:
            family.tried, family.tries = varying, family.tries + 1
        if is_tried and general is None and not family.general:
            warnings.warn(
                f"{len(family.seen)} sizes of batches, and no one graph serves them all: each size is compiled for "
                "itself (cure: pad the batches to a few sizes)",
                RuntimeWarning,
                stacklevel=2,
            )
        if len(family.exact) > _MOST:
            self._exact.pop(family.exact.pop(0), None)
        return graph

    def _make(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> Graph:
        check_layouts(leaves)
        self.count += 1
        if self.options.capture != "dynamo":
            return self._traced(core, leaves, tensors)
        graph = self._dynamo(core, tensors, leaves)
        # Of what an operator itself refuses (shapes that do not fit), torch says all there is to say.
        told, but = "torch.compile cannot capture it", "TorchRuntimeError"
        return graph._replace(run=_or_refuse(graph.run, told, hint="capture='trace'", but=but))

    def _for_all_sizes(
        self,
        core: Any,
        example: list[Any],
        tensors: list[Tensor],
        seen: list[dynamic_shapes.Shapes],
        varying: dynamic_shapes.Varying,
    ) -> _AllSizes | None:
        """One graph for batches of any size; None where there is none. The traced one has the draws of an eager step,
        and its guards are known; Dynamo's may specialize without a word, so it is tried on a second size."""
        if self.options.backend == "inductor":
            check_layouts(example)
        if self.options.capture != "dynamo":
            try:
                made = self._traced_for_all(core, example, tensors, varying)
            except Exception:  # the size of a tensor as a number of Python's, a branch on a value: Dynamo may know
                made = None
            if made is not None:
                return made
        dynamic_shapes.mark(example, varying)
        graph = self._dynamo(core, tensors, example)
        try:
            _try_out(graph, tensors, example)
        except Exception:  # whatever stops Dynamo: a graph a size does the same work
            return None
        graph = graph._replace(run=_checked(graph.run, core))
        other = next(shapes for shapes in seen if shapes != dynamic_shapes.shapes(example))
        if not _serves(graph, tensors, dynamic_shapes.like(example, other)):
            return None
        self.count += 1
        return _AllSizes(graph, functools.partial(_serves, graph))

    def _traced_for_all(
        self, core: Any, example: list[Any], tensors: list[Tensor], varying: dynamic_shapes.Varying
    ) -> _AllSizes | None:
        flat, where, found = _flat(core, example, len(tensors))
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
        run, draws, fits = made
        self.count += 1
        graph = Graph(guarded(_caller(run, where, len(example), *found), tensors), draws)
        return _AllSizes(graph, lambda _, batch: fits([batch[index] for index in where]))

    def _traced(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> Graph:
        flat, where, found = _flat(core, leaves, len(tensors))
        try:
            inputs = [*tensors, *(leaves[index] for index in where)]
            run, draws = capture.trace(flat, inputs, backend=self.options.backend, options=self.options.options)
        except Exception as error:
            # What is wrong with the step itself is wrong with Dynamo too, and the trace says it better.
            for_dynamo = capture.DataDependent, NoSetupContext
            broken = isinstance(error, PurestepError | MemoryError) and not isinstance(error, for_dynamo)
            if broken or self.options.capture == "trace":
                raise capture.refused(error, core, tensors, leaves) from error.__cause__
            return self._untraced(core, leaves, tensors, error)
        return Graph(guarded(_caller(run, where, len(leaves), *found), tensors), draws)

    def _untraced(self, core: Any, leaves: list[Any], tensors: list[Tensor], cause: Exception) -> Graph:
        """Dynamo's graph; where it cannot capture the step either, the error that the trace met."""
        graph = self._dynamo(core, tensors, leaves)
        try:
            # What is wrong with the batch shows now, on copies: the state that went in lives on.
            _try_out(graph, tensors, leaves)
        except Exception as error:
            if capture.stopped(error):
                cause.add_note(
                    f"torch.compile cannot capture it either: {first_line(error)} "
                    "(cure: the step itself, which runs in eager mode)"
                )
                raise capture.refused(cause, core, tensors, leaves) from error
            raise
        return graph._replace(run=_or_tell(graph.run, first_line(cause)))

    def _dynamo(self, core: Any, tensors: list[Tensor], leaves: list[Any]) -> Graph:
        # Dynamo checks nothing of the contract, nor does it see what a loss reaches; a run on fake tensors does.
        capture.rehearse(core, tensors, leaves)
        run = capture.dynamo(core, backend=self.options.backend, options=self.options.options)
        return Graph(guarded(run, tensors), draws=True)


def _flat(core: Any, leaves: list[Any], count: int) -> tuple[capture.Flat, list[int], list[Any]]:
    """The core as a function of tensors alone, ``count`` of the state and those of the batch, which returns a list.

    Returns:
        That function; where in the batch its tensors are; and, filled by a call of it, the structure of what the core
        returns, and which leaves of that are stacked in one vector.
    """
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    found: list[Any] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        batch = list(leaves)
        for index, leaf in zip(where, inputs[count:], strict=True):
            batch[index] = fx_passes.copied(leaf)  # a model may write its input; the batch stays what it was
        outputs, treedef = tree.flatten(core(list(inputs[:count]), batch))
        stacked = numbers(outputs)
        found[:] = [treedef, stacked]
        scalars = [leaf for leaf, one in zip(outputs, stacked, strict=True) if one]
        rest = [leaf for leaf, one in zip(outputs, stacked, strict=True) if not one]
        return [torch.stack(scalars), *rest] if scalars else rest

    return flat, where, found


def _serves(graph: Graph, tensors: list[Tensor], leaves: list[Any]) -> bool:
    """Whether Dynamo's graph takes a batch of this size as it is; tried on copies."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    with dynamo.config.patch(error_on_recompile=True):
        try:
            _try_out(graph, tensors, leaves)
        except Exception:  # Dynamo's word that it would compile again, or an error of the step's own: its graph says it
            return False
    return True


def _checked(run: Callable[..., Any], core: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, and where Dynamo stops at a check of the step's (a batch too short for its parts), what that says."""

    def call(tensors: list[Tensor], leaves: list[Any]) -> Any:
        try:
            return run(tensors, leaves)
        except Exception as error:
            if capture.stopped(error):
                capture.rehearse(core, tensors, leaves)
            raise

    return call


def _try_out(graph: Graph, tensors: list[Tensor], leaves: list[Any]) -> None:
    """A call on copies, so that nothing of the caller's is written, nor is a generator moved."""
    with rng.scoped(0, tree.device(tensors)):
        graph.run([tensor.clone() for tensor in tensors], leaves)


def _caller(
    run: Callable[[list[Tensor]], Any], where: list[int], count: int, treedef: tree.TreeDef, stacked: list[bool]
) -> Callable[[list[Tensor], list[Any]], Any]:
    """What a traced graph returns as a tree: scalars come in one vector, apart from the rest."""
    all_tensors, build = len(where) == count, builder(treedef, stacked)

    def call(tensors: list[Tensor], batch: list[Any]) -> Any:
        inputs = batch if all_tensors else [batch[index] for index in where]
        try:
            outputs = run([*tensors, *inputs])
        except RuntimeError as error:
            if told := _in_words(str(error)):
                error.add_note(told)
            raise
        return build(outputs)

    return call


def _in_words(native: str) -> str:
    """What an error of inductor's code comes from; nothing of other errors, which say it themselves."""
    if "index out of bounds" in native:
        return (
            "an index is outside of what it points into: a class in the targets, a token, or a position (cure: as many "
            "outputs, or rows of the embedding, as the data has; the same call in eager mode names the operation)"
        )
    if "API call failed" in native:
        return "compiled code knows no more; the same call in eager mode, of the step itself, names the operation"
    return ""


def _or_tell(run: Callable[..., Any], met: str) -> Callable[..., Any]:
    """``run``, and when Dynamo has to capture the step anew and cannot, an error that says what a trace met. Only its
    text is kept: an error holds all that was in use when it was raised, the state and the batch among it."""
    told = "torch.compile, which had captured the step, cannot any longer"
    return _or_refuse(run, told, met=f"; a trace meets: {met}", hint="the step itself, which runs in eager mode")


_LOOKS = ("data-dependent", "Data dependent", "Data-dependent", "Dynamic shape operator", "Dynamic slicing")
"""What Dynamo says of a look at a value, which a trace does not have either."""


def _or_refuse(run: Callable[..., Any], told: str, *, hint: str, met: str = "", but: str = "") -> Callable[..., Any]:
    """``run``, and what Dynamo cannot capture as a StepContractError; torch's error ``but`` stays what it is."""

    def call(*inputs: Any) -> Any:
        try:
            return run(*inputs)
        except Exception as error:
            if capture.stopped(error) and type(error).__name__ != but:
                cure = capture.LOOKS_CURE if any(words in str(error) for words in _LOOKS) else hint
                raise capture.Uncaptured(f"{told}: {first_line(error)}{met}", where="step", hint=cure) from error
            raise

    return call
