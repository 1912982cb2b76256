"""Memory of a compiled step: one piece a thread, laid out when the step is compiled.

Buys: inductor's code calls malloc for every intermediate tensor and wraps each in objects: a tenth of a step of many
small tensors. The memory of large ones returns to the system after every use, and comes back page by page. Sizes and
lifetimes are known when a step is compiled, so intermediates are offsets into one piece of memory, which all graphs of
a thread use in turn, and which lives as long as the thread. Results of a graph are memory of their own.

Private names: none but ``torch._inductor.config``; `cpp_wrapper` writes the code.

Without: inductor's allocations.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import csrc

if TYPE_CHECKING:
    from torch.fx import GraphModule

ALIGNMENT = 64

HEADER = csrc.text("workspace.h")


def header() -> Tensor:
    """Address and size of this thread's memory, and whether it is in use; shape (3,), int64, written by graphs."""
    found: Tensor | None = getattr(_OWN, "header", None)
    if found is None:
        found = _OWN.header = torch.zeros(3, dtype=torch.int64, device="cpu")  # not on a default device of the caller's
        # The array shares its memory, and outlives the tensor. At exit other threads may still be at work.
        weakref.finalize(_OWN.header, _free, found.numpy()).atexit = False
    return found


def address() -> int:
    """Where the header is."""
    try:
        return _OWN.address
    except AttributeError:
        found = _OWN.address = header().data_ptr()
        return found


_OWN = local()
"""Only room to work in: no graph reads what it has not written in the same call."""


def _free(header: Any) -> None:
    ctypes.CDLL(None).free(ctypes.c_void_p(int(header[0])))


def taken(graph: GraphModule, version: str) -> None:
    """Give the graph one more input, the last: the header.

    Args:
        version: of the code that writes C++, a word. The input's name has it, so that inductor's own cache does not
            take what another version has written.
    """
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    with graph.graph.inserting_after(last):
        graph.graph.placeholder(f"purestep_arena_{version}")


def possible() -> bool:
    """Whether the graph that is being made is called from C++ that knows `aligned_alloc`."""
    from torch._inductor import config

    return config.cpp_wrapper and sys.platform != "win32"


class Layout:
    """Which bytes are taken; lowest first, so that little is touched."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []  # (offset, bytes), in order, never side by side

    def take(self, size: int) -> int:
        """The offset of so many bytes, which nobody else has until they are given back."""
        fits = [(length, offset) for offset, length in self._free if length >= size]
        if fits:
            length, offset = min(fits)
            self._free.remove((offset, length))
            if length > size:
                self.give(offset + size, length - size)
            return offset
        at_end = self._free.pop() if self._free and sum(self._free[-1]) == self.size else (self.size, 0)
        self.size = at_end[0] + size
        return at_end[0]

    def give(self, offset: int, size: int) -> None:
        """Give bytes back."""
        joined: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined
