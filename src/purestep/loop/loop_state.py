"""The state of the loop: plain numbers, which a snapshot's manifest stores as JSON, and the functions from one to the
next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from .. import stopping
from ..errors import ConfigError
from ..types import Tree

Cell = float | int | None


class LoopState(NamedTuple):
    """The position of a run, and all that its decisions depend on. A snapshot stores it without `_NOT_STORED`."""

    epoch: int = 0  # completed epochs
    batch: int = 0  # batches consumed in the running epoch, without prefetched ones
    calls: int = 0  # of train_step and flush
    window_left: int = 1  # micro-batches until the accumulation window closes; not stored, the train state has it
    pending: int = 0  # updates whose metrics have not arrived, so they may have been refused; not stored
    stop: str | None = None  # why the run ends; not stored
    updates: int = 0  # optimizer updates applied, as far as the host has read the metrics
    interval: Mapping[str, tuple[float, float]] = MappingProxyType({})  # sums since the last row of the history
    computed: Mapping[str, Mapping[str, float]] = MappingProxyType({})  # values of `interval` that a class computes
    line: Mapping[str, tuple[float, float]] = MappingProxyType({})  # sums since the last log line
    last: Mapping[str, float] = MappingProxyType({})  # last learning rates
    best: stopping.Record = stopping.Record()
    best_step: int | None = None  # the snapshot of the best row
    evaluations: int = 0  # rows with a value of the monitored metric, which early stopping counts
    history: Mapping[str, list[Cell]] = MappingProxyType({})  # columns of one length
    judged: str = ""  # the monitored metric and its mode, to which `best` belongs
    window: int = 0  # micro-batches per update; 0 if unknown
    injected: Mapping[str, float] = MappingProxyType({})  # hyperparameters that were passed to `optim.inject`

    @property
    def lacks_row(self) -> bool:
        """True if something happened since the last row of the history. A step may return no metrics."""
        return bool(self.interval) or self.updates > self.updates_at_row

    @property
    def updates_at_most(self) -> int:
        """Updates, if all pending ones are applied."""
        return self.updates + self.pending

    @property
    def updates_at_row(self) -> int:
        """Updates at the last row of the history."""
        return int(self.history.get("step", [0])[-1] or 0)

    @property
    def is_window_open(self) -> bool:
        """True between two micro-batches of an accumulation window."""
        return self.window_left != self.window

    def stepped(self) -> LoopState:
        """After one more batch. `_replace` would take four times as long, in every step."""
        epoch, batch, calls, left, pending, *rest = self
        return self._make((epoch, batch + 1, calls + 1, left - 1 or self.window, pending + (left == 1), *rest))

    def flushed(self, *, updates: int) -> LoopState:
        """After a flush, which is a call and empties the window, with an update or not."""
        return self._replace(calls=self.calls + 1, window_left=self.window, pending=self.pending + updates)

    def next_epoch(self) -> LoopState:
        """After the last batch of an epoch."""
        return self._replace(epoch=self.epoch + 1, batch=0)

    def stopped(self, reason: str | None) -> LoopState:
        """With a reason to end, unless there is one already."""
        return self if self.stop or reason is None else self._replace(stop=reason)


class Call(NamedTuple):
    """A call of train_step or flush, to which a row of metrics belongs."""

    number: int  # from 1, as TrainState.step counts
    epoch: int
    batch: int  # 0-based within the epoch; -1 for a flush
    closing: bool  # it closed an accumulation window

    @property
    def place(self) -> str:
        """The place in the data, in messages, which count from 1."""
        return f"epoch {self.epoch + 1}" + (f", batch {self.batch + 1}" if self.batch >= 0 else "")


def _no_state() -> None:
    return None


class FitResult(NamedTuple):
    """The result of a run.

    Args:
        state: the last one. The module that the program was built from stays what it was:
            ``ps.load_into(model, result.state)`` writes into it.
        history: ``"epoch"``, ``"step"`` (updates), ``"train_loss"``, ``"val_loss"``, ``"lr"``, ...: one entry per row.
        best: ``{"epoch", <monitor>, "step"}``. "step" is the name of the snapshot, which counts the calls of this run:
            more than updates if batches are accumulated. None without a monitor.
        epochs: completed.
        stop_reason: "epochs", "steps", "max_time", "early_stopping", "fast_dev_run", or a callback's. The ``result`` of
            an exception also has "interrupted" and "error".
        view: "ema" if the average was evaluated, else "params". ``bind``, `evaluate`, `export_weights` and `load_into`
            use the same by default, except after ``evaluate_on="params"`` of a state with an average: pass
            ``view=result.view``.
        read_best: returns `best_state`.
    """

    state: Tree
    history: dict[str, list[Any]]
    best: dict[str, Any] | None
    epochs: int
    stop_reason: str
    view: str = "params"
    read_best: Callable[[], Tree | None] = _no_state

    @property
    def best_state(self) -> Tree | None:
        """The state of the best row: of ``monitor``, or of ``val_loss`` by default. None if there is no such row.

        Example:
            >>> import torch, purestep as ps
            >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
            >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))]
            >>> result = ps.fit(program.init(), (batches, batches), program, epochs=3, progress=False)
            >>> ps.evaluate(result.best_state, batches, program.eval_step)["loss"] == result.best["val_loss"]
            True

        A run with ``snapshots=`` reads it from the disk at each use: of several processes, all have to. A run without
        them keeps it in memory.

        Raises:
            SnapshotError: the snapshot is damaged.
        """
        return self.read_best()

    def summary(self) -> dict[str, Any]:
        """Return ``{"best": {"epoch", "val_loss"}, "epochs"}``.

        Example:
            >>> FitResult({}, {}, {"epoch": 2, "val_loss": 0.1, "step": 8}, 3, "epochs").summary()
            {'best': {'epoch': 2, 'val_loss': 0.1}, 'epochs': 3}
        """
        best = None if self.best is None else {name: value for name, value in self.best.items() if name != "step"}
        return {"best": best, "epochs": self.epochs}


_NOT_STORED = ("window_left", "pending", "stop", "history")
_NUMBERS = ("interval", "computed", "line", "last", "injected")


def to_json(loop: LoopState) -> dict[str, Any]:
    """Return the state as JSON, without its history, which a snapshot stores as an array."""
    stored = {name: value for name, value in loop._asdict().items() if name not in _NOT_STORED}
    return stored | {"best": loop.best._asdict()} | {name: _encoded(stored[name]) for name in _NUMBERS}


def from_json(stored: Mapping[str, Any], history: Mapping[str, list[Cell]] | None) -> LoopState:
    """Invert `to_json`. Unknown fields of a later version are ignored; missing ones keep their defaults."""
    known: dict[str, Any] = {name: value for name, value in stored.items() if name in LoopState._fields}
    known |= {name: _decoded(known[name]) for name in _NUMBERS if name in known}
    best = {name: value for name, value in known["best"].items() if name in stopping.Record._fields}
    known |= {"history": history or {}, "best": stopping.Record(**best)}
    return LoopState(**known)


def with_row(history: Mapping[str, list[Cell]], row: Mapping[str, Cell]) -> dict[str, list[Cell]]:
    """The history with one more row. A column that a row lacks is None there, and so is a value that is not finite."""
    count = max(map(len, history.values()), default=0)
    return {name: [*history.get(name, [None] * count), cell(row.get(name))] for name in {**history, **row}}


def joined(row: Mapping[str, Cell], values: Mapping[str, Cell], *, loader: str) -> dict[str, Cell]:
    """Add the values of an evaluation to a row.

    Raises:
        ConfigError: the row has the name already: with loaders "val" and "val_hard", both may have a
            ``val_hard_loss``.
    """
    if both := row.keys() & values.keys():
        raise ConfigError(
            f"two metrics are called {min(both)!r} in the history: one is of the loader {loader!r}",
            where="fit",
            hint=f"rename the loader {loader!r}, or the metric",
        )
    return {**row, **values}


def cell(value: Cell) -> Cell:
    """Return a number that JSON has, or None."""
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _encoded(value: Any) -> Any:
    """Numbers in mappings and tuples as JSON, which has no nan and no infinity: they are text."""
    if isinstance(value, Mapping):
        return {name: _encoded(one) for name, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, tuple):
        return [_encoded(one) for one in cast("tuple[Any, ...]", value)]
    return value if math.isfinite(value) else str(value)


def _decoded(value: Any) -> Any:
    """Invert `_encoded`."""
    if isinstance(value, Mapping):
        return {name: _decoded(one) for name, one in cast("Mapping[str, Any]", value).items()}
    return tuple(map(_decoded, value)) if isinstance(value, list) else float(value)
