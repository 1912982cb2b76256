"""A run described wholly by a file of Lightning Trainer arguments, and the same run in code, bit for bit.

    python examples/from_config.py                        # half a minute on two CPU cores

The data is scikit-learn's breast cancer set: 569 samples, 30 measurements, two classes. `config.from_lightning` reads
`from_config.toml`, which is trained as it stands, then with one switch after another. Each run is made again from code:
expect `identical` in every line, and an accuracy of at least 95 %. It saves `runs/from_config/curves.png`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import config, metrics, optim


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/from_config")
    seed: int = 0
    epochs: int = 100  # of the file's own run
    switched_epochs: int = 12  # of the others


def loaders() -> dict[str, DataLoader[Any]]:
    """455 samples to train on, 114 to validate with, each measurement standardised by the first."""
    found = load_breast_cancer()
    inputs, labels = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    train, val = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split([455, 114])
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    return {
        "train": DataLoader(TensorDataset(inputs[train], labels[train]), 32, shuffle=True),
        "val": DataLoader(TensorDataset(inputs[val], labels[val]), 32),
    }


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))


OBJECTIVE = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})


def from_settings(settings: Any, seed: int) -> ps.FitResult:
    """The run that a mapping or file of a Trainer's arguments describes."""
    plan = config.from_lightning(settings)
    tx = optim.chain(plan.clip, optim.adamw(1e-3))
    program = ps.program(network(seed), OBJECTIVE, tx, **plan.program)
    return ps.fit(program.init(seed), loaders(), program, plan.fit, **plan.run)


def from_code(seed: int, clip: optim.Transform, precision: str, accumulate: int, **fields: Any) -> ps.FitResult:
    """The same in code."""
    tx = optim.chain(clip, optim.adamw(1e-3))
    program = ps.program(network(seed), OBJECTIVE, tx, precision=precision, accumulate=accumulate)
    return ps.fit(program.init(seed), loaders(), program, progress=False, sinks=(), **fields)


# name: what is added to the file, and what that is in code.
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it stands": ({}, {}),
    "fast_dev_run=2": ({"fast_dev_run": 2}, {"fast_dev_run": 2}),
    "overfit_batches=1": ({"overfit_batches": 1}, {"overfit_batches": 1}),
    "limit_train_batches=0.5": ({"limit_train_batches": 0.5}, {"limit_batches": {"train": 0.5}}),
    "limit_val_batches=2": ({"limit_val_batches": 2}, {"limit_batches": {"val": 2}}),
    "val_check_interval=0.5": ({"val_check_interval": 0.5}, {"evaluate_every": 0.5}),
    # Two batches are one update here; 1 batch would be half of one, and 1.0 is an epoch.
    "val_check_interval=2": ({"val_check_interval": 2, "check_val_every_n_epoch": None}, {"evaluate_every": 1}),
    "check_val_every_n_epoch=3": ({"check_val_every_n_epoch": 3}, {"evaluate_every": 3.0}),
    "max_steps=20": ({"max_steps": 20}, {"steps": 20}),
    # Time is up at once, but not before the least number of epochs.
    "max_time, min_epochs=10": ({"max_time": {"milliseconds": 1}}, {"max_time": 0.001}),
    "detect_anomaly": ({"detect_anomaly": True}, {"detect_anomaly": True}),
    "clipping by value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"clip": optim.clip_by_value(0.01)},
    ),
    "no clipping": ({"gradient_clip_val": 0}, {"clip": optim.identity()}),
}
# The file itself in code.
IN_CODE: dict[str, Any] = {
    "precision": "16-mixed",
    "min_epochs": 10,
    "evaluate_every": 1.0,
    "accumulate": 2,
    "clip": optim.clip_by_global_norm(1.0),
    "deterministic": True,
}


def same(one: ps.FitResult, other: ps.FitResult) -> bool:
    """Every number of the state and of the history."""
    leaves = zip(ps.tree.leaves(one.state), ps.tree.leaves(other.state), strict=True)
    return one.history == other.history and all(torch.equal(left, right) for left, right in leaves)


def picture(history: dict[str, list[Any]], path: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axis.plot(history["epoch"], history[f"train_{name}"], label="train")
        axis.plot(history["epoch"], history[f"val_{name}"], label="val")
        axis.set(xlabel="epoch", ylabel=name)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(options: Config) -> float:
    """Run the file and each switch, from the file and from code; return the share of them that were identical."""
    file = Path(__file__).with_suffix(".toml")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.from_lightning(config.read(file) | {"max_epoch": 3})
    print(f"a slip of the pen: {caught[0].message}")
    agreed: list[bool] = []
    for name, (settings, fields) in SWITCHES.items():
        epochs = options.switched_epochs if settings else options.epochs
        found = from_settings(config.read(file) | {"max_epochs": epochs} | settings, options.seed)
        expected = from_code(options.seed, **IN_CODE | {"epochs": epochs} | fields)
        agreed.append(same(found, expected))
        if not settings:
            picture(found.history, options.runs / "curves.png")
            print(f"validation accuracy {100 * found.history['val_accuracy'][-1]:.1f} %")
        verdict = "identical" if agreed[-1] else "DIFFERENT"
        updates, times = int(found.state.updates), sum(loss is not None for loss in found.history["val_loss"])
        print(f"{name:<26} {verdict}: {updates} updates, {times} evaluations, ended by {found.stop_reason}")
    print(f"{sum(agreed)} of {len(agreed)} runs from the file are bit for bit those from code")
    return sum(agreed) / len(agreed)


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
