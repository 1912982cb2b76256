"""Two networks that train against each other on handwritten digits, in your own loop.

    python examples/gan.py                                # under a minute on two CPU cores
    python examples/gan.py --compile                      # all updates of a step in one graph
    torchrun --nproc-per-node 2 examples/gan.py           # each process has a part of every batch

A generator draws the digit that it is asked for, a critic tells drawings from scikit-learn's scans; each has its own
optimizer, schedule and count of updates, `ratio` of the critic's to one of the generator's. The judge is the classifier
of `digits.py`, trained first: expect it to recognise at least 70 % of the drawings as what was asked for, with a
confidence above 0.9. Run it again, and it continues.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import digits
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

import purestep as ps
from purestep import metrics, optim, schedules


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/gan")
    seed: int = 0
    epochs: int = 60
    batch_size: int = 64
    ratio: int = 2  # updates of the critic to one of the generator
    noise: int = 16
    width: int = 256
    learning_rate: float = 1e-3
    judge_epochs: int = 15
    compile: bool = False


class Rivals(NamedTuple):
    generator: ps.TrainState
    critic: ps.TrainState


class Network(nn.Sequential):
    """[batch, inputs] and a digit for each -> [batch, outputs]; BatchNorm gives each network its buffers."""

    def __init__(self, inputs: int, width: int, outputs: int, *, dropout: float = 0.0) -> None:
        first = nn.Linear(inputs + 10, width), nn.LeakyReLU(0.2), nn.Dropout(dropout)
        second = nn.Linear(width, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2), nn.Dropout(dropout)
        super().__init__(*first, *second, nn.Linear(width, outputs))

    def forward(self, inputs: Tensor, digit: Tensor) -> Tensor:
        return super().forward(torch.cat([inputs.flatten(1), one_hot(digit, 10)], dim=1))


def parts(batch: Any, count: int) -> list[Any]:
    """A batch of tensors in ``count`` batches; of one process's share, each has its part of these rows."""
    if isinstance(batch, ps.parallel.Share):
        return [ps.parallel.Share(part, batch.counts) for part in parts(batch.rows, count)]
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


def rivals(
    config: Config, updates: int, classify: Callable[[Tensor], Tensor], mesh: ps.parallel.Mesh | None = None
) -> ps.Program:
    """A program whose state is `Rivals`. Each objective gets the state of the other network as context: no gradient
    reaches it, and writes into its buffers are dropped."""
    everywhere = functools.partial(ps.distribute, mesh=mesh or ps.parallel.Mesh(), batchnorm="average")

    def draw(network: Callable[..., Tensor], digit: Tensor) -> Tensor:
        return network(torch.randn(len(digit), config.noise, device=digit.device), digit).sigmoid()

    def critic_loss_of(model: ps.Model, batch: tuple[Tensor, Tensor], generator_state: ps.TrainState) -> ps.Loss:
        scans, digit = batch
        real, fake = model(scans, digit), model(draw(generator.bind(generator_state, train=True), digit), digit)
        return ps.Loss((softplus(-real) + softplus(fake)).mean(), len(digit), {})

    def generator_loss_of(model: ps.Model, batch: tuple[Tensor, Tensor], critic_state: ps.TrainState) -> ps.Loss:
        fake = critic.bind(critic_state, train=True)(draw(model, batch[1]), batch[1])
        return ps.Loss(softplus(-fake).mean(), len(fake), {})

    torch.manual_seed(config.seed)
    rate, calls = config.learning_rate, config.ratio * updates
    falling, rising = schedules.cosine(rate, updates), schedules.warmup_cosine(rate, calls // 20, total=calls)
    generator = ps.program(
        Network(config.noise, config.width, 64), generator_loss_of, optim.adam(falling, b1=0.5), ema=0.99
    )
    critic = ps.program(Network(64, config.width, 1, dropout=0.1), critic_loss_of, optim.adamw(rising, b1=0.5))
    generator, critic = everywhere(generator), everywhere(critic)

    def train_step(state: Rivals, batch: Any) -> tuple[Rivals, ps.Metrics]:
        (generator_state, critic_state), merged = state, metrics.empty()
        for part in parts(batch, config.ratio):
            critic_state, critic_metrics = critic.train_step(critic_state, part, generator_state)
            merged = metrics.merge(merged, {"critic_loss": critic_metrics["loss"], "critic_lr": critic_metrics["lr"]})
        generator_state, generator_metrics = generator.train_step(generator_state, batch, critic_state)
        return Rivals(generator_state, critic_state), {
            "generator_loss": generator_metrics["loss"],
            "generator_lr": generator_metrics["lr"],
            **merged,
        }

    def eval_step(state: Rivals, batch: tuple[Tensor, Tensor]) -> ps.Metrics:
        images = generator.bind(state.generator)(*batch).sigmoid().view(-1, 1, 8, 8)
        sure = (classify(images).softmax(dim=1).gather(1, batch[1][:, None]) > 0.9).float()
        return {"recognised": ps.Mean(sure.sum(), torch.ones_like(sure).sum())}

    def init(seed: int = 0, device: str | None = None) -> Rivals:
        return Rivals(generator.init(seed, device), critic.init(seed + 1, device))

    return ps.Program(train_step, eval_step=eval_step, init=init, bind=generator.bind)


def judge(config: Config) -> Callable[[Tensor], Tensor]:
    """The classifier of `digits.py`, out of its snapshot: images [batch, 1, 8, 8] -> logits [batch, 10]."""
    digits.main(trained := digits.Config(config.runs / "judge", epochs=config.judge_epochs, precision="32-true"))
    program = ps.program(digits.network(trained.width), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.0), ema=0.9)
    snapshots = ps.Snapshots(trained.runs, writer=False)
    return program.bind(snapshots.restore(program.init(device=ps.auto_device()), only="params").state)


def main(config: Config) -> float:
    """Train, and return the share of drawings recognised as what was asked for, in [0, 1]."""
    classify = judge(config)
    with ps.parallel.start() as mesh:  # without torchrun: one process
        return train(config, classify, mesh)


def train(config: Config, classify: Callable[[Tensor], Tensor], mesh: ps.parallel.Mesh) -> float:
    data = digits.loaders(config.batch_size * config.ratio)["train"]
    program = rivals(config, config.epochs * len(data), classify, mesh)
    wishes = torch.randn(2000, config.noise, generator=torch.Generator().manual_seed(0)), torch.arange(2000) % 10
    step = ps.compile_step(program.train_step, donate=True) if config.compile else program.train_step
    show = print if mesh.rank == 0 else lambda text: None
    with ps.Snapshots(config.runs / "snapshots") as snapshots:  # the loop
        state, rows = program.init(config.seed, ps.auto_device()), []
        if snapshots.steps():
            _, state, rows, *_ = snapshots.restore(state)
        while len(rows) < config.epochs:
            state, merged = ps.run_epoch(state, data, step, epoch=len(rows), seed=config.seed)
            with torch.no_grad():  # every process scores the same drawings
                scores = metrics.compute(program.eval_step(state, ps.to_device(wishes, state)))
            rows.append({"epoch": len(rows) + 1, **metrics.compute(merged), **scores})
            show("  ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()))
            snapshots.save(len(rows), state, loop=rows)
    show(f"{int(state.generator.updates)} updates of the generator, {int(state.critic.updates)} of the critic")
    show(f"{100 * rows[-1]['recognised']:.0f} % of the drawings recognised with a confidence above 0.9")
    return rows[-1]["recognised"]


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
