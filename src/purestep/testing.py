"""Checks of a step for unit tests: one call each, and an error that names the leaf."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import purity, tree
from .errors import StepContractError
from .types import Program, Tree


def assert_pure(step: Callable[..., Any], state: Tree, batch: Any, *context: Any) -> None:
    """Check that a step is a pure function of its arguments.

    Run twice on the same state and batch it returns the same bits, leaves state, batch and the global generators of
    torch, numpy and Python as they were, keeps structure, shapes, dtypes and devices, returns tensors without a graph,
    and keeps none alive from call to call. `fit` holds the first steps of a run to the same.

    Args:
        step: ``(state, batch, *context) -> (state, metrics)``, not donated.
        state: a tree of tensors.
        batch: what the step takes.
        context: further arguments.

    Raises:
        StepContractError: what changed, and where.

    Example:
        >>> import torch, purestep as ps
        >>> counter = []
        >>> def step(state, batch):
        ...     counter.append(1)
        ...     return state + len(counter), {}
        >>> assert_pure(step, torch.zeros(()), None)
        Traceback (most recent call last):
        purestep.errors.StepContractError: state: the second call on the same state and batch gives another value ...
    """
    parts = {"state": state, "batch": batch, "context": context}
    with _reported():
        purity.observe(lambda: _pair(step(state, batch, *context)), parts)


@contextmanager
def _reported() -> Generator[None]:
    """Findings as errors of the public class."""
    try:
        yield
    except purity.Impure as found:
        raise StepContractError(found.what, where=found.where, hint=found.hint) from None


def assert_resumes(program: Program, state: Tree, batches: Sequence[Any], *, at: int | None = None) -> None:
    """Check that stopping, copying the state, and going on ends in the same bits as going through.

    Args:
        program: whose ``train_step`` is checked.
        state: where to start.
        batches: at least two.
        at: how many batches come before the break; half of them by default.

    Raises:
        StepContractError: the first leaf that differs.
    """
    cut = len(batches) // 2 if at is None else at
    whole = _through(program, state, batches)
    half = tree.clone(_through(program, state, batches[:cut]))
    rest = _through(program, half, batches[cut:])
    with _reported():
        purity.check_repeated((whole, {}), (rest, {}))


def assert_accumulates(program: Program, whole: Program, batch: Tree, parts: Sequence[Tree], *, rtol: float) -> None:
    """Check that micro-batches make the update that their whole batch makes.

    Args:
        program: with ``accumulate=len(parts)``.
        whole: the same with ``accumulate=1``.
        batch: the whole batch.
        parts: its micro-batches, of any sizes.
        rtol: relative tolerance; 1e-12 is reached in "64-true".

    Raises:
        StepContractError: the parameter that differs most.
    """
    assert program.init is not None
    assert whole.init is not None
    expected, _ = whole.train_step(whole.init(), batch)
    found = _through(program, program.init(), parts)
    for name, value in expected.params.items():
        if not torch.allclose(found.params[name], value, rtol=rtol, atol=rtol):
            gap = (found.params[name] - value).abs().max().item()
            raise StepContractError(
                f"differs by {gap:.3g} from the update of the whole batch",
                where=f"params/{name}",
                hint="the weight of a Loss must be what its mean is a mean over",
            )


def _through(program: Program, state: Tree, batches: Sequence[Any]) -> Tree:
    for batch in batches:
        state, _ = program.train_step(state, batch)
    return state


def _pair(result: Any) -> tuple[Tree, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise StepContractError(f"returned a {type(result).__name__}", where="step", hint="return (state, metrics)")
    return result
