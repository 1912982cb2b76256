"""Parameters without a gradient in an update: as in torch, neither they nor their optimizer state change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..types import Missed, Params, Tree
from .hyperparameters import InjectState
from .wrappers import MaskedState, PartitionState

Reached = Mapping[str, Tensor | None]
"""Name -> True if a gradient has reached the parameter, shape=(), dtype=bool; None: no gradient has."""


def skip(reached: Reached, params: Params, old: Tree, new: Tree) -> Tree:
    """Restore the entries of unused parameters in a transform's new state to their old values.

    Example:
        >>> from purestep.optim import trace
        >>> params = {"a": torch.ones(1), "b": torch.ones(1)}
        >>> tx = trace(0.5)
        >>> old = tx.init(params)
        >>> new = skip({"b": None}, params, old, tx.update(params, old, params)[1])
        >>> {name: value.item() for name, value in new.trace.items()}
        {'a': 1.0, 'b': 0.0}

    An entry is the value under a parameter's name in a dict whose keys are all parameter names. The update count is
    shared by all parameters; a state with a `Missed` counts there the updates that a parameter has missed.

    Args:
        reached: the parameters that may be unused.
        params: name -> P, all parameters.
        old: the transform's state before the update.
        new: the transform's state after the update.
    """
    return _restore(reached, params.keys(), old, new) if reached else new


def _restore(reached: Reached, names: Collection[str], old: Any, new: Any) -> Any:
    if isinstance(new, Missed):
        return _count_missed(reached, new)
    if isinstance(new, InjectState | MaskedState):  # A hyperparameter may have the name of a parameter.
        return new._replace(inner=_restore(reached, names, old.inner, new.inner))
    if isinstance(new, PartitionState):  # So may a label.
        groups = {label: _restore(reached, names, old.groups[label], group) for label, group in new.groups.items()}
        return PartitionState(groups)
    if isinstance(new, dict):
        if new and all(key in names for key in new):
            return {key: _select(reached[key], old[key], new[key]) if key in reached else new[key] for key in new}
        return {key: _restore(reached, names, old[key], new[key]) for key in new}
    if isinstance(new, list | tuple):
        parts = [_restore(reached, names, one, other) for one, other in zip(old, new, strict=True)]
        return type(new)(*parts) if hasattr(new, "_fields") else type(new)(parts)
    return new


def _select(reached: Tensor | None, old: Tree, new: Tree) -> Tree:
    return old if reached is None else tree.where(reached, new, old)


def _count_missed(reached: Reached, missed: Missed) -> Missed:
    if not any(name in reached for name in missed.names):
        return missed
    counts = dict(zip(sorted(missed.names), missed.counts.unbind(), strict=True))
    for name in sorted(counts.keys() & reached.keys()):
        flag = reached[name]
        counts[name] = counts[name] + (1 if flag is None else ~flag)
    return missed._replace(counts=torch.stack([counts[name] for name in sorted(counts)]))
