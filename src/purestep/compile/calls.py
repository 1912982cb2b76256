"""How a library that inductor has made is called: with addresses, or with handles of tensors."""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import StepContractError
from . import arena

Compiled = Callable[[list[Tensor]], Any]
"""``f(tensors) -> tensors``; may empty the list it is given"""


class Code(NamedTuple):
    """What inductor has made of a graph."""

    run: Compiled
    """as inductor calls it"""
    file: str | None
    """what that is in, if it needs its tensors and nothing else"""


def of(run: Compiled) -> Code:
    """Inductor's ``run``, and the library behind it."""
    try:
        if inspect.getsource(run).split() in [text.split() for text in _INDUCTORS]:
            return Code(run, run.__globals__["inductor_entry"].__self__.__file__)
    except Exception:  # another torch
        pass
    return Code(run, None)


_INDUCTORS = (
    """
def g(args):
    input_tensors = [arg if isinstance(arg, torch.Tensor) else torch.tensor(arg, device='cpu') for arg in args]
    input_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(input_tensors)
    args.clear()
    del input_tensors
    output_handles = f(input_handles)
    output_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(output_handles)
    return output_tensors
""",
    """
def g(args):

    python_only_input_indices = set()
    input_tensors = []
    input_handle_positions = []
    # Preserve graph input slots: Python-only inputs stay None
    # and are unpacked as nullptrs by the JIT cpp wrapper.
    input_handles = [None] * len(args)
    for idx, arg in enumerate(args):
        if idx in python_only_input_indices:
            continue
        input_handle_positions.append(idx)
        input_tensors.append(
            arg if isinstance(arg, torch.Tensor) else torch.tensor(arg, device='cpu')
        )

    packed_input_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(input_tensors)
    for idx, handle in zip(input_handle_positions, packed_input_handles):
        input_handles[idx] = handle

    args.clear()
    del input_handle_positions
    del packed_input_handles
    del input_tensors

    output_handles = f(input_handles)
    output_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(output_handles)
    return output_tensors
""",
)
"""What inductor calls a library with, where that needs its tensors and nothing else; of torch 2.13 and 2.14."""


def loaded(library: str, digest: str) -> Code:
    """The code in a library of an earlier process."""
    ctypes.PyDLL(library)  # not there, or no library: who asks for it has to know now
    handles_of, tensors_of = _handles()

    @functools.cache
    def entry() -> Callable[..., Any]:
        # Half of inductor comes with it, and where the library takes addresses, nobody asks.
        codecache: Any = importlib.import_module("torch._inductor.codecache")
        cache = codecache.CppWrapperCodeCache
        return getattr(cache._load_library_inner(library, f"purestep_{digest}"), cache.entry_function)

    def run(tensors: list[Tensor]) -> Any:
        handles = handles_of(tensors)
        tensors.clear()
        return tensors_of(entry()(handles))

    return Code(run, library)


def in_arena(code: Code, count: int) -> Compiled:
    """The code of a graph of so many tensors and the arena's header, to be called with those tensors."""
    run = code.run
    return _by_address(code.file, count) or (lambda tensors: run([*tensors, arena.header()]))


def _by_address(library: str | None, count: int) -> Compiled | None:
    """The library's entry for addresses, if it has one (`wrapper.py`)."""
    # It is loaded already: this asks for a name in it. Called with Python's lock held, which it gives up itself.
    function: Any = library and getattr(ctypes.PyDLL(library), "purestep_call", None)
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.py_object
    pack, tensors_of = struct.Struct(f"{count + 1}P").pack, _handles()[1]

    def call(tensors: list[Tensor]) -> Any:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if 0 in addresses:
            _check_memory(tensors)
        return tensors_of(function(pack(*addresses, arena.address())))

    return call


def _check_memory(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel() and not tensor.data_ptr():
            raise StepContractError(
                f"a tensor {list(tensor.shape)} {tensor.dtype} that has no memory",
                where="the state or the batch",
                hint="tensor.clone() of one that torch only says to be zero; no resize_ of a state's storage",
            )


def _handles() -> tuple[Callable[..., Any], Callable[..., Any]]:
    aoti: Any = importlib.import_module("torch._C._aoti")
    return aoti.unsafe_alloc_void_ptrs_from_tensors, aoti.alloc_tensors_by_stealing_from_void_ptrs
