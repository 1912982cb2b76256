"""Small models of plain torch, each of another kind, and what makes a row of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps

from .compare import Entry

CLASSES = 3


def labelled(name: str, library: str, make: Callable[[], nn.Module], shape: tuple[int, ...] = (3, 8, 8)) -> Entry:
    """A classifier of pictures or vectors: cross entropy of ``model(x)``."""

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, *shape, generator=generator)
        return x, torch.randint(CLASSES, (rows,), generator=generator)

    def loss(model: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Entry(name, library, make, batch, loss, ps.supervised(nn.CrossEntropyLoss()))


def own_loss(
    name: str,
    make: Callable[[], nn.Module],
    batch: Callable[[int, torch.Generator], Any],
    library: str = "transformers",
) -> Entry:
    """A model that returns its loss for a batch of keyword arguments."""

    def loss(model: Any, batch: Any) -> Tensor:
        outputs = model(**batch)
        return outputs.loss if hasattr(outputs, "loss") else outputs[0]

    return Entry(name, library, make, batch, loss, ps.hf_loss(weight=lambda batch: 1.0))


class Residual(nn.Module):
    """A convolution with BatchNorm beside the identity."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, groups=2),
            nn.BatchNorm2d(width, momentum=0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.inner(x), inplace=True)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32, CLASSES),
    )


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class Recurrent(nn.Module):
    """An embedding, an LSTM with dropout between its layers, and a GRU in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.gru = nn.GRU(8, 6, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(self.gru(hidden)[0].mean(1))


def recurrent() -> Entry:
    entry = labelled("LSTM and GRU", "torch", Recurrent)

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(30, (rows, 6), generator=generator)
        return tokens, torch.randint(CLASSES, (rows,), generator=generator)

    return entry._replace(batch=batch)


class DeadDraws(nn.Module):
    """Draws masks that nobody uses, as CANINE does, and asserts what it is given, as XLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 3
        functional.dropout(x, 0.5, self.training)
        torch.rand(3)
        turned = functional.dropout(x.transpose(1, 2), 0.2, self.training).transpose(1, 2)
        return self.head(self.inner(turned).mean(1))


class ConvNext(nn.Module):
    """A depthwise convolution, LayerNorm over the last dimension, a scale for each channel, stochastic depth."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.down(functional.gelu(self.up(self.norm(h)))) * self.scale
        keep = x.new_empty(len(x), 1, 1, 1).bernoulli_(0.8) / 0.8 if self.training else 1.0
        return self.head((x + h.permute(0, 3, 1, 2) * keep).mean((2, 3)))


PLAIN = [
    labelled("CNN with BatchNorm", "torch", cnn),
    labelled("ResNet", "torch", resnet),
    recurrent(),
    labelled("dead draws and asserts", "torch", DeadDraws, (5, 8)),
    labelled("ConvNeXt", "torch", ConvNext),
]
