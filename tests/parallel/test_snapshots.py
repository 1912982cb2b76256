"""Snapshots of several processes: any world reads any other's, and what a fault in one process leaves."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from rigs.parallel import processes, snapshot_cases
from rigs.parallel.snapshot_groups import group, killed

import purestep as ps
from purestep import errors, files
from purestep.snapshot import manifest

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def alone(function: str, *args: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function in this process, as a world of one."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(processes.free_port()))
    return getattr(snapshot_cases, function)(*args)


# --- any world reads any other's --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_one_and_two_processes_read_each_others_snapshots(tmp_path, kind, monkeypatch):
    two = group("write", 2, str(tmp_path / "two"), kind)
    assert two[0] == two[1]
    one = alone("write", str(tmp_path / "one"), kind, monkeypatch=monkeypatch)
    assert group("read", 2, str(tmp_path / "one"), kind) == [one, one]
    assert alone("read", str(tmp_path / "two"), kind, monkeypatch=monkeypatch) == two[0]
    record = files.read_json(tmp_path / "two" / "5" / manifest.NAME)
    assert (record["format"], record["parts"]) == (3, 2 if kind == "shard" else 1)


@pytest.mark.soak
def test_a_hybrid_mesh_and_one_of_three_read_each_other(tmp_path):
    four = group("write", 4, str(tmp_path), "shard")
    assert sorted(path.name for path in (tmp_path / "5").glob("part-*")) == ["part-0", "part-1"]
    assert set(group("read", 3, str(tmp_path), "shard")) == set(four)


@pytest.mark.parametrize(("world", "most"), [(2, 0.85), pytest.param(4, 0.5, marks=pytest.mark.soak)])
def test_parts_of_layers_are_restored_and_read_by_one_process(tmp_path, world, most):
    """No process gathers or writes the whole state."""
    found = group("tensor_parallel", world, str(tmp_path))
    before, after, one = found[0]["digests"]
    assert before == after == one
    assert all(each["digests"] == found[0]["digests"] for each in found)
    assert max(each["share"] for each in found) < most
    assert files.read_json(tmp_path / "1" / manifest.NAME)["parts"] == world


def test_the_weights_alone_are_restored_into_pieces(tmp_path, monkeypatch):
    alone("write", str(tmp_path), "shard", monkeypatch=monkeypatch)
    own = snapshot_cases.program()
    assert own.init is not None
    found = ps.Snapshots(tmp_path, writer=False).restore(own.init(), only="params").state
    expected = snapshot_cases.digest((found.params, found.buffers, found.ema))
    assert group("only", 2, str(tmp_path)) == [expected, expected]


@pytest.mark.parametrize(
    "pieces",
    [
        [[0, 0, 2, 1], [1, 3, 5, 1]],
        [[0, 0, 5, 1], [1, 4, 5, 1]],
        [[0, 0, 2, 1]],
        [[0, 0, 2, 1], [7, 2, 5, 1]],
        [[0, 1, 5, 1]],
    ],
)
def test_pieces_with_a_gap_an_overlap_or_no_part_are_no_manifest(tmp_path, pieces):
    leaf = manifest.Leaf("float32", (5, 2), pieces=tuple(manifest.Piece(*piece) for piece in pieces))
    fields: dict[str, Any] = {"loop": None, "history": None, "metrics": {}, "meta": None, "monitor": None}
    made = manifest.Manifest.model_construct(format=3, step=3, leaves={"w": leaf}, environment={}, parts=2, **fields)
    manifest.write(tmp_path, made)
    with pytest.raises(errors.Corrupt, match="in the pieces"):
        manifest.read(tmp_path)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (0, "snapshot.stage"),
        (0, "snapshot.part"),
        (0, "snapshot.commit"),
        (0, "snapshot.committed"),
        (0, "snapshot.commit@4"),
        (0, "snapshot.delete@1"),
        (1, "snapshot.part"),
    ],
)
def test_a_process_killed_during_a_save_leaves_whole_steps_and_is_named(tmp_path, rank, point):
    assert killed(tmp_path, 2, rank, point) is None


def test_the_errors_of_one_process_are_raised_by_all(tmp_path):
    first, second = group("disagree", 2, str(tmp_path))
    assert first == second
    assert len(first) == 19


def test_a_failed_save_is_counted_by_all_processes(tmp_path):
    assert group("continued", 2, str(tmp_path)) == ["1 [1]", "1 [1]"]


def test_a_locked_directory_is_locked_for_all_processes(tmp_path):
    with files.DirectoryLock(tmp_path):
        texts = group("locked", 2, str(tmp_path))
    assert all("another run writes here" in text for text in texts), texts


def test_a_part_that_is_missing_makes_the_step_damaged(tmp_path):
    group("write", 2, str(tmp_path), "shard")
    shutil.rmtree(tmp_path / "5" / "part-1")
    assert ps.Snapshots(tmp_path, writer=False).steps() == []


# --- whole-state tools ------------------------------------------------------------------------------------------------


def test_exports_modules_and_predictions_have_whole_weights(tmp_path):
    assert group("tools", 2, str(tmp_path)) == [["ValueError", "ConfigError"], ["RankError", "ConfigError"]]
