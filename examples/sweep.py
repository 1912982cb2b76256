"""Handwritten digits: a sweep of learning rates in one run, then an ensemble with the best of them.

    python examples/sweep.py                              # under a minute on two CPU cores
    python examples/sweep.py --device cuda --compile

Each model of a run has its own weights, dropout masks and learning rate, and one step trains all of them. Expect a last
line in which the ensemble is right more often than its members are on average.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import digits
import torch
from torch import nn

import purestep as ps
from purestep import metrics, optim


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/sweep")
    fresh: bool = False
    seed: int = 0
    rates: int = 16
    members: int = 8
    low: float = 1e-4
    high: float = 1.0
    sweep_epochs: int = 4
    epochs: int = 20
    batch_size: int = 64
    width: int = 64
    device: str | None = None
    compile: bool = False


def network(width: int) -> nn.Module:
    """[batch, 1, 8, 8] -> [batch, 10]."""
    hidden = nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def main(config: Config) -> float:
    """Sweep, train the ensemble, and return its accuracy on the held-out digits in [0, 1]."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    data = digits.loaders(config.batch_size)
    test = data.pop("test").dataset.tensors
    # `inject` puts the learning rate into the state, where each member has its own.
    rule = optim.inject(optim.adamw)(learning_rate=config.low, weight_decay=0.05)
    tx = optim.chain(optim.clip_by_global_norm(1.0), rule)
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    program = ps.program(network(config.width), objective, tx, ema=ps.ema.average(0.98, warmup=True))

    def train(
        name: str, epochs: int, rates: list[float], monitor: str, **seeds: Any
    ) -> tuple[ps.Program, ps.FitResult]:
        """One run with a model for each learning rate."""
        several = ps.ensemble(program, len(rates))
        state = several.init(factory=lambda: network(config.width), vary={"learning_rate": rates}, **seeds)
        settings = {"epochs": epochs, "monitor": monitor, "device": config.device, "compile": config.compile}
        return several, ps.fit(state, data, several, snapshots=config.runs / name, **settings)

    rates = torch.logspace(math.log10(config.low), math.log10(config.high), config.rates).tolist()
    seeds = [config.seed] * len(rates)  # the same initial weights
    _, swept = train("rates", config.sweep_epochs, rates, "val_loss[best]", seeds=seeds)
    losses = [swept.history[f"val_loss[{index}]"][-1] or math.inf for index in range(len(rates))]
    for rate, loss in zip(rates, losses, strict=True):
        print(f"learning rate {rate:.2e}: validation loss {loss:.3f}")
    best = rates[losses.index(min(losses))]

    several, trained = train("members", config.epochs, [best] * config.members, "val_loss", seed=config.seed + 1)
    images, labels = ps.to_device(test, trained.state)
    outputs = several.bind(trained.best_state)(images).softmax(dim=-1)  # [members, 360, 10]
    average = (outputs.argmax(dim=-1) == labels).double().mean().item()
    accuracy = (outputs.mean(dim=0).argmax(dim=-1) == labels).double().mean().item()
    print(f"best learning rate {best:.2e}")
    print(f"test accuracy {100 * accuracy:.1f} % (ensemble), {100 * average:.1f} % (a member on average)")
    return accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
