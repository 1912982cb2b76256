"""The generators that data code draws from (torch's, numpy's and Python's global ones), taken as one.

Everything that runs a user's dataset, sampler, collate function or iterable does so inside `scoped`, so that what it
draws depends on a seed alone, and the caller's generators are as they were. So is the import of a library that draws.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import rng


@contextmanager
def scoped(number: int) -> Generator[None]:
    """Draw from ``number``, in [0, 2**63), and leave the three generators as they were (30 us).

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True
    """
    numpys, pythons = _numpys(), random.getstate()
    spare = _spares.pop() if _spares else np.random.MT19937()
    try:
        try:
            _global.set_bit_generator(spare)
            with seeded(number):
                yield
        finally:
            _put_back(numpys, pythons)
    except BaseException:  # of the code inside, or a signal's while they are put back
        _put_back(numpys, pythons)
        raise
    finally:
        _spares.append(spare)


class _Numpys(NamedTuple):
    """numpy's global generator. To read its state takes 60 us and to write it as long, so its bit generator is
    exchanged for a spare one. What lies outside of that is the second half of a pair of normal numbers."""

    bits: Any
    half: Any  # the state with that half; None where there is none


_global: Any = np.random  # numpy's stubs lack the two functions that exchange the bit generator
_spares: list[np.random.MT19937] = []
_whole: tuple[Any, bytes] | None = None  # a bit generator that was found without a half, and its memory at that time


def _numpys() -> _Numpys:
    bits = _global.get_bit_generator()
    if _whole is not None and _whole[0] is bits and _whole[1] == _memory(bits):
        return _Numpys(bits, None)  # nothing was drawn since
    state = np.random.get_state(legacy=False)
    return _Numpys(bits, state if state["has_gauss"] else None)


def _put_back(numpys: _Numpys, pythons: tuple[object, ...]) -> None:
    global _whole
    _global.set_bit_generator(numpys.bits)
    if numpys.half is not None:
        np.random.set_state(numpys.half)
    known = numpys.half is None and type(numpys.bits) is np.random.MT19937
    _whole = (numpys.bits, _memory(numpys.bits)) if known else None
    random.setstate(pythons)


def _memory(bits: Any) -> bytes:
    """Of a Mersenne twister: 624 words and the position."""
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4)


@contextmanager
def seeded(number: int) -> Generator[None]:
    """Inside `scoped`: draw from another seed (9 us)."""
    with rng.scoped(number):
        np.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        yield


def sample() -> tuple[int, float, float]:
    """One number from each: equal ones after equal seeds mean that nothing was drawn between."""
    return int(torch.empty((), dtype=torch.int64).random_()), float(np.random.random_sample()), random.random()
