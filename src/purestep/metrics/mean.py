"""Operations on metrics: empty, merge and compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..errors import StepContractError
from ..types import Mean, Metrics
from .gathered import Gathered, numbers
from .handed_out import measured


def empty() -> Metrics:
    """Return the metrics of no batch, the neutral element of `merge`.

    Example:
        >>> merge(empty(), empty())
        {}
    """
    return {}


def merge(first: Metrics, second: Metrics) -> Metrics:
    """Add totals and weights by name, and join gathered batches; a name in only one of the two is copied. `outputs` are
    left out: they are of one step.

    Example:
        >>> one, two = as_mean(torch.tensor(1.0), 3), as_mean(torch.tensor(5.0), 1)
        >>> float(merge({"loss": one}, {"loss": two})["loss"])
        2.0

    Args:
        first: name -> Mean, shapes () or (n,).
        second: name -> Mean; Means of one name have one shape.

    Raises:
        StepContractError: two Means of one name have different shapes.
    """
    first, second = measured(first), measured(second)
    both = {name: _joined(name, mean, second[name]) for name, mean in first.items() if name in second}
    return {**first, **second, **both}


def _joined(name: str, first: Any, second: Any) -> Any:
    if not isinstance(first, Gathered) and not isinstance(second, Gathered):
        return _add(name, first, second)
    if type(first) is not type(second):
        raise StepContractError(
            f"{name!r} is a {type(first).__name__} and a {type(second).__name__}",
            where="metrics.merge",
            hint="return values of one metric function under one name",
        )
    return type(first)((*first.parts, *second.parts))


def _add(name: str, first: Mean, second: Mean) -> Mean:
    if first.total.shape != second.total.shape:
        raise StepContractError(
            f"{name!r} has shape {list(first.total.shape)} and {list(second.total.shape)}",
            where="metrics.merge",
            hint="return one number in both, or one per class in both",
        )
    # A subclass (`from_torchmetrics`) keeps its type on either side.
    like = second if isinstance(second, type(first)) else first
    return with_sums(like, first.total + second.total, first.weight + second.weight)


def with_sums(mean: Mean, total: Tensor, weight: Tensor) -> Mean:
    """Return a metric of the same type with another total and weight."""
    return mean._replace(total=total, weight=weight)


def compute(metrics: Metrics, *, prefix: str = "") -> dict[str, float]:
    """Return the values as Python numbers, nan for weight 0; without `outputs`. Waits for the device.

    Example:
        >>> compute({"loss": Mean(torch.tensor(6.0), torch.tensor(4.0))}, prefix="val_")
        {'val_loss': 1.5}

    Args:
        metrics: name -> Mean, on one or several devices.
        prefix: prepended to each name (``"val_"``).
    """
    on_host = tree.map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, measured(metrics)).items()
    found = [{name: float(mean)} if type(mean) is Mean else numbers(name, mean.compute()) for name, mean in on_host]
    return {f"{prefix}{name}": value for values in found for name, value in values.items()}


def as_mean(value: Tensor | float, weight: Tensor | float = 1.0) -> Mean:
    """Convert a mean to a `Mean`, so that it can be merged.

    Example:
        >>> as_mean(torch.tensor(0.5), 8)
        Mean(total=tensor(4.), weight=tensor(8.))

    Args:
        value: a mean, shape=() or (n,), of any real dtype.
        weight: the number of examples, tokens or elements that it is a mean over, at least 0.

    Raises:
        StepContractError: the value is a matrix or complex.
    """
    mean = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    if mean.dim() > 1 or mean.is_complex():
        raise StepContractError(
            f"the value has shape {list(mean.shape)} and dtype {mean.dtype}",
            where="metrics.as_mean",
            hint="pass a real number, or one per class: value.mean()",
        )
    mean = at_least_float32(mean)
    # `full` takes a size that varies, in a trace for batches of many sizes.
    known = weight.detach() if isinstance(weight, Tensor) else torch.full((), weight)
    count = known.to(mean).expand_as(mean)
    # A mean over nothing is nan, and nan x 0 would be nan.
    return Mean(torch.where(count > 0, mean * count, torch.zeros_like(mean)), count.clone())


def at_least_float32(value: Tensor) -> Tensor:
    """Convert to float32, except from float64: metrics of a float64 program are float64.

    Example:
        >>> at_least_float32(torch.tensor(1)).dtype, at_least_float32(torch.tensor(1.0).double()).dtype
        (torch.float32, torch.float64)
    """
    return value if value.dtype == torch.float64 else value.float()


def in_float64(metrics: Metrics) -> Metrics:
    """Convert totals and weights to float64."""
    return {
        name: mean if isinstance(mean, Gathered) else with_sums(mean, mean.total.double(), mean.weight.double())
        for name, mean in metrics.items()
    }
