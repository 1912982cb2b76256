"""numpy's and Python's global generators, which host code in datasets and models draws from.

Whoever calls these functions holds `rng.held`: the generators are one for all threads of a process.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np

BOTH = frozenset({"numpy", "python"})
"""The two generators."""


@contextmanager
def scoped(number: int) -> Generator[None]:
    """Draw from ``number`` inside, and leave both generators as they were (17 us).

    Args:
        number: in [0, 2**63).

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True
    """
    numpys, pythons = _numpys(), _pythons()
    spare = _SPARES.pop() if _SPARES else np.random.MT19937()
    try:
        try:
            _global.set_bit_generator(spare)
            seed(number)
            yield
        finally:
            _put_back(numpys, pythons)
    except BaseException:  # of the code inside, or a signal's while they are put back
        _put_back(numpys, pythons)
        raise
    finally:
        _SPARES.append(spare)


def seed(number: int, generators: Collection[str] = BOTH) -> None:
    """Inside `scoped`: draw from another seed (9 us, of which Python's generator takes 6).

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
    """The positions of numpy's and of Python's generator, to compare (2 us): every draw and seeding changes them.

    Example:
        >>> with scoped(1):
        ...     before = position()
        ...     _ = random.random()
        ...     print([one == other for one, other in zip(before, position())])
        [True, False]
    """
    bits = _global.get_bit_generator()
    numpys = bytes(_memory(bits)) if type(bits) is np.random.MT19937 else _Other(bits.state)
    return (numpys, _numpys_half()), _pythons()


class Host:
    """Whether a function draws from the two generators, found at its calls.

    The first call that draws is made a second time, from a seed; later calls draw from their seed at once. A function
    that does not draw pays 1 us.

    Example:
        >>> host = Host()
        >>> [host.call(random.random, seed) == host.call(random.random, seed) for seed in (1, 2)], host.draws
        ([True, True], True)
    """

    def __init__(self) -> None:
        self.draws = False
        """Whether a call has drawn."""
        self._known: tuple[Any, Any] = None, None  # a glance and the position that it was of

    def call(self, function: Callable[[], Any], number: int, again: Callable[[], Any] | None = None) -> Any:
        """``function()``, which draws from ``number``; the generators stay as they were.

        Args:
            function: may be called twice, so it has no other effects.
            number: in [0, 2**63).
            again: makes the second call; ``function`` unless given.
        """
        if not self.draws:
            before = _glance()
            if self._known[0] != before:
                self._known = before, position()
            try:
                found = function()
            finally:
                self.draws = _glance() != before
                if self.draws:
                    _return_to(self._known[1], before[0])
            if not self.draws:
                return found
            del found
            function = again or function
        with scoped(number):
            return function()


# --- numpy's ----------------------------------------------------------------------------------------------------------


class _Numpys(NamedTuple):
    """numpy's global generator. To read its state takes 30 us and to write it as long, so its bit generator is
    exchanged for a spare one. That loses the second half of a pair of normal numbers."""

    bits: Any
    half: Any  # the state with that half; None where there is none


_global: Any = np.random  # numpy's stubs lack the two functions that exchange the bit generator
_singleton: Any = cast(Any, np.random.mtrand)._rand
_SPARES: list[np.random.MT19937] = []
_pair = struct.Struct("id")  # whether there is a half, and which: as C has them, one behind the other


def _numpys() -> _Numpys:
    has_half = _numpys_half()
    return _Numpys(_global.get_bit_generator(), np.random.get_state(legacy=False) if has_half else None)


class _Other:
    """The state of a bit generator that is no Mersenne twister, to compare."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other) and repr(self.state) == repr(other.state)

    def __hash__(self) -> int:
        return hash(repr(self.state))


_Twister = ctypes.c_uint32 * 625
_LAST: list[tuple[object, Any]] = [(None, None)]  # a bit generator and its memory: the address takes 2 us


def _memory(bits: np.random.MT19937) -> Any:
    """Of a Mersenne twister: 624 words and the position."""
    known, memory = _LAST[0]
    if known is not bits:
        memory = _Twister.from_address(bits.ctypes.state_address)
        _LAST[0] = bits, memory
    return memory


def _numpys_half() -> object:
    """What tells whether half of a pair lies ready, and which; None where none does."""
    if _half_at is None:
        state = np.random.get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None
    assert _has_half is not None
    assert _half is not None
    return _half.value if _has_half.value else None


def _found_half() -> int | None:
    """Where numpy's object has it, which says so only together with its whole state; None where that is not found."""
    other = np.random.RandomState(0)
    state = other.get_state(legacy=False)
    state["has_gauss"], state["gauss"] = 1, 0.1234567891
    other.set_state(state)
    if type(_singleton) is not type(other) or sys.implementation.name != "cpython":
        return None
    at = ctypes.string_at(id(other), type(other).__basicsize__).find(_pair.pack(1, 0.1234567891))
    return None if at < 0 else at


_half_at = _found_half()
_has_half = None if _half_at is None else ctypes.c_int.from_address(id(_singleton) + _half_at)
_half = None if _half_at is None else ctypes.c_double.from_address(id(_singleton) + _half_at + 8)


# --- Python's ---------------------------------------------------------------------------------------------------------


class _Pythons(NamedTuple):
    """Python's global generator."""

    twister: object  # see `_twister`
    half: float | None  # the second of a pair of normal numbers


_python: Any = cast(Any, random)._inst  # what the functions of the module are methods of
_words = struct.Struct("i624I")  # the position and 624 words, as CPython has them behind the head of the object
_KNOWN: list[tuple[object, Any]] = [(None, None)]  # a twister, and the same as `random.setstate` takes it


def _pythons() -> _Pythons:
    return _Pythons(_twister(), _python.gauss_next)


def _twister() -> object:
    """The words and the position, without the half of a pair. To ask for them takes 8 us, so they are read where they
    lie, as numpy's are."""
    return _raw() if _readable else random.getstate()


_raw_words = (ctypes.c_uint32 * 625).from_address(id(_python) + object.__basicsize__)


def _raw() -> bytes:
    return bytes(_raw_words)


def _state(pythons: _Pythons) -> Any:
    if not _readable:
        return pythons.twister
    twister, state = _KNOWN[0]
    if twister != pythons.twister:
        position, *words = _words.unpack(cast(bytes, pythons.twister))
        state = (*words, position)
        _KNOWN[0] = pythons.twister, state
    return _python.VERSION, state, pythons.half


def _is_readable() -> bool:
    """Whether that memory is what it is taken for."""
    kind = type(_python).__mro__[1]  # of the class in C
    if sys.implementation.name != "cpython" or kind.__basicsize__ < object.__basicsize__ + _words.size:
        return False
    position, *words = _words.unpack(_raw())
    return (*words, position) == random.getstate()[1]


_readable = _is_readable()


def _glance() -> tuple[Any, ...]:
    """What every draw and seeding changes, in 0.3 us: numbers of a twister's position, of which the first word changes
    with all the others."""
    bits = _global.get_bit_generator()
    if not _readable or _has_half is None or type(bits) is not np.random.MT19937:
        return bits, position()
    numpys, pythons = _memory(bits), _raw_words
    return bits, numpys[624], numpys[0], _has_half.value, pythons[0], pythons[1], _python.gauss_next


def _return_to(before: tuple[Any, Any], bits: Any) -> None:
    """Put both generators back to a `position`."""
    (numpys, half), pythons = before
    if type(bits) is np.random.MT19937:
        *words, at = struct.unpack("625I", numpys)
        bits.state = {"bit_generator": "MT19937", "state": {"key": np.array(words, np.uint32), "pos": at}}
    else:
        bits.state = numpys.state
    _global.set_bit_generator(bits)
    state = np.random.get_state(legacy=False)
    np.random.set_state({**state, "has_gauss": int(half is not None), "gauss": half or 0.0})
    random.setstate(_state(pythons))


def _put_back(numpys: _Numpys, pythons: _Pythons) -> None:
    _global.set_bit_generator(numpys.bits)
    if numpys.half is not None:
        np.random.set_state(numpys.half)
    random.setstate(_state(pythons))
