"""`gather`: losses that compare the rows of a batch equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.parallel import processes

import purestep as ps

CASE: dict[str, Any] = {"problem": "contrastive", "batches": "vectors", "params": "replicate"}
SHARD: dict[str, Any] = {**CASE, "params": "shard", "mesh": {"shard": 2}}
EQUAL: list[dict[str, Any]] = [
    CASE,
    {**CASE, "kind": "uneven"},
    {**CASE, "kind": "empty"},
    {**CASE, "kind": "uneven", "options": {"accumulate": 4}},
    {**CASE, "kind": "uneven", "options": {"engine": "func"}},
    {**CASE, "compiled": {"backend": "aot_eager"}},
    {**CASE, "compiled": {"backend": "aot_eager"}, "options": {"engine": "func"}},
    {**SHARD, "kind": "uneven"},
    {**SHARD, "kind": "uneven", "units": ["0", "2"]},
]
FAULTY: list[dict[str, Any]] = [{**CASE, "kind": "uneven", "fault": "unmixed"}]


CALLS: dict[str, list[Any]] = {
    "steps": ["rigs.parallel.cases:steps", EQUAL + FAULTY],
    "rows": ["rigs.parallel.cases:rows_gathered"],
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes.returned(tmp_path_factory, "gather", CALLS)


def test_losses_and_gradients_equal_one_process(both: list[dict[str, Any]]) -> None:
    found = both[0]["steps"]
    for case, one in zip(EQUAL, found, strict=False):
        assert one["far"] < 1e-12, (case, one)
        assert one["metrics"] < 1e-6, (case, one)
    assert found[-1]["far"] > 1e-6, "a planted fault is not seen"


def test_three_processes_with_an_empty_share_equal_one() -> None:
    found = processes.run("rigs.parallel.cases:steps", 3, args=[[{**CASE, "kind": "empty"}]], timeout=120)[0].value
    assert found[0]["far"] < 1e-12


def test_rows_evaluations_and_errors(both: list[dict[str, Any]]) -> None:
    for found in (each["rows"] for each in both):
        assert found["uneven"] == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        assert found["integers"] == [0, 7, 1, 7]
        assert max(found[f"{kind} shares"] for kind in ("even", "uneven", "empty")) < 1e-6
        assert "a row is torch.float32 [2] in process 0, torch.float32 [3] in process 1" in found["shapes"]
        assert "0-d, without rows" in found["number"]
        assert "the numbers of rows differ in a compiled step: [2, 4], by process" in found["compiled"]
        assert "drop_last=True; or compile=False" in found["compiled"]


def test_one_process_gets_its_own_rows() -> None:
    x = torch.ones(2, 3)
    assert ps.parallel.gather(x) is x
    with ps.parallel.start():
        assert ps.parallel.gather(x) is x
    with pytest.raises(ps.errors.ConfigError, match="0-d, without rows"):
        ps.parallel.gather(torch.ones(()))
