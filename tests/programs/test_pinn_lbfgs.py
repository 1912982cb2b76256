"""A physics-informed network (Raissi et al., 2019) for Burgers' equation, by L-BFGS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import metrics, optim

STEPS = 4
OPTIONS: Any = {"max_iter": 10, "history_size": 20, "tolerance_grad": 1e-9, "line_search_fn": "strong_wolfe"}
Batch = dict[str, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def points() -> Batch:
    """Inside of the domain, and on its border with the values there: u(0, x) = -sin(pi x), u(t, +-1) = 0."""
    drawn = torch.Generator().manual_seed(1)
    inside = torch.rand(64, 2, dtype=torch.float64, generator=drawn) * torch.tensor([1.0, 2.0]) - torch.tensor([0, 1.0])
    x = torch.linspace(-1, 1, 33, dtype=torch.float64)[:, None]
    t = torch.linspace(0, 1, 17, dtype=torch.float64)[:, None]
    border = torch.cat([torch.cat([0 * x, x], 1), torch.cat([t, 0 * t + 1], 1), torch.cat([t, 0 * t - 1], 1)])
    values = torch.cat([-(torch.pi * x).sin(), torch.zeros(34, 1, dtype=torch.float64)])
    return {"inside": inside, "border": border, "values": values}


def losses(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The squared residual of u_t + u u_x = nu u_xx, and the squared error on the border."""
    t, x = (batch["inside"][:, [at]].detach().requires_grad_() for at in (0, 1))
    u = model(torch.cat([t, x], dim=1))

    def by(of: Tensor, what: Tensor) -> Tensor:
        return torch.autograd.grad(of.sum(), what, create_graph=True)[0]

    slope = by(u, x)
    residual = by(u, t) + u * slope - 0.01 / torch.pi * by(slope, x)
    return residual.square().mean(), (model(batch["border"]) - batch["values"]).square().mean()


def objective(model: ps.Model, batch: Batch) -> ps.Loss:
    inside, border = losses(model, batch)
    return ps.Loss(inside + border, 1, {"border": metrics.as_mean(border)})


def loop() -> tuple[nn.Module, list[float]]:
    module, batch, seen = network(), points(), []
    optimizer = torch.optim.LBFGS(module.parameters(), 1.0, **OPTIONS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(losses(module, batch))
        loss.backward()
        return loss

    for _ in range(STEPS):
        seen.append(float(optimizer.step(closure).detach()))
    return module, seen


def test_it_ends_where_the_plain_loop_does_to_the_bit(tmp_path: Path) -> None:
    program = ps.program(network(), objective, optim.lbfgs(1.0, **OPTIONS))
    run: Any = {"progress": False, "device": "cpu", "snapshots": tmp_path}
    ps.fit(program.init(), [points()], program, epochs=2, **run)
    result = ps.fit(program.init(), [points()], program, epochs=STEPS, **run)  # goes on where it stopped
    module, seen = loop()
    assert_trees_close(result.state.params, {name: p.detach() for name, p in module.named_parameters()}, exact=True)
    torch.testing.assert_close(torch.tensor(result.history["train_loss"]), torch.tensor(seen), rtol=1e-6, atol=0.0)
    assert result.history["train_border"][-1] < 0.6 * result.history["train_border"][0]
