"""What the trials of this directory share.

A family of trials is a module with ``TRIALS``, the number that `faults.soak` makes of it, and ``trial(number,
folder)``: one trial, seeded by its number, in an empty folder that is left to it; None where all held, else what went
wrong.
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close

from purestep.snapshot import Snapshot, Snapshots
from rigs import forkserver
from rigs.faults import running
from rigs.forkserver import Child, Done

POLLS = 30_000
"""After so many looks, a minute or more, something hangs. The clock would go on where a machine is suspended."""


def seeded(family: str, number: int) -> random.Random:
    return random.Random(f"{family} {number}")


@contextmanager
def fails_without(guard: str, instead: Any = lambda *args, **kwargs: None) -> Iterator[None]:
    """Negative control: with this function of the library switched off, what the block asserts must not hold."""
    owner, _, name = guard.rpartition(".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil.resolve_name(owner), name, instead)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            yield


def first_failure(trial: Callable[[int, Path], str | None], numbers: Iterable[int], folder: Path) -> str | None:
    """Trials until one fails, each in a folder of its own; its number and what it said, or None."""
    for number in numbers:
        own = folder / str(number)
        own.mkdir(parents=True)
        found = trial(number, own)
        if found is not None:
            return f"trial {number}: {found}"
    return None


def wait_for(child: Child, word: str, count: int = 1) -> None:
    """Returns when the child has said so many lines that begin so, or has ended."""
    for _ in range(POLLS):
        if len(list(running.told(child.out(), word))) >= count or not child.lives():
            return
        time.sleep(0.002)
    raise AssertionError(f"no {word!r} in {child.out()!r}")


def ended(child: Child) -> Done:
    """How it ended; what does not end is killed, and the status says so."""
    for _ in range(POLLS):
        if not child.lives():
            return child.wait()
        time.sleep(0.002)
    child.kill()
    return child.wait()


def restored_quietly(folder: Path, *, writer: bool) -> Snapshot:
    """The newest snapshot, read by a run that goes on or by a bystander; a warning on the way is an error."""
    with warnings.catch_warnings(action="error"), Snapshots(folder, writer=writer) as snapshots:
        found = snapshots.restore(running.state(0))
    assert_trees_close(found.state, running.state(found.step), exact=True)
    return found


def goes_on(folder: Path, acknowledged: int, *, mended: bool = False) -> str | None:
    """Whether a directory that a killed `running.save_...` has left is as good as one that nobody killed.

    Args:
        folder: of the snapshots.
        acknowledged: the last step that was said to be saved.
        mended: whether a damaged step is to be expected, planted by the run itself.
    """
    try:
        if not mended and acknowledged:
            seen = restored_quietly(folder, writer=False).step
            if seen < acknowledged:
                return f"a reader sees step {seen}, {acknowledged} was acknowledged"
        with warnings.catch_warnings(action="ignore" if mended else "error"), Snapshots(folder, keep=1) as snapshots:
            found = snapshots.restore(running.state(0)) if acknowledged else None
            if found is not None:
                assert_trees_close(found.state, running.state(found.step), exact=True)
                if found.step < acknowledged:
                    return f"went back to step {found.step}, {acknowledged} was acknowledged"
            snapshots.save(1000, running.state(1000))
        names = sorted(path.name for path in folder.iterdir() if not path.name.endswith((".archived", ".corrupt")))
        return None if names == [".lock", "1000"] else f"left over: {names}"
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}"


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file below the folder, by its path; of a link where it leads."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def same_values(found: dict[str, torch.Tensor], step: int) -> bool:
    """Whether these are the values that were saved as this step, bit for bit."""
    expected = running.state(step)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@functools.cache
def whole_run() -> str:
    """The digest of the `running.train` that nobody interrupts."""
    with tempfile.TemporaryDirectory() as folder:
        return finished(Path(folder))


def finished(folder: Path) -> str:
    """The digest of a `running.train` that is started, or resumed, in this folder and goes to its end."""
    done = ended(forkserver.shared().start(running.child("train", str(folder)), quick=True))
    return next(running.told(done.out, "done"), [f"no digest, status {done.status}: {done.err}"])[0]
