"""The program that makes all trials of faults, and the page that it writes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from rigs.faults import planting, soak


def test_a_family_writes_its_own_row() -> None:
    page = soak.PAGE.read_text()
    one = soak.row(soak.Count("killing", 1000, 1000, ["7: torn"], 12.0), "today")
    found = soak.updated(page, {"killing": one})
    changed = [new for old, new in zip(page.splitlines(), found.splitlines(), strict=True) if old != new]
    assert changed == [one]
    assert "999 of 1,000 held | 12 | today |" in one
    assert soak.updated(page, {}) == page


def test_every_family_has_a_row() -> None:
    page = soak.PAGE.read_text()
    assert [name for name in soak.AIMS if f"| `{name}` |" not in page] == []


def test_no_trial_begins_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def trial(number: int, folder: Path) -> str | None:
        return "planted" if number == 1 else None

    monkeypatch.setattr(planting, "trial", trial)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the folder of a trial that fails stays
    found = soak.soak("planting", scale=0.1, shard=0, shards=1, end=time.monotonic() + 60)
    assert (found.run, found.failures) == (5, ["1: planted"])
    assert soak.soak("planting", scale=1, shard=0, shards=2, end=time.monotonic() - 1).run == 0
