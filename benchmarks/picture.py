"""The picture at the top of the README: one donated step beside what one would use instead.

python -m benchmarks.picture [results.json] [speed.png]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from .contestants import byhand, jaxes, ours, trainers

RESULTS = Path(__file__).parent / "results"
WORKS = {
    "mlp-1": "MLP, 9 k weights",
    "toy32-1": "32 layers of 16",
    "convnet": "convnet, 0.3 M",
    "gpt-small": "GPT, 0.9 M",
    "vit": "ViT, 2.7 M",
    "gpt-medium": "GPT, 34 M",
}
WHO = {
    trainers.LIGHTNING: ("Lightning", "#b9b9b9"),
    byhand.COMPILED: ("torch.compile by hand", "#7f9fbf"),
    jaxes.DONATED: ("JAX, jitted, donated", "#d9a05b"),
    ours.DONATED: ("purestep, compiled, donated", "#b03a48"),
}


def speeds(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Work -> contestant -> how many steps it makes in the time of one step of the eager loop by hand."""
    found: dict[str, dict[str, float]] = {}
    for work in WORKS:
        rows = {row["name"]: statistics.median(row["values"]) for row in record["jobs"][work]["result"]["rows"]}
        found[work] = {name: rows[byhand.EAGER] / rows[name] for name in WHO if name in rows}
    return found


def draw(record: dict[str, Any], target: Path) -> None:
    """Draw the bars of a record into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9.0, 3.8), facecolor="white")
    width = 0.8 / len(WHO)
    for place, (name, (label, colour)) in enumerate(WHO.items()):
        values = [found.get(name, float("nan")) for found in speeds(record).values()]
        at = [index + (place - (len(WHO) - 1) / 2) * width for index in range(len(values))]
        bars = axis.bar(at, values, width, label=label, color=colour)
        if name == ours.DONATED:
            axis.bar_label(bars, [f"{value:.1f}x" for value in values], fontsize=8, padding=1)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_ylim(0.5, 80)
    axis.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5x", "1x", "2x", "5x", "10x", "20x", "50x"])
    axis.set_xticks(range(len(WORKS)), list(WORKS.values()))
    axis.set_ylabel("speed of a training step")
    processor = record["jobs"]["gpt-small"]["stamp"]["processor"]
    axis.set_title(f"One training step against the eager loop by hand (1x), {processor}, two cores", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    source, target = (*sys.argv[1:], *[""] * 2)[:2]
    draw(
        json.loads(Path(source or RESULTS / "cpu" / "results.json").read_text()),
        Path(target or RESULTS / "speed.png"),
    )
