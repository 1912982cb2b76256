"""The charts of a report, by plotly: one per quantity, with the curves of every run and loader."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from .run_files import Row, Run, finite, number_text

MOST_POINTS = 2000  # of a curve; longer ones are averaged in blocks
_SMOOTHED = 25  # points from which a curve gets a smoothed one
_COLORS = ("#2a78d6", "#e07b00", "#1a9b6c", "#b04fc4", "#d03f4f", "#7a6ff0", "#8a7a00", "#0f97b3")
_DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
_LAST = ("lr", "grad_norm", "steps_per_second", "wait_fraction")
_TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "steps_per_second": "steps per second",
    "wait_fraction": "share of time waiting for data",
}


class Curve(NamedTuple):
    """One curve of one run."""

    run: int  # index
    loader: str  # "train", "val", ..., or "" for a quantity without one
    steps: list[float]  # optimizer updates
    epochs: list[float]
    values: list[float]


def quantities(runs: list[Run]) -> dict[str, list[Curve]]:
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


def _curve(run: Run, index: int, loader: str, name: str) -> Curve:
    """The lines of the log if they have the quantity: they are denser than the rows of the history."""
    rows = [row for row in run.lines if finite(row.get(name)) is not None]
    on_epochs = [row for row in run.history if finite(row.get(name)) is not None]
    rows = rows if len(rows) > len(on_epochs) else on_epochs
    steps = [_number(row, "step", at + 1) for at, row in enumerate(rows)]
    epochs = _epochs(run, rows, steps)
    return Curve(index, loader, *_thinned(steps, epochs, [_number(row, name, 0.0) for row in rows]))


def _number(row: Row, name: str, otherwise: float) -> float:
    value = finite(row.get(name))
    return otherwise if value is None else value


def _epochs(run: Run, rows: list[Row], steps: list[float]) -> list[float]:
    """The number of epochs done at each row, with fractions inside an epoch."""
    known = {0.0: 0.0} | {_number(row, "step", 0.0): _number(row, "epoch", 0.0) for row in run.history}
    if len(known) < 2:
        return [_number(row, "epoch", at + 1) for at, row in enumerate(rows)]
    marks = sorted(known.items())
    (before, epoch_before), (last, epoch) = marks[-2:]
    beyond = last + (last - before), epoch + (epoch - epoch_before)  # a live run is ahead of its last row
    at, done = zip(*marks, beyond, strict=True)
    return [round(float(value), 4) for value in np.interp(steps, at, done)]


def _thinned(*columns: list[float]) -> list[list[float]]:
    count = len(columns[0])
    if count <= MOST_POINTS:
        return list(columns)
    edges = np.linspace(0, count, MOST_POINTS + 1).astype(int)[:-1]
    sizes = np.diff([*edges, count])
    return [[float(f"{mean:.7g}") for mean in np.add.reduceat(np.asarray(c), edges) / sizes] for c in columns]


def smoothed(values: list[float]) -> list[float]:
    """An exponential moving average over a twentieth of the curve, without the pull of its start.

    Example:
        >>> smoothed([2.0] * 3)
        [2.0, 2.0, 2.0]
    """
    decay = 1.0 - 2.0 / (max(len(values) / 20, 3.0) + 1.0)
    total = weight = 0.0
    found: list[float] = []
    for value in values:
        total, weight = decay * total + (1.0 - decay) * value, decay * weight + (1.0 - decay)
        found.append(float(f"{total / weight:.7g}"))
    return found


def color(index: int) -> str:
    """The color of a run, or of a loader where there is one run. It is legible on white and on black."""
    return _COLORS[index % len(_COLORS)]


def plotly() -> Any:
    """The module ``plotly.graph_objects``.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        hint = "pip install 'purestep[report]'"
        raise ConfigError("plotly is not installed", where="purestep report", hint=hint) from error


def charts(runs: list[Run], names: list[str]) -> dict[str, Any]:
    """A plotly figure by title. Every trace has ``meta`` with its run and its x values by step and by epoch."""
    graphs = plotly()
    made: dict[str, Any] = {}
    for quantity, curves in quantities(runs).items():
        loaders = sorted({curve.loader for curve in curves}, key=lambda loader: (loader != "train", loader))
        traces = [
            trace for curve in curves for trace in _traces(graphs, curve, quantity, loaders, runs[curve.run], names)
        ]
        figure = graphs.Figure(traces)
        figure.update_layout(
            template="none",
            height=300,
            margin={"l": 56, "r": 12, "t": 8, "b": 40},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            hovermode="closest",
            showlegend=len({trace.name for trace in traces}) > 1,
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            font={"family": "system-ui, sans-serif", "size": 12},
        )
        figure.update_xaxes(title_text="step (optimizer updates)", zeroline=False, automargin=True, rangemode="tozero")
        figure.update_yaxes(zeroline=False, automargin=True, exponentformat="power")
        made[_TITLES.get(quantity, quantity.replace("_", " "))] = figure
    return made


def _traces(graphs: Any, curve: Curve, quantity: str, loaders: list[str], run: Run, names: list[str]) -> list[Any]:
    at = loaders.index(curve.loader)
    several = len(names) > 1
    line_color = color(curve.run if several else at)
    dash = _DASHES[at % len(_DASHES)] if several else "solid"
    name = " · ".join(part for part in (names[curve.run] if several else "", curve.loader) if part) or quantity
    is_noisy = len(curve.values) >= _SMOOTHED and quantity != "lr"
    common = {"legendgroup": name, "name": name}

    def trace(values: list[float], steps: list[float], epochs: list[float], **more: Any) -> Any:
        meta = {"run": curve.run, "step": steps, "epoch": epochs}
        shown = {"hovertemplate": f"{name}<br>%{{x}}: %{{y:.5g}}<extra></extra>"} | common | more
        return graphs.Scatter(x=steps, y=values, meta=meta, **shown)

    line = {"color": line_color, "width": 2, "dash": dash}
    raw = curve.values, curve.steps, curve.epochs
    mode = "lines+markers" if len(curve.values) <= 30 else "lines"
    if not is_noisy:
        found = [trace(*raw, mode=mode, line=line, marker={"size": 4})]
    else:
        faint = {"color": line_color, "width": 1}
        found = [
            trace(*raw, mode="lines", line=faint, opacity=0.45, showlegend=False, hoverinfo="skip", hovertemplate=None),
            trace(smoothed(curve.values), curve.steps, curve.epochs, mode="lines", line=line),
        ]
    best = _best_point(run, curve.loader, quantity)
    if best is not None:
        step, epoch, value = best
        star = {"symbol": "star", "size": 13, "color": line_color, "line": {"width": 1, "color": "#fff"}}
        text = f"best: epoch {epoch:g}, {number_text(value)}"
        marks: dict[str, Any] = {"mode": "markers", "marker": star, "showlegend": False}
        found.append(trace([value], [step], [epoch], hovertemplate=f"{name}<br>{text}<extra></extra>", **marks))
    return found


def _best_point(run: Run, loader: str, quantity: str) -> tuple[float, float, float] | None:
    """Step, epoch and value of the best row, on the curve of the monitored metric."""
    if run.best is None or run.monitor is None or run.monitor[0] != (f"{loader}_{quantity}" if loader else quantity):
        return None
    row = run.history[run.best]
    return _number(row, "step", run.best + 1), _number(row, "epoch", run.best + 1), _number(row, run.monitor[0], 0.0)
