"""One line about a long run of short eager steps: compiled, they would be several times faster."""

from __future__ import annotations

import logging
import os
import shutil
import time

_SHORT = 5e-3  # seconds of a step whose time goes to launching operations, mostly
_LONG = 20.0  # seconds of a run for which compiling, which takes up to ten, pays

_log = logging.getLogger("purestep")


class EagerHint:
    """Times some calls of an eager step, and logs one line if compiling it would pay.

    On the CPU only, where a call returns when its work is done. Steps longer than 5 ms gain little there.

    Args:
        wanted: whether the run may be told: its step is eager since nobody chose, not since it cannot be compiled.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted and has_compiler()
        self._start: float | None = None
        self._begun = 0.0

    def before(self) -> None:
        """Note the time before one of the timed calls."""
        if self._wanted:
            self._begun = time.monotonic()
            self._start = self._begun if self._start is None else self._start

    def after(self) -> None:
        """Note the time after it."""
        if not self._wanted or self._start is None:
            return
        now = time.monotonic()
        if now - self._start > _LONG and now - self._begun < _SHORT:
            self._wanted = False
            _log.warning(
                "a step takes %.1f ms in eager mode, most of it to launch operations; compiled it is several times "
                "faster: fit(..., compile=True), or compile=False to keep it without this line",
                1e3 * (now - self._begun),
            )


def has_compiler() -> bool:
    """True if there is a C++ compiler for inductor, by the name that it looks for."""
    named = os.environ.get("CXX")
    return any(shutil.which(name) for name in ((named,) if named else ("g++", "clang++")))
