"""Handwritten digits: a small convolutional network, from the first epoch to its accuracy on held-out digits.

    python examples/digits.py                             # under a minute on two CPU cores
    python examples/digits.py --device cuda --compile
    torchrun --nproc-per-node 2 examples/digits.py        # the same run in two processes

The 1,797 scans of 8x8 pixels come with scikit-learn: nothing is downloaded. Interrupt it with Ctrl-C and run it again:
it continues. Expect a last line of at least `test accuracy 98.0 % (EMA)`.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import metrics, optim, schedules


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/digits")
    fresh: bool = False
    seed: int = 0
    epochs: int = 40
    patience: int = 12
    batch_size: int = 64
    width: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    ema: float = 0.99
    precision: str = "bf16-mixed"
    device: str | None = None
    compile: bool = False


def loaders(batch_size: int) -> dict[str, DataLoader[tuple[Tensor, ...]]]:
    """1,257 digits to train on, 180 to decide when to stop, 360 held out; the split does not depend on the seed."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = dict(zip(("train", "val", "test"), order.split([1257, 180, 360]), strict=True))
    return {
        name: DataLoader(TensorDataset(images[rows], labels[rows]), batch_size=batch_size, shuffle=name == "train")
        for name, rows in parts.items()
    }


def augment(images: Tensor, degrees: float = 12, shift: float = 1) -> Tensor:
    """Each image turned by up to ``degrees`` and moved by up to ``shift`` pixels. images: [batch, 1, 8, 8]."""
    batch = len(images)
    angle = torch.empty(batch, device=images.device).uniform_(-1, 1) * math.radians(degrees)
    offset = torch.empty(batch, 2, 1, device=images.device).uniform_(-shift, shift) * 2 / images.shape[-1]
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(batch, 2, 2)
    grid = functional.affine_grid(torch.cat([rotation, offset], dim=2), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def network(width: int) -> nn.Module:
    """[batch, 1, 8, 8] -> [batch, 10]."""

    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *conv(1, width),
        *conv(width, width),
        nn.MaxPool2d(2),
        *conv(width, 2 * width),
        *conv(2 * width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * width, 10),
    )


def main(config: Config) -> float:
    """Train, and return the accuracy on the held-out digits in [0, 1]."""
    with ps.parallel.start() as mesh:  # without torchrun: one process
        return train(config, mesh)


def train(config: Config, mesh: ps.parallel.Mesh) -> float:
    if config.fresh and mesh.rank == 0:
        shutil.rmtree(config.runs, ignore_errors=True)
    data = loaders(config.batch_size)
    test = data.pop("test")

    torch.manual_seed(config.seed)
    model = network(config.width)
    updates = config.epochs * len(data["train"])
    learning_rate = schedules.warmup_cosine(peak=config.learning_rate, warmup=updates // 10, total=updates)
    tx = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(learning_rate, weight_decay=config.weight_decay, mask=optim.decay_mask(model)),
    )
    # Augmentation is part of the step: its random numbers follow the state's key, on any device and after any resume.
    objective = ps.supervised(
        nn.CrossEntropyLoss(),
        metrics={"accuracy": metrics.accuracy},
        forward=lambda model, images: model(augment(images) if model.training else images),
    )
    average = ps.ema.average(config.ema, warmup=True)  # a short run: the first weights are soon forgotten
    program = ps.program(model, objective, tx, precision=config.precision, ema=average)
    program = ps.distribute(program, mesh, batchnorm="sync")

    result = ps.fit(
        program.init(seed=config.seed),
        data,
        program,
        epochs=config.epochs,
        device=config.device,
        monitor="val_loss",
        early_stopping=config.patience,
        snapshots=config.runs,
        compile=config.compile,
    )
    accuracy = ps.evaluate(result.state, test, program.eval_step)["accuracy"]
    if mesh.rank == 0:
        print(f"test accuracy {100 * accuracy:.1f} % (EMA)")
    return accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
