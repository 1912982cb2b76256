"""Why a run halted: the call is made again in eager, off the step path and once, from the state that the device has
frozen and the batches that were held; what is not finite is named, and both are written down."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import data, tree
from ..diagnostics import differentiates, not_finite, replay
from ..errors import NonFiniteError, PurestepError
from ..snapshot import Snapshots
from ..types import Empty, Form, Params, Program, TrainState, Tree
from .progress import CURE, Tag

_SHOWN = 4  # leaves in a message
_ITEMS = 16  # items in a message
_log = logging.getLogger("purestep")


def explained(
    error: NonFiniteError, frozen: Tree, window: list[tuple[Tag, Any]], program: Program, feed: data.Feed
) -> NonFiniteError:
    """The error with all that can be found out about it.

    Args:
        error: of a halted state.
        frozen: that state, as it was before the call.
        window: the calls of the accumulation window that led there, and their batches.
        program: not compiled.
        feed: the batches come from it.
    """
    candidates = [(tag, batch) for tag, batch in window if batch is not None]
    if not isinstance(frozen, TrainState) or not candidates or error.step is None:
        return error
    frozen = TrainState(*frozen)
    end = window[-1][0]
    size = program.static.accumulate if program.static else 1
    # A flush closes a window wherever it stands; a step closes it with its last micro-batch.
    lefts = {tag.call: size - i if end.batch < 0 else 1 + end.call - tag.call for i, (tag, _) in enumerate(window)}
    probes = (_probe(program, _before(frozen, end.call - tag.call, lefts[tag.call]), tag, b) for tag, b in candidates)
    last: _Probe | None = None
    for last in probes:
        if last.leaves and not math.isfinite(last.total):
            break
    assert last is not None
    return _told(error, last, feed.indices(last.tag.epoch, last.tag.batch))


class _Probe(NamedTuple):
    """One call made again."""

    tag: Tag
    state: TrainState
    batch: Any
    loss: float | None
    total: float  # the norm of the gradient, of nothing where it is not known; not finite where the loss is not
    leaves: list[tuple[str, str]]  # the worst ones: path, what is in it


def _before(frozen: TrainState, earlier: int, left: int) -> TrainState:
    """The frozen state as it was so many calls earlier, with ``left`` calls to the end of the window, as far as
    gradients depend on it."""
    key = frozen.key - torch.tensor([0, earlier], dtype=torch.int64)
    found = frozen._replace(step=frozen.step - earlier, key=key)
    if isinstance(frozen.accum, Empty):
        return found
    # What an earlier micro-batch has spoilt is no fault of this one.
    clean = tree.map(torch.zeros_like, frozen.accum)
    return found._replace(accum=clean._replace(left=torch.full_like(clean.left, left)))


def _probe(program: Program, state: TrainState, tag: Tag, batch: Any) -> _Probe:
    grads: Params = {}

    def collect(found: Params) -> Params:
        grads.update(found)
        return found

    static, step = program.static, program.train_step
    if static is not None and getattr(step, "static", None) is static:
        step = static.steps(Form(lambda stored: stored, collect)).train_step
    seen = _Loss()
    try:
        with seen:
            step(state, batch)
    except Exception as error:
        _log.info("the step that halted cannot be made again in eager: %s", error)
    scale = 1.0 if isinstance(state.scaler, Empty) else float(state.scaler.scale)
    loss = None if seen.value is None else seen.value / scale
    norm = math.sqrt(sum(_square(grad) for grad in grads.values()))
    total = norm if loss is None or math.isfinite(loss) else loss
    return _Probe(tag, state, batch, loss, total, _worst(state, batch, grads))


class _Loss(TorchFunctionMode):
    """Sees the first thing that is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.value: float | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.value is None and args and differentiates(func):
            outputs = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.value = float(outputs.detach())
        return func(*args, **(kwargs or {}))


def _square(grad: Tensor) -> float:
    # In float32, as the step takes it: it may overflow where every number is finite.
    return float(grad.detach().float().square().sum())


def _worst(state: TrainState, batch: Any, grads: Params) -> list[tuple[str, str]]:
    """What is not finite, causes before effects; else the largest gradients."""
    named = [*_named("batch", batch), *_named("params", state.params), *_named("frozen", state.frozen)]
    named += [*_named("buffers", state.buffers), *((f"gradient of {name}", grad) for name, grad in grads.items())]
    found = [(path, text) for path, leaf in named if (text := _bad(leaf))]
    if found:
        return found
    largest = sorted(grads.items(), key=lambda pair: -_square(pair[1]))
    return [(f"gradient of {name}", f"up to {float(grad.abs().max()):.3g}") for name, grad in largest[:_SHOWN]]


def _named(root: str, part: Tree) -> Iterator[tuple[str, Any]]:
    for path, leaf in tree.with_paths(tree.dicts(part)):
        yield "/".join(filter(None, (root, path))), leaf


def _bad(leaf: Any) -> str:
    """How much of a leaf is not finite; "" for nothing."""
    count = not_finite(leaf)
    return f"{count} of {leaf.numel()} not finite" if count else ""


def _told(error: NonFiniteError, probe: _Probe, items: list[Any] | None) -> NonFiniteError:
    tag = probe.tag
    shown = ", ".join(f"{path} ({text})" for path, text in probe.leaves[:_SHOWN])
    more = f" and {len(probe.leaves) - _SHOWN} more" if len(probe.leaves) > _SHOWN else ""
    loss = "" if probe.loss is None else f"; loss {probe.loss:.6g}"
    listed = "" if items is None else f", items {_listed(items)}"
    told = NonFiniteError(
        f"the loss or a gradient is not finite at call {error.step}: {shown}{more}{loss}; the state is what it was "
        "before it",
        where=f"epoch {tag.epoch + 1}, batch {tag.batch + 1}{listed}",
        hint=CURE,
    )
    told.step, told.loss, told.items = error.step, probe.loss, items
    told.leaves = tuple(path for path, _ in probe.leaves)
    told.state, told.batch = probe.state, probe.batch
    return told


def _listed(items: list[Any]) -> str:
    more = f", ... ({len(items)} in all)" if len(items) > _ITEMS else ""
    return f"[{', '.join(str(item) for item in items[:_ITEMS])}{more}]"


def write_down(error: PurestepError, snapshots: Snapshots | None) -> None:
    """State and batch of the error into a file beside the snapshots; one that cannot be written is a warning."""
    if snapshots is None or not isinstance(error, NonFiniteError) or error.state is None:
        return
    path = snapshots.directory / "nonfinite" / f"{error.step}.safetensors"
    notes = {"step": error.step, "where": error.where, "loss": error.loss, "leaves": list(error.leaves)[:100]}
    try:
        error.written(replay.write(path, error.state, error.batch, notes))
    except PurestepError as failed:
        _log.warning("state and batch were not written down: %s", failed)
