"""The blocks of README and of guides, where a GPU is found. The docstrings' examples run there too, see `run.py`."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest
import torch

STEPS = "start state derivatives gradients ensembles resume compile loop processes".split()
"""Without `averages`: the stand-in has no kernel of BatchNorm's evaluation."""
PAGES = [pages.ROOT / "README.md", *(pages.GUIDES / f"{name}.md" for name in STEPS)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_blocks_run_and_train_on_the_device(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = pages.run(path, path.read_text("utf-8"))
    if "result" in names:
        assert names["result"].state.step.device == torch.device("cuda", 0)
    if path.name == "start.md":
        assert max(names["result"].history["val_accuracy"]) > 0.9
