"""What has been compiled, beside the snapshots of a run."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from .. import files
from ..compile import carried
from ..errors import WriteFailed

log = logging.getLogger("purestep")

NAME = "compiled"


class Carrier:
    """Keeps one file in step with what the process has compiled.

    Args:
        directory: that of the snapshots; None: nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None else directory / NAME
        self._digest = b""

    def save(self) -> None:
        """Write the file, where there is something new. A run goes on without it."""
        if self._file is None or (found := carried.saved()) is None:
            return
        digest = hashlib.sha256(found).digest()
        if digest == self._digest:
            return
        try:
            files.write_bytes(self._file, found)
        except WriteFailed as error:
            log.warning("what was compiled is not kept: %s", error)
        self._digest = digest


def load(directory: Path) -> None:
    """Put what lies beside the snapshots there, if anything, into the compiler's caches."""
    try:
        carried.taken((directory / NAME).read_bytes())
    except FileNotFoundError:
        return
    except Exception as error:  # it is compiled anew
        log.warning("%s cannot be used: %r", directory / NAME, error)
