"""Transforms for a subset of the parameters: masks, parameter groups, freezing, and the weight decay mask.

``init`` resolves a mask once, on the named tree, and stores the selected names in the structure of the state, as a dict
without leaves. ``update`` uses only these names, so it also works on flat buffers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from ..errors import ConfigError, StateError
from ..model import unwrapped
from ..state import known_keywords, nearest, nearest_names
from ..types import Empty, Labels, Params, Tree
from .base import Norms, Transform, described, stateless, unknown, updated

Mask: TypeAlias = str | Mapping[str, bool] | Callable[[Params], Mapping[str, bool]]
"""A regular expression searched in names; name -> bool; or a function ``params -> {name: bool}``."""
Rules: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[Params], Mapping[str, str]]
"""Name -> label; (regular expression, label) pairs, the first match counts; or ``params -> {name: label}``."""


class MaskedState(NamedTuple):
    """State of `masked`: the selected names and the state of the inner transform."""

    selected: dict[str, Empty]  # no leaves: the mask is part of the structure
    inner: Tree  # Empty if nothing is selected


@known_keywords
def masked(inner: Transform, mask: Mask) -> Transform:
    r"""Apply ``inner`` to the selected parameters; pass the updates of the others through.

    Example:
        >>> from purestep.optim import scale
        >>> tx = masked(scale(0.0), r"bias$")
        >>> params = {"weight": torch.ones(1), "bias": torch.ones(1)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> {name: u.item() for name, u in updates.items()}
        {'weight': 1.0, 'bias': 0.0}

    Args:
        inner: any transform. It keeps state for the selected parameters only.
        mask: name -> bool for every parameter, a function ``params -> mask``, or a regular expression.

    Raises:
        ConfigError: at init, the mask has no entry for a parameter, or the expression matches no parameter.
        StateError: at update, the state belongs to other parameters.
    """

    def init(params: Params) -> MaskedState:
        return _init_selected(inner, [name for name, chosen in _resolve(mask, params).items() if chosen], params)

    def update(
        updates: Params, state: MaskedState, params: Params, norms: Norms | None = None
    ) -> tuple[Params, MaskedState]:
        changed, new_state = _update_selected(inner, updates, state, params, norms)
        return {name: changed.get(name, u) for name, u in updates.items()}, new_state

    def labels(params: Params) -> Labels:
        chosen = _resolve(mask, params)
        within = inner.labels({name: param for name, param in params.items() if chosen[name]})
        return {name: (True, within[name]) if chosen[name] else (False,) for name in params}

    whole = Transform(init, update, inner.elementwise, labels)
    return described(whole, "masked", takes_norms=True, inner=inner)


@known_keywords
def freeze(mask: Mask) -> Transform:
    """Set the updates of the selected parameters to zero. Put it last in a chain, after weight decay.

    Example:
        >>> tx = freeze("encoder")
        >>> params = {"encoder.weight": torch.ones(1), "head.weight": torch.ones(1)}
        >>> [u.item() for u in tx.update(params, tx.init(params), params)[0].values()]
        [0.0, 1.0]

    Use it for parameters that do not train in one phase of a run, or whose gradient counts in a global norm. It still
    costs a gradient and moments; a parameter with ``requires_grad=False`` costs neither. The frozen set is fixed when
    the program is built. To unfreeze, call ``ps.load_into(model, state)`` and ``model.requires_grad_(True)``, and
    continue with a new program of the model in another snapshot directory.

    Args:
        mask: the parameters to freeze, as in `masked`.

    Raises:
        ConfigError: at init, the mask does not fit, as in `masked`.
        StateError: at update, the state belongs to other parameters.
    """
    return masked(set_to_zero(), mask)


def set_to_zero() -> Transform:
    """Set all updates to zero: the transform of a group that does not train.

    Example:
        >>> set_to_zero().update({"w": torch.ones(1)}, Empty(), {})[0]["w"].item()
        0.0
    """
    return stateless(lambda updates, _: {name: torch.zeros_like(u) for name, u in updates.items()}, elementwise=True)


class PartitionState(NamedTuple):
    """State of `partition`."""

    groups: dict[str, MaskedState]  # label -> the names in this group and the state of its transform


@known_keywords
def partition(transforms: Mapping[str, Transform], labels: Rules) -> Transform:
    r"""Apply a different transform to each group of parameters.

    Example:
        >>> from purestep.optim import scale
        >>> tx = partition({"slow": scale(0.1), "fast": scale(1.0)}, [(r"^encoder\.", "slow"), ("", "fast")])
        >>> params = {"encoder.w": torch.ones(1), "head.w": torch.ones(1)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> [round(u.item(), 2) for u in updates.values()]
        [0.1, 1.0]

    Args:
        transforms: label -> transform. A label without parameters costs nothing.
        labels: name -> label for every parameter; or ``(regular expression, label)`` pairs, searched in the name, where
            the first match counts; or a function ``params -> {name: label}``.

    Raises:
        ConfigError: at init, a parameter has no label, a label has no transform, or an expression matches no parameter.
        StateError: at update, the state belongs to other parameters.
    """
    transforms = dict(transforms)
    labels = labels if callable(labels) or isinstance(labels, Mapping) else tuple(labels)

    def init(params: Params) -> PartitionState:
        label_of = _resolve_labels(labels, params, transforms)
        names = {label: [name for name in params if label_of[name] == label] for label in transforms}
        return PartitionState({label: _init_selected(tx, names[label], params) for label, tx in transforms.items()})

    def update(
        updates: Params, state: PartitionState, params: Params, norms: Norms | None = None
    ) -> tuple[Params, PartitionState]:
        changed: Params = {}
        groups: dict[str, MaskedState] = {}
        for label, tx in transforms.items():
            new, groups[label] = _update_selected(tx, updates, state.groups[label], params, norms)
            changed.update(new)
        return {name: changed[name] for name in updates}, PartitionState(groups)

    def group_labels(params: Params) -> Labels:
        label_of = _resolve_labels(labels, params, transforms)
        result: Labels = {}
        for label, tx in transforms.items():
            within = tx.labels({name: param for name, param in params.items() if label_of[name] == label})
            result.update({name: (label, inner) for name, inner in within.items()})
        return {name: result[name] for name in params}

    whole = Transform(init, update, all(tx.elementwise for tx in transforms.values()), group_labels)
    return described(whole, "partition", takes_norms=True, transforms=transforms)


def _init_selected(inner: Transform, names: Iterable[str], params: Params) -> MaskedState:
    selected = {name: Empty() for name in names}
    return MaskedState(selected, inner.init({name: params[name] for name in selected}) if selected else Empty())


def _update_selected(
    inner: Transform, updates: Params, state: MaskedState, params: Params, norms: Norms | None
) -> tuple[Params, MaskedState]:
    if not state.selected:
        return {}, state
    missing = next((name for name in state.selected if name not in updates), None)
    if missing is not None:
        raise StateError("the optimizer state belongs to other parameters", where=missing, hint="tx.init(params)")
    chosen = {name: updates[name] for name in updates if name in state.selected}
    own = {name: params[name] for name in chosen}
    changed, new_inner = updated(inner, chosen, state.inner, own, unknown(norms))
    return changed, MaskedState(state.selected, new_inner)


def _resolve(mask: Mask, params: Params) -> dict[str, bool]:
    if isinstance(mask, str):
        selected = {name: re.search(mask, name) is not None for name in params}
        if not any(selected.values()):
            raise ConfigError(f"{mask!r} matches no parameter", where="mask", hint=nearest_names(mask, params))
        return selected
    hint = f'mask=optim.decay_mask(model), {{"{_first(params)}": True, ...}}, or a regular expression'
    try:
        resolved: Any = mask(params) if callable(mask) else mask
    except (TypeError, AttributeError) as error:
        what = f"as a function it is called with the dict of the parameters by name, and fails: {error}"
        raise ConfigError(what, where="mask", hint=hint) from error
    if not isinstance(resolved, Mapping):
        raise ConfigError(f"it is a {type(resolved).__name__}, not a mapping of names", where="mask", hint=hint)
    resolved = cast(Mapping[str, Any], resolved)
    missing = [name for name in params if name not in resolved]
    if missing:
        hint = f'mask={{**mask, "{missing[0]}": False}}'
        raise ConfigError(f"it has no entry for {_shortened(missing)}", where="mask", hint=hint)
    return {name: bool(resolved[name]) for name in params}


def _resolve_labels(labels: Rules, params: Params, transforms: Mapping[str, Transform]) -> dict[str, str]:
    if callable(labels):
        resolved = labels(params)
    elif isinstance(labels, Mapping):
        resolved = labels
    else:
        matches = {name: [label for pattern, label in labels if re.search(pattern, name)] for name in params}
        resolved = {name: matched[0] for name, matched in matches.items() if matched}
        for pattern, label in labels:
            if params and not any(re.search(pattern, name) for name in params):
                raise ConfigError(
                    f"the rule {(pattern, label)} matches no trained parameter",
                    where="partition",
                    hint=f"{nearest_names(pattern, params)}; remove the rule if its parameters are frozen",
                )
    for name in params:
        if name not in resolved:
            hint = f'add ("", "{_first(transforms)}") as the last rule, for all remaining parameters'
            raise ConfigError("no label for this parameter", where=name, hint=hint)
        if resolved[name] not in transforms:
            hint = f"one of {', '.join(map(repr, transforms))}"
            raise ConfigError(f"no transform for label {resolved[name]!r}", where=name, hint=hint)
    return {name: resolved[name] for name in params}


def _shortened(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _first(names: Iterable[str]) -> str:
    return next(iter(names), "")


def decay_mask(model: torch.nn.Module, *, skip: Sequence[str] = ()) -> dict[str, bool]:
    """Mask of the parameters that should decay: all but biases, norm weights, and tensors of fewer than 2 dimensions.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> decay_mask(net)
        {'0.weight': True, '0.bias': False, '1.weight': False, '1.bias': False}

    Args:
        model: a module; a tied parameter is in the mask under each of its names.
        skip: further parameters that do not decay: full names, or any part between two dots (``"pos_embed"``). One
            name of a tied parameter is enough.

    Returns:
        name -> bool. A module is a norm if its class name contains "norm".

    Raises:
        ConfigError: no parameter has a name in ``skip``.
    """
    model = unwrapped(model)
    mask: dict[str, bool] = {}
    words: dict[int, set[str]] = {}  # id of a parameter -> all its names and their parts
    named: dict[str, set[str]] = {}  # full name -> the same set
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
            near = nearest(entry, sorted(known)) or _first(mask)
            raise ConfigError(f"no parameter is named {entry!r}", where="decay_mask", hint=f'skip=("{near}",)')
    return {full: keep and not named[full] & set(skip) for full, keep in mask.items()}
