"""numpy's and Python's global generators, which host code in datasets and models draws from.

Callers hold `global_rng.locked`: the generators are shared by all threads of a process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

BOTH = frozenset({"numpy", "python"})
"""The two generators."""

_global: Any = np.random  # numpy's stubs lack the two functions that exchange the bit generator
_SPARES: list[np.random.MT19937] = []


@contextmanager
def scoped(number: int) -> Generator[None]:
    """Seed both generators with ``number`` inside, and restore them afterwards (60 us).

    Args:
        number: in [0, 2**63).

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True
    """
    bits, pythons = _global.get_bit_generator(), random.getstate()
    numpys: Any = np.random.get_state(legacy=False)
    spare = _SPARES.pop() if _SPARES else np.random.MT19937()

    def put_back() -> None:
        _global.set_bit_generator(bits)  # which nothing inside has advanced
        if numpys["has_gauss"]:  # the second of a pair of normal numbers, which numpy keeps outside of it
            np.random.set_state(numpys)
        random.setstate(pythons)

    try:
        try:
            _global.set_bit_generator(spare)
            seed(number)
            yield
        finally:
            put_back()
    except BaseException:  # of the code inside, or a signal's during the restoring
        put_back()
        raise
    finally:
        _SPARES.append(spare)


def seed(number: int, generators: Collection[str] = BOTH) -> None:
    """Seed the generators inside `scoped` (9 us, of which Python's takes 6).

    Args:
        number: in [0, 2**63).
        generators: which of `BOTH`.

    Example:
        >>> with scoped(1):
        ...     seed(2)
        ...     second = random.random()
        >>> with scoped(2):
        ...     print(random.random() == second)
        True
    """
    if "numpy" in generators:
        np.random.seed(number & 0xFFFFFFFF)
    if "python" in generators:
        random.seed(number)


def position() -> tuple[object, object]:
    """The states of numpy's and of Python's generator, to compare (35 us): every draw and seeding changes them.

    Example:
        >>> with scoped(1):
        ...     before = position()
        ...     _ = random.random()
        ...     print([one == other for one, other in zip(before, position())])
        [True, False]
    """
    numpys: Any = np.random.get_state(legacy=False)
    bits = repr(sorted((name, _plain(value)) for name, value in numpys["state"].items()))
    return (numpys["bit_generator"], bits, numpys["has_gauss"], numpys["gauss"]), random.getstate()


def _plain(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value


class Host:
    """Whether a function draws from the two generators; the first calls show it.

    The first call that is seen to draw is made a second time, from a seed; later calls draw from their seed at once. To
    look takes 70 us, so the first 8 calls are looked at, then every 16th: a function that begins to draw later draws
    unseeded numbers until then.

    Example:
        >>> host = Host()
        >>> [host.call(random.random, seed) == host.call(random.random, seed) for seed in (1, 2)], host.draws
        ([True, True], True)
    """

    def __init__(self) -> None:
        self.draws = False
        """Whether a call has drawn."""
        self._calls = 0

    def call(self, function: Callable[[], Any], number: int, again: Callable[[], Any] | None = None) -> Any:
        """``function()``, which draws from ``number``; the generators stay as they were.

        Args:
            function: may be called twice, so it has no other effects.
            number: in [0, 2**63).
            again: makes the second call; ``function`` unless given.
        """
        if not self.draws:
            self._calls += 1
            if self._calls > 8 and self._calls % 16:
                return function()
            before, numpys, pythons = position(), np.random.get_state(legacy=False), random.getstate()
            bits = _global.get_bit_generator()
            try:
                found = function()
            finally:
                self.draws = position() != before
                if self.draws:
                    _global.set_bit_generator(bits)
                    np.random.set_state(numpys)
                    random.setstate(pythons)
            if not self.draws:
                return found
            del found
            function = again or function
        with scoped(number):
            return function()
