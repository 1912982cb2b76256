"""`reduce_on_plateau` beside `torch.optim.lr_scheduler.ReduceLROnPlateau`, whole, resumed and compiled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, StateError

BATCHES = [(torch.ones(2, 2), torch.zeros(2, 1))]
VALUES = [3.0, 2.0, 2.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
INJECTED = optim.inject(optim.sgd)(learning_rate=0.5)


def made(tx: Any = INJECTED) -> ps.Program:
    """An evaluation whose loss at update n is the n-th of `VALUES`."""
    torch.manual_seed(0)
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), tx)

    def eval_step(state: Any, batch: Any, *, index: int = 0) -> Any:
        del batch, index
        value = torch.tensor(VALUES).index_select(0, (state.updates - 1).reshape(1)).reshape(())
        return {"loss": ps.Mean(value, torch.ones(())), "score": ps.Mean(8 - value, torch.ones(()))}

    return program._replace(eval_step=eval_step)


def trained(program: ps.Program, plateau: Any, *, epochs: int = len(VALUES), **fields: Any) -> ps.FitResult:
    fields = {"progress": False, "compile": False, "evaluate_every": {"val": 1.0}, **fields}
    loaders = {"train": BATCHES, "val": BATCHES}
    return ps.fit(program.init(device="cpu"), loaders, program, epochs=epochs, callbacks=[plateau], **fields)


def torchs(values: list[float], mode: Any = "min", **options: Any) -> list[float]:
    """The learning rate of each epoch."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler, rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, eps=0.0, **options), []
    for value in values:
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(value)
    return rates


@pytest.mark.peer
@pytest.mark.parametrize(
    "options",
    [
        {"patience": 1},
        {"patience": 0, "cooldown": 2},
        {"patience": 2, "threshold": 0.6},
        {"patience": 1, "factor": 0.25},
    ],
)
@pytest.mark.parametrize("metric", ["loss", "score"])
def test_the_learning_rates_are_torchs(options: dict[str, Any], metric: str) -> None:
    options = {"factor": 0.5, **options}
    mode, values = ("min", VALUES) if metric == "loss" else ("max", [8 - value for value in VALUES])
    found = trained(made(), ps.reduce_on_plateau(f"val_{metric}", mode=mode, **options)).history["lr"]
    expected = torchs(values, mode, **options)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(found)) > 1


def test_the_lower_bound_is_a_share_of_the_first_rate() -> None:
    found = trained(made(), ps.reduce_on_plateau(factor=0.5, patience=0, min_scale=0.3)).history["lr"]
    assert min(found) == pytest.approx(0.5 * 0.3)
    assert found == pytest.approx(torchs(VALUES, factor=0.5, patience=0, min_lr=0.15), rel=1e-6)


def test_a_run_in_parts_is_the_whole_run(tmp_path: Path) -> None:
    plateau = ps.reduce_on_plateau(factor=0.5, patience=1)
    whole = trained(made(), plateau)
    for epochs in (3, 4, 9, len(VALUES)):
        parts = trained(made(), plateau, epochs=epochs, snapshots=tmp_path)
    assert parts.history["lr"] == whole.history["lr"]
    assert_trees_close(parts.state, whole.state, exact=True)


def test_an_object_begins_again_with_each_run() -> None:
    plateau = ps.reduce_on_plateau(factor=0.5, patience=1)
    assert trained(made(), plateau).history["lr"] == trained(made(), plateau).history["lr"]


def test_rows_without_the_metric_are_ignored() -> None:
    """Two evaluations an epoch of another loader, whose rows have no val_loss; the last two rows are of one state."""
    program, plateau = made(), ps.reduce_on_plateau(factor=0.5, patience=1)
    batches = {"train": BATCHES * 2, "val": BATCHES, "often": BATCHES}
    fields: dict[str, Any] = {"evaluate_every": {"val": 1.0, "often": 1}, "progress": False, "compile": False}
    result = ps.fit(program.init(device="cpu"), batches, program, epochs=7, callbacks=[plateau], **fields)
    seen = [value for value in result.history["val_loss"] if value is not None]
    assert seen == VALUES[1::2]
    final = optim.hyperparams(result.state.opt_state)["learning_rate"]
    assert float(final) == pytest.approx(torchs([*seen, 0.0], factor=0.5, patience=1)[-1])


def test_groups_keep_their_ratio_and_one_can_be_named() -> None:
    groups = {"slow": INJECTED, "fast": optim.inject(optim.sgd)(learning_rate=1.0)}
    tx = optim.partition(groups, [("weight", "slow"), ("", "fast")])

    def rates(leaf: str) -> list[float]:
        state = trained(made(tx), ps.reduce_on_plateau(factor=0.5, patience=1, leaf=leaf)).state
        return [float(value) for value in optim.hyperparams(state.opt_state).values()]

    slow, fast = rates("learning_rate")
    assert fast == 2 * slow < 1
    assert rates("fast/learning_rate") == [0.5, fast]


@pytest.mark.compile
def test_a_compiled_step_takes_the_rate_without_a_new_graph() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        del inputs
        graphs.append(graph)
        return graph

    result = trained(made(), ps.reduce_on_plateau(factor=0.5, patience=1), compile={"backend": backend})
    assert result.history["lr"] == pytest.approx(torchs(VALUES, factor=0.5, patience=1), rel=1e-6)
    assert len(graphs) == 2  # of training and evaluation


def test_errors_name_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate follows a schedule, or is no leaf.*optim\.inject"):
        trained(made(optim.sgd(0.1)), ps.reduce_on_plateau())
    with pytest.raises(ConfigError, match=r"rate is not a leaf of this state"):
        trained(made(), ps.reduce_on_plateau(leaf="rate"))
    with pytest.raises(ConfigError, match=r"'val_lossy' is not among the metrics.*reduce_on_plateau\('val_loss'\)"):
        trained(made(), ps.reduce_on_plateau("val_lossy", mode="min"))
    with pytest.raises(ConfigError, match="mode"):
        ps.reduce_on_plateau("val_score")
    wrong: dict[str, tuple[Any, str]] = {
        "factor": (1.0, r"factor=1\.0 must be in \(0, 1\)"),
        "patience": (-1, "patience=-1 must be an int of at least 0"),
        "threshold": (-1.0, r"threshold=-1\.0 must be a finite number of at least 0"),
        "threshold_mode": ("relative", "threshold_mode='relative'"),
        "cooldown": (-1, "cooldown=-1 must be an int"),
        "min_scale": (2, r"min_scale=2 must be in \[0, 1\]"),
        "mode": ("least", "mode='least'"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ConfigError, match=f"^reduce_on_plateau: {message}"):
            ps.reduce_on_plateau(**{name: value})
    with pytest.raises(StateError, match="a tuple of 2 TrainStates"):
        ps.reduce_on_plateau()(ps.events.FitStart((made().init(), made().init()), 0, 0, 1, None, 1, None, False))
    with caplog.at_level(logging.WARNING):
        trained(made(), ps.reduce_on_plateau("test_loss"), epochs=1)
    assert "test_loss has had no value" in caplog.text


@pytest.mark.parametrize("monitor", ["val_loss[1]", "val_loss", "val_loss[best]"])
def test_the_metric_of_a_member_lowers_its_rate_and_one_of_all_members_those_of_all(monitor: str):
    several = ps.ensemble(made(), 2)
    assert several.init is not None
    columns = torch.tensor([[5.0] * len(VALUES), VALUES])

    def eval_step(state: Any, batch: Any, *, index: int = 0) -> Any:
        del batch, index
        return {"loss": ps.Mean(columns[:, int(state.updates[0]) - 1], torch.ones(2))}

    found = ps.fit(
        several.init(device="cpu", vary={"learning_rate": [0.5, 0.25]}),
        {"train": BATCHES, "val": BATCHES},
        several._replace(eval_step=eval_step),
        epochs=len(VALUES),
        callbacks=[ps.reduce_on_plateau(monitor, patience=1, cooldown=1)],
        progress=False,
        compile=False,
    ).history
    told = {"val_loss[1]": VALUES, "val_loss": [(5 + value) / 2 for value in VALUES], "val_loss[best]": VALUES}
    expected = torchs(told[monitor], patience=1, cooldown=1)
    assert found["lr[1]"] == pytest.approx([rate / 2 for rate in expected])
    assert found["lr[0]"] == pytest.approx([0.5] * len(VALUES) if monitor == "val_loss[1]" else expected)
    assert expected[-1] < 0.01
