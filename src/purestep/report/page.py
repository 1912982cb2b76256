"""One page about several runs, which needs no network: curves, how they ended, settings, versions, snapshots."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import write_bytes
from . import curves
from .run_files import Run, age, bytes_text, number_text, when


def write_page(runs: list[Run], path: Path | str) -> int:
    """Write the page, atomically; return its size in bytes: about 5 MB, most of it plotly's code.

    Args:
        runs: at least one; see `read_run`.
        path: of the page.

    Raises:
        ConfigError: plotly is not installed, or there is no run.
        WriteFailed: the file cannot be written.
    """
    if not runs:
        raise ConfigError("no runs", where="purestep report", hint="pass at least one directory")
    names = _names(runs)
    data = _page(runs, names).encode()
    write_bytes(path, data)
    return len(data)


def _names(runs: list[Run]) -> list[str]:
    """The last parts of the paths, as many as tell the runs apart."""
    paths = [run.directory.parts for run in runs]
    deepest = max(map(len, paths))
    for count in range(1, deepest + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({index + 1})" for index, run in enumerate(runs)]


def _page(runs: list[Run], names: list[str]) -> str:
    figures = curves.charts(runs, names)
    charts = "".join(
        f"<section class=chart><h2>{escape(title)}</h2>"
        f"{figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)}</section>"
        for title, figure in figures.items()
    )
    empty = "" if charts else "<p>No rows of a history yet.</p>"
    title = f"purestep: {', '.join(names)}"
    code = importlib.import_module("plotly.offline").get_plotlyjs() if charts else ""
    controls = _controls(names) if charts else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>{_STYLE}</style><script>{code}</script></head><body>
<header><h1>{escape(", ".join(names))}</h1><p class=note>Written {when(time.time())} by purestep.</p></header>
<div class=cards>{"".join(_card(run, name) for run, name in zip(runs, names, strict=True))}</div>
{controls}<main>{charts}{empty}</main>
<div class=tables>{_settings(runs, names)}{_versions(runs, names)}</div>
{"".join(_snapshots(run, name) for run, name in zip(runs, names, strict=True))}
<script>{_SCRIPT}</script></body></html>
"""


def _controls(names: list[str]) -> str:
    boxes = "".join(
        f'<label style="--run:{curves.color(index)}"><input type=checkbox checked data-run={index}>'
        f"<i></i>{escape(name)}</label>"
        for index, name in enumerate(names)
    )
    axes = "".join(
        f"<button type=button data-axis={axis} aria-pressed={'true' if axis == 'step' else 'false'}>by {axis}</button>"
        for axis in ("step", "epoch")
    )
    runs = f"<span class=runs>{boxes}</span>" if len(names) > 1 else ""
    scale = "<label><input type=checkbox id=log>logarithmic loss</label>"
    return f"<nav><span class=axes>{axes}</span>{runs}{scale}</nav>"


def _card(run: Run, name: str) -> str:
    facts: list[tuple[str, str]] = []
    if run.monitor is not None and run.best is not None:
        row, metric = run.history[run.best], run.monitor[0]
        facts.append(("best", f"{metric} {number_text(row.get(metric))} at epoch {row.get('epoch')}"))
    if run.history:
        row = run.history[-1]
        facts.append(("last", f"epoch {row.get('epoch')}, step {row.get('step')}"))
    if run.newest is not None:
        facts.append(("newest snapshot", f"{run.newest.step}, {age(run.newest.saved)}"))
    facts.append(("size", bytes_text(run.size)))
    facts += [("problem", problem) for problem in run.problems]
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts)
    return (
        f'<section class="card {run.state}"><h2>{escape(name)}</h2><p><b class=state>{run.state}</b> '
        f"{escape(run.how.removeprefix(run.state).lstrip(':, '))}</p><dl>{listed}</dl></section>"
    )


def _settings(runs: list[Run], names: list[str]) -> str:
    """The settings that some run has; those that differ between runs come first and are marked."""
    found = [{} if run.info is None else run.info.settings for run in runs]
    used = {key for column in found for key, value in column.items() if value is not None}
    return _compared("Settings of fit", [{k: v for k, v in column.items() if k in used} for column in found], names)


def _versions(runs: list[Run], names: list[str]) -> str:
    found = [run.newest.environment if run.newest is not None else {} for run in runs]
    return _compared("Versions and machine", found, names)


def _compared(title: str, columns: list[Mapping[str, Any]], names: list[str]) -> str:
    keys = dict.fromkeys(key for column in columns for key in column)
    differing = {key for key in keys if len({str(column.get(key)) for column in columns}) > 1}
    rows = sorted(keys, key=lambda key: key not in differing)
    if not rows:
        return f"<details><summary>{title}</summary><p>Not recorded.</p></details>"
    body = "".join(
        f"<tr{' class=differs' if key in differing else ''}><th scope=row>{escape(key)}</th>"
        + "".join(f"<td>{escape(_setting(column, key))}</td>" for column in columns)
        + "</tr>"
        for key in rows
    )
    note = f" <small>{len(differing)} differ</small>" if differing else ""
    return f"<details open><summary>{title}{note}</summary>{_table(['', *names], body)}</details>"


def _setting(column: Mapping[str, Any], key: str) -> str:
    return "—" if column.get(key) is None else str(column[key])


def _snapshots(run: Run, name: str) -> str:
    metrics = list(dict.fromkeys(metric for summary in run.snapshots for metric in summary.metrics))
    shown = [metric for metric in metrics if metric not in ("epoch", "step")]
    rows: list[str] = []
    for summary in reversed(run.snapshots):
        marks = ["best"] * (summary.step == run.best_step) + ["newest"] * (summary is run.newest)
        head = f"<th scope=row>{summary.step} {''.join(f'<b class=mark>{mark}</b>' for mark in marks)}</th>"
        if summary.problem is not None:
            rows.append(f"<tr class=damaged>{head}<td colspan={len(shown) + 3}>{escape(summary.problem)}</td></tr>")
            continue
        epoch = number_text(summary.metrics.get("epoch"))
        cells = [when(summary.saved), bytes_text(summary.size), epoch]
        cells += [number_text(summary.metrics.get(metric)) for metric in shown]
        rows.append(f"<tr>{head}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    aside = f"<p class=note>Set aside: {escape(', '.join(run.set_aside))}</p>" if run.set_aside else ""
    table = _table(["snapshot", "saved", "size", "epoch", *shown], "".join(rows)) if rows else "<p>None.</p>"
    return f"<details open><summary>Snapshots of {escape(name)}</summary>{table}{aside}</details>"


def _table(heads: Iterable[str], body: str) -> str:
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in heads)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}

_STYLE = """
:root{--ink:#1b2330;--soft:#5b6575;--line:#d9dee6;--page:#f5f7fa;--card:#fff;--mark:#e3edfb;--good:#127a4b;
--bad:#b3261e;--warm:#8a5a00;--grid:#e6eaf0}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf1;--soft:#9aa6b8;--line:#323b49;--page:#12161d;--card:#1b212b;
--mark:#24364f;--good:#57c993;--bad:#ff8a80;--warm:#e9b35a;--grid:#2b3340}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1240px;padding:20px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0;overflow-wrap:anywhere}h2{font-size:1rem;margin:0 0 6px;overflow-wrap:anywhere}
.note,small{color:var(--soft);margin:2px 0 14px;font-size:.85rem}
.cards,main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}
.card,.chart,details{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px;min-width:0}
.card p{margin:0 0 8px;overflow-wrap:anywhere}.state{color:var(--soft)}
.running .state,.ended .state{color:var(--good)}.failed .state,.killed .state{color:var(--bad)}
.interrupted .state{color:var(--warm)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:0}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:10px 18px;align-items:center;margin:16px 0}
nav label{display:inline-flex;gap:6px;align-items:center;margin-right:12px}
nav i{width:14px;height:4px;border-radius:2px;background:var(--run)}
button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);padding:4px 12px;
cursor:pointer}
button:first-child{border-radius:8px 0 0 8px}button:last-child{border-radius:0 8px 8px 0;border-left:0}
button[aria-pressed=true]{background:var(--mark);font-weight:600}
details{margin-top:14px}.tables{display:grid;align-items:start;
grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:0 14px}
.chart{overflow:hidden}summary{font-weight:600;cursor:pointer}.scroll{overflow-x:auto;margin-top:8px}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
thead th{color:var(--soft);font-weight:500}tbody th{font-weight:500}
.differs th,.differs td{background:var(--mark)}.damaged td{color:var(--bad);white-space:normal}
.mark{background:var(--mark);border-radius:6px;padding:1px 7px;margin-left:4px;font-size:.75rem;font-weight:500}
@media(max-width:600px){body{padding:10px}.card,.chart,details{padding:10px}}
"""

_SCRIPT = """
(() => {
  const charts = [...document.querySelectorAll('.js-plotly-plot')];
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const paint = () => charts.forEach(chart => Plotly.relayout(chart, {
    'font.color': css('--ink'), 'hoverlabel.bgcolor': css('--card'), 'hoverlabel.font.color': css('--ink'),
    'xaxis.gridcolor': css('--grid'), 'yaxis.gridcolor': css('--grid'), 'xaxis.linecolor': css('--line'),
    'yaxis.linecolor': css('--line')}));
  const title = {step: 'step (optimizer updates)', epoch: 'epoch'};
  document.querySelectorAll('[data-axis]').forEach(button => button.onclick = () => {
    const axis = button.dataset.axis;
    document.querySelectorAll('[data-axis]').forEach(one => one.setAttribute('aria-pressed', one === button));
    charts.forEach(chart => Plotly.update(chart, {x: chart.data.map(trace => trace.meta[axis])},
      {'xaxis.title.text': title[axis], 'xaxis.autorange': true}));
  });
  document.querySelectorAll('[data-run]').forEach(box => box.onchange = () => charts.forEach(chart => {
    const those = chart.data.map((trace, at) => trace.meta.run == box.dataset.run ? at : -1).filter(at => at >= 0);
    if (those.length) Plotly.restyle(chart, {visible: box.checked}, those);
  }));
  const log = document.getElementById('log');
  const isLoss = chart => chart.closest('.chart').querySelector('h2').textContent.endsWith('loss');
  if (log) log.onchange = () => charts.filter(isLoss).forEach(chart =>
    Plotly.relayout(chart, {'yaxis.type': log.checked ? 'log' : 'linear', 'yaxis.autorange': true}));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paint);
  paint();
  const fit = () => charts.forEach(chart => Plotly.Plots.resize(chart));
  fit();  // a chart is drawn before the next ones take their share of the width
  addEventListener('load', fit);
})();
"""
