"""Histories of many rows: what a save writes for them, and what is read back of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.planting import forge

import purestep as ps
from purestep.errors import Corrupt
from purestep.loop.loop_state import LoopState, from_json, to_store, with_row
from purestep.snapshot import Snapshots, Table
from purestep.snapshot.history_rows import BLOCK, RowsFile, placed, read

STATE = {"w": torch.zeros(2)}


def history(count: int, start: Any = None) -> Table:
    found = Table() if start is None else start
    for index in range(found.count, count):
        found = with_row(found, {"epoch": index + 1, "loss": 1 / (index + 1)})
    return found


def saved(snapshots: Snapshots, step: int, rows: Table) -> None:
    snapshots.save(step, STATE, loop={"record": to_store(LoopState(history=rows)), "feed": None})
    snapshots.wait()


def loaded(root: Path, **kw: Any) -> dict[str, list[Any]]:
    found = Snapshots(root, writer=False, **kw).restore(STATE)
    return dict(from_json(found.loop["record"]).history)


def names(root: Path) -> set[str]:
    return {path.name for path in root.glob("rows-*")}


def test_tables_are_values() -> None:
    one = history(3)
    first, second = with_row(one, {"epoch": 4}), with_row(one, {"epoch": 40, "more": 1.0})
    assert (one["epoch"], first["epoch"], second["epoch"]) == ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 40])
    assert second["more"] == [None, None, None, 1.0]
    assert "more" not in first
    assert first.last("loss", 2) == [1 / 3, None]
    assert LoopState().history.count == 0


def test_a_longer_table_takes_no_more_work_than_a_row() -> None:
    long = history(1000)
    before = list(long.memory)
    longer = with_row(long, {"epoch": 1001})
    assert longer.memory is long.memory  # nothing was copied
    assert all(a is b for a, b in zip(before, longer.memory, strict=False))


def test_what_a_save_writes_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    real = RowsFile.write

    def write(self: RowsFile, root: Path, table: Table) -> Any:
        before = sum(path.stat().st_size for path in root.glob("rows-*"))
        found = real(self, root, table)
        encoded.append(sum(path.stat().st_size for path in root.glob("rows-*")) - before)
        return found

    monkeypatch.setattr(RowsFile, "write", write)
    rows = Table()
    manifests: list[int] = []
    with Snapshots(tmp_path, keep=2) as snapshots:
        for step in range(1, 21):
            rows = history(10 * step if step < 11 else 1000 * (step - 9), rows)
            saved(snapshots, step, rows)
            manifests.append((tmp_path / str(step) / "manifest.json").stat().st_size)
            assert loaded(tmp_path) == dict(rows)
    assert max(manifests) < 2 * manifests[0] + 2000
    assert manifests[-1] <= max(manifests[4:10]) + 500  # of 11,000 rows as of 50 to 100
    assert max(encoded[-5:]) - min(encoded[-5:]) < 4000  # 1,000 rows each, whatever is there already
    assert names(tmp_path) == {"rows-1.jsonl"}


def test_a_short_history_is_in_the_manifest_alone(tmp_path: Path) -> None:
    with Snapshots(tmp_path) as snapshots:
        saved(snapshots, 1, history(2 * BLOCK - 1))
    assert names(tmp_path) == set()
    stored = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert len(stored["loop"]["record"]["history"]["epoch"]) == 2 * BLOCK - 1
    forge(tmp_path / "1", lambda record: record.pop("earlier"))  # as earlier versions wrote it
    assert loaded(tmp_path)["epoch"] == list(range(1, 2 * BLOCK))


def test_every_snapshot_has_its_own_rows(tmp_path: Path) -> None:
    """Of a run that goes on from an older one, and of the steps that it leaves behind."""
    with Snapshots(tmp_path, keep=None) as snapshots:
        one = history(100)
        saved(snapshots, 1, one)
        saved(snapshots, 2, history(200, one))
    with Snapshots(tmp_path, keep=None) as snapshots:
        found = from_json(snapshots.restore(STATE, step=1).loop["record"]).history
        other = with_row(found, {"epoch": 101, "loss": 7.0})
        saved(snapshots, 3, history(300, other))
    assert loaded(tmp_path)["loss"][100] == 7.0
    assert Snapshots(tmp_path).restore(STATE, step=1).loop["record"]["history"] == dict(one)
    (tmp_path / "2.archived").rename(tmp_path / "2")
    assert Snapshots(tmp_path).restore(STATE, step=2).loop["record"]["history"] == dict(history(200))
    assert names(tmp_path) == {"rows-1.jsonl", "rows-2.jsonl"}


def test_files_that_no_snapshot_refers_to_are_swept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        with Snapshots(tmp_path, keep=1) as snapshots:
            saved(snapshots, step, history(100))
    with Snapshots(tmp_path):
        assert names(tmp_path) == {"rows-3.jsonl"}
    (tmp_path / "3" / "manifest.json").write_text("{")  # it may refer to any
    with Snapshots(tmp_path):
        assert names(tmp_path) == {"rows-3.jsonl"}


@pytest.mark.parametrize("fault", ["missing", "cut", "flipped", "longer"])
def test_damaged_rows_cost_no_weights(tmp_path: Path, fault: str) -> None:
    with Snapshots(tmp_path) as snapshots:
        saved(snapshots, 1, history(100))
    file = tmp_path / "rows-1.jsonl"
    data = bytearray(file.read_bytes())
    data[3] ^= fault == "flipped"
    file.write_bytes(data[:-1] if fault == "cut" else data + b"{" if fault == "longer" else data)
    if fault == "missing":
        file.unlink()
    if fault == "longer":  # what a killed save has left
        assert loaded(tmp_path)["epoch"] == list(range(1, 101))
        return
    with pytest.warns(RuntimeWarning, match=r"rows-1\.jsonl: .*the first 80 rows of loop/record/history are lost"):
        found = loaded(tmp_path)
    assert found["epoch"] == [None] * 80 + list(range(81, 101))
    with pytest.raises(Corrupt, match=r"rows-1\.jsonl"):
        Snapshots(tmp_path, strict=True).restore(STATE)


@pytest.mark.parametrize("entry", [{"file": "../out"}, {"file": "rows-1.jsonl/../x"}, {"rows": -1}, {"size": "1"}])
def test_a_manifest_that_lies_about_rows_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    with Snapshots(tmp_path) as snapshots:
        saved(snapshots, 1, history(100))
    forge(tmp_path / "1", lambda record: record["earlier"]["loop/record/history"].update(entry))
    with pytest.raises(Corrupt, match="not a manifest"):
        Snapshots(tmp_path).restore(STATE, step=1)


def test_a_save_that_failed_after_its_rows_harms_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Snapshots(tmp_path, on_save_error="continue") as snapshots:
        rows = history(100)
        saved(snapshots, 1, rows)
        monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.manifest=raise:ENOSPC")
        rows = history(200, rows)
        saved(snapshots, 2, rows)
        monkeypatch.delenv("PURESTEP_FAILPOINT")
        assert snapshots.steps() == [1]
        assert loaded(tmp_path) == dict(history(100))
        saved(snapshots, 3, history(250, rows))
        assert loaded(tmp_path) == dict(history(250))


def test_two_tables_in_one_loop_have_files_of_their_own(tmp_path: Path) -> None:
    with Snapshots(tmp_path) as snapshots:
        for step in (1, 2):
            loop = {"a": history(50 * step), "list": [1, {"b": history(60)}]}
            snapshots.save(step, STATE, loop=loop)
    found = Snapshots(tmp_path).restore(STATE).loop
    assert found == {"a": dict(history(100)), "list": [1, {"b": dict(history(60))}]}
    assert placed([1, [2]], ["1", "0"], {"c": [3]}) == [1, [{"c": [3]}]]


def test_a_run_of_many_epochs_goes_on_with_its_whole_history(tmp_path: Path) -> None:
    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(1e-3))
    batch = (torch.ones(4, 1), torch.zeros(4, 1))
    kw: dict[str, Any] = {"sinks": [], "early_stopping": None}

    def fit(epochs: int) -> Any:
        with Snapshots(tmp_path / "run", every_epochs=20) as snapshots:
            return ps.fit(program.init(), {"train": [batch]}, program, epochs=epochs, snapshots=snapshots, **kw)

    fit(50)
    found = fit(90)
    whole = ps.fit(program.init(), {"train": [batch]}, program, epochs=90, **kw)
    assert found.history == whole.history
    assert names(tmp_path / "run")


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = with_row(history(40), {"epoch": 41, "name with \n and é": 2.0})
    found = RowsFile().write(tmp_path, history(80, rows))
    assert found is not None
    assert read(tmp_path, found)[40] == {"epoch": 41, "name with \n and é": 2.0}
