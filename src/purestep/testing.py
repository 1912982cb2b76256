"""Checks of a step for unit tests: one call each, and an error that names the leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import rng, tree
from .errors import StepContractError
from .types import Program, Tree


def assert_pure(step: Callable[..., Any], state: Tree, batch: Any, *context: Any) -> None:
    """Check that a step is a pure function of its arguments.

    Run twice on the same state and batch it returns the same bits, leaves state, batch and the global generators as
    they were, keeps structure, shapes, dtypes and devices, and returns tensors without a graph.

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
    before = tree.clone((state, batch, context))
    generators = rng.states()
    first, first_metrics = _pair(step(state, batch, *context))
    _unchanged(before, (state, batch, context))
    if any(not torch.equal(old, new) for old, new in zip(generators, rng.states(), strict=True)):
        raise StepContractError(
            "draws from the caller's generator", where="step", hint="with rng.scoped(seed): ..., or a torch.Generator"
        )
    _same_kind(state, first)
    _no_graph((first, first_metrics))
    kept = tree.clone((first, first_metrics))
    second = _pair(step(state, batch, *context))
    _unchanged(before, (state, batch, context))
    _repeated(kept, second)


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
    _repeated((whole, {}), (_through(program, half, batches[cut:]), {}))


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


def _unchanged(before: Tree, after: Tree) -> None:
    left, right = dict(tree.with_paths(before)), dict(tree.with_paths(after))
    for path in (*left, *right):
        if path not in left or path not in right or not _equal(left[path], right[path]):
            root, _, rest = path.partition("/")
            where = {"0": "state", "1": "batch", "2": "context"}[root]
            raise StepContractError(
                "the step writes what it was given",
                where="/".join(filter(None, (where, rest))),
                hint="x + 1, not x.add_(1)",
            )


def _same_kind(old: Tree, new: Tree) -> None:
    if tree.paths(old) != tree.paths(new):
        raise StepContractError(
            "the structure of the state changes", where="state", hint="return a state of the structure that went in"
        )
    for (path, left), (_, right) in zip(tree.with_paths(old), tree.with_paths(new), strict=True):
        found = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in (left, right)]
        if found[0] != found[1]:
            raise StepContractError(
                f"was {found[0]} and is {found[1]}",
                where="/".join(filter(None, ("state", path))),
                hint="keep shape, dtype and device",
            )


def _no_graph(result: Tree) -> None:
    for path, leaf in tree.with_paths(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            where = f"{('state', 'metrics')[int(path[0])]}/{path.partition('/')[2]}"
            raise StepContractError(
                "carries a graph, which keeps its whole step in memory", where=where, hint=".detach()"
            )


def _repeated(first: Tree, second: Tree) -> None:
    if tree.paths(first) != tree.paths(second):
        raise StepContractError(
            "the second call on the same state and batch gives another structure",
            where="step",
            hint="everything a step reads must be in its arguments: no counters, clocks or global generators",
        )
    for (path, left), (_, right) in zip(tree.with_paths(first), tree.with_paths(second), strict=True):
        if not _equal(left, right):
            where = "/".join(filter(None, (("state", "metrics")[int(path[0])], path.partition("/")[2])))
            raise StepContractError(
                "the second call on the same state and batch gives another value",
                where=where,
                hint="everything a step reads must be in its arguments: no counters, clocks or global generators",
            )


def _equal(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())
