"""numpy's and Python's global generators, from which host code in datasets and models draws.

Callers must hold `global_rng.locked`: all threads of a process share the generators.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

_global: Any = np.random  # numpy's stubs lack the two functions that exchange the bit generator
_SPARES: list[np.random.MT19937] = []


@contextmanager
def scoped(number: int) -> Generator[None]:
    """Seed both generators with ``number``, in [0, 2**63), inside, and restore them afterwards (60 us, of which 30 read
    numpy's state)."""
    bits, numpys, pythons = _global.get_bit_generator(), np.random.get_state(legacy=False), random.getstate()
    spare = _SPARES.pop() if _SPARES else np.random.MT19937()
    try:
        _global.set_bit_generator(spare)
        seed(number)
        yield
    finally:
        _global.set_bit_generator(bits)  # nothing has advanced it in the meantime
        if numpys["has_gauss"]:  # the second of a pair of normal numbers, stored outside of the bit generator
            np.random.set_state(numpys)
        random.setstate(pythons)
        _SPARES.append(spare)


def seed(number: int) -> None:
    """Seed both generators inside `scoped` (9 us, of which 6 for Python's)."""
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def states() -> tuple[object, object]:
    """The present states of numpy's and Python's generators as values that ``==`` compares: each draw and each seeding
    changes them (35 us).

    Example:
        >>> with scoped(1):
        ...     before = states()
        ...     _ = random.random()
        ...     print([one == other for one, other in zip(before, states())])
        [True, False]
    """
    numpys = np.random.get_state(legacy=False)
    bits = numpys["state"]
    known = tuple(bits[name].tobytes() if isinstance(bits[name], np.ndarray) else bits[name] for name in sorted(bits))
    return (known, numpys["bit_generator"], numpys["has_gauss"], numpys["gauss"]), random.getstate()
