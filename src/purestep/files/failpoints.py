"""The points at which a test makes the disk, the process or the clock fail, in a real process."""

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
    "loop.batch": "the loader has given a batch, no step has seen it",
    "loop.step": "a step has been made, nothing of it is on record; a donated state is gone",
    "loop.epoch": "the last batch of an epoch is done, its boundary is not begun",
    "loop.evaluate": "before an evaluation",
    "loop.snapshot": "in fit, before it hands a snapshot to the writer",
    "files.write": "before a file is written under its temporary name",
    "files.rename": "file whole on the disk, its name not yet",
    "files.renamed": "file under its name, the directory not yet on the disk",
    "files.unlink": "before each file or directory of a tree is deleted",
    "snapshot.copy": "in the caller's thread, before the state is copied to host memory",
    "snapshot.stage": "in the writer, before the first byte is written",
    "snapshot.digest": "arrays written, digests not yet computed",
    "snapshot.manifest": "digests computed, manifest not yet written",
    "snapshot.sync": "manifest written, nothing known to be on the disk",
    "snapshot.verify": "everything on the disk, not yet read back",
    "snapshot.archive": "before steps of an abandoned branch are set aside",
    "snapshot.replace": "before a step that is overwritten is moved out of the way",
    "snapshot.commit": "whole and verified, but under its temporary name",
    "snapshot.committed": "under its name, the directory not yet on the disk",
    "snapshot.retire": "before an old step loses its name",
    "snapshot.delete": "an old step has lost its name, its files are still there",
    "snapshot.quarantine": "before a damaged step is renamed",
}
"""Where a fault can be planted, and what has happened by then."""

_PLAN = "PURESTEP_FAILPOINT"
_hits: Counter[str] = Counter()


def armed() -> bool:
    """Whether there is a plan, for code that cannot afford to ask at every point. What is in ``loop`` asks once, when a
    run starts."""
    return bool(os.environ.get(_PLAN))


def failpoint(name: str) -> None:
    """Nothing, unless ``PURESTEP_FAILPOINT`` in the environment asks for a fault here.

    The variable holds ``name=action`` or ``name=action@n`` (only the n-th time, from 1), several separated by commas.
    Actions: ``kill`` (SIGKILL to this process), ``raise:ENOSPC`` (an `OSError`) or ``raise:MemoryError`` (any builtin
    exception), ``sleep:0.5`` (seconds), ``wait:/path`` (makes ``/path.reached``, then waits until ``/path`` exists).

    Raises:
        ConfigError: the variable names a point or an action that does not exist.

    Example:
        >>> failpoint("files.write")
    """
    assert name in POINTS, name
    plan = os.environ.get(_PLAN)
    if plan:
        _hits[name] = now = _hits[name] + 1  # another thread may pass while this one waits
        for point, action, turn in _parse_plan(plan):
            if point == name and turn in (0, now):
                _act(name, action)


def _parse_plan(plan: str) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for part in plan.split(","):
        point, _, rest = part.strip().partition("=")
        action, _, turn = rest.partition("@")
        if point not in POINTS or not action or (turn and not turn.isdigit()):
            hint = f"name=action@n with a name out of: {', '.join(POINTS)}"
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
        hint = "kill, raise:ENOSPC, raise:MemoryError, sleep:0.5 or wait:/path"
        raise ConfigError(f"{action!r} is no action", where="PURESTEP_FAILPOINT", hint=hint)
