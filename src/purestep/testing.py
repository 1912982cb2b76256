"""Checks of a step for unit tests: one call each, and an error that names the leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import tree
from .compile import plain
from .data import device_of
from .diagnostics import Watch, backward, not_finite, purity
from .diagnostics import replay as replay_
from .errors import ConfigError, StepContractError
from .types import Metrics, Program, TrainState, Tree


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

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.adam(0.1))
        >>> assert_resumes(program, program.init(), [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(4)])
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
        rtol: tolerance, relative and absolute; 1e-12 is reached in "64-true" where weights of a loss are counts; sums
            of class weights are float32: 1e-8.

    Raises:
        StepContractError: the parameter that differs most.
        ConfigError: programs without ``init``, or that accumulate other numbers of parts.

    Example:
        >>> import torch, purestep as ps
        >>> net, objective, tx = torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1)
        >>> x, y = torch.randn(6, 2), torch.randn(6, 1)
        >>> whole = ps.program(net, objective, tx, precision="64-true")
        >>> halves = ps.program(net, objective, tx, precision="64-true", accumulate=2)
        >>> assert_accumulates(halves, whole, (x, y), [(x[:4], y[:4]), (x[4:], y[4:])], rtol=1e-12)
    """
    expected = _through(whole, _started(whole, 1), [batch])
    found = _through(program, _started(program, len(parts)), parts)
    gaps: dict[str, float] = {}
    for name, value in expected.params.items():
        if not torch.allclose(found.params[name], value, rtol=rtol, atol=rtol):
            gaps[name] = (found.params[name] - value).abs().nan_to_num(nan=math.inf).max().item()
    if gaps:
        worst = max(gaps, key=gaps.__getitem__)
        raise StepContractError(
            f"differs by {gaps[worst]:.3g} from the update of the whole batch",
            where=f"params/{worst}",
            hint="the weight of a Loss must be what its mean is a mean over",
        )


def _started(program: Program, accumulate: int) -> Tree:
    if program.init is None or program.static is None or program.static.accumulate != accumulate:
        hint = f"ps.program(..., accumulate={accumulate})"
        raise ConfigError(f"no program that accumulates {accumulate}", where="assert_accumulates", hint=hint)
    return program.init()


class Replay(NamedTuple):
    """What a step that was made again has shown."""

    state: Tree
    metrics: Metrics
    first: str | None  # where the first number appears that is not finite, in words; None where there is none
    module: str  # the innermost module it appears in, by its name in the model; "" outside of modules
    operation: str  # of torch: "log", or, of the backward pass, "SqrtBackward0"
    notes: dict[str, Any]  # what fit wrote down with it: step, where, loss, leaves


def record(path: str | Path, state: Tree, batch: Any) -> Path:
    """Write a state and a batch into one file, to the bit, for `replay`; `fit` does it where it has snapshots.

    Args:
        path: of the file, replaced where it exists.
        state: of a program.
        batch: tensors, numbers and text in dicts, lists and tuples.

    Raises:
        StateError: something in the batch that cannot be stored.
        WriteFailed: nothing was written.

    Example:
        >>> import tempfile, torch
        >>> record(tempfile.mkdtemp() + "/step.safetensors", {"w": torch.zeros(2)}, torch.ones(3)).name
        'step.safetensors'
    """
    return replay_.write(path, plain(state), batch, {})


def replay(path: str | Path, program: Program, *, like: Tree = None) -> Replay:
    """Make the step again that a `NonFiniteError` names, in eager and with torch's anomaly detection.

    The file holds numbers only, no code, so the program has to be given. The same key and the same batch give the same
    bits as the run had, dropout included, on the same kind of device with the same versions.

    Args:
        path: of the file that the error names, or from `record`.
        program: the program of that run, not compiled.
        like: a state of the same structure, for a program without ``init``.

    Raises:
        NotFound: no such file.
        Corrupt: a damaged one.
        Mismatch: one of another program, or of a later version.
        ConfigError: a program without ``init``, and no ``like``.

    Example:
        >>> import tempfile, torch, purestep as ps
        >>> class Root(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x).sqrt()
        >>> program = ps.program(Root(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> batch = torch.full((4, 2), -torch.inf), torch.ones(4, 1)
        >>> path = record(tempfile.mkdtemp() + "/step.safetensors", program.init(device="cpu"), batch)
        >>> replay(path, program).first
        'batch/0: 8 of 8 numbers are not finite'
    """
    if like is None:
        if program.init is None:
            raise ConfigError("the program has no init", where="replay", hint="replay(path, program, like=state)")
        like = program.init()
    found = replay_.read(path, like, device_of(like))
    first, module, operation = _given(found), "", ""
    watch = Watch()
    with watch:
        state, metrics = program.train_step(found.state, found.batch)
    if first is None and watch.first is not None:
        first, module, operation = watch.first
    if first is None:
        first, operation = backward(lambda: program.train_step(found.state, found.batch))
    return Replay(state, metrics, first, module, operation, found.notes)


def _given(found: replay_.Incident) -> str | None:
    parts = {"batch": found.batch}
    if isinstance(found.state, TrainState):
        parts |= {name: getattr(found.state, name) for name in ("params", "frozen", "buffers")}
    for path, leaf in tree.with_paths(parts):
        count = not_finite(leaf)
        if count:
            return f"{path}: {count} of {leaf.numel()} numbers are not finite"
    return None


def _through(program: Program, state: Tree, batches: Sequence[Any]) -> Tree:
    for batch in batches:
        state, _ = program.train_step(state, batch)
    return state


def _pair(result: Any) -> tuple[Tree, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise StepContractError(f"returned a {type(result).__name__}", where="step", hint="return (state, metrics)")
    return result
