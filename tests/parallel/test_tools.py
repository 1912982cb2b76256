"""`predict`, `refresh_batchnorm` and `find_learning_rate` in several processes: equal to one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rigs.parallel.processes import once, run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def compute() -> list[dict[str, Any]]:
        return [output.value for output in run("rigs.parallel.tool_cases:everything", 2, timeout=120)]

    return once(tmp_path_factory, "tools", compute)


def test_predictions_are_those_of_one_process_in_the_order_of_the_dataset(found: list[dict[str, Any]]):
    for one in (each for both in found for each in both["predict"]):
        assert one["far"] < 1e-14
        assert one["rows"] == [list(range(37)), list(range(5))]
        assert one["ordered"] == [list(range(37))] * 2


def test_a_callback_gets_the_rows_of_its_process(found: list[dict[str, Any]]):
    for one in (each for both in found for each in both["predict"]):
        nothing, rows, order = one["callback"]
        assert nothing is None
        assert rows == [0, 1, 2, 3, 4]
        assert order == [[[0, [0, 1]]], [[0, [2, 3]], [1, [4]]]]  # process 0 has no row of the last batch


def test_separate_loaders_are_joined_by_batch_and_then_by_process(found: list[dict[str, Any]]):
    rows = [row for start in range(0, 24, 6) for row in range(start, start + 6)]
    for one in (each for both in found for each in both["predict"]):
        assert one["separate"] == [*rows, 30, 31]


def test_processes_of_one_model_predict_each_row_once(found: list[dict[str, Any]]):
    for each in found:
        assert each["split"] < 1e-12


def test_the_statistics_are_those_of_one_process(found: list[dict[str, Any]]):
    for both in found:
        for one in both["statistics"]:
            assert one["far"] < 1e-9
            assert one["params"] == 0.0
            assert one["batches"] == 6


def test_a_range_of_learning_rates_is_that_of_one_process(found: list[dict[str, Any]]):
    for one in (both["rates"] for both in found):
        assert one["rates"][0] == one["rates"][1]
        assert one["far"] < 1e-5
        assert one["diverged"][0] == one["diverged"][1]
        assert one["unchanged"] == 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("predict", "RankError: predict: the state is distributed, and the program is not"),
        ("refresh_batchnorm", "RankError: refresh_batchnorm: the state is distributed, and the program is not"),
        ("find_learning_rate", "RankError: find_learning_rate: the state is distributed, and the program is not"),
        ("a list", "StepContractError: predict, batch 1: the output is a list"),
        ("without a mesh", "RankError: predict: the state is one process's part of a distributed state, and no mesh"),
        (
            "other widths",
            "StepContractError: predict, batch 6: without its rows the shape is [2] in process 0, and [3]",
        ),
        (
            "lbfgs",
            "ConfigError: program: the transform evaluates the loss of a call again, which it cannot do with sev",
        ),
        ("complex", "ConfigError: distribute: the transform is not defined for complex parameters: weight is one"),
        ("a stream", "RankError: predict: a loader without indices cannot be divided among 2 processes"),
    ],
)
def test_what_cannot_be_done_is_said_in_every_process(found: list[dict[str, Any]], name: str, words: str):
    for both in found:
        assert both["refusals"][name].startswith(words), both["refusals"][name]


def test_a_step_hands_out_the_rows_of_its_process(found: list[dict[str, Any]]):
    # Row 0 of a batch of one stands in for the rows that the first process has not.
    assert [both["handed out"] for both in found] == [[[0.0, 1.0], [0.0]], [[2.0, 3.0, 4.0], [0.0]]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["ours", "hold", "user"])
def test_no_thread_of_a_group_outlives_its_mesh(tmp_path: Path, kind: str):
    """One that is at work when the interpreter ends aborts the process."""
    for output in run("rigs.parallel.tool_cases:threads_left", 2, args=[str(tmp_path / "run"), kind], timeout=90):
        before, inside, after = output.value
        assert inside > before
        assert (after > before) == (kind == "hold"), (before, inside, after)
