"""These tests need the stand-in, which must be loaded before torch: ``python tests/rigs/cuda_rehearsal/run.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import device


@pytest.fixture
def fit_stays_on_the_cpu() -> None:
    """Here it does not, unlike in the other tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if device.active():
        return
    skip = pytest.mark.skip(reason="needs the stand-in for CUDA: python tests/rigs/cuda_rehearsal/run.py")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(skip)
