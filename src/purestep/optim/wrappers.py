"""Transforms for some of the parameters: masks, groups by path, frozen ones, and the mask of what weight decay is for.

A mask is resolved once, by ``init`` on the named tree, and lives on as the structure of the state: a dict of the
selected names without leaves. ``update`` never looks at shapes or at the mask again, so it may be given flat buffers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from ..errors import ConfigError, StateError
from ..model import uncompiled
from ..pickling import recipe
from ..types import Empty, Labels, Params, Tree
from .base import Transform, stateless

Mask: TypeAlias = str | Mapping[str, bool] | Callable[[Params], Mapping[str, bool]]
"""A regular expression searched in names, name -> bool, or a function of the parameters that gives one."""
Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[Params], Mapping[str, str]]
"""Name -> label, (regular expression, label) pairs of which the first match counts, or a function of the parameters."""


class MaskedState(NamedTuple):
    """State of `masked`: the names that the inner transform sees, and its state."""

    selected: dict[str, Empty]  # no leaves: the mask is structure
    inner: Tree  # Empty where nothing is selected


@recipe
def masked(inner: Transform, mask: Mask) -> Transform:
    r"""``inner`` for the selected parameters; the updates of the others pass as they are.

    Args:
        inner: any transform. It has state for the selected parameters alone.
        mask: name -> bool for every parameter, a function ``params -> mask``, or a regular expression.

    Raises:
        ConfigError: at init, for parameters that the mask does not mention, or an expression that matches nothing.
        StateError: at update, for a state of other parameters.

    Example:
        >>> from purestep.optim import scale
        >>> tx = masked(scale(0.0), r"bias$")
        >>> params = {"weight": torch.ones(1), "bias": torch.ones(1)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> {name: u.item() for name, u in updates.items()}
        {'weight': 1.0, 'bias': 0.0}
    """

    def init(params: Params) -> MaskedState:
        return _init_on(inner, [name for name, chosen in _resolve(mask, params).items() if chosen], params)

    def update(updates: Params, state: MaskedState, params: Params) -> tuple[Params, MaskedState]:
        changed, new_state = _update_on(inner, updates, state, params)
        return {name: changed.get(name, u) for name, u in updates.items()}, new_state

    def labels(params: Params) -> Labels:
        chosen = _resolve(mask, params)
        within = inner.labels({name: param for name, param in params.items() if chosen[name]})
        return {name: (True, within[name]) if chosen[name] else (False,) for name in params}

    return Transform(init, update, inner.elementwise, labels)


@recipe
def freeze(mask: Mask) -> Transform:
    """Zero updates for the selected parameters. The last part of a chain, so that no weight decay follows it.

    A parameter with ``requires_grad=False`` costs neither a gradient nor moments, this one does; it is for parameters
    that stay as they are in some phase of a run, or whose gradient counts in a global norm. What is frozen is fixed
    when a program is made. To unfreeze, ``ps.load_into(model, state)``, ``model.requires_grad_(True)``, and go on with
    another program of the model, in another directory of snapshots.

    Args:
        mask: which parameters stay as they are, as in `masked`.

    Raises:
        ConfigError: at init, for a mask that does not fit, as in `masked`.
        StateError: at update, for a state of other parameters.

    Example:
        >>> tx = freeze("encoder")
        >>> params = {"encoder.weight": torch.ones(1), "head.weight": torch.ones(1)}
        >>> [u.item() for u in tx.update(params, tx.init(params), params)[0].values()]
        [0.0, 1.0]
    """
    return masked(set_to_zero(), mask)


@recipe
def set_to_zero() -> Transform:
    """Updates of zeros: the transform of a group that does not train.

    Example:
        >>> set_to_zero().update({"w": torch.ones(1)}, Empty(), {})[0]["w"].item()
        0.0
    """
    return stateless(lambda updates, _: {name: torch.zeros_like(u) for name, u in updates.items()}, elementwise=True)


class PartitionState(NamedTuple):
    """State of `partition`."""

    groups: dict[str, MaskedState]  # label -> the names in this group and the state of its transform


@recipe
def partition(transforms: Mapping[str, Transform], labels: Rules) -> Transform:
    r"""Another transform for each group of parameters.

    Args:
        transforms: label -> transform. A label that no parameter has costs nothing.
        labels: name -> label for every parameter; or ``(regular expression, label)`` pairs, searched in the name, of
            which the first that matches counts; or a function ``params -> {name: label}``.

    Raises:
        ConfigError: at init, for a parameter without label or a label without transform.
        StateError: at update, for a state of other parameters.

    Example:
        >>> from purestep.optim import scale
        >>> tx = partition({"slow": scale(0.1), "fast": scale(1.0)}, [(r"^encoder\.", "slow"), ("", "fast")])
        >>> params = {"encoder.w": torch.ones(1), "head.w": torch.ones(1)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> [round(u.item(), 2) for u in updates.values()]
        [0.1, 1.0]
    """
    transforms = dict(transforms)

    def init(params: Params) -> PartitionState:
        found = _resolve_labels(labels, params, transforms)
        names = {label: [name for name in params if found[name] == label] for label in transforms}
        return PartitionState({label: _init_on(tx, names[label], params) for label, tx in transforms.items()})

    def update(updates: Params, state: PartitionState, params: Params) -> tuple[Params, PartitionState]:
        changed: Params = {}
        groups: dict[str, MaskedState] = {}
        for label, tx in transforms.items():
            new, groups[label] = _update_on(tx, updates, state.groups[label], params)
            changed.update(new)
        return {name: changed[name] for name in updates}, PartitionState(groups)

    def group_labels(params: Params) -> Labels:
        found = _resolve_labels(labels, params, transforms)
        result: Labels = {}
        for label, tx in transforms.items():
            within = tx.labels({name: param for name, param in params.items() if found[name] == label})
            result.update({name: (label, inner) for name, inner in within.items()})
        return {name: result[name] for name in params}

    return Transform(init, update, all(tx.elementwise for tx in transforms.values()), group_labels)


def _init_on(inner: Transform, names: Iterable[str], params: Params) -> MaskedState:
    selected = {name: Empty() for name in names}
    return MaskedState(selected, inner.init({name: params[name] for name in selected}) if selected else Empty())


def _update_on(inner: Transform, updates: Params, state: MaskedState, params: Params) -> tuple[Params, MaskedState]:
    if not state.selected:
        return {}, state
    unknown = next((name for name in state.selected if name not in updates), None)
    if unknown is not None:
        raise StateError("the optimizer's state is of other parameters", where=unknown, hint="tx.init(params)")
    chosen = {name: updates[name] for name in updates if name in state.selected}
    changed, new_inner = inner.update(chosen, state.inner, {name: params[name] for name in chosen})
    return changed, MaskedState(state.selected, new_inner)


def _resolve(mask: Mask, params: Params) -> dict[str, bool]:
    if isinstance(mask, str):
        found = {name: re.search(mask, name) is not None for name in params}
        if not any(found.values()):
            raise ConfigError(
                f"{mask!r} matches none of {_some(params)}", where="mask", hint=f'mask="{_first(params)}"'
            )
        return found
    given: Any = mask(params) if callable(mask) else mask
    if not isinstance(given, Mapping):
        hint = f'mask={{"{_first(params)}": True, ...}}, or a pattern'
        raise ConfigError(f"a {type(given).__name__} is no mapping of names", where="mask", hint=hint)
    given = cast(Mapping[str, Any], given)
    missing = [name for name in params if name not in given]
    if missing:
        hint = f'mask={{**mask, "{missing[0]}": False}}'
        raise ConfigError(f"nothing is said about {_some(missing)}", where="mask", hint=hint)
    return {name: bool(given[name]) for name in params}


def _resolve_labels(labels: Rules, params: Params, transforms: Mapping[str, Transform]) -> dict[str, str]:
    if callable(labels):
        given = labels(params)
    elif isinstance(labels, Mapping):
        given = labels
    else:
        matches = {name: [label for pattern, label in labels if re.search(pattern, name)] for name in params}
        given = {name: found[0] for name, found in matches.items() if found}
    for name in params:
        if name not in given:
            hint = f'("", "{_first(transforms)}") as the last rule takes the rest'
            raise ConfigError("no label for this parameter", where=name, hint=hint)
        if given[name] not in transforms:
            hint = f"one of {', '.join(map(repr, transforms))}"
            raise ConfigError(f"no transform for label {given[name]!r}", where=name, hint=hint)
    return {name: given[name] for name in params}


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _first(names: Iterable[str]) -> str:
    return next(iter(names), "")


def decay_mask(model: torch.nn.Module, *, skip: Sequence[str] = ()) -> dict[str, bool]:
    """Which parameters weight decay is for: not biases, not the weights of norms, nothing of fewer than 2 dimensions.

    Args:
        model: its parameters' names are the mask's, tied ones under each of their names.
        skip: further names that are not decayed: full ones, or any part between dots (``"pos_embed"``). Any name of a
            tied parameter will do.

    Returns:
        name -> bool. A module counts as a norm where its class has "norm" in its name.

    Raises:
        ConfigError: for an entry of ``skip`` that no parameter has.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> decay_mask(net)
        {'0.weight': True, '0.bias': False, '1.weight': False, '1.bias': False}
    """
    model = uncompiled(model)
    mask: dict[str, bool] = {}
    words: dict[int, set[str]] = {}  # of one parameter, whatever it is called: names and their parts
    named: dict[str, set[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_norm = "norm" in type(module).__name__.lower()
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            mask[full] = param.ndim >= 2 and name != "bias" and not is_norm
            named[full] = words.setdefault(id(param), set())
            named[full].update((full, *full.split(".")))
    known = set[str]().union(*words.values())
    for entry in skip:
        if entry not in known:
            near = difflib.get_close_matches(entry, sorted(known), n=1) or [_first(mask)]
            raise ConfigError(f"no parameter is named {entry!r}", where="decay_mask", hint=f'skip=("{near[0]}",)')
    return {full: keep and not named[full] & set(skip) for full, keep in mask.items()}
