"""Points at which a test makes the disk, the process or the clock fail, in a real process."""

from __future__ import annotations

import builtins
import errno
import os
import signal
import time
from collections import Counter
from pathlib import Path

from ..errors import ConfigError

POINTS: dict[str, str] = {
    "loop.batch": "after the loader returned a batch, before the step",
    "loop.step": "after a step, before the loop has recorded it; a donated state is gone",
    "loop.epoch": "after the last batch of an epoch, before its boundary",
    "loop.evaluate": "before an evaluation",
    "loop.snapshot": "in fit, before a snapshot is passed to the writer",
    "files.write": "before a file is written under its temporary name",
    "files.rename": "after a file was flushed, before the rename",
    "files.renamed": "after the rename, before the directory is flushed",
    "files.unlink": "before each file or directory of a tree is deleted",
    "snapshot.copy": "in the caller's thread, before the state is copied to host memory",
    "snapshot.stage": "in the writer, before the first byte is written",
    "snapshot.digest": "after the arrays were written, before the digests",
    "snapshot.part": "after a process has written its part, before the first one, which waits for it, can see that",
    "snapshot.manifest": "after the digests of all parts, before the manifest is written",
    "snapshot.sync": "after the manifest was written, before the flush",
    "snapshot.verify": "after the flush, before the step is read back",
    "snapshot.archive": "before later steps are renamed to <step>.archived",
    "snapshot.replace": "before an overwritten step is renamed",
    "snapshot.commit": "after the verification, before the rename",
    "snapshot.committed": "after the rename, before the directory is flushed",
    "snapshot.retire": "before an old step is renamed for deletion",
    "snapshot.delete": "after an old step was renamed, before its files are deleted",
    "snapshot.quarantine": "before a damaged step is renamed",
}
"""The names of the failpoints and their positions."""

_PLAN = "PURESTEP_FAILPOINT"
_hits: Counter[str] = Counter()


def armed() -> bool:
    """True if ``PURESTEP_FAILPOINT`` is set. The loop checks it once, at the start of a run."""
    return bool(os.environ.get(_PLAN))


def failpoint(name: str) -> None:
    """Run the action that the environment variable ``PURESTEP_FAILPOINT`` sets for this point, if any.

    The variable is a list of ``name=action`` or ``name=action@n`` (only the n-th time, from 1), separated by commas.
    Actions: ``kill`` (SIGKILL to this process), ``raise:ENOSPC`` (an `OSError`) or ``raise:MemoryError`` (any builtin
    exception), ``sleep:0.5`` (seconds), ``wait:/path`` (create ``/path.reached``, then wait until ``/path`` exists).

    Raises:
        ConfigError: the variable has an unknown point or action.

    Example:
        >>> failpoint("files.write")
    """
    assert name in POINTS, name
    plan = os.environ.get(_PLAN)
    if plan:
        _hits[name] = now = _hits[name] + 1  # another thread may count while this one waits
        for point, action, turn in _parse_plan(plan):
            if point == name and turn in (0, now):
                _act(name, action)


def _parse_plan(plan: str) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for part in plan.split(","):
        point, _, rest = part.strip().partition("=")
        action, _, turn = rest.partition("@")
        if point not in POINTS or not action or (turn and not turn.isdigit()):
            hint = f"set name=action@n with one of the names {', '.join(POINTS)}"
            raise ConfigError(f"{part!r} is no failpoint", where="PURESTEP_FAILPOINT", hint=hint)
        found.append((point, action, int(turn or 0)))
    return found


def _act(name: str, action: str) -> None:
    verb, _, argument = action.partition(":")
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "sleep":
        time.sleep(float(argument))
    elif verb == "wait":
        Path(f"{argument}.reached").touch()
        while not os.path.exists(argument):
            time.sleep(0.002)
    elif verb == "raise" and hasattr(errno, argument):
        code = int(getattr(errno, argument))
        raise OSError(code, os.strerror(code), f"failpoint {name}")
    elif verb == "raise" and isinstance(kind := getattr(builtins, argument, None), type):
        raise kind(f"failpoint {name}")
    else:
        hint = "use kill, raise:ENOSPC, raise:MemoryError, sleep:0.5 or wait:/path"
        raise ConfigError(f"{action!r} is no action", where="PURESTEP_FAILPOINT", hint=hint)
