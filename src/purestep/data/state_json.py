"""Convert a ``state_dict`` to JSON and back: plain values, tensors, arrays and bytes. Decoding runs no code."""

from __future__ import annotations

import base64
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..torch_ext import tensor_layout

_TAG = "__purestep__"


def encode(value: Any, *, where: str = "loader", path: str = "state_dict()") -> Any:
    """Convert a value to JSON; `decode` is the inverse.

    Example:
        >>> decode(encode({"rng": (1, b"ab"), 3: None}), where="loader")
        {'rng': (1, b'ab'), 3: None}

    Raises:
        DataError: an object cannot be stored; the message has its path.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": _text(value)}
    if isinstance(value, Tensor):
        raw = tensor_layout.as_bytes(value).cpu().numpy().tobytes()
        return {_TAG: "tensor", "dtype": str(value.dtype)[6:], "shape": list(value.shape), "data": _text(raw)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}
    if type(value) is list:
        listed = cast(list[Any], value)
        return [encode(part, where=where, path=f"{path}[{i}]") for i, part in enumerate(listed)]
    if type(value) is tuple:
        parts = cast(tuple[Any, ...], value)
        return {
            _TAG: "tuple",
            "items": [encode(part, where=where, path=f"{path}[{i}]") for i, part in enumerate(parts)],
        }
    if isinstance(value, dict):
        mapping = cast(dict[Any, Any], value)
        pairs = [
            [encode(key, where=where, path=f"{path} key {key!r}"), encode(part, where=where, path=f"{path}[{key!r}]")]
            for key, part in mapping.items()
        ]
        return {_TAG: "dict", "items": pairs}
    raise DataError(
        f"{path} is a {type(value).__name__}, which cannot be stored as JSON",
        where=where,
        hint="return numbers, text, bytes, tensors, lists, tuples and dicts from state_dict()",
    )


def decode(value: Any, *, where: str) -> Any:
    """The inverse of `encode`. numpy numbers come back as Python numbers.

    Args:
        value: of `encode`.
        where: the name of the loader.

    Raises:
        DataError: the value is not one of `encode`.
    """
    try:
        return _decoded(value)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"the stored state of the loader is damaged: {error!r}"
        raise DataError(what, where=where, hint="use another snapshot") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(part) for part in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    stored = cast(dict[str, Any], value)
    kind = stored[_TAG]
    if kind == "bytes":
        return base64.b64decode(stored["data"])
    if kind == "tuple":
        return tuple(_decoded(part) for part in stored["items"])
    if kind == "dict":
        return {_decoded(key): _decoded(part) for key, part in stored["items"]}
    raw = bytearray(base64.b64decode(stored["data"]))
    if kind == "array":
        return np.frombuffer(raw, dtype=np.dtype(stored["dtype"])).reshape(stored["shape"])
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return tensor_layout.from_bytes(flat, stored["dtype"], stored["shape"])


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
