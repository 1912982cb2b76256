"""The file of a sink. It belongs to one run, and is a regular file."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import WriteFailed
from ..files import other_kind


class OutputFile:
    """A sink that writes one file; see `history_json`, `csv` and `jsonl`.

    Args:
        path: of a regular file, or of none yet.

    Raises:
        WriteFailed: the path is a directory, a link, a pipe, a socket or a device.
    """

    writes_files = True

    def __init__(self, path: Path) -> None:
        if kind := other_kind(path):
            raise WriteFailed(
                f"the path is {kind}, and a sink writes a regular file",
                where=str(path),
                hint="pass the path of a file; tail -f prints it while the run goes on",
            )
        self.path = path.absolute()  # a callback may call os.chdir

    def set_aside(self) -> None:
        """Rename an existing file to the next free name ``name.1.suffix``, ``name.2.suffix``, ..."""
        path = self.path
        if path.exists():
            names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            path.rename(next(name for name in names if not name.exists()))

    def close(self) -> None:
        """Do nothing: no file stays open."""


def finite(value: Any) -> Any:
    """Return None for nan and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
