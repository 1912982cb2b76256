"""Blocks whose parameters are gathered one by one: in the forward pass, and again in the backward pass (ZeRO-3)."""

from __future__ import annotations

import fnmatch
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError, StepContractError
from ..model import functional
from ..types import Params
from . import passes, placement
from .placement import Leaf

_WHERE = "distribute"
_UNIT = "_purestep_unit"


class Unit(NamedTuple):
    """Facts of a block with which it gathers its parameters."""

    name: str
    leaves: tuple[tuple[str, Leaf], ...]  # (name in the block, leaf as one process of the axis "tensor" has it)
    width: int
    wrapped: Callable[[Params], Params]  # parameters by their names in the model -> as DTensors, under tensor parallel


class Shown(Mapping[str, Tensor]):
    """Parameters by name, some of which are pieces of the whole: reading those raises StepContractError."""

    def __init__(self, params: Params, hidden: frozenset[str]) -> None:
        self._params, self._hidden = params, hidden

    def __getitem__(self, name: str) -> Tensor:
        if name in self._hidden:
            raise StepContractError(
                "the parameter is whole only inside of its unit, and cannot be read by the objective",
                where=f"model.params/{name}",
                hint="leave the layer out of units=[...] of ps.distribute",
            )
        return self._params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def names_of(patterns: Any, module: nn.Module) -> list[str]:
    """The names of the blocks that patterns match.

    Raises:
        ConfigError: a pattern matches no block, or a block lies inside of another one.
    """
    cure = 'units=["blocks.*"]'
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"units={patterns!r} is not a list of names", where=_WHERE, hint=cure)
    names = [name for name, _ in module.named_modules() if name]
    found: list[str] = []
    for pattern in patterns:  # pyright: ignore[reportUnknownVariableType]
        # A star stands for one part of a name: blocks.* are the blocks, not their layers.
        parts: list[str] = str(pattern).split(".")  # pyright: ignore[reportUnknownArgumentType]
        matched = [name for name in names if _matches(name.split("."), parts)]
        if not matched:
            raise ConfigError(
                f"units has {pattern!r}, which matches no module", where=_WHERE, hint=f"names are like {names[:3]}"
            )
        found += [name for name in matched if name not in found]
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(f"the unit {name} lies inside of the unit {outer}", where=_WHERE, hint=cure)
    return found


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatch.fnmatchcase, name, pattern))


def leaves_of(names: Sequence[str], leaves: Sequence[Leaf], ties: Mapping[str, str]) -> dict[str, list[Leaf]]:
    """The parameters of each block that are gathered with it: those in pieces that no other part of the model uses.

    Args:
        names: of the blocks.
        leaves: of the model.
        ties: alias -> name of a parameter.

    Raises:
        ConfigError: a block has no such parameter.
    """
    found: dict[str, list[Leaf]] = {}
    for unit in names:
        elsewhere = {name for alias, name in ties.items() if not alias.startswith(f"{unit}.")}
        found[unit] = [
            leaf for leaf in leaves if leaf.is_cut and leaf.name.startswith(f"{unit}.") and leaf.name not in elsewhere
        ]
        if found[unit]:
            continue
        what, hint = f"the unit {unit} has no parameters in pieces", 'params="shard", or leave the unit out'
        for leaf in leaves:
            tied = [leaf.name, *(alias for alias, name in ties.items() if name == leaf.name)]
            inside = [name for name in tied if name.startswith(f"{unit}.")]
            if leaf.is_cut and inside:
                outside = next(name for name in tied if name not in inside)
                what = f"{inside[0]} of the unit {unit} is tied to {outside}, so that it is gathered for the whole call"
                hint = "leave the unit out of units=[...]: it has no other parameters in pieces"
        raise ConfigError(what, where=_WHERE, hint=hint)
    return found


def gathering(units: Mapping[str, Unit]) -> Callable[[nn.Module], None]:
    """Return a function that lets blocks gather their own parameters, of which the weights are then pieces."""

    def change(module: nn.Module) -> None:
        for name, unit in units.items():
            block: Any = module.get_submodule(name)
            setattr(block, _UNIT, (unit, block.forward))
            block.forward = types.MethodType(_forward, block)
            if getattr(block, "gradient_checkpointing", False):  # of Hugging Face: the unit is computed again anyway
                block._gradient_checkpointing_func = _called

    return change


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    """The block's forward method with whole parameters, which live only during it. The backward pass repeats it."""
    unit, forward = getattr(block, _UNIT)
    current = passes.current()
    current.close_unit()
    pieces: list[tuple[Leaf, Tensor]] = [(leaf, operator.attrgetter(name)(block)) for name, leaf in unit.leaves]
    is_repeated = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_repeated
        passes.meet(f"the parameters of {unit.name}")
        current.close_unit()
        named: Params = {}
        for is_trained in (True, False):  # no gradients of frozen parameters are computed, and none are sent
            chosen = [(leaf, held) for leaf, held in pieces if leaf.is_trained == is_trained]
            whole = placement.all_gathered(chosen, unit.width, differentiable=is_trained)
            named |= placement.by_name([leaf for leaf, _ in chosen], whole)
        named = unit.wrapped(named)
        inner = {name: named[leaf.name] for name, leaf in unit.leaves}
        if is_repeated:
            _open(block, inner, current)
            return forward(*args, **kwargs)
        is_repeated = True
        return functional.with_weights(block, inner, lambda: forward(*args, **kwargs))

    # Not as keywords of `checkpoint`, which has some of its own.
    return checkpoint(functools.partial(run, **kwargs), *args, use_reentrant=False)


def _open(block: Any, inner: Params, current: passes.Pass) -> None:
    """Leave whole parameters in a block that the backward pass has computed again: activation checkpointing inside of
    it repeats its parts later. They leave with the next unit, or at the end of the backward pass."""
    owners = [(block.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in inner]
    pieces = [owner._parameters[attribute] for owner, attribute in owners]

    def put(values: Sequence[Any]) -> None:
        for (owner, attribute), value in zip(owners, values, strict=True):
            owner._parameters[attribute] = value

    put(list(inner.values()))
    current.unit = lambda: put(pieces)
    torch.autograd.Variable._execution_engine.queue_callback(current.close_unit)  # pyright: ignore[reportPrivateUsage]  # no public name
