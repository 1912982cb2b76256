"""Layers that communicate inside of a pass: batch normalization, blocks gathered one by one, tensor parallel."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.parallel import cases, processes
from torch import distributed as dist

import purestep as ps
from purestep.parallel import mesh as mesh_
from purestep.parallel.units import Shown

BATCHNORM: dict[str, Any] = {"problem": "normalized", "batches": "images", "params": "replicate"}
TRACE = {"backend": "aot_eager"}
SYNCED: list[dict[str, Any]] = [
    {**BATCHNORM, "batchnorm": "sync"},
    {**BATCHNORM, "batchnorm": "sync", "kind": "uneven", "options": {"accumulate": 3}},
    {**BATCHNORM, "batchnorm": "sync", "kind": "empty"},
    {**BATCHNORM, "batchnorm": "sync", "mesh": {"shard": 2}, "params": "shard", "kind": "uneven"},
    {**BATCHNORM, "batchnorm": "sync", "kind": "uneven", "compiled": TRACE},
    {**BATCHNORM, "batchnorm": "sync", "kind": "uneven", "mesh": {"shard": 2}, "params": "shard", "units": ["norm"]},
]
AVERAGED: list[dict[str, Any]] = [{**BATCHNORM, "batchnorm": "average"}]

COLUMNS = {"*.up": "ColwiseParallel", "*.down": "RowwiseParallel"}
TENSOR: dict[str, Any] = {"problem": "perceptrons", "batches": "vectors", "params": "replicate", "tensor": COLUMNS}
TWO: dict[str, Any] = {**TENSOR, "mesh": {"tensor": 2}}
SPLIT: list[dict[str, Any]] = [
    TWO,
    {**TWO, "options": {"accumulate": 4}},
    {**TWO, "tx": "lamb"},
    {**TWO, "tensor": "sequence"},
    {**TWO, "compiled": TRACE},
]
SPLIT_AND_CUT: list[dict[str, Any]] = [
    TWO,
    {**TWO, "kind": "uneven", "options": {"accumulate": 4}},
    {**TWO, "mesh": {"shard": 2, "tensor": 2}, "params": "shard"},
    {**TWO, "mesh": {"shard": 2, "tensor": 2}, "params": "shard", "tx": "lamb", "kind": "empty"},
    {**TWO, "mesh": {"shard": 2, "tensor": 2}, "params": "shard", "units": ["1", "2"], "kind": "uneven"},
    {"params": "shard", "units": ["blocks.*"], "mesh": {"data": 2, "shard": 2}, "kind": "uneven"},
]
UNITS: dict[str, Any] = {"params": "shard", "units": ["blocks.*"]}
GATHERED: list[dict[str, Any]] = [
    {**UNITS, "mesh": {"shard": 2}},
    {**UNITS, "mesh": {"shard": 2}, "kind": "uneven", "options": {"accumulate": 3}},
    {**UNITS, "mesh": {"shard": 2}, "kind": "empty", "options": {"microbatches": 2}},
    {**UNITS, "mesh": {"shard": 2}, "kind": "uneven", "tx": "lamb"},
    {**UNITS, "mesh": {"shard": 2}, "kind": "uneven", "compiled": TRACE},
]


ALL = SYNCED + AVERAGED + SPLIT + GATHERED


CALLS: dict[str, list[Any]] = {
    "steps": ["rigs.parallel.cases:steps", ALL],
    "orders": ["rigs.parallel.cases:orders"],
    "refused": ["rigs.parallel.cases:refused"],
    **{f"one row, {kind}": ["rigs.parallel.cases:one_row", kind] for kind in ("average", "sync")},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes.returned(tmp_path_factory, "layers", CALLS)


@pytest.fixture
def results(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return found[0]["steps"]


@pytest.mark.parametrize("index", range(len(SYNCED)), ids=lambda index: str(SYNCED[index]))
def test_synchronized_statistics_equal_one_process(results: list[dict[str, Any]], index: int) -> None:
    assert results[index]["far"] < 1e-9, results[index]
    assert results[index]["metrics"] < 1e-6


def test_the_counts_of_all_layers_are_one_collective(results: list[dict[str, Any]]) -> None:
    """Two layers. Six calls: the gradients, the small sums, the buffers, and their counts."""
    assert results[len(SYNCED)]["collectives"] == {"all_reduce": 4 * 6}


def test_averaged_statistics_are_other_ones(results: list[dict[str, Any]]) -> None:
    assert 1e-6 < results[len(SYNCED)]["far"] < 1.0


def test_batch_normalization_has_no_default() -> None:
    with pytest.raises(ps.errors.ConfigError, match=r'norm.*batchnorm="sync".*batchnorm="average"'):
        ps.distribute(cases.normalized(), ps.parallel.Mesh(data=2))
    with pytest.raises(ps.errors.ConfigError, match="batchnorm='none'"):
        ps.distribute(cases.normalized(), ps.parallel.Mesh(data=2), batchnorm="none")


def test_one_value_of_a_channel_is_refused_by_all_processes(found: list[dict[str, Any]]) -> None:
    """The second process has the row that stands in for none. Statistics of all processes need two rows."""
    for each in found:
        average, sync = (each[f"one row, {kind}"] for kind in ("average", "sync"))
        assert re.match("3 rows: .*too few for batch normalization.*drop_last=True", average), average
        assert re.match("1 rows: batch: .*more than 1 value per channel.*drop_last=True", sync), sync


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


def test_tensor_parallel_equals_one_process(results: list[dict[str, Any]]) -> None:
    split = results[len(SYNCED + AVERAGED) : -len(GATHERED)]
    for one in split:
        assert one["far"] < 1e-13, one
    assert split[0]["rest"] < 0.6 * split[0]["total"]


@pytest.mark.soak
def test_tensor_parallel_with_other_axes() -> None:
    for one in processes.run("rigs.parallel.cases:steps", 4, args=[SPLIT_AND_CUT], timeout=150)[0].value:
        assert one["far"] < 1e-13, one


def test_units_equal_one_process(results: list[dict[str, Any]]) -> None:
    for one in results[-len(GATHERED) :]:
        assert one["far"] < 1e-14, one


@pytest.mark.soak
def test_the_weight_of_a_loss_does_not_overflow_float16() -> None:
    """With units a loss is multiplied by its share of the weight, not by the number of its elements."""
    found = processes.run("rigs.parallel.cases:many_elements", 2, timeout=150)[0].value
    assert [applied for applied, _ in found.values()] == [4, 4, 4]
    for _, loss in found.values():
        assert loss == pytest.approx(found["one"][1], rel=1e-3)


def test_a_plan_with_a_frozen_layer_and_a_buffer_without_a_way_are_refused(
    found: list[dict[str, Any]],
) -> None:
    for each in (one["refused"] for one in found):
        assert re.search(r"distribute: 1\.up\.\w+ is frozen, .*cure: leave the layer out", each["a plan"])
        assert "writes the buffer seen" in each["a buffer"]


@pytest.mark.slow
def test_units_need_less_memory_than_the_whole_parameters() -> None:
    found = processes.run("rigs.parallel.cases:peaks_with_and_without", 2, timeout=240)[0].value
    with_units, without = found
    assert with_units["peak"] <= 0.9, found
    assert without["peak"] > 1.5, found
    assert with_units["rest"] < 0.501, found


def test_parameters_of_a_unit_cannot_be_read_outside() -> None:
    shown = Shown({"a": torch.ones(1), "b": torch.ones(1)}, frozenset({"b"}))
    assert shown["a"].item() == 1
    for read in (
        lambda: shown["b"],
        lambda: shown.get("b"),
        lambda: sum(value.sum() for value in shown.values()),
        lambda: list(shown.items()),
        lambda: {**shown},
    ):
        with pytest.raises(
            ps.errors.StepContractError, match="model.params/b: the parameter is whole only inside of its unit"
        ):
            read()


ORDERS = {
    "same": "",
    "experts": r"the next collective is the parameters of blocks\.1 in process 0, .* blocks\.0 in process 1",
    "dropped": r"is the parameters of blocks\.1 in process 0, the parameters of blocks\.0 in process 1",
    "dropped last": r"is the loss in process 0, the parameters of blocks\.1 in process 1",
    "dropped in the second call": r"is the loss in process 0, the parameters of blocks\.1 in process 1",
    "dropped all": r"is the loss in process 0, the parameters of blocks\.0 in process 1",
    "later": r"train: .*collective \d+ since .* is the parameters of blocks\.0 in process 0, .*blocks\.1 in process 1",
    "dropped in a checked call": r"is the loss in process 0, the parameters of blocks\.0 in process 1",
}


def test_units_that_differ_between_processes_are_refused(found: list[dict[str, Any]]) -> None:
    """In the first two passes and in every checked call of `fit` before one waits for the other, and in any call before
    the next one begins."""
    for each in (one["orders"] for one in found):
        for name, text in each.items():
            assert re.search(ORDERS[name], text), (name, text)
            assert not text or "experts, dropped layers) out of units=[...] of ps.distribute" in text, text
        assert each["same"] == ""
        assert set(each) == set(ORDERS)


@pytest.mark.parametrize(
    ("units", "problem"),
    [
        (["layers.*"], "matches no module"),
        (["blocks.0", "blocks.0.up"], "blocks.0.up lies inside of the unit blocks.0"),
        ("blocks", "units='blocks'"),
    ],
)
def test_units_are_checked(units: Any, problem: str) -> None:
    with pytest.raises(ps.errors.ConfigError, match=problem):
        ps.distribute(cases.problem(), ps.parallel.Mesh(shard=2), params="shard", units=units)


def test_a_plan_is_checked() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    program, mesh = cases.perceptrons(), ps.parallel.Mesh(tensor=2)
    with pytest.raises(ps.errors.ConfigError, match="'x', which matches no layer"):
        ps.distribute(program, mesh, tensor={"x": ColwiseParallel()})
    with pytest.raises(ps.errors.ConfigError, match="must map names of layers"):
        ps.distribute(program, mesh, tensor={"1.up": "columns"})
    with pytest.raises(ps.errors.RankError, match="tensor=2, and there is no plan"):
        ps.distribute(program, mesh)
    with pytest.raises(ps.errors.RankError, match="tensor=1, and there is a plan"):
        ps.distribute(program, ps.parallel.Mesh(data=2), tensor={"1.up": ColwiseParallel()})


def _total_norm(updates: Any) -> torch.Tensor:
    return torch.stack([leaf.square().sum() for leaf in updates.values()]).sum().sqrt()


def test_clipping_in_a_function_of_the_users_is_refused_for_any_bound() -> None:
    inner = ps.optim.chain(ps.optim.clip_by_global_norm(1e6), ps.optim.sgd(0.1))
    rule = ps.optim.Transform(inner.init, lambda updates, state, params: inner.update(updates, state, params), True)
    program = ps.program(torch.nn.Linear(4, 2), ps.supervised(torch.nn.MSELoss()), rule)
    with pytest.raises(ps.errors.ConfigError, match="says that it is elementwise"):
        ps.distribute(program, ps.parallel.Mesh(shard=2), params="shard")


def test_a_transform_for_these_very_shapes_is_not_compared() -> None:
    def init(params: Any) -> Any:
        assert params["weight"].shape == (2, 4)
        return ()

    rule = ps.optim.Transform(init, lambda updates, state, params: (updates, state), True)
    program = ps.program(torch.nn.Linear(4, 2), ps.supervised(torch.nn.MSELoss()), rule)
    ps.distribute(program, ps.parallel.Mesh(shard=2), params="shard")


@pytest.mark.parametrize(
    ("norm", "elementwise", "is_refused"),
    [
        (_total_norm, True, True),
        (lambda updates: next(iter(updates.values())).mean(), True, True),
        (ps.optim.global_norm, True, True),
        (_total_norm, False, False),
    ],
)
def test_a_transform_that_sums_by_itself_is_refused(norm: Any, elementwise: bool, is_refused: bool) -> None:
    rule = ps.optim.stateless(lambda u, p: {k: v / norm(u) for k, v in u.items()}, elementwise=elementwise)
    program = ps.program(torch.nn.Linear(4, 2), ps.supervised(torch.nn.MSELoss()), rule)
    mesh = ps.parallel.Mesh(shard=2)
    if is_refused:
        with pytest.raises(ps.errors.ConfigError, match=r"says that it is elementwise.*set elementwise=False"):
            ps.distribute(program, mesh, params="shard")
    else:
        ps.distribute(program, mesh, params="shard")


@pytest.mark.parametrize(
    ("error", "is_left"), [(ValueError("of the caller"), True), (ps.errors.RankError("gone"), False)]
)
def test_an_error_of_the_caller_leaves_a_process_group_of_theirs(
    error: Exception, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective that has failed ends it: later work on it would wait."""
    found: list[Any] = []
    monkeypatch.setattr(mesh_, "abort", lambda groups, but=None: found.append(but))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(type(error)), ps.parallel.start():
            raise error
        assert found == [dist.group.WORLD if is_left else None]
    finally:
        dist.destroy_process_group()


def test_an_abort_leaves_the_group_that_is_named() -> None:
    ended: list[str] = []
    world, data = (SimpleNamespace(abort=functools.partial(ended.append, name)) for name in ("world", "data"))
    groups = mesh_.Groups(ps.parallel.Mesh(device_type="cuda"), None, {"world": world, "data": data}, None, timeout=1.0)
    mesh_.abort(groups, but=world)
    assert ended == ["data"]
