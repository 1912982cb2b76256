"""How `from_torch` finds out what an optimizer keeps, where, and what that is before its first step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import ConfigError, PurestepError
from ..types import Params
from .foreign import Maker, Outcome, Slots, frozen, make, run, split


class Start(NamedTuple):
    """What an optimizer keeps before its first step."""

    slots: Slots
    group: dict[str, Any]
    is_whole: bool  # False: the first step makes things of other types or shapes, and only those are right here


class Findings(NamedTuple):
    """What `probe` sees."""

    group_keys: tuple[str, ...]  # what changes in the parameter group
    fill: float  # of the gradient in a step that fills the whole state
    first_differs: bool  # the first step is no step from the state before it


class _Recorder(dict[str, Any]):
    """A state dict that remembers the first value of every key, before the step changes it in place."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(given)

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, copy.deepcopy(value))
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def initial(maker: Maker, params: Params, found: Findings) -> Start:
    """The first value of every key in a step that leads nowhere, where the step keeps their types and shapes.

    Args:
        maker: the optimizer.
        params: name -> P.
        found: by `probe`.
    """
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    device = next(iter(params.values())).device
    with rng.scoped(0, device), torch.enable_grad():
        optimizer = make(maker, list(leaves.values()))
        recorders = {name: _Recorder(optimizer.state[leaf]) for name, leaf in leaves.items()}
        for name, leaf in leaves.items():
            optimizer.state[leaf] = recorders[name]
            leaf.grad = torch.full_like(leaf, found.fill)
        before = copy.deepcopy({key: value for key, value in _group(optimizer).items() if key in found.group_keys})
        optimizer.step()
    leaf = next(iter(leaves.values()))
    slots = {name: frozen(dict(optimizer.state[leaf]), leaf, maker.where) for name, leaf in leaves.items()}
    after = {key: value for key, value in _group(optimizer).items() if key in found.group_keys}
    group = frozen(after, leaf, maker.where)
    if before.keys() == after.keys():
        first = {name: frozen(recorders[name].first, leaf, maker.where) for name, leaf in leaves.items()}
        start = frozen(before, leaf, maker.where)
        if tree.signature((first, start)) == tree.signature((slots, group)):
            return Start(first, start, is_whole=True)
    return Start(slots, group, is_whole=False)


def probe(maker: Maker, params: Params) -> Findings:
    """A few steps on a small tensor of each kind: what changes where, and whether the pure form does the same.

    Raises:
        ConfigError: for an optimizer that fails, gains keys after its first step, or keeps numbers elsewhere.
    """
    generator = rng.generator(rng.key(0), "from_torch")
    kinds = {(param.ndim, param.dtype): name for name, param in params.items()}
    small: Params = {}
    for name in kinds.values():
        shape = [min(length, 3) for length in params[name].shape]
        small[name] = torch.randn(shape, generator=generator).to(params[name].dtype)
    try:
        found = _look(maker, small)
        _reproduce(maker, small, found)
    except PurestepError:
        raise
    except Exception as error:  # whatever a foreign optimizer raises
        hint = "an optimizer whose step() runs on gradients alone"
        raise ConfigError(f"a step failed: {error}", where=maker.where, hint=hint) from error
    return found


def _look(maker: Maker, small: Params) -> Findings:
    optimizer, leaves = _native(maker, small)
    before, own = copy.deepcopy(_group(optimizer)), _numbers(optimizer)
    keys: list[dict[str, set[str]]] = []
    for count in range(3):
        _native_step(optimizer, leaves, small, count)
        keys.append({name: set(optimizer.state[leaf]) for name, leaf in leaves.items()})
    if keys[0] != keys[-1]:
        new = sorted({key for name in small for key in keys[0][name] ^ keys[-1][name]})
        hint = "an optimizer whose state has the same keys from its first step on"
        raise ConfigError(f"its state gained or lost {new} after the first step", where=maker.where, hint=hint)
    elsewhere = [key for key, value in own.items() if not _is_same(value, _numbers(optimizer).get(key))]
    keyed: Any = optimizer.state  # some have other keys than tensors
    elsewhere += [f"state[{key!r}]" for key in keyed if not isinstance(key, Tensor)]
    if elsewhere:
        hint = "an optimizer that keeps its state by parameter or in `param_groups`"
        raise ConfigError(f"it keeps {', '.join(elsewhere)} on itself", where=maker.where, hint=hint)
    after = _group(optimizer)
    changed = tuple(key for key in after if key not in before or not _is_same(before[key], after[key]))
    # Without a gradient some make no state at all.
    quiet = initial(maker, small, Findings(changed, 0.0, False))
    is_filled = all({split(key)[0] for key in quiet.slots[name]} == keys[0][name] for name in small)
    is_filled = is_filled and {split(key)[0] for key in quiet.group} == set(changed)
    found = Findings(changed, 0.0 if is_filled else 1.0, False)
    return found._replace(first_differs=_first_differs(maker, small, found))


def _first_differs(maker: Maker, small: Params, found: Findings) -> bool:
    start = initial(maker, small, found)
    if not start.is_whole:
        return True
    outcomes: list[Outcome] = []
    for is_first in (True, False):
        with rng.scoped(0):
            outcomes.append(run(maker, small, small, start.slots, start.group, is_first=is_first))
    return not _is_same(*outcomes)


def _reproduce(maker: Maker, small: Params, found: Findings) -> None:
    optimizer, leaves = _native(maker, small)
    start = initial(maker, small, found)
    pure = Outcome(small, start.slots, start.group)
    for count in range(4):
        _native_step(optimizer, leaves, small, count)
        with rng.scoped(count):
            is_first = found.first_differs and count == 0
            pure = run(maker, pure.params, _gradients(small, count), pure.slots, pure.group, is_first=is_first)
        if not all(torch.allclose(pure.params[n], leaves[n], rtol=1e-5, equal_nan=True) for n in small):
            hint = "an optimizer that keeps its state by parameter or in `param_groups`"
            what = "rebuilt from its state it makes other updates: it keeps something elsewhere"
            raise ConfigError(what, where=maker.where, hint=hint)


def _native(maker: Maker, small: Params) -> tuple[torch.optim.Optimizer, Params]:
    leaves = {name: param.clone().requires_grad_() for name, param in small.items()}
    with rng.scoped(0):
        return make(maker, list(leaves.values())), leaves


def _native_step(optimizer: torch.optim.Optimizer, leaves: Params, small: Params, count: int) -> None:
    for name, grad in _gradients(small, count).items():
        leaves[name].grad = grad
    with rng.scoped(count):
        optimizer.step()


def _gradients(small: Params, count: int) -> Params:
    return {name: torch.cos(3 * param + count) for name, param in small.items()}


def _group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    return {key: copy.deepcopy(value) for key, value in own.items() if isinstance(value, int | float | Tensor)}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)
