"""What the tests of derivatives share: a small transformer, its data, and programs in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import purestep as ps

CROSS_ENTROPY = ps.supervised(nn.CrossEntropyLoss())


class TinyGPT(nn.Module):
    """Two blocks of causal attention with dropout; the head is tied to the embedding."""

    def __init__(self, drop: Any = lambda: nn.Dropout(0.2), vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Block(nn.Module):
    def __init__(self, width: int, drop: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), drop())
        self.drop = drop()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norm2(x))


def program(net: nn.Module, objective: Any = CROSS_ENTROPY, **kwargs: Any) -> ps.Program:
    with ps.rng.scoped(0):
        return ps.program(net, objective, ps.optim.sgd(1.0), **{"precision": "64-true", **kwargs})


def texts(rows: int = 5, length: int = 7) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:].clone()


def text_objective(model: ps.Model, batch: Any) -> ps.Loss:
    targets = batch[1].flatten()
    loss = nn.functional.cross_entropy(model(batch[0]), targets, ignore_index=-100)
    return ps.Loss(loss, (targets != -100).sum())
