"""What has been compiled, beside the snapshots of a run."""

from __future__ import annotations

import logging
from pathlib import Path

from .. import files
from ..compile import carried

log = logging.getLogger("purestep")

NAME = "compiled"


class Carrier:
    """Starts with what was compiled, and keeps the file of that in step with what the process compiles.

    Args:
        directory: that of the snapshots; None: nothing is kept.
        origin: that of the snapshots that a run goes on from, where it is another one.
    """

    def __init__(self, directory: Path | None, origin: Path | None = None) -> None:
        self._file = None if directory is None else directory / NAME
        self._count = 0
        for place in {directory, origin}:
            if place is not None:
                _load(place / NAME)

    def save(self) -> None:
        """Write the file, where there is something new. A run goes on without it."""
        if self._file is None:
            return
        try:
            count = carried.count()
            if count == self._count:
                return
            self._count = count
            found = carried.saved()
            if found is not None:
                files.write_bytes(self._file, found)
        except Exception as error:
            log.warning("what was compiled is not kept: %s", error)


def _load(file: Path) -> None:
    """Into the compiler's caches."""
    try:
        carried.taken(file.read_bytes())
    except FileNotFoundError:
        return
    except Exception as error:  # it is compiled anew
        log.warning("%s cannot be used: %r", file, error)
