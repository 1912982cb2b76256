"""Situations of which users of DDP, FSDP, Accelerate and torchtitan ask, and that no other file has: each equals one
process. Each test starts its processes once.
"""

from __future__ import annotations

from typing import Any

import pytest
from rigs.parallel import processes

SHARD: dict[str, Any] = {"params": "shard", "mesh": {"shard": 2}}
WHOLE: dict[str, Any] = {"params": "replicate"}
WORDS: dict[str, Any] = {**WHOLE, "problem": "words", "batches": "texts"}
ROUTED: dict[str, Any] = {"problem": "routed", "batches": "sorted_vectors"}

STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "tokens": {
        "token means": WORDS,
        "token means of uneven shares": {**WORDS, "kind": "uneven"},
        "token means in windows": {**WORDS, "options": {"accumulate": 2}},
        "token means in pieces": {**WORDS, **SHARD},
        "class weights": {**WORDS, "tx": "weighted"},
    },
    "parameters and passes": {
        "rows of one process reach them": {**WHOLE, **ROUTED},
        "rows of one process reach them, in pieces": {**SHARD, **ROUTED},
        "rows of one process reach them, in windows": {**WHOLE, **ROUTED, "options": {"accumulate": 2}},
        "a gradient in the loss": {**WHOLE, "problem": "penalized", "batches": "vectors", "kind": "uneven"},
        "a gradient in the loss, in pieces": {**SHARD, "problem": "penalized", "batches": "vectors"},
        "a tail that is dropped": {**WHOLE, "options": {"accumulate": 3, "tail": "drop"}},
    },
    "optimizers": {
        name: {**SHARD, "problem": "ruled", "tx": name, "kind": "uneven"}
        for name in ("clipped by value", "clipped by unit", "scheduled", "torch", "adafactor")
    },
}


@pytest.mark.parametrize("kind", list(STEPS))
def test_steps_equal_one_process(kind: str) -> None:
    situations = STEPS[kind]
    found = processes.run("rigs.parallel.cases:steps", 2, args=[list(situations.values())], timeout=200)[0].value
    for (name, _), one in zip(situations.items(), found, strict=True):
        assert one["far"] < 1e-9, (name, one)


def test_runs_equal_one_process() -> None:
    for each in processes.run("rigs.parallel.situations:runs", 2, timeout=200):
        for name, (state, epochs) in each.value.items():
            assert (state < 1e-12, epochs) == (True, 0), (name, state, epochs)
