"""Checks of a step for unit tests. Each is one call, and its error names the leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import tree
from .compile import plain
from .data import device_of
from .diagnostics import purity, repeated
from .diagnostics import replay as replay_
from .errors import ConfigError, Mismatch, StepContractError
from .files import local_path
from .loop import pair_of
from .torch_ext import tensor_layout
from .types import Metrics, Program, Tree


def assert_pure(step: Callable[..., Any], state: Tree, batch: Any, *context: Any) -> None:
    """Assert that a step is a pure function of its arguments.

    Example:
        >>> import torch, purestep as ps
        >>> counter = []
        >>> def step(state, batch):
        ...     counter.append(1)
        ...     return state + len(counter), {}
        >>> assert_pure(step, torch.zeros(()), None)
        Traceback (most recent call last):
        purestep.errors.StepContractError: state: the second call with the same state and batch returns ...

    Calls the step twice with the same state and batch. Both results must have the same bits. The step must not change
    the state, the batch, other tensors that were there before (of a teacher in the objective's closure), or the global
    generators of torch, numpy and Python. The new state must keep structure, shapes, dtypes and
    devices, its tensors must have no autograd graph, and the step must keep no tensor alive between calls.
    `fit` makes the same checks at the first steps of a run.

    Args:
        step: ``(state, batch, *context) -> (state, metrics)``, without donation.
        state: a tree of tensors.
        batch: the second argument of the step.
        context: further arguments.

    Raises:
        StepContractError: the step is not pure; the message says what changed, and where.
    """
    state = plain(state)  # the state of a donated step is of another type, which a step does not return
    parts = {"state": state, "batch": batch, "context": context}
    try:
        purity.observe(lambda: pair_of(step(state, batch, *context)), parts)
    except purity.Impure as found:
        raise StepContractError(found.what, where=found.where, hint=found.hint) from None


def assert_accumulates(program: Program, whole: Program, batch: Tree, parts: Sequence[Tree], *, rtol: float) -> None:
    """Assert that micro-batches give the same update as their whole batch.

    Example:
        >>> import torch, purestep as ps
        >>> net, objective, tx = torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1)
        >>> x, y = torch.randn(6, 2), torch.randn(6, 1)
        >>> whole = ps.program(net, objective, tx, precision="64-true")
        >>> halves = ps.program(net, objective, tx, precision="64-true", accumulate=2)
        >>> assert_accumulates(halves, whole, (x, y), [(x[:4], y[:4]), (x[4:], y[4:])], rtol=1e-12)

    Use programs with `optim.sgd`: the first update of Adam and its relatives hardly depends on a gradient's size.

    Args:
        program: a program with ``accumulate=len(parts)``.
        whole: the same program with ``accumulate=1``.
        batch: the whole batch.
        parts: its micro-batches, of any sizes; of different sizes, since a wrong weight may be right for equal ones.
        rtol: relative and absolute tolerance. "64-true" reaches 1e-12 if the weights of the loss are counts, and 1e-8
            if they are sums of class weights, which are float32.

    Raises:
        StepContractError: a parameter differs; the message names the one that differs most.
        ConfigError: a program has no ``init``, or accumulates another number of parts; the update of the whole
            batch is not finite, or changes no parameter, so that there is nothing to compare.
    """
    start = _started(whole, 1)
    expected = _through(whole, start, [batch])
    _check_changed(start, expected)
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


def _check_changed(start: Tree, new: Tree) -> None:
    """Raise ConfigError if the update of the whole batch changes nothing, as any other update without effect."""
    if int(new.updates) == int(start.updates):
        raise ConfigError(
            "the update of the whole batch is refused: it is not finite",
            where="assert_accumulates",
            hint="pass a batch with a finite loss and finite gradients",
        )
    if all(torch.equal(p, start.params[name]) for name, p in new.params.items()):
        raise ConfigError(
            "the update of the whole batch changes no parameter",
            where="assert_accumulates",
            hint="pass a learning rate that is not 0 at the first update (no warm-up), and a loss with a gradient",
        )


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

    Example:
        >>> import tempfile, torch
        >>> record(tempfile.mkdtemp() + "/step.safetensors", {"w": torch.zeros(2)}, torch.ones(3)).name
        'step.safetensors'

    Args:
        path: the file; an existing one is replaced.
        state: the state of a program.
        batch: tensors, numbers and text in dicts, lists and tuples.

    Raises:
        ConfigError: the path is a URL.
        StateError: the batch contains an object that cannot be stored.
        WriteFailed: the file could not be written.
    """
    return replay_.write(local_path("testing.record", path=path), plain(state), batch, {})


def replay(path: str | Path, program: Program, *, like: Tree = None) -> Replay:
    """Repeat a recorded step, in eager mode with torch's anomaly detection: the one that a `NonFiniteError` names, or
    one of `record`.

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
    """
    if like is None:
        if program.init is None:
            raise ConfigError("the program has no init", where="replay", hint="replay(path, program, like=state)")
        like = program.init()
    found = replay_.read(path, like, device_of(like))
    again = repeated(program.train_step, found.state, found.batch)
    state, metrics = again.result
    return Replay(state, metrics, again.first, again.module, again.operation, found.notes)


class Run(NamedTuple):
    """A program, a state, and the batches of its next steps, for `first_difference`."""

    program: Program
    state: Tree
    batches: Sequence[Any]


class Difference(NamedTuple):
    """The first difference between two runs."""

    step: int  # the first step whose results differ, from 1; 0: the states differ before it
    where: str  # the leaf that differs most, "state/params/0.weight", or "batch/0" if the inputs of this step differ
    size: float  # its largest absolute difference; inf if it exists in one run only, or one of two numbers is nan
    leaves: dict[str, float]  # every leaf that differs -> the size, largest first


def first_difference(a: Run, b: Run, *, rtol: float = 0.0, atol: float = 0.0) -> Difference | None:
    """Find the first step at which two runs differ: two programs from one state (eager and compiled, before and after
    a change, two versions of a model), or one program on two states or lists of batches.

    Example:
        >>> import torch, purestep as ps
        >>> net, objective = torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss())
        >>> one, two = (ps.program(net, objective, ps.optim.sgd(lr)) for lr in (0.1, 0.2))
        >>> state, batches = one.init(device="cpu"), [(torch.ones(4, 2), torch.ones(4, 1))] * 3
        >>> first_difference(Run(one, state, batches), Run(one, state, batches)) is None
        True
        >>> first_difference(Run(one, state, batches), Run(two, state, batches)).step
        1

    The runs make their steps side by side, and their states and batches are compared before and after each step.

    Args:
        a: a `Run`.
        b: a `Run` with as many batches.
        rtol: numbers within ``atol + rtol * |b|`` are equal; 0: equal bits (0.0 and -0.0, and nan and nan, are equal).
        atol: see ``rtol``.

    Returns:
        The first difference, or None.

    Raises:
        Mismatch: the runs have different numbers of batches.
    """
    if len(a.batches) != len(b.batches):
        raise Mismatch(
            f"{len(a.batches)} batches, and {len(b.batches)}",
            where="first_difference",
            hint="pass as many of both runs",
        )
    one, two = a.state, b.state
    found, step = _sizes({"state": one}, {"state": two}, rtol, atol), 0
    for left, right in zip(a.batches, b.batches, strict=True):
        if found:
            break
        step += 1
        found = {} if left is right else _sizes({"batch": left}, {"batch": right}, rtol, atol)
        if not found:
            one, two = a.program.train_step(one, left)[0], b.program.train_step(two, right)[0]
            found = _sizes({"state": one}, {"state": two}, rtol, atol)
    if not found:
        return None
    leaves = dict(sorted(found.items(), key=lambda pair: -pair[1]))
    where = next(iter(leaves))
    return Difference(step, where, leaves[where], leaves)


def _sizes(a: Tree, b: Tree, rtol: float, atol: float) -> dict[str, float]:
    """The largest absolute difference of each leaf that differs."""
    one, two = (dict(tree.with_paths(plain(tree.dicts(each, where=None)))) for each in (a, b))
    sizes = {
        path: _size(one[path], two[path], rtol, atol) if path in one and path in two else math.inf
        for path in {**one, **two}
    }
    return {path: size for path, size in sizes.items() if size}


def _size(a: Any, b: Any, rtol: float, atol: float) -> float:
    """The largest absolute difference of two leaves, if it exceeds the tolerance; inf for other types or shapes."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = (a.dtype, a.layout, a.is_nested) == (b.dtype, b.layout, b.is_nested)
        if not alike or (not a.is_nested and a.shape != b.shape):  # torch gives every jagged tensor another shape
            return math.inf
        if not tensor_layout.is_dense(a) and not a.is_quantized:
            one, two = tensor_layout.dense_parts(a), tensor_layout.dense_parts(b)
            sizes = [_size(left, right, rtol, atol) for left, right in zip(one, two, strict=False)]
            return max(sizes, default=0.0) if len(one) == len(two) else math.inf
    elif type(a) is not type(b):
        return math.inf
    one, two = _array(a), _array(b)
    if one.dtype != two.dtype or one.shape != two.shape:
        return math.inf
    if one.dtype.kind not in "biufc":
        return 0.0 if np.array_equal(one, two) else math.inf
    differs = (one != two) & ~((one != one) & (two != two))
    wide = np.result_type(one, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = abs(one.astype(wide) - two.astype(wide))
    gap = np.where(np.isnan(gap), math.inf, np.maximum(gap, 1.0) if one.dtype.kind in "biu" else gap)
    if rtol or atol:
        differs &= ~(gap <= atol + rtol * abs(two.astype(wide)))
    return float(gap[differs].max(initial=0.0))


def _array(leaf: Any) -> Any:
    """The numbers as a numpy array, which has fewer dtypes than torch."""
    if not isinstance(leaf, torch.Tensor):
        return np.atleast_1d(np.asarray(leaf))
    leaf = leaf.detach().dequantize() if leaf.is_quantized else leaf.detach()
    wide = torch.complex128 if leaf.is_complex() else torch.float64 if leaf.is_floating_point() else leaf.dtype
    return np.atleast_1d(leaf.to("cpu", wide).numpy(force=True))


def _through(program: Program, state: Tree, batches: Sequence[Any]) -> Tree:
    for batch in batches:
        state, _ = program.train_step(state, batch)
    return state
