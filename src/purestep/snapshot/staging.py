"""Copy tensors to arrays in host memory and back, bit for bit, for every dtype that orbax can store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SnapshotError, StateError
from ..torch_ext import foreach, tensor_layout

_NATIVE = (
    *(torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
# numpy lacks these types; arrays carry their bits as unsigned integers of the same size
_CARRIED = (
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NATIVE, *_CARRIED)}
"""The dtypes that can be stored, by their names in the manifest."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The inverse of `DTYPES`."""

SCALARS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
"""The types of Python leaves that can be stored, by name. The manifest contains their values."""

_PYTHON = frozenset(SCALARS.values())
_TENSORS = (Tensor, torch.nn.Parameter)

Buffers = dict[str, Tensor]
"""Host memory by leaf path. The next copy of the state reuses it, which saves the page faults."""

Kind = tuple[torch.dtype, torch.Size] | bool | int | float | str
"""A leaf without its values: dtype and shape of a tensor; a Python leaf is its value."""


def kinds(leaves: Iterable[tuple[str, Any]]) -> dict[str, Kind]:
    """The kind of each leaf by its path.

    Raises:
        StateError: a leaf cannot be stored; the message has its path and type.
        SnapshotError: two leaves have one path.
    """
    found: dict[str, Kind] = {}
    for path, leaf in leaves:
        if path in found:
            raise SnapshotError("two leaves have this path", where=path, hint="use keys without '/', all of one type")
        if type(leaf) in _PYTHON:
            found[path] = leaf
        elif type(leaf) in _TENSORS and _is_plain(leaf):
            found[path] = leaf.dtype, leaf.shape
        else:
            raise _unfit(path, leaf)
    return found


def _is_plain(leaf: Tensor) -> bool:
    is_dense = leaf.layout is torch.strided and not leaf.is_nested  # quantized tensors have dtypes of their own
    return is_dense and not leaf.is_meta and leaf.dtype in NAMES


def _unfit(path: str, leaf: Any) -> StateError:
    if not isinstance(leaf, Tensor):
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        return StateError(f"a {kind} cannot be stored", where=path, hint="pass torch.as_tensor(value)")
    if type(leaf) not in _TENSORS:
        return StateError(f"a {type(leaf).__qualname__} cannot be stored", where=path, hint="pass a plain tensor")
    if not tensor_layout.is_dense(leaf):
        kind = tensor_layout.layout_name(leaf)
        return StateError(f"a {kind} tensor cannot be stored", where=path, hint="call .to_dense()")
    if leaf.is_meta:
        return StateError("a tensor on the meta device has no values", where=path, hint="call program.init()")
    return StateError(f"{leaf.dtype} cannot be stored", where=path, hint="call .to(torch.float32)")


@torch.no_grad()
def stage(tensors: dict[str, Tensor], spare: Buffers) -> Buffers:
    """Copy the tensors to host memory and wait until the copies are complete.

    Args:
        tensors: tensors that `kinds` accepts, by path, on any devices.
        spare: unused buffers of an earlier `stage`; those that fit are reused.
    """
    buffers = {path: _buffer(tensor, spare.get(path)) for path, tensor in tensors.items()}
    far = {path: tensor for path, tensor in tensors.items() if tensor.is_cuda}
    near = {path: tensor for path, tensor in tensors.items() if path not in far} if far else tensors
    for path, tensor in far.items():
        # Only CUDA orders an asynchronous copy with later work on its stream, and only into pinned memory.
        buffers[path].copy_(tensor, non_blocking=True)
    if near:
        foreach.copy_([buffers[path] for path in near], list(near.values()))
    for device in {tensor.device for tensor in far.values()}:
        torch.cuda.current_stream(device).synchronize()
    return buffers


def _buffer(source: Tensor, spare: Tensor | None) -> Tensor:
    """A tensor in C order, whose array orbax writes as it is."""
    if spare is not None and spare.dtype is source.dtype and spare.shape == source.shape:  # noqa: SIM102
        if not source.is_cuda or spare.is_pinned():
            return spare
    if source.is_cuda:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    # numpy requests huge pages and torch does not: page faults take a fraction of the time
    flat = torch.from_numpy(np.empty(source.numel() * source.itemsize, np.uint8)).view(source.dtype)
    return flat.view(source.shape)


def array(buffer: Tensor) -> np.ndarray[Any, Any]:
    """The bits of a buffer as an array of the `carrier` type, in the same memory.

    Example:
        >>> array(torch.ones(2, dtype=torch.bfloat16))
        array([16256, 16256], dtype=uint16)
    """
    is_carried = buffer.dtype in _CARRIED
    return (buffer.view(torch.uint16 if buffer.itemsize == 2 else torch.uint8) if is_carried else buffer).numpy()


def carrier(dtype: str) -> np.dtype[Any]:
    """The numpy type that stores the bits of the named dtype.

    Example:
        >>> carrier("bfloat16"), carrier("float32")
        (dtype('uint16'), dtype('float32'))
    """
    return array(torch.empty(0, dtype=DTYPES[dtype])).dtype


def tensor(values: np.ndarray[Any, Any] | None, like: Tensor) -> Tensor:
    """A new tensor with these values and the shape, dtype, device and memory layout of ``like``.

    Args:
        values: a C-contiguous array of the carrier type; the result may share its memory. None if ``like`` has no
            elements.
        like: the template; its values are not read.
    """
    if values is None:
        return torch.empty_like(like, requires_grad=False)
    values = np.require(values, requirements=["C", "W"])
    found = torch.from_numpy(values).view(like.dtype)
    made = torch.empty_like(like, device="meta")
    if like.device.type == "cpu" and made.stride() == found.stride():
        return found
    return torch.empty_like(like, requires_grad=False).copy_(found)
