"""Calls of a compiled library with addresses of tensors.

Buys: no tensor objects, capsules or handles for the inputs of a step, which take 10 us for a hundred inputs.

Private names: ``torch._C._aoti`` (results are handles), and the name under which inductor's wrapper holds its library.

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
"""The library's function that takes addresses (in ``csrc/entries.cpp``)."""


class Code(NamedTuple):
    """Compiled code of a graph."""

    run: Compiled
    """takes the graph's tensors without the workspace"""
    file: str | None
    """its library if that has `ENTRY`: such code needs only its tensors"""


def of(run: Compiled, count: int, *, in_workspace: bool) -> Code:
    """Wrap inductor's function for a graph of ``count`` tensors and, if ``in_workspace``, the workspace."""
    if not in_workspace:
        return Code(run, None)
    try:
        globals_: Any = getattr(run, "__globals__", {})
        library = globals_["inductor_entry"].__self__.__file__
        return loaded(library, count)
    except (KeyError, AttributeError, OSError):  # no entry, or another torch
        return Code(lambda tensors: run([*tensors, workspace.header()]), None)


def loaded(library: str, count: int) -> Code:
    """Load the code of a library for a graph of ``count`` tensors and the workspace.

    Raises:
        OSError: the file is missing or is no library.
        AttributeError: the library has no `ENTRY`.
    """
    function: Any = getattr(ctypes.PyDLL(library), ENTRY)  # called with the GIL, which the code releases
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
                hint="call tensor.clone() on a lazy zero tensor; do not resize_ a state's storage",
            )
