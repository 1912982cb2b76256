"""Seed and restore the generators that data code draws from: torch's, numpy's and Python's global ones, together.

Datasets, samplers, collate functions and iterables run inside `scoped`, so that their draws depend only on a seed, and
the caller's generators stay unchanged. Imports of libraries that draw run inside it too.
"""

from __future__ import annotations

import os
import random
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from .. import rng
from ..torch_ext import global_rng, host_generators

NONE: Mapping[str, Any] = MappingProxyType({})
"""The result of `own` for an object without generators."""


@contextmanager
def scoped(number: int, more: Mapping[str, Any] = NONE) -> Generator[None]:
    """Seed the three generators inside the block and restore them after it (60 us), under `global_rng.locked`.

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True

    Args:
        number: in [0, 2**63).
        more: generators from `own`. Each gets its own seed and is not restored, because other code may share it.
    """
    with rng.scoped(number), host_generators.scoped(number):  # the first holds the lock
        _seed_own(number, more)
        yield


if hasattr(os, "register_at_fork"):  # a loader's worker, forked while another thread holds the lock
    os.register_at_fork(after_in_child=global_rng.replace_lock)


def seed(number: int, more: Mapping[str, Any] = NONE) -> None:
    """Seed the three generators, and more. Call it inside `scoped`, which restores the three. 9 us, 6 for Python's.

    Example:
        >>> with scoped(1):
        ...     seed(2)
        ...     second = random.random()
        >>> with scoped(2):
        ...     print(random.random() == second)
        True

    Args:
        number: in [0, 2**63).
        more: generators from `own`.
    """
    global_rng.seed_cpu(number)
    host_generators.seed(number)
    _seed_own(number, more)


def _seed_own(number: int, generators: Mapping[str, Any]) -> None:
    """Give each generator its own seed, from ``number`` and its path."""
    for path, generator in generators.items():
        _seed(generator, rng.mix(number, path))


def own(*owners: Any) -> dict[str, Any]:
    """The random generators in the attributes of objects, by path, for `scoped` and `seed`.

    Example:
        >>> class Sampler:
        ...     def __init__(self):
        ...         self.rng = random.Random()
        >>> one, other = Sampler(), Sampler()
        >>> with scoped(1, own(one)):
        ...     first = one.rng.random()
        >>> with scoped(1, own(other)):
        ...     print(other.rng.random() == first)
        True

    Args:
        owners: samplers, iterables, datasets, collate objects.
    """
    found: dict[int, tuple[str, Any]] = {}
    for path, value in attributes(*owners):
        if isinstance(value, KINDS):
            found.setdefault(id(value), (path, value))
    return dict(found.values())


def attributes(*owners: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of objects by path, and those of the objects in them: datasets, samplers, iterables, objects whose
    class is of the same module, and the entries of dicts and short lists.

    Example:
        >>> list(attributes(types.SimpleNamespace(size=3, steps=["a"])))
        [('size', 3), ('steps', ['a']), ('steps/0', 'a')]
    """
    seen: set[int] = set()
    waiting = deque(("" if len(owners) == 1 else f"[{number}]", owner, "") for number, owner in enumerate(owners))
    while waiting and len(seen) < _MOST:
        path, part, home = waiting.popleft()
        if id(part) in seen or not (isinstance(part, _SEVERAL) or _is_object(part)):
            continue
        seen.add(id(part))
        held: Any = (
            enumerate(part) if isinstance(part, list | tuple) else part if isinstance(part, dict) else vars(part)
        )
        held = dict(held)
        if isinstance(part, DataLoader):  # torch manages its private attributes
            held = {name: value for name, value in held.items() if not name.startswith("_")}
        if isinstance(part, Sampler):  # they may be properties or slots
            held |= {name: getattr(part, name, None) for name in ("generator", "sampler")}
        home = home if isinstance(part, _SEVERAL) else type(part).__module__
        for name, value in held.items():
            place = f"{path}/{name}" if path else str(name)
            yield place, value
            is_short = isinstance(value, _SEVERAL) and len(cast("list[Any]", value)) <= _FEW
            if is_short or isinstance(value, Dataset | Iterable) or type(value).__module__ == home:
                waiting.append((place, value, home))


_SEVERAL = (list, tuple, dict)
_FEW = 64  # entries of a container that are searched, such as a list of transforms; a longer one is data
_MOST = 100_000  # objects that are searched


def _is_object(value: Any) -> bool:
    """True for an object with attributes that is no class, function, module or tensor."""
    others = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Tensor, np.ndarray)
    return hasattr(value, "__dict__") and not isinstance(value, others + KINDS)


KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def _seed(generator: Any, number: int) -> None:
    """Seed a generator of one of the `KINDS`."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(number).state
    else:  # its `seed` supports only one kind of bit generator
        state: Any = generator.get_state(legacy=False)
        fresh: Any = getattr(np.random, state["bit_generator"])(number).state
        generator.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


def states() -> tuple[object, ...]:
    """The states of the three generators, to compare (40 us). A draw that restores the state is missed.

    Example:
        >>> with scoped(1):
        ...     before = states()
        ...     _ = random.random()
        ...     print(states() == before)
        False
    """
    return (global_rng.cpu_state(), *host_generators.states())
