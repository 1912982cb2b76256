"""The last batches of a run, with states from which its steps can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..types import Tree
from . import replay


class Recording(NamedTuple):
    """Consecutive calls of a train step.

    Args:
        state: before the first call.
        batches: of the calls, in order.
        first: the number of the first call of the run, from 1.

    Example:
        >>> import torch
        >>> recording = Recording(torch.zeros(()), [1, 2, 3], first=10)
        >>> recording.steps
        range(10, 13)
    """

    state: Tree
    batches: Sequence[Any]
    first: int = 1

    @property
    def steps(self) -> range:
        """The numbers of the calls."""
        return range(self.first, self.first + len(self.batches))


def write(path: Path | str, recording: Recording) -> Path:
    """Write a recording to one file, atomically.

    Raises:
        StateError, WriteFailed: as `replay.write`.
    """
    state, batches, first = recording
    return replay.write(path, state, list(batches), {"first": first, "step": first + len(batches) - 1})


def read(path: Path | str, like: Tree, device: torch.device | str = "cpu") -> tuple[Recording, dict[str, Any]]:
    """Read a file of `write`, or one call that `replay.write` has written. Returns its notes too.

    Raises:
        NotFound, Corrupt, Mismatch: as `replay.read`.
    """
    found = replay.read(path, like, device)
    if "first" in found.notes:
        return Recording(found.state, found.batch, found.notes["first"]), found.notes
    return Recording(found.state, [found.batch], found.notes.get("step") or 1), found.notes
