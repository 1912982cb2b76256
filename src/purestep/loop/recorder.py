"""Keep copies of the last batches of a run, with states from which its calls can be repeated."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from .. import tree
from ..compile import plain
from ..diagnostics import Recording, recording
from ..errors import PurestepError
from ..files import subdirectory
from ..snapshot import Snapshots
from ..types import Tree
from .call_hooks import CallHook
from .loop_state import Call, LoopState

_log = logging.getLogger("purestep")
_NOTHING = object()


class BatchRecorder(CallHook):
    """Keeps copies of at least the last ``size`` batches, and a copy of the state before every ``size``-th of them.

    A state that is not the result of the call before (a flush, the answer of a callback) is copied too. So two copies
    of the state and less than ``2 * size`` batches are in memory, unless states change between the calls.

    Args:
        size: number of batches, >= 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: deque[Recording] = deque()
        self._result: Any = _NOTHING

    def before_call(self, state: Tree, batch: Any, loop: LoopState) -> None:
        """Copy the arguments of the call."""
        if state is not self._result or len(self._parts[-1].batches) == self._size:
            self._parts.append(Recording(tree.clone(plain(state)), [], loop.calls + 1))
        batches = self._parts[-1].batches
        assert isinstance(batches, list)
        batches.append(_copy(batch))
        while sum(len(part.batches) for part in self._parts) - len(self._parts[0].batches) >= self._size:
            self._parts.popleft()
        self._result = _NOTHING

    def after_call(self, state: Tree, call: Call) -> None:
        """Note the result of the call."""
        self._result = state if call.batch >= 0 else _NOTHING  # a flush is not repeated

    def recording(self) -> tuple[Recording, ...]:
        """The calls, oldest first; each part begins with a state."""
        return tuple(self._parts)

    def end(self, error: BaseException | None, snapshots: Snapshots | None) -> None:
        """Set ``error.recording``, and write the calls to files in the directory of the snapshots, which a note on the
        error names. A failure to write is a warning."""
        if error is None or not self._parts:
            return
        vars(error)["recording"] = self.recording()
        for part in self._parts if snapshots is not None else ():
            assert snapshots is not None
            name = f"{part.steps[0]}-{part.steps[-1]}.safetensors"
            try:
                path = recording.write(subdirectory(snapshots.directory, "recording") / name, part)
            except PurestepError as failed:
                _log.warning("calls %s to %s were not written down: %s", part.steps[0], part.steps[-1], failed)
                continue
            error.add_note(f"calls {part.steps[0]} to {part.steps[-1]} are in {path} (ps.testing.replay repeats them)")


def _copy(batch: Any) -> Any:
    """Copy tensors and arrays, since a loader may refill its own."""
    tree.dicts(batch)  # registers the classes of batch objects, which the copy keeps
    return tree.map(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf) if isinstance(leaf, np.ndarray | Mapping) else leaf
