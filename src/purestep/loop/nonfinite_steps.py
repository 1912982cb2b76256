"""States that stopped at a loss or gradient that is not finite: find them, explain the call, write it to a file.

The explanation repeats the call in eager mode, as `testing.replay` does: from the state that the device froze, with the
batches that are still held.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import data, tree
from ..compile import is_state
from ..diagnostics import Repeated, bad_leaves, repeated, replay
from ..errors import NonFiniteError, PurestepError
from ..files import subdirectory
from ..parallel import mesh as meshes
from ..parallel import processes
from ..snapshot import Snapshots
from ..state import stacked
from ..types import Empty, Form, Params, Program, TrainState, Tree
from .loop_state import Call

FOUND = "the loss, its weight or a gradient is not finite"
"""The reason, in messages that do not know which of the three it is."""
_FINITE = "the norm of finite gradients, or the weight of the loss, is not finite"
CURE = 'a smaller learning rate, optim.clip_by_global_norm(1.0), or ps.program(..., nonfinite="skip")'
_FINITE_CURE = (
    "divide the inputs or the loss by a constant, return the count that `mean` was divided by as the weight of "
    'ps.Loss, or ps.program(..., nonfinite="skip"); optim.clip_by_global_norm is no cure, since it needs the norm'
)
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
    flags = [
        (path[0], torch.where(leaf.all(), leaf.max(), 0) if leaf.dim() else leaf)
        for path, leaf in flags
        if path[2] == "halted" and leaf.dim() <= 1
    ]
    calls = torch.stack([leaf for _, leaf in flags]).tolist() if flags else []  # one read, since each waits
    return [(path, int(call)) for (path, _), call in zip(flags, calls, strict=True) if call]


def halt_error(
    state: Tree, place: Callable[[int], str] = lambda _: "", *, at: str = "at call"
) -> NonFiniteError | None:
    """Return the error of a tree with a halted state, or None. ``place(call)`` is the call's position in the data."""
    path, call = next(iter(halts(state)), ("", 0))
    if not call:
        return None
    text = f"{FOUND} {at} {call}; the state is the one before that call"
    error = NonFiniteError(text, where=path or place(call), hint=CURE)
    error.step = call
    return error


def halt_spoilt(state: Tree) -> Tree:
    """Halt every state that would halt at the end of its window, as if the last call had closed it. Otherwise the call
    that closes the window would get the blame."""

    def one(node: Any) -> Any:
        if not is_state(node) or not _is_spoilt(node):
            return node
        left, *sums = node.accum
        emptied = type(node.accum)(left, *tree.map(torch.zeros_like, sums))
        return TrainState(*node)._replace(halted=node.step.clone(), accum=emptied)

    return tree.map(one, state, is_leaf=is_state)


def _is_spoilt(node: TrainState) -> bool:
    """True if the state would halt at the end of its window, or all members of a stacked state would. With a loss
    scale, the scale falls and the run goes on. A collective, where several processes hold an open window: each has the
    sums over its part of the rows, and all must find the same."""
    if many := stacked.size(node):
        return all(_is_spoilt(stacked.member(node, index)) for index in range(many))
    halts = isinstance(node.scaler, Empty) and not isinstance(node.halted, Empty)
    if not halts or isinstance(node.accum, Empty):
        return False
    window: Any = node.accum
    weight = float(window.weight)  # nan after a loss that is not finite
    if weight == 0:  # no window is open
        return False
    if weight != weight:
        return True
    sums = [leaf for leaf in tree.leaves(window) if leaf.is_floating_point() or leaf.is_complex()]
    # One read for all: each read waits for the device.
    is_finite = bool(torch.stack([leaf.isfinite().all() for leaf in sums]).all())
    return bool(processes.largest([not is_finite])[0])


def before_halt(state: Tree, key_ahead: int = 0) -> Tree:
    """Return the tree with every halted state as it was before the call that halted it.

    A halted state refuses every change; the host advances the key in any case.

    Args:
        state: a tree of states.
        key_ahead: calls that the key counted and ``step`` did not, before the state halted.
    """

    def one(node: Any) -> Any:
        if not is_state(node) or isinstance(node.halted, Empty) or not bool(node.halted.any()):
            return node
        halted = node.halted != 0
        step = torch.where(halted, node.halted - 1, node.step)
        calls = torch.where(halted.cpu(), step.cpu() + key_ahead, node.key[..., 1])
        key = torch.stack([node.key[..., 0], calls], dim=-1)
        return TrainState(*node)._replace(step=step, halted=torch.zeros_like(node.halted), key=key)

    return tree.map(one, state, is_leaf=is_state)


# --- explain ----------------------------------------------------------------------------------------------------------


def explain(
    error: NonFiniteError, frozen: Tree, window: list[tuple[Call, Any]], program: Program, feed: data.Feed
) -> NonFiniteError:
    """Return an error that names the leaves that are not finite, the operation that made them and the items of the
    batch. To repeat the call takes all of several processes, so their error names the leaves of their batches alone: a
    collective.

    Args:
        error: of a halted state.
        frozen: that state, as it was before the call.
        window: the calls of the accumulation window that led there, with their batches.
        program: not compiled.
        feed: the source of the batches.
    """
    held = [one for one in window if one[1] is not None]
    if meshes.here().size > 1:
        own = [f"{path} ({text} not finite)" for _, batch in held for path, text in bad_leaves({"batch": batch})]
        return explain_from(error, processes.gathered(own if held else None), window[-1][0].place if window else "")
    if not isinstance(frozen, TrainState) or not held or error.step is None:
        return error
    if many := stacked.size(frozen):
        return _like(error, f"all {many} members have halted; {error.what}")
    size = program.static.accumulate if program.static else 1
    state, grads = _window_start(frozen, window, size), Params()
    step = _collecting(program, grads)
    try:
        for call, batch in held:
            found = repeated(step, state, batch)
            before, state = state, found.result[0]
            is_last = call is held[-1][0]
            if is_last and window[-1][1] is None and program.flush is not None:
                state, _ = program.flush(state)
            if halts(state) or _is_spoilt(state):
                return _explained(error, call, before, batch, found, grads, feed.indices(call.epoch, call.batch))
    except Exception as failed:
        _log.info("the step that halted fails in eager mode, so it is not explained: %s", failed)
        return error
    hint = (
        "if the loader writes one buffer again, yield new tensors (x.clone()); if the step is compiled, try "
        f"compile=False; {error.hint}"
    )
    return _like(
        error, f"{error.what}; the cause is unknown, because the call is finite when it is repeated", hint=hint
    )


def _collecting(program: Program, grads: Params) -> Any:
    """Return the step of a program; its own one puts the gradients of its last call into ``grads``."""

    def collect(found: Params) -> Params:
        grads.update(found)
        return found

    own = program.static if getattr(program.train_step, "static", None) is program.static else None
    return program.train_step if own is None else own.made.steps(Form(lambda stored: stored, collect)).train_step


def _window_start(frozen: TrainState, window: list[tuple[Call, Any]], accumulate: int) -> TrainState:
    """Return the frozen state, from before the call that ended the window, as it was before the first known call of the
    window, as far as gradients depend on it."""
    end = window[-1][0]
    earlier = end.number - window[0][0].number
    before = frozen._replace(step=frozen.step - earlier, key=frozen.key - torch.tensor([0, earlier]))
    if isinstance(frozen.accum, Empty):
        return before
    # A flush closes a window at any position, a step closes it with its last micro-batch.
    left = torch.full_like(frozen.accum.left, accumulate if end.batch < 0 else 1 + earlier)
    return before._replace(accum=tree.map(torch.zeros_like, frozen.accum)._replace(left=left))


def _explained(
    error: NonFiniteError,
    call: Call,
    state: TrainState,
    batch: Any,
    found: Repeated,
    grads: Params,
    items: list[Any] | None,
) -> NonFiniteError:
    bad = bad_leaves({f"gradient of {name}": grad for name, grad in grads.items()})
    is_finite = math.isfinite(found.loss or 0.0) and not bad
    if is_finite:  # a buffer need not be finite: a mask has infinities
        sizes = sorted(((float(grad.abs().max()), name) for name, grad in grads.items() if grad.numel()), reverse=True)
        leaves = [(f"gradient of {name}", f"up to {size:.3g}") for size, name in sizes[:_SHOWN]]
    else:
        leaves = [(path, f"{count} not finite") for path, count in found.leaves + bad]
    parts = [", ".join(f"{path} ({text})" for path, text in leaves[:_SHOWN])]
    parts[0] += f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    if found.operation:
        parts.insert(0, str(found.first))
    if found.loss is not None:
        parts.append(f"loss {found.loss:.6g}")
    if any(path.startswith("params/") for path, _ in leaves):
        parts.append("an earlier update has written weights that are not finite")
    shown = "; ".join(filter(None, (*parts, "the state is the one before that call")))
    more = f", ... ({len(items)} in all)" if items and len(items) > _ITEMS else ""
    listed = "" if items is None else f", items [{', '.join(map(str, items[:_ITEMS]))}{more}]"
    explained = _like(
        error,
        f"{_FINITE if is_finite else 'the loss or a gradient is not finite'} at call {call.number}: {shown}",
        where=f"{call.place}{listed}",
        hint=_FINITE_CURE if is_finite else CURE,
    )
    explained.step, explained.loss, explained.items = call.number, found.loss, items
    explained.state, explained.batch = state, batch
    explained.leaves = tuple(path for path, _ in leaves)
    return explained


def explain_from(error: NonFiniteError, bad: list[list[str] | None], where: str) -> NonFiniteError:
    """Return an error that names the leaves of batches that are not finite, by process. ``bad`` has those of each
    process, None if its batches are unknown."""
    texts = [f"process {rank}: {', '.join(leaves[:_SHOWN])}" for rank, leaves in enumerate(bad) if leaves]
    cause = f"; not finite in {'; '.join(texts)}" if texts else "; the batches of all processes are finite now"
    if not texts and None in bad:
        cause = f"; the batch of process {bad.index(None)} is unknown"
    return _like(error, f"{error.what}{cause}", where=where or error.where)


def _like(error: NonFiniteError, what: str, *, where: str = "", hint: str = "") -> NonFiniteError:
    """Return an error of the same call with another text."""
    found = NonFiniteError(what, where=where or error.where, hint=hint or error.hint)
    found.step = error.step
    return found


def write_replay_file(error: PurestepError, snapshots: Snapshots | None) -> None:
    """Write state and batch of the error into a file in the snapshot directory. A failure to write is a warning."""
    if snapshots is None or not isinstance(error, NonFiniteError) or error.state is None:
        return
    notes = {"step": error.step, "where": error.where, "loss": error.loss, "leaves": list(error.leaves)[:100]}
    try:
        path = subdirectory(snapshots.directory, "nonfinite") / f"{error.step}.safetensors"
        error.written(replay.write(path, error.state, error.batch, notes))
    except PurestepError as failed:
        _log.warning("state and batch were not written down: %s", failed)
