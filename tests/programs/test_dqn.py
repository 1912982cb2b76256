"""Deep Q-learning with a target network in the objective's closure, copied every few updates: as a loop by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps

Batch = dict[str, Tensor]
STEPS, EVERY, GAMMA, RATE = 24, 6, 0.9, 0.05


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def replayed() -> list[Batch]:
    """Samples of a replay buffer."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "seen": torch.rand(16, 4, generator=draw),
            "next": torch.rand(16, 4, generator=draw),
            "action": torch.randint(0, 2, (16, 1), generator=draw),
            "reward": torch.rand(16, generator=draw),
            "done": (torch.rand(16, generator=draw) < 0.2).float(),
        }
        for _ in range(STEPS)
    ]


def error(online: Any, target: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        aim = batch["reward"] + GAMMA * target(batch["next"]).amax(1) * (1 - batch["done"])
    return nn.functional.mse_loss(online(batch["seen"]).gather(1, batch["action"])[:, 0], aim)


def by_hand() -> list[float]:
    online, losses = network(), list[float]()
    target, optimizer = copy.deepcopy(online), torch.optim.SGD(online.parameters(), lr=RATE)
    for number, batch in enumerate(replayed()):
        loss = error(online, target, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number % EVERY == EVERY - 1:
            target.load_state_dict(online.state_dict())
    return losses


def in_place(target: nn.Module, state: Any) -> None:
    ps.load_into(target, state)


def by_data(target: nn.Module, state: Any) -> None:
    for name, weight in target.named_parameters():
        weight.data.copy_(state.params[name])


def assigned(target: nn.Module, state: Any) -> None:
    target.load_state_dict({name: value.clone() for name, value in state.params.items()}, assign=True)


STEPS_OF: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "compiled": lambda step: ps.compile_step(step, backend="aot_eager"),
    "donated": lambda step: ps.compile_step(step, backend="aot_eager", donate=True),
}


@pytest.mark.compile
@pytest.mark.parametrize("update", [in_place, by_data, assigned])
@pytest.mark.parametrize("how", STEPS_OF)
def test_the_target_network_is_read_at_every_call(how: str, update: Callable[[nn.Module, Any], None]) -> None:
    online = network()
    target = copy.deepcopy(online).requires_grad_(False)

    def objective(model: Any, batch: Batch) -> ps.Loss:
        return ps.Loss(error(model, target, batch), len(batch["reward"]))

    program = ps.program(online, objective, ps.optim.sgd(RATE))
    step, state, losses = STEPS_OF[how](program.train_step), program.init(), list[float]()
    for number, batch in enumerate(replayed()):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if number % EVERY == EVERY - 1:
            update(target, state)
    assert losses == pytest.approx(by_hand(), rel=1e-4)
    assert losses != pytest.approx(by_hand()[:EVERY] * (STEPS // EVERY), rel=1e-2)
