"""How far numbers are from numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import StepContractError
from ..types import Mean
from .classification import logits_of


def mean_absolute_error(outputs: Any, targets: Tensor) -> Mean:
    """``|outputs - targets|`` over all elements.

    Args:
        outputs: any shape, or something with ``.logits`` of it.
        targets: the same shape.

    Raises:
        StepContractError: two shapes (broadcasting would compare each with each).

    Example:
        >>> float(mean_absolute_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
        1.0
    """
    difference = _difference("mean_absolute_error", outputs, targets)
    return Mean(difference.abs().sum(), _number(difference))


def mean_squared_error(outputs: Any, targets: Tensor) -> Mean:
    """``(outputs - targets)^2`` over all elements.

    Args:
        outputs: any shape, or something with ``.logits`` of it.
        targets: the same shape.

    Raises:
        StepContractError: two shapes (broadcasting would compare each with each).

    Example:
        >>> float(mean_squared_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
        2.0
    """
    difference = _difference("mean_squared_error", outputs, targets)
    return Mean(difference.square().sum(), _number(difference))


def _difference(name: str, outputs: Any, targets: Tensor) -> Tensor:
    found = logits_of(name, outputs)
    if found.shape != targets.shape:
        raise StepContractError(
            f"outputs {list(found.shape)} and targets {list(targets.shape)}",
            where=f"metrics.{name}",
            hint="one shape: targets.unsqueeze(-1), or outputs.squeeze(-1)",
        )
    return found.float() - targets.float()


def _number(of: Tensor) -> Tensor:
    return torch.full((), of.numel(), dtype=torch.float32, device=of.device)
