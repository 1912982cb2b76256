"""The monoid: empty, merge, compute, and the way through JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..errors import StepContractError
from ..types import Mean, Metrics


def empty() -> Metrics:
    """The metrics of no batch: merging them changes nothing.

    Example:
        >>> merge(empty(), empty())
        {}
    """
    return {}


def merge(first: Metrics, second: Metrics) -> Metrics:
    """Sums of totals and of weights; a name that is only in one of them stays as it is.

    Args:
        first: name -> Mean, shapes () or (n,).
        second: the same; shapes agree where the names do.

    Raises:
        StepContractError: they do not.

    Example:
        >>> one, two = as_mean(torch.tensor(1.0), 3), as_mean(torch.tensor(5.0), 1)
        >>> float(merge({"loss": one}, {"loss": two})["loss"])
        2.0
    """
    both = {name: _add(name, mean, second[name]) for name, mean in first.items() if name in second}
    return {**first, **second, **both}


def _add(name: str, first: Mean, second: Mean) -> Mean:
    if first.total.shape != second.total.shape:
        raise StepContractError(
            f"{name!r} of shape {list(first.total.shape)} and {list(second.total.shape)}",
            where="metrics.merge",
            hint="one number in both, or one for each class",
        )
    # A metric with an ending of its own (`from_torchmetrics`) keeps it, whichever side it is on.
    like = second if isinstance(second, type(first)) else first
    return counted_anew(like, first.total + second.total, first.weight + second.weight)


def counted_anew(mean: Mean, total: Tensor, weight: Tensor) -> Mean:
    """The same metric with other numbers."""
    # Dynamo of torch 2.11 cannot return what `_replace` has made.
    return Mean(total, weight) if type(mean) is Mean else mean._replace(total=total, weight=weight)


def compute(metrics: Metrics, *, prefix: str = "") -> dict[str, float]:
    """What they come to, as Python numbers; nan where nothing was counted. Waits for the device, once.

    Args:
        metrics: name -> Mean, on any device, or several.
        prefix: put before each name (``"val_"``).

    Example:
        >>> compute({"loss": Mean(torch.tensor(6.0), torch.tensor(4.0))}, prefix="val_")
        {'val_loss': 1.5}
    """
    return {f"{prefix}{name}": float(mean) for name, mean in _on_host(metrics).items()}


def _on_host(metrics: Metrics) -> Metrics:
    """The same on the CPU, in one copy: of each device and dtype, where there are several."""
    found, treedef = tree.flatten(metrics)
    together: dict[Any, list[int]] = {}
    for at, leaf in enumerate(found):
        if _is_elsewhere(leaf):
            together.setdefault((leaf.device, leaf.dtype), []).append(at)
    for places in together.values():
        leaves = [found[at] for at in places]
        parts = torch.cat([leaf.reshape(-1) for leaf in leaves]).cpu().split([leaf.numel() for leaf in leaves])
        for at, leaf, part in zip(places, leaves, parts, strict=True):
            found[at] = part.reshape(leaf.shape)
    return tree.unflatten(treedef, found)


def _is_elsewhere(leaf: Tensor) -> bool:
    return leaf.device.type != "cpu"


def as_mean(value: Tensor | float, weight: Tensor | float = 1.0) -> Mean:
    """A mean that somebody else took, so that it can be merged.

    Args:
        value: a mean, shape=() or (n,), of any real dtype.
        weight: what it is a mean over, at least 0: examples, tokens, elements.

    Raises:
        StepContractError: a matrix, or complex numbers.

    Example:
        >>> as_mean(torch.tensor(0.5), 8)
        Mean(total=tensor(4.), weight=tensor(8.))
    """
    mean = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    if mean.dim() > 1 or mean.is_complex():
        raise StepContractError(
            f"a metric of shape {list(mean.shape)} and dtype {mean.dtype}",
            where="metrics.as_mean",
            hint="a real number, or one for each class: value.mean()",
        )
    mean = mean.float()
    over = torch.as_tensor(weight, dtype=torch.float32, device=mean.device).detach().expand_as(mean)
    # A mean over nothing is nan, and nan x 0 would be nan.
    return Mean(torch.where(over > 0, mean * over, torch.zeros_like(mean)), over.clone())


def to_json(metrics: Metrics) -> dict[str, dict[str, Any]]:
    """Totals and weights as numbers that JSON can hold (what is not finite as None). Waits for the device.

    Example:
        >>> to_json({"loss": Mean(torch.tensor(6.0), torch.tensor(4.0))})
        {'loss': {'total': 6.0, 'weight': 4.0}}
    """
    return {
        name: {field: _plain(value.tolist()) for field, value in mean._asdict().items()}
        for name, mean in _on_host(metrics).items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if math.isfinite(value) else None


def from_json(found: Mapping[str, Mapping[str, Any]], *, device: torch.device | str = "cpu") -> Metrics:
    """The way back from `to_json`: plain Means, which take on their kind when they are merged with the next batch.

    Example:
        >>> metrics = {"loss": Mean(torch.tensor(6.0), torch.tensor(4.0))}
        >>> from_json(to_json(metrics)) == metrics
        True
    """
    return {
        name: Mean(*(torch.tensor(_numbers(mean[field]), dtype=torch.float32, device=device) for field in Mean._fields))
        for name, mean in found.items()
    }


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return math.nan if value is None else value
