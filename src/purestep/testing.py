"""Checks of a step for unit tests. Each is one call, and its error names the leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import tree
from .compile import captured_tensors, plain
from .data import device_of
from .diagnostics import purity, recording, repeated
from .diagnostics import replay as replay_
from .errors import ConfigError, Mismatch, NotFound, StepContractError
from .snapshot import Snapshots
from .state import is_count
from .torch_ext import tensor_layout
from .types import Metrics, Program, Tree


def assert_pure(step: Callable[..., Any], state: Tree, batch: Any, *context: Any) -> None:
    """Assert that a step is a pure function of its arguments.

    Calls the step twice with the same state and batch. Both results must have the same bits. The step must not change
    the state, the batch, tensors that the objective captures (of a module in its closure, or in a list or an object
    there), or the global generators of torch, numpy and Python. The new state must keep structure, shapes, dtypes and
    devices, its tensors must have no autograd graph, and the step must keep no tensor alive between calls.
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
    parts = {"state": state, "batch": batch, "context": context, "closure": captured_tensors(step)}
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

    It writes no snapshot and opens no loader. To test `fit`, end it inside an epoch by a callback that returns `Stop`
    at an `events.StepEnd`, call it again without the callback, and compare the state with that of a whole run.

    Args:
        program: the program whose ``train_step`` is checked.
        state: the initial state.
        batches: at least two batches.
        at: the number of batches before the break, at most all; by default half of them.

    Raises:
        StepContractError: a leaf differs; the message names the first one.
        ConfigError: there are less than two batches, or ``at`` is out of range.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.adam(0.1))
        >>> assert_resumes(program, program.init(), [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(4)])
    """
    cut = len(batches) // 2 if at is None else at
    if len(batches) < 2:
        hint = "pass at least two batches, for a step before the break and one after it"
        raise ConfigError(f"the number of batches is {len(batches)}", where="assert_resumes", hint=hint)
    if not is_count(cut) or cut > len(batches):
        what, hint = f"at={at!r} must be an int of at most {len(batches)}, the batches", f"at={len(batches) // 2}"
        raise ConfigError(what, where="assert_resumes", hint=hint)
    whole = _through(program, state, batches)
    half = tree.clone(_through(program, state, batches[:cut]))
    rest = _through(program, half, batches[cut:])
    with _reported():
        purity.check_repeated((whole, {}), (rest, {}))


def assert_accumulates(program: Program, whole: Program, batch: Tree, parts: Sequence[Tree], *, rtol: float) -> None:
    """Assert that micro-batches give the same update as their whole batch.

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

    Example:
        >>> import torch, purestep as ps
        >>> net, objective, tx = torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1)
        >>> x, y = torch.randn(6, 2), torch.randn(6, 1)
        >>> whole = ps.program(net, objective, tx, precision="64-true")
        >>> halves = ps.program(net, objective, tx, precision="64-true", accumulate=2)
        >>> assert_accumulates(halves, whole, (x, y), [(x[:4], y[:4]), (x[4:], y[4:])], rtol=1e-12)
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


def replay(
    path: str | Path | recording.Recording, program: Program, *, like: Tree = None, step: int | None = None
) -> Replay:
    """Repeat a recorded step, in eager mode with torch's anomaly detection: the one that a `NonFiniteError` names, or
    any of the last steps of ``fit(record=n)``.

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
    gives the same bits as in the run, dropout included. The steps of a recording before it are repeated without
    detection; if the run was compiled, they give the same numbers up to rounding.

    Args:
        path: the file that the error names, the result of `record`, or a `Recording`.
        program: the program of that run, not compiled.
        like: a state of the same structure, if the program has no ``init``.
        step: the number of the call, one of ``Recording.steps``; None: the last one of the file.

    Raises:
        NotFound: the file does not exist.
        Corrupt: the file is damaged.
        Mismatch: the file is from another program or a later version.
        ConfigError: the program has no ``init``, and ``like`` is None; ``step`` is not recorded.
    """
    if isinstance(path, recording.Recording):
        found, notes = path, {}
    else:
        if like is None:
            if program.init is None:
                raise ConfigError("the program has no init", where="replay", hint="replay(path, program, like=state)")
            like = program.init()
        found, notes = recording.read(path, like, device_of(like))
    if step is not None and step not in found.steps:
        raise ConfigError(
            f"step {step} is not recorded: there are {found.steps[0]} to {found.steps[-1]}",
            where="replay",
            hint=f"step={found.steps[-1]}",
        )
    before = len(found.batches) - 1 if step is None else step - found.first
    found = replay_.Incident(_through(program, found.state, found.batches[:before]), found.batches[before], notes)
    again = repeated(program.train_step, found.state, found.batch)
    state, metrics = again.result
    return Replay(state, metrics, again.first, again.module, again.operation, found.notes)


class Run(NamedTuple):
    """A program, a state, and the batches of its next steps, for `first_difference`.

    ``Run(program, *recording)`` is a run that repeats a `Recording`.
    """

    program: Program
    state: Tree
    batches: Sequence[Any]
    first: int = 1  # the number of the first step


class Difference(NamedTuple):
    """The first difference between two runs."""

    step: int  # the first step whose results differ; of two directories: the first snapshot of both that differs
    after: int | None  # the last step that is known to be equal; None if there is none
    where: str  # the leaf that differs most, "state/params/0.weight", or "batch/0" if the inputs of this step differ
    size: float  # its largest absolute difference; inf if it exists in one run only, or one of two numbers is nan
    leaves: dict[str, float]  # every leaf that differs -> the size, largest first


def first_difference(
    a: Run | str | Path, b: Run | str | Path, *, like: Tree = None, rtol: float = 0.0, atol: float = 0.0
) -> Difference | None:
    """Find the first step at which two runs differ: two programs from one state (eager and compiled, before and after
    a change, two versions of a model), or one program on two states or lists of batches.

    Two `Run` make their steps side by side, and their states and batches are compared before and after each step. Two
    directories are bisected: of the snapshots that both have, the first one that differs is found with a logarithmic
    number of reads, if runs that differ stay different. Record the steps in between with ``fit(record=n)``.

    Args:
        a: a `Run`, or the directory of a run's snapshots.
        b: as ``a``.
        like: for directories: a state of the same structure, from ``program.init()``.
        rtol: numbers within ``atol + rtol * |b|`` are equal; 0: equal bits (0.0 and -0.0, and nan and nan, are equal).
        atol: see ``rtol``.

    Returns:
        The first difference, or None.

    Raises:
        ConfigError: a directory without ``like``, or a `Run` and a directory.
        Mismatch: the runs have different numbers of batches, or start at different steps.
        NotFound: the directories have no snapshot of one step in common.

    Example:
        >>> import torch, purestep as ps
        >>> net, objective = torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss())
        >>> one, two = (ps.program(net, objective, ps.optim.sgd(lr)) for lr in (0.1, 0.2))
        >>> state, batches = one.init(device="cpu"), [(torch.ones(4, 2), torch.ones(4, 1))] * 3
        >>> first_difference(Run(one, state, batches), Run(one, state, batches)) is None
        True
        >>> first_difference(Run(one, state, batches), Run(two, state, batches)).step
        1
    """
    if isinstance(a, Run) and isinstance(b, Run):
        return _side_by_side(a, b, rtol, atol)
    if isinstance(a, Run) or isinstance(b, Run):
        raise ConfigError("a Run and a directory", where="first_difference", hint="pass two of one kind")
    if like is None:
        raise ConfigError("like is None", where="first_difference", hint="like=program.init()")
    return _bisected(a, b, like, rtol, atol)


def _side_by_side(a: Run, b: Run, rtol: float, atol: float) -> Difference | None:
    if (len(a.batches), a.first) != (len(b.batches), b.first):
        raise Mismatch(
            f"{len(a.batches)} batches from step {a.first}, and {len(b.batches)} from step {b.first}",
            where="first_difference",
            hint="pass the same steps of both runs",
        )
    one, two = a.state, b.state
    if found := _sizes({"state": one}, {"state": two}, rtol, atol):
        return _difference(a.first - 1, None, found)
    for step, (left, right) in enumerate(zip(a.batches, b.batches, strict=True), a.first):
        found = {} if left is right else _sizes({"batch": left}, {"batch": right}, rtol, atol)
        if not found:
            one, two = a.program.train_step(one, left)[0], b.program.train_step(two, right)[0]
            found = _sizes({"state": one}, {"state": two}, rtol, atol)
        if found:
            return _difference(step, step - 1, found)
    return None


def _bisected(a: str | Path, b: str | Path, like: Tree, rtol: float, atol: float) -> Difference | None:
    with Snapshots(a, writer=False) as one, Snapshots(b, writer=False) as two:
        common = sorted(set(one.steps()) & set(two.steps()))
        if not common:
            raise NotFound(
                f"no step in common: {one.steps()} and {two.steps()}",
                where="first_difference",
                hint="pass Snapshots(..., keep=...) that keeps more of them",
            )

        def sizes(at: int) -> dict[str, float]:
            left, right = (each.restore(like, step=common[at]).state for each in (one, two))
            return _sizes({"state": left}, {"state": right}, rtol, atol)

        low, high = -1, len(common) - 1  # equal, different
        found = sizes(high)
        if not found:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if sizes_there := sizes(middle):
                high, found = middle, sizes_there
            else:
                low = middle
        return _difference(common[high], None if low < 0 else common[low], found)


def _difference(step: int, after: int | None, sizes: dict[str, float]) -> Difference:
    leaves = dict(sorted(sizes.items(), key=lambda pair: -pair[1]))
    where = next(iter(leaves))
    return Difference(step, after, where, leaves[where], leaves)


def _sizes(a: Tree, b: Tree, rtol: float, atol: float) -> dict[str, float]:
    """The largest absolute difference of each leaf that differs."""
    one, two = (dict(tree.with_paths(plain(tree.dicts(each, where=None)))) for each in (a, b))
    found: dict[str, float] = {}
    for path in {**one, **two}:
        size = _size(one[path], two[path], rtol, atol) if path in one and path in two else math.inf
        if size:
            found[path] = size
    return found


def _size(a: Any, b: Any, rtol: float, atol: float) -> float:
    """The largest absolute difference of two leaves, if it exceeds the tolerance; inf for other types or shapes."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = (a.dtype, a.layout, a.is_nested) == (b.dtype, b.layout, b.is_nested)
        if not alike or (not a.is_nested and a.shape != b.shape):  # torch gives every jagged tensor another shape
            return math.inf
        if tensor_layout.is_dense(a):
            return _array_size(_array(a), _array(b), rtol, atol)
        if a.is_quantized:
            return _size(a.dequantize(), b.dequantize(), rtol, atol)
        one, two = tensor_layout.dense_parts(a), tensor_layout.dense_parts(b)
        sizes = [_size(left, right, rtol, atol) for left, right in zip(one, two, strict=False)]
        return max(sizes, default=0.0) if len(one) == len(two) else math.inf
    if type(a) is not type(b):
        return math.inf
    if isinstance(a, np.ndarray | np.generic | int | float | complex):
        one, two = np.asarray(a), np.asarray(b)
        if one.dtype == two.dtype and one.shape == two.shape and one.dtype.kind in "biufc":
            return _array_size(one, two, rtol, atol)
    return 0.0 if np.array_equal(a, b) else math.inf


def _array(leaf: torch.Tensor) -> Any:
    """The numbers as a numpy array, which has fewer dtypes than torch and exact arithmetic for all integers."""
    wide = torch.complex128 if leaf.is_complex() else torch.float64 if leaf.is_floating_point() else leaf.dtype
    return leaf.detach().to("cpu", wide).numpy(force=True)


def _array_size(one: Any, two: Any, rtol: float, atol: float) -> float:
    one, two = np.atleast_1d(one, two)
    left, right = (each.astype(np.result_type(each, np.float64)) for each in (one, two))
    with np.errstate(invalid="ignore", over="ignore"):
        if one.dtype.kind in "biu":
            high, low = (pick(one, two).astype(np.uint64) for pick in (np.maximum, np.minimum))
            gap = (high - low).astype(np.float64)  # 0 only for equal numbers: float64 would round large ones first
        else:
            gap = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, abs(left - right))
            gap[np.isnan(gap)] = math.inf
        differs = (gap > atol + rtol * abs(right)) | np.isinf(gap)
    return float(gap[differs].max(initial=0.0))


def _through(program: Program, state: Tree, batches: Sequence[Any]) -> Tree:
    for batch in batches:
        state, _ = program.train_step(state, batch)
    return state


def _pair(result: Any) -> tuple[Tree, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise StepContractError(
            f"the step returned a {type(result).__name__}", where="step", hint="return (state, metrics)"
        )
    return result
