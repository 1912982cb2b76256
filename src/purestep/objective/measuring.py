"""What a metric may return, made a Mean, and how many examples there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..types import Mean


def mean_of(value: Any, targets: Any) -> Mean:
    """What a metric returned, as a Mean: a bare tensor is a mean over the leading dimension of ``targets``.

    Raises:
        StepContractError: something else than a Mean, a pair or a 0-d tensor.
        DataError: targets without a leading dimension to count.
    """
    if isinstance(value, Mean) and all(isinstance(part, Tensor) for part in cast(tuple[Any, ...], value)):
        return value._replace(total=value.total.detach(), weight=value.weight.detach())
    if isinstance(value, tuple) and len(cast(tuple[Any, ...], value)) == 2:
        total, weight = cast(tuple[Any, Any], value)
        like = total if isinstance(total, Tensor) else torch.as_tensor(total, dtype=torch.float32)
        return Mean(like.detach().float(), torch.as_tensor(weight, dtype=torch.float32, device=like.device).detach())
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise StepContractError(
            f"a metric returned {describe(value)}",
            where="metrics",
            hint="return a Mean, a (total, weight) pair or a 0-d tensor",
        )
    size = leading(targets)
    return Mean(value.detach().float() * size, torch.full_like(value, size, dtype=torch.float32).detach())


def leading(targets: Any) -> int:
    """The leading dimension of targets, or of the first of them; 1 for a 0-d tensor.

    Raises:
        DataError: neither tensors nor a nesting of them.
    """
    if isinstance(targets, Tensor):
        return targets.shape[0] if targets.dim() else 1
    if isinstance(targets, Mapping) and targets:
        return leading(next(iter(cast(Mapping[str, Any], targets).values())))
    if isinstance(targets, tuple | list) and targets:
        return leading(cast(tuple[Any, ...], targets)[0])
    raise DataError(
        f"cannot count the examples of {describe(targets)}", where="targets", hint="tensors with a leading batch size"
    )


def describe(value: Any) -> str:
    """What it is, in words: a tensor's shape, or the class."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
