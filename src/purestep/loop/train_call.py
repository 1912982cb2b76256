"""Call the train step of a run: compiled if the config says so, checked, with the place in the data in its errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import compile as compile_
from .. import data, files, tree
from ..compile import MetricVector, states
from ..data import BatchCheck
from ..diagnostics import not_finite, purity
from ..errors import NonFiniteError, PurestepError, StepContractError
from ..step import counting
from ..types import Metrics, Program, TrainState, Tree
from .evaluate import pair_of
from .loop_state import LoopState
from .nonfinite_steps import FOUND, can_halt, halts
from .purity_check import PurityCheck

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

_EVERY = 64  # calls between two comparisons of the state's structure, which take a microsecond per leaf


def ready_program(program: Program, state: Tree, config: FitConfig) -> Program:
    """Return the program compiled or donated as the config says, with a warning where it stays in eager mode."""
    if config.detect_anomaly:
        return compile_.eager_program(program)
    device = data.device_of(state)
    return compile_.prepared(program, device, wanted=config.compile, donated=config.donate, say=_warn_of_eager)


def _warn_of_eager(reason: str) -> None:
    text = (
        f"the step cannot be compiled and runs in eager: {reason} "
        "(compile=False says that this is meant, compile=True makes it an error)"
    )
    warnings.warn(text, RuntimeWarning, stacklevel=5)


class TrainCall:
    """``call(state, batch, loop)`` calls a train step.

    Args:
        eager: the program, not compiled.
        program: the one that the run uses, which may be compiled.
        state: structure, shapes and dtypes of later states must equal this one's.
        config: of the run.
    """

    def __init__(self, eager: Program, program: Program, state: Tree, config: FitConfig) -> None:
        step = program.train_step
        self.broke_donation = False
        """True if a donated step failed while it wrote: the memory of its input state is undefined."""
        self._chosen = step
        self._check_batch = BatchCheck()
        # A step of compile=True compares each batch with the last one itself, and reports only one that differs. That
        # of "auto" may go on in eager mode.
        own = step if isinstance(step, compile_.CompiledStep) else None
        self._step_checks_batch = own is not None
        self._step: Any = partial(own.call, unlike=self._other_batch) if own else counting(step)
        self._anomalies = config.detect_anomaly  # read every result at once, and name the leaf that is not finite
        self._compiled = compile_.without_donation(program).train_step is not eager.train_step  # compares states itself
        self._writes_init = self._compiled and config.donate == "init"
        self._check_purity = PurityCheck(eager, config.check_every, compiled=self._compiled)
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
            NonFiniteError: with ``detect_anomaly``, a loss or gradient that is not finite.
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
                self._check_batch(batch, loop.epoch, loop.batch)
                new, metrics = self._unchecked(state, batch)
            files.failpoint("loop.step")
        except BaseException as error:
            self._note_failure(error, state)
            names_place = isinstance(error, PurestepError) and not isinstance(error, compile_.Uncaptured)
            if names_place or not isinstance(error, Exception):
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
        # A plain state cannot say that a compiled step has overwritten it.
        writes = self._writes_init and not getattr(self._chosen, "fell_back", False)
        plain = any(type(part) is TrainState for part in states(state))
        harmed = not compile_.is_alive(state) or (writes and plain)
        self.broke_donation = harmed and not isinstance(error, PurestepError)

    def _unchecked(self, state: Tree, batch: Any) -> tuple[Tree, Metrics | MetricVector]:
        result = self._step(state, batch)
        return result if self._compiled else pair_of(result)  # a graph's result is checked at capture

    def _other_batch(self, batch: Any) -> None:
        self._check_batch(batch, self._loop.epoch, self._loop.batch)

    def _checked(self, state: Tree, batch: Any, place: str) -> tuple[Tree, Metrics | MetricVector]:
        calls = self._calls
        self._other_batch(batch)
        result = self._check_purity(state, batch, place) if calls == self._check_purity.next_call else None
        if result is None or self._compiled:
            result = self._unchecked(state, batch)
        if not self._compiled:
            self._compare(result[0], place)
        self._next_check = min(self._check_purity.next_call, calls * 2 if calls < _EVERY else calls + _EVERY)
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
