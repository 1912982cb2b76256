"""What a metric may return, made a Mean, and how many examples there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..types import Mean


def mean_of(value: Any, targets: Any, inputs: Any = None) -> Mean:
    """What a metric returned, as a Mean: a bare tensor is a mean over the examples that `leading` counts.

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
    size = leading(targets, inputs)
    return Mean(value.detach().float() * size, torch.full_like(value, size, dtype=torch.float32).detach())


def leading(targets: Any, inputs: Any = None) -> int:
    """How many examples there are: the leading dimension of a tensor (1 for a 0-d one), the length of a list.

    A list holds an entry an example (an image's boxes, say), unless it is a list of columns: tensors that all have the
    leading dimension of the inputs, or that have one leading dimension and differ in rank or dtype (two heads). Of a
    mapping, the first value counts.

    Args:
        targets: tensors, or mappings, lists and tuples of what there is for an example.
        inputs: what belongs to them.

    Raises:
        DataError: nothing that could be counted.

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
        return _listed(cast("tuple[Any, ...] | list[Any]", targets), inputs)
    raise DataError(
        f"cannot count the examples of {describe(targets)}",
        where="targets",
        hint="a tensor with a leading batch size, or a list of one entry an example",
    )


def _listed(targets: tuple[Any, ...] | list[Any], inputs: Any) -> int:
    rows, count = _rows(targets), len(targets)
    if rows is not None and (rows in _sizes(inputs) or _are_columns(targets)):
        return rows
    lengths = {len(cast(Any, entry)) if isinstance(entry, tuple | list) else None for entry in targets}
    length = lengths.pop()
    if not lengths and length is not None and length != count and length in _sizes(inputs, lists=True):
        return length  # columns that are lists of one entry an example
    return count


def _sizes(inputs: Any, *, lists: bool = False) -> set[int]:
    """The leading dimensions of inputs, those of the arguments of a model; with ``lists`` the lengths of lists too."""
    if isinstance(inputs, Tensor):
        return {inputs.shape[0]} if inputs.dim() else set()
    if isinstance(inputs, Mapping):
        parts = list(cast(Mapping[Any, Any], inputs).values())
        return {size for part in parts for size in _sizes(part, lists=lists)}
    if not isinstance(inputs, tuple | list):
        return set()
    listed = cast("tuple[Any, ...] | list[Any]", inputs)
    rows = _rows(listed)
    found = {rows} if rows is not None and _are_columns(listed) else set[int]()
    return found | {len(listed)} if lists else found


def _rows(node: Any) -> int | None:
    """The leading dimension that all of the tensors have, where there is nothing else; else None."""
    if isinstance(node, Tensor):
        return node.shape[0] if node.dim() else None
    parts: list[Any] = list(cast(Any, node).values() if isinstance(node, Mapping) else node) if _is_node(node) else []
    found = {_rows(part) for part in parts}
    return found.pop() if len(found) == 1 else None


def _is_node(node: Any) -> bool:
    return isinstance(node, Mapping | tuple | list)


def _are_columns(parts: tuple[Any, ...] | list[Any]) -> bool:
    """Whether tensors differ in rank or dtype, as entries of one kind do not."""
    return all(isinstance(part, Tensor) for part in parts) and len({(part.dim(), part.dtype) for part in parts}) > 1


def describe(value: Any) -> str:
    """What it is, in words: a tensor's shape, or the class."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
