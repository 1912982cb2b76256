"""Regression metrics: mean absolute and mean squared error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import StepContractError
from ..types import Mean
from .classification import logits_of
from .mean import at_least_float32


def mean_absolute_error(outputs: Any, targets: Tensor) -> Mean:
    """Mean of ``|outputs - targets|`` over all elements.

    Example:
        >>> float(mean_absolute_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
        1.0

    Args:
        outputs: a tensor of any shape, or an object with such ``.logits``.
        targets: the same shape.

    Raises:
        StepContractError: the shapes differ (broadcasting would compare each output with each target).
    """
    difference = _difference("mean_absolute_error", outputs, targets)
    return Mean(difference.abs().sum(), _numel(difference))


def mean_squared_error(outputs: Any, targets: Tensor) -> Mean:
    """Mean of ``(outputs - targets)^2`` over all elements.

    Example:
        >>> float(mean_squared_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
        2.0

    Args:
        outputs: a tensor of any shape, or an object with such ``.logits``.
        targets: the same shape.

    Raises:
        StepContractError: the shapes differ (broadcasting would compare each output with each target).
    """
    difference = _difference("mean_squared_error", outputs, targets)
    return Mean(difference.square().sum(), _numel(difference))


def _difference(name: str, outputs: Any, targets: Tensor) -> Tensor:
    predictions = logits_of(name, outputs)
    if predictions.shape != targets.shape:
        raise StepContractError(
            f"outputs {list(predictions.shape)} and targets {list(targets.shape)} have different shapes",
            where=f"metrics.{name}",
            hint="call targets.unsqueeze(-1), or outputs.squeeze(-1)",
        )
    return at_least_float32(predictions) - at_least_float32(targets)


def _numel(tensor: Tensor) -> Tensor:
    return torch.full((), tensor.numel(), dtype=tensor.dtype, device=tensor.device)
