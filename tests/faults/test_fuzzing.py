"""Hostile values handed in wherever something can be: 150 of `fuzzing`, and those that were raw errors once."""

from __future__ import annotations

from pathlib import Path

import pytest
from rigs.faults import fuzzing
from rigs.faults.runs import fails

from purestep.loop import inputs


@pytest.mark.parametrize("tens", range(15))
def test_fuzzed_inputs_are_diagnosed_or_work(tens: int, tmp_path: Path) -> None:
    for number in range(10 * tens, 10 * tens + 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert fuzzing.trial(number, folder) is None


ONCE_RAW = [
    ("batch 1", "list in itself"),
    ("step leaf", "nested tensor"),
    ("schedule", "nested tensor"),
    ("step total", "fp8 tensor"),
    ("loader val", "list in itself"),
    ("batch 3", "dict in itself"),
    ("callbacks", "-1"),
    ("callbacks", "list of text"),
    ("sinks", "-1"),
    ("state key", "five dimensions"),
    ("step total", "text"),
    ("step weight", "meta tensor"),
    ("program tail", "array"),
    ("program precision", "empty list"),
    ("program ema", "text"),
    ("program keep_eval", "-1"),
    ("program scaler", "text"),
    ("answer at EpochEnd", "dict in itself"),
    ("save loop", "dict in itself"),
    ("save metrics", "-1"),
    ("save state", "nested tensor"),
    ("save state", "list in itself"),
    ("schedule", "2**70"),
    ("batch 1/0", "nan as a key"),
]


@pytest.mark.parametrize(("place", "value"), ONCE_RAW)
def test_what_was_a_raw_error_once(place: str, value: str, tmp_path: Path) -> None:
    assert fuzzing.check(place, value, tmp_path) is None


def test_the_fuzzer_fails_where_leaves_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_unfit", lambda leaf: "")
    fails(lambda: test_what_was_a_raw_error_once("state params/0.weight", "set", tmp_path))
