"""The graphs of one step: which there are, and how a new one is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from .. import modes, rng, tree
from ..errors import PurestepError, StepContractError
from ..types import Mean, Metrics
from . import capture as capture_
from . import live as live_
from . import outside
from .alone import alone


class Options(NamedTuple):
    """How graphs are made."""

    capture: str
    backend: Any
    options: Mapping[str, Any] | None


class Graph(NamedTuple):
    """One compiled graph: ``(tensors, batch leaves) -> what the core returns``."""

    run: Callable[[list[Tensor], list[Any]], Any]
    draws: bool


class Stacked(NamedTuple):
    """Metrics as a graph returns them, in one vector: to a small step, a tensor a number is a tenth of its time."""

    numbers: Tensor  # shape=(n,), float32
    columns: tuple[tuple[str, int, int], ...]  # name, where its total and its weight are; one object for all calls

    def metrics(self) -> Metrics:
        """The same as a dict of Means."""
        values, make = self.numbers.unbind(), tuple.__new__  # half the time of calling Mean
        return {name: make(Mean, (values[total], values[weight])) for name, total, weight in self.columns}


def unstacked(metrics: Metrics | Stacked) -> Metrics:
    """A dict of Means, whichever it is."""
    return metrics.metrics() if type(metrics) is Stacked else cast(Metrics, metrics)


class Graphs:
    """The graphs of one step, by structure and by the shapes of the batch.

    The first two sizes of a batch (an epoch's batches, and its last one) get a graph each; from the third on, one
    graph for every size is made. Where Dynamo cannot make that one, each size keeps a graph of its own.
    """

    def __init__(self, options: Options, step: Callable[..., Any]) -> None:
        self.options = options
        self.count = 0
        self._settings, self._outside = outside.Surroundings(), outside.Outside(step)
        self._around: tuple[str, str] = "", ""
        self.slots: dict[Any, live_.Slots] = {}
        self._exact: dict[Any, Graph] = {}
        self._seen: dict[Any, list[Any]] = {}  # structure, dtypes and ranks -> the shapes seen
        self._sizes: dict[Any, Graph | None] = {}  # the same -> one graph for every other size; None: there is none

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
        family = (exact[0], _ranks(leaves))
        known = self._sizes.get(family)
        if known is not None:
            return known
        with alone():  # another thread may have made it by now
            made = self._exact.get(exact) or self._sizes.get(family)
            if made is None:
                made = self._new(exact, family, leaves, tensors, build)
                self._outside.settle()
            return made

    def _new(
        self, exact: Any, family: Any, leaves: list[Any], tensors: list[Tensor], build: Callable[[], Any]
    ) -> Graph:
        seen = self._seen.setdefault(family, [])
        is_third = len(seen) >= 2 and family not in self._sizes
        general = self._for_all_sizes(build(), leaves, tensors, seen[0]) if is_third else None
        if general is not None:
            self._sizes[family] = general
            return general
        graph = self._exact[exact] = self._make(build(), leaves, tensors)
        # Here it is known that the batch can be trained on: one that cannot is no size, and says nothing of others.
        seen.append([leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves])
        if is_third:
            self._sizes[family] = None
        return graph

    def _make(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> Graph:
        if self.options.backend == "inductor":
            _check_layouts(leaves)
        self.count += 1
        if self.options.capture != "dynamo":
            return self._traced(core, leaves, tensors)
        graph = self._dynamo(core, tensors, leaves)
        # Of what an operator itself refuses (shapes that do not fit), torch says all there is to say.
        told, but = "torch.compile cannot capture it", "TorchRuntimeError"
        return graph._replace(run=_or_refuse(graph.run, told, hint="capture='trace'", but=but))

    def _for_all_sizes(self, core: Any, leaves: list[Any], tensors: list[Tensor], first: Any) -> Graph | None:
        """One graph for batches of any size, tried out on copies of the buffers."""
        capture_.mark_sizes(leaves, first)
        graph = self._dynamo(core, tensors, leaves)
        try:
            _try_out(graph, tensors, leaves)
        except Exception:  # whatever stops Dynamo: a graph a size does the same work
            return None
        self.count += 1
        return graph._replace(run=_checked(graph.run, core))

    def _traced(self, core: Any, leaves: list[Any], tensors: list[Tensor]) -> Graph:
        where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        found: list[Any] = []

        def flat(*inputs: Tensor) -> list[Tensor]:
            batch = list(leaves)
            for index, leaf in zip(where, inputs[len(tensors) :], strict=True):
                batch[index] = leaf
            outputs, treedef = tree.flatten(core(list(inputs[: len(tensors)]), batch))
            stacked = _numbers(outputs)
            found[:] = [treedef, stacked]
            scalars = [leaf for leaf, one in zip(outputs, stacked, strict=True) if one]
            rest = [leaf for leaf, one in zip(outputs, stacked, strict=True) if not one]
            return [torch.stack(scalars), *rest] if scalars else rest

        try:
            inputs = [*tensors, *(leaves[index] for index in where)]
            run, draws = capture_.trace(flat, inputs, backend=self.options.backend, options=self.options.options)
        except Exception as error:
            # What is wrong with the step itself is wrong with Dynamo too, and the trace says it better.
            broken = isinstance(error, PurestepError) and not isinstance(error, capture_.DataDependent)
            if broken or self.options.capture == "trace":
                raise
            return self._untraced(core, leaves, tensors, error)
        return Graph(_caller(run, where, len(leaves), *found), draws)

    def _untraced(self, core: Any, leaves: list[Any], tensors: list[Tensor], cause: Exception) -> Graph:
        """Dynamo's graph; where it cannot capture the step either, the error that the trace met."""
        graph = self._dynamo(core, tensors, leaves)
        try:
            # What is wrong with the batch shows now, on copies: the state that went in lives on.
            _try_out(graph, tensors, leaves)
        except Exception as error:
            if capture_.stopped(error):
                cause.add_note(
                    f"torch.compile cannot capture it either: {_first_line(error)} "
                    "(cure: the step itself, which runs in eager mode)"
                )
                raise cause from error
            raise
        return graph._replace(run=_or_tell(graph.run, _first_line(cause)))

    def _dynamo(self, core: Any, tensors: list[Tensor], leaves: list[Any]) -> Graph:
        # Dynamo checks nothing of the contract, nor does it see what a loss reaches; a run on fake tensors does.
        capture_.rehearse(core, tensors, leaves)
        run = capture_.dynamo(core, backend=self.options.backend, options=self.options.options)
        return Graph(run, draws=True)


def _checked(run: Callable[..., Any], core: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, and where Dynamo stops at a check of the step's (a batch too short for its parts), what that says."""

    def call(tensors: list[Tensor], leaves: list[Any]) -> Any:
        try:
            return run(tensors, leaves)
        except Exception as error:
            if capture_.stopped(error):
                capture_.rehearse(core, tensors, leaves)
            raise

    return call


def _try_out(graph: Graph, tensors: list[Tensor], leaves: list[Any]) -> None:
    """A call on copies, so that nothing of the caller's is written, nor is a generator moved."""
    with rng.scoped(0, tree.device(tensors)):
        graph.run([tensor.clone() for tensor in tensors], leaves)


def _numbers(outputs: list[Tensor]) -> list[bool]:
    """Which outputs go into the one vector: 0-d float32, on the device of the first such."""
    found = [leaf.dim() == 0 and leaf.dtype == torch.float32 for leaf in outputs]
    device = next((leaf.device for leaf, one in zip(outputs, found, strict=True) if one), None)
    return [one and leaf.device == device for leaf, one in zip(outputs, found, strict=True)]


def _caller(
    run: Callable[[list[Tensor]], Any], where: list[int], count: int, treedef: tree.TreeDef, stacked: list[bool]
) -> Callable[[list[Tensor], list[Any]], Any]:
    """What a traced graph returns as a tree: scalars come in one vector, apart from the rest."""
    all_tensors, build = len(where) == count, _builder(treedef, stacked)

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


def _builder(treedef: tree.TreeDef, stacked: list[bool]) -> Callable[[Any], Any]:
    """From what a graph returns to the tree."""
    if not any(stacked):
        return lambda outputs: tree.unflatten(treedef, list(outputs))
    if all(stacked):
        columns = _columns(tree.unflatten(treedef, list(range(len(stacked)))))
        if columns is None:
            return lambda outputs: tree.unflatten(treedef, outputs[0].unbind())
        return lambda outputs: Stacked(outputs[0], columns)

    def mixed(outputs: Any) -> Any:
        scalars, rest = iter(outputs[0].unbind()), iter(outputs[1:])
        return tree.unflatten(treedef, [next(scalars) if one else next(rest) for one in stacked])

    return mixed


def _columns(positions: Any) -> tuple[tuple[str, int, int], ...] | None:
    """Name and positions of every metric, where the tree is a dict of Means and nothing else."""
    if type(positions) is not dict or not all(type(mean) is Mean for mean in positions.values()):
        return None
    return tuple((name, mean[0], mean[1]) for name, mean in positions.items())


def check_untransformed() -> None:
    """Raise StepContractError inside `torch.func.vmap`, `grad` and the like: compiled code cannot read such tensors."""
    if modes.transformed():
        raise StepContractError(
            "a compiled step is called inside torch.func.vmap, grad or another transform",
            where="compile_step",
            hint="outside of it; a step of one's own that uses transforms inside itself can be compiled",
        )


class Text:
    """Stands for text of a batch inside a graph, which cannot hold it: using it is an error."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise StepContractError(
            "the step reads text of the batch, which no compiled graph can hold",
            where="batch",
            hint="turn it into tensors in the loader, or leave it out: ps.supervised(..., prepare=...)",
        )

    __len__ = __iter__ = __getitem__ = __contains__ = __add__ = __str__ = __bool__ = __getattr__ = _refuse
    __eq__ = __ne__ = __hash__ = _refuse  # sets and dicts compare too


TEXT = Text()


def without_text(leaves: list[Any]) -> list[Any]:
    """The leaves of a batch with text replaced: its value must not select a graph."""
    if any(isinstance(leaf, str | bytes) for leaf in leaves):
        return [TEXT if isinstance(leaf, str | bytes) else leaf for leaf in leaves]
    return leaves


def resolved(leaf: Any) -> Any:
    """The leaf with a conjugation or negation that torch has put off: compiled code reads memory as it is."""
    if isinstance(leaf, Tensor) and (leaf.is_neg() or leaf.is_conj()):
        return leaf.resolve_conj().resolve_neg()
    return leaf


def kinds(leaves: list[Any]) -> tuple[Any, ...]:
    """What a compiled graph depends on: layout, dtype and device of tensors, the value of anything else."""
    return tuple((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else _constant(x) for x in leaves)


def _ranks(leaves: list[Any]) -> tuple[Any, ...]:
    """The same with every size left open."""
    return tuple((x.dtype, x.device, x.dim()) if isinstance(x, Tensor) else _constant(x) for x in leaves)


def _check_layouts(leaves: list[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise capture_.Uncaptured(
                f"a {str(leaf.layout).removeprefix('torch.')} tensor in the batch, which inductor does not take",
                where="batch",
                hint="x.to_dense() in the loader, or the step in eager mode",
            )


def _constant(value: Any) -> Any:
    """What tells one value from another: 1, 1.0 and True are equal, as are 0.0 and -0.0, and give other results."""
    if value is TEXT:
        return Text  # which can neither be hashed nor compared
    if isinstance(value, float | complex):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError as error:
        raise StepContractError(
            f"a {type(value).__name__} in the batch, which no compiled graph can hold",
            where="batch",
            hint="tensors: torch.as_tensor(array), or ps.to_device(batch, state)",
        ) from error
    return type(value), value


def alike(leaves: list[Any]) -> Callable[..., bool]:
    """Asks of as many other leaves, one argument each, whether they are tensors of the same `kinds`; for every step.

    `tree.layout_guard` tells apart what `kinds` does not, a tensor that requires gradients or one in inference mode:
    whoever asks looks for a graph by `kinds` then.
    """
    return tree.layout_guard(leaves) or functools.partial(_same_kinds, kinds(leaves))


def _same_kinds(known: tuple[Any, ...], *leaves: Any) -> bool:
    for kind, leaf in zip(known, leaves, strict=True):
        if type(leaf) is not Tensor or leaf.is_neg() or leaf.is_conj():
            return False
        if leaf.shape != kind[0] or leaf.stride() != kind[1] or leaf.dtype is not kind[2] or leaf.device != kind[3]:
            return False
    return True


def _or_tell(run: Callable[..., Any], met: str) -> Callable[..., Any]:
    """``run``, and when Dynamo has to capture the step anew and cannot, an error that says what a trace met. Only its
    text is kept: an error holds all that was in use when it was raised, the state and the batch among it."""
    told = "torch.compile, which had captured the step, cannot any longer"
    return _or_refuse(run, told, met=f"; a trace meets: {met}", hint="the step itself, which runs in eager mode")


def _or_refuse(run: Callable[..., Any], told: str, *, hint: str, met: str = "", but: str = "") -> Callable[..., Any]:
    """``run``, and what Dynamo cannot capture as a StepContractError; torch's error ``but`` stays what it is."""

    def call(*inputs: Any) -> Any:
        try:
            return run(*inputs)
        except Exception as error:
            if capture_.stopped(error) and type(error).__name__ != but:
                raise capture_.Uncaptured(f"{told}: {_first_line(error)}{met}", where="step", hint=hint) from error
            raise

    return call


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
