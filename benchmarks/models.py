"""The models, in plain torch. B batch, T tokens, D width, H heads, V vocabulary."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(sizes: list[int]) -> nn.Sequential:
    """Linear layers with a tanh between; [B, sizes[0]] -> [B, sizes[-1]]."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (before, after) in enumerate(itertools.pairwise(sizes)):
        if index:
            layers[f"act{index}"] = nn.Tanh()
        layers[f"lin{index}"] = nn.Linear(before, after)
    return nn.Sequential(layers)


class ConvNet(nn.Module):
    """3x3 convolutions with BatchNorm, each but the first halving the image; [B, 3, S, S] -> [B, 10]."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = enumerate(zip((3, *widths), widths, strict=False))
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2 if index else 1, padding=1, bias=False)
            for index, (before, after) in pairs
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
        return self.head(x.mean(dim=(2, 3)))


class Block(nn.Module):
    """Attention, then a network of one hidden layer, each on the normalized input and added to it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BTD)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).flatten(2))
        return x_BTD + self.down(functional.gelu(self.up(self.norm2(x_BTD)), approximate="tanh"))


class Vectors(nn.Module):
    """Many small parameters and next to no arithmetic; [B, count * size] -> [B, 2]."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(size) / size for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        logit = x @ torch.cat(list(self.vectors))
        return torch.stack([logit, -logit], dim=1)


class GPTSize(NamedTuple):
    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int


class GPT(nn.Module):
    """GPT-2: learned positions, the embedding is also the head; tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads, causal=True) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        _initialized(self)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return functional.linear(self.norm(x_BTD), self.token.weight)


class ViT(nn.Module):
    """Patches as tokens, their mean as the image; [B, 3, S, S] -> [B, classes]."""

    def __init__(self, *, size: int, patch: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        _initialized(self)

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD).mean(dim=1))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions round a shortcut, as ResNet v1.5 has them (the stride is in the 3x3)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        shortcut = [nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)]
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """[B, 3, 224, 224] -> [B, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, stride=2, padding=1))
        blocks: list[nn.Module] = []
        before = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            width = 64 * 2**stage
            for index in range(count):
                blocks.append(Bottleneck(before, width, 2 if stage and not index else 1))
                before = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def _initialized(model: nn.Module) -> None:
    """Normal weights of deviation 0.02, as GPT-2: with torch's own, tied logits start tens apart."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
