"""The memory of one of two processes: a call with a frozen base, and the `init` of a state in pieces, as a page.

python -m tests.rigs.parallel.peaks     writes peaks.md
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from . import piece_cases, processes

PAGE = Path(__file__).with_name("peaks.md")
CALLS = {"whole": "adapters in pieces", "pieces": "all in pieces", "units": "all in pieces, units"}
INITS = {
    "at once": "whole, then cut",
    "module": "of a module with values",
    "drawn": "on the meta device, drawn",
    "file": "on the meta device, of a safetensors file",
}


def main() -> None:
    """Measure, and write the page."""
    calls = processes.run("rigs.parallel.piece_cases:frozen_peaks", 2, timeout=600)[0].value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        piece_cases.wide_file(file)
        inits = processes.run("rigs.parallel.piece_cases:init_peaks", 2, args=[str(file)], timeout=600)[0].value
    base, kept = calls["whole"]["MiB"], inits["module"]["MiB"]
    lines = [
        f"torch {torch.__version__}, gloo, two processes on one CPU. Written by `python -m tests.rigs.parallel.peaks`.",
        "",
        f"A call with a frozen base of {base:.0f} MiB (16 blocks, each with an adapter), as shares of it:",
        "",
        "| parameters | frozen at rest | rise of resident memory |",
        "|---|---|---|",
        *(f"| {text} | {calls[name]['rest']:.2f} | {calls[name]['peak']:.2f} |" for name, text in CALLS.items()),
        "",
        f"`init` of a state of which a process keeps {kept:.0f} MiB (AdamW, average), as shares of them:",
        "",
        "| the module | rise of resident memory |",
        "|---|---|",
        *(f"| {text} | {inits[name]['peak']:.2f} |" for name, text in INITS.items()),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
