"""Steps on several processes equal the steps of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
from rigs.parallel import processes

EQUAL: list[dict[str, Any]] = [
    {"params": "replicate"},
    {"params": "replicate", "kind": "uneven", "options": {"accumulate": 3}},
    {"params": "replicate", "kind": "empty", "options": {"microbatches": 2}},
    {"mesh": {"shard": 2}, "params": "shard", "kind": "uneven"},
    {"mesh": {"shard": 2}, "params": "shard", "kind": "empty", "options": {"accumulate": 3}},
    {"mesh": {"shard": 2}, "params": [["blocks", "shard"]], "kind": "uneven", "options": {"microbatches": 2}},
    {"mesh": {"shard": 2}, "params": "shard", "tx": "partition"},
    {"mesh": {"shard": 2}, "params": "shard", "tx": "lamb"},
    {"mesh": {"shard": 2}, "params": "shard", "tx": "masked"},
    {"mesh": {"shard": 2}, "params": "shard", "options": {"engine": "func"}},
    {"params": "replicate", "kind": "empty", "options": {"sam": 0.1, "microbatches": 2}},
    {"mesh": {"shard": 2}, "params": "shard", "kind": "uneven", "options": {"sam": 0.1}},
]
FAULTY: list[dict[str, Any]] = [
    {"params": "replicate", "kind": "uneven", "fault": "unweighted"},
    {"params": "replicate", "kind": "empty", "fault": "counted"},
    {"mesh": {"shard": 2}, "params": "shard", "fault": "local norm"},
    {"params": "replicate", "fault": "alone"},
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One start of two processes for all cases."""

    def compute() -> list[dict[str, Any]]:
        return processes.run("rigs.parallel.cases:steps", 2, args=[EQUAL + FAULTY], timeout=150)[0].value

    return processes.once(tmp_path_factory, "steps", compute)


@pytest.mark.parametrize("index", range(len(EQUAL)), ids=lambda index: str(EQUAL[index]))
def test_equal_to_one_process(results: list[dict[str, Any]], index: int) -> None:
    assert results[index]["far"] < 1e-14, results[index]
    assert results[index]["metrics"] < 1e-6


@pytest.mark.parametrize("index", range(len(FAULTY)), ids=lambda index: FAULTY[index]["fault"])
def test_a_planted_fault_is_seen(results: list[dict[str, Any]], index: int) -> None:
    found = results[len(EQUAL) + index]
    assert found["far"] > 1e-6, found


def test_collectives_of_a_step(results: list[dict[str, Any]]) -> None:
    replicated, windows, _, sharded = results[:4]
    # Two collectives a call, of the gradients and of the small sums; under accumulation one a call and one a window.
    assert replicated["collectives"] == {"all_reduce": 2 * 8}
    # An eager step on a GPU does not read its place in the window: each call reduces, and so does the flush.
    assert windows["collectives"] == {"all_reduce": 8 + 3 if processes.DEVICE == "cpu" else 2 * 8 + 1}
    # Sharded: parameters and frozen ones, gradients, small sums, and the sums of the norm and of the transform's norm.
    gathers = sum(count for name, count in sharded["collectives"].items() if "gather" in name)
    scatters = sum(count for name, count in sharded["collectives"].items() if "scatter" in name)
    assert (gathers, scatters) == (16, 8)
    assert sharded["collectives"]["all_reduce"] <= 4 * 8


def test_a_process_that_holds_all_numbers_updates_them_by_one_kernel(results: list[dict[str, Any]]) -> None:
    decaying = 2  # the parameters with weight decay, and those without
    assert results[0]["kernels"] == 8 * decaying
    assert results[3]["kernels"] == 0  # of pieces


def test_pieces_hold_their_share(results: list[dict[str, Any]]) -> None:
    assert results[0]["rest"] == results[0]["total"]
    padding = 2 * 13 * 6
    assert results[3]["rest"] <= results[3]["total"] / 2 + padding
