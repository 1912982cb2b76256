"""A process that ends, fails or hangs ends the others; a run that starts again ends as one that went on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rigs.parallel.launches import far_from_unbroken, last_rows, torchrun
from rigs.parallel.processes import run

GONE = {
    "kill": (3, 1),
    "raise": (2, 1),
    "hang": (2, 1),
    "first": (2, 0),
}
"""Processes, and the one that is gone."""


@pytest.mark.parametrize("how", list(GONE))
def test_a_process_that_is_gone_ends_the_others(how: str):
    world, rank = GONE[how]
    kind = "kill" if how == "first" else how
    outputs = run("rigs.parallel.fitting:gone", world, args=[kind, rank], check=False, timeout=60)
    for other in set(range(world)) - {rank}:
        message, seconds = outputs[other].value
        cause = "failed: process 1 raised ValueError: of this" if kind == "raise" else "ended, failed, did not answer"
        assert f"process {other} of {world}: another process {cause}" in message, message
        assert "in fit, which every process calls" in message
        assert "torchrun --max-restarts" in message
        assert kind != "raise" or "one process alone cannot save the state of several" in outputs[rank].text
        assert seconds < (30 if kind == "hang" else 20)  # no hang; the time itself is in the report of benchmarks


def test_torchrun_names_the_process_that_failed_first(tmp_path: Path):
    text = torchrun(tmp_path, 2, "shard", 1, {"0": [1, 3]}, {"shard": 2}, 0.0, "raise")
    cause = text[text.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 .*ValueError: of this process alone", cause, re.DOTALL), text[-3000:]
    assert "RankError" not in cause


def test_torchrun_starts_a_killed_run_again(tmp_path: Path):
    """Process 0, which writes; `test_a_process_that_is_gone_ends_the_others` kills another one."""
    torchrun(tmp_path, 2, "shard", 3, {"0": [0, 4]}, {"shard": 2}, restarts=3)
    assert last_rows(tmp_path) == {epoch: list(range(37)) for epoch in range(3)}
    check_end(tmp_path, epochs=3)


def check_end(folder: Path, epochs: int) -> None:
    assert far_from_unbroken(folder, epochs) < 1e-14


def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path: Path):
    """One epoch with two processes, one with three, in pieces of the third kind."""
    for world, mode, epochs in ((2, "shard", 1), (3, "replicate", 2), (1, "shard", 3)):
        sizes = {"shard": world} if mode == "shard" else {}
        run("rigs.parallel.fitting:train", world, args=[str(tmp_path), mode, epochs, {}, sizes])
    check_end(tmp_path, epochs=3)
