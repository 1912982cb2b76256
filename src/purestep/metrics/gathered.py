"""Metrics that need all outputs of an evaluation: their value is the batches themselves, and merging joins them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor

from ..errors import StepContractError
from ..state import entry_name


class Gathered(NamedTuple):
    """The batches of a metric that is computed at the end of an evaluation, such as an exact AUROC.

    Example:
        >>> class Count(Gathered):
        ...     "The number of outputs."
        ...     __slots__ = ()
        ...     def compute(self):
        ...         return sum(len(outputs) for outputs, _ in self.parts)
        >>> from purestep import metrics
        >>> one = {"count": Count((([1, 2, 3], None),))}
        >>> metrics.compute(metrics.merge(one, one))
        {'count': 6.0}

    ``metrics.merge`` joins the batches of two values, `compute` returns the metric of all of them. An ``eval_step``
    returns it for one batch; a train step drops it. Subclasses are made by `from_torchmetrics`.
    """

    parts: tuple[Any, ...]  # for each batch, the arguments of the metric: a tuple or a dict of tensors

    def compute(self) -> Any:
        """Return the metric of all batches.

        Raises:
            StepContractError: this is no subclass.
        """
        raise StepContractError(
            "a Gathered does not say what it computes", where="metrics", hint="define `compute` in a subclass"
        )


Value: TypeAlias = Any
"""A number, a vector of numbers, or a mapping of names to such values."""


def numbers(name: str, value: Value) -> dict[str, float]:
    """Return the numbers of a metric by their names in the history.

    Example:
        >>> import torch
        >>> numbers("f1", torch.tensor([1.0, 0.5])), numbers("all", {"rmse": 2.0})
        ({'f1[0]': 1.0, 'f1[1]': 0.5, 'f1': 0.75}, {'all_rmse': 2.0})

    Args:
        name: of the metric.
        value: a number; a vector, which gives ``name[0]``, ``name[1]``, ... and under ``name`` the mean of its entries
            that are not nan; or a mapping, which gives ``name_key`` for each key.

    Raises:
        StepContractError: it is none of these.
    """
    if isinstance(value, Tensor) and value.dim() <= 1 and not value.is_complex():
        if value.numel() == 1:
            return {name: float(value.reshape(()))}
        entries = cast(list[float], value.tolist())
        known = [one for one in entries if not math.isnan(one)]
        return {entry_name(name, index): float(one) for index, one in enumerate(entries)} | {
            name: sum(known) / len(known) if known else math.nan
        }
    if isinstance(value, int | float):
        return {name: float(value)}
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {key: one for part, inner in items for key, one in numbers(f"{name}_{part}", inner).items()}
    if isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in cast(list[Any], value)):
        parts = cast(list[float], value)
        return {entry_name(name, index): float(one) for index, one in enumerate(parts)}
    shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise StepContractError(
        f"the metric computes {shape}, and a history holds numbers",
        where=f"metrics/{name}",
        hint="use a metric of one number, or of one per class; for a curve or a matrix, call the object in a loop of "
        "your own over program.bind(state)",
    )
