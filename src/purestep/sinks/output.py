"""Where a sink writes to: a file of the run's own, or a pipe or device that is there already.

A file belongs to one run, so a fresh run sets aside a file that it finds. A pipe or device belongs to somebody else: it
is written to as it is, and never renamed, read back or replaced.
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
    """Whether there is a pipe, a device or a socket at the path (links are followed), which can only be written to."""
    return bool(special_file(path))


def open_stream(path: Path) -> TextIO:
    """A pipe or device, open for text.

    Raises:
        WriteFailed: a FIFO from which no process reads, a socket, or a device that cannot be opened.
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
    """Give a file that is there the next free name ``name.1.suffix``, ``name.2.suffix``, ...; None where none is.

    Raises:
        WriteFailed: there is a directory, a pipe or a device.
    """
    kind = "a directory" if path.is_dir() else special_file(path)
    if kind:
        raise WriteFailed(f"is {kind}, which is not renamed", where=str(path), hint="pass the path of a file")
    if not path.exists():
        return None
    aside = next(found for n in count(1) if not (found := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
    path.rename(aside)
    return aside


def finite(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
