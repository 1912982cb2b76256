"""What one call of a step does, counted on the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import device


def counted(step: Callable[..., Any], state: Any, batch: Any, *, warm: int = 2) -> tuple[device.Seen, Any]:
    """The calls of one step after `warm` others, and the state behind it."""
    for _ in range(warm):
        state, _ = step(state, batch)
    device.reset()
    state, _ = step(state, batch)
    return device.seen(), state
