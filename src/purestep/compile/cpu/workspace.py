"""The workspace of compiled steps: one block of memory for each thread, with a layout computed at compile time.

Buys: inductor's code calls malloc for every intermediate tensor and wraps each in objects, a tenth of the time of a
step with many small tensors. The memory of large ones returns to the system after every use, and comes back page by
page. Sizes and lifetimes are known when a step is compiled, so intermediates are offsets into one block, which all
graphs of a thread share and which lives as long as the thread. Results of a graph are allocated separately.

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
    """Address and size of this thread's workspace, and whether it is in use; shape (3,), int64, written by graphs."""
    found: Tensor | None = getattr(_OWN, "header", None)
    if found is None:
        found = _OWN.header = torch.zeros(3, dtype=torch.int64, device="cpu")  # whatever the caller's default device
        # The array shares its memory and outlives the tensor. No finalizer at exit: other threads may still run.
        weakref.finalize(_OWN.header, _free, found.numpy()).atexit = False
    return found


def address() -> int:
    """The address of the header."""
    try:
        return _OWN.address
    except AttributeError:
        found = _OWN.address = header().data_ptr()
        return found


_OWN = local()
"""Scratch memory: no graph reads data from an earlier call."""


def _free(header: Any) -> None:
    ctypes.CDLL(None).free(ctypes.c_void_p(int(header[0])))


def add_input(graph: GraphModule, version: str) -> None:
    """Add the header as the last input of a graph.

    Args:
        graph: changed.
        version: of the code generator. It is a part of the input's name, so that inductor's own cache does not return
            code of another version.
    """
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    with graph.graph.inserting_after(last):
        graph.graph.placeholder(f"purestep_workspace_{version}")


def possible() -> bool:
    """True if the graph being compiled is called from C++, on a platform with `aligned_alloc`."""
    from torch._inductor import config

    return config.cpp_wrapper and sys.platform != "win32"


class Layout:
    """The allocated bytes of a workspace, at the lowest free offsets."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []  # (offset, bytes), sorted, never adjacent

    def take(self, size: int) -> int:
        """Allocate bytes; return their offset."""
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
        """Free bytes."""
        joined: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined
