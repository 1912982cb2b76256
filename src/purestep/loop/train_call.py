"""Call the train step of a run: compiled if the config says so, checked, with the place in the data in its errors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import compile as compile_
from .. import data, files, tree
from ..compile import MetricVector, first_line, states
from ..diagnostics import not_finite, purity
from ..errors import ConfigError, NonFiniteError, PurestepError, StepContractError
from ..state import nearest
from ..step import static_of
from ..types import EvalStep, Metrics, Program, TrainStep, Tree
from .evaluate import BatchCheck, check_pair, takes_index
from .loop_state import LoopState
from .nonfinite_steps import FOUND, can_halt, halts
from .purity_check import PurityCheck
from .window_position import counting

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

_EVERY = 64  # calls between two comparisons of the state's structure, which take a microsecond per leaf


def train_call(eager: Program, program: Program, state: Tree, config: FitConfig) -> TrainCall:
    """Return the function with which a run calls its step.

    Args:
        eager: the program, not compiled.
        program: the one that the run uses, which may be compiled.
        state: the first one.
        config: of the run.
    """
    compiled = compile_.without_donation(program).train_step is not eager.train_step
    check = PurityCheck(eager, config.check_every, compiled=compiled)
    return TrainCall(program.train_step, state, check, anomalies=config.detect_anomaly, compiled=compiled)


class TrainCall:
    """``call(state, batch, loop)`` calls a train step.

    Args:
        step: ``(state, batch) -> (state, metrics)``.
        state: structure, shapes and dtypes of later states must equal this one's.
        check: of the first calls.
        anomalies: read every result at once, and name the leaf that is not finite.
        compiled: the step compares states itself.
    """

    def __init__(self, step: TrainStep, state: Tree, check: PurityCheck, *, anomalies: bool, compiled: bool) -> None:
        self.broke_donation = False
        """True if a donated step failed while it wrote: the memory of its input state is undefined."""
        self._check_batch = BatchCheck()
        # A compiled step compares each batch with the last one itself, and reports only one that differs.
        own = step if isinstance(step, compile_.CompiledStep) else None
        self._step_checks_batch = own is not None
        self._step: Any = partial(own.call, unlike=self._other_batch) if own else counting(step)
        # A checked call is pure: its result goes into the memory that the other calls would have written.
        self._kept = step.kept if isinstance(step, compile_.DonatedStep) and step.adopts else None
        self._has_harmed = step.has_harmed if isinstance(step, compile_.DonatedStep) else lambda: False
        self._check_purity = check
        self._anomalies = anomalies
        self._compiled = compiled
        self._kind = purity.Kind(state)
        self._weights = {weight.dtype for part in states(state) for weight in tree.leaves(part.params)}
        self._calls = 0
        self._next_check = 1
        self._loop = LoopState()

    def __call__(self, state: Tree, batch: Any, loop: LoopState) -> tuple[Tree, Metrics | MetricVector]:
        """Return ``step(state, batch)`` for the next batch of this loop state.

        Raises:
            DataError: the structure of the batch is not that of the first one.
            StepContractError: the step is not pure, or did not return metrics and a state like the one before.
            NonFiniteError: with ``anomalies``, a loss or gradient that is not finite.
        """
        self._calls += 1
        self._loop = loop
        files.failpoint("loop.batch")
        try:
            if self._calls == self._next_check:
                new, metrics = self._checked(state, batch, _place(loop))
            elif self._step_checks_batch:
                new, metrics = self._step(state, batch)
            else:
                self._check_batch(batch, loop)
                new, metrics = self._unchecked(state, batch)
            files.failpoint("loop.step")
        except BaseException as error:
            self._note_failure(error, state)
            if isinstance(error, PurestepError) or not isinstance(error, Exception):
                raise
            if self._anomalies and "returned nan values" in str(error):  # torch's message
                raise _anomaly(f"{error} (its forward call is in the warning above)", state, batch, loop) from error
            error.add_note(f"in train_step, {_place(loop)}")
            if mixed := _mixed_dtypes(error, batch, self._weights):
                error.add_note(mixed)
            raise
        if self._anomalies and halts(new):
            raise _anomaly(FOUND, state, batch, loop)
        return new, metrics

    def flush(self, flush: Callable[[Tree], tuple[Tree, Metrics]], state: Tree) -> tuple[Tree, Metrics]:
        """Return ``flush(state)``."""
        try:
            return flush(state)
        except BaseException as error:
            self._note_failure(error, state)
            raise

    def _note_failure(self, error: BaseException, state: Tree) -> None:
        harmed = self._has_harmed() or not compile_.is_alive(state)
        self.broke_donation = harmed and not isinstance(error, PurestepError)

    def _unchecked(self, state: Tree, batch: Any) -> tuple[Tree, Metrics | MetricVector]:
        result = self._step(state, batch)
        return result if self._compiled else check_pair(result)  # a graph's result is checked at capture

    def _other_batch(self, batch: Any) -> None:
        self._check_batch(batch, self._loop)

    def _checked(self, state: Tree, batch: Any, place: str) -> tuple[Tree, Metrics | MetricVector]:
        calls = self._calls
        self._check_batch(batch, self._loop)
        result = self._check_purity(state, batch, place) if calls == self._check_purity.due else None
        if result is None or self._compiled:
            result = self._unchecked(state, batch)
        elif self._kept is not None:
            result = self._kept(state, result[0]), result[1]
        if not self._compiled:
            self._compare(result[0], place)
        self._next_check = min(self._check_purity.due, calls * 2 if calls < _EVERY else calls + _EVERY)
        return result

    def _compare(self, new: Tree, place: str) -> None:
        try:
            self._kind.check(compile_.plain(new))
        except purity.Impure as error:
            where = f"train_step, up to {place}, {error.where}"
            raise StepContractError(error.what, where=where, hint=error.hint) from None


def _place(loop: LoopState) -> str:
    return f"epoch {loop.epoch + 1}, batch {loop.batch + 1}"


_TORCHS_NAMES = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}


def _mixed_dtypes(error: Exception, batch: Any, weights: set[torch.dtype]) -> str:
    """Return the cure if torch's message names two dtypes: one of the batch alone and one of the weights; else ""."""
    leaves = tree.leaves(tree.dicts(batch))
    given = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()} - weights
    text = str(error).lower()
    if not all(any(_TORCHS_NAMES.get(dtype, str(dtype)) in text for dtype in dtypes) for dtypes in (given, weights)):
        return ""
    of_batch, of_weights = (", ".join(sorted(str(dtype) for dtype in dtypes)) for dtypes in (given, weights))
    return f"the batch has {of_batch}, the weights are {of_weights} (cure: {compile_.ONE_DTYPE})"


def _anomaly(text: str, state: Tree, batch: Any, loop: LoopState) -> NonFiniteError:
    leaves = [(f"batch/{path}", leaf) for path, leaf in tree.with_paths(tree.dicts(batch))] + tree.with_paths(state)
    bad = tuple(path.rstrip("/") for path, leaf in leaves if not_finite(leaf))
    cause = f"{bad[0]} is not finite" if bad else "every leaf of batch and state is finite"
    cures = ["correct the value that is named"]
    if can_halt(state):
        cures.insert(0, 'ps.program(..., nonfinite="skip")')
    elif states(state):  # it skips already, and this mode reports the update
        cures.append("detect_anomaly=False, which skips this update")
    error = NonFiniteError(f"{cause}; {text}", where=_place(loop), hint=", or ".join(cures))
    error.step, error.leaves, error.state, error.batch = loop.calls + 1, bad, state, batch
    return error


# --- compile ----------------------------------------------------------------------------------------------------------


def eager_program(program: Program) -> Program:
    """Return the program as it was before it was compiled."""
    program = compile_.without_donation(program)
    train, flush, evaluate = program.train_step, program.flush, program.eval_step
    if isinstance(train, compile_.CompiledStep) and train.unroll == 1:
        train = train.eager
    if isinstance(flush, compile_.CompiledStep):
        flush = flush.eager
    if isinstance(evaluate, compile_.CompiledEval):
        evaluate = evaluate.eager
    return program._replace(train_step=train, flush=flush, eval_step=evaluate)


def ready_program(program: Program, state: Tree, config: FitConfig) -> Program:
    """Return the program compiled as the config says. With ``compile="auto"``, a compiled one stays as it is."""
    eager, wanted = eager_program(program), config.compile
    if config.detect_anomaly:
        return eager
    on_cuda, compiled_already = data.device_of(state).type == "cuda", eager.train_step is not program.train_step
    if wanted is False or (wanted == "auto" and (compiled_already or not on_cuda)):
        if compiled_already or not config.donate:
            return program
        return _donated(program, state, adopts=config.donate == "init")
    options = _compile_options(wanted) if isinstance(wanted, Mapping) else {}
    options.setdefault("donate", config.donate)
    compiled = compile_.compile_program(eager, **options)
    if wanted != "auto":
        return compiled
    assert isinstance(compiled.train_step, compile_.CompiledStep)
    train, warned = compiled.train_step.call, set[str]()
    return compiled._replace(
        train_step=_with_fallback(train, counting(eager.train_step), warned),
        flush=_with_fallback(compiled.flush, eager.flush, warned),
        eval_step=_eval_with_fallback(compiled.eval_step, eager.eval_step, warned),
    )


def _donated(program: Program, state: Tree, *, adopts: bool) -> Program:
    """Let the eager steps of a program reuse the memory of the run's state, where they can; with ``adopts`` that of the
    initial one too."""
    static = static_of(program.train_step)
    if static is None or not compile_.can_donate(static):
        return program
    # On other devices the host counts the position in a window: see `counting`.
    on_host = data.device_of(state).type == "cpu"
    if not on_host and static.accumulate > 1:
        return program
    return compile_.donate(program, init=adopts)


def _compile_options(given: Mapping[str, Any]) -> dict[str, Any]:
    known = [name for name in inspect.signature(compile_.compile_program).parameters if name != "program"]
    for name in given:
        if name not in known:
            near = nearest(name, known, likeness=0.0)
            raise ConfigError(
                f"compile has no option {name!r}; there are {', '.join(known)}",
                where="fit",
                hint=f"compile={{{near!r}: ...}}",
            )
    return dict(given)


def _with_fallback(compiled: Callable[..., Any], eager: Callable[..., Any], warned: set[str]) -> Callable[..., Any]:
    """Return a function that calls the compiled one until it cannot be compiled, then the eager one, with a warning.

    There is no list of the errors of a compiler. An error that the eager function raises too comes from the step or
    the batch, and is raised without a warning. An error of the compiled function alone comes from compiling.

    Args:
        compiled: leaves a state alive if it fails before any write to it.
        eager: the same function.
        warned: reasons that a warning has named already, for all functions of a program.
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
                result = eager(state, *batch, **named)
            except Exception as own:
                raise own from error
            reason = first_line(error)
            # A function that cannot be captured is one of several; a compiler that fails does so for all of them.
            kind = reason if isinstance(error, compile_.Uncaptured) else "a compiler's"
        if kind not in warned:
            warned.add(kind)
            warnings.warn(
                f"the step cannot be compiled and runs in eager: {reason} "
                "(compile=False says that this is meant, compile=True makes it an error)",
                RuntimeWarning,
                stacklevel=4,
            )
        chosen = eager
        return result

    return call


def _may_come_from_compiling(error: Exception) -> bool:
    """True if an error may be a compiler's.

    Errors of purestep are not, except that no graph can be made. Nor is a lack of memory, since eager needs more.
    """
    if isinstance(error, compile_.Uncaptured):
        return True
    return not isinstance(error, PurestepError | MemoryError | torch.OutOfMemoryError)


def _eval_with_fallback(compiled: EvalStep | None, eager: EvalStep | None, warned: set[str]) -> EvalStep | None:
    if compiled is None or eager is None:
        return None
    plain = eager if takes_index(eager) else lambda state, *batch, index: eager(state, *batch)
    both = _with_fallback(compiled, plain, warned)

    def eval_step(state: Tree, *batch: Any, index: int = 0) -> Metrics:
        return both(state, *batch, index=index)

    return eval_step
