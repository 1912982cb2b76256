"""Every test here is about the plug-in for the CPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _with_the_plugin(cpu_plugin: None) -> None:
    """Skip these tests where it is switched off."""
