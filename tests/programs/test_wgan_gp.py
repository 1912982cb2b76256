"""WGAN-GP (Gulrajani et al., 2017): a critic with a gradient penalty, several updates of it to one of the generator."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim

RATIO, PENALTY, STEPS, ROWS = 3, 10.0, 6, 32
Part = tuple[Tensor, Tensor, Tensor]  # points, noise, places between a point and a drawn one


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return generator, critic


def batches() -> list[list[Part]]:
    drawn = torch.Generator().manual_seed(1)

    def part() -> Part:
        angle = 2 * torch.pi * torch.rand(ROWS, 1, generator=drawn)
        points = torch.cat([angle.cos(), angle.sin()], dim=1)
        return points, torch.randn(ROWS, 2, generator=drawn), torch.rand(ROWS, 1, generator=drawn)

    return [[part() for _ in range(RATIO)] for _ in range(STEPS)]


def critic_loss(critic: Any, real: Tensor, fake: Tensor, at: Tensor) -> Tensor:
    between = (at * real + (1 - at) * fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return critic(fake).mean() - critic(real).mean() + PENALTY * penalty


# --- purestep ---------------------------------------------------------------------------------------------------------


class Rivals(NamedTuple):
    generator: ps.TrainState
    critic: ps.TrainState


def program() -> tuple[ps.Program, Rivals]:
    modules = networks()

    def tell_apart(model: ps.Model, batch: Part, maker: ps.TrainState) -> ps.Loss:
        real, noise, at = batch
        fake = generator.bind(maker, train=True)(noise)
        return ps.Loss(critic_loss(model, real, fake.detach(), at), len(real))

    def deceive(model: ps.Model, batch: Part, teller: ps.TrainState) -> ps.Loss:
        return ps.Loss(-critic.bind(teller, train=True)(model(batch[1])).mean(), len(batch[1]))

    def tx() -> optim.Transform:
        return optim.adam(1e-3, b1=0.5, b2=0.9)

    generator, critic = ps.program(modules[0], deceive, tx()), ps.program(modules[1], tell_apart, tx())

    def train_step(state: Rivals, batch: list[Part]) -> tuple[Rivals, ps.Metrics]:
        maker, teller = state
        found: ps.Metrics = {}
        for part in batch:
            teller, seen = critic.train_step(teller, part, maker)
            found = ps.metrics.merge(found, {"critic_loss": seen["loss"]})
        maker, seen = generator.train_step(maker, batch[-1], teller)
        return Rivals(maker, teller), {**found, "generator_loss": seen["loss"]}

    return ps.Program(train_step), Rivals(generator.init(), critic.init())


# --- the plain loop ---------------------------------------------------------------------------------------------------


def loop() -> tuple[nn.Module, nn.Module]:
    generator, critic = networks()
    drawing = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9))
    telling = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.9))
    for batch in batches():
        # What an objective passes through another network does not write that network's buffers.
        buffers = {name: value.clone() for name, value in generator.named_buffers()}
        for real, noise, at in batch:
            telling.zero_grad()
            critic_loss(critic, real, generator(noise).detach(), at).backward()
            telling.step()
            generator.load_state_dict(buffers, strict=False)
        drawing.zero_grad()
        (-critic(generator(batch[-1][1])).mean()).backward()
        drawing.step()
    return generator, critic


def test_it_is_the_plain_loop() -> None:
    made, state = program()
    result = ps.fit(state, {"train": batches()}, made, epochs=1, progress=False, device="cpu")
    for module, found in zip(loop(), result.state, strict=True):
        expected = {name: p.detach() for name, p in module.named_parameters()}
        assert_trees_close(found.params, expected, rtol=1e-4, atol=1e-6)
        assert_trees_close(found.buffers, dict(module.named_buffers()), rtol=1e-4, atol=1e-6)
    assert len(result.history["train_critic_loss"]) == 1


def test_one_graph_has_all_updates_of_a_step() -> None:
    made, state = program()
    step = ps.compile_step(made.train_step, backend="aot_eager")
    expected = state
    for batch in batches()[:2]:
        state, _ = step(state, batch)
        expected, _ = made.train_step(expected, batch)
    for found, wanted in zip(state, expected, strict=True):
        assert_trees_close(ps.clone(found).params, wanted.params, rtol=1e-4, atol=1e-6)
