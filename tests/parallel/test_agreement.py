"""What one process alone meets (a nan, an overflow) is a decision of all."""

from __future__ import annotations

from typing import Any

from rigs.parallel import processes

NAN: dict[str, Any] = {"problem": "perceptrons", "batches": "spoilt"}
SHARD: dict[str, Any] = {"params": "shard", "mesh": {"shard": 2}}
CASES: list[dict[str, Any]] = [
    {**NAN, "params": "replicate", "options": {"nonfinite": "skip"}},
    {**NAN, "params": "replicate"},
    {**NAN, **SHARD, "options": {"nonfinite": "skip"}},
    {**NAN, **SHARD, "options": {"nonfinite": "skip", "accumulate": 2}},
    {**NAN, **SHARD},
    {**NAN, **SHARD, "units": ["1", "2"], "options": {"nonfinite": "skip"}},
]


def test_a_nan_on_one_process_is_handled_as_in_one_process() -> None:
    found = processes.run("rigs.parallel.cases:steps", 2, args=[CASES])[0].value
    for case, one in zip(CASES, found, strict=True):
        assert one["far"] < 1e-14, (case, one)
    # Skipped: one of six calls, one of three windows. Halted: two updates before the nan.
    assert [one["updates"] for one in found] == [5, 2, 5, 2, 2, 5]


def test_an_overflow_on_one_process_skips_the_update_of_all() -> None:
    calls = [["rigs.parallel.cases:overflow", *how] for how in (("replicate", {}), ("shard", {"shard": 2}))]
    for first, second in zip(
        *(one.value for one in processes.run("rigs.parallel.processes:each", 2, args=[calls])), strict=True
    ):
        assert first == second
        before, after = first["updates"][0], first["updates"][1]
        assert after == before
        assert first["digests"][1] == first["digests"][0]
        assert first["scales"][1] == first["scales"][0] / 2
        assert first["updates"][-1] > after
