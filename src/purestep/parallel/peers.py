"""Peers that are gone: which process ended, failed or does not answer, as far as the others can know.

No collective runs here, since a peer that is gone would not take part. The processes leave notes in the store of the
rendezvous: a process that fails says why, and one whose collective failed says that it is still there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ..errors import RankError
from . import mesh as meshes

_GRACE = 5.0  # seconds in which other survivors report
_PAUSE = 0.02
_LONGEST = 300  # letters of a message


@contextmanager
def answered(call: str) -> Generator[None]:
    """Translate the error of a collective into one that names the lost process.

    Args:
        call: the collective, for the message.

    Raises:
        RankError: the collective failed.
    """
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError is one
        if isinstance(error, RankError):
            raise
        raise lost(call, error) from error


def lost(call: str, error: Exception) -> RankError:
    """The error of a collective that failed, with the process that is gone where that is known."""
    groups = meshes.current()
    if groups is not None:
        free_device(groups)
    first = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
    if groups is None or groups.mesh.size == 1:
        return RankError(f"{call} failed: {first}", where="parallel")
    mesh = groups.mesh
    what = _missing(groups) or "another process is gone"
    return RankError(
        f"{what}; {call}: {first}",
        where=f"process {mesh.rank} of {mesh.size}",
        hint="see the first error of that process; `torchrun --max-restarts 3` starts all processes again, and fit "
        "goes on from the last snapshot; if it was only slow, parallel.start(timeout=...) with more seconds",
    )


def free_device(groups: meshes.Groups) -> None:
    """Abort the GPU's pending collectives: a peer is gone or this process fails, and later work would wait for them."""
    if groups.mesh.device_type != "cuda":
        return
    for group in {id(group): group for group in groups.by_axis.values()}.values():
        with contextlib.suppress(Exception):
            group.abort()


def note_failure(error: BaseException) -> None:
    """Say in the store why this process ends, for the others. Never raises."""
    groups = meshes.current()
    if groups is None or groups.store is None or isinstance(error, RankError):
        return
    lines = str(error).strip().splitlines() or [""]
    with contextlib.suppress(Exception):
        groups.store.set(f"failed/{groups.mesh.rank}", f"{type(error).__name__}: {lines[0][:_LONGEST]}")


def _missing(groups: meshes.Groups) -> str:
    """The processes that failed, or did not report that they are there."""
    store, mesh = groups.store, groups.mesh
    if store is None:
        return ""
    end = time.monotonic() + _GRACE
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store.set(f"here/{mesh.rank}", "")
        found = _noted(store, others, mesh.size, end)
        store.set(f"read/{mesh.rank}", "")
        if mesh.rank == 0 and not is_agents:  # the store ends with this process
            _wait_for_readers(store, others, end)
        return found
    except Exception:  # the store is gone
        return "" if is_agents or mesh.rank == 0 else f"process 0 of {mesh.size} is gone, with the store that it holds"


def _noted(store: Any, others: list[int], size: int, end: float) -> str:
    """Read the notes until one reports a failure, all processes but one have written theirs, or ``end`` has come.

    Returns:
        The message for the error.
    """
    while True:
        failed = {rank: store.get(f"failed/{rank}").decode() for rank in others if store.check([f"failed/{rank}"])}
        if failed:
            rank, text = min(failed.items())
            return f"process {rank} of {size} failed: {text}"
        gone = [rank for rank in others if not store.check([f"here/{rank}"])]
        if len(gone) <= 1 or time.monotonic() > end:
            return _named(gone, size)
        time.sleep(_PAUSE)


def _wait_for_readers(store: Any, others: list[int], end: float) -> None:
    """Wait until the others have read the notes, or until ``end``: those that did not fail, and if none did all but one
    that is lost."""
    alive = [rank for rank in others if not store.check([f"failed/{rank}"])]
    lost = 1 if alive == others else 0
    while time.monotonic() < end:
        late = [rank for rank in alive if not store.check([f"read/{rank}"])]
        if len(late) <= lost and not any(store.check([f"here/{rank}"]) for rank in late):
            return
        time.sleep(_PAUSE)


def _named(gone: list[int], size: int) -> str:
    if not gone:
        return "all processes are there, but their collectives failed: they do not make the same calls"
    names = f"process {gone[0]}" if len(gone) == 1 else f"processes {', '.join(map(str, gone))}"
    return f"{names} of {size} ended or did not answer within the timeout"
