"""torchmetrics objects as pure functions: a `Mean` sums their states; their ``compute`` runs at the end."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, StepContractError
from ..pickling import recipe
from ..types import Mean, Metric
from .classification import logits_of


@recipe
def from_torchmetrics(metric: Any) -> Metric:
    """Build a metric function from a ``torchmetrics.Metric`` whose states are sums.

    The states of one batch form one vector, and `merge` adds these vectors. ``float`` and `metrics.compute` call the
    object's own ``compute`` on the sum. The object is copied and never modified. Counts are exact up to 2**24 per
    batch, and rounded to float32 above.

    Args:
        metric: for example ``torchmetrics.classification.MulticlassF1Score(10, validate_args=False)``. Switch off its
            argument checks in a compiled step, since they read tensor values. Most metrics need ``capture="trace"``,
            since Dynamo cannot capture them. The metric must compute one number.

    Returns:
        ``f(outputs, targets) -> Mean``, total and weight of shape=(n,) for n numbers of state.

    Raises:
        ConfigError: the metric stores examples, extremes or other states that are not sums, or is a collection.
        StepContractError: at the end of an evaluation, if the metric computes more than one number.

    Example:
        >>> MeanSquaredError = __import__("pytest").importorskip("torchmetrics").MeanSquaredError
        >>> rmse = from_torchmetrics(MeanSquaredError(squared=False))
        >>> float(rmse(torch.zeros(4), torch.full((4,), 3.0)))
        3.0
    """
    states = _summed_states(metric)
    # Holds state only during one call.
    scratch = deepcopy(metric)

    class State(Mean):
        """The summed states of all batches."""

        __slots__ = ()

        def compute(self) -> Tensor:
            _load(scratch, states, self.total)
            try:
                return _one_number(metric, type(scratch).compute(scratch))
            finally:
                _reset(scratch, states)

        def __float__(self) -> float:
            return float(self.compute())

    def count(outputs: Any, targets: Any) -> Mean:
        logits = logits_of("from_torchmetrics", outputs)
        _load(scratch, states, torch.zeros(sum(one.numel() for one in states.values()), device=logits.device))
        try:
            # The method of the class: torchmetrics wraps that of the object in bookkeeping that cannot be captured.
            type(scratch).update(scratch, logits, targets)
            total = torch.cat([getattr(scratch, name).detach().reshape(-1).float() for name in states])
        finally:
            _reset(scratch, states)
        return State(total, torch.ones_like(total))

    return count


def _summed_states(metric: Any) -> dict[str, Tensor]:
    kind = type(metric).__name__
    defaults, reductions = getattr(metric, "_defaults", None), getattr(metric, "_reductions", None)
    if not isinstance(defaults, dict) or not isinstance(reductions, dict) or not defaults:
        raise ConfigError(
            f"{kind} is not a torchmetrics.Metric",
            where="metrics.from_torchmetrics",
            hint="pass one metric; for a collection {name: from_torchmetrics(one) for name, one in collection.items()}",
        )
    not_sums = [
        name
        for name, default in defaults.items()
        if not isinstance(default, Tensor)
        or getattr(reductions[name], "__name__", "") != "dim_zero_sum"
        or bool(default.count_nonzero())
    ]
    if not_sums:
        raise ConfigError(
            f"{kind} stores {', '.join(not_sums)}, which cannot be merged by addition",
            where="metrics.from_torchmetrics",
            hint="set thresholds=100 for a curve, or update the object in a loop of your own over program.bind(state)",
        )
    return {str(name): default for name, default in defaults.items()}


def _load(metric: Any, states: dict[str, Tensor], total: Tensor) -> None:
    """Split the vector into the states of the metric, in their shapes and dtypes, on the device of the vector."""
    if metric.device != total.device:
        metric.to(total.device)  # It may have other buffers than its states: thresholds, class weights.
    parts = total.split([default.numel() for default in states.values()])
    for (name, default), part in zip(states.items(), parts, strict=True):
        rounded = part if default.is_floating_point() else part.round()
        setattr(metric, name, rounded.to(default.dtype).reshape(default.shape))


def _reset(metric: Any, states: dict[str, Tensor]) -> None:
    """Set the states to their defaults, without the metric's own ``reset``, whose operations a graph would record."""
    for name, default in states.items():
        setattr(metric, name, default)


def _one_number(metric: Any, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    raise StepContractError(
        f"{type(metric).__name__} computes {list(value.shape) if isinstance(value, Tensor) else type(value).__name__}",
        where="metrics.from_torchmetrics",
        hint='use a metric of one number: average="macro"',
    )
