"""A trainer for masked reconstruction, feature by feature: its rows, and what it gets wrong or leaves open."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import assert_trees_close
from pydantic import ValidationError
from shipped import load
from systems.trainers import scripted
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import purestep as ps
from purestep import events, optim, schedules
from purestep.errors import DataError, StepContractError
from purestep.objective import masked_mse, masked_sse

Reduction = Literal["mean", "sum", "batch_mean"]
LENGTH = 8


class Autoencoder(nn.Module):
    """[batch, 8] -> reconstruction, latent, visible; the masks are drawn here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.norm, self.decode = nn.Linear(LENGTH, 4), nn.LayerNorm(4), nn.Linear(4, LENGTH)
        self.cls_token = nn.Parameter(torch.zeros(1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, LENGTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        visible = torch.rand(x.shape, device=x.device) > 0.5
        latent = self.norm(self.encode(torch.where(visible, x, 0.0) + self.pos_embed) + self.cls_token)
        return self.decode(latent), latent, visible


class Given(nn.Module):
    """One number everywhere as the reconstruction; what is visible comes with the input, as a nan."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        return self.level.expand(x.shape), None, x.isnan()


def curves(count: int, seed: int = 0) -> Tensor:
    """[count, 8]"""
    return torch.randn(count, LENGTH, generator=torch.Generator().manual_seed(seed))


def masked(*rows: Sequence[float | None]) -> Tensor:
    """None is visible, so it is not scored."""
    return torch.tensor([[math.nan if x is None else x for x in row] for row in rows], dtype=torch.float64)


class Spectra(Dataset[tuple[Tensor, str]]):
    """Curves and the name of each."""

    def __init__(self, count: int) -> None:
        self.x = curves(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        return self.x[index], f"sample {index}"


def program(tx: Any = None, loss: Any = "mse", reduction: Reduction | None = None, **fields: Any) -> ps.Program:
    return ps.program(Autoencoder(), ps.masked_reconstruction(loss, reduction), tx or optim.adamw(1e-2), **fields)


def fit(made: ps.Program, epochs: int, run: Path | None = None, *, val: bool = True, **fields: Any) -> ps.FitResult:
    """A run as the description lays it out: history beside ``checkpoints``."""
    assert made.init is not None
    loaders = {"train": DataLoader(Spectra(12), batch_size=4, shuffle=True)}
    if val:
        loaders["val"] = DataLoader(Spectra(6), batch_size=4)
    if run is not None:
        fields = {
            "snapshots": run / "checkpoints",
            "sinks": [ps.sinks.history_json(run / "training_history.json")],
        } | fields
    return ps.fit(made.init(seed=5, device="cpu"), loaders, made, epochs=epochs, progress=False, **fields)


def history(run: Path) -> list[dict[str, Any]]:
    """The file, read by a parser that takes nothing but JSON."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    return json.loads((run / "training_history.json").read_text(), parse_constant=refuse)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("4.1", "4.2", "4.11", "B52")
def test_every_setting_of_the_trainer_has_its_place(tmp_path: Path):
    updates = 3 * 4
    tx = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(schedules.warmup_cosine(peak=2e-4, warmup=3, total=updates))
    )
    result = fit(
        program(tx, "mse", "mean", precision="bf16-mixed", ema=0.999),
        4,
        tmp_path,
        device="cpu",
        tf32=False,
        early_stopping=ps.EarlyStopping(20, min_delta=0.0, start_ratio=0.5),
        resume="auto",
    )
    assert set(result.summary()) == {"best", "epochs"}
    assert set(result.summary()["best"]) == {"epoch", "val_loss"}
    assert result.summary()["epochs"] == 4
    assert result.summary()["best"]["val_loss"] == min(result.history["val_loss"])
    assert (tmp_path / "training_history.json").exists()


@pytest.mark.row("4.11")
def test_the_number_of_epochs_is_a_total(tmp_path: Path):
    assert fit(program(), 2, tmp_path).epochs == 2
    assert fit(program(), 3, tmp_path).history["epoch"] == [1, 2, 3]


@pytest.mark.row("B34")
def test_the_device_of_a_call_wins_over_that_of_the_settings():
    config = ps.FitConfig(epochs=1, device="cuda:1")
    result = ps.fit(program().init(device="cpu"), [curves(4)], program(), config, device="cpu", progress=False)
    assert result.state.step.device.type == "cpu"  # what is said in the call wins
    assert config.device == "cuda:1"


@pytest.mark.row("4.4", "B37")
@pytest.mark.parametrize(("precision", "scaled"), [("bf16-mixed", False), ("16-mixed", True), ("32-true", False)])
def test_only_float16_brings_a_scaler_and_autocast_follows_the_device(precision: str, scaled: bool):
    made = program(precision=precision)
    state = made.init(device="cpu")
    assert (state.scaler != ps.Empty()) is scaled
    dtypes: list[torch.dtype] = []

    def watch(model: Any, batch: Any) -> ps.Loss:
        dtypes.append(model.call("encode_of", batch).dtype)
        return ps.masked_reconstruction()(model, batch)

    class Watched(Autoencoder):
        def encode_of(self, x: Tensor) -> Tensor:
            return self.encode(x)

    made = ps.program(Watched(), watch, optim.sgd(0.1), precision=precision)
    made.train_step(made.init(device="cpu"), curves(4))
    assert dtypes == [{"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)]


@pytest.mark.row("4.5")
def test_tf32_is_allowed_during_the_run_only():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    seen = []

    def look(event: Any) -> None:
        if isinstance(event, events.StepEnd):
            seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))

    for wanted in (True, False):
        fit(program(), 1, callbacks=[look], tf32=wanted)
    assert seen == [(True, True)] * 3 + [(False, False)] * 3
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.row("B36")
def test_a_configuration_is_frozen_and_nobody_writes_to_it():
    config = ps.FitConfig(epochs=1, early_stopping=3)
    with pytest.raises(ValidationError, match="frozen"):
        config.device = "cuda"  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test
    before = config.to_dict()
    made = program()
    for _ in range(2):
        ps.fit(made.init(device="cpu"), ([curves(4)], [curves(4)]), made, config, progress=False)
    assert config.to_dict() == before


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("4.8", "4.22")
def test_a_model_or_a_batch_of_another_kind_is_refused():
    x = curves(2)
    for returned, said in (
        ((x, x), "a tuple of 2"),
        (x, r"a tensor of shape \[2, 8\]"),
        ((x, x, None), "a tuple of 3"),
    ):
        with pytest.raises(
            StepContractError, match=rf"the model returned {said} .*return \(reconstruction, latent, vis"
        ):
            ps.masked_reconstruction()(lambda given, returned=returned: returned, x)
    with pytest.raises(DataError, match=r"the input is a dict, not a tensor .*\(x, meta\)"):
        ps.masked_reconstruction()(Autoencoder(), {"x": x})
    with pytest.raises(DataError, match=r"the input is a list, not a tensor"):
        ps.masked_reconstruction()(Autoencoder(), [])


@pytest.mark.row("4.9")
def test_the_error_is_summed_in_at_least_float32():
    x, mask = torch.full((1000, 8), 4.0, dtype=torch.float16), torch.ones(1000, 8, dtype=torch.bool)
    assert masked_mse(torch.zeros_like(x), x, mask).item() == 16.0  # the sum, 128,000, is more than float16 holds
    assert masked_sse(torch.zeros_like(x), x, mask, reduction="sum").item() == 128_000.0


@pytest.mark.row("4.26", "B40")
@pytest.mark.parametrize(
    ("reduction", "epoch_mean"),
    [("mean", (1 + 4 + 9 + 16) / 4), ("batch_mean", (1 + 4 + 9 + 16) / 3), ("sum", (1 + 4 + 9 + 16) / 2)],
)
def test_the_mean_of_an_epoch_weighs_by_what_the_reduction_divides_by(reduction: Reduction, epoch_mean: float):
    parts = [masked([1.0, 2.0, 3.0]), masked([4.0, None, None], [None, None, None])]
    made = ps.program(Given(), ps.masked_reconstruction("mse", reduction), optim.sgd(0.0))
    state = made.init(device="cpu")
    assert ps.evaluate(state, parts, made.eval_step)["loss"] == pytest.approx(epoch_mean)
    _, metrics = ps.run_epoch(state, parts, made.train_step)
    assert float(metrics["loss"]) == pytest.approx(epoch_mean)


@pytest.mark.row("4.26")
def test_batch_mean_keeps_the_weight_of_an_example_when_masks_differ_in_size():
    """The gradient of the example with few hidden points."""
    x = masked([1.0, None, None, None], [0.0, 0.0, 0.0, 0.0])

    def first_share(reduction: Reduction, rows: Tensor) -> float:
        made = ps.program(Given(), ps.masked_reconstruction("mse", reduction), optim.sgd(1.0))
        return made.train_step(made.init(device="cpu"), rows)[0].params["level"].item()

    beside_empty = torch.cat([x[:1], torch.full_like(x[:1], torch.nan)])
    assert first_share("batch_mean", x) == first_share("batch_mean", beside_empty) == 1.0
    assert first_share("mean", x) == pytest.approx(first_share("mean", beside_empty) / 5)


# --- the average ------------------------------------------------------------------------------------------------------


@pytest.mark.row("4.7", "4.13", "B45")
def test_the_average_is_evaluated_and_nothing_is_swapped():
    made = program(ema=0.5)
    result = fit(made, 2)
    loader = DataLoader(Spectra(6), batch_size=4)
    scored = ps.evaluate(ps.view(result.state, "ema"), loader, made.eval_step)["loss"]
    raw = ps.evaluate(result.state, loader, made.eval_step, view="params")["loss"]
    assert result.history["val_loss"][-1] == ps.evaluate(result.state, loader, made.eval_step)["loss"] == scored != raw
    assert fit(made, 2, evaluate_on="params").history["val_loss"][-1] == raw

    before = ps.clone(result.state)

    def breaks(state: Any, batch: Any) -> Any:
        raise RuntimeError("disk of the cluster gone")

    with pytest.raises(RuntimeError, match="disk of the cluster gone"):
        ps.evaluate(ps.view(result.state, "ema"), loader, breaks)
    assert_trees_close(result.state, before, exact=True)


@pytest.mark.row("4.12", "4.23", "4.24")
def test_schedule_optimizer_and_average_by_the_batch_as_torch_does():
    warmup, total, groups = 3, 12, {"decay": [], "rest": []}
    model = Autoencoder()
    for name, parameter in model.named_parameters():
        skipped = parameter.ndim < 2 or name in ("cls_token", "pos_embed")
        groups["rest" if skipped else "decay"].append(parameter)
    given = [{"params": groups["decay"], "weight_decay": 0.05}, {"params": groups["rest"], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(given, lr=1e-2, betas=(0.9, 0.95))
    ramp = LambdaLR(optimizer, lambda n: n / warmup if n < warmup else (1 + math.cos(math.pi * (n - warmup) / 9)) / 2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    tx = optim.adamw(
        schedules.warmup_cosine(peak=1e-2, warmup=warmup, total=total),
        b2=0.95,
        weight_decay=0.05,
        mask=optim.decay_mask(Autoencoder(), skip=("cls_token", "pos_embed")),
    )
    made = ps.program(Autoencoder(), lambda m, x: fixed_loss(m, x), tx, ema=0.9)
    rates = []
    for n in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        fixed_loss(model, curves(4, n)).mean.backward()
        optimizer.step()
        ramp.step()
        average.update_parameters(model)
    state, metrics = ps.run_epoch(made.init(device="cpu"), [curves(4, n) for n in range(total)], made.train_step)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert_trees_close(state.params, expected, rtol=1e-5, atol=1e-6)
    shadow = {name: p.detach() for name, p in average.module.named_parameters()}
    assert_trees_close(state.ema.params, shadow, rtol=1e-5, atol=1e-6)
    assert float(metrics["lr"]) == pytest.approx(sum(rates) / total, rel=1e-6)
    assert float(metrics["loss"]) > 0


def fixed_loss(model: Any, x: Tensor) -> ps.Loss:
    """The loss over a mask that depends on the input alone, so that two frameworks see the same one."""
    params = model.params if hasattr(model, "params") else dict(model.named_parameters())
    linear = functional.linear
    shown = linear(torch.where(x > 0, x, 0.0) + params["pos_embed"], params["encode.weight"], params["encode.bias"])
    latent = functional.layer_norm(shown + params["cls_token"], (4,), params["norm.weight"], params["norm.bias"])
    recon = linear(latent, params["decode.weight"], params["decode.bias"])
    return ps.Loss(masked_mse(recon, x, x <= 0), (x <= 0).sum(), {})


# --- masks and batches ------------------------------------------------------------------------------------------------


@pytest.mark.row("4.25", "B46")
def test_masks_are_new_in_every_step_and_the_same_in_every_evaluation():
    made = program(optim.sgd(0.0))
    state = made.init(device="cpu")
    loader = [curves(4), curves(4, 1)]
    values = [ps.evaluate(state, loader, made.eval_step)["loss"] for _ in range(2)]
    assert values[0] == values[1]
    first, one = made.train_step(state, curves(4))
    _, two = made.train_step(first, curves(4))
    assert float(one["loss"]) != float(two["loss"])  # the same weights and batch, another mask
    assert float(made.eval_step(state, curves(4), index=0)["loss"]) != float(
        made.eval_step(state, curves(4), index=1)["loss"]
    )


@pytest.mark.row("B46")
def test_validating_does_not_move_training_by_a_bit():
    made = program(ema=0.9)
    with_val, without = fit(made, 3), fit(made, 3, val=False)
    often = fit(made, 3, evaluate_every=1)
    assert_trees_close(with_val.state, without.state, exact=True)
    assert_trees_close(often.state, without.state, exact=True)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("4.14", "4.16", "4.17", "B35")
def test_a_checkpoint_holds_everything(tmp_path: Path):
    tx = optim.adamw(schedules.warmup_cosine(peak=1e-2, warmup=2, total=12))
    made = program(tx, precision="16-mixed", ema=0.9)
    whole = fit(made, 4, tmp_path / "whole")
    fit(made, 2, tmp_path / "parts")
    with ps.Snapshots(tmp_path / "parts" / "checkpoints", writer=False) as stored:
        last = stored.restore(made.init())
        assert (last.step, stored.latest(), last.loop["record"]["epoch"]) == (6, 6, 2)  # completed: the next is 2
        assert stored.best() in (3, 6)
    resumed = fit(made, 4, tmp_path / "parts")
    assert_trees_close(
        resumed.state, whole.state, exact=True
    )  # weights, moments, scale, average, key: so masks as well
    assert resumed.history == whole.history
    assert resumed.best == whole.best
    assert history(tmp_path / "parts") == history(tmp_path / "whole")


@pytest.mark.row("4.15", "B43")
def test_the_weights_that_were_scored_are_those_exported(tmp_path: Path):
    made = program(ema=0.5)
    result = fit(made, 2)
    target = tmp_path / "best_model.pt"
    ps.export_weights(target, made, result.state, view="ema")
    model = Autoencoder()
    model.load_state_dict(torch.load(target, weights_only=True))
    found = {name: p.detach() for name, p in model.named_parameters()}
    assert_trees_close(found, dict(ps.view(result.state, "ema").params), exact=True)
    assert not torch.equal(found["decode.weight"], result.state.params["decode.weight"])
    with ps.Snapshots(tmp_path / "both") as snapshots:
        snapshots.save(1, result.state)
        assert_trees_close(snapshots.restore(made.init()).state, result.state, exact=True)  # raw and averaged


@pytest.mark.row("4.18", "B50")
def test_a_row_of_the_history(tmp_path: Path):
    made = program(optim.adamw(schedules.warmup_cosine(peak=1e-2, warmup=3, total=9)))
    result = fit(made, 2, tmp_path)
    first, second = history(tmp_path)
    assert set(first) >= {"epoch", "train_loss", "val_loss", "lr"}
    assert [first["epoch"], second["epoch"]] == [1, 2]
    assert [row["val_loss"] for row in (first, second)] == result.history["val_loss"]
    used = float(schedules.warmup_cosine(peak=1e-2, warmup=3, total=9)(2))  # by the third update, the epoch's last
    assert first["lr"] == pytest.approx(used)
    fit(made, 3, tmp_path)
    assert [row["epoch"] for row in history(tmp_path)] == [1, 2, 3]


@pytest.mark.row("B50")
def test_every_group_has_its_rate(tmp_path: Path):
    groups = {"fast": optim.sgd(0.1), "slow": optim.sgd(schedules.linear(0.01, 0.0, transition_steps=10))}
    tx = optim.partition(
        groups, {name: "slow" if "encode" in name else "fast" for name, _ in Autoencoder().named_parameters()}
    )
    row = fit(program(tx), 1, tmp_path).history
    rates = {name: values[-1] for name, values in row.items() if name.startswith("lr/")}
    assert rates == {"lr/fast": pytest.approx(0.1), "lr/slow": pytest.approx(0.008)}


@pytest.mark.row("4.19", "B51")
@pytest.mark.parametrize("point", ["files.write", "files.rename"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str):
    made = program(ema=0.5)
    result = fit(made, 1)
    weights, rows = tmp_path / "best_model.pt", tmp_path / "training_history.json"
    sink = ps.sinks.history_json(rows)
    sink(events.FitStart(None, 0, 0, 2, None, 3, None, False))
    sink(events.EpochEnd(None, 1, 3, {"epoch": 1, "val_loss": math.nan}, True, None))
    ps.export_weights(weights, made, result.state)
    before = weights.read_bytes(), rows.read_bytes()
    monkeypatch.setenv("PURESTEP_FAILPOINT", f"{point}=raise:ENOSPC")
    with pytest.raises(OSError, match="No space left"):
        ps.export_weights(weights, made, result.state, view="ema")
    if point == "files.write":  # a row is appended, and nothing renamed
        with pytest.raises(OSError, match="No space left"):
            sink(events.EpochEnd(None, 2, 6, {"epoch": 2, "val_loss": 1.0}, True, None))
    assert (weights.read_bytes(), rows.read_bytes()) == before
    assert json.loads(rows.read_text()) == [{"epoch": 1, "val_loss": None}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best_model.pt", "training_history.json"]


@pytest.mark.row("4.20")
def test_where_a_run_goes_on_from(tmp_path: Path):
    made = program()
    first = fit(made, 1, tmp_path / "a")
    elsewhere = fit(made, 2, tmp_path / "b", resume=str(tmp_path / "a" / "checkpoints"))
    fresh = fit(made, 1, tmp_path / "c", resume=None)
    assert_trees_close(fresh.state, first.state, exact=True)
    assert elsewhere.history["train_loss"][0] == first.history["train_loss"][0]
    assert elsewhere.epochs == 2
    stored = ps.Snapshots(tmp_path / "b" / "checkpoints", writer=False)
    newest, older = stored.steps()[-1], stored.steps()[-2:-1]
    if not older:
        fit(made, 3, tmp_path / "b")
        newest = stored.steps()[-1]
    damaged = next((tmp_path / "b" / "checkpoints" / str(newest) / "state").rglob("d/*"))
    damaged.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="went back to step"):
        again = fit(made, 4, tmp_path / "b")  # "auto" takes the newest that is whole
    assert again.epochs == 4


@pytest.mark.row("4.13", "B47")
def test_a_run_without_validation_writes_json_and_has_no_best(tmp_path: Path):
    result = fit(program(), 2, tmp_path, val=False)
    assert result.summary() == {"best": None, "epochs": 2}
    assert all("val_loss" not in row for row in history(tmp_path))
    run = tmp_path / "nan"
    with_nan = fit(scripted(calls=3, loss=[math.nan, math.inf]), 2, run)
    assert [row["val_loss"] for row in history(run)] == [None, None]
    assert with_nan.summary() == {"best": None, "epochs": 2}


# --- when it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.row("4.21", "B42")
def test_it_stops_after_its_start_its_patience_and_its_least_improvement():
    def epochs(values: Sequence[float], total: int = 8, **rule: Any) -> tuple[int, int]:
        result = fit(scripted(calls=3, loss=values), total, early_stopping=ps.EarlyStopping(**rule))
        assert result.best is not None
        return result.epochs, result.best["epoch"]

    flat = [1.0] * 8
    assert epochs(flat, patience=2) == (3, 1)
    assert epochs(flat, patience=2, start_ratio=0.5) == (5, 1)  # epochs 4 and 5 are the first two that count
    creeping = [1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93]
    assert epochs(creeping, patience=2) == (8, 8)
    assert epochs(creeping, patience=2, min_delta=0.1) == (3, 3)  # the patience ends, the best goes on improving


@pytest.mark.row("4.21", "B41")
def test_a_resumed_run_remembers_its_patience_and_works_its_start_out_anew(tmp_path: Path):
    values = [1.0, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]
    rule = ps.EarlyStopping(3)
    whole = fit(scripted(calls=3, loss=values), 8, tmp_path / "whole", early_stopping=rule)
    fit(scripted(calls=3, loss=values), 3, tmp_path / "parts", early_stopping=rule)
    resumed = fit(scripted(calls=3, loss=values), 8, tmp_path / "parts", early_stopping=rule)
    assert (resumed.epochs, resumed.best) == (whole.epochs, whole.best) == (5, {"epoch": 2, "val_loss": 0.5, "step": 6})
    late = ps.EarlyStopping(2, start_ratio=0.5)
    fit(scripted(calls=3, loss=values), 2, tmp_path / "longer", early_stopping=late)
    assert (
        fit(scripted(calls=3, loss=values), 8, tmp_path / "longer", early_stopping=late).epochs == 5
    )  # from epoch 4 of 8


@pytest.mark.row("B49")
def test_a_run_that_is_finished_already_gives_its_stored_best(tmp_path: Path):
    made = program()
    done = fit(made, 3, tmp_path)
    for epochs in (3, 2):
        again = fit(made, epochs, tmp_path)
        assert again.summary() == done.summary()
        assert again.history == done.history
        assert_trees_close(again.state, done.state, exact=True)
    assert len(history(tmp_path)) == 3


# --- the example ------------------------------------------------------------------------------------------------------


@pytest.mark.row("4.27")
def test_the_example_has_its_numbers():
    example = load("masked_reconstruction")
    config = example.Config()
    assert (config.length, config.latent, config.blocks, config.hidden) == (256, 64, 16, 12)
    assert (config.learning_rate, config.weight_decay) == (2e-4, 0.05)
    assert (config.epochs, config.warmup_epochs, config.ema, config.clip) == (100, 5, 0.999, 1.0)
    assert (config.loss, config.reduction, config.precision) == ("mse", "mean", "bf16-mixed")
    assert (config.patience, config.start_ratio) == (20, 0.5)
    x = torch.randn(3, 256)
    recon, latent, visible = example.MaskedAutoencoder(config)(x)
    assert (recon.shape, latent.shape, visible.shape) == (x.shape, (3, 64), x.shape)
    assert visible.dtype == torch.bool
    blocks = visible.view(3, 16, 16)
    assert torch.equal(blocks.all(dim=2), blocks.any(dim=2))  # a block is hidden or shown as a whole
    assert blocks[:, :, 0].sum(dim=1).tolist() == [4, 4, 4]
    assert not torch.equal(visible[0], visible[1])
