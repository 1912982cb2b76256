"""Parameters without a gradient in an update: as in torch, they and all that is kept for them stay as they are."""

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
"""Name -> whether a gradient has reached the parameter, shape=(), dtype=bool; None: none has."""


def skip(reached: Reached, params: Params, old: Tree, new: Tree) -> Tree:
    """A transform's new state with the entries of some parameters as they were.

    Entries are what stands under a parameter's name in a dict that has no other keys than parameters' names. Counts of
    updates are one for all parameters; where a state keeps a `Missed` beside its count, the update is counted there.

    Args:
        reached: the parameters to leave as they are.
        params: name -> P, all of them.
        old: of a transform, before its update.
        new: after it.

    Example:
        >>> from purestep.optim import trace
        >>> params = {"a": torch.ones(1), "b": torch.ones(1)}
        >>> tx = trace(0.5)
        >>> old = tx.init(params)
        >>> new = skip({"b": None}, params, old, tx.update(params, old, params)[1])
        >>> {name: value.item() for name, value in new.trace.items()}
        {'a': 1.0, 'b': 0.0}
    """
    return _skipped(reached, params.keys(), old, new) if reached else new


def _skipped(reached: Reached, names: Collection[str], old: Any, new: Any) -> Any:
    if isinstance(new, Missed):
        return _counted(reached, new)
    if isinstance(new, InjectState):  # whose hyperparameters may go by a parameter's name
        return new._replace(inner=_skipped(reached, names, old.inner, new.inner))
    if isinstance(new, PartitionState):  # whose labels may
        groups = {label: _skipped(reached, names, old.groups[label], group) for label, group in new.groups.items()}
        return PartitionState(groups)
    if isinstance(new, MaskedState):
        return new._replace(inner=_skipped(reached, names, old.inner, new.inner))
    if isinstance(new, dict):
        if new and all(key in names for key in new):
            return {key: _chosen(reached[key], old[key], new[key]) if key in reached else new[key] for key in new}
        return {key: _skipped(reached, names, old[key], new[key]) for key in new}
    if isinstance(new, list | tuple):
        parts = [_skipped(reached, names, one, other) for one, other in zip(old, new, strict=True)]
        return type(new)(*parts) if hasattr(new, "_fields") else type(new)(parts)
    return new


def _chosen(reached: Tensor | None, old: Tree, new: Tree) -> Tree:
    return old if reached is None else tree.where(reached, new, old)


def _counted(reached: Reached, missed: Missed) -> Missed:
    if not any(name in reached for name in missed.names):
        return missed
    counts = dict(zip(sorted(missed.names), missed.counts.unbind(), strict=True))
    for name in sorted(counts.keys() & reached.keys()):
        flag = reached[name]
        counts[name] = counts[name] + (1 if flag is None else ~flag)
    return missed._replace(counts=torch.stack([counts[name] for name in sorted(counts)]))
