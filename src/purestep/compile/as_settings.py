"""The steps of a run as its settings say: compiled, with donated memory, or in eager mode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..errors import ConfigError
from ..state import nearest
from ..step import counting, static_of
from ..types import Device, EvalStep, Program, Tree
from .api import compile_program, evaluates_again
from .capture import Uncaptured
from .compiled_step import CompiledStep
from .eager_donation import can_donate, donate, without_donation
from .eval_step import CompiledEval, takes_index
from .sizes import Met


def eager_program(program: Program) -> Program:
    """Return the program as it was before it was compiled."""
    program = without_donation(program)
    train, flush, evaluate = program.train_step, program.flush, program.eval_step
    if isinstance(train, CompiledStep):
        train = train.eager
    if isinstance(flush, CompiledStep):
        flush = flush.eager
    if isinstance(evaluate, CompiledEval):
        evaluate = evaluate.eager
    return program._replace(train_step=train, flush=flush, eval_step=evaluate)


def batch_sizes(program: Program) -> dict[str, Met]:
    """The sizes of batches that the compiled functions of a program have met: see `CompiledStep.batch_sizes`."""
    return {name: step.batch_sizes for name, step in _compiled(program).items()}


def set_batch_sizes(program: Program, met: Mapping[str, Met]) -> None:
    """Let the compiled functions of a program continue a run that has met these sizes."""
    for name, step in _compiled(program).items():
        step.batch_sizes = met.get(name, {})


def is_compiled(program: Program) -> bool:
    """True if the train step of a program is compiled."""
    return "train_step" in _compiled(program)


def _compiled(program: Program) -> dict[str, CompiledStep | CompiledEval]:
    functions = {"train_step": program.train_step, "eval_step": program.eval_step}
    steps: dict[str, Any] = {name: getattr(function, "compiled", function) for name, function in functions.items()}
    if isinstance(steps["eval_step"], CompiledEval) and steps["eval_step"].carrying is not None:
        steps["eval_step"] = steps["eval_step"].carrying.step
    return {name: step for name, step in steps.items() if isinstance(step, CompiledStep | CompiledEval)}


def prepared(
    program: Program,
    device: Device,
    *,
    wanted: bool | Literal["auto"] | Mapping[str, Any],
    donated: bool | Literal["init"],
    say: Callable[[str], None],
) -> Program:
    """Return the program of a run.

    =============  ======  ===================================================
    ``wanted``     device  train step
    =============  ======  ===================================================
    "auto"         cuda    compiled, and eager after Uncaptured (`_or_eager`)
    "auto"         other   eager
    False          any     eager
    True, options  any     compiled (`CompiledStep`)
    =============  ======  ===================================================

    A program that is compiled already stays as it is, except with True or options. Eager steps get donated memory
    (`eager_donation`) where they can, unless ``donated=False``.

    Args:
        program: which may be compiled.
        device: of the state.
        wanted: "auto": compiled on CUDA, with eager steps where that fails; a program that is compiled stays as it is,
            and so does one whose transform evaluates the loss again.
            True or the options of `compile_program`: compiled. False: eager.
        donated: the steps write into the memory of their state; "init": compiled ones into that of the first one too.
        say: is called with the reason, once for each, if steps that were to be compiled run in eager mode.

    Raises:
        ConfigError: an unknown option.
    """
    eager = eager_program(program)
    compiled_already = eager.train_step is not program.train_step
    stays = compiled_already or device.type != "cuda" or evaluates_again(static_of(eager.train_step))
    if wanted is False or (wanted == "auto" and stays):
        return program if compiled_already or not donated else _donated(program, device)
    options: dict[str, Any] = {"donate": donated}
    if isinstance(wanted, Mapping):
        options |= _checked_options(wanted)
    compiled = compile_program(eager, **options)
    if wanted != "auto":
        return compiled
    assert isinstance(compiled.train_step, CompiledStep)
    say_once = functools.cache(say)  # of the three functions
    return compiled._replace(
        train_step=_or_eager(compiled.train_step.call, counting(eager.train_step), say_once),
        flush=_or_eager(compiled.flush, eager.flush, say_once),
        eval_step=_eval_or_eager(compiled.eval_step, eager.eval_step, say_once),
    )


def _donated(program: Program, device: Device) -> Program:
    """Let the eager steps of a program reuse the memory of the state, where they can."""
    static = static_of(program.train_step)
    if static is None or not can_donate(static):
        return program
    if device.type != "cpu" and static.accumulate > 1:  # there the host counts the position in a window: `counting`
        return program
    return donate(program)


def _checked_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    known = [name for name in inspect.signature(compile_program).parameters if name != "program"]
    for name in given:
        if name not in known:
            near = nearest(name, known, likeness=0.0)
            raise ConfigError(
                f"compile has no option {name!r}; there are {', '.join(known)}",
                where="fit",
                hint=f"compile={{{near!r}: ...}}",
            )
    return given


def _or_eager(compiled: Callable[..., Any], eager: Callable[..., Any], say: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a function that calls the compiled one, and the eager one from the first Uncaptured on, which a compiled
    function raises before it writes."""
    chosen = compiled

    def call(state: Tree, *batch: Any, **named: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(state, *batch, **named)
        except Uncaptured as error:
            reason = str(error).partition("\n")[0]
        result = eager(state, *batch, **named)
        say(reason)
        chosen = eager
        vars(call)["fell_back"] = True
        return result

    vars(call)["compiled"] = getattr(compiled, "__self__", compiled)
    return call


def _eval_or_eager(compiled: EvalStep | None, eager: EvalStep | None, say: Callable[[str], Any]) -> EvalStep | None:
    """`_or_eager` of an eval_step."""
    if compiled is None or eager is None:
        return None
    indexed = eager if takes_index(eager) else lambda state, *batch, index=0: eager(state, *batch)
    call, carrying = _or_eager(compiled, indexed, say), getattr(compiled, "carrying", None)
    if carrying is not None:
        vars(call)["carrying"] = carrying._replace(step=_or_eager(carrying.step, carrying.step.eager, say))
    return call
