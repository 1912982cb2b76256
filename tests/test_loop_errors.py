"""Bad input to fit: an error of ours that says where, what and the cure, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim
from purestep.errors import (
    ConfigError,
    DataError,
    Locked,
    Mismatch,
    NonFiniteError,
    NotFound,
    PurestepError,
    StateError,
    StepContractError,
)
from purestep.types import Mean, Program

CRITERION = nn.CrossEntropyLoss()
fit = partial(ps.fit, progress=False)


def mlp(objective: Any = None, module: nn.Module | None = None, **options: Any) -> Program:
    return ps.program(module or tiny_mlp(), objective or ps.supervised(CRITERION), optim.sgd(0.1), **options)


def batches(count: int, rows: int = 8) -> list[Any]:
    return [vector_batch(rows, seed) for seed in range(count)]


def refused(kind: type[PurestepError], match: str, run: Callable[[], Any]) -> PurestepError:
    """The error, which has a place and a cure and is of our own family."""
    with pytest.raises(kind, match=match) as caught:
        run()
    assert caught.value.where or caught.value.hint
    return caught.value


# --- the loss ---------------------------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[type[PurestepError], str, Callable[[Any, Any], Any]]] = {
    "not a scalar": (
        StepContractError,
        r"objective: the loss has shape \[8, 3\] .*floating scalar.*loss.mean\(\)",
        lambda model, batch: ps.Loss(model(batch[0]), torch.tensor(8.0), {}),
    ),
    "one number in a vector": (
        StepContractError,
        r"shape \[1\]",
        lambda model, batch: ps.Loss(model(batch[0]).mean().reshape(1), torch.tensor(8.0), {}),
    ),
    "complex": (
        StepContractError,
        r"dtype torch.complex64.*loss.real",
        lambda model, batch: ps.Loss(model(batch[0]).mean().to(torch.complex64), torch.tensor(8.0), {}),
    ),
    "an integer": (
        StepContractError,
        r"dtype torch.int64",
        lambda model, batch: ps.Loss(model(batch[0]).argmax(), torch.tensor(8.0), {}),
    ),
    "a float": (
        StepContractError,
        r"the loss is a float, not a tensor",
        lambda model, batch: ps.Loss(model(batch[0]).mean().item(), torch.tensor(8.0), {}),
    ),
    "no Loss": (StepContractError, r"returned a \w*Tensor, not a Loss", lambda model, batch: model(batch[0]).mean()),
    "nothing": (StepContractError, r"returned a NoneType, not a Loss", lambda model, batch: None),
    "detached": (
        StepContractError,
        r"does not depend on the parameters.*take out .detach\(\)",
        lambda model, batch: ps.Loss(model(batch[0]).mean().detach(), torch.tensor(8.0), {}),
    ),
    "without gradients": (
        StepContractError,
        r"does not depend on the parameters",
        torch.no_grad()(lambda model, batch: ps.Loss(model(batch[0]).mean(), torch.tensor(8.0), {})),
    ),
    "of something else": (
        StepContractError,
        r"does not depend on the parameters",
        lambda model, batch: ps.Loss(batch[0].square().mean(), torch.tensor(8.0), {}),
    ),
    "nan": (
        NonFiniteError,
        r"epoch 1, batch 1: .*not finite",
        lambda model, batch: ps.Loss(model(batch[0]).mean() * torch.nan, torch.tensor(8.0), {}),
    ),
    "infinite": (
        NonFiniteError,
        r"epoch 1, batch 1: .*not finite",
        lambda model, batch: ps.Loss(model(batch[0]).mean() / 0, torch.tensor(8.0), {}),
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_cannot_be_trained_on(loss: str) -> None:
    kind, message, objective = LOSSES[loss]
    program = mlp(objective)
    state = program.init()
    before = ps.clone(state)
    refused(kind, message, lambda: fit(state, batches(2), program, epochs=1))
    assert_trees_close(state, before, exact=True)


@pytest.mark.compile
@pytest.mark.parametrize("capture", ["auto", "trace"])
@pytest.mark.parametrize("loss", ["not a scalar", "complex", "detached", "no Loss"])
def test_a_loss_that_cannot_be_trained_on_is_named_when_compiled_too(loss: str, capture: str) -> None:
    kind, message, objective = LOSSES[loss]
    program = mlp(objective)
    options = {"backend": "aot_eager", "capture": capture}
    refused(kind, message, lambda: fit(program.init(), batches(2), program, epochs=1, compile=options))


@pytest.mark.compile
@pytest.mark.slow
def test_a_detached_loss_is_found_before_dynamo_makes_zeros_of_it() -> None:
    kind, message, objective = LOSSES["detached"]
    program = mlp(objective)
    options = {"backend": "aot_eager", "capture": "dynamo"}
    refused(kind, message, lambda: fit(program.init(), batches(2), program, epochs=1, compile=options))


# --- batches ----------------------------------------------------------------------------------------------------------

OTHER: dict[str, tuple[Any, str]] = {
    "None": (None, "batch is None; batch 1 had a tuple"),
    "missing": ((torch.zeros(8, 4),), "batch has 1 items; batch 1 had 2"),
    "a dict": ({"x": torch.zeros(8, 4)}, "batch is a dict of 1; batch 1 had a tuple of 2"),
    "a rank": ((torch.zeros(8, 4, 1), torch.zeros(8)), "batch/0 is a float32 tensor of rank 3; .*rank 2"),
    "a dtype": ((torch.zeros(8, 4, dtype=torch.float64), torch.zeros(8).long()), "batch/0 is a float64 .*float32"),
    "text": (("a", torch.zeros(8)), "batch/0 is a str"),
}


@pytest.mark.parametrize("fault", OTHER)
def test_a_batch_of_another_structure_is_named_with_its_place(fault: str) -> None:
    other, message = OTHER[fault]
    program = mlp()
    train = [*batches(2), other, *batches(1)]
    refused(DataError, f"^train, epoch 1, batch 3: {message}", lambda: fit(program.init(), train, program, epochs=1))


def test_a_last_batch_of_another_size_is_no_other_structure() -> None:
    program = mlp()
    result = fit(program.init(), [*batches(2), vector_batch(3)], program, epochs=1)
    assert int(result.state.updates) == 3


@pytest.mark.parametrize("batch", [None, 3, "text", ("a", "b"), {"x": None}])
def test_a_batch_without_a_tensor_is_named(batch: Any) -> None:
    program = mlp()
    refused(
        DataError,
        "^train, epoch 1, batch 1: .*without a tensor",
        lambda: fit(program.init(), [batch], program, epochs=1),
    )


def test_a_batch_on_another_device_or_two_is_named() -> None:
    """meta stands for a second device."""
    program = mlp()
    x, y = vector_batch()
    with pytest.raises(PurestepError, match="batch"):
        fit(program.init(), [(x, y.to("meta"))], program, epochs=1)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Empty:
    """Iterable, and nothing in it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    "loader",
    [[], (), Empty(), DataLoader(TensorDataset(torch.zeros(2, 4), torch.zeros(2)), batch_size=4, drop_last=True)],
)
@pytest.mark.parametrize("name", ["train", "val"])
def test_an_empty_loader_is_named(name: str, loader: Any) -> None:
    program = mlp()
    loaders = {"train": batches(1), name: loader}
    refused(
        DataError, f"^{name}: no batch in.*loader is empty", lambda: fit(program.init(), loaders, program, epochs=1)
    )


def test_a_one_shot_iterator_is_good_for_one_epoch() -> None:
    program = mlp()
    result = fit(program.init(), iter(batches(3)), program, epochs=1)
    assert int(result.state.updates) == 3
    message = r"^train: no batch left for epoch 2: a one-shot iterator is good for one epoch.*list\(batches\)"
    refused(DataError, message, lambda: fit(program.init(), iter(batches(3)), program, epochs=2))
    loaders = {"train": batches(2), "val": iter(batches(1))}
    refused(DataError, "^val: .*one-shot iterator", lambda: fit(program.init(), loaders, program, epochs=2))


@pytest.mark.parametrize("loader", [None, 3, tiny_mlp(), torch.zeros(3), TensorDataset(torch.zeros(4, 4))])
def test_something_else_than_a_loader_is_named(loader: Any) -> None:
    program = mlp()
    refused(DataError, "^train: a", lambda: fit(program.init(), {"train": loader}, program, epochs=1))


@pytest.mark.parametrize("loaders", [{}, {"val": batches(1)}, (None, batches(1))])
def test_a_training_loader_is_needed(loaders: Any) -> None:
    program = mlp()
    refused(ConfigError, "none is called 'train'", lambda: fit(program.init(), loaders, program, epochs=1))


def test_a_loader_that_raises_is_named_with_its_items_and_costs_nothing(tmp_path: Path) -> None:
    class Damaged(TensorDataset):
        bad = True

        def __getitem__(self, index: int) -> Any:
            if index == 13 and self.bad:
                raise OSError("truncated image")
            return super().__getitem__(index)

    program = mlp()
    data = Damaged(*vector_batch(24))
    loader = DataLoader(data, batch_size=4)
    with ps.Snapshots(tmp_path, every_steps=1) as snapshots:
        message = r"^train, epoch 1, batch 4, items \[12, 13, 14, 15\]: OSError: truncated image"
        error = refused(DataError, message, lambda: fit(program.init(), loader, program, epochs=2, snapshots=snapshots))
        assert isinstance(error.__cause__, OSError)
    data.bad = False
    found = fit(program.init(), loader, program, epochs=2, snapshots=tmp_path)
    assert_trees_close(found.state, fit(program.init(), loader, program, epochs=2).state, exact=True)


# --- states -----------------------------------------------------------------------------------------------------------


def test_parameters_of_integers_cannot_be_trained() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)

    module = Table()
    refused(StateError, "counts.*int64", lambda: mlp(module=module).init())


def test_leaves_on_two_devices_are_named() -> None:
    program = mlp()
    state = program.init()
    moved = state._replace(params={**state.params, "2.bias": state.params["2.bias"].to("meta")})
    message = r"^init_state: leaves are on several devices: .* on cpu, .*2.bias on meta.*device=\"cuda\""
    refused(StateError, message, lambda: fit(moved, batches(1), program, epochs=1))


@pytest.mark.parametrize("state", [{}, {"w": 1.0}, {"w": torch.ones(1), "f": print}, None, tiny_mlp()])
def test_a_state_is_a_tree_of_tensors(state: Any) -> None:
    step = Program(lambda state, batch: (state, {}))
    refused(StateError, r"^init_state: .*program.init\(seed=0\)", lambda: fit(state, batches(1), step, epochs=1))


def test_every_leaf_that_is_no_tensor_is_in_one_message() -> None:
    step = Program(lambda state, batch: (state, {}))
    state = {"a": 1, "b": torch.ones(1), "c": {"d": "text"}}
    refused(StateError, "a: a int; c/d: a str", lambda: fit(state, batches(1), step, epochs=1))


def test_a_donated_state_cannot_be_trained_on() -> None:
    program = mlp()
    step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
    first, _ = step(program.init(), vector_batch())
    step(first, vector_batch())
    refused(StateError, "donated at step 2", lambda: fit(first, batches(1), program, epochs=1))


# --- steps and programs -----------------------------------------------------------------------------------------------


def test_fit_needs_a_program() -> None:
    program = mlp()
    refused(ConfigError, r"no program was given.*ps.program\(model", lambda: fit(program.init(), batches(1), epochs=1))
    for other in (tiny_mlp(), program.train_step, 3):
        refused(ConfigError, r"is no program.*ps.Program\(train_step\)", lambda o=other: fit({}, [], o, epochs=1))


def test_what_an_eval_step_must_return() -> None:
    for answer, message in ((None, "returned a NoneType"), ({"loss": 1.0}, "metric 'loss' is a float")):
        program = mlp()._replace(eval_step=lambda state, batch, answer=answer: answer)
        refused(
            StepContractError,
            f"^eval_step: {message}",
            lambda p=program: fit(p.init(), (batches(1), batches(1)), p, epochs=1),
        )


def test_an_error_of_the_step_itself_gets_its_place_as_a_note() -> None:
    calls = []

    def step(state: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError("of the user's own")
        return state, {}

    with pytest.raises(ZeroDivisionError) as caught:
        fit({"w": torch.ones(1)}, batches(3), Program(step), epochs=2, check_every=None)
    assert caught.value.__notes__ == ["in train_step, epoch 2, batch 2"]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epoch": 3}, "'epoch' is not a setting of fit.*cure: epochs"),
        ({"epochs": 3, "early_stoping": 2}, "early_stopping"),
        ({"epochs": "many"}, "epochs.*whole number"),
        ({"epochs": 0}, "epochs.*at least 1"),
        ({"epochs": 1, "evaluate_every": 1.5}, "evaluate_every"),
        ({"epochs": 1, "limit_batches": {"train": 0}}, "nothing to train on"),
        ({"epochs": 1, "compile": "yes"}, "compile"),
        ({"epochs": 1, "detect_anomaly": True, "compile": True}, "eager mode only"),
    ],
)
def test_settings_are_refused_before_anything_is_looked_at(fields: Any, message: str) -> None:
    refused(ConfigError, message, lambda: fit(object(), object(), mlp(), **fields))


def test_snapshots_are_a_directory_or_snapshots() -> None:
    program = mlp()
    refused(ConfigError, "snapshots is a int", lambda: fit(program.init(), batches(1), program, epochs=1, snapshots=3))


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_template_that_does_not_match_lists_its_leaves_and_reads_nothing(tmp_path: Path) -> None:
    program = mlp()
    fit(program.init(), batches(2), program, epochs=1, snapshots=tmp_path)
    wider = mlp(module=nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)))
    error = refused(
        Mismatch, "params/0.weight", lambda: fit(wider.init(), batches(2), wider, epochs=2, snapshots=tmp_path)
    )
    for found in ("[8, 4]", "[9, 4]", "params/2.weight", "params/0.bias"):
        assert found in str(error)
    result = fit(program.init(), batches(2), program, epochs=2, snapshots=tmp_path)
    assert int(result.state.updates) == 4


def test_a_path_without_snapshots_is_not_taken_for_a_fresh_start(tmp_path: Path) -> None:
    program = mlp()
    refused(
        NotFound, "no snapshot here", lambda: fit(program.init(), batches(1), program, epochs=1, resume=str(tmp_path))
    )


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    program = mlp()
    with ps.Snapshots(tmp_path):
        refused(Locked, str(tmp_path), lambda: fit(program.init(), batches(1), program, epochs=1, snapshots=tmp_path))
    fit(program.init(), batches(1), program, epochs=1, snapshots=tmp_path)


def test_a_fresh_start_in_a_used_directory_takes_nothing_away(tmp_path: Path) -> None:
    """What was there is kept beside it."""
    program = mlp()
    first = fit(program.init(), batches(3), program, epochs=3, snapshots=tmp_path)
    again = fit(program.init(), batches(3), program, epochs=1, snapshots=tmp_path, resume=None)
    assert int(again.state.updates) == 3
    assert ps.Snapshots(tmp_path, writer=False).latest() == 3
    assert (tmp_path / "9.archived").is_dir()
    assert int(first.state.updates) == 9


def test_an_error_of_the_step_saves_the_state_before_it_and_frees_the_directory(tmp_path: Path) -> None:
    calls = []

    def step(state: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise MemoryError
        return {"w": state["w"] + 1}, {"loss": Mean(state["w"].sum(), torch.ones(()))}

    state = {"w": torch.zeros(1)}
    with pytest.raises(MemoryError):
        fit(state, batches(3), Program(step), epochs=5, snapshots=tmp_path, check_every=None)
    found = ps.Snapshots(tmp_path, writer=False, strict=True).restore(state)
    assert (found.step, found.state["w"].item()) == (7, 7.0)
    result = fit(state, batches(3), Program(step), epochs=5, snapshots=tmp_path, check_every=None)
    assert result.state["w"].item() == 15
    assert result.history["step"] == [3, 6, 9, 12, 15]
