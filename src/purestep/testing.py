"""Checks of a step for unit tests. Each is one call, and its error names the leaf."""

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
    """Assert that a step is a pure function of its arguments.

    Calls the step twice with the same state and batch. Both results must have the same bits. The step must not change
    the state, the batch or the global generators of torch, numpy and Python. The new state must keep structure, shapes,
    dtypes and devices, its tensors must have no autograd graph, and the step must keep no tensor alive between calls.
    `fit` makes the same checks at the first steps of a run.

    Args:
        step: ``(state, batch, *context) -> (state, metrics)``, without donation.
        state: a tree of tensors.
        batch: the second argument of the step.
        context: further arguments.

    Raises:
        StepContractError: the step is not pure; the message says what changed, and where.

    Example:
        >>> import torch, purestep as ps
        >>> counter = []
        >>> def step(state, batch):
        ...     counter.append(1)
        ...     return state + len(counter), {}
        >>> assert_pure(step, torch.zeros(()), None)
        Traceback (most recent call last):
        purestep.errors.StepContractError: state: the second call with the same state and batch returns ...
    """
    parts = {"state": state, "batch": batch, "context": context}
    with _reported():
        purity.observe(lambda: _pair(step(state, batch, *context)), parts)


@contextmanager
def _reported() -> Generator[None]:
    """Raise a finding as StepContractError."""
    try:
        yield
    except purity.Impure as found:
        raise StepContractError(found.what, where=found.where, hint=found.hint) from None


def assert_resumes(program: Program, state: Tree, batches: Sequence[Any], *, at: int | None = None) -> None:
    """Assert that a run that stops, copies the state and continues ends in the same bits as an uninterrupted run.

    Args:
        program: the program whose ``train_step`` is checked.
        state: the initial state.
        batches: at least two batches.
        at: the number of batches before the break; by default half of them.

    Raises:
        StepContractError: a leaf differs; the message names the first one.

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
    """Assert that micro-batches give the same update as their whole batch.

    Args:
        program: a program with ``accumulate=len(parts)``.
        whole: the same program with ``accumulate=1``.
        batch: the whole batch.
        parts: its micro-batches, of any sizes.
        rtol: relative and absolute tolerance. "64-true" reaches 1e-12 if the weights of the loss are counts, and 1e-8
            if they are sums of class weights, which are float32.

    Raises:
        StepContractError: a parameter differs; the message names the one that differs most.
        ConfigError: a program has no ``init``, or accumulates another number of parts.

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
            hint="return a Loss whose weight is the number of elements that its mean averages",
        )


def _started(program: Program, accumulate: int) -> Tree:
    if program.init is None or program.static is None or program.static.accumulate != accumulate:
        hint = f"ps.program(..., accumulate={accumulate})"
        raise ConfigError(f"the program does not accumulate {accumulate}", where="assert_accumulates", hint=hint)
    return program.init()


class Replay(NamedTuple):
    """The result of `replay`."""

    state: Tree
    metrics: Metrics
    first: str | None  # the first value that is not finite, in words; None if all are finite
    module: str  # the innermost module that computed it, by its name in the model; "" outside modules
    operation: str  # the torch operation: "log", or in the backward pass "SqrtBackward0"
    notes: dict[str, Any]  # from fit: step, where, loss, leaves


def record(path: str | Path, state: Tree, batch: Any) -> Path:
    """Write a state and a batch into one file, bit for bit, for `replay`. `fit` calls it when it has snapshots.

    Args:
        path: the file; an existing one is replaced.
        state: the state of a program.
        batch: tensors, numbers and text in dicts, lists and tuples.

    Raises:
        StateError: the batch contains an object that cannot be stored.
        WriteFailed: the file could not be written.

    Example:
        >>> import tempfile, torch
        >>> record(tempfile.mkdtemp() + "/step.safetensors", {"w": torch.zeros(2)}, torch.ones(3)).name
        'step.safetensors'
    """
    return replay_.write(path, plain(state), batch, {})


def replay(path: str | Path, program: Program, *, like: Tree = None) -> Replay:
    """Repeat the step that a `NonFiniteError` names, in eager mode with torch's anomaly detection.

    The file contains no code, so pass the program too. On the same kind of device, with the same versions, the step
    gives the same bits as in the run, dropout included.

    Args:
        path: the file that the error names, or the result of `record`.
        program: the program of that run, not compiled.
        like: a state of the same structure, if the program has no ``init``.

    Raises:
        NotFound: the file does not exist.
        Corrupt: the file is damaged.
        Mismatch: the file is from another program or a later version.
        ConfigError: the program has no ``init``, and ``like`` is None.

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
