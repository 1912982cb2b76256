"""Blocks that are computed again, frozen weights in pieces, and states made of modules on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.parallel import piece_cases, processes
from torch import nn

import purestep as ps

TRACE = {"backend": "aot_eager"}
SHARD: dict[str, Any] = {"mesh": {"shard": 2}, "params": "shard", "batches": "vectors"}
REPEATED: dict[str, Any] = {**SHARD, "problem": "rigs.parallel.piece_cases:repeated", "units": ["blocks.*"]}
AGAIN: list[dict[str, Any]] = [
    REPEATED,
    {**REPEATED, "options": {"around": True}},
    {**REPEATED, "kind": "empty", "options": {"accumulate": 3}},
    {**REPEATED, "compiled": TRACE},
]
ADAPTED: dict[str, Any] = {**SHARD, "problem": "rigs.parallel.piece_cases:adapted"}
BASE = [["base|out", "shard"]]
FROZEN: list[dict[str, Any]] = [
    {**ADAPTED, "kind": "uneven"},
    {**ADAPTED, "units": ["1", "2"], "kind": "uneven"},
    {**ADAPTED, "units": ["1", "2"], "kind": "empty", "tx": "lamb", "options": {"microbatches": 2}},
    {**ADAPTED, "params": BASE, "options": {"accumulate": 4}},
    {**ADAPTED, "params": BASE, "units": ["1", "2"], "options": {"accumulate": 4}},
    {**ADAPTED, "compiled": TRACE},
    {**ADAPTED, "units": ["1", "2"], "compiled": TRACE},
]
ALL = AGAIN + FROZEN


HUGGING_FACE = [("gpt2", "enabled"), ("llama", "enabled"), ("llama", "")]
CALLS: dict[str, list[Any]] = {
    "steps": ["rigs.parallel.cases:steps", ALL],
    **{f"{kind} {way}": ["rigs.parallel.piece_cases:hugging_face", kind, way] for kind, way in HUGGING_FACE},
    **{name: [f"rigs.parallel.piece_cases:{name}"] for name in ("frozen_dtypes", "masks_by_size", "differing")},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes.returned(tmp_path_factory, "pieces", CALLS)


@pytest.fixture
def results(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return found[0]["steps"]


@pytest.mark.parametrize("index", range(len(AGAIN)), ids=lambda index: str(AGAIN[index]))
def test_checkpointing_inside_a_unit_equals_one_process(results: list[dict[str, Any]], index: int) -> None:
    assert results[index]["far"] < 1e-14, results[index]


@pytest.mark.parametrize("index", range(len(FROZEN)), ids=lambda index: str(FROZEN[index]))
def test_frozen_pieces_equal_one_process(results: list[dict[str, Any]], index: int) -> None:
    assert results[len(AGAIN) + index]["far"] < 1e-14, results[len(AGAIN) + index]


@pytest.mark.parametrize(("kind", "way"), HUGGING_FACE)
def test_layers_of_hugging_face_as_units(found: list[dict[str, Any]], kind: str, way: str) -> None:
    one = found[0][f"{kind} {way}"]
    assert one["far"] < 1e-12, one
    # No layer is computed a third time: each of two is gathered twice, and all other parameters once.
    assert one["collectives"]["all_gather_single"] == 5, one


def test_frozen_weights_of_any_dtype_are_cut_and_gathered(found: list[dict[str, Any]]) -> None:
    assert [each["frozen_dtypes"] for each in found] == [[], []]


def test_a_snapshot_of_frozen_pieces_is_read_by_one_process(tmp_path: Path) -> None:
    held = [each.value for each in processes.run("rigs.parallel.piece_cases:saved", 2, args=[str(tmp_path)])]
    whole = piece_cases.adapted().init(seed=1)
    assert max(held) < 0.6 * sum(value.numel() for value in whole.frozen.values())
    with ps.Snapshots(tmp_path) as snapshots:
        found = snapshots.restore(whole).state
    for name, value in piece_cases.adapted().init(seed=0).frozen.items():
        assert torch.equal(found.frozen[name], value), name


@pytest.mark.slow
def test_frozen_weights_need_the_memory_of_their_pieces() -> None:
    found = processes.run("rigs.parallel.piece_cases:frozen_peaks", 2, timeout=240)[0].value
    assert found["whole"]["rest"] == 1.0
    assert max(found["pieces"]["rest"], found["units"]["rest"]) < 0.501, found
    assert found["pieces"]["peak"] > 0.9, found
    assert found["units"]["peak"] < 0.4, found


# --- modules on the meta device ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_makes_its_pieces_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    piece_cases.wide_file(path)
    found = processes.run("rigs.parallel.piece_cases:init_peaks", 2, args=[str(path)], timeout=240)[0].value
    assert {each["far"] for each in found.values()} == {0.0}, found
    assert max(found["module"]["peak"], found["drawn"]["peak"]) < 1.2, found
    assert found["file"]["peak"] < 1.7, found  # with the pages of the file, which the system may take back
    assert found["at once"]["peak"] > 1.8, found


def test_a_module_on_the_meta_device_becomes_a_state() -> None:
    torch.manual_seed(0)
    real = piece_cases.small(meta=False)
    program = ps.program(piece_cases.small(meta=True), ps.supervised(nn.MSELoss()), ps.optim.adamw(0.1))
    expected = ps.program(real, ps.supervised(nn.MSELoss()), ps.optim.adamw(0.1)).init(seed=0)
    values = {name: value.double() if value.is_floating_point() else value for name, value in real.state_dict().items()}
    state = program.init(seed=0, weights=values.__getitem__)
    assert ps.tree.paths(state) == ps.tree.paths(expected)
    for one, other in zip(ps.tree.leaves(state), ps.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert float(program.train_step(state, (torch.ones(4, 3), torch.ones(4, 2)))[1]["loss"]) > 0


def test_weights_that_do_not_fit_are_refused() -> None:
    program = ps.program(piece_cases.small(meta=True), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    real = ps.program(piece_cases.small(meta=False), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    with pytest.raises(ps.errors.StateError, match=r"0\.weight: .*meta device and has no values .*weights="):
        program.init(seed=0)
    with pytest.raises(ps.errors.StateError, match=r"0\.weight: weights\('0.weight'\) raised KeyError"):
        program.init(seed=0, weights={}.__getitem__)
    with pytest.raises(ps.errors.StateError, match=r"returned \[1\] on cpu, and the tensor is \[5, 3\]"):
        program.init(seed=0, weights=lambda name: torch.ones(1))
    with pytest.raises(ps.errors.ConfigError, match="this module has values .*omit weights"):
        real.init(seed=0, weights=lambda name: torch.ones(1))


def test_weights_that_differ_between_processes_are_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "checksum of 0.weight" in each["differing"]


def test_a_mask_by_size_sees_whole_parameters(found: list[dict[str, Any]]) -> None:
    for far, rows in (each["masks_by_size"] for each in found):
        assert far < 1e-14
        assert rows == 4
