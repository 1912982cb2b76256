"""`fit`, `evaluate` and `run_epoch` in several processes: equal to one process, agreed, and never a hang."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rigs.parallel.processes import once, run

ULPS = 2.5e-7  # relative: metrics are float32, and a process rounds its own share


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def compute() -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("runs")
        return [output.value for output in run("rigs.parallel.fitting:everything", 2, args=[str(folder)], timeout=240)]

    return once(tmp_path_factory, "fitting", compute)


@pytest.mark.row("2.8", "2.15", "2.16", "B25")
@pytest.mark.parametrize("mode", ["shard", "replicate"])
def test_a_run_equals_one_process(found: list[dict[str, Any]], mode: str):
    for one in (each[mode] for each in found):
        for kind in ("state", "run_epoch", "listed", "streamed", "uneven"):
            assert one[kind] < 1e-14, (kind, one)
        assert max(one["history"].values()) < ULPS, one["history"]
        assert max(one["means"], one["totals"], one["uneven_loss"]) < 2 * ULPS
        assert one["best"][0] == one["best"][1]
        if mode == "shard":  # with accumulation, callbacks see the last batch of each window
            assert one["rows"] == [list(range(37))] * 2  # each once an epoch


def test_exact_metrics_count_each_row_once(found: list[dict[str, Any]]):
    for one in (each["exact"] for each in found):
        assert one["several"] == one["one"]
        assert 0.0 < one["one"] < 1.0


ENDS: dict[str, Any] = {
    "sigterm": ("Preempted: 143", [4, "interrupted"], [4]),
    "sigint": ("KeyboardInterrupt: interrupted", [4, "interrupted"], [4]),
    "snapshot": ("returned", [5, "epochs"], [4, 5]),
    "stop": ("returned", [4, "enough"], [4]),
    "stop at the end": ("returned", [5, "enough"], [5]),
    "max_time": ("returned", [4, "max_time"], [4]),
    "by the clock": ("returned", [5, "epochs"], [4, 5]),
    "sigterm in an evaluation": ("Preempted: 143", [5, "interrupted"], [5]),
}
"""How a run of 5 calls an epoch ends after something in call 3 of one process (2: the request to save): at the next
exchange, behind call 4 or at the boundary."""


@pytest.mark.parametrize("name", list(ENDS))
def test_a_decision_of_one_process_is_that_of_all(found: list[dict[str, Any]], name: str):
    kind, end, steps = ENDS[name]
    for one in (each["decisions"] for each in found):
        assert one[name][0].startswith(kind), one[name]
        assert one[name][1:] == [end, steps], one[name]


def test_an_error_of_the_first_process_is_that_of_all(found: list[dict[str, Any]]):
    first, second = (each["decisions"]["writer"][0] for each in found)
    assert first.startswith("WriteFailed: disk: no space")
    assert second.startswith("WriteFailed: process 0, disk: no space")


def test_a_state_that_one_callback_returns_is_refused_by_all(found: list[dict[str, Any]]):
    for each in found:
        assert (
            "the number of states that callbacks returned is 0 in process 0, 1 in process 1"
            in each["decisions"]["state"][0]
        )


def test_a_loss_that_is_not_finite_in_one_process_stops_all_at_one_call(found: list[dict[str, Any]]):
    first, second = (each["troubles"] for each in found)
    assert first == second
    places = {"raise": ("batch 3: ", 3), "window": ("batch 4: ", 4), "flushed": (": ", 6)}
    not_finite = "the loss, its weight or a gradient is not finite at call"
    for name, (text, *values) in first.items():
        assert (f": {not_finite}" in text) == (name in places), (name, text)
        if name in places:
            place, call = places[name]
            assert re.search(rf"^epoch 1,? ?{place}{not_finite} {call};", text), text
            assert "not finite in process 1: batch/rows/0 (3 of 24 not finite)" in text
        step, updates, total, *alone = values
        assert [step, updates] == alone[:2], (name, values)
        assert abs(total - alone[2]) < 1e-13, (name, values)


def test_a_gradient_that_is_not_finite_in_an_open_window_stops_all_at_a_snapshot(found: list[dict[str, Any]]):
    for each in found:
        *several, alone = each["open window"]
        for text, step in several:
            assert "is not finite in the window open at call 4" in text, several  # the next exchange
            assert step == alone[1] + 1 == 3, each


def test_epochs_that_are_cut_are_those_of_one_process(found: list[dict[str, Any]]):
    for each in found:
        wanted, *others = each["limited"]
        assert wanted[:2] == [4, [2, 4]]
        for one in others:
            assert one[:2] == wanted[:2]
            assert one[2] == pytest.approx(wanted[2], abs=1e-14)


def test_a_run_goes_on_inside_an_epoch_of_loaders_that_the_user_divides(found: list[dict[str, Any]]):
    for each in found:
        assert len(each["going on"]) == 10
        assert set(each["going on"].values()) == {0.0}, each["going on"]


LINES = r"cure: `with ps\.parallel\.start\(\) as mesh:` and `program = ps\.distribute\(program, mesh\)`"
PARTS = r"its DistributedSampler is for process \d of 2: .*cure: DataLoader\(dataset, batch_size=32, shuffle=True\)"
SAME = r"cure: run the same script with the same arguments and data in every process"
ROW = r"its first row in process 0 has other values than in process 1 .*ps\.parallel\.sharded\(loader\)"
ERRORS = {
    "without start": rf"fit: this is one of 2 processes, and the program is not distributed \({LINES}",
    "not distributed": rf"fit: this is process \d of 2, and the state and its program are not distributed \({LINES}",
    "evaluate": rf"evaluate: this is process \d of 2.*{LINES}",
    "run_epoch": rf"run_epoch: this is process \d of 2.*{LINES}",
    "sampler": rf"train: {PARTS}",
    "sampler, sharded": rf"train: {PARTS}",
    "sampler, evaluate": rf"evaluation: {PARTS}",
    "iterable": r"train: a loader without indices cannot be divided among 2 processes.*ps\.parallel\.sharded\(loader",
    "config": rf"config epochs is 2 in process 0, 3 in process 1 \({SAME}",
    "rows": rf"loader train, items is 37 in process 0, 38 in process 1.*{SAME}",
    "batch size": rf"loader train, batch_size is 8 in process 0, 9 in process 1.*{SAME}",
    "accumulate": rf"program accumulate is 1 in process 0, 2 in process 1.*{SAME}",
    "weights": r"checksum of params/\S+ is -?\d+ in process 0, -?\d+ in process 1.*torch\.manual_seed",
    "drift": r"the state after 5 calls: processes differ: checksum of (params|ema/params|ema)/up\.bias is",
    "models": r"program\.init: processes differ: checksum of weight is -?\d+ in process 0.*cure: torch\.manual_seed",
    "snapshots": rf"fit: processes differ: snapshots is a directory in process 0, None in process 1 \({SAME}",
    "seed": rf"checksum of key is 0 in process 0, 1 in process 1.*{SAME}",
    "structure": rf"train, first batch: .*a batch is Share\(list\(float64 tensor .* Share\(tuple\(.*{SAME}",
    "keys": rf"train, first batch: .*a batch is Share\(dict\(x: .*, y: .* 0, Share\(dict\(x: .*, z: .*{SAME}",
    "order": r"train: processes differ: the order of the data is \d+ in process 0, .*cure: the same dataset, sampler",
    "part": r"train: processes differ: the order of the data is .*ps\.parallel\.sharded\(loader\)",
    "split": r"train: processes differ: the order of the data is .*random splits .*manual_seed\(0\)",
    "own tensors": rf"train: {ROW}",
    "own batches": rf"train: {ROW}",
    "own items": rf"train: {ROW}",
    "own val": rf"val: {ROW}",
    "own, evaluate": rf"evaluation: {ROW}",
    "order of a list": rf"train: {ROW}",
    "order of a stream": r"train: processes differ: the order of the data is \d+ in process 0",
    "ends": r"train, epoch 1, batch 2: process 1 has another batch, and process 0 has none.*sharded\(loader\)",
    "another mesh": r"a mesh of data=2, shard=1, and the open mesh has data=1, shard=2 \(cure: call ps\.distribute",
    "outside of start": r"cure: call distributed steps inside `with ps\.parallel\.start",
    "outside of start, fit": r"fit: the state is one process's part.*cure: call it inside `with ps\.parallel\.start",
    "outside of start, full": r"cure: call distributed steps inside `with ps\.parallel\.start",
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors_say_what_where_and_the_cure(found: list[dict[str, Any]], name: str):
    for each in found:
        assert re.search(rf"^RankError: .*{ERRORS[name]}", each["errors"][name]), each["errors"][name]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["augmented", "drawn"])
def test_items_with_random_numbers_are_no_other_data(found: list[dict[str, Any]], name: str):
    for each in found:
        assert each["errors"][name] == "nothing"


@pytest.mark.parametrize(("sizes", "params"), [({"data": 2, "shard": 2}, "shard"), ({}, "replicate")])
def test_a_run_of_four_processes_equals_one(sizes: dict[str, int], params: str):
    """Two groups of two pieces each, and four whole states."""
    for output in run("rigs.parallel.fitting:equal", 4, args=[params, sizes, 1], timeout=240):
        one = output.value
        for kind in ("state", "run_epoch", "listed", "streamed", "uneven"):
            assert one[kind] < 1e-14, (kind, one)
        assert max(one["history"].values()) < ULPS, one["history"]
        assert one["rows"] == [list(range(37))] * 2
