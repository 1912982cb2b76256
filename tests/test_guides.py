"""README.md and every guide are programs: their Python blocks run in order, on the CPU, in an empty directory.

A block that cannot run in a test is marked, with a reason: ```python no-run: needs an account of Weights & Biases.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pages
import pytest


def names_of(path: Path) -> str:
    return path.relative_to(pages.ROOT).as_posix()


def cases() -> list[object]:
    """A page with code that compiles is marked compile."""
    found: list[object] = []
    for path in pages.PROGRAMS:
        blocks = [block for block in pages.blocks(path.read_text("utf-8")) if block.runs]
        compiles = any("compile" in block.code for block in blocks)
        if blocks:
            found.append(pytest.param(path, id=names_of(path), marks=[pytest.mark.compile] if compiles else []))
    return found


# PEFT uses a name of transformers that is deprecated.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
# Keras gives torch's tensors to numpy as numpy 1 did; Lightning uses a class of torch that is deprecated.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("path", cases())
def test_the_blocks_of_a_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What compiles takes a backend that needs no C++ compiler and little time."""
    import purestep as ps

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ps, "compile_step", functools.partial(ps.compile_step, backend="aot_eager"))
    names = pages.run(path, path.read_text("utf-8"))
    if path.name == "start.md":
        assert names["result"].history["val_accuracy"][-1] > 0.9


def test_no_page_of_steps_or_recipes_is_left_out():
    """A fence that is written in another way would not be found."""
    programs = {path for path in pages.PROGRAMS if pages.blocks(path.read_text("utf-8"))}
    assert {path.stem for path in pages.PROGRAMS if path not in programs} <= {
        "README",
        "architecture",
        "faq",
        "limits",
        "measure",
        "moving",
        "platforms",
        "settings",
        "tests",
    }


def test_blocks_run_in_order_and_an_error_has_its_line(tmp_path: Path):
    text = "# Page\n\n```python\nx = 1\n```\n\n```python no-run: needs a GPU\nx = 2\n```\n\n```python\nx += 1\n```\n"
    assert pages.run(tmp_path / "page.md", text)["x"] == 2
    with pytest.raises(ZeroDivisionError) as raised:
        pages.run(tmp_path / "page.md", text.replace("x += 1", "x / 0"))
    assert raised.traceback[-1].lineno + 1 == 12


@pytest.mark.parametrize("path", pages.PROGRAMS, ids=names_of)
def test_every_block_of_a_page_is_python_and_its_marker_has_a_reason(path: Path):
    found = pages.wrong_blocks(path.read_text("utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("fence", "code", "complaint"),
    [
        ("python no-run", "x = 1", "unknown marker 'no-run'"),
        ("python no-run: ", "x = 1", "unknown marker"),
        ("python skip: slow", "x = 1", "unknown marker 'skip: slow'"),
        ("python no-run: needs a GPU", "x = = 1", "invalid syntax"),
        ("python no-run: needs a GPU", "x = 1", ""),
        ("python", "x = 1", ""),
    ],
)
def test_a_wrong_marker_is_found(fence: str, code: str, complaint: str):
    found = pages.wrong_blocks(f"# Page\n\n```{fence}\n{code}\n```\n")
    assert bool(found) == bool(complaint)
    assert complaint in "".join(found)
