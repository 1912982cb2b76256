"""Compiled steps on several processes: one graph with its collectives, in each way to compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rigs.parallel import processes

TRACE = {"backend": "aot_eager"}
NATIVE = {"backend": "inductor"}
SHARD: dict[str, Any] = {"mesh": {"shard": 2}, "params": "shard"}

SMALL = {"blocks": 1}  # one of two equal layers, since each compile takes seconds

TRACED: list[dict[str, Any]] = [
    {"params": "replicate", "kind": "uneven", "options": {"accumulate": 3, **SMALL}, "compiled": TRACE},
    {**SHARD, "kind": "empty", "options": SMALL, "compiled": TRACE},
    {**SHARD, "kind": "uneven", "options": {"accumulate": 3, "microbatches": 2, **SMALL}, "compiled": TRACE},
    {**SHARD, "kind": "uneven", "batches": "ragged", "options": SMALL, "compiled": TRACE},
    {**SHARD, "tx": "partition", "options": SMALL, "compiled": TRACE},
]


def check(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["far"] < 1e-14, one
        assert one["metrics"] < 1e-6, one


@pytest.mark.compile
def test_traced_steps_equal_one_process() -> None:
    check(processes.run("rigs.parallel.cases:steps", 2, args=[TRACED], timeout=150)[0].value)


@pytest.mark.compile
def test_layers_that_communicate_are_traced() -> None:
    for output in processes.run("rigs.parallel.cases:captured", 2, timeout=150):
        assert list(output.value) == ["sync", "units", "tensor"]
        assert [len(found) for found in output.value.values()] == [2, 1, 1]
        for name, found in output.value.items():
            assert max(found.values()) < 1e-14, (name, found)


@pytest.mark.compile
def test_functional_collectives_are_not_compiled_into_the_workspace() -> None:
    """The plug-in for the CPU refuses the graph, which torch then compiles alone."""
    (output,) = processes.run("rigs.parallel.cases:functional", 1)
    assert "functional collectives" in output.value["functional"]
    assert output.value["own"] == "compiled"


@pytest.mark.compile
def test_compiled_evaluation() -> None:
    assert processes.run("rigs.parallel.cases:evaluations", 2, args=[TRACE])[0].value < 1e-6


@pytest.mark.soak
@pytest.mark.compile
def test_processes_share_a_cache_of_code(tmp_path: Path) -> None:
    """Shares of different sizes, from an empty cache and from a filled one."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    case = [{**SHARD, "kind": "uneven", "compiled": NATIVE}]
    for _ in range(2):
        check(processes.run("rigs.parallel.cases:steps", 2, args=[case], env=env, timeout=400)[0].value)
