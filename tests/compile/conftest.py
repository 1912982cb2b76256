"""Fixtures of tests that compile."""

from __future__ import annotations

from typing import Any

import pytest

from purestep.compile.cpu import backend


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that the plug-in for the CPU cannot compile, or whose equal layers it cannot outline, is an error."""
    if not backend._KNOWN:  # pyright: ignore[reportPrivateUsage]
        pytest.skip("native code is made with torch 2.13 and later")

    def raised(*found: Any) -> None:
        raise AssertionError(found[-1])

    monkeypatch.setattr(backend, "not_outlined", raised)
    monkeypatch.setattr("purestep.compile.capture.warn_fallback", raised)
