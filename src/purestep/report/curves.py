"""The curves of a report: numbers by optimizer update, of every run, quantity and loader."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .run_files import Row, StoredRun, finite

MOST_POINTS = 2000  # of a curve; longer ones are averaged in blocks
_LAST = ("lr", "grad_norm", "steps_per_second", "wait_fraction")


class Curve(NamedTuple):
    """One curve of one run."""

    run: int  # index
    loader: str  # "train", "val", ..., or "" for a quantity without one
    steps: list[float]  # optimizer updates
    values: list[float]


def quantities(runs: list[StoredRun]) -> dict[str, list[Curve]]:
    """The curves by quantity (``"loss"``, ``"accuracy"``, ``"lr"``), losses first, learning rate and speed last."""
    names = {name for run in runs for row in (*run.history, *run.lines) for name in row}
    loaders = sorted({name.removesuffix("_loss") for name in names if name.endswith("_loss")} | {"train"}, key=len)
    found: dict[str, list[Curve]] = {}
    for index, run in enumerate(runs):
        for name in dict.fromkeys(name for row in (*run.history, *run.lines) for name in row):
            if name in ("epoch", "step", "kind"):
                continue
            loader = next((loader for loader in reversed(loaders) if name.startswith(f"{loader}_")), "")
            curve = _curve(run, index, loader, name)
            if curve.values:
                found.setdefault(name.removeprefix(f"{loader}_") if loader else name, []).append(curve)
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(quantity: str) -> tuple[int, str]:
    if quantity in _LAST:
        return 2 + _LAST.index(quantity), quantity
    return (0 if quantity == "loss" else 1), quantity


def _curve(run: StoredRun, index: int, loader: str, name: str) -> Curve:
    """The lines of the log if they have the quantity: they are denser than the rows of the history."""
    rows = [row for row in run.lines if finite(row.get(name)) is not None]
    on_epochs = [row for row in run.history if finite(row.get(name)) is not None]
    rows = rows if len(rows) > len(on_epochs) else on_epochs
    steps = [_number(row, "step", at + 1) for at, row in enumerate(rows)]
    return Curve(index, loader, *_thinned(steps, [_number(row, name, 0.0) for row in rows]))


def _number(row: Row, name: str, otherwise: float) -> float:
    value = finite(row.get(name))
    return otherwise if value is None else value


def _thinned(*columns: list[float]) -> list[list[float]]:
    count = len(columns[0])
    if count <= MOST_POINTS:
        return list(columns)
    edges = np.linspace(0, count, MOST_POINTS + 1).astype(int)[:-1]
    sizes = np.diff([*edges, count])
    return [[float(f"{mean:.7g}") for mean in np.add.reduceat(np.asarray(c), edges) / sizes] for c in columns]
