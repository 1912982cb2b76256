"""The call of a compiled library: with addresses of tensors.

Buys: no tensor objects, capsules or handles for the inputs of a step, some 10 us for a hundred of them.

Private names: ``torch._C._aoti`` (results come back as handles), and the name by which inductor's wrapper holds its
library.

Without: inductor's Python function, which passes handles.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import StepContractError
from ..capture import Compiled
from . import workspace

ENTRY = "purestep_call"
"""The function of a library that takes addresses (`wrapper.py` writes it)."""


class Code(NamedTuple):
    """Compiled code of a graph."""

    run: Compiled
    """takes the graph's tensors, but the workspace"""
    file: str | None
    """its library, where that has `ENTRY`: such code needs nothing but its tensors"""


def of(run: Compiled, count: int, *, in_arena: bool) -> Code:
    """The code that inductor returned for a graph of ``count`` tensors and, ``in_arena``, the workspace."""
    if not in_arena:
        return Code(run, None)
    try:
        globals_: Any = getattr(run, "__globals__", {})
        library = globals_["inductor_entry"].__self__.__file__
        return loaded(library, count)
    except (KeyError, AttributeError, OSError):  # without the entry, or of another torch
        return Code(lambda tensors: run([*tensors, workspace.header()]), None)


def loaded(library: str, count: int) -> Code:
    """The code of a library for a graph of ``count`` tensors and the workspace.

    Raises:
        OSError: the file is missing or is no library.
        AttributeError: the library has no `ENTRY`.
    """
    function: Any = getattr(ctypes.PyDLL(library), ENTRY)  # called with the GIL held, which the code releases itself
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.py_object
    aoti: Any = importlib.import_module("torch._C._aoti")
    pack, tensors_of = struct.Struct(f"{count + 1}P").pack, aoti.alloc_tensors_by_stealing_from_void_ptrs

    def call(tensors: list[Tensor]) -> Any:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if 0 in addresses:
            _check_memory(tensors)
        return tensors_of(function(pack(*addresses, workspace.address())))

    return Code(call, library)


def _check_memory(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel() and not tensor.data_ptr():
            raise StepContractError(
                f"a tensor {list(tensor.shape)} {tensor.dtype} that has no memory",
                where="the state or the batch",
                hint="tensor.clone() of one that torch only says to be zero; no resize_ of a state's storage",
            )
