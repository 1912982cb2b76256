"""Functions that run in every process of a group: they save, restore and export states in pieces."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from saving import bits
from torch import Tensor, nn

import purestep as ps
from purestep import errors, optim
from purestep.parallel import mesh as meshes
from purestep.parallel import placement

KINDS = ("shard", "replicate", "rules")


class Net(nn.Module):
    """Odd sizes, a tied head, a scalar, a frozen part, a convolution in channels_last, a buffer, one row of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 7, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.ones(1, 5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("seen", torch.arange(3.0))
        self.brief = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).mean(1) * self.scale + self.row + self.brief.float().sum(0)
        image = hidden[:, :4].reshape(-1, 1, 2, 2).expand(-1, 3, 2, 2)
        return self.head(self.frozen(hidden)) + self.conv(image).mean((1, 2, 3))[:, None]


def program(accumulate: int = 3) -> ps.Program:
    torch.manual_seed(0)
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    return ps.program(Net(), ps.supervised(nn.CrossEntropyLoss()), tx, ema=0.9, accumulate=accumulate)


def distributed(mesh: ps.parallel.Mesh, kind: str, accumulate: int = 3) -> ps.Program:
    rules: Any = {"rules": [("conv|brief", "shard")], "shard": "shard"}
    return ps.distribute(program(accumulate), mesh, params="replicate" if mesh.shard == 1 else rules[kind])


def trained(own: ps.Program, mesh: ps.parallel.Mesh, calls: int = 5) -> Any:
    """A state after some calls: with ``accumulate=3`` a window is open."""
    assert own.init is not None
    state = own.init(seed=3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(calls):
        rows = torch.randint(0, 11, (6, 4), generator=generator)
        state = step(own, state, mesh, rows)
    return state


def step(own: ps.Program, state: Any, mesh: ps.parallel.Mesh, rows: Tensor) -> Any:
    batch = rows, rows[:, 0]
    return own.train_step(state, ps.parallel.share(batch, mesh) if mesh.size > 1 else batch)[0]


def digest(state: Any) -> str:
    """Of paths and bits of a whole state."""
    found = hashlib.sha256()
    for path, leaf in ps.tree.with_paths(state):
        found.update(f"{path} {leaf.dtype} {tuple(leaf.shape)} ".encode() + bits(leaf))
    return found.hexdigest()


def meshes_of(world: int, kind: str) -> dict[str, int]:
    if kind == "replicate":
        return {}
    return {"shard": 2 if world == 4 else world}  # of four processes: hybrid


def write(root: str, kind: str) -> str:
    """Save a trained state; returns the digest of the whole."""
    world = int(os.environ["WORLD_SIZE"])
    with ps.parallel.start(timeout=60, **meshes_of(world, kind)) as mesh:
        own = distributed(mesh, kind)
        state = trained(own, mesh)
        with ps.Snapshots(root) as snapshots:
            snapshots.save(int(state.step), state, loop={"rank": mesh.rank}, metrics={"loss": 0.5})
            snapshots.wait()
            assert snapshots.steps() == [int(state.step)]
        return digest(ps.full(state))


def read(root: str, kind: str) -> str:
    """Restore the newest step into another state; returns the digest of the whole."""
    world = int(os.environ["WORLD_SIZE"])
    with ps.parallel.start(timeout=60, **meshes_of(world, kind)) as mesh:
        own = distributed(mesh, kind)
        assert own.init is not None
        template = own.init(seed=7)
        found = ps.Snapshots(root, writer=False).restore(template)
        assert found.loop == {"rank": 0}
        assert ps.tree.flatten(found.state)[1] == ps.tree.flatten(template)[1]
        for (path, leaf), like in zip(ps.tree.with_paths(found.state), ps.tree.leaves(template), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.stride()) == (like.shape, like.dtype, like.stride()), path
        step(own, found.state, mesh, torch.zeros(6, 4, dtype=torch.int64))
        return digest(ps.full(found.state))
