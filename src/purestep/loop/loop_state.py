"""What the loop remembers: plain numbers, so that a snapshot's manifest holds all of it as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import stopping
from ..errors import ConfigError
from ..snapshot import Table
from ..types import Tree

Cell = float | int | None


class Record(NamedTuple):
    """The loop's position, and everything it decides from."""

    epoch: int = 0  # completed epochs
    batch: int = 0  # batches consumed in the running epoch; prefetched ones do not count
    calls: int = 0  # of train_step and flush
    updates: int = 0  # optimizer updates applied
    interval: Mapping[str, tuple[float, float]] = MappingProxyType({})  # sums since the last row of the history
    line: Mapping[str, tuple[float, float]] = MappingProxyType({})  # sums since the last line of the log
    last: Mapping[str, float] = MappingProxyType({})  # last learning rates
    best: stopping.Record = stopping.init()
    best_step: int | None = None  # the snapshot that holds it
    evaluations: int = 0  # rows with a value of the monitor, which early stopping counts
    rollbacks: int = 0  # how often the run went back to a good state
    history: Table = Table()
    judged: str = ""  # the monitor and its mode, of which the best is
    window: int = 0  # batches to an update; 0: nobody has said
    counted: int = 0  # batches of the last epoch, where its fractions were taken of another number
    injected: Mapping[str, float] = MappingProxyType({})  # hyperparameters that `optim.inject` was called with
    origin: str = ""  # the directory that the run began from, where that is another one than its own

    @property
    def is_ahead(self) -> bool:
        """Whether something was done since the last row of the history; a step may measure nothing."""
        return bool(self.interval) or self.updates > self.told

    @property
    def told(self) -> int:
        """Updates at the last row of the history."""
        return next((int(step or 0) for step in self.history.last("step", 1)), 0)

    def stepped(self) -> Record:
        """After a call with one more batch: `_replace`, which every step would wait for, in a quarter of its time."""
        epoch, batch, calls, *rest = self
        return self._make((epoch, batch + 1, calls + 1, *rest))


class FitResult(NamedTuple):
    """What a run leaves behind.

    Args:
        state: the last one; that of the best row is ``snapshots.restore(state, step=result.best["step"])``.
        history: ``"epoch"``, ``"step"`` (updates), ``"train_loss"``, ``"val_loss"``, ``"lr"``, ...: an entry a row.
        best: ``{"epoch", <monitor>, "step"}``, of which "step" is the name of the snapshot: calls, which are more than
            updates where batches are accumulated. None without a monitor.
        epochs: completed.
        stop_reason: "epochs", "steps", "max_time", "early_stopping", "fast_dev_run", or a callback's; in the ``result``
            of an exception also "interrupted" and "error".
    """

    state: Tree
    history: dict[str, list[Any]]  # "epoch", "step", "train_loss", "val_loss", "lr", ...: one entry a row
    best: dict[str, Any] | None  # {"epoch", <monitor>, "step"}, None without a monitor
    epochs: int  # completed
    stop_reason: str  # see above

    def summary(self) -> dict[str, Any]:
        """``{"best": {"epoch", "val_loss"}, "epochs"}``.

        Example:
            >>> FitResult({}, {}, {"epoch": 2, "val_loss": 0.1, "step": 8}, 3, "epochs").summary()
            {'best': {'epoch': 2, 'val_loss': 0.1}, 'epochs': 3}
        """
        best = None if self.best is None else {name: value for name, value in self.best.items() if name != "step"}
        return {"best": best, "epochs": self.epochs}


def to_json(record: Record) -> dict[str, Any]:
    """The record as JSON, its history too."""
    return to_store(record) | {"history": dict(record.history)}


def to_store(record: Record) -> dict[str, Any]:
    """The record as a snapshot takes it: JSON, and the history as it is, of which only new rows are written."""
    found = record._asdict()
    return found | {
        "best": stopping.to_json(record.best),
        "interval": _sums_to_json(record.interval),
        "line": _sums_to_json(record.line),
        "last": {name: _bits(value) for name, value in record.last.items()},
        "injected": {name: _bits(value) for name, value in record.injected.items()},
    }


def from_json(found: Mapping[str, Any]) -> Record:
    """The way back: fields that a later version adds are left out, and those that an earlier one lacks keep their
    defaults."""
    known = {name: value for name, value in found.items() if name in Record._fields}
    known["history"] = Table(known.get("history"))
    known["best"] = stopping.from_json(known["best"])
    known["interval"] = _sums_from_json(known["interval"])
    known["line"] = _sums_from_json(known.get("line", {}))
    known["last"] = {name: _number(value) for name, value in known["last"].items()}
    injected = known.pop("injected", {})
    if injected:
        known["injected"] = {name: _number(value) for name, value in injected.items()}
    return Record(**known)


def with_row(history: Mapping[str, list[Cell]], row: Mapping[str, Cell]) -> Table:
    """The history with one more row; what a row or an earlier one lacks is None, and so is what is not finite."""
    table = history if isinstance(history, Table) else Table(history)
    return table.with_row({name: cell(value) for name, value in row.items()})


def joined(row: Mapping[str, Cell], values: Mapping[str, Cell], *, loader: str) -> dict[str, Cell]:
    """The row with what an evaluation has measured.

    Raises:
        ConfigError: a name is there already: of loaders "val" and "val_hard", both may have a ``val_hard_loss``.
    """
    if both := row.keys() & values.keys():
        raise ConfigError(
            f"two metrics are called {min(both)!r} in the history: one is of the loader {loader!r}",
            where="fit",
            hint=f"rename the loader {loader!r}, or the metric",
        )
    return {**row, **values}


def cell(value: Cell) -> Cell:
    """A number for JSON."""
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _sums_to_json(sums: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    return {name: [_bits(total), _bits(weight)] for name, (total, weight) in sums.items()}


def _sums_from_json(found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (_number(total), _number(weight)) for name, (total, weight) in found.items()}


def _bits(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _number(value: float | str) -> float:
    return float(value)
