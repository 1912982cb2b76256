"""The stand-in from Python: loaded before torch, and asked what it was called for."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

VARIABLE = "PURESTEP_CUDA_REHEARSAL"  # where the library lies
_library: ctypes.CDLL | None = None


def load() -> None:
    """Put the stand-in that `run.py` has built before CUDA's own libraries, for what is loaded from now on."""
    global _library
    if VARIABLE not in os.environ:
        return
    _library = ctypes.CDLL(os.environ[VARIABLE], ctypes.RTLD_GLOBAL)
    _library.standin_calls.restype = ctypes.c_char_p


def active() -> bool:
    """Whether CUDA is the stand-in."""
    return _library is not None


def stand_in() -> ctypes.CDLL:
    assert _library is not None, "the stand-in is not loaded"
    return _library


def reset() -> None:
    """Forget the calls so far."""
    stand_in().standin_reset()


def calls() -> list[str]:
    """Every call since the last `reset`, one a line, its kind first."""
    return stand_in().standin_calls().decode(errors="replace").splitlines()


class Seen(NamedTuple):
    """Calls, counted."""

    kernels: int  # of torch's own
    products: int  # of cuBLAS
    triton: int
    replays: int  # of CUDA graphs
    copies: tuple[str, ...]  # "D->Hpinned 8": from, to, bytes
    syncs: int  # waits of the host for the device
    forbidden: tuple[str, ...]  # refused, escaped from a capture, or unknown to the stand-in

    @property
    def launches(self) -> int:
        return self.kernels + self.products + self.triton + self.replays


def seen(lines: list[str] | None = None) -> Seen:
    """What has been called since the last `reset`."""
    lines = calls() if lines is None else lines
    count = Counter(line.split(" ", 1)[0] for line in lines)
    copies = tuple(line.removeprefix("MEMCPY ") for line in lines if line.startswith("MEMCPY "))
    return Seen(
        count["KERNEL"], count["BLAS"], count["TRITON"], count["REPLAY"], copies, count["SYNC"], forbidden(lines)
    )


def forbidden(lines: list[str]) -> tuple[str, ...]:
    """What must not be in a record of calls."""
    return tuple(line for line in lines if line.startswith(("ILLEGAL ", "ESCAPED ", "UNKNOWN ")))


@contextmanager
def late_copies() -> Iterator[None]:
    """Copies from and to pinned memory are made as late as CUDA may make them: what does not wait reads old numbers."""
    stand_in().standin_set_late(1)
    try:
        yield
    finally:
        stand_in().standin_set_late(0)
