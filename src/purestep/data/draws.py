"""The generators that data code draws from (torch's, numpy's and Python's global ones), taken as one.

Everything that runs a user's dataset, sampler, collate function or iterable does so inside `scoped` or `watched`, so
that what it draws depends on a seed alone, and the caller's generators are as they were. So is the import of a library
that draws.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np

from .. import rng

EVERY = frozenset({"torch", "numpy", "python"})
"""The three generators."""


@contextmanager
def scoped(number: int) -> Generator[None]:
    """Draw from ``number``, and leave the three generators as they were (20 us).

    Args:
        number: in [0, 2**63).

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True
    """
    with _apart(number):
        random.seed(number)
        yield


@contextmanager
def watched(number: int) -> Generator[Watch]:
    """`scoped` for code that most likely draws nothing (13 us, and 5 to ask): Python's generator, whose seed costs
    most, is not seeded. If ``watch.drawn()`` names any, the code has to run again, after `seed` of those.

    Args:
        number: in [0, 2**63).

    Example:
        >>> with watched(1) as watch:
        ...     _ = random.random()
        ...     print(sorted(watch.drawn()))
        ['python']
    """
    with _apart(number):
        _python.gauss_next = None  # half of a pair, which could be taken without a trace
        yield Watch(rng.position(), _memory(_global.get_bit_generator()), _twister())


@contextmanager
def _apart(number: int) -> Generator[None]:
    """`scoped`, but for Python's generator, which is put back but not seeded."""
    numpys, pythons = _numpys(), _Pythons(_twister(), _python.gauss_next)
    spare = _spares.pop() if _spares else np.random.MT19937()
    try:
        try:
            _global.set_bit_generator(spare)
            with rng.scoped(number):
                np.random.seed(number & 0xFFFFFFFF)
                yield
        finally:
            _put_back(numpys, pythons)
    except BaseException:  # of the code inside, or a signal's while they are put back
        _put_back(numpys, pythons)
        raise
    finally:
        _spares.append(spare)


class Watch(NamedTuple):
    """Where the generators stood."""

    torchs: bytes
    numpys: bytes | None
    pythons: object

    def drawn(self) -> frozenset[str]:
        """Which of `EVERY` have been drawn from since, or seeded. Who only reads a state, of Python's the caller's, is
        not seen."""
        moved = {
            "torch": rng.position() != self.torchs,
            "numpy": _memory(_global.get_bit_generator()) != self.numpys,
            "python": _twister() != self.pythons or _python.gauss_next is not None,
        }
        return frozenset(name for name, found in moved.items() if found)


def seed(number: int, generators: Collection[str] = EVERY) -> None:
    """Inside `scoped` or `watched`: draw from another seed (9 us, of which Python's generator takes 6).

    Args:
        number: in [0, 2**63).
        generators: which of `EVERY`.

    Example:
        >>> import torch
        >>> with scoped(1):
        ...     seed(2)
        ...     second = torch.rand(())
        >>> with scoped(2):
        ...     print(bool(torch.rand(()) == second))
        True
    """
    if "torch" in generators:
        rng.seed(number)
    if "numpy" in generators:
        np.random.seed(number & 0xFFFFFFFF)
    if "python" in generators:
        random.seed(number)


# --- numpy's ----------------------------------------------------------------------------------------------------------


class _Numpys(NamedTuple):
    """numpy's global generator. To read its state takes 60 us and to write it as long, so its bit generator is
    exchanged for a spare one. What lies outside of that is the second half of a pair of normal numbers."""

    bits: Any
    half: Any  # the state with that half; None where there is none


_global: Any = np.random  # numpy's stubs lack the two functions that exchange the bit generator
_spares: list[np.random.MT19937] = []
_whole: tuple[Any, bytes] | None = None  # a bit generator that was found without a half, and its memory at that time


def _numpys() -> _Numpys:
    global _whole
    bits = _global.get_bit_generator()
    memory = _memory(bits)
    if memory is not None and _whole == (bits, memory):
        return _Numpys(bits, None)  # nothing was drawn since
    state = np.random.get_state(legacy=False)
    half = state if state["has_gauss"] else None
    _whole = None if memory is None or half is not None else (bits, memory)
    return _Numpys(bits, half)


def _memory(bits: Any) -> bytes | None:
    """Of a Mersenne twister: 624 words and the position. None of any other generator."""
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4) if type(bits) is np.random.MT19937 else None


# --- Python's ---------------------------------------------------------------------------------------------------------


class _Pythons(NamedTuple):
    """Python's global generator."""

    twister: object  # see `_twister`
    half: float | None  # the second of a pair of normal numbers


_python: Any = cast(Any, random.seed).__self__
_words = struct.Struct("i624I")  # the position and 624 words, as CPython has them behind the head of the object
_known: tuple[object, Any] = None, None  # a twister, and the same as `random.setstate` takes it


def _twister() -> object:
    """The words and the position, without the half of a pair. To ask for them takes 8 us, so they are read where they
    lie, as numpy's are."""
    return ctypes.string_at(id(_python) + object.__basicsize__, _words.size) if _readable else random.getstate()


def _state(pythons: _Pythons) -> Any:
    global _known
    if not _readable:
        return pythons.twister
    if _known[0] != pythons.twister:
        position, *words = _words.unpack(cast(bytes, pythons.twister))
        _known = pythons.twister, (*words, position)
    return _python.VERSION, _known[1], pythons.half


def _is_readable() -> bool:
    """Whether that memory is what it is taken for."""
    kind = type(_python).__mro__[1]  # of the class in C
    if sys.implementation.name != "cpython" or kind.__basicsize__ < object.__basicsize__ + _words.size:
        return False
    position, *words = _words.unpack(ctypes.string_at(id(_python) + object.__basicsize__, _words.size))
    return (*words, position) == random.getstate()[1]


_readable = _is_readable()


def _put_back(numpys: _Numpys, pythons: _Pythons) -> None:
    _global.set_bit_generator(numpys.bits)
    if numpys.half is not None:
        np.random.set_state(numpys.half)
    if _twister() == pythons.twister:
        _python.gauss_next = pythons.half
    else:
        random.setstate(_state(pythons))
