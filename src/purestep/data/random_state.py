"""The generators that data code draws from (torch's, numpy's and Python's global ones), taken as one.

Everything that runs a user's dataset, sampler, collate function or iterable does so inside `scoped`, so that what it
draws depends on a seed alone, and the caller's generators are as they were. So is the import of a library that draws.
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

from .. import global_rng, rng

EVERY = frozenset({"torch", "numpy", "python"})
"""The three generators."""

NONE: Mapping[str, Any] = MappingProxyType({})
"""What `own` finds where there is nothing."""


@contextmanager
def scoped(number: int, more: Mapping[str, Any] = NONE) -> Generator[None]:
    """Seed torch's, numpy's and Python's generators inside the block and restore them (60 us). Takes
    `global_rng.locked`.

    Args:
        number: in [0, 2**63).
        more: of `own`, each of them to draw from a seed of its own, and left where that has led it: one may be held by
            two loaders, or by a loader and its user.

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True
    """
    with global_rng.locked():
        bits, pythons = _global.get_bit_generator(), random.getstate()
        state: Any = np.random.get_state(legacy=False)
        spare = _spares.pop() if _spares else np.random.MT19937()

        def put_back() -> None:
            _global.set_bit_generator(bits)  # whose state nobody has touched
            if state["has_gauss"]:  # the second of a pair of normal numbers, which lies outside of it
                np.random.set_state(state)
            random.setstate(pythons)

        try:
            try:
                _global.set_bit_generator(spare)
                with rng.scoped(number):
                    np.random.seed(number & 0xFFFFFFFF)
                    random.seed(number)
                    seed_own(number, more)
                    yield
            finally:
                put_back()
        except BaseException:  # of the code inside, or a signal's while they are put back
            put_back()
            raise
        finally:
            _spares.append(spare)


_global: Any = np.random  # numpy's stubs lack the two functions that exchange the bit generator
_spares: list[np.random.MT19937] = []

if hasattr(os, "register_at_fork"):  # a worker of a loader, forked while another thread was drawing
    os.register_at_fork(after_in_child=global_rng.replace_lock)


def seed(number: int, generators: Collection[str] = EVERY) -> None:
    """Inside `scoped`: draw from another seed (9 us, of which Python's generator takes 6).

    Args:
        number: in [0, 2**63).
        generators: which of `EVERY`.

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
    if "numpy" in generators:
        np.random.seed(number & 0xFFFFFFFF)
    if "python" in generators:
        random.seed(number)


def seed_own(number: int, generators: Mapping[str, Any]) -> None:
    """Let each of these generators draw from a seed of its own.

    Args:
        number: in [0, 2**63).
        generators: as `own` finds them.

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
    """The generators that an object holds for itself, by the path to them, for `scoped`.

    What it iterates is looked into as well: samplers, loaders, datasets; so are closures and globals of their methods.
    One that is reached in another way (a list) is not found: where it stands depends on the epochs before, which a run
    that goes on has not drawn.

    Args:
        owner: a sampler, or something to iterate.

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
        if isinstance(part, Sampler):  # which may have them as properties or in slots
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
    """What the code of a function, or of an object's methods, reads from closures and globals, by name: random
    generators and iterators alone, which no attribute leads to.

    Example:
        >>> generator = random.Random()
        >>> outside(lambda: generator.random())
        {'generator': <random.Random object at ...>}
    """
    found: dict[str, Any] = {}
    for function in _functions(part):
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        read = {name: function.__globals__.get(name) for name in code.co_names} | {n: _content(c) for n, c in cells}
        found.update((name, value) for name, value in read.items() if isinstance(value, (*KINDS, Iterator)))
    return found


def _functions(part: Any) -> Iterator[types.FunctionType]:
    """A function, or the methods of an object that are in Python and not torch's."""
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
    """One of `KINDS`."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(number).state
    else:  # its `seed` knows but one kind of bit generator
        state: Any = generator.get_state(legacy=False)
        fresh: Any = getattr(np.random, state["bit_generator"])(number).state
        generator.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


class Watch(NamedTuple):
    """States of the three generators."""

    torchs: bytes
    numpys: tuple[Any, ...]
    pythons: tuple[Any, ...]

    def drawn(self) -> frozenset[str]:
        """The generators of `EVERY` that were drawn from or seeded since. Code that reads a state, or draws and puts
        it back, goes unnoticed."""
        pairs = zip(("torch", "numpy", "python"), self, watch(), strict=True)
        return frozenset(name for name, before, after in pairs if before != after)


def watch() -> Watch:
    """The present states of the generators (40 us).

    Example:
        >>> with scoped(1):
        ...     before = watch()
        ...     _ = random.random()
        ...     print(sorted(before.drawn()))
        ['python']
    """
    numpys: Any = np.random.get_state(legacy=False)
    bits = {name: _plain(value) for name, value in numpys["state"].items()}
    return Watch(global_rng.cpu_state(), (bits, numpys["has_gauss"], numpys["gauss"]), random.getstate())


def _plain(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value
