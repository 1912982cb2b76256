"""Compiled steps under batches of many sizes: few graphs, eager's results, never an error."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep.compile import graphs, sizes

pytestmark = pytest.mark.compile


class Attention(nn.Module):
    """One head over sequences of 8 features, the mean over time, 3 classes."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 24)
        self.outer = nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, times, _ = x.shape
        query, key, value = self.inner(x).reshape(rows, times, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        found = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, times, 8)
        return self.outer(self.dropout(found).mean(1))


def batch(rows: int, times: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rows + times)
    return torch.randn(rows, times, 8, generator=generator), torch.arange(rows) % 3


def attention(objective: Any = None) -> ps.Program:
    return ps.program(Attention(), objective or ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.5, momentum=0.9))


def compared(program: ps.Program, given: list[Any], **options: Any) -> Any:
    """Trains eagerly and compiled, compares every step, and returns the compiled step."""
    step = ps.compile_step(program.train_step, **({"backend": "aot_eager"} | options))
    state, eager = program.init(seed=1, device="cpu"), program.init(seed=1, device="cpu")
    for each in given:
        state, metrics = step(state, each)
        eager, expected = program.train_step(eager, each)
        assert_trees_close(dict(metrics), dict(expected), rtol=1e-4, atol=1e-5)
    assert_trees_close(ps.clone(state), eager, rtol=1e-4, atol=1e-5)
    return step


SIZES = (4, 3, 2, 5, 6, 1, 7, 8, 9, 10, 11, 12, 13, 40, 4, 1)


@pytest.mark.parametrize("donate", [False, True])
def test_attention_has_four_graphs_whatever_sizes_come(donate: bool) -> None:
    """Of the first two sizes, of all others, and of one row, which torch takes for a constant."""
    assert compared(attention(), [batch(rows) for rows in SIZES], donate=donate).graphs == 4


@pytest.mark.optimized
def test_the_graph_for_all_sizes_draws_what_an_eager_step_draws_with_inductor_too() -> None:
    program = ps.program(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1)
    )
    step = compared(program, [(torch.randn(n, 4), torch.zeros(n, 2)) for n in (4, 3, 2, 5, 6)], backend="inductor")
    assert step.graphs == 3


def test_a_second_dimension_that_no_graph_takes_leaves_the_graph_for_the_first() -> None:
    def step(state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"w": state["w"] + x.mean() * float(x.shape[1])}, {}

    given = [torch.randn(*size) for size in ((8, 5), (3, 5), (4, 5), (8, 7), (6, 5), (9, 5))]
    fast = ps.compile_step(step, backend="aot_eager")
    state, eager = {"w": torch.zeros(())}, {"w": torch.zeros(())}
    counts: list[int] = []
    for x in given:
        (state, _), (eager, _) = fast(state, x), step(eager, x)
        counts.append(fast.graphs)
    assert_trees_close(state, eager, rtol=1e-5, atol=1e-6)
    assert counts == [1, 2, 3, 4, 4, 4]  # the one for other rows stays
    resumed = ps.compile_step(step, backend="aot_eager")
    resumed.batch_sizes = fast.batch_sizes
    for x in given[2:]:
        resumed({"w": torch.zeros(())}, x)
    assert resumed.graphs == 2  # for one size each of other rows, and for 7 columns


def test_a_second_dimension_that_begins_to_vary_is_one_more_graph() -> None:
    given = [batch(rows) for rows in (4, 3, 2)] + [
        batch(rows, times) for rows, times in ((4, 6), (4, 7), (9, 9), (3, 2))
    ]
    assert compared(attention(), given).graphs == 4


def test_slices_of_a_data_set_share_the_graph_for_all_sizes() -> None:
    program = ps.program(nn.Linear(4, 3), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    given = [(x[at : at + n], y[at : at + n]) for at, n in ((0, 5), (5, 4), (9, 3), (12, 8), (0, 6), (20, 7), (3, 9))]
    assert compared(program, given).graphs == 3


def test_sizes_that_the_graph_for_all_rejects_have_a_graph_each() -> None:
    """It was compiled for sizes without a remainder by the micro-batches."""
    program = ps.program(nn.Linear(4, 3), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1), microbatches=2)
    step = compared(program, [(torch.randn(n, 4), torch.arange(n) % 3) for n in (8, 6, 4, 10, 5, 12, 7, 5)])
    assert step.graphs == 5


def test_fifty_lengths() -> None:
    assert compared(attention(), [batch(4, times) for times in range(2, 52)]).graphs == 3


@pytest.mark.parametrize(
    "weight",
    [
        # A number of Python.
        pytest.param(len, marks=pytest.mark.filterwarnings("ignore:3 batch sizes, and no single graph")),
        lambda x: x.shape[0],
        pytest.param(
            lambda x: float(x[:, 0].numel()), marks=pytest.mark.filterwarnings("ignore:3 batch sizes, and no single")
        ),
        lambda x: ps.metrics.as_mean(x.mean(), x.shape[0]).weight,
    ],
)
def test_weights_that_are_the_number_of_rows(weight: Any) -> None:
    def objective(model: Any, given: Any) -> ps.Loss:
        return ps.Loss(functional.mse_loss(model(given), given), weight(given), {})

    program = ps.program(nn.Linear(3, 3), objective, ps.optim.sgd(0.1), accumulate=2)
    compared(program, [torch.randn(rows, 3) for rows in (4, 3, 2, 5, 6, 1, 8, 9)])


def test_a_branch_on_a_size_is_a_guard() -> None:
    def objective(model: Any, given: Any) -> ps.Loss:
        found = model(given)
        return ps.Loss((found if found.shape[0] > 5 else -2 * found).mean(), 1, {})

    program = ps.program(nn.Linear(3, 3), objective, ps.optim.sgd(0.1))
    compared(program, [torch.randn(rows, 3) for rows in (4, 3, 2, 5, 6, 7, 1, 12)])


def test_a_size_as_a_number_of_pythons_compiles_each_size_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MAX_EXACT", 4)

    def objective(model: Any, given: Any) -> ps.Loss:
        rows = torch.tensor([float(index) for index in range(int(given.shape[0]))])
        return ps.Loss((model(given).sum(1) * rows).mean(), 1, {})

    program = ps.program(nn.Linear(3, 3), objective, ps.optim.sgd(0.1))
    with pytest.warns(RuntimeWarning, match="3 batch sizes, and no single graph accepts them all.*cure: pad") as said:
        step = compared(program, [torch.randn(rows, 3) for rows in (*range(4, 16), 4)])
    assert len(said) == 1
    assert step.graphs == 13  # the first size had gone when it came again


def test_layouts_that_the_graph_for_all_sizes_does_not_serve_have_their_own() -> None:
    program = ps.program(nn.Conv2d(3, 2, 3), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))

    def images(rows: int, layout: torch.memory_format = torch.contiguous_format) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 3, 6, 6).contiguous(memory_format=layout), torch.zeros(rows, 2, 4, 4)

    step = compared(program, [images(rows) for rows in (4, 3, 2, 5)] + [images(7, torch.channels_last)] * 2)
    assert step.graphs == 4


@pytest.mark.parametrize("shapes", list(itertools.permutations([(1, 4), (3, 4), (2, 4)])), ids=str)
def test_the_example_of_many_sizes_is_none_that_torch_takes_for_a_constant(shapes: Any) -> None:
    met = [sizes.layouts([torch.ones(shape)]) for shape in shapes]
    moving = sizes.varying([sizes.shapes_of(each) for each in met])
    assert moving == [(True, False)]
    found = sizes.example(met, moving)
    assert found is met[2] if shapes[2][0] >= 2 else found is met[1]
    assert sizes.example([sizes.layouts([torch.ones(1, 4)]), sizes.layouts([torch.ones(0, 4)])], moving) is None


# --- the same graphs in the next process ------------------------------------------------------------------------------


def chosen(step: Any, state: Any, given: list[Any]) -> tuple[Any, list[bool]]:
    """Call a step on batches; the last state, and for each batch whether a graph for many sizes served it."""
    found: list[bool] = []
    for each in given:
        state, _ = step(state, each)
        (last,) = step._last.values()
        found.append(any(each.graph is last.graph for each in step._graphs._general.values()))
    return state, found


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_process_that_gets_the_sizes_of_a_run_chooses_its_graphs(cut: int) -> None:
    given = [batch(rows) for rows in (4, 3, 2, 4, 6, 1, 3, 7, 1, 2, 4, 3)] + [batch(3, 7), batch(4, 6), batch(5)]
    program = attention()
    step = ps.compile_step(program.train_step, backend="aot_eager")
    state, before = chosen(step, program.init(), given[:cut])
    stored = json.loads(json.dumps(step.batch_sizes))
    _, expected = chosen(step, state, given[cut:])
    resumed = ps.compile_step(program.train_step, backend="aot_eager")
    resumed.batch_sizes = stored
    assert chosen(resumed, state, given[cut:])[1] == expected
    assert resumed.batch_sizes == step.batch_sizes
    without = ps.compile_step(program.train_step, backend="aot_eager")
    assert chosen(without, state, given[cut:])[1] != expected
    assert any(before + expected)


def test_a_size_that_widens_the_graph_for_all_sizes_widens_it_for_both_halves_of_a_window() -> None:
    """In the next process both are compiled for all sizes of the list, too."""
    program = ps.program(nn.Linear(8, 3), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1), accumulate=2)
    step = ps.compile_step(program.train_step, backend="aot_eager", donate=True)
    state = program.init()
    for rows, times in ((4, 5), (4, 5), (3, 5), (3, 5), (2, 5), (2, 5), (2, 7), (2, 5)):
        state, _ = step(state, (torch.randn(rows, times, 8), torch.zeros(rows, times, 3)))
    of_halves = [each.decided_by for each in step._graphs._general.values()]
    assert len(of_halves) == 2
    assert of_halves[0] == of_halves[1] == next(iter(step.batch_sizes.values()))


def test_a_step_that_begins_another_run_forgets_the_sizes_of_the_one_before() -> None:
    program = attention()
    step = ps.compile_step(program.train_step, backend="aot_eager")
    state, found = chosen(step, program.init(), [batch(rows) for rows in (4, 3, 2)])
    assert found == [False, False, True]
    step.batch_sizes = {}
    assert chosen(step, state, [batch(rows) for rows in (2, 5, 4)])[1] == [False, False, True]


def test_a_layout_that_is_no_plain_one_comes_back_too() -> None:
    """A graph for many sizes depends on strides: of slices, of images with channels last."""
    program = ps.program(nn.Conv2d(3, 2, 3), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))

    def images(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        return x, torch.zeros(rows, 3, 4, 4)[:, :2]

    step = ps.compile_step(program.train_step, backend="aot_eager")
    state, found = chosen(step, program.init(), [images(rows) for rows in (4, 3, 2, 5)])
    assert found == [False, False, True, True]
    resumed = ps.compile_step(program.train_step, backend="aot_eager")
    resumed.batch_sizes = json.loads(json.dumps(step.batch_sizes))
    assert chosen(resumed, state, [images(5), images(4)])[1] == [True, False]
