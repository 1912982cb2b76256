"""Seed and restore the generators that data code draws from: torch's, numpy's and Python's global ones, together.

Datasets, samplers, collate functions and iterables run inside `scoped`, so that their draws depend only on a seed, and
the caller's generators stay unchanged. Imports of libraries that draw run inside it too.
"""

from __future__ import annotations

import os
import random
import types
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .. import rng
from ..torch_ext import global_rng, host_generators

EVERY = frozenset({"torch", "numpy", "python"})
"""The three generators."""

NONE: Mapping[str, Any] = MappingProxyType({})
"""The result of `own` for an object without generators."""


@contextmanager
def scoped(number: int, more: Mapping[str, Any] = NONE) -> Generator[None]:
    """Seed the three generators inside the block and restore them after it (60 us), under `global_rng.locked`.

    Args:
        number: in [0, 2**63).
        more: generators from `own`. Each gets its own seed and is not restored, because other code may share it.

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True
    """
    with rng.scoped(number), host_generators.scoped(number):  # the first holds the lock
        seed_own(number, more)
        yield


if hasattr(os, "register_at_fork"):  # a loader's worker, forked while another thread holds the lock
    os.register_at_fork(after_in_child=global_rng.replace_lock)


def seed(number: int, generators: Collection[str] = EVERY) -> None:
    """Seed the global generators. Call it inside `scoped`, which restores them. 9 us, 6 of them for Python's.

    Args:
        number: in [0, 2**63).
        generators: a subset of `EVERY`.

    Example:
        >>> with scoped(1):
        ...     seed(2)
        ...     second = random.random()
        >>> with scoped(2):
        ...     print(random.random() == second)
        True
    """
    if "torch" in generators:
        global_rng.seed_cpu(number)
    host_generators.seed(number, generators)


def seed_own(number: int, generators: Mapping[str, Any]) -> None:
    """Give each generator its own seed, from ``number`` and its path.

    Args:
        number: in [0, 2**63).
        generators: the result of `own`.

    Example:
        >>> generator = random.Random()
        >>> seed_own(1, {"rng": generator})
        >>> first = generator.random()
        >>> seed_own(1, {"rng": generator})
        >>> generator.random() == first
        True
    """
    for path, generator in generators.items():
        _seed(generator, rng.mix(number, path))


def own(owner: Any) -> dict[str, Any]:
    """The random generators in the attributes of an object, by path, for `scoped`.

    Searches the object, samplers, loaders and datasets in its attributes, and closures and globals of their methods,
    but no containers such as lists: the state of a generator there depends on earlier epochs, which a resumed run
    has not drawn.

    Args:
        owner: a sampler or an iterable.

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
    """
    found: dict[str, Any] = {}
    seen = {id(owner)}
    waiting: list[tuple[str, Any]] = [("", owner)]
    while waiting:
        path, part = waiting.pop()
        held = dict(getattr(part, "__dict__", {}))
        if isinstance(part, Sampler):  # they may be properties or slots
            held |= {name: getattr(part, name, None) for name in ("generator", "sampler")}
        held = outside(part) | held
        for name, value in held.items():
            if id(value) in seen:
                continue
            if isinstance(value, KINDS):
                found[path + name] = value
            elif isinstance(value, Dataset | Iterable) and hasattr(value, "__dict__"):
                waiting.append((f"{path}{name}/", value))
            else:
                continue
            seen.add(id(value))
    return found


def outside(part: Any) -> dict[str, Any]:
    """The random generators and iterators that a function, or the methods of an object, read from closures and globals.

    Example:
        >>> generator = random.Random()
        >>> outside(lambda: generator.random())
        {'generator': <random.Random object at ...>}
    """
    read: dict[str, Any] = {}
    for function in _functions(part):
        read.update((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    read |= closures(part)
    return {name: value for name, value in read.items() if isinstance(value, (*KINDS, Iterator))}


def closures(part: Any) -> dict[str, Any]:
    """The values in the closure of a function, or of the methods of an object.

    Example:
        >>> def source(order):
        ...     return lambda: iter(order)
        >>> closures(source([1, 2]))
        {'order': [1, 2]}
    """
    return {
        name: _content(cell)
        for function in _functions(part)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


def _functions(part: Any) -> Iterator[types.FunctionType]:
    """A function itself, or the Python methods of an object, except torch's."""
    if isinstance(part, types.FunctionType):
        yield part
        return
    for kind in type(part).__mro__:
        if not kind.__module__.startswith(("torch.", "builtins", "typing")):
            yield from (value for value in vars(kind).values() if isinstance(value, types.FunctionType))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


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


class Watch(NamedTuple):
    """States of the three generators."""

    torchs: bytes
    numpys: object
    pythons: object

    def drawn(self) -> frozenset[str]:
        """The generators of `EVERY` with a draw or a seeding since. A draw that restores the state is missed."""
        pairs = zip(("torch", "numpy", "python"), self, watch(), strict=True)
        return frozenset(name for name, before, after in pairs if before != after)


def watch() -> Watch:
    """The current states of the three generators (40 us).

    Example:
        >>> with scoped(1):
        ...     before = watch()
        ...     _ = random.random()
        ...     print(sorted(before.drawn()))
        ['python']
    """
    return Watch(global_rng.cpu_state(), *host_generators.states().comparable())
