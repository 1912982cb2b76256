"""`predict`: the outputs of a whole loader."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, DataError, RankError, StateError, StepContractError

CRITERION = nn.MSELoss()
X = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A linear layer whose result has any structure."""

    def __init__(self, shape: Any = lambda y: y) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.shape = shape

    def forward(self, x: Tensor, extra: Any = None) -> Any:
        return self.shape(self.drop(self.linear(x)))


class Pair(NamedTuple):
    first: Any
    second: Any


def made(net: nn.Module | None = None, **options: Any) -> tuple[ps.Program, ps.TrainState]:
    torch.manual_seed(0)
    program = ps.program(net or Net(), ps.supervised(CRITERION), optim.sgd(0.1), **options)
    return program, program.init(seed=3)


def wanted(state: ps.TrainState) -> Tensor:
    return torch.nn.functional.linear(X, state.params["linear.weight"], state.params["linear.bias"])


BATCHES: dict[str, Any] = {
    "pairs": [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    "inputs alone": [X[:4], X[4:]],
    "tuples of one": [(X[:4],), (X[4:],)],
    "lists": [[X[:4], Y[:4]], [X[4:], Y[4:]]],
    "mappings": [{"x": X[:4], "labels": Y[:4]}, {"x": X[4:], "labels": Y[4:]}],
    "mappings without targets": [{"x": X[:4], "extra": X[:4]}, {"x": X[4:], "extra": X[4:]}],
    "a shuffled loader": DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "a loader of inputs": DataLoader(TensorDataset(X), batch_size=3),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_rows_come_in_the_order_of_the_dataset_without_dropout_and_gradients(kind: str) -> None:
    program, state = made()
    found = ps.predict(program, state, BATCHES[kind])
    torch.testing.assert_close(found, wanted(state))
    assert not found.requires_grad
    assert torch.equal(found, ps.predict(program, state, BATCHES[kind]))


def test_a_sampler_that_chooses_items_stays() -> None:
    program, state = made()
    for sampler in (WeightedRandomSampler([1.0] * 10, 6), RandomSampler(range(10), num_samples=6)):
        loader = DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)
        rows = ps.predict(program, state, loader)
        whole = wanted(state)
        assert rows.shape == (6, 3)
        assert all((whole - row).abs().sum(1).min() < 1e-5 for row in rows)


STRUCTURES: dict[str, Any] = {
    "dict": lambda y: {"b": y, "a": (y + 1, y.sum())},
    "named tuple": lambda y: Pair(y, {"deep": y[:, 0]}),
    "integers": lambda y: (y.argmax(1), y > 0),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_outputs_keep_their_structure(kind: str) -> None:
    program, state = made(Net(STRUCTURES[kind]))
    found = ps.predict(program, state, BATCHES["pairs"])
    parts = [STRUCTURES[kind](wanted(state)[rows]) for rows in (slice(0, 4), slice(4, 8), slice(8, 10))]
    expected = ps.tree.map(lambda *leaves: torch.cat([torch.atleast_1d(leaf) for leaf in leaves]), *parts)
    assert type(found) is type(expected)
    ps.tree.map(torch.testing.assert_close, found, expected)


def test_the_view_is_that_of_evaluate() -> None:
    program, state = made(ema=0.5)
    for _ in range(3):
        state, _ = program.train_step(state, (X, Y))
    average = ps.predict(program, state, BATCHES["pairs"])
    torch.testing.assert_close(average, wanted(ps.view(state)))
    torch.testing.assert_close(ps.predict(program, state, BATCHES["pairs"], view="params"), wanted(state))
    assert (average - wanted(state)).abs().max() > 1e-3
    with pytest.raises(StateError, match="no average"):
        ps.predict(*made(), BATCHES["pairs"], view="ema")


def test_random_models_draw_what_evaluate_draws_and_leave_the_generators() -> None:
    program, state = made(Net(lambda y: y + torch.rand(())))
    means = []
    ps.evaluate(state, BATCHES["pairs"], program.eval_step, watch=lambda b, m, i: means.append(m["loss"].compute()))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = ps.predict(program, state, BATCHES["pairs"])
    assert torch.equal(before, torch.get_rng_state())
    for mean, rows in zip(means, (slice(0, 4), slice(4, 8), slice(8, 10)), strict=True):
        torch.testing.assert_close(CRITERION(found[rows], Y[rows]), mean)


def test_prepare_and_forward_are_those_of_supervised() -> None:
    program, state = made()
    batches = [(X[:4], X[:4], Y[:4]), (X[4:], X[4:], Y[4:])]
    found = ps.predict(
        program,
        state,
        batches,
        prepare=lambda batch: (batch[1], batch[2]),
        forward=lambda model, x: {"twice": 2 * model(x)},
    )
    torch.testing.assert_close(found["twice"], 2 * wanted(state))
    with pytest.raises(DataError, match="inputs of a tuple batch are unknown.*prepare="):
        ps.predict(program, state, batches)


def test_a_callback_gets_every_batch_and_nothing_is_collected() -> None:
    program, state = made(Net(lambda y: [{"boxes": row} for row in y]))
    seen: list[Any] = []
    result = ps.predict(program, state, BATCHES["pairs"], callback=lambda *found: seen.append(found))
    assert result is None
    assert [(len(outputs), index) for outputs, _, index in seen] == [(4, 0), (4, 1), (2, 2)]
    assert seen[2][1] is BATCHES["pairs"][2]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda y: [y], "predict, batch 1: the output is a list"),
        (lambda y: {"a": [y]}, "predict, batch 1, a: the output is a list"),
        (lambda y: {"a": y, "b": "text"}, "predict, batch 1, b: the output is a str"),
        (lambda y: y if len(y) == 4 else y[:, :2], r"predict, batch 3: the shape is \[2, 2\], and \[4, 3\] in batch 1"),
        (lambda y: (y,) if len(y) == 4 else (y, y), "predict, batch 3: the outputs have another structure"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named_with_the_cure(shape: Any, message: str) -> None:
    program, state = made(Net(shape))
    with pytest.raises(StepContractError, match=rf"{message}.*forward=.*callback="):
        ps.predict(program, state, BATCHES["pairs"])


def test_wrong_arguments_say_what_to_pass() -> None:
    program, state = made()
    with pytest.raises(StateError, match="a dict, not a TrainState"):
        ps.predict(program, {}, BATCHES["pairs"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no bind"):
        ps.predict(ps.Program(program.train_step), state, BATCHES["pairs"])
    with pytest.raises(DataError, match="empty"):
        ps.predict(program, state, [])
    with pytest.raises(ConfigError, match="view='raw'"):
        ps.predict(program, state, BATCHES["pairs"], view="raw")


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankError):
        ps.predict(*made(), BATCHES["pairs"])


def test_a_model_that_writes_its_input_leaves_the_batches_as_they_are() -> None:
    program, state = made(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)))
    batches = [(X[:5].clone(), Y[:5]), (X[5:].clone(), Y[5:])]
    first, second = (ps.predict(program, state, batches) for _ in range(2))
    assert torch.equal(torch.cat([x for x, _ in batches]), X)
    assert torch.equal(first, second)


def test_an_error_of_the_model_names_the_batch() -> None:
    program, state = made()
    with pytest.raises(RuntimeError) as caught:
        ps.predict(program, state, [X, X[:, :2]], name="holdout")
    assert caught.value.__notes__ == ["in predict, holdout, batch 2"]
