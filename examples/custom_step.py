"""Your own step and state: two networks that train against each other, through the same `fit`.

    python examples/custom_step.py                        # half a minute on one CPU core
    python examples/custom_step.py --compile              # both updates in one graph

A generator turns noise into points, a critic tells them from real ones: points on a ring, in eight clusters. The state
is a NamedTuple of two TrainStates and the step calls two train steps; `fit`, snapshots and compiling take both as they
are. Expect all eight clusters to be found, with most points within three standard deviations of one.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim

SPREAD = 0.05  # standard deviation of a cluster


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/custom_step")
    fresh: bool = False
    seed: int = 0
    epochs: int = 40
    points: int = 16_384
    batch_size: int = 256
    width: int = 64
    learning_rate: float = 1e-3
    device: str | None = None
    compile: bool = False


class Rivals(NamedTuple):
    generator: ps.TrainState
    critic: ps.TrainState


def clusters(device: torch.device | str = "cpu") -> Tensor:
    """The eight centres, on the unit circle. [8, 2]"""
    angle = torch.arange(8, device=device) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def ring(points: int, seed: int) -> TensorDataset:
    """Points round the centres. [points, 2]"""
    generator = torch.Generator().manual_seed(seed)
    centres = clusters()[torch.randint(8, (points,), generator=generator)]
    return TensorDataset(centres + SPREAD * torch.randn(points, 2, generator=generator))


def perceptron(width: int, outputs: int) -> nn.Module:
    """[batch, 2] -> [batch, outputs]."""
    hidden = [nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def loss(mean: Tensor, batch: tuple[Tensor]) -> ps.Loss:
    return ps.Loss(mean, torch.full_like(mean.detach(), len(batch[0])), {})


def rivals(config: Config) -> ps.Program:
    """A program whose state is `Rivals`: what each objective needs of the other network arrives as its context."""

    def critic_loss_of(model: ps.Model, batch: tuple[Tensor], generator_state: ps.TrainState) -> ps.Loss:
        (real,) = batch
        fake = generator.bind(generator_state, view="params")(torch.randn_like(real))
        return loss(softplus(-model(real)).mean() + softplus(model(fake)).mean(), batch)

    def generator_loss_of(model: ps.Model, batch: tuple[Tensor], critic_state: ps.TrainState) -> ps.Loss:
        fake = model(torch.randn_like(batch[0]))
        return loss(softplus(-critic.bind(critic_state, train=True)(fake)).mean(), batch)

    torch.manual_seed(config.seed)
    adam = optim.adam(config.learning_rate, b1=0.5, b2=0.99)
    generator = ps.program(perceptron(config.width, 2), generator_loss_of, adam, ema=0.99)
    critic = ps.program(perceptron(config.width, 1), critic_loss_of, adam)

    def train_step(state: Rivals, batch: tuple[Tensor]) -> tuple[Rivals, ps.Metrics]:
        critic_state, critic_metrics = critic.train_step(state.critic, batch, state.generator)
        generator_state, generator_metrics = generator.train_step(state.generator, batch, critic_state)
        return Rivals(generator_state, critic_state), {
            "loss": generator_metrics["loss"],
            "critic_loss": critic_metrics["loss"],
            "applied": generator_metrics["applied"],
        }

    def eval_step(state: Rivals, batch: tuple[Tensor], index: int = 0) -> ps.Metrics:
        """Of the points that the averaged generator makes of this noise, the share near a cluster; clusters found."""
        (noise,) = batch
        distance, cluster = torch.cdist(generator.bind(state.generator)(noise), clusters(noise.device)).min(1)
        near = (distance < 3 * SPREAD).float()  # three standard deviations
        share = (one_hot(cluster, 8) * near.unsqueeze(1)).mean(dim=0)
        found = (share > 1 / 80).float().sum()  # a tenth of what each should have
        return {"near": ps.Mean(near.sum(), torch.ones_like(near).sum()), "clusters": ps.Mean(found, near.new_ones(()))}

    def init(seed: int = 0, device: torch.device | str | None = None) -> Rivals:
        return Rivals(generator.init(seed, device), critic.init(seed + 1, device))

    return ps.Program(train_step=train_step, eval_step=eval_step, init=init)


def main(config: Config) -> float:
    """Train, and return the share of generated points that are near a cluster, in [0, 1]."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    program = rivals(config)
    loaders = {
        "train": DataLoader(ring(config.points, seed=0), config.batch_size, shuffle=True, drop_last=True),
        "val": [(torch.randn(4096, 2, generator=torch.Generator().manual_seed(1)),)],
    }
    result = ps.fit(
        program.init(config.seed),
        loaders,
        program,
        epochs=config.epochs,
        device=config.device,
        monitor="val_near",
        mode="max",
        evaluate_on="params",  # the step chooses its weights itself
        snapshots=config.runs,
        compile=config.compile,
    )
    scores = ps.evaluate(result.state, loaders["val"], program.eval_step)
    print(f"{scores['clusters']:.0f} of 8 clusters found, {100 * scores['near']:.0f} % of the points near one")
    return scores["near"]


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
