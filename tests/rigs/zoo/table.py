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


def text(rows: Sequence[Row], versions: Mapping[str, str], backend: str) -> str:
    """The file: the versions, a sum, and the table."""
    ways = list(rows[0].ways)
    wrong = sum(row.wrong for row in rows)
    head = ["model", "library", "parameters", *ways, "also"]
    return "\n".join(
        [
            f"backend {backend}; " + ", ".join(f"{name} {version}" for name, version in versions.items()),
            "",
            f"{len(rows)} models, {wrong} wrong.",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *(line(row) for row in rows),
            "",
        ]
    )
