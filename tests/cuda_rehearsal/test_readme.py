"""The README's blocks where a GPU is found. The docstrings' examples run there as well, see `run.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("emulated")
def test_the_blocks_run_and_train_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        if "result" in names:
            assert names["result"].state.step.device == torch.device("cuda", 0)
    assert len(blocks) > 3
    assert max(names["result"].history["val_accuracy"]) > 0.9
