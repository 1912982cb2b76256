"""The history of a run in its snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.faults import planting

import purestep as ps
from purestep import snapshot
from purestep.errors import Corrupt, SnapshotError
from purestep.loop.loop_state import LoopState, from_json, to_json, with_row
from purestep.snapshot import Snapshots

STATE = {"w": torch.zeros(2)}
HISTORY = {"epoch": [1, 2, 3], "train_loss": [0.5, 1 / 3, None], "odd \n é": [None, None, 1e-300]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, STATE, history=HISTORY, loop={"epoch": 3})
    return tmp_path


def test_columns_come_back_as_they_went(saved: Path) -> None:
    found = Snapshots(saved, writer=False).restore(STATE)
    assert (found.history, found.loop) == (HISTORY, {"epoch": 3})
    assert [type(value) for value in (found.history or {})["epoch"]] == [int] * 3
    assert snapshot.read_history(saved, 1) == HISTORY
    assert np.load(saved / "1" / "history.npy").shape == (3, 3)


@pytest.mark.parametrize("history", [None, {}])
def test_a_snapshot_without_a_history(tmp_path: Path, history: Any) -> None:
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, STATE, history=history)
        assert snapshots.restore(STATE).history is None
    assert not (tmp_path / "1" / "history.npy").exists()


def test_a_history_without_tensors(tmp_path: Path) -> None:
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"name": "x"}, history=HISTORY)
        assert snapshots.restore({"name": ""}).history == HISTORY


@pytest.mark.parametrize("column", [["a", 1, 2], [1, 2], [True, 1, 2], [2**53 + 1, 1, 2]])
def test_what_is_no_column_of_numbers_is_refused(tmp_path: Path, column: list[Any]) -> None:
    with (
        Snapshots(tmp_path) as snapshots,
        pytest.raises(SnapshotError, match="history/more: the column must hold numbers"),
    ):
        snapshots.save(1, STATE, history=HISTORY | {"more": column})


@pytest.mark.parametrize("fault", ["flipped", "gone", "another number of columns", "a pickle"])
def test_a_damaged_history_damages_the_step(saved: Path, fault: str) -> None:
    file = saved / "1" / "history.npy"
    data = bytearray(file.read_bytes())
    if fault == "gone":
        file.unlink()
    elif fault == "flipped":
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        values = np.zeros((3, 2)) if "columns" in fault else np.array([[object()]])
        np.save(file, values, allow_pickle=True)
        planting.relist(saved / "1")
    with pytest.raises(Corrupt, match=r"history\.npy"):
        Snapshots(saved, writer=False).restore(STATE, step=1)


def test_histories_are_values() -> None:
    one = with_row(with_row({}, {"epoch": 1, "loss": 0.5}), {"epoch": 2})
    first, second = with_row(one, {"epoch": 3}), with_row(one, {"epoch": 30, "more": float("nan")})
    assert one == {"epoch": [1, 2], "loss": [0.5, None]}
    assert (first["epoch"], second["epoch"], second["more"]) == ([1, 2, 3], [1, 2, 30], [None] * 3)
    loop = LoopState(history=one)
    assert from_json(to_json(loop), loop.history).history == one


def test_a_resumed_run_has_the_whole_history(tmp_path: Path) -> None:
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
    assert {name: list(map(type, column)) for name, column in found.history.items()} == {
        name: list(map(type, column)) for name, column in whole.history.items()
    }
