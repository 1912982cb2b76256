"""torchmetrics objects as pure functions: what they count travels as a `Mean`, what they make of it comes last."""

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
    """A metric function from a ``torchmetrics.Metric`` whose states are sums.

    The states of one batch are one vector, merged by addition like any other total; ``float`` and `metrics.compute`
    call the object's own ``compute`` on the sum. The object that is passed in is copied and never touched. Counts are
    exact up to 2**24 a batch and rounded to float32 beyond.

    Args:
        metric: for example ``torchmetrics.classification.MulticlassF1Score(10, validate_args=False)``. Its own checks
            look at the data: switch them off where the step is compiled, which takes ``capture="trace"`` for most
            (Dynamo cannot read them). One number must come out of it.

    Returns:
        ``f(outputs, targets) -> Mean``, total and weight of shape=(n,), n numbers of state.

    Raises:
        ConfigError: a metric that keeps examples, extremes or anything else that does not add up; a collection.
        StepContractError: at the end, of a metric that computes more than one number.

    Example:
        >>> MeanSquaredError = __import__("pytest").importorskip("torchmetrics").MeanSquaredError
        >>> rmse = from_torchmetrics(MeanSquaredError(squared=False))
        >>> float(rmse(torch.zeros(4), torch.full((4,), 3.0)))
        3.0
    """
    states = _summed_states(metric)
    # Filled and emptied within one call; what it counted leaves it as the result.
    scratch = deepcopy(metric)

    class State(Mean):
        """What was counted in every batch so far."""

        __slots__ = ()

        def compute(self) -> Tensor:
            _fill(scratch, states, self.total)
            try:
                return _one_number(metric, type(scratch).compute(scratch))
            finally:
                _empty(scratch, states)

        def __float__(self) -> float:
            return float(self.compute())

    def count(outputs: Any, targets: Any) -> Mean:
        logits = logits_of("from_torchmetrics", outputs)
        _fill(scratch, states, torch.zeros(sum(one.numel() for one in states.values()), device=logits.device))
        try:
            # The class's own function: the object's is wrapped in bookkeeping that no graph can hold.
            type(scratch).update(scratch, logits, targets)
            total = torch.cat([getattr(scratch, name).detach().reshape(-1).float() for name in states])
        finally:
            _empty(scratch, states)
        return State(total, torch.ones_like(total))

    return count


def _summed_states(metric: Any) -> dict[str, Tensor]:
    kind = type(metric).__name__
    defaults, reductions = getattr(metric, "_defaults", None), getattr(metric, "_reductions", None)
    if not isinstance(defaults, dict) or not isinstance(reductions, dict) or not defaults:
        raise ConfigError(
            f"{kind} is no torchmetrics.Metric",
            where="metrics.from_torchmetrics",
            hint="one metric; of a collection: {name: from_torchmetrics(one) for name, one in collection.items()}",
        )
    other = [
        name
        for name, default in defaults.items()
        if not isinstance(default, Tensor)
        or getattr(reductions[name], "__name__", "") != "dim_zero_sum"
        or bool(default.count_nonzero())
    ]
    if other:
        raise ConfigError(
            f"{kind} keeps {', '.join(other)}, which cannot be merged by adding",
            where="metrics.from_torchmetrics",
            hint="thresholds=100 for a curve, or update the object yourself over program.bind(state)",
        )
    return {str(name): default for name, default in defaults.items()}


def _fill(metric: Any, states: dict[str, Tensor], total: Tensor) -> None:
    """Put the vector back into the states' shapes and dtypes, on its device."""
    if metric.device != total.device:
        metric.to(total.device)  # it may own buffers besides its states: thresholds, class weights
    parts = total.split([default.numel() for default in states.values()])
    for (name, default), part in zip(states.items(), parts, strict=True):
        rounded = part if default.is_floating_point() else part.round()
        setattr(metric, name, rounded.to(default.dtype).reshape(default.shape))


def _empty(metric: Any, states: dict[str, Tensor]) -> None:
    """Let go of what it counted. Its own ``reset`` computes, which a trace would record."""
    for name, default in states.items():
        setattr(metric, name, default)


def _one_number(metric: Any, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    raise StepContractError(
        f"{type(metric).__name__} computes {list(value.shape) if isinstance(value, Tensor) else type(value).__name__}",
        where="metrics.from_torchmetrics",
        hint='a metric of one number: average="macro"',
    )
