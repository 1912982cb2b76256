"""Handwritten digits: a sweep of learning rates in one run, then an ensemble with the best of them.

    python examples/sweep.py                              # under a minute on two CPU cores
    python examples/sweep.py --device cuda --compile

Each model of a run has its own weights, dropout masks and learning rate, and one step trains all of them. The 1,797
scans of 8x8 pixels come with scikit-learn: nothing is downloaded. Interrupt it with Ctrl-C and run it again: it goes on
where it was. Expect a last line in which the ensemble is right more often than its members are on average.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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
    weight_decay: float = 0.05
    device: str | None = None
    compile: bool = False


def datasets() -> dict[str, TensorDataset]:
    """1,257 digits to train on, 180 to choose the learning rate and the epoch, 360 held out."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = dict(zip(("train", "val", "test"), order.split([1257, 180, 360]), strict=True))
    return {name: TensorDataset(images[rows], labels[rows]) for name, rows in parts.items()}


def network(width: int) -> nn.Module:
    """[batch, 64] -> [batch, 10]."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def main(config: Config) -> float:
    """Sweep, train the ensemble, and return its accuracy on the held-out digits in [0, 1]."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    data = datasets()
    loaders = {
        name: DataLoader(data[name], batch_size=config.batch_size, shuffle=name == "train") for name in ("train", "val")
    }

    def factory() -> nn.Module:
        return network(config.width)

    # `inject` puts the learning rate into the state, where each member has its own.
    tx = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.inject(optim.adamw)(learning_rate=config.low, weight_decay=config.weight_decay),
    )
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    program = ps.program(factory(), objective, tx, ema=ps.ema.average(0.98, warmup=True))

    # One run, one model for each learning rate. All begin with the same weights.
    sweep = ps.ensemble(program, config.rates)
    rates = torch.logspace(*torch.tensor([config.low, config.high]).log10(), config.rates).tolist()
    result = ps.fit(
        sweep.init(seeds=[config.seed] * config.rates, factory=factory, vary={"learning_rate": rates}),
        loaders,
        sweep,
        epochs=config.sweep_epochs,
        monitor="val_loss[best]",
        snapshots=config.runs / "rates",
        device=config.device,
        compile=config.compile,
    )
    losses = [result.history[f"val_loss[{index}]"][-1] or float("inf") for index in range(config.rates)]
    for rate, loss in zip(rates, losses, strict=True):
        print(f"learning rate {rate:.2e}: validation loss {loss:.3f}")
    best = rates[losses.index(min(losses))]

    # The same program with the best rate: other seeds, so other weights and other dropout masks.
    several = ps.ensemble(program, config.members)
    result = ps.fit(
        several.init(config.seed + 1, factory=factory, vary={"learning_rate": [best] * config.members}),
        loaders,
        several,
        epochs=config.epochs,
        monitor="val_loss",
        snapshots=config.runs / "members",
        device=config.device,
        compile=config.compile,
    )
    images, labels = ps.to_device(data["test"].tensors, result.state)
    each = several.bind(result.best_state)(images).softmax(dim=-1)  # [members, 360, 10]
    own = (each.argmax(dim=-1) == labels).double().mean(dim=1)
    right = each.mean(dim=0).argmax(dim=-1) == labels
    accuracy = float(right.double().mean())
    print(f"best learning rate {best:.2e}; members disagree by {_spread(each.std(dim=0, correction=0), right)}")
    print(f"test accuracy {100 * accuracy:.1f} % (ensemble), {100 * float(own.mean()):.1f} % (a member on average)")
    return accuracy


def _spread(std: Tensor, right: Tensor) -> str:
    """The deviation between the members, where the ensemble is right and where it is wrong."""
    spread = std.mean(dim=-1)
    return f"{float(spread[right].mean()):.3f} where they are right and {float(spread[~right].mean()):.3f} elsewhere"


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
