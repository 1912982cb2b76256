"""Conversion of a metric's result to a `Mean`, and the number of examples in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..metrics import Gathered
from ..metrics import mean as means
from ..types import Mean


def mean_of(name: str, value: Any, targets: Any, inputs: Any = None) -> Any:
    """Convert a metric's result to a Mean. A bare tensor is a mean over the examples that `leading` counts; a
    `metrics.Gathered` is returned unchanged.

    Raises:
        StepContractError: the result is not a Mean, a pair or a 0-d tensor.
        DataError: the examples of the targets cannot be counted.
    """
    if isinstance(value, Gathered):
        return value
    if isinstance(value, Mean) and all(isinstance(part, Tensor) for part in cast(tuple[Any, ...], value)):
        return value._replace(total=value.total.detach(), weight=value.weight.detach())
    parts = cast(tuple[Any, ...], value) if isinstance(value, tuple) else ()
    if len(parts) == 2 and not any(part is None or isinstance(part, str | dict) for part in parts):
        total, weight = parts
        like = total if isinstance(total, Tensor) else torch.as_tensor(total, dtype=torch.float32)
        sums = means.at_least_float32(like.detach())
        return Mean(sums, torch.as_tensor(weight, dtype=sums.dtype, device=sums.device).detach())
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise StepContractError(
            f"the metric returned {'a tuple of ' * bool(parts)}{', '.join(map(describe, parts or (value,)))}",
            where=f"metrics/{name}",
            hint="return a Mean, a (total, weight) pair or a 0-d tensor",
        )
    size = leading(targets, inputs)
    mean = means.at_least_float32(value.detach())
    return Mean(mean * size, torch.full_like(mean, size))


def leading(targets: Any, inputs: Any = None) -> int:
    """Count the examples: the leading dimension of a tensor (1 for a 0-d tensor), or the length of a list.

    Example:
        >>> boxes = [torch.ones(3, 4), torch.ones(3, 4)]
        >>> leading(boxes), leading(boxes, torch.ones(3, 8)), leading(torch.ones(5, 2))
        (2, 3, 5)

    A list has one entry per example (such as the boxes of an image), unless it is a list of columns: tensors with one
    leading dimension, which is that of the first tensor in the inputs, or which differ in rank or dtype (the targets of
    two heads). A mapping is counted by its first value.

    Args:
        targets: a tensor, or a mapping, list or tuple.
        inputs: the inputs of the same batch. Lists in them whose tensors do not differ in rank or dtype (the images of
            a batch) have one entry per example too; they are passed over.

    Raises:
        DataError: the targets cannot be counted.
    """
    if isinstance(targets, Tensor):
        return targets.shape[0] if targets.dim() else 1
    if isinstance(targets, Mapping) and targets:
        return leading(next(iter(cast(Mapping[str, Any], targets).values())), inputs)
    if isinstance(targets, tuple | list) and targets:
        entries = cast("tuple[Any, ...] | list[Any]", targets)
        return _rows_of_columns(entries, inputs) or len(entries)
    raise DataError(
        f"purestep cannot count the examples of {describe(targets)}",
        where="targets",
        hint="pass a tensor with a leading batch dimension, or a list with one entry per example",
    )


def _rows_of_columns(entries: tuple[Any, ...] | list[Any], inputs: Any) -> int | None:
    """Return the common leading dimension of columns; None for entries per example."""
    if all(isinstance(entry, tuple | list) for entry in entries) and isinstance(inputs, tuple | list):
        lengths = {len(entry) for entry in entries}
        return lengths.pop() if lengths == {len(cast("list[Any]", inputs))} else None  # two columns of lists
    if not all(isinstance(entry, Tensor) and entry.dim() for entry in entries):
        return None
    rows = entries[0].shape[0]
    are_columns = _differ(entries) or _rows_of_inputs(inputs) == rows
    return rows if are_columns and all(entry.shape[0] == rows for entry in entries) else None


def _rows_of_inputs(inputs: Any) -> int | None:
    """Return the leading dimension of the first tensor in the inputs; None if they have one entry per example."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else None
    parts: list[Any] = []
    if isinstance(inputs, Mapping):
        parts = list(cast(Mapping[str, Any], inputs).values())
    elif isinstance(inputs, tuple | list):
        entries = cast("tuple[Any, ...] | list[Any]", inputs)
        parts = list(entries) if _differ(entries) else []
    for part in parts:
        rows = _rows_of_inputs(part)
        if rows is not None:
            return rows
    return None


def _differ(entries: tuple[Any, ...] | list[Any]) -> bool:
    """Return True if entries differ in class, or tensors in rank or dtype; entries per example do not differ."""
    return len({(entry.dim(), entry.dtype) if isinstance(entry, Tensor) else type(entry) for entry in entries}) > 1


def describe(value: Any) -> str:
    """Describe a value for an error message: a tensor by its shape, any other value by its class."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
