"""Memory of a compiled step on the CPU: one piece a thread, laid out when the step is compiled.

Inductor's code asks malloc for every intermediate tensor, and wraps each in objects. A step of many small tensors
spends a tenth of its time there; in a step of large ones the memory goes back to the system after every use, and
returns page by page, zeroed, through faults that threads queue up for. Every size and lifetime is known when the step
is compiled, so intermediates are offsets into one piece of memory here, which every graph of a thread uses in its
turn, and which lives as long as the thread. What a graph returns is memory of its own, as before.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import GraphModule

ALIGNMENT = 64

HEADER = r"""
#include <cstdlib>
#include <new>

extern "C" const int64_t purestep_bytes;

// The thread's memory, larger if it has to be; memory of its own for a graph that an operator of another one calls.
// `header` is the address of the thread's memory, its size, and whether a graph is at work there.
class Arena {
 public:
  explicit Arena(int64_t* header) : header_(header), own_(header[2]) {
    if (own_) {
      at_ = made(rounded());
    } else {
      if (header[1] < purestep_bytes) {
        std::free((void*)header[0]);
        header[0] = header[1] = 0;
        header[0] = (int64_t)made(rounded());
        header[1] = rounded();
      }
      header[2] = 1;
      at_ = (char*)header[0];
    }
  }
  ~Arena() {
    if (own_) std::free(at_);
    else header_[2] = 0;
  }
  Arena(const Arena&) = delete;
  char* at() const { return at_; }

 private:
  static constexpr int64_t PAGE = 1 << 21;
  static int64_t rounded() { return (purestep_bytes + PAGE - 1) / PAGE * PAGE; }
  static char* made(int64_t size) {
    char* const found = (char*)std::aligned_alloc(PAGE, size);
    if (!found && size) throw std::bad_alloc();
    return found;
  }
  int64_t* header_;
  bool own_;
  char* at_;
};

// A tensor in that memory, which costs nothing until an operator of torch asks for a handle.
class Kept {
 public:
  Kept(void* at, int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int64_t width)
      : at_(at), dims_(dims), sizes_(sizes), strides_(strides), dtype_(dtype), width_(width) {}
  void* data_ptr() const { return at_; }
  void reset() {}
  AtenTensorHandle get() const {
    if (!handle_.get()) {
      AtenTensorHandle made;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
          at_, dims_, sizes_, strides_, 0, dtype_, aoti_torch_device_type_cpu(), 0, &made));
      handle_ = RAIIAtenTensorHandle(made);
    }
    return handle_.get();
  }
  operator AtenTensorHandle() const { return get(); }
  Kept viewed(int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset) const {
    return Kept((char*)at_ + offset * width_, dims, sizes, strides, dtype_, width_);
  }

 private:
  void* at_;
  int64_t dims_;
  const int64_t *sizes_, *strides_;
  int32_t dtype_;
  int64_t width_;
  mutable RAIIAtenTensorHandle handle_;
};

static inline Kept reinterpret_tensor_wrapper(
    const Kept& of, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset) {
  return of.viewed(dims, sizes, strides, offset);
}
static inline Kept wrap_with_raii_handle_if_needed(Kept&& of) { return std::move(of); }
"""


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
