"""The pieces a loop is composed of, for `fit` and for loops of one's own: `run_epoch` and `evaluate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import batch_objects, data, tree
from ..errors import StepContractError
from ..types import EvalStep, Mean, Metrics, TrainStep, Tree
from . import metric_queue as meter_
from .accumulation import counting
from .inputs import check_alone
from .loop_state import Record
from .metric_queue import Meter
from .progress import halted, thawed

Watch = Callable[[Any, Metrics, int], None]


def run_epoch(
    state: Tree, loader: Any, step: TrainStep, *, epoch: int = 0, start: int = 0, seed: int = 0
) -> tuple[Tree, Metrics]:
    """Every batch of an epoch through a step.

    Args:
        state: what the step takes.
        loader: a DataLoader, a list of batches, any iterable of batches; or a `Feed`, which is left open.
        step: ``(state, batch) -> (state, metrics)``.
        epoch: 0-based; with ``seed`` it decides the order of a shuffling DataLoader.
        start: batches of that epoch that are done already.
        seed: of the order.

    Returns:
        The last state and the merged metrics, on the host.

    Raises:
        DataError: an empty loader.
        NonFiniteError: the state has halted at a loss or gradient that is not finite; ``error.state`` is what it was
            before.
        RankError: more than one process.
        StepContractError: the step returned something else than a state and a dict of Means.

    Example:
        >>> import torch, purestep as ps
        >>> step = lambda state, batch: (state + batch, {"loss": ps.Mean(batch, torch.ones(()))})
        >>> state, metrics = run_epoch(torch.zeros(()), [torch.ones(()), 3 * torch.ones(())], step)
        >>> state.item(), float(metrics["loss"])
        (4.0, 2.0)
    """
    check_alone(loader, where="train")
    feed = data.open_feed(loader, name="train", seed=seed)
    meter, total, step = Meter(), meter_.Totals(), counting(step)
    try:
        for batch in data.prefetch(feed.epoch(epoch, start), data.device_of(state), name="train"):
            state, metrics = check_pair(step(state, batch))
            meter.add(None, metrics)
            for rows in meter.rows(wait=False):
                meter_.add_to(total, rows)
    finally:
        if feed is not loader:
            feed.close()
    for rows in meter.rows(wait=True):
        meter_.add_to(total, rows)
    error = halted(state)
    if error is not None:
        error.state = thawed(state)
        raise error
    return state, meter_.as_means(total, meter.kinds)


def evaluate(
    state: Tree, loader: Any, eval_step: EvalStep, *, watch: Watch | None = None, name: str = "evaluation"
) -> dict[str, float]:
    """Weighted means of an evaluation over a loader. The state is only read.

    Args:
        state: to evaluate; ``ps.view(state, "ema")`` for averaged weights.
        loader: as for `run_epoch`.
        eval_step: ``(state, batch, *, index=0) -> metrics``.
        watch: called with (batch, metrics, index) after every batch.
        name: of the loader, for messages.

    Returns:
        name -> mean, as bare names (``loss``).

    Raises:
        DataError: an empty loader.
        RankError: more than one process.
        StepContractError: the step returned something else than a dict of Means.

    Example:
        >>> import torch, purestep as ps
        >>> step = lambda state, batch: {"loss": ps.Mean(state * batch.sum(), torch.tensor(float(len(batch))))}
        >>> evaluate(torch.tensor(2.0), [torch.ones(3), torch.zeros(1)], step)
        {'loss': 1.5}
    """
    check_alone(loader, where=name)
    feed = data.open_feed(loader, name=name, repeats=True)
    try:
        fed = data.prefetch(feed.epoch(0), data.device_of(state), name=name)
        return scores(state, fed, eval_step, name=name, watch=watch)
    finally:
        if feed is not loader:
            feed.close()


def scores(
    state: Tree, batches: Iterable[Any], eval_step: EvalStep, *, name: str, watch: Watch | None
) -> dict[str, float]:
    """The inside of `evaluate`: weighted means over batches that are on the device already."""
    meter, total = Meter(), meter_.Totals()
    indexed = takes_index(eval_step)
    for index, batch in enumerate(batches):
        try:
            found = eval_step(state, batch, index=index) if indexed else eval_step(state, batch)
        except Exception as error:
            error.add_note(f"in eval_step, {name}, batch {index + 1}")
            raise
        metrics = check_metrics(found, where="eval_step")
        meter.add(None, metrics)
        if watch is not None:
            watch(batch, metrics, index)
        for rows in meter.rows(wait=False):
            meter_.add_to(total, rows)
    for rows in meter.rows(wait=True):
        meter_.add_to(total, rows)
    return meter_.means(total, meter.kinds)


def takes_index(eval_step: EvalStep) -> bool:
    """Whether an eval_step wants the number of the batch."""
    try:
        return "index" in inspect.signature(eval_step).parameters or hasattr(eval_step, "graphs")
    except (TypeError, ValueError):
        return False


def check_pair(result: Any) -> tuple[Tree, Metrics]:
    """What a step returned, if it is a state and a dict of metrics.

    Raises:
        StepContractError: it is not.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return result[0], check_metrics(result[1], where="train_step")
    raise StepContractError(
        f"returned a {type(result).__name__}"
        + (f" of {len(result)}" if isinstance(result, tuple) and not hasattr(result, "_fields") else ""),
        where="train_step",
        hint="return (state, {name: ps.Mean(total, weight)})",
    )


def check_metrics(found: Any, *, where: str) -> Metrics:
    """What a step measured, if it is a dict of Means.

    Raises:
        StepContractError: it is not, they are on several devices, or one has a name that is reserved.
    """
    wrong = {"": found} if not isinstance(found, dict) else {k: v for k, v in found.items() if not _is_mean(v)}
    for name, value in wrong.items():
        kind = type(value).__name__
        if isinstance(value, Mean):
            kind += (
                f" of a {type(value.total).__name__} and a {type(value.weight).__name__}, not two real tensors alike"
            )
        raise StepContractError(
            f"metric {name!r} is a {kind}" if isinstance(found, dict) else f"returned a {kind}",
            where=where,
            hint="{name: ps.Mean(total, weight)}, two tensors",
        )
    if entry := next(filter(meter_.ENTRY.fullmatch, map(str, found)), None):
        raise StepContractError(
            f"metric {entry!r} has the name of an entry of a metric that is a vector", where=where, hint="another name"
        )
    meter_.check_devices([found], where=where)
    return found


def _is_mean(value: Any) -> bool:
    known = isinstance(value, Mean) and _is_real(value.total) and _is_real(value.weight)
    return known and value.total.numel() == value.weight.numel()


def _is_real(value: Any) -> bool:
    plain = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return plain and not (value.is_complex() or value.is_quantized or value.is_nested)


class BatchCheck:
    """Finds a batch of another structure than the first before it reaches a step."""

    def __init__(self) -> None:
        self._first: data.BatchSpec | None = None
        self._last: tuple[tree.TreeDef, list[Any]] | None = None

    def __call__(self, batch: Any, record: Record) -> None:
        """Check a batch, the next one of this record.

        Raises:
            DataError: with the path and what the first batch had there.
        """
        leaves, treedef = tree.flatten(batch)
        if self._last is not None and self._last[0] == treedef and _are(leaves, self._last[1]):
            return
        where = f"train, epoch {record.epoch + 1}, batch {record.batch + 1}"
        spec = data.check_batch(batch, self._first, where=where)
        self._first = self._first or spec
        self._last = treedef, _kinds(leaves)


def _are(leaves: list[Any], kinds: list[Any]) -> bool:
    """Whether the leaves are of these kinds; asked at every step, so tensors are looked at without a tuple of each."""
    for leaf, kind in zip(leaves, kinds, strict=True):
        if type(leaf) is not Tensor:
            if _kind(leaf) != kind:
                return False
        elif type(kind) is not tuple or (leaf.dtype, leaf.dim(), leaf.device, leaf.layout) != kind:
            return False
    return True


def _kinds(leaves: list[Any]) -> list[Any]:
    """What must not change from batch to batch; mappings and records that are no nodes are looked into."""
    return [_kind(leaf) for leaf in leaves]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.device, leaf.layout
    return object() if isinstance(leaf, Mapping) or batch_objects.attributes(leaf) is not None else type(leaf)
