"""Layers that communicate inside of a forward pass: batch normalization, blocks gathered one by one, tensor parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps

from . import cases, processes

BATCHNORM: dict[str, Any] = {"problem": "normalized", "batches": "images", "params": "replicate"}
TRACE = {"capture": "trace", "backend": "aot_eager"}
SYNCED: list[dict[str, Any]] = [
    {**BATCHNORM, "batchnorm": "sync"},
    {**BATCHNORM, "batchnorm": "sync", "kind": "uneven", "options": {"accumulate": 3}},
    {**BATCHNORM, "batchnorm": "sync", "kind": "empty"},
    {**BATCHNORM, "batchnorm": "sync", "mesh": {"shard": 2}, "params": "shard", "kind": "uneven"},
    {**BATCHNORM, "batchnorm": "sync", "kind": "uneven", "compiled": TRACE},
]
AVERAGED: list[dict[str, Any]] = [{**BATCHNORM, "batchnorm": "average"}]

COLUMNS = {"*.up": "ColwiseParallel", "*.down": "RowwiseParallel"}
TENSOR: dict[str, Any] = {"problem": "perceptrons", "batches": "vectors", "params": "replicate", "tensor": COLUMNS}
TWO: dict[str, Any] = {**TENSOR, "mesh": {"tensor": 2}}
SPLIT: list[dict[str, Any]] = [
    TWO,
    {**TWO, "options": {"accumulate": 4}},
    {**TWO, "tx": "lamb"},
    {**TWO, "compiled": TRACE},
]
SPLIT_AND_CUT: list[dict[str, Any]] = [
    TWO,
    {**TWO, "kind": "uneven", "options": {"accumulate": 4}},
    {**TWO, "mesh": {"shard": 2, "tensor": 2}, "params": "shard"},
    {**TWO, "mesh": {"shard": 2, "tensor": 2}, "params": "shard", "tx": "lamb", "kind": "empty"},
]
UNITS: dict[str, Any] = {"params": "shard", "units": ["blocks.*"]}
GATHERED: list[dict[str, Any]] = [
    {**UNITS, "mesh": {"shard": 2}},
    {**UNITS, "mesh": {"shard": 2}, "kind": "uneven", "options": {"accumulate": 3}},
    {**UNITS, "mesh": {"shard": 2}, "kind": "empty", "options": {"microbatches": 2}},
    {**UNITS, "mesh": {"shard": 2}, "kind": "uneven", "tx": "lamb"},
    {**UNITS, "mesh": {"shard": 2}, "kind": "uneven", "compiled": TRACE},
]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return processes.run("tests.parallel.cases:steps", 2, args=[SYNCED + AVERAGED], timeout=150)[0].value


@pytest.mark.parametrize("index", range(len(SYNCED)), ids=lambda index: str(SYNCED[index]))
def test_synchronized_statistics_equal_one_process(results: list[dict[str, Any]], index: int) -> None:
    assert results[index]["far"] < 1e-9, results[index]
    assert results[index]["metrics"] < 1e-6


def test_averaged_statistics_are_other_ones(results: list[dict[str, Any]]) -> None:
    assert 1e-6 < results[-1]["far"] < 1.0


def test_batch_normalization_has_no_default() -> None:
    with pytest.raises(ps.errors.ConfigError, match=r'norm.*batchnorm="sync".*batchnorm="average"'):
        ps.distribute(cases.normalized(), ps.parallel.Mesh(data=2))
    with pytest.raises(ps.errors.ConfigError, match="batchnorm is 'none'"):
        ps.distribute(cases.normalized(), ps.parallel.Mesh(data=2), batchnorm="none")


def test_only_layers_that_train_need_it() -> None:
    program = cases.normalized(keep_eval=("norm", "plain"))
    assert ps.distribute(program, ps.parallel.Mesh(data=1)).static is program.static


def test_a_layer_with_its_own_forward_cannot_be_synchronized() -> None:
    class Doubled(torch.nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Doubled(2))
    program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    with pytest.raises(ps.errors.ConfigError, match="layer 1 is a Doubled"):
        ps.distribute(program, ps.parallel.Mesh(data=2), batchnorm="sync")


def test_tensor_parallel_equals_one_process() -> None:
    found = processes.run("tests.parallel.cases:steps", 2, args=[SPLIT], timeout=150)[0].value
    for one in found:
        assert one["far"] < 1e-13, one
    assert found[0]["rest"] < 0.6 * found[0]["total"]


def test_tensor_parallel_with_other_axes() -> None:
    for one in processes.run("tests.parallel.cases:steps", 4, args=[SPLIT_AND_CUT], timeout=150)[0].value:
        assert one["far"] < 1e-13, one


def test_units_equal_one_process() -> None:
    for one in processes.run("tests.parallel.cases:steps", 2, args=[GATHERED], timeout=150)[0].value:
        assert one["far"] < 1e-14, one
