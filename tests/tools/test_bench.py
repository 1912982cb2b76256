from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, DataError
from purestep.tools import bench


class Clock:
    """Seconds that pass only when a step says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(bench.time, "perf_counter", found.perf_counter)
    return found


def lasting(clock: Clock, seconds: list[float], log: list[str] | None = None, name: str = "step") -> Any:
    """A step that takes the next of these times at each call, the last one for ever."""
    left = list(seconds)

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        clock.now += left.pop(0) if len(left) > 1 else left[0]
        if log is not None:
            log.append(name)
        return state + batch, {}

    step.__name__ = name
    return step


ZERO, ONE = torch.zeros(()), torch.ones(())


def test_the_median_and_the_deciles_over_blocks(clock: Clock):
    # One block of one call that is not counted, then 11 blocks of 1 to 11 s.
    step = lasting(clock, [100.0, *(float(s) for s in range(1, 12))])
    report = ps.benchmark(step, ZERO, ONE, calls=1, blocks=11)
    assert report.timings == [bench.Timing("step", 6.0, 2.0, 10.0)]


def test_a_time_is_of_one_call(clock: Clock):
    assert ps.benchmark(lasting(clock, [0.5]), ZERO, ONE, calls=4, blocks=2).timings[0].median == 0.5


def test_two_run_in_turns(clock: Clock):
    log: list[str] = []
    ours, theirs = lasting(clock, [1.0], log, "ours"), lasting(clock, [3.0], log, "theirs")
    report = ps.benchmark(ours, ZERO, ONE, against=theirs, calls=2, blocks=2)
    turns = ["ours", "theirs", "ours", "theirs", "theirs", "ours"]  # the first two are not counted
    assert log == [name for name in turns for _ in range(3)]
    assert [timing.name for timing in report.timings] == ["ours", "theirs"]
    assert report.ratio == 3.0
    assert "ours is 3.00 times as fast" in str(report)


def test_the_first_call_after_the_other_step_is_not_timed(clock: Clock):
    ours = lasting(clock, [*[9.0, 1.0] * 2, 9.0, 1.0])  # one call a turn, after one that is slow
    report = ps.benchmark(ours, ZERO, ONE, against=lasting(clock, [2.0]), calls=1, blocks=2)
    assert [timing.median for timing in report.timings] == [1.0, 2.0]


def test_two_of_one_name_are_told_apart(clock: Clock):
    report = ps.benchmark(lasting(clock, [1.0]), ZERO, ONE, against=lasting(clock, [2.0]), calls=1, blocks=2)
    assert [timing.name for timing in report.timings] == ["step (step)", "step (against)"]
    assert "step (step) is 2.00 times as fast" in str(report)


def test_each_goes_on_from_its_own_state_and_yours_stays():
    states: dict[str, list[float]] = {"a": [], "b": []}

    def step_of(name: str, sign: float) -> Any:
        def step(state: Tensor, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            states[name].append(float(state))
            return state.add_(sign * batch), {}  # a donated step would write it, too

        return step

    state = torch.zeros(())
    ps.benchmark(step_of("a", 1), state, ONE, against=step_of("b", -1), calls=1, blocks=2)
    assert states == {"a": [0, 1, 2, 3, 4, 5], "b": [0, -1, -2, -3, -4, -5]}
    assert float(state) == 0


def test_the_fields_of_a_report_for_an_eager_program():
    program = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    state = program.init(device="cpu")
    kept = ps.clone(state)
    report = ps.benchmark(program.train_step, state, vector_batch(), calls=2, blocks=3)
    assert_trees_close(state, kept, exact=True)
    assert report.timings[0].name == "train_step"
    assert 0 < report.timings[0].low <= report.timings[0].median <= report.timings[0].high
    assert (report.graphs, report.recompiles, report.ratio, report.device) == (None, None, None, "cpu")
    assert report.peak_bytes > 10**6


def test_graphs_are_those_of_the_step_and_recompiles_those_made_on_the_way(clock: Clock):
    step = lasting(clock, [1.0])
    counts = iter([1, 4])

    class Compiled:
        @property
        def graphs(self) -> int:
            return next(counts)

        def __call__(self, state: Tensor, batch: Tensor) -> Any:
            return step(state, batch)

    report = ps.benchmark(Compiled(), ZERO, ONE, calls=1, blocks=2)
    assert (report.graphs, report.recompiles) == (4, 3)
    assert report.timings[0].name == "Compiled"
    assert "graphs 4, recompiles 3" in str(report)


@pytest.mark.compile
def test_a_compiled_step_makes_its_graph_before_the_clock_runs():
    program = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    step = ps.compile_step(program.train_step, donate=True, backend="eager")
    state = program.init(device="cpu")
    report = ps.benchmark(step, state, vector_batch(), against=program.train_step, calls=2, blocks=2)
    assert (report.graphs, report.recompiles) == (1, 0)
    assert report.ratio is not None
    assert int(state.step) == 0


def test_its_text_is_a_table():
    report = bench.Report([bench.Timing("step", 0.0123, 0.000012, 1.5)], None, None, 3 * 2**20, "cpu")
    assert str(report).splitlines() == [
        "step                         median       10 %       90 %",
        "step                       12.30 ms    12.0 us     1.50 s",
        "peak memory 3 MiB on cpu",
    ]


@pytest.mark.parametrize(("calls", "blocks"), [(0, 2), (1, 1), (-1, 5)])
def test_too_few_are_refused(calls: int, blocks: int):
    with pytest.raises(
        ConfigError, match=rf"benchmark: (calls={calls}|blocks={blocks}) must be an int of at least [12] "
    ):
        ps.benchmark(lambda s, b: (s, {}), ZERO, ONE, calls=calls, blocks=blocks)


@pytest.mark.cuda
def test_on_a_gpu_the_peak_is_that_of_the_allocator():
    state = torch.zeros(2**20, device="cuda")
    report = ps.benchmark(lambda s, b: (s + b, {}), state, ONE.cuda(), calls=1, blocks=2)
    assert report.device.startswith("cuda")
    assert 8 * 2**20 <= report.peak_bytes < 2**30


def test_rows_of_every_kind_are_repeated() -> None:
    found: list[list[Any]] = []

    def step(state: Any, batch: Any) -> Any:
        found.append([len(batch["x"]), batch["x"].tolist(), batch["names"], batch["scale"]])
        return state, {}

    batch: Any = UserDict(x=torch.arange(3), names=["a", "b", "c"], scale=torch.tensor(2))  # as a BatchEncoding
    assert ps.find_batch_size(step, torch.zeros(()), batch, most=6) == 6
    assert [rows[0] for rows in found] == [3, 3, 6, 6]
    assert found[-1][1:] == [[0, 1, 2] * 2, ["a", "b", "c"] * 2, 2]
    with pytest.raises(DataError, match="the batch has no rows"):
        ps.find_batch_size(step, torch.zeros(()), {"x": torch.zeros(0)})
