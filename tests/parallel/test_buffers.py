"""Buffers that a forward pass writes become those of one process, or are refused with the ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.parallel import cases, processes

import purestep as ps
from purestep.parallel import joined_buffers

WAYS = {"seen": "sum", "s*ms": "sum", "turns": "sum", "mean": "mean", "calls": "local"}
CASE: dict[str, Any] = {"problem": "counting", "batches": "vectors", "params": "replicate", "buffers": WAYS}
ALL: list[dict[str, Any]] = [
    CASE,
    {**CASE, "kind": "uneven"},
    {**CASE, "kind": "empty"},
    {**CASE, "kind": "uneven", "options": {"accumulate": 3}},
    {**CASE, "kind": "uneven", "compiled": {"backend": "aot_eager"}},
    {**CASE, "kind": "uneven", "mesh": {"shard": 2}, "params": "shard"},
]


def test_buffers_of_all_processes_equal_those_of_one() -> None:
    found = processes.run("rigs.parallel.cases:steps", 2, args=[ALL], timeout=200)[0].value
    for case, one in zip(ALL, found, strict=True):
        assert one["far"] < 1e-12, (case, one)


def _check(name: str) -> Any:
    """Run a forward pass of a layer that writes all of its buffers, of which one has no way."""
    layer, ways = cases.Counting(), {each: "local" for each in WAYS if each not in (name, "s*ms")} | {"sums": "local"}
    ways.pop(name, None)
    check = joined_buffers.watched(ways, dict(layer.named_buffers()))
    layer(torch.ones(3, 2, 8))
    check(dict(layer.named_buffers()))


@pytest.mark.parametrize("name", ["seen", "sums", "turns", "mean", "calls"])
def test_a_buffer_that_is_written_without_a_way_is_refused(name: str) -> None:
    with pytest.raises(ps.errors.ConfigError, match=rf"writes the buffer {name}, .*{name}'.*sum.*mean.*local"):
        _check(name)


def test_buffers_that_no_pass_writes_need_no_way() -> None:
    _check("rotary")


@pytest.mark.parametrize(
    ("buffers", "text"),
    [
        ({"nothing": "sum"}, "'nothing', which matches no buffer .*seen"),
        ({"sums": "average"}, r"buffers\['sums'\]='average' is unknown"),
        ({"seen": "mean"}, 'seen is torch.int32, which has no "mean"'),
        ({"mask": "sum"}, 'mask is torch.bool, which has no "sum"'),
        (["seen"], "is not a mapping"),
    ],
)
def test_ways_are_checked(buffers: Any, text: str) -> None:
    with pytest.raises(ps.errors.ConfigError, match=text):
        ps.distribute(cases.counting(), ps.parallel.Mesh(data=2), buffers=buffers)


def test_layers_of_torch_have_their_ways() -> None:
    layers = torch.nn.Sequential(
        torch.nn.BatchNorm1d(2),
        torch.nn.InstanceNorm1d(2, track_running_stats=True),
        torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(2, 2)),
    )
    ways = joined_buffers.ways_of(layers, dict(layers.named_buffers()), {})
    assert set(ways) == {name for name, _ in layers.named_buffers()}
    assert ways["0.running_var"] == ways["1.running_mean"] == "mean"
    assert ways["2.parametrizations.weight.0._u"] == "local"
