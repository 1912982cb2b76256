"""A run from a file of Lightning Trainer arguments.

    python examples/from_config.py                        # half a minute on two CPU cores
    python examples/from_config.py --settings mine.toml

`config.from_lightning` translates the arguments of a Trainer into those of `ps.program` and `ps.fit`. The data is
scikit-learn's breast cancer set: 569 samples, 30 measurements, two classes. Expect an accuracy of at least 95 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import config, metrics, optim

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/from_config")
    settings: Path = FILE
    seed: int = 0
    epochs: int = 100


def loaders() -> dict[str, DataLoader[Any]]:
    """455 samples to train on, 114 to validate with; the first give each measurement's mean and deviation."""
    table = load_breast_cancer()
    inputs, labels = torch.tensor(table.data, dtype=torch.float32), torch.tensor(table.target)
    train, val = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split([455, 114])
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    return {
        "train": DataLoader(TensorDataset(inputs[train], labels[train]), 32, shuffle=True),
        "val": DataLoader(TensorDataset(inputs[val], labels[val]), 32),
    }


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))


def train(settings: Any, seed: int, **fields: Any) -> ps.FitResult:
    """The run that a mapping or file of a Trainer's arguments describes."""
    plan = config.from_lightning(settings)
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    tx = optim.chain(plan.clip, optim.adamw(1e-3))
    program = ps.program(network(seed), objective, tx, **plan.program)
    return ps.fit(program.init(seed), loaders(), program, plan.fit, **plan.run, **fields)


def main(options: Config) -> float:
    """Train, and return the accuracy on the validation samples in [0, 1]."""
    settings = config.read(options.settings) | {"max_epochs": options.epochs}
    result = train(settings, options.seed, snapshots=options.runs)
    accuracy = result.history["val_accuracy"][-1]
    print(
        f"validation accuracy {100 * accuracy:.1f} % after {result.epochs} epochs, {int(result.state.updates)} updates"
    )
    return accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
