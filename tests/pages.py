"""Markdown pages for tests: README.md and the guides, their Python blocks, headings and links."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "examples" / "guides"
PROGRAMS = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]
"""Pages whose Python blocks are one program each."""

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A Python block of a page."""

    line: int  # of its fence, from 1
    code: str
    marker: str  # what follows "python" on the fence: nothing, "no-run: <reason>" or "needs: <package>"

    @property
    def runs(self) -> bool:
        """A block that needs a package runs where that is installed."""
        package = self.marker.removeprefix("needs: ")
        return not self.marker or (package != self.marker and importlib.util.find_spec(package) is not None)


def blocks(text: str) -> list[Block]:
    """Every Python block, in order."""
    found = []
    for match in FENCE.finditer(text):
        language, _, marker = match[1].partition(" ")
        if language == "python":
            found.append(Block(text.count("\n", 0, match.start()) + 1, match[2], marker))
    return found


def run(path: Path, text: str) -> dict[str, Any]:
    """Run the blocks of a page in order, as one program. Return its names. A traceback has the lines of the page.

    README begins with a loop over a reader's own `model`, `train` and `val`: small ones are given.
    """
    names: dict[str, Any] = {"__name__": "__main__", **(theirs() if path == ROOT / "README.md" else {})}
    for block in blocks(text):
        if block.runs:
            exec(compile("\n" * block.line + block.code, str(path), "exec", dont_inherit=True), names)
    return names


def theirs() -> dict[str, Any]:
    """A reader's model and batches."""
    import torch

    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
    return {"model": torch.nn.Linear(4, 2), "train": batches[:3], "val": batches[3:]}


def wrong_blocks(text: str) -> list[str]:
    """Markers that do not exist, reasons that are missing, and blocks that are not Python."""
    found = []
    for block in blocks(text):
        if block.marker and not re.fullmatch(r"no-run: \S.*|needs: \w+", block.marker):
            found.append(f"line {block.line}: unknown marker {block.marker!r}: write ```python no-run: REASON")
        try:
            compile(block.code, "block", "exec", dont_inherit=True)
        except SyntaxError as error:
            found.append(f"line {block.line}: {error.msg}")
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = FENCE.sub("", text)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose, flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        copies = sum(1 for other in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
        found.add(f"{slug}-{copies}" if copies else slug)
    return found


def links(text: str) -> list[str]:
    """The targets of links and pictures, outside of code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return re.findall(r"\]\(([^()\s]+)\)", prose)


def broken_links(path: Path, text: str) -> list[str]:
    """Links to files that do not exist, or to headings that their page does not have."""
    found = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            found.append(f"{path.name}: {link}: there is no such file")
        elif anchor and anchor not in anchors(text if target == path else target.read_text("utf-8")):
            found.append(f"{path.name}: {link}: there is no such heading")
    return found
