"""Digests: CRC-32 of a leaf's values, of bytes, and of a file. They detect any single flipped bit."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np


def of_values(values: np.ndarray[Any, Any]) -> int:
    """The digest of a leaf: of its values' bytes in C order, at 3 to 7 GB/s."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def of_bytes(data: bytes | bytearray, before: int = 0) -> int:
    """The digest of bytes; with ``before``, of earlier bytes with that digest followed by these."""
    return zlib.crc32(data, before)


def of_file(path: Path) -> int:
    """The digest of a file's bytes."""
    return of_bytes(path.read_bytes())
