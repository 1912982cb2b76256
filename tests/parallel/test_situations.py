"""Forty situations of which users of DDP, FSDP, Accelerate and torchtitan ask: each equals one process, or is refused.

Each test starts its processes once, for five situations.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from rigs.parallel import processes

SHARD: dict[str, Any] = {"params": "shard", "mesh": {"shard": 2}}
WHOLE: dict[str, Any] = {"params": "replicate"}
WORDS: dict[str, Any] = {**WHOLE, "problem": "words", "batches": "texts"}
ROUTED: dict[str, Any] = {"problem": "routed", "batches": "sorted_vectors"}
NAN: dict[str, Any] = {"problem": "perceptrons", "batches": "spoilt"}

STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "windows": {
        "a tail of two batches": {**WHOLE, "kind": "uneven", "options": {"accumulate": 3}},
        "a tail that is dropped": {**WHOLE, "options": {"accumulate": 3, "tail": "drop"}},
        "micro-batches of uneven shares": {**WHOLE, "kind": "uneven", "options": {"microbatches": 2}},
        "a window in pieces": {**SHARD, "kind": "empty", "options": {"accumulate": 3}},
        "a window of blocks": {**SHARD, "units": ["blocks.*"], "kind": "uneven", "options": {"accumulate": 3}},
    },
    "tokens": {
        "token means": WORDS,
        "token means of uneven shares": {**WORDS, "kind": "uneven"},
        "token means in windows": {**WORDS, "options": {"accumulate": 2}},
        "token means in pieces": {**WORDS, **SHARD},
        "class weights": {**WORDS, "tx": "weighted"},
    },
    "parameters": {
        "frozen, tied, unused, and a scalar": {**SHARD, "kind": "empty"},
        "rows of one process reach them": {**WHOLE, **ROUTED},
        "rows of one process reach them, in pieces": {**SHARD, **ROUTED},
        "rows of one process reach them, in windows": {**WHOLE, **ROUTED, "options": {"accumulate": 2}},
        "some in pieces": {**SHARD, "params": [["blocks", "shard"]]},
    },
    "optimizers": {
        name: {**SHARD, "problem": "ruled", "tx": name, "kind": "uneven"}
        for name in ("clipped by value", "clipped by unit", "scheduled", "torch", "adafactor")
    },
    "passes": {
        "sharpness": {**SHARD, "options": {"sam": 0.1}, "kind": "uneven"},
        "a gradient in the loss": {**WHOLE, "problem": "penalized", "batches": "vectors", "kind": "uneven"},
        "a gradient in the loss, in pieces": {**SHARD, "problem": "penalized", "batches": "vectors"},
        "candidates of all processes": {**SHARD, "problem": "contrastive", "batches": "vectors", "kind": "uneven"},
        "statistics of all processes": {**WHOLE, "problem": "normalized", "batches": "images", "batchnorm": "sync"},
    },
    "not finite": {
        "a nan in one process": {**WHOLE, **NAN},
        "a nan in one process, in pieces": {**SHARD, **NAN},
        "a nan that is skipped": {**WHOLE, **NAN, "options": {"nonfinite": "skip"}},
        "a nan that is skipped in a window": {**SHARD, **NAN, "options": {"nonfinite": "skip", "accumulate": 2}},
        "a nan that is skipped in blocks": {**SHARD, **NAN, "units": ["1", "2"], "options": {"nonfinite": "skip"}},
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


REFUSED = {
    "a part": r"train: processes differ: the order of the data is .*ps\.parallel\.sharded\(loader\)",
    "a split": r"train: processes differ: the order of the data is .*random splits .*torch\.manual_seed\(0\)",
    "experts": r"collective is the parameters of experts\.1 in process 0.*leave blocks .* out of units",
    "a buffer": r"writes the buffer seen.*buffers=",
    "a mask": r"4 rows in mask.*2 parts",
}


def test_others_are_refused_by_all_processes() -> None:
    for each in processes.run("rigs.parallel.situations:refusals", 2, timeout=120):
        assert set(each.value) == set(REFUSED)
        for name, text in each.value.items():
            assert re.search(REFUSED[name], text), (name, text)
