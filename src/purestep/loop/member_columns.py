"""The columns of the best member, and of the only one, in the history of an ensemble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import stopping
from ..errors import ConfigError
from .loop_state import Cell, cell

if TYPE_CHECKING:
    from .policy import Monitor


def with_best(row: Mapping[str, Cell], monitor: Monitor, members: int) -> dict[str, Cell]:
    """Add ``val_loss[best]``, the best of ``val_loss[0]``, ``val_loss[1]``, ..., for every metric of a row whose name
    says if small values are good, and for the monitored one. Of an ensemble of one member, ``val_loss`` is also
    ``val_loss[0]``.

    Args:
        row: of the history.
        monitor: its mode is used for the metric that it monitors.
        members: of the ensemble; 0 for a program of one model.
    """
    found = dict(row)
    if members == 1:  # whose metrics are vectors of one number, which have the name of a number
        whole = {name for name in row if f"{name}[0]" not in row and not name.endswith("]")} - {"epoch", "step"}
        found |= {f"{name}[0]": row[name] for name in row if name in whole}
    for name in row if members else ():
        entries = [cell(found.get(f"{name}[{index}]")) for index in range(members)]
        known = [value for value in entries if value is not None]
        mode = _mode(name, monitor) if known and not name.endswith("]") else None
        if mode is not None:
            found[f"{name}[best]"] = min(known) if mode == "min" else max(known)
    return found


def _mode(name: str, monitor: Monitor) -> stopping.Mode | None:
    if monitor.metric == f"{name}[best]":
        return monitor.mode
    try:
        return stopping.default_mode(name)
    except ConfigError:
        return None
