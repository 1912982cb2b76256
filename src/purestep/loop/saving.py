"""Snapshots of a run: one a call, whatever made it due."""

from __future__ import annotations

from collections.abc import Mapping

from .. import data, events, files
from ..snapshot import Snapshots
from ..types import Tree
from .record import Cell, Record, to_store


class Saver:
    """Writes a run's snapshots, if it has any.

    Args:
        snapshots: None where nothing is saved.
        feed: whose position is saved with the state.
        saved: the call that the state comes from, where it was read from a snapshot.
    """

    def __init__(self, snapshots: Snapshots | None, feed: data.Feed, *, saved: int | None) -> None:
        self._snapshots = snapshots
        self._feed = feed
        self._saved = saved
        self._rows: dict[int, dict[str, float]] = {}  # of the last call that has one, until it is saved

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
        return events.Saved(record.calls, self._snapshots.directory / str(record.calls))

    def wait(self) -> None:
        """Returns when everything is committed."""
        if self._snapshots is not None:
            self._snapshots.wait()
