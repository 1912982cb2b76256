"""One page about several runs, which needs no network: curves by plotly, then tables."""

from __future__ import annotations

import base64
import hashlib
import importlib
import re
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ..errors import ConfigError, printable
from ..files import local_path, write_bytes
from .curves import Curve, quantities
from .run_files import StoredRun, facts, finite, number_text, when

_COLUMNS = 2  # of charts
_HEIGHT = 320  # of a chart, with the gap below
_GAP = 85  # between two rows of charts: numbers and title of an axis, title of the next chart
_TOP, _BOTTOM = 130, 60  # margins
_COLORS = ("#2a78d6", "#e07b00", "#1a9b6c", "#b04fc4", "#d03f4f", "#7a6ff0", "#8a7a00", "#0f97b3")
_DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
_TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "steps_per_second": "steps per second",
    "wait_fraction": "share waiting for data",
}
_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
"""The page loads nothing, and runs no script but its own, which it names by their digests."""
_STYLE = """body{margin:0 auto;max-width:1240px;padding:20px;font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem}h2{font-size:1rem}div.table{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid #d9dee6;text-align:left}.differs{background:#e3edfb}"""


def write_page(runs: list[StoredRun], path: Path | str) -> int:
    """Write the page, atomically; return its size in bytes: about 5 MB, most of it plotly's code.

    Args:
        runs: at least one; see `read_run`.
        path: of the page.

    Raises:
        ConfigError: plotly is not installed, there is no run, or the path is a URL.
        WriteFailed: the file cannot be written.
    """
    target = local_path("purestep report", output=path)
    if not runs:
        raise ConfigError("no runs", where="purestep report", hint="pass at least one directory")
    names = _names(runs)
    figure = _figure(runs, names)
    title = _text(", ".join(names))
    charts = (
        "<p>No rows of a history yet.</p>"
        if figure is None
        else figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True, "displaylogo": False})
    )
    policy = _POLICY.format(
        scripts=" ".join(map(_digest, re.findall("<script[^>]*>(.*?)</script>", charts, re.DOTALL)))
    )
    data = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>purestep: {title}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><h1>{title}</h1><p>Written {when(time.time())} by purestep.</p>
{_compared("Runs", list(map(facts, runs)), names)}
{charts}
{_compared("Settings of fit", [{} if run.info is None else run.info.settings for run in runs], names)}
{_compared("Versions and machine", [{} if run.newest is None else run.newest.environment for run in runs], names)}
{"".join(_snapshots(run, name) for run, name in zip(runs, names, strict=True))}</body></html>
""".encode()
    write_bytes(target, data)
    return len(data)


def _text(text: str) -> str:
    """A text of a run in HTML, and in plotly's own."""
    return escape(printable(text))


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _names(runs: list[StoredRun]) -> list[str]:
    """The last parts of the paths, as many as tell the runs apart."""
    paths = [run.directory.parts for run in runs]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{parts[-1]} ({index + 1})" for index, parts in enumerate(paths)]


# --- charts -----------------------------------------------------------------------------------------------------------


def _figure(runs: list[StoredRun], names: list[str]) -> Any:
    """A chart for every quantity, with the curves of every run and loader; None if there are no numbers."""
    try:
        subplots = importlib.import_module("plotly.subplots")
    except ImportError as error:
        hint = "pip install 'purestep[report]'"
        raise ConfigError("plotly is not installed", where="purestep report", hint=hint) from error
    found = quantities(runs)
    if not found:
        return None
    rows = -(-len(found) // _COLUMNS)
    titles = [_text(_TITLES.get(name, name.replace("_", " "))) for name in found]
    height = _HEIGHT * rows
    figure = subplots.make_subplots(rows, _COLUMNS, subplot_titles=titles, vertical_spacing=_GAP / height)
    named: set[str] = set()  # in the legend
    for index, (quantity, curves) in enumerate(found.items()):
        place = {"row": index // _COLUMNS + 1, "col": index % _COLUMNS + 1}
        loaders = sorted({curve.loader for curve in curves}, key=lambda loader: (loader != "train", loader))
        for curve in curves:
            several, at = len(runs) > 1, loaders.index(curve.loader)
            # The learning rate and other quantities without a loader share the entry of training in the legend.
            label = " · ".join([names[curve.run]] * several + [curve.loader or "train"])
            line = {
                "color": _COLORS[(curve.run if several else at) % len(_COLORS)],
                "dash": _DASHES[at % len(_DASHES)] if several else "solid",
            }
            for trace in _traces(curve, quantity, _text(label), line, runs[curve.run]):
                shown = trace["showlegend"] and label not in named
                figure.add_scatter(**(trace | {"showlegend": shown}), **place)
                named |= {label} if shown else set()
    scales = [
        {"label": f"{titles[0]}: {kind}", "method": "relayout", "args": [{"yaxis.type": kind}]}
        for kind in ("linear", "log")
    ]
    buttons = {"buttons": scales, "type": "buttons", "direction": "right", "x": 0, "y": 1 + 25 / height}
    figure.update_layout(
        height=height + _TOP + _BOTTOM,
        margin={"t": _TOP, "b": _BOTTOM, "l": 50, "r": 20},
        template="plotly_white",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1 + 70 / height},
        updatemenus=[buttons | {"xanchor": "left", "yanchor": "bottom"}],
    )
    figure.update_xaxes(title_text="updates", rangemode="tozero")
    return figure


def _traces(curve: Curve, quantity: str, label: str, line: dict[str, Any], run: StoredRun) -> list[dict[str, Any]]:
    """The arguments of plotly's ``Scatter``: the curve, and a star at the best row."""
    hover = f"{label}<br>update %{{x}}: %{{y:.5g}}<extra></extra>"
    common: dict[str, Any] = {"x": curve.steps, "name": label, "legendgroup": label, "showlegend": False}
    mode = "lines+markers" if len(curve.values) <= 30 else "lines"
    whole = {"y": curve.values, "mode": mode, "hovertemplate": hover, "line": line, "showlegend": True}
    found = [common | whole]
    metric = f"{curve.loader}_{quantity}" if curve.loader else quantity
    if run.best is not None and run.monitor is not None and run.monitor[0] == metric:
        row = run.history[run.best]
        best = _text(f"epoch {row.get('epoch')}, {number_text(row.get(metric))}")
        text = f"{label}<br>best: {best}<extra></extra>"
        star = {"symbol": "star", "size": 13, "color": line["color"]}
        place = {"x": [finite(row.get("step")) or run.best + 1], "y": [row.get(metric)]}
        found.append(common | place | {"mode": "markers", "marker": star, "hovertemplate": text})
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


def _compared(title: str, columns: list[Mapping[str, Any]], names: list[str]) -> str:
    """A table with a column per run. Rows that differ between runs come first and are marked."""
    keys = dict.fromkeys(key for column in columns for key, value in column.items() if value is not None)
    differing = {key for key in keys if len({str(column.get(key)) for column in columns}) > 1}
    rows = [
        (key in differing, [key, *("—" if column.get(key) is None else str(column[key]) for column in columns)])
        for key in sorted(keys, key=lambda key: key not in differing)
    ]
    return _table(f"{title} ({len(differing)} differ)" if differing else title, ["", *names], rows)


def _snapshots(run: StoredRun, name: str) -> str:
    metrics = dict.fromkeys(metric for summary in run.snapshots for metric in summary.metrics)
    shown = [metric for metric in metrics if metric not in ("epoch", "step")]
    rows: list[tuple[bool, list[str]]] = []
    for summary in reversed(run.snapshots):
        marks = ["best"] * (summary.step == run.best_step) + ["newest"] * (summary is run.newest)
        cells = [" ".join([str(summary.step), *marks])]
        if summary.problem is not None:
            cells += ["damaged", summary.problem]
        else:
            cells += [when(summary.saved), decimal(summary.size)]
            cells += [number_text(summary.metrics.get(metric)) for metric in ("epoch", *shown)]
        rows.append((bool(marks), cells))
    return _table(f"Snapshots of {name}", ["snapshot", "saved", "size", "epoch", *shown], rows)


def _table(title: str, heads: list[str], rows: Iterable[tuple[bool, list[str]]]) -> str:
    """An HTML table of rows ``(marked, cells)``."""
    head = "".join(f"<th>{_text(text)}</th>" for text in heads)
    body = "".join(
        f"<tr{' class=differs' if is_marked else ''}>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"
        for is_marked, cells in rows
    )
    return f"<h2>{_text(title)}</h2><div class=table><table><tr>{head}</tr>{body}</table></div>"
