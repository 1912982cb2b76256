"""PPO (Schulman et al., 2017) on a small game; each step hands out ratios and values of its rows."""

from __future__ import annotations

from typing import Any

import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import metrics, optim

CLIP, ITERATIONS, EPOCHS, ROWS, PARTS = 0.2, 3, 2, 64, 4
GAMMA, LAMBDA = 0.99, 0.95
Batch = dict[str, Tensor]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return ActorCritic()


@torch.no_grad()
def play(model: Any, generator: torch.Generator) -> Batch:
    """Walkers on a line go left, stay or go right, and are paid for being near the middle."""
    at, kept = torch.randn(8, 2, generator=generator), []
    for _ in range(ROWS // 8):
        logits, value = model(at)
        action = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
        moved = torch.stack([at[:, 0] + 0.3 * (action - 1), at[:, 1]], dim=1)
        kept.append((at, action, logits.log_softmax(dim=1)[torch.arange(8), action], value, -moved[:, 0].square()))
        at = moved
    seen, actions, log_probs, values, rewards = (torch.stack(each) for each in zip(*kept, strict=True))
    last, advantages, after = torch.zeros(8), [], model(at)[1]
    for t in reversed(range(len(rewards))):  # generalized advantage estimation
        last = rewards[t] + GAMMA * after - values[t] + GAMMA * LAMBDA * last
        after = values[t]
        advantages.append(last)
    advantage = torch.stack(advantages[::-1])
    columns = {"seen": seen, "action": actions, "log_prob": log_probs, "advantage": advantage,
               "return": advantage + values}  # fmt: skip
    return {name: column.flatten(0, 1) for name, column in columns.items()}


def parts(rows: Batch, generator: torch.Generator) -> list[Batch]:
    order = torch.randperm(ROWS, generator=generator)
    return [{name: column[index] for name, column in rows.items()} for index in order.chunk(PARTS)]


def ppo_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    logits, value = model(batch["seen"])
    log_probs = logits.log_softmax(dim=1)
    ratio = (log_probs[torch.arange(len(logits)), batch["action"]] - batch["log_prob"]).exp()
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = -(log_probs.exp() * log_probs).sum(dim=1).mean()
    return policy + 0.5 * (value - batch["return"]).square().mean() - 0.01 * entropy, ratio, value


def objective(model: ps.Model, batch: Batch) -> ps.Loss:
    loss, ratio, value = ppo_loss(model, batch)
    clipped = ((ratio - 1).abs() > CLIP).float().mean()
    return ps.Loss(
        loss, len(ratio), {"clipped": metrics.as_mean(clipped, len(ratio))}, {"ratio": ratio, "value": value}
    )


def loop() -> tuple[nn.Module, list[Tensor]]:
    module, generator, ratios = network(), torch.Generator().manual_seed(1), []
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3, eps=1e-5)
    for _ in range(ITERATIONS):
        rows = play(module, generator)
        for _ in range(EPOCHS):
            for batch in parts(rows, generator):
                optimizer.zero_grad()
                loss, ratio, _ = ppo_loss(module, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                ratios.append(ratio.detach())
    return module, ratios


def trained(compiled: bool) -> tuple[ps.TrainState, list[Tensor], ps.Metrics]:
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adam(3e-3, eps=1e-5))
    program = ps.program(network(), objective, tx)
    step: Any = ps.compile_step(program.train_step, backend="aot_eager") if compiled else program.train_step
    generator, ratios, total = torch.Generator().manual_seed(1), [], metrics.empty()
    state = program.init()
    for _ in range(ITERATIONS):
        rows = play(program.bind(state), generator)
        for _ in range(EPOCHS):
            for batch in parts(rows, generator):
                state, found = step(state, batch)
                ratios.append(metrics.outputs(found)["ratio"])
                total = metrics.merge(total, found)
    return ps.clone(state), ratios, total


def check(compiled: bool) -> None:
    (state, found, total), (module, expected) = trained(compiled), loop()
    assert_trees_close(state.params, {name: p.detach() for name, p in module.named_parameters()}, rtol=1e-4, atol=1e-6)
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0], torch.ones_like(found[0]))  # the policy that has played
    share = torch.cat([((ratio - 1).abs() > CLIP).float() for ratio in expected]).mean()
    torch.testing.assert_close(total["clipped"].compute(), share)


def test_it_is_the_plain_loop() -> None:
    check(compiled=False)


def test_a_compiled_step_hands_out_the_same() -> None:
    check(compiled=True)
