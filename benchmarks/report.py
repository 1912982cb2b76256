"""Tables for the terminal and in Markdown, one JSON file that they are made from, and a plot of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import figures, measure

RESULTS = Path(__file__).resolve().parent / "results"

Record = dict[str, Any]
"""``{"device", "machine", "jobs": {name: {"stamp", "result"}}}``; a result has a title, rows of (name, unit, values),
who was absent and why."""


def load(path: Path) -> Record | None:
    """The record in a file, None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def write(record: Record, folder: Path) -> list[str]:
    """results.json, results.md and results.png; returns a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "results.json"
    target.write_text(json.dumps(_rounded(record), indent=1) + "\n")
    (folder / "results.md").write_text(markdown(record))
    return [str(target), str(folder / "results.md"), plot(record, folder / "results.png")]


def results(record: Record) -> dict[str, Any]:
    """What each job returned."""
    return {name: job["result"] for name, job in record["jobs"].items()}


def markdown(record: Record) -> str:
    """The whole record as a page."""
    lines = [f"# Results on {record['device']}", "", *_machine(record["machine"]), ""]
    readings = figures.read(results(record), record["device"])
    lines += ["## Figures", "", *_grid(["figure", "aim", "measured", "10 % to 90 %", ""], readings), ""]
    for name, job in record["jobs"].items():
        stamp, result = job["stamp"], job["result"]
        lines += [f"## {name}: {result['title']}", "", _stamp(stamp, result), ""]
        lines += [*_result(result), ""]
    return "\n".join(lines)


def terminal(name: str, result: Mapping[str, Any]) -> str:
    """One job's tables."""
    return "\n".join([f"\n{name}: {result['title']}  {_threads(result)}".rstrip(), *_result(result)])


def figures_table(record: Record) -> str:
    """The figures alone."""
    readings = figures.read(results(record), record["device"])
    return "\n".join(_grid(["figure", "aim", "measured", "10 % to 90 %", ""], readings))


def _machine(machine: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    facts = {key: value for key, value in machine.items() if key not in ("versions", "absent")}
    lines = ["- last run: " + ", ".join(f"{key}: {value}" for key, value in facts.items()), f"- {versions}"]
    return lines + ([f"- not installed: {', '.join(machine['absent'])}"] if machine["absent"] else [])


def _stamp(stamp: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    place = f"{stamp['processor']}, torch {stamp['torch']}" if "processor" in stamp else ""
    quick = "quick" if stamp.get("quick") else ""
    parts = [_threads(result), place, stamp["date"], f"commit {stamp['commit']}", quick]
    return ", ".join(part for part in parts if part) + "."


def _threads(result: Mapping[str, Any]) -> str:
    count = result.get("threads")
    return "" if count is None else ("one thread" if count == 1 else f"{count} threads")


def _result(result: Mapping[str, Any]) -> list[str]:
    lines = _rows(result) if result.get("rows") else []
    lines += [f"- {found['name']}: {found['why']}" for found in result.get("absent", ())]
    return lines + ([result["note"]] if result.get("note") else [])


def _rows(result: Mapping[str, Any]) -> list[str]:
    rows, tokens = result["rows"], result.get("tokens")
    first = rows[0]
    compared = (
        first["unit"] in ("s", "B")
        and all(row["unit"] == first["unit"] for row in rows)
        and len({len(row["values"]) for row in rows}) == 1
    )
    header = ["", "median", "10 %", "90 %"]
    header += [f"{first['name']} / this", "spread"] if compared else []
    header += ["tokens/s"] if tokens else []
    cells: list[list[str]] = []
    for row in rows:
        found = measure.spread(row["values"])
        line = [row["name"], *(amount(value, row["unit"]) for value in found)]
        if compared:
            ratio = measure.ratio(first["values"], row["values"])
            line += [f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"]
        cells.append([*line, f"{tokens / found.median:,.0f}"] if tokens else line)
    return _grid(header, cells)


def amount(value: float, unit: str) -> str:
    """A number with its unit: seconds and bytes as people say them."""
    if unit == "s":
        for name, size in (("s", 1.0), ("ms", 1e-3)):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value * 1e6:.1f} us"
    if unit == "holds":
        return "yes" if value else "NO"
    return f"{value / 2**20:,.0f} MiB" if unit == "B" else f"{value:.3g} {unit}".strip()


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are aligned as text too."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * max(width, 3) for width in widths], *rows]
    return ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]


def _rounded(value: Any) -> Any:
    """Six digits are more than any clock has; the files are kept in git."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(found) for key, found in value.items()}
    return [_rounded(found) for found in value] if isinstance(value, list | tuple) else value


# --- plot -------------------------------------------------------------------------------------------------------------


def plot(record: Record, path: Path) -> str:
    """Bars of every table of times; returns where they are, or why they are not."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = results(record)
    drawn = {name: job for name, job in found.items() if _timed(job)}
    if not drawn:
        return "no plot: nothing to draw"
    across = min(3, len(drawn))
    down = -(-len(drawn) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(6.4 * across, 3.6 * down), squeeze=False)
    for axis in axes.flat[len(drawn) :]:
        axis.set_visible(False)
    for axis, (name, job) in zip(axes.flat, drawn.items(), strict=False):
        axis.set_title(f"{name} {_threads(job)}".strip(), fontsize=10)
        _bars(axis, job)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return str(path)


def _timed(job: Mapping[str, Any]) -> bool:
    return len(job.get("rows", ())) > 1 and all(row["unit"] == "s" for row in job["rows"])


def _bars(axis: Any, job: Mapping[str, Any]) -> None:
    names = [row["name"] for row in job["rows"]][::-1]
    found = [measure.spread([1e3 * value for value in row["values"]]) for row in job["rows"]][::-1]
    low = [max(one.median - one.low, 0.0) for one in found]
    high = [max(one.high - one.median, 0.0) for one in found]
    colours = ["tab:blue" if name.startswith("purestep") else "tab:gray" for name in names]
    axis.barh(names, [one.median for one in found], xerr=[low, high], color=colours)
    axis.set_xlabel("ms")
    axis.tick_params(labelsize=8)
