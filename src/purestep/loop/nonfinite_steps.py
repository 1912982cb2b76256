"""States that stopped at a loss or gradient that is not finite: find them, explain the call, write it to a file.

The explanation makes the call again in eager mode, once: from the state that the device froze, with the batches that
`Progress` still holds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import data, optim, tree
from ..compile import is_state, states
from ..diagnostics import differentiates, not_finite, purity, replay
from ..errors import NonFiniteError, PurestepError
from ..snapshot import Snapshots
from ..state import stacked
from ..step import drawn_in_step, microbatch
from ..types import Empty, Form, Params, Program, TrainState, Tree
from .loop_state import Call

FOUND = "the loss, its weight or a gradient is not finite"
"""The reason, in messages that do not know which of the three it is."""
CURE = 'a smaller learning rate, optim.clip_by_global_norm(1.0), or ps.program(..., nonfinite="skip")'
_WEIGHT, _GRADIENT = "weight of the loss", "gradient of "  # paths of numbers that no tree contains
_SHOWN = 4  # leaves in a message
_ITEMS = 16  # items in a message
_log = logging.getLogger("purestep")


# --- find -------------------------------------------------------------------------------------------------------------


def can_halt(state: Tree) -> bool:
    """True if a part of the tree stops at a loss or gradient that is not finite."""
    return any(path.rpartition("/")[2] == "halted" for path in tree.paths(state))


def halts(state: Tree) -> list[tuple[str, int]]:
    """Return (path, call that halted it) for every halted TrainState in a tree. A stacked state is halted if all of its
    members are; the call is that of the last one."""
    flags = [(path.rpartition("/"), leaf) for path, leaf in tree.with_paths(state)]
    flags = [(path[0], _last(leaf)) for path, leaf in flags if path[2] == "halted" and leaf.dim() <= 1]
    calls = torch.stack([leaf for _, leaf in flags]).tolist() if flags else []  # one read, since each waits
    return [(path, int(call)) for (path, _), call in zip(flags, calls, strict=True) if call]


def _last(halted: Tensor) -> Tensor:
    return torch.where(halted.all(), halted.max(), 0) if halted.dim() else halted


def _nowhere(_: int) -> str:
    return ""


def halt_error(state: Tree, place: Callable[[int], str] = _nowhere) -> NonFiniteError | None:
    """Return the error of a tree with a halted state, or None. ``place(call)`` is the call's position in the data."""
    path, call = next(iter(halts(state)), ("", 0))
    if not call:
        return None
    error = NonFiniteError(
        f"{FOUND} at call {call}; the state is the one before that call",
        where=path or place(call),
        hint=CURE,
    )
    error.step = call
    return error


def check_windows(state: Tree) -> None:
    """Check the sums of windows that stay open. Otherwise the call that closes the window would get the blame.

    Raises:
        NonFiniteError: one is not finite.
    """
    part = next((part for part in states(state) if _is_spoilt(part)), None)
    if part is not None:
        call = int(part.step.max())
        error = NonFiniteError(
            f"{FOUND} in the accumulation window that is open at call {call}",
            where="accum",
            hint=CURE,
        )
        error.step = call
        raise error


def _is_spoilt(node: TrainState) -> bool:
    """True if the state would halt at the end of its window, or all members of a stacked state would. With a loss
    scale, the scale falls and the run goes on."""
    if many := stacked.size(node):
        return all(_is_spoilt(stacked.member(node, index)) for index in range(many))
    halts = isinstance(node.scaler, Empty) and not isinstance(node.halted, Empty)
    if not halts or isinstance(node.accum, Empty):
        return False
    window: Any = node.accum
    weight = float(window.weight)  # nan after a loss that is not finite
    if weight == 0:  # no window is open
        return False
    sums = [leaf for leaf in tree.leaves(window) if leaf.is_floating_point() or leaf.is_complex()]
    # One read for all: each read waits for the device.
    return weight != weight or not bool(torch.stack([leaf.isfinite().all() for leaf in sums]).all())


def halt_spoilt(state: Tree) -> Tree:
    """Halt every state that would halt at the end of its window, as if the last call had closed it."""

    def one(node: Any) -> Any:
        if not is_state(node) or not _is_spoilt(node):
            return node
        left, *sums = node.accum
        emptied = type(node.accum)(left, *tree.map(torch.zeros_like, sums))
        return TrainState(*node)._replace(halted=node.step.clone(), accum=emptied)

    return tree.map(one, state, is_leaf=is_state)


def before_halt(state: Tree) -> Tree:
    """Return the tree with every halted state as it was before the call that halted it.

    A halted state refuses every change but the count of calls. The host advances the key in any case.
    """

    def one(node: Any) -> Any:
        if not is_state(node) or isinstance(node.halted, Empty) or not bool(node.halted.any()):
            return node
        halted = node.halted != 0
        step = torch.where(halted, node.halted - 1, node.step)
        calls = torch.where(halted.cpu(), step.cpu(), node.key[..., 1])
        key = torch.stack([node.key[..., 0], calls], dim=-1)
        return TrainState(*node)._replace(step=step, halted=torch.zeros_like(node.halted), key=key)

    return tree.map(one, state, is_leaf=is_state)


# --- explain ----------------------------------------------------------------------------------------------------------


def without_written(
    error: NonFiniteError, window: list[tuple[Call, Any]]
) -> tuple[NonFiniteError, list[tuple[Call, Any]]]:
    """Return the error and the window, without its batches and with a word on it if one was written after its call, as
    by a loader that refills one buffer. Writes to memory of numpy do not show."""
    if all(batch is None or purity.versions(batch) == list(call.versions) for call, batch in window):
        return error, window
    found = NonFiniteError(
        f"{error.what}; the cause is unknown, because the batch was written in place after the call",
        where=error.where,
        hint=f"yield new tensors from the loader (x.clone()) to find the cause; {error.hint}",
    )
    found.step = error.step
    return found, [(call, None) for call, _ in window]


def explain(
    error: NonFiniteError, frozen: Tree, window: list[tuple[Call, Any]], program: Program, feed: data.Feed
) -> NonFiniteError:
    """Return an error that names the leaves that are not finite and the items of the batch.

    Args:
        error: of a halted state.
        frozen: that state, as it was before the call.
        window: the calls of the accumulation window that led there, with their batches.
        program: not compiled.
        feed: the source of the batches.
    """
    is_held = any(batch is not None for _, batch in window)
    if not isinstance(frozen, TrainState) or not is_held or error.step is None:
        return error
    if many := stacked.size(frozen):
        explained = NonFiniteError(f"all {many} members have halted; {error.what}", where=error.where, hint=error.hint)
        explained.step = error.step
        return explained
    frozen = TrainState(*frozen)
    size = program.static.accumulate if program.static else 1
    probes = (
        _probe(program, state_before(frozen, window, index, size), call, batch)
        for index, (call, batch) in enumerate(window)
        if batch is not None
    )
    last: _Probe | None = None
    weighed: list[tuple[float, float]] = []
    for last in probes:
        weighed.append((abs(last.weight or 0.0), last.norm))
        if last.halts:
            break
    assert last is not None
    return _explained(error, last, _reason(last, weighed), feed.indices(last.call.epoch, last.call.batch))


def explain_from(error: NonFiniteError, bad: list[tuple[str, ...] | None], where: str) -> NonFiniteError:
    """Return an error that names the leaves of batches that are not finite, by process.

    To repeat the call takes all processes, so only what each of them holds is read.

    Args:
        error: of a halted state.
        bad: for each process, its leaves; None if its batches are unknown.
        where: the place in the data, "" if it is unknown.
    """
    texts = [f"process {rank}: {', '.join(leaves[:_SHOWN])}" for rank, leaves in enumerate(bad) if leaves]
    cause = f"; not finite in {'; '.join(texts)}" if texts else "; the batches of all processes are finite"
    if not texts and None in bad:
        cause = f"; the batch of process {bad.index(None)} is unknown"
    explained = NonFiniteError(f"{error.what}{cause}", where=where or error.where, hint=error.hint)
    explained.step = error.step
    return explained


def bad_leaves(window: list[tuple[Call, Any]]) -> tuple[str, ...] | None:
    """Describe the leaves of these calls' batches that are not finite; None if no batch is held."""
    batches = [batch for _, batch in window if batch is not None]
    if not batches:
        return None
    named = (pair for batch in batches for pair in _named("batch", batch))
    return tuple(f"{path} ({text})" for path, leaf in named if (text := _problem(leaf)))


class _Probe(NamedTuple):
    """One call, repeated."""

    call: Call
    state: TrainState
    batch: Any
    loss: float | None
    weight: float | None  # of the loss; None for a step of the user's own
    norm: float  # of the gradients, 0 if there are none
    bad: list[tuple[str, str]]  # (path, problem) of the leaves that are not finite, causes before effects
    largest: list[tuple[str, str]]  # (path, size) of the largest gradients

    @property
    def halts(self) -> bool:
        """True if this call alone halts the state."""
        return not all(math.isfinite(value or 0.0) for value in (self.loss, self.weight, self.norm))

    @property
    def is_finite(self) -> bool:
        """True if loss and gradients are finite. Buffers need not be: a mask has infinities."""
        return math.isfinite(self.loss or 0.0) and not any(path.startswith(_GRADIENT) for path, _ in self.bad)


class _Reason(NamedTuple):
    """Why the state halted."""

    found: str
    leaves: list[tuple[str, str]]  # (path, problem)
    cure: str


_WEIGHT_CURE = (
    'return the count that `mean` was divided by as the weight of ps.Loss, or ps.program(..., nonfinite="skip")'
)
_NORM_CURE = (
    'divide the inputs or the loss by a constant, or ps.program(..., nonfinite="skip"); optim.clip_by_global_norm is '
    "no cure, since it needs this norm"
)


def _reason(last: _Probe, weighed: list[tuple[float, float]]) -> _Reason:
    """Return the reason that a window halted its state.

    Args:
        last: the call that halts it alone, or else the last one of the window.
        weighed: (weight of the loss, norm of the gradients) of the calls up to that one.
    """
    if not last.is_finite:
        return _Reason("the loss or a gradient is not finite", last.bad or last.largest, CURE)
    if not math.isfinite(last.weight or 0.0):
        return _Reason("the weight of the loss is not finite", [(_WEIGHT, f"{last.weight:g}")], _WEIGHT_CURE)
    if not math.isfinite(last.norm):
        return _Reason("the norm of finite gradients overflows", last.largest, _NORM_CURE)
    if sum(weight * max(1.0, norm) for weight, norm in weighed) > torch.finfo(torch.float32).max:
        leaves = [(_WEIGHT, f"up to {max(weighed)[0]:.3g}")]
        return _Reason("the sum of gradient x weight overflows float32", leaves, _WEIGHT_CURE)
    return _Reason(FOUND, last.bad or last.largest, CURE)


def state_before(frozen: TrainState, window: list[tuple[Call, Any]], index: int, accumulate: int) -> TrainState:
    """Return the frozen state as it was before a call of the window, as far as gradients depend on it.

    Args:
        frozen: before the call that ended the window.
        window: the calls, and what belongs to them.
        index: of the call.
        accumulate: calls in a window.
    """
    end = window[-1][0]
    earlier = end.number - window[index][0].number
    # A flush closes a window at any position, a step closes it with its last micro-batch.
    left = accumulate - index if end.batch < 0 else 1 + earlier
    key = frozen.key - torch.tensor([0, earlier], dtype=torch.int64)
    before = frozen._replace(step=frozen.step - earlier, key=key)
    if isinstance(frozen.accum, Empty):
        return before
    # Empty, so that an earlier micro-batch does not spoil the result of this one.
    clean = tree.map(torch.zeros_like, frozen.accum)
    return before._replace(accum=clean._replace(left=torch.full_like(clean.left, left)))


def _probe(program: Program, state: TrainState, call: Call, batch: Any) -> _Probe:
    grads: Params = {}

    def collect(found: Params) -> Params:
        grads.update(found)
        return found

    step = program.train_step
    own = program.static if getattr(step, "static", None) is program.static else None
    if own is not None:
        step = own.steps(Form(lambda stored: stored, collect)).train_step
    recorder = _LossRecorder()
    try:
        with recorder:
            step(state, batch)
    except Exception as error:
        _log.info("the step that halted fails in eager mode, so it is not explained: %s", error)
    scale = 1.0 if isinstance(state.scaler, Empty) else float(state.scaler.scale)
    loss = None if recorder.value is None else recorder.value / scale
    bad = _bad(state, batch, grads)
    weight = None if own is None else _weight(own.parts, state, batch)
    return _Probe(call, state, batch, loss, weight, float(optim.global_norm(grads)), bad, _largest(grads))


def _weight(parts: Any, state: TrainState, batch: Any) -> float | None:
    """Return the weight of the loss; None if the objective fails. The gradients do not show a weight."""

    def summed() -> float:
        split = microbatch.split(tree.dicts(batch), parts.microbatches) if parts.microbatches > 1 else [batch]
        return sum(float(parts.loss(state.params, state, part, (), train=True)[0].weight) for part in split)

    try:
        with torch.no_grad():
            return drawn_in_step(state, summed)
    except Exception as error:
        _log.info("the objective fails in eager mode, so its weight is unknown: %s", error)
        return None


class _LossRecorder(TorchFunctionMode):
    """Records the first tensor that is differentiated: the scaled loss."""

    def __init__(self) -> None:
        super().__init__()
        self.value: float | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.value is None and args and differentiates(func):
            outputs = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.value = float(outputs.detach())
        return func(*args, **(kwargs or {}))


def _bad(state: TrainState, batch: Any, grads: Params) -> list[tuple[str, str]]:
    """Return the leaves that are not finite, causes before effects."""
    named = [*_named("batch", batch), *_named("params", state.params), *_named("frozen", state.frozen)]
    named += [*_named("buffers", state.buffers), *((f"{_GRADIENT}{name}", grad) for name, grad in grads.items())]
    return [(path, text) for path, leaf in named if (text := _problem(leaf))]


def _largest(grads: Params) -> list[tuple[str, str]]:
    sizes = {name: float(grad.abs().max()) for name, grad in grads.items() if grad.numel()}
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])
    return [(f"{_GRADIENT}{name}", f"up to {size:.3g}") for name, size in largest[:_SHOWN]]


def _named(root: str, part: Tree) -> Iterator[tuple[str, Any]]:
    for path, leaf in tree.with_paths(tree.dicts(part)):
        yield "/".join(filter(None, (root, path))), leaf


def _problem(leaf: Any) -> str:
    """Say how many elements are not finite; "" for none."""
    count = not_finite(leaf)
    return f"{count} of {leaf.numel()} not finite" if count else ""


def _explained(error: NonFiniteError, probe: _Probe, reason: _Reason, items: list[Any] | None) -> NonFiniteError:
    call, leaves = probe.call, reason.leaves
    shown = ", ".join(f"{path} ({text})" for path, text in leaves[:_SHOWN])
    more = f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    loss = "" if probe.loss is None else f"; loss {probe.loss:.6g}"
    listed = "" if items is None else f", items {_listed(items)}"
    explained = NonFiniteError(
        f"{reason.found} at call {error.step}: {shown}{more}{loss}; the state is the one before that call",
        where=f"epoch {call.epoch + 1}, batch {call.batch + 1}{listed}",
        hint=reason.cure,
    )
    explained.step, explained.loss, explained.items = error.step, probe.loss, items
    explained.leaves = tuple(path for path, _ in leaves)
    explained.state, explained.batch = probe.state, probe.batch
    return explained


def _listed(items: list[Any]) -> str:
    more = f", ... ({len(items)} in all)" if len(items) > _ITEMS else ""
    return f"[{', '.join(str(item) for item in items[:_ITEMS])}{more}]"


def write_replay_file(error: PurestepError, snapshots: Snapshots | None) -> None:
    """Write state and batch of the error into a file in the snapshot directory. A failure to write is a warning."""
    if snapshots is None or not isinstance(error, NonFiniteError) or error.state is None:
        return
    path = snapshots.directory / "nonfinite" / f"{error.step}.safetensors"
    notes = {"step": error.step, "where": error.where, "loss": error.loss, "leaves": list(error.leaves)[:100]}
    try:
        error.written(replay.write(path, error.state, error.batch, notes))
    except PurestepError as failed:
        _log.warning("state and batch were not written down: %s", failed)
