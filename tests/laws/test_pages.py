"""Links in README.md, the guides and examples/README.md lead somewhere, and the index has every page.

Each rule is a function that lists violations, and has planted ones that it must find.
"""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

INDEX = pages.GUIDES / "README.md"
LINKING = [
    *pages.PROGRAMS,
    pages.ROOT / "examples" / "README.md",
    pages.ROOT / "tests" / "systems" / "README.md",
    pages.ROOT / "benchmarks" / "README.md",
]

# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(pages.ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path):
    found = pages.broken_links(path, path.read_text("utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("other.md", ""),
        ("other.md#weights--biases", ""),
        ("other.md#twice-1", ""),
        ("#page", ""),
        ("https://example.org/nowhere.md", ""),
        ("nowhere.md", "page.md: nowhere.md: there is no such file"),
        ("other.md#weights-biases", "other.md#weights-biases: there is no such heading"),
        ("other.md#in-code", "there is no such heading"),
        ("#nowhere", "there is no such heading"),
    ],
)
def test_a_broken_link_is_found(link: str, complaint: str, tmp_path: Path):
    (tmp_path / "other.md").write_text("# Weights & Biases\n\n## Twice\n\n## Twice\n\n```sh\n# in code\n```\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\nSee [it]({link}).\n")
    found = pages.broken_links(page, page.read_text())
    assert bool(found) == bool(complaint)
    assert complaint in "".join(found)


def test_links_in_code_are_code():
    assert pages.links("`rows[0](x)`\n\n```python\nrows[0](x)\n```\n\n[a](b.md) ![c](d.png)\n") == ["b.md", "d.png"]


# --- the index --------------------------------------------------------------------------------------------------------


def rows(index: str) -> list[str]:
    """The targets of "Where is ...?", the first one of each row."""
    table = index.partition("## Where is ...?")[2].partition("\n## ")[0]
    return re.findall(r"^\| [^|]* \| \[[^]]*\]\(([^()\s]+)\)[^|`]*\|$", table, flags=re.MULTILINE)


def test_the_index_has_a_link_in_every_row_and_no_code():
    assert len(rows(INDEX.read_text("utf-8"))) > 50
    table = "## Where is ...?\n\n| you | it |\n|---|---|\n| a | [A](a.md), [B](b.md) |\n"
    assert rows(table) == ["a.md"]
    assert rows(table + "| b | `b` |\n| c | [C](c.md), `c` |\n") == ["a.md"]


def unlisted(index: str, names: set[str]) -> set[str]:
    """Pages that the table of pages and the line of recipes do not have."""
    return names - {link.partition("#")[0] for link in pages.links(index.partition("## Where is ...?")[0])}


def test_every_page_is_in_the_index():
    names = {path.name for path in pages.GUIDES.glob("*.md")} - {INDEX.name}
    index = INDEX.read_text("utf-8")
    assert not unlisted(index, names)
    assert unlisted(index, names | {"new.md"}) == {"new.md"}


def test_the_command_of_the_tests_is_the_same_everywhere():
    """`.ci/run` reads it from README.md."""
    start = "python3 -m venv .venv-test"
    found = [
        [line for line in path.read_text("utf-8").splitlines() if line.startswith(start)]
        for path in (pages.ROOT / "README.md", pages.GUIDES / "tests.md")
    ]
    assert len(found[0]) == 1
    assert found[0] == found[1]


# --- the numbers of "How we measure" ----------------------------------------------------------------------------------

RESULTS = pages.ROOT / "benchmarks" / "results"
JOBS = {
    "MLP, batch 64 (one thread)": "mlp-1",
    "convnet, 32 images": "convnet",
    "GPT, 0.9 M weights, 8 x 128 tokens": "gpt-small",
    "GPT, 34 M weights, 2 x 128 tokens": "gpt-medium",
    "32 small layers, batch 16": "toy32",
    "ViT, 2.7 M weights, 16 images": "vit",
    "GPT-2, 124 M weights, 16 x 1024 tokens, bfloat16": "gpt2",
    "ResNet-50, 64 images of 224 x 224, bfloat16": "resnet50",
}
CONTESTANTS = {
    "by hand, compiled": "by hand, compiled + fused",
    "JAX, donated": "JAX, donated",
    "Lightning, not compiled": "Lightning, fit",
    "purestep, compiled, donated": "purestep, donated",
    "`ps.fit(compile=True)`": "purestep, fit",
    "`ps.fit`": "purestep, fit",
    "eager by hand": "by hand, eager + fused",
    "by hand, `reduce-overhead`": "by hand, reduce-overhead + fused",
}
ELSEWHERE = {("gpt2", "purestep, fit"): "gpt2-apart"}
"""Numbers of another job."""


def medians(report: str) -> dict[tuple[str, str], float]:
    """(job, contestant) -> milliseconds, from results.md."""
    found = {}
    for section in report.split("\n## ")[1:]:
        for name, value, unit in re.findall(r"^\| (.+?) +\| ([\d.]+) (ms|us) +\|", section, flags=re.MULTILINE):
            found[section.partition(":")[0], name] = float(value) / (1000 if unit == "us" else 1)
    return found


def wrong_numbers(table: str, measured: dict[tuple[str, str], float]) -> list[str]:
    """Cells that are not the measured medians, rounded to the digits that they show."""
    (_, *columns), _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = []
    for label, *cells in lines:
        for column, cell in zip(columns, cells, strict=True):
            shown = re.match(r"\W*([\d.]+) ms", cell)
            if shown is None:
                continue
            # A cell may name another contestant than its column.
            contestant = "by hand, compiled + fused" if "`torch.compile`" in cell else CONTESTANTS[column]
            key = JOBS[label], contestant
            job = ELSEWHERE.get(key, key[0])
            digits = len(shown[1].partition(".")[2])
            true = measured[job, key[1]]
            if abs(float(shown[1]) - true) > 0.51 * 10**-digits:
                found.append(f"{label}, {column}: {cell}, but {true:.4g} ms were measured")
    return found


@pytest.mark.parametrize(("heading", "folder"), [("on the CPU", "cpu"), ("on a GPU", "cuda")])
def test_the_published_times_are_those_that_were_measured(heading: str, folder: str):
    page = (pages.GUIDES / "measure.md").read_text("utf-8").partition(f"## One training step {heading}\n")[2]
    table = "\n".join(re.findall(r"^\|.*", page.partition("\n## ")[0], flags=re.MULTILINE))
    measured = medians((RESULTS / folder / "results.md").read_text("utf-8"))
    assert wrong_numbers(table, measured) == []
    (found,) = wrong_numbers(re.sub(r"(\| convnet, 32 images \| \W*)\d", r"\g<1>9", table), measured)
    assert found.startswith("convnet, 32 images, ")
