"""Snapshots of a run: one a call, whatever made it due."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import data, events, files
from ..snapshot import Snapshots
from ..types import Tree
from .carrying import Carrier
from .record import Cell, Record, to_store

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig


class Saver:
    """Writes a run's snapshots, if it has any.

    Args:
        snapshots: None where nothing is saved.
        feed: whose position is saved with the state.
        config: says whether what has been compiled is kept beside them.
        saved: the call that the state comes from, where it was read from a snapshot.
    """

    def __init__(self, snapshots: Snapshots | None, feed: data.Feed, config: FitConfig, *, saved: int | None) -> None:
        self._snapshots = snapshots
        self._feed = feed
        self._saved = saved
        self._rows: dict[int, dict[str, float]] = {}  # of the last call that has one, until it is saved
        self._carrier = _carrier(snapshots, config)

    def due(self, record: Record, ahead: int) -> bool:
        """Whether the policy asks for one here; ``ahead`` updates may have been made since the record."""
        if self._snapshots is None or self._saved == record.calls:
            return False
        return bool(self._snapshots.due(updates=record.updates + ahead, epoch=record.epoch))

    def scored(self, record: Record, row: Mapping[str, Cell]) -> None:
        """This row of the history is that of this call. Whoever saves the call saves it too: it ranks the snapshot."""
        self._rows = {record.calls: {name: float(value) for name, value in row.items() if value is not None}}

    def save(self, state: Tree, record: Record, *, ahead: int) -> events.Saved | None:
        """Hand a snapshot to the writer, unless this call has one; that with a row knows more, and replaces it."""
        again = self._saved == record.calls
        metrics = self._rows.pop(record.calls, {})
        if self._snapshots is None or (again and not metrics):
            return None
        files.failpoint("loop.snapshot")
        self._snapshots.due(updates=record.updates + ahead, epoch=record.epoch)  # counts from here
        loop = {"record": to_store(record), "feed": self._feed.position(record.epoch, record.batch)}
        self._saved = record.calls
        self._snapshots.save(record.calls, state, loop=loop, metrics=metrics, overwrite=again)
        self._carrier.save()
        return events.Saved(record.calls, self._snapshots.directory / str(record.calls))

    def wait(self) -> None:
        """Returns when everything is committed."""
        if self._snapshots is not None:
            self._snapshots.wait()


def _carrier(snapshots: Snapshots | None, config: FitConfig) -> Carrier:
    if snapshots is None or not config.compile_cache:
        return Carrier(None)
    return Carrier(snapshots.directory, None if config.resume in (None, "auto") else Path(config.resume))
