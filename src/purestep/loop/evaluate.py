"""`run_epoch` and `evaluate`, for `fit` and for loops of your own, and the checks of what steps take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from .. import data, tree
from .. import metrics as metrics_
from ..compile import takes_index
from ..errors import ConfigError, StepContractError
from ..metrics import Gathered, handed_out
from ..state import vector_name, views
from ..step import begun, counting, static_of
from ..types import Carrying, EvalStep, Metrics, Params, TrainStep, Tree
from . import metric_queue, ranks
from .metric_queue import MetricQueue, check_metrics
from .nonfinite_steps import before_halt, halt_error, halt_spoilt

Watch = Callable[[Any, Metrics, int], None]


def run_epoch(
    state: Tree, loader: Any, step: TrainStep, *, epoch: int = 0, start: int = 0, seed: int = 0
) -> tuple[Tree, Metrics]:
    """Call a step for every batch of an epoch. With a distributed step, every process calls this with the whole loader.

    Example:
        >>> import torch, purestep as ps
        >>> step = lambda state, batch: (state + batch, {"loss": ps.Mean(batch, torch.ones(()))})
        >>> state, metrics = run_epoch(torch.zeros(()), [torch.ones(()), 3 * torch.ones(())], step)
        >>> state.item(), float(metrics["loss"])
        (4.0, 2.0)

    Args:
        state: the step's input.
        loader: a DataLoader, a list of batches, any iterable of batches; or a `Feed`, which stays open.
        step: ``(state, batch) -> (state, metrics)``.
        epoch: 0-based; with ``seed`` it decides the order of a shuffling DataLoader.
        start: batches of that epoch that are done already.
        seed: of the order.

    Returns:
        The last state and the merged metrics, on the host, in float64.

    Raises:
        ConfigError: the step is not callable.
        DataError: an empty loader.
        NonFiniteError: the state halted at a loss or gradient that is not finite, or would as its open window closes;
            ``error.state`` is the one before.
        RankError: several processes without a distributed state; a loader that cannot be divided among them.
        StepContractError: the step did not return a state and a dict of Means.
    """
    _check_callable(train_step=step, where="run_epoch")
    queue, total = MetricQueue(), metric_queue.Totals()
    state = state if start else begun(static_of(getattr(step, "eager", step)), state)
    step = counting(step)
    with ranks.opened(loader, state, where="run_epoch", name="train", seed=seed) as feed:
        for batch in data.Prefetched(feed.epoch(epoch, start), data.device_of(state), name="train"):
            state, metrics = pair_of(step(state, batch))
            queue.add(None, metrics)
            queue.add_to(total, wait=False)
    queue.add_to(total, wait=True)
    state = halt_spoilt(state)
    error = halt_error(state)
    if error is not None:
        error.state = before_halt(state)
        raise error
    return state, metric_queue.as_means(total, queue.kinds)


def evaluate(
    state: Tree,
    loader: Any,
    eval_step: EvalStep,
    *,
    view: str | None = None,
    watch: Watch | None = None,
    name: str = "evaluation",
) -> dict[str, float]:
    """Return the weighted means of an evaluation over a loader. The state is only read. With a distributed program,
    every process calls this with the whole loader, and gets the means of all rows.

    Example:
        >>> import torch, purestep as ps
        >>> step = lambda state, batch: {"loss": ps.Mean(state * batch.sum(), torch.tensor(float(len(batch))))}
        >>> evaluate(torch.tensor(2.0), [torch.ones(3), torch.zeros(1)], step)
        {'loss': 1.5}

    Args:
        state: to evaluate.
        loader: as for `run_epoch`.
        eval_step: ``(state, batch, *, index=0) -> metrics``.
        view: "params" or "ema". None: "ema" for a TrainState with an average, as in `fit`; any other state as it is.
        watch: called with (batch, metrics, index) after every batch.
        name: of the loader, for messages.

    Returns:
        name -> mean, without a prefix (``loss``).

    Raises:
        ConfigError: the eval_step is not callable.
        DataError: an empty loader.
        RankError: several processes without a distributed state; a loader that cannot be divided among them.
        StateError: the view is "ema", and the state has no average.
        StepContractError: the step did not return a dict of Means.
    """
    _check_callable(eval_step=eval_step, where="evaluate")
    with ranks.opened(loader, state, where="evaluate", name=name, repeats=True) as feed:
        state = views.to_evaluate(state, view)
        batches = data.Prefetched(feed.epoch(0), data.device_of(state), name=name)
        return eval_means(state, batches, eval_step, name=name, watch=watch)


def _check_callable(*, where: str, **steps: Any) -> None:
    for name, step in steps.items():
        if not callable(step):
            hint = f"pass program.{name}"
            raise ConfigError(f"the step is a {type(step).__name__}, not a function", where=where, hint=hint)


def eval_means(
    state: Tree, batches: Iterable[Any], eval_step: EvalStep, *, name: str, watch: Watch | None
) -> dict[str, float]:
    """Do the work of `evaluate` for batches that are on the device already."""
    queue, total, outputs = MetricQueue("eval_step"), metric_queue.Totals(), ranks.Outputs()
    indexed = takes_index(eval_step)
    carrying: Carrying | None = getattr(eval_step, "carrying", None)
    carried: Params = {}
    if carrying is not None:
        carried = {name: value.to(state.buffers[name]) for name, value in carrying.start.items()}
    result: Any
    for index, batch in enumerate(batches):
        try:
            if carrying is not None:
                result, carried = carrying.step(state, carried, batch, index=index)
            else:
                result = eval_step(state, batch, index=index) if indexed else eval_step(state, batch)
            if not isinstance(result, dict):
                check_metrics(result, where="eval_step")
            metrics, gathered = _without_gathered(result)
            queue.add(None, metrics)
        except Exception as error:
            error.add_note(f"in eval_step, {name}, batch {index + 1}")
            raise
        if gathered:
            outputs.add(index, batch, _on_host(gathered))
        if watch is not None:
            watch(batch, result, index)
        queue.add_to(total, wait=False)
    queue.add_to(total, wait=True)
    gathered = outputs.joined()
    found = metric_queue.means(total, queue.kinds) | metrics_.compute(gathered)
    return metric_queue.averaged(found) if any(map(vector_name, gathered)) else found


def _without_gathered(metrics: dict[str, Any]) -> tuple[Metrics, Metrics]:
    """Split metrics into means and gathered outputs."""
    if not any(isinstance(one, Gathered) for one in metrics.values()):
        return metrics, {}
    outputs = {name: one for name, one in metrics.items() if isinstance(one, Gathered)}
    return {name: one for name, one in metrics.items() if name not in outputs}, cast(Metrics, outputs)


def _on_host(outputs: Metrics) -> Metrics:
    """Copy gathered outputs to the host, a tensor of several metrics once. Waits for the device."""
    copies: dict[Any, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided or not leaf.numel():
            return leaf.detach().to("cpu", copy=True)
        key = (leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride())
        if key not in copies:  # a copy on the CPU too: the loader and compiled code use their memory again
            copies[key] = leaf.detach().to("cpu", copy=True)
        return copies[key]

    return tree.map(copied, outputs)


def pair_of(result: Any) -> tuple[Tree, Metrics]:
    """Return the result of a step if it is a state and a dict. The queue of metrics checks the dict's entries.

    Raises:
        StepContractError: it is not.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return result
    raise StepContractError(
        f"the step returned a {type(result).__name__}"
        + (f" of {len(result)}" if isinstance(result, tuple) and not hasattr(result, "_fields") else ""),
        where="train_step",
        hint="return (state, {name: ps.Mean(total, weight)})",
    )


def check_pair(result: Any) -> tuple[Tree, Metrics]:
    """Return the result of a step if it is a state and a dict of metrics.

    Raises:
        StepContractError: it is not.
    """
    state, metrics = pair_of(result)
    check_metrics(handed_out.measured(metrics), where="train_step")
    return state, metrics
