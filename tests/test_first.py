"""README's first example is `examples/first.py`, and prints what README shows: a run, Ctrl-C, and the second start.

`test_examples` and the trials of `rigs/faults` compare the numbers of interrupted runs with those of whole ones.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pages
import pytest

README = (pages.ROOT / "README.md").read_text("utf-8")
SCRIPT = pages.ROOT / "examples" / "first.py"


def code(text: str) -> str:
    """Python without its docstring and comments."""
    tree = ast.parse(text)
    if ast.get_docstring(tree):
        del tree.body[0]
    return ast.unparse(tree)


def shown() -> tuple[list[str], list[str]]:
    """README's output of the first and of the second start."""
    (console,) = (match[2] for match in pages.FENCE.finditer(README) if match[1] == "console")
    _, first, second = re.split(r"^\$ python examples/first.py\n", console, flags=re.MULTILINE)
    return first.splitlines(), second.splitlines()


def differences(printed: list[str], expected: list[str]) -> list[str]:
    """Lines of README that are not printed, in this order; digits of losses may differ, "..." is any lines."""
    number = r"\d[\d.]*(?:e[-+]\d+)?"
    patterns = [number.join(map(re.escape, re.split(number, line))) for line in expected]
    left, missing = list(printed), []
    for line, pattern in zip(expected, patterns, strict=True):
        if line in ("...", "^C"):
            continue
        at = next((index for index, found in enumerate(left) if re.fullmatch(pattern, found)), None)
        if at is None:
            missing.append(line)
        else:
            left = left[at + 1 :]
    return missing


def start(directory: Path, interrupt_after: str = "") -> list[str]:
    """Run the script; press Ctrl-C after a line that begins so. Return what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(pages.ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    printed = []
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            printed.append(line.rstrip())
            if interrupt_after and line.startswith(interrupt_after):
                process.send_signal(signal.SIGINT)
    assert (process.returncode == 0) == (not interrupt_after), printed
    return printed


def test_the_block_of_readme_is_the_script():
    assert code(SCRIPT.read_text("utf-8")) in [code(block.code) for block in pages.blocks(README)]


def test_the_script_prints_what_readme_shows(tmp_path: Path):
    first, second = shown()
    assert differences(start(tmp_path, "epoch 4/"), first) == []
    assert differences(start(tmp_path), second) == []


@pytest.mark.parametrize(
    ("printed", "missing"),
    [
        (["epoch 1/10  loss 2.2  9.1e+02 steps/s", "accuracy 0.1"], []),
        (["epoch 1/10  error 2.2  12.5 steps/s", "accuracy 0.1"], ["epoch 1/10  loss 0.512  1.1e+03 steps/s"]),
        (["accuracy 0.1", "epoch 1/10  loss 2.2  12.5 steps/s"], ["accuracy 0.929"]),
    ],
)
def test_a_line_that_is_not_printed_is_found(printed: list[str], missing: list[str]):
    assert differences(printed, ["epoch 1/10  loss 0.512  1.1e+03 steps/s", "...", "accuracy 0.929"]) == missing
