"""Conversion of a metric's result to a `Mean`, and the number of examples in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..metrics import Gathered
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
        return Mean(like.detach().float(), torch.as_tensor(weight, dtype=torch.float32, device=like.device).detach())
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise StepContractError(
            f"the metric returned {'a tuple of ' * bool(parts)}{', '.join(map(describe, parts or (value,)))}",
            where=f"metrics/{name}",
            hint="return a Mean, a (total, weight) pair or a 0-d tensor",
        )
    size = leading(targets, inputs)
    return Mean(value.detach().float() * size, torch.full_like(value, size, dtype=torch.float32).detach())


def leading(targets: Any, inputs: Any = None) -> int:
    """Count the examples: the leading dimension of a tensor (1 for a 0-d tensor), or the length of a list.

    A list has one entry per example (such as the boxes of an image), unless it is a list of columns: all its tensors
    have the leading dimension of the inputs, or one leading dimension and different ranks or dtypes (the targets of two
    heads). A mapping is counted by its first value.

    Args:
        targets: a tensor, or a mapping, list or tuple.
        inputs: the inputs of the same batch.

    Raises:
        DataError: the targets cannot be counted.

    Example:
        >>> boxes = [torch.ones(3, 4), torch.ones(3, 4)]
        >>> leading(boxes), leading(boxes, torch.ones(3, 8)), leading(torch.ones(5, 2))
        (2, 3, 5)
    """
    if isinstance(targets, Tensor):
        return targets.shape[0] if targets.dim() else 1
    if isinstance(targets, Mapping) and targets:
        return leading(next(iter(cast(Mapping[str, Any], targets).values())), inputs)
    if isinstance(targets, tuple | list) and targets:
        return _examples_of_list(cast("tuple[Any, ...] | list[Any]", targets), inputs)
    raise DataError(
        f"cannot count the examples of {describe(targets)}",
        where="targets",
        hint="pass a tensor with a leading batch dimension, or a list with one entry per example",
    )


def _examples_of_list(targets: tuple[Any, ...] | list[Any], inputs: Any) -> int:
    rows, count = _rows(targets), len(targets)
    if rows is not None and (rows in _sizes(inputs) or _are_columns(targets)):
        return rows
    lengths = {len(cast(Any, entry)) if isinstance(entry, tuple | list) else None for entry in targets}
    length = lengths.pop()
    if not lengths and length is not None and length != count and length in _sizes(inputs, lists=True):
        return length  # Each column is a list with one entry per example.
    return count


def _sizes(inputs: Any, *, lists: bool = False) -> set[int]:
    """Return the leading dimensions of the model's inputs; with ``lists`` also the lengths of lists."""
    if isinstance(inputs, Tensor):
        return {inputs.shape[0]} if inputs.dim() else set()
    if isinstance(inputs, Mapping):
        parts = list(cast(Mapping[Any, Any], inputs).values())
        return {size for part in parts for size in _sizes(part, lists=lists)}
    if not isinstance(inputs, tuple | list):
        return set()
    entries = cast("tuple[Any, ...] | list[Any]", inputs)
    rows = _rows(entries)
    sizes: set[int] = {rows} if rows is not None and _are_columns(entries) else set()
    return sizes | {len(entries)} if lists else sizes


def _rows(node: Any) -> int | None:
    """Return the common leading dimension of all tensors inside; None if there is none, or a leaf is not a tensor."""
    if isinstance(node, Tensor):
        return node.shape[0] if node.dim() else None
    parts: list[Any] = list(cast(Any, node).values() if isinstance(node, Mapping) else node) if _is_node(node) else []
    sizes = {_rows(part) for part in parts}
    return sizes.pop() if len(sizes) == 1 else None


def _is_node(node: Any) -> bool:
    return isinstance(node, Mapping | tuple | list)


def _are_columns(parts: tuple[Any, ...] | list[Any]) -> bool:
    """Return True if all parts are tensors and they differ in rank or dtype; entries per example do not differ."""
    return all(isinstance(part, Tensor) for part in parts) and len({(part.dim(), part.dtype) for part in parts}) > 1


def describe(value: Any) -> str:
    """Describe a value for an error message: a tensor by its shape, any other value by its class."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
