"""Plans for the failpoints of `purestep.files`: ``PURESTEP_FAILPOINT`` in the environment makes a real process fail.

The variable is a list of ``name=action`` or ``name=action@n`` (only the n-th time, from 1), separated by commas.
Actions: ``kill`` (SIGKILL to this process), ``raise:ENOSPC`` (an `OSError`) or ``raise:MemoryError`` (any builtin
exception), ``sleep:0.5`` (seconds), ``wait:/path`` (create ``/path.reached``, then wait until ``/path`` exists).
"""

from __future__ import annotations

import builtins
import errno
import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from purestep import files

POINTS: dict[str, str] = {
    "loop.batch": "after the loader returned a batch, before the step",
    "loop.step": "after a step, before the loop has recorded it; a donated state is gone",
    "loop.epoch": "after the last batch of an epoch, before its boundary",
    "loop.evaluate": "before an evaluation",
    "loop.snapshot": "in fit, before a snapshot is passed to the writer",
    "files.write": "before a file is written under its temporary name",
    "files.rename": "after a file was flushed, before the rename",
    "files.renamed": "after the rename, before the directory is flushed",
    "files.unlink": "before each file or directory inside a tree is deleted",
    "snapshot.copy": "in the caller's thread, before the state is copied to host memory",
    "snapshot.stage": "in the writer, before the first byte is written",
    "snapshot.digest": "after the values were written, before the checksums",
    "snapshot.part": "after a process has written its part, before the first one, which waits for it, can see that",
    "snapshot.manifest": "after the checksums of all parts, before the manifest is written",
    "snapshot.sync": "after the manifest was written, before the flush",
    "snapshot.verify": "after the flush, before the step is read back",
    "snapshot.archive": "in start_over, before each step is renamed to <step>.archived",
    "snapshot.replace": "before an overwritten step is renamed",
    "snapshot.commit": "after the verification, before the rename",
    "snapshot.committed": "after the rename, before the directory is flushed",
    "snapshot.retire": "before an old step is renamed for deletion",
    "snapshot.delete": "after an old step was renamed, before its files are deleted",
    "snapshot.quarantine": "before a damaged step is renamed",
}
"""The names of the failpoints and their positions."""

PLAN = "PURESTEP_FAILPOINT"
hits: Counter[str] = Counter()


def install() -> None:
    """Follow the plan of this process, now and whenever one is set later."""
    files.set_hook(passed)
    # `shutil.rmtree` looks both up at each call, and passes the open folder.
    os.unlink = _preceded(os.unlink)
    os.rmdir = _preceded(os.rmdir)


def _preceded(delete: Callable[..., None]) -> Callable[..., None]:
    """The call with the point "files.unlink" before it, if it deletes from an open folder."""
    if hasattr(delete, "__wrapped__"):
        return delete

    @functools.wraps(delete)
    def preceded(path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            passed("files.unlink")
        delete(path, dir_fd=dir_fd)

    return preceded


def passed(name: str) -> None:
    """Run the action that the plan has for this point, if any."""
    assert name in POINTS, name
    plan = os.environ.get(PLAN)
    if plan:
        hits[name] = now = hits[name] + 1  # another thread may count while this one waits
        for point, action, turn in parsed(plan):
            if point == name and turn in (0, now):
                act(name, action)


def parsed(plan: str) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for part in plan.split(","):
        point, _, rest = part.strip().partition("=")
        action, _, turn = rest.partition("@")
        if point not in POINTS or not action or (turn and not turn.isdigit()):
            raise ValueError(f"{part!r} is no failpoint: set name=action@n with one of the names {', '.join(POINTS)}")
        found.append((point, action, int(turn or 0)))
    return found


def act(name: str, action: str) -> None:
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
        raise ValueError(f"{action!r} is no action: kill, raise:ENOSPC, raise:MemoryError, sleep:0.5 or wait:/path")
