"""The updates that each parameter has had, and the bias corrections that depend on them.

As in torch, an update in which a parameter has no gradient does not count for it. A state that counts has the fields
``step`` and ``missed``. They start as `no_updates`; an update continues with ``state._replace(step=state.step + 1)``;
`unused_parameters` fills in the missed updates. An optimizer reads only `update_counts` and `bias_corrections`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_ext import tracing
from ..types import Empty, Missed, Params, Tree
from .arguments import Scalar
from .numerics import complement_power, scalar_dtype


class StepState(NamedTuple):
    """State of a transform that only counts updates."""

    step: Tensor  # shape=(), dtype=int64: updates done
    missed: Tree = Empty()  # see `counts`


def zero_count(params: Params) -> Tensor:
    """Return a counter at 0 on the device of the parameters. shape=(), dtype=int64."""
    device = next(iter(params.values())).device if params else None
    return torch.zeros((), dtype=torch.int64, device=device)


def no_updates(params: Params) -> dict[str, Any]:
    """Return the fields ``step`` and ``missed`` of a new state."""
    step = zero_count(params)
    return {"step": step, "missed": Missed(dict.fromkeys(params, Empty()), step.expand(len(params)).clone())}


def update_counts(state: Any, names: Collection[str]) -> Tensor:
    """Return each parameter's update count: of the updates done, those in which it had a gradient.

    Example:
        >>> state = StepState(**no_updates({"a": torch.ones(2), "b": torch.ones(2)}))._replace(step=torch.tensor(3))
        >>> update_counts(state, ["a", "b"]).unique().tolist()
        [3]
        >>> state = state._replace(missed=state.missed._replace(counts=torch.tensor([0, 2])))
        >>> update_counts(state, ["a", "b"]).tolist()
        [3, 1]

    Args:
        state: with ``step`` and ``missed``.
        names: of parameters, or of flat buffers; the parameters in one buffer have missed equally many updates.

    Returns:
        shape=() if all names have the same count, else shape=(n,); `numerics.by_name` splits it.
    """
    step, missed = state.step, state.missed
    if not isinstance(missed, Missed) or not names:
        return step
    counts = missed.counts
    if tracing.may_branch(counts) and not any(counts.tolist()):
        return step  # One scalar for all parameters is cheaper.
    if len(names) < len(missed.names):
        index = {name: position for position, name in enumerate(sorted(missed.names))}
        selected = [counts[index[name]] for name in sorted(names)]
        return step - (selected[0] if len(selected) == 1 else torch.stack(selected))
    return step - (counts[0] if len(names) == 1 else counts)


def bias_corrections(state: Any, updates: Params, *decays: Scalar) -> list[Tensor]:
    """Return ``1 - decay ** count`` for the update count of each parameter: the weight of all gradients in a mean.

    Args:
        state: with ``step`` and ``missed``, this update included.
        updates: name -> P.
        decays: of running means.

    Returns:
        For each decay: shape=(), or shape=(n,) with one for each name (`numerics.by_name`). The dtype is float64 if
        any update is, else float32.
    """
    counts, dtype = update_counts(state, updates), scalar_dtype(updates)
    return [complement_power(decay, counts, dtype) for decay in decays]
