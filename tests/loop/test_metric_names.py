"""Names of metrics: what a step reserves it says, and whatever else is a user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, StepContractError

BATCHES = [(torch.full((2, 1), float(i)), torch.zeros(2, 1)) for i in range(4)]
GROUPS = [("bias", "slow"), ("", "fast")]


def groups() -> Any:
    return optim.partition({"slow": optim.sgd(0.01), "fast": optim.sgd(0.02)}, GROUPS)


def program(*names: str, tx: Any = None, vector: str = "") -> ps.Program:
    def objective(model: Any, batch: tuple[Tensor, Tensor]) -> ps.Loss:
        x, y = batch
        found = {name: ps.Mean(x.sum(), torch.tensor(2.0)) for name in names}
        if vector:
            found[vector] = ps.Mean(torch.tensor([1.0, 3.0]), torch.ones(2))
        return ps.Loss((model(x) - y).square().mean(), torch.tensor(2.0), found)

    return ps.program(torch.nn.Linear(1, 1), objective, optim.sgd(0.01) if tx is None else tx)


def history(one: ps.Program, loaders: Any = None, **kw: Any) -> dict[str, list[Any]]:
    loaders = {"train": BATCHES, "val": BATCHES} if loaders is None else loaders
    return ps.fit(one.init(), loaders, one, epochs=1, sinks=[], **kw).history


@pytest.mark.parametrize("name", ["lr/ratio", "lr_ratio", "lr/", "lr/fast/x", "train_x", "val_x", "scale/x", "grad"])
@pytest.mark.parametrize("tx", [None, groups])
def test_a_metric_may_begin_like_a_reserved_one(name: str, tx: Any) -> None:
    found = history(program(name, tx=tx and tx()))
    assert (found[f"train_{name}"], found[f"val_{name}"]) == ([1.5], [1.5])
    rates = {key: value for key, value in found.items() if key.startswith("lr")}
    assert set(rates) == ({"lr", "lr/slow", "lr/fast"} if tx else {"lr"})


@pytest.mark.parametrize("name", ["lr", "lr/fast", "loss", "grad_norm", "applied", "recall[0]", "[3]"])
@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}])
def test_a_metric_of_a_reserved_name_is_refused_by_name(name: str, compile: Any) -> None:
    with pytest.raises(StepContractError) as caught:
        history(program(name, tx=groups()), compile=compile)
    assert caught.value.where == f"metrics/{name}"
    assert caught.value.hint == "choose another name"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rate_that_is_no_group_of_this_program_is_free(accumulate: int) -> None:
    one = program("lr/fast")
    assert history(one)["train_lr/fast"] == [1.5]
    state = one.init()
    for batch in BATCHES[:accumulate]:
        state, metrics = one.train_step(state, batch)
    assert float(metrics["lr/fast"]) == pytest.approx(accumulate - 1)


def test_entries_of_vectors_are_told_from_names_in_brackets() -> None:
    found = history(program("recall[cat]", "recall]", vector="recall"))
    assert found["train_recall"] == [2.0]
    assert found["train_recall[1]"] == [3.0]
    assert found["train_recall[cat]"] == found["train_recall]"] == [1.5]


def test_a_step_of_ones_own_keeps_its_names() -> None:
    def step(state: Any, batch: Any) -> Any:
        one = torch.ones(())
        return state + 1, {"lr": ps.Mean(state, one), "lr/x": ps.Mean(state, one), "scale": ps.Mean(state, one)}

    found = ps.fit(torch.zeros(()), BATCHES, ps.Program(step), epochs=1, sinks=[]).history
    assert (found["lr"], found["train_lr/x"], found["scale"]) == ([3.0], [1.5], [1.5])


@pytest.mark.parametrize(
    ("metric", "loader"), [("hard_loss", "val_hard"), ("eval_loss", "train_eval"), ("val_loss", "train_val")]
)
def test_two_columns_of_one_name_are_refused(metric: str, loader: str) -> None:
    loaders = {"train": BATCHES, "val": BATCHES, loader: BATCHES}
    with pytest.raises(ConfigError, match=rf"two metrics are called '\w+_loss'.*cure: rename the loader '{loader}'"):
        history(program(metric), loaders, monitor="val_loss")


def test_a_group_of_another_program_that_a_snapshot_brings_is_not_shown(tmp_path: Any) -> None:
    """The rates of a row are those of the state that goes on."""
    one = program("lr/ratio")
    for epochs in (1, 2):
        kw = {"snapshots": tmp_path, "sinks": [], "epochs": epochs}
        found = ps.fit(one.init(), {"train": BATCHES, "val": BATCHES}, one, **kw).history
    assert found["train_lr/ratio"] == [1.5, 1.5]
