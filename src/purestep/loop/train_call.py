"""Calls of a step: errors get the place in the data, and in the anomaly mode the leaf that is to blame; a state that
changes its kind is found.

The program as a run uses it: compiled as the config says, in eager where that cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import compile as compile_
from .. import files, tree
from ..compile import Stacked, states
from ..diagnostics import not_finite, purity
from ..errors import NonFiniteError, PurestepError, StepContractError
from ..types import Metrics, Program, TrainStep, Tree
from .accumulation import counting
from .evaluate import BatchCheck, check_pair
from .loop_state import Record
from .progress import can_halt, halts
from .purity_check import Looks

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig
import difflib
import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import data
from ..compile import first_line
from ..errors import ConfigError
from ..types import EvalStep
from .evaluate import takes_index

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig


_EVERY = 64  # calls between two looks at the kind of the state, which take a microsecond a leaf


class Caller:
    """``caller(state, batch, record)`` calls a train step.

    Args:
        step: ``(state, batch) -> (state, metrics)``.
        state: whose structure, shapes and dtypes stay what they are.
        looks: at the first calls.
        anomalies: look at every result at once, and name what is not finite.
        compiled: the step compares states itself, and makes them live ones.
    """

    def __init__(self, step: TrainStep, state: Tree, looks: Looks, *, anomalies: bool, compiled: bool) -> None:
        self._check = BatchCheck()
        # Of the batches that a compiled step gets, those need no look that are like the one before: it looks itself.
        own = step if isinstance(step, compile_.CompiledStep) else None
        self._looks_itself = own is not None
        self._step: Any = partial(own.stacked, unlike=self._unlike) if own else counting(step)
        self._looks = looks
        self._anomalies = anomalies
        self._compiled = compiled
        self._kind = purity.Kind(state)
        self._weights = {weight.dtype for part in states(state) for weight in tree.leaves(part.params)}
        self._calls = 0
        self.failed = False
        """Whether a donated step was broken off while it wrote: the memory of the state that went in is undefined."""
        self._stop_at = 1  # the next call that is more than a call
        self._record = Record()

    def __call__(self, state: Tree, batch: Any, record: Record) -> tuple[Tree, Metrics | Stacked]:
        """``step(state, batch)``, the next batch of this record.

        Raises:
            DataError: the batch is of another structure than the first.
            StepContractError: it returned something else than a state of the same kind and metrics, or is not pure.
            NonFiniteError: with ``anomalies``, a loss or gradient that is not finite.
        """
        self._calls += 1
        self._record = record
        try:
            if self._calls == self._stop_at:
                new, metrics = self._looked(state, batch, _place(record))
            elif self._looks_itself:
                new, metrics = self._step(state, batch)
            else:
                self._check(batch, record)
                new, metrics = self._made(state, batch)
        except BaseException as error:
            self._broken_off(error, state)
            if isinstance(error, PurestepError) or not isinstance(error, Exception):
                raise
            if self._anomalies and "returned nan values" in str(error):  # torch's word for it
                raise _named(f"{error} (its forward call is in the warning above)", state, batch, record) from error
            error.add_note(f"in train_step, {_place(record)}")
            if mixed := _mixed_dtypes(error, batch, self._weights):
                error.add_note(mixed)
            raise
        if self._anomalies and halts(new):
            raise _named("the loss or a gradient is not finite", state, batch, record)
        return new, metrics

    def flush(self, flush: Callable[[Tree], tuple[Tree, Metrics]], state: Tree) -> tuple[Tree, Metrics]:
        """``flush(state)``."""
        try:
            return flush(state)
        except BaseException as error:
            self._broken_off(error, state)
            raise

    def _broken_off(self, error: BaseException, state: Tree) -> None:
        self.failed = not (isinstance(error, PurestepError) or compile_.is_alive(state))

    def _made(self, state: Tree, batch: Any) -> tuple[Tree, Metrics | Stacked]:
        found = self._step(state, batch)
        return found if self._compiled else check_pair(found)  # what a graph returns is looked at when it is made

    def _unlike(self, batch: Any) -> None:
        self._check(batch, self._record)

    def _looked(self, state: Tree, batch: Any, place: str) -> tuple[Tree, Metrics | Stacked]:
        calls = self._calls
        self._unlike(batch)
        try:
            found = self._looks(state, batch, place) if calls == self._looks.due else None
            if found is None or self._compiled:
                found = self._made(state, batch)
            if not self._compiled:
                self._compare(found[0], place)
        finally:  # a run may leave behind what the anomaly mode has found, and go on
            self._stop_at = min(self._looks.due, calls * 2 if calls < _EVERY else calls + _EVERY)
        return found

    def _compare(self, new: Tree, place: str) -> None:
        try:
            self._kind.check(new)
        except purity.Impure as error:
            where = f"train_step, up to {place}, {error.where}"
            raise StepContractError(error.what, where=where, hint=error.hint) from None


class Failing(Caller):
    """A Caller with failpoints, for runs that are started with a plan for them: no other run pays for them."""

    def __call__(self, state: Tree, batch: Any, record: Record) -> tuple[Tree, Metrics | Stacked]:
        files.failpoint("loop.batch")
        found = super().__call__(state, batch, record)
        try:
            files.failpoint("loop.step")
        except BaseException as error:
            self._broken_off(error, state)
            raise
        return found


def caller(eager: Program, program: Program, state: Tree, config: FitConfig) -> Caller:
    """What a run calls its step by.

    Args:
        eager: the program as it was given.
        program: the one that is run, which may be compiled.
        state: the first one.
        config: of the run.
    """
    compiled = program.train_step is not eager.train_step
    looks = Looks(eager, config.check_every, compiled=compiled)
    kind = Failing if files.armed() else Caller
    return kind(program.train_step, state, looks, anomalies=config.detect_anomaly, compiled=compiled)


def _place(record: Record) -> str:
    return f"epoch {record.epoch + 1}, batch {record.batch + 1}"


_TORCHS_NAMES = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}


def _mixed_dtypes(error: Exception, batch: Any, weights: set[torch.dtype]) -> str:
    """The cure, where torch complains of two dtypes, one of which only the batch has and the other one the weights."""
    leaves = tree.leaves(tree.dicts(batch))
    given = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()} - weights
    text = str(error).lower()
    if not all(any(_TORCHS_NAMES.get(dtype, str(dtype)) in text for dtype in dtypes) for dtypes in (given, weights)):
        return ""
    of_batch, of_weights = (", ".join(sorted(str(dtype) for dtype in dtypes)) for dtypes in (given, weights))
    return f"the batch has {of_batch}, the weights are {of_weights} (cure: {compile_.ONE_DTYPE})"


def _named(found: str, state: Tree, batch: Any, record: Record) -> NonFiniteError:
    leaves = [(f"batch/{path}", leaf) for path, leaf in tree.with_paths(tree.dicts(batch))] + tree.with_paths(state)
    blamed = tuple(path.rstrip("/") for path, leaf in leaves if not_finite(leaf))
    what = f"{blamed[0]} is not finite" if blamed else "every leaf of batch and state is finite"
    cures = ["mend what is named"]
    if can_halt(state):
        cures.insert(0, 'ps.program(..., nonfinite="skip")')
    elif states(state):  # which skips already; this mode says what
        cures.append("detect_anomaly=False, which leaves out this update")
    error = NonFiniteError(f"{what}; {found}", where=_place(record), hint=", or ".join(cures))
    error.step, error.leaves, error.state, error.batch = record.calls + 1, blamed, state, batch
    return error


def in_eager(program: Program) -> Program:
    """The program before somebody compiled it."""
    train, flush, evaluate = program.train_step, program.flush, program.eval_step
    if isinstance(train, compile_.CompiledStep) and train.unroll == 1:
        train = train.eager
    if isinstance(flush, compile_.CompiledStep):
        flush = flush.eager
    if isinstance(evaluate, compile_.CompiledEval):
        evaluate = evaluate.eager
    return program._replace(train_step=train, flush=flush, eval_step=evaluate)


def ready_program(program: Program, state: Tree, config: FitConfig) -> Program:
    """The program compiled as the config says; as it is where that says nothing and somebody has compiled it."""
    eager, wanted = in_eager(program), config.compile
    if config.detect_anomaly:
        return eager
    on_cuda, compiled_already = data.device_of(state).type == "cuda", eager.train_step is not program.train_step
    if wanted is False or (wanted == "auto" and (compiled_already or not on_cuda)):
        return program
    options = _compile_options(wanted) if isinstance(wanted, Mapping) else {}
    options.setdefault("donate", config.donate)
    compiled = compile_.compile_program(eager, **options)
    if wanted != "auto":
        return compiled
    assert isinstance(compiled.train_step, compile_.CompiledStep)
    stacked, told = compiled.train_step.stacked, set[str]()
    return compiled._replace(
        train_step=_falls_back(stacked, counting(eager.train_step), told),
        flush=_falls_back(compiled.flush, eager.flush, told),
        eval_step=_eval_falls_back(compiled.eval_step, eager.eval_step, told),
    )


def _compile_options(given: Mapping[str, Any]) -> dict[str, Any]:
    known = [name for name in inspect.signature(compile_.compile_program).parameters if name != "program"]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"compile has no option {name!r}; there are {', '.join(known)}",
                where="fit",
                hint=f"compile={{{near[0]!r}: ...}}",
            )
    return dict(given)


def _falls_back(compiled: Callable[..., Any], eager: Callable[..., Any], told: set[str]) -> Callable[..., Any]:
    """The compiled function until it cannot be compiled; then the eager one, with a warning.

    No list says which errors a compiler has. What the eager function raises as well is an error of the step or of the
    batch, and is raised without a warning; what only the compiled one raises comes from compiling it.

    Args:
        compiled: leaves a state alive where it fails before any of it is written.
        eager: the same function.
        told: what there has been a warning for already, of all functions of a program.
    """
    chosen = compiled

    def call(state: Tree, *batch: Any, **named: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(state, *batch, **named)
        except Exception as error:
            if chosen is eager or not _may_come_from_compiling(error) or not compile_.is_alive(state):
                raise
            try:
                found = eager(state, *batch, **named)
            except Exception as own:
                raise own from error
            reason = first_line(error)
            # What cannot be captured differs by function; a compiler that fails does so for all of them.
            kind = reason if isinstance(error, compile_.Uncaptured) else "a compiler's"
        if kind not in told:
            told.add(kind)
            warnings.warn(
                f"the step cannot be compiled and runs in eager: {reason} "
                "(compile=False says that this is meant, compile=True makes it an error)",
                RuntimeWarning,
                stacklevel=4,
            )
        chosen = eager
        return found

    return call


def _may_come_from_compiling(error: Exception) -> bool:
    """Whether an error may be a compiler's: what purestep has diagnosed, but that no graph can be made, is none, nor is
    a lack of memory, of which eager needs more."""
    # What an attempt to capture met has Dynamo's word as its cause.
    met = [found for found in (error, error.__cause__) if found is not None]
    if any(compile_.stopped(found) or isinstance(found, compile_.Uncaptured) for found in met):
        return True
    return not isinstance(error, PurestepError | MemoryError | torch.OutOfMemoryError)


def _eval_falls_back(compiled: EvalStep | None, eager: EvalStep | None, told: set[str]) -> EvalStep | None:
    if compiled is None or eager is None:
        return None
    plain = eager if takes_index(eager) else lambda state, *batch, index: eager(state, *batch)
    both = _falls_back(compiled, plain, told)

    def eval_step(state: Tree, *batch: Any, index: int = 0) -> Metrics:
        return both(state, *batch, index=index)

    return eval_step
