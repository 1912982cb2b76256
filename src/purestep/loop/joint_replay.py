"""The call that halted all processes, as a call of one process: in a file, which one process repeats."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..data import to_device
from ..diagnostics import replay
from ..errors import NonFiniteError
from ..parallel import Mesh, agreement, full
from ..snapshot import Snapshots
from ..types import Share, TrainState, Tree
from . import nonfinite_steps
from .loop_state import Call

_log = logging.getLogger("purestep")


def write(
    error: NonFiniteError,
    frozen: Tree,
    window: list[tuple[Call, Any]],
    snapshots: Snapshots | None,
    *,
    mesh: Mesh,
    accumulate: int,
) -> None:
    """Write the whole state and the whole batch of the call into a file of the first process, and name it in the error.

    A collective: the state halts in all processes at one call. A failure to write is a warning.

    Args:
        error: of the halted state; its message gets the path.
        frozen: this process's part of that state, as it was before the call.
        window: the calls of the accumulation window that led there, with this process's shares.
        snapshots: the file is in their directory. None: nothing is written.
        mesh: of the run.
        accumulate: calls in a window.
    """
    if snapshots is None or not isinstance(frozen, TrainState) or not window:
        return
    own = [(batch is not None, bool(nonfinite_steps.bad_leaves([(call, batch)]))) for call, batch in window]
    flags = list(zip(*agreement.gathered(own), strict=True))  # by call, then by process
    held = [index for index, there in enumerate(flags) if all(is_held for is_held, _ in there)]
    if not held:
        return
    index = next((index for index in held if any(is_bad for _, is_bad in flags[index])), held[-1])
    state = full(nonfinite_steps.state_before(TrainState(*frozen), window, index, accumulate))
    shares = agreement.gathered_by_first(_sent(window[index][1], mesh))
    path: str | None = None
    if shares is not None:
        target = snapshots.directory / "nonfinite" / f"{error.step}.safetensors"
        notes = {"step": error.step, "where": error.where, "processes": mesh.size}
        try:
            path = str(replay.write(target, state, to_device(_joined(shares), state), notes))
        except Exception as failed:  # all processes wait for the path
            _log.warning("state and batch were not written down: %s: %s", type(failed).__name__, failed)
    path = agreement.from_process(path, 0)
    if path is not None:
        error.written(path)


def _sent(share: Share, mesh: Mesh) -> Any:
    """The rows of a share on the CPU; None if they count nothing, or if another process sends them."""
    if mesh.coordinate("tensor") or not bool(share.counts > 0):
        return None
    return tree.map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, tree.dicts(share.rows))


def _joined(shares: list[Any]) -> Tree:
    """The whole batch.

    Raises:
        Exception: torch's, for leaves that are no tensors of one shape but for the rows.
    """
    parts = [tree.flatten(rows) for rows in shares if rows is not None]
    leaves = [torch.cat(list(pieces)) for pieces in zip(*(leaves for leaves, _ in parts), strict=True)]
    return tree.unflatten(parts[0][1], leaves)
