"""The output of a sink: a file that belongs to the run, or an existing pipe or device.

A file belongs to one run, so a fresh run renames an existing one. A pipe or device does not belong to the run, which
only writes to it, and never renames, reads or replaces it.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from ..errors import WriteFailed
from ..files import special_file


def is_stream(path: Path) -> bool:
    """True if there is a pipe, device or socket at the path (links are followed), which can only be written."""
    return bool(special_file(path))


def open_stream(path: Path) -> TextIO:
    """Open a pipe or device for text.

    Raises:
        WriteFailed: a FIFO that no process reads, a socket, or a device that cannot be opened.
    """
    flags = os.O_WRONLY | getattr(os, "O_APPEND", 0) | getattr(os, "O_NOCTTY", 0)
    blocking = getattr(os, "O_NONBLOCK", 0)  # without it, opening a FIFO would wait for its reader
    try:
        descriptor = os.open(path, flags | blocking)
        if blocking:
            os.set_blocking(descriptor, True)
        return open(descriptor, "w", encoding="utf-8", newline="")
    except OSError as error:
        kind = special_file(path) or "a file"
        reader = error.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode)
        text = f"is {kind}, and no process reads from it" if reader else f"is {kind} that cannot be opened: {error}"
        hint = "start its reader before the run, or pass the path of a file" if reader else "pass the path of a file"
        raise WriteFailed(text, where=str(path), hint=hint) from error


def set_aside(path: Path) -> Path | None:
    """Rename an existing file to the next free name ``name.1.suffix``, ``name.2.suffix``, ...; None if there is none.

    Raises:
        WriteFailed: the path is a directory, a pipe or a device.
    """
    kind = "a directory" if path.is_dir() else special_file(path)
    if kind:
        raise WriteFailed(f"is {kind}, which fit does not rename", where=str(path), hint="pass the path of a file")
    if not path.exists():
        return None
    aside = next(free for n in count(1) if not (free := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
    path.rename(aside)
    return aside


def finite(value: Any) -> Any:
    """Return None for nan and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
