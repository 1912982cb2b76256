"""The program as a run uses it: compiled as the config says, in eager where that cannot be."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import compile as compile_
from .. import data
from ..compile.first_run import first_line
from ..errors import ConfigError, PurestepError
from ..types import EvalStep, Metrics, Program, Tree
from .accumulation import counting
from .pieces import takes_index

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig


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
