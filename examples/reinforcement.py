"""Reinforcement learning in a loop without `fit`: a policy balances a pole, and a critic says how well it is doing.

    python examples/reinforcement.py                      # half a minute on one CPU core
    python examples/reinforcement.py --updates 20

The cart and its pole are a few lines of torch, 32 of them at once. An episode ends when the pole falls, the cart leaves
the track, or after 300 steps. Each update plays until all have ended, and learns from that: REINFORCE, with a critic as
its baseline (Williams, 1992). The loop calls pure steps; random numbers follow the state's key, so an interrupted
run continues with the same numbers. Expect a last line of about `300 of 300 steps without a draw`.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import purestep as ps
from purestep import metrics, optim

GRAVITY, CART, POLE, HALF, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02  # of Barto, Sutton and Anderson (1983)
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/reinforcement")
    fresh: bool = False
    seed: int = 0
    updates: int = 60
    carts: int = 32
    steps: int = 300
    width: int = 64
    learning_rate: float = 5e-3
    discount: float = 0.99
    entropy: float = 0.01  # the weight of the policy's entropy: without it, it stops trying too soon
    save_every: int = 10


def moved(carts: Tensor, right: Tensor) -> Tensor:
    """The carts 20 ms later. carts: [n, 4], place, speed, angle and angular speed; right: [n], bool."""
    place, speed, angle, turning = carts.unbind(1)
    push, total = torch.where(right, FORCE, -FORCE), CART + POLE
    sine, cosine = angle.sin(), angle.cos()
    common = (push + POLE * HALF * turning.square() * sine) / total
    spin = (GRAVITY * sine - cosine * common) / (HALF * (4 / 3 - POLE * cosine.square() / total))
    drive = common - POLE * HALF * spin * cosine / total
    return torch.stack([place, speed, angle, turning], 1) + SECONDS * torch.stack([speed, drive, turning, spin], 1)


def has_ended(carts: Tensor) -> Tensor:
    """[n], bool: off the track, or fallen by more than 12 degrees."""
    return (carts[:, 0].abs() > 2.4) | (carts[:, 2].abs() > math.radians(12))


class ActorCritic(nn.Module):
    """[n, 4] -> the logit of a push to the right [n], and the discounted steps that are left [n]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
            for _ in range(2)
        )

    def forward(self, carts: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(carts).squeeze(1), self.critic(carts).squeeze(1)


def objective(config: Config) -> ps.Objective:
    """Make what went better than the critic expected more likely, and the critic right."""

    def loss(model: ps.Model, batch: Batch) -> ps.Loss:
        logit, expected = model(batch["carts"])
        right, left = nn.functional.logsigmoid(logit), nn.functional.logsigmoid(-logit)
        chosen = torch.where(batch["right"], right, left)
        better = batch["returns"] - expected.detach() * 100
        better = (better - better.mean()) / (better.std() + 1e-6)
        policy = -(chosen * better).mean()
        critic = (expected - batch["returns"] / 100).square().mean()
        entropy = -(right * right.exp() + left * left.exp()).mean()
        weight = torch.tensor(float(len(logit)))
        parts = {"critic_loss": metrics.as_mean(critic, weight), "entropy": metrics.as_mean(entropy, weight)}
        return ps.Loss(policy + critic - config.entropy * entropy, weight, parts)

    return loss


@torch.no_grad()
def play(config: Config, program: ps.Program, state: ps.TrainState, *, greedy: bool = False) -> tuple[Batch, float]:
    """All that the carts saw and did until the last of them ended, and the steps of an episode on average."""
    model, generator = program.bind(state), ps.rng.generator(state.key, "greedy" if greedy else "play")
    carts = torch.rand(config.carts, 4, generator=generator) * 0.1 - 0.05
    observed, chosen, played = [], [], []
    running = torch.ones(config.carts, dtype=torch.bool)
    while running.any() and len(observed) < config.steps:
        logit, _ = model(carts)
        right = logit > 0 if greedy else torch.rand(config.carts, generator=generator) < logit.sigmoid()
        for values, value in ((observed, carts), (chosen, right), (played, running)):
            values.append(value)
        carts = moved(carts, right)
        running = running & ~has_ended(carts)
    returns, left = [], torch.zeros(config.carts)
    for kept in reversed(played):  # one for each step that is still to come, discounted
        left = kept * (1 + config.discount * left)
        returns.append(left)
    kept = torch.stack(played)
    batch = {"carts": torch.stack(observed), "right": torch.stack(chosen), "returns": torch.stack(returns[::-1])}
    return {name: value[kept] for name, value in batch.items()}, float(kept.sum() / config.carts)


def main(config: Config) -> tuple[float, float]:
    """Train; return the steps of an episode in the first update, and those of the policy without a draw."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    torch.manual_seed(config.seed)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(config.learning_rate))
    program = ps.program(ActorCritic(config.width), objective(config), tx)
    with ps.Snapshots(config.runs / "snapshots") as snapshots:
        state, rows = program.init(config.seed), []
        if snapshots.steps():
            _, state, rows, *_ = snapshots.restore(state)
        while len(rows) < config.updates:  # the loop
            batch, steps = play(config, program, state)
            state, parts = program.train_step(state, batch)
            rows.append({"update": len(rows) + 1, "steps": steps, **metrics.compute(parts)})
            if len(rows) % config.save_every == 0 or len(rows) == config.updates:
                print(f"update {len(rows)}: {steps:.0f} steps, entropy {rows[-1]['entropy']:.2f}")
                snapshots.save(len(rows), state, loop=rows)
    _, best = play(config, program, state, greedy=True)
    print(f"{best:.0f} of {config.steps} steps without a draw")
    return rows[0]["steps"], best


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
