"""`fit` with an ensemble: the history of each member, their mean and the best, monitors, snapshots, halted members."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import metrics, optim
from purestep.errors import ConfigError, NonFiniteError, StateError

MEMBERS = 3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)).double()


def data(seed: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = [torch.randn(8, 4, dtype=torch.float64, generator=generator) for _ in range(count)]
    return [(x, (x @ weight).argmax(dim=1)) for x in inputs]


def counts(outputs: Tensor, targets: Tensor) -> ps.Mean:
    """One mean for each class."""
    hits = (outputs.argmax(dim=1) == targets).double()
    each = nn.functional.one_hot(targets, 3).double()
    return ps.Mean((each * hits[:, None]).sum(0).float(), each.sum(0).float())


def program(**settings: Any) -> ps.Program:
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy, "recall": counts})
    tx = optim.inject(optim.adamw)(learning_rate=1e-2, weight_decay=0.0)
    return ps.program(net(), objective, tx, precision="64-true", **settings)


RATES = [1e-3, 1e-2, 1e-1]
LOADERS = {"train": data(1), "val": data(2, 2)}


def ready(**settings: Any) -> tuple[ps.Program, ps.Program, ps.TrainState]:
    one = program(**settings)
    several = ps.ensemble(one, MEMBERS)
    return one, several, several.init(factory=net, vary={"learning_rate": RATES})


def fitted(several: ps.Program, state: ps.TrainState, **settings: Any) -> ps.FitResult:
    return ps.fit(state, LOADERS, several, sinks=[], **{"epochs": 3, **settings})


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3, "ema": 0.9}], ids=["plain", "window"])
def test_the_history_has_each_member_as_alone(settings: dict[str, Any]):
    one, several, state = ready(**settings)
    result = fitted(several, state)
    alone = [fitted(one, ps.member(state, index)) for index in range(MEMBERS)]
    assert_trees_close(result.state, ps.stack([each.state for each in alone]), rtol=1e-9, atol=1e-10)
    for name, column in alone[0].history.items():
        if name in ("epoch", "step"):
            assert result.history[name] == column
            continue
        each = [run.history[name] for run in alone]
        for index in range(MEMBERS):
            assert result.history[
                f"{name}[{index}]" if not name.endswith("]") else name.replace("[", f"[{index}][")
            ] == (pytest.approx(each[index], rel=1e-5))
        if not name.endswith("]"):
            mean = [sum(row) / MEMBERS for row in zip(*each, strict=True)]
            assert result.history[name] == pytest.approx(mean, rel=1e-5)
    lows = [min(row) for row in zip(*(run.history["val_loss"] for run in alone), strict=True)]
    assert result.history["val_loss[best]"] == pytest.approx(lows, rel=1e-5)
    assert result.history["lr[2]"] == pytest.approx([0.1] * 3)
    assert not [name for name in result.history if "applied" in name or name.startswith("train_lr")]


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("val_loss[2]", None), ("val_loss", None), ("val_loss[best]", None), ("val_accuracy[best]", "max")],
)
def test_a_member_the_mean_or_the_best_is_monitored(monitor: str, mode: Any):
    _, several, state = ready()
    result = fitted(several, state, monitor=monitor, mode=mode, early_stopping=2, epochs=12)
    pick = max if mode == "max" else min
    assert result.best is not None
    assert result.best[monitor] == pick(result.history[monitor])
    means = ps.evaluate(result.best_state, LOADERS["val"], several.eval_step)
    if monitor != "val_accuracy[best]":
        name = monitor.removeprefix("val_")
        found = means.get(name, min(means[f"loss[{index}]"] for index in range(MEMBERS)))
        assert found == pytest.approx(result.best[monitor], rel=1e-6)


def test_a_monitor_that_is_no_member_is_refused():
    _, several, state = ready()
    with pytest.raises(ConfigError, match=r"monitor='val_loss\[3\]' is not among the metrics"):
        fitted(several, state, monitor="val_loss[3]")
    with pytest.raises(StateError, match="the state has 0 members, the program 3.*ps.ensemble"):
        fitted(several, ps.member(state, 0))
    with pytest.raises(StateError, match="the state has 3 members, the program 0"):
        fitted(program(), state)


def test_a_run_that_was_cut_ends_like_the_whole_one(tmp_path: Path):
    _, several, state = ready(accumulate=3, ema=0.9)
    whole = fitted(several, state, epochs=4)
    fitted(several, state, epochs=2, snapshots=tmp_path)
    resumed = fitted(several, several.init(factory=net, vary={"learning_rate": RATES}), epochs=4, snapshots=tmp_path)
    assert_trees_close(resumed.state, whole.state, exact=True)
    assert resumed.history == whole.history
    assert resumed.state.key.tolist() == whole.state.key.tolist() == [[0, 20], [1, 20], [2, 20]]
    with ps.Snapshots(tmp_path) as snapshots:
        found = snapshots.restore(state).state
    assert_trees_close(found, whole.state, exact=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_member_that_halts_is_named_and_the_others_go_on(accumulate: int, caplog: pytest.LogCaptureFixture):
    one = program(accumulate=accumulate)
    several = ps.ensemble(one, MEMBERS, batches="own")
    state = several.init(factory=net)
    own = [ps.stack([batch] * MEMBERS) for batch in data(1)]
    own[2][0][1, 0, 0] = torch.inf
    with caplog.at_level(logging.WARNING, logger="purestep"):
        result = ps.fit(state, own, several, epochs=2, sinks=[])
    told = [record.getMessage() for record in caplog.records]
    call = 3 if accumulate == 1 else 4
    assert [text for text in told if "halted" in text] == [
        f"member 1 of the ensemble has halted at call {call}: its loss, its weight or a gradient is not finite, or its "
        "learning rate is invalid; the others go on"
    ]
    assert result.state.updates.tolist() == ([8, 2, 8] if accumulate == 1 else [4, 1, 4])
    assert result.epochs == 2
    for batch in own:
        batch[0][:] = torch.nan
    with pytest.raises(NonFiniteError, match="all 3 members have halted") as caught:
        ps.fit(state, own, several, epochs=2, sinks=[])
    assert caught.value.result.state.halted.tolist() == [0, 0, 0]
    assert caught.value.result.state.updates.tolist() == [0, 0, 0]


def test_members_at_different_positions_in_their_windows_are_refused_before_a_run():
    one = program(accumulate=2)
    several = ps.ensemble(one, 2)
    state = ps.stack([one.init(0), one.train_step(one.init(1), data(1)[0])[0]])
    with pytest.raises(StateError, match=r"different positions in their windows: \[2, 1\].*program.flush"):
        fitted(several, state)
    state, _ = several.flush(state)  # the cure
    assert fitted(several, state).state.updates.tolist() == [6, 7]


def test_predictions_of_members():
    one, several, state = ready()
    outputs = ps.predict(several, state, [batch[0] for batch in data(3, 3)] + [torch.zeros(2, 4, dtype=torch.float64)])
    assert outputs.shape == (MEMBERS, 26, 3)
    expected = torch.stack([one.bind(ps.member(state, i))(data(3, 3)[1][0]) for i in range(MEMBERS)])
    torch.testing.assert_close(outputs[:, 8:16], expected)


class Rank(metrics.Gathered):
    """Computed from all outputs at the end."""

    __slots__ = ()

    def compute(self) -> float:
        return float(torch.cat([outputs.amax(dim=1) for outputs, _ in self.parts]).double().median())


def test_metrics_that_compute_themselves_have_a_value_for_each_member():
    objective = ps.supervised(
        nn.CrossEntropyLoss(), metrics={"top": lambda outputs, targets: Rank(((outputs, targets),))}
    )
    one = ps.program(net(), objective, optim.sgd(0.1), precision="64-true")
    several = ps.ensemble(one, 2)
    state = several.init(factory=net)
    found = ps.evaluate(state, LOADERS["val"], several.eval_step)
    each = [ps.evaluate(ps.member(state, i), LOADERS["val"], one.eval_step)["top"] for i in range(2)]
    assert [found["top[0]"], found["top[1]"]] == pytest.approx(each)
    assert found["top"] == pytest.approx(sum(each) / 2)
    assert ps.fit(state, LOADERS, several, epochs=1, sinks=[]).history["val_top[1]"] != [None]


def test_what_takes_one_model_says_so(tmp_path: Path):
    one, several, state = ready()
    for call in (
        lambda: ps.export_weights(tmp_path / "model.pt", several, state),
        lambda: ps.load_into(net(), state),
        lambda: ps.summary(several, state),
        lambda: ps.find_learning_rate(several, state, LOADERS["train"]),
    ):
        with pytest.raises(StateError, match="that of an ensemble of 3 members.*ps.member"):
            call()
    batch = LOADERS["train"][0]
    derived: list[Callable[[ps.Program], Callable[..., Any]]] = [
        lambda program: ps.per_example(program),
        lambda program: ps.gradient_noise_scale(program),
        lambda program: lambda state, batch: ps.curvature.hessian(program)(state, batch, state.params),
        lambda program: ps.privacy.dp_sgd(program, max_norm=1.0, noise_multiplier=0.0).train_step,
    ]
    for derive in derived:
        with pytest.raises(ConfigError, match="an ensemble of 3 members.*the program that ps.ensemble got"):
            derive(several)(state, batch)
        with pytest.raises(StateError, match="that of an ensemble of 3 members.*ps.member"):
            derive(one)(state, batch)
        derive(one)(ps.member(state, 0), batch)


def test_a_member_that_skips_every_update_is_named(caplog: pytest.LogCaptureFixture):
    several = ps.ensemble(program(nonfinite="skip"), 2, batches="own")
    good = data(1)[0]
    bad = (good[0] * torch.nan, good[1])
    with caplog.at_level(logging.WARNING, logger="purestep"):
        result = ps.fit(several.init(factory=net), [ps.stack([good, bad])] * 110, several, epochs=2, sinks=[])
    assert result.state.updates.tolist() == [220, 0]
    told = [record.getMessage() for record in caplog.records if "member" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("member 1 of the ensemble has not been trained since the last row")


def test_a_member_that_skips_some_updates_is_not_named(caplog: pytest.LogCaptureFixture):
    several = ps.ensemble(program(nonfinite="skip"), 2, batches="own")
    good = data(1)[0]
    batches = [ps.stack([good, good]), *[ps.stack([good, (good[0] * torch.nan, good[1])])] * 99]
    with caplog.at_level(logging.WARNING, logger="purestep"):
        ps.fit(several.init(factory=net), batches, several, epochs=2, sinks=[])
    assert not [record for record in caplog.records if "member" in record.getMessage()]


def test_a_member_that_halts_at_its_learning_rate_is_named(caplog: pytest.LogCaptureFixture):
    several = ps.ensemble(program(), MEMBERS)
    state = several.init(factory=net, vary={"learning_rate": [float("nan"), -1.0, 1e-2]})
    with caplog.at_level(logging.WARNING, logger="purestep"):
        result = fitted(several, state)
    told = [record.getMessage() for record in caplog.records if "halted" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == [
        "member 0 of the ensemble has halted at call 1",
        "member 1 of the ensemble has halted at call 1",
    ]
    assert result.state.updates.tolist() == [0, 0, 12]


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_recorded_call_of_an_ensemble_is_repeated(rate: float, tmp_path: Path):
    def rooted() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Dropout(rate), Root()).double()

    one = ps.program(rooted(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1), precision="64-true")
    several = ps.ensemble(one, MEMBERS)
    state = several.init(factory=rooted)
    path = ps.testing.record(tmp_path / "call.safetensors", state, data(1)[0])
    found = ps.testing.replay(path, several, like=state)
    assert found.first is not None
    assert found.first.startswith("sqrt in 2 (Root): ")
    assert found.first.endswith(" of 72 numbers are not finite")
    assert found.state.halted.tolist() == [1, 1, 1]


def test_the_cure_of_a_resumed_run_with_other_rates_is_a_call(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    head = optim.inject(optim.sgd)(learning_rate=0.1)
    tx = optim.partition(
        {"body": optim.inject(optim.sgd)(learning_rate=0.1), "head": head}, [("^0", "body"), ("", "head")]
    )
    one = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), tx, precision="64-true")
    several = ps.ensemble(one, 2)
    fitted(several, several.init(vary={"head/learning_rate": [0.1, 0.2]}), epochs=1, snapshots=tmp_path)
    other = several.init(vary={"head/learning_rate": [0.1, 0.5]})
    with caplog.at_level(logging.WARNING, logger="purestep"):
        found = fitted(several, other, epochs=2, snapshots=tmp_path).state
    assert "optim.set_hyperparams(event.state.opt_state, name=value)" in caplog.text
    changed = optim.set_hyperparams(found.opt_state, **{"head/learning_rate": torch.tensor([0.1, 0.5])})
    assert_trees_close(optim.hyperparams(changed), optim.hyperparams(other.opt_state), exact=True)


def test_an_ensemble_of_one_member_has_the_columns_of_one_model():
    several = ps.ensemble(program(), 1)
    history = fitted(several, several.init()).history
    assert {"val_loss", "lr", "train_accuracy", "val_recall"} <= set(history)
    assert "val_loss[0]" not in history
    with pytest.raises(ConfigError, match=r"monitor='val_loss\[best\]' is not among the metrics"):
        fitted(several, several.init(), monitor="val_loss[best]")
