"""The zoo's table, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .compare import Row


def line(row: Row) -> str:
    """One row of the table."""
    ways = [told.replace("|", "\\|") for told in row.ways.values()]
    if len(set(ways)) == 1 and len(ways[0]) > 20:  # said once
        ways[1:] = ["the same"] * (len(ways) - 1)
    return "| " + " | ".join([row.name, row.package, str(row.parameters), *ways, "; ".join(row.notes) or "-"]) + " |"


NOT_TRAINED = ("not built", "not trained by hand", "not finite by hand", "given up", "not installed")


def text(rows: Sequence[Row], versions: Mapping[str, str], backend: str) -> str:
    """The file: the versions, a sum, and the table of those that plain torch trains."""
    ways = list(rows[0].ways)
    shown = [row for row in rows if not all(told.startswith(NOT_TRAINED) for told in row.ways.values())]
    wrong = sum(row.wrong for row in rows)
    head = ["model", "library", "parameters", *ways, "also"]
    return "\n".join(
        [
            f"backend {backend}; " + ", ".join(f"{name} {version}" for name, version in versions.items()),
            "",
            f"{len(rows)} models, {wrong} wrong, {len(rows) - len(shown)} not trained by plain torch.",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *(line(row) for row in shown),
            "",
        ]
    )
