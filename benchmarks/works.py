"""What is trained: a model with seeded weights, batches, and the recipe that every contestant follows.

Every model is plain torch and every task is classification, so that one loss serves all of them. Sizes: B batch,
T context, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import models

Batch = tuple[Tensor, Tensor]  # inputs, classes


class Recipe(NamedTuple):
    """AdamW with decay on matrices, clipping by global norm, EMA: the same numbers for everybody."""

    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    ema: float = 0.999


class Work(NamedTuple):
    """One thing to train."""

    name: str
    about: str  # a line for the tables
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    flax: bool = True  # whether the same model is in contestants/flax_models.py
    bf16: bool = False  # matrix products in bfloat16, weights in float32
    tokens: int = 0  # in a batch, for tokens/s
    count: int = 4  # different batches, taken in turn
    seconds: float = 60.0  # to measure for
    tolerance: float = 1e-3  # of the first losses, relative
    drift: float = 0.02  # how far weights may be off after them, as a share of the way they have come
    recipe: Recipe = Recipe()


def seeded_model(work: Work, device: torch.device | str = "cpu") -> nn.Module:
    """The model, with the same weights at every call; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return work.model().to(device)


def batches(work: Work, device: torch.device | str = "cpu") -> list[Batch]:
    """The same batches at every call."""
    generator = torch.Generator().manual_seed(1)
    made = [work.batch(generator) for _ in range(work.count)]
    return [(inputs.to(device), classes.to(device)) for inputs, classes in made]


def loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Mean cross entropy over everything but the last dimension, in float32."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), classes.flatten())


def decays(parameter: Tensor) -> bool:
    """Weight decay is for matrices and larger: not for biases and norms."""
    return parameter.dim() >= 2


def vectors(rows: int, features: int, classes: int) -> Callable[[torch.Generator], Batch]:
    """Batches of random vectors and classes."""

    def batch(generator: torch.Generator) -> Batch:
        inputs = torch.randn(rows, features, generator=generator)
        return inputs, torch.randint(classes, (rows,), generator=generator)

    return batch


def images(rows: int, size: int, classes: int) -> Callable[[torch.Generator], Batch]:
    """Batches of random colour images and classes."""

    def batch(generator: torch.Generator) -> Batch:
        inputs = torch.randn(rows, 3, size, size, generator=generator)
        return inputs, torch.randint(classes, (rows,), generator=generator)

    return batch


def text(rows: int, context: int, vocabulary: int) -> Callable[[torch.Generator], Batch]:
    """Batches of random tokens, and what follows each."""

    def batch(generator: torch.Generator) -> Batch:
        text = torch.randint(vocabulary, (rows, context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


def _works() -> dict[str, Work]:
    fast = Recipe(learning_rate=1e-3)
    small = models.GPTSize(vocabulary=256, context=128, width=128, heads=4, layers=4)
    medium = models.GPTSize(vocabulary=4096, context=128, width=512, heads=8, layers=10)
    gpt2 = models.GPTSize(vocabulary=50304, context=1024, width=768, heads=12, layers=12)
    found = [
        Work(
            "mlp",
            "64-64-64-10, 6 tensors, batch 64",
            lambda: models.mlp([64, 64, 64, 10]),
            vectors(64, 64, 10),
            drift=3e-3,  # so little that a missing weight decay is seen
            seconds=40,
            recipe=fast,
        ),
        Work(
            "toy32",
            "32 layers of 16 units, 64 tensors, batch 16",
            lambda: models.mlp([16] * 32 + [10]),
            vectors(16, 16, 10),
            seconds=40,
            recipe=fast,
        ),
        Work(
            "convnet",
            "4 convolutions with BatchNorm, 0.3 M, 32 images of 32x32",
            lambda: models.ConvNet((32, 64, 128, 128)),
            images(32, 32, 10),
            # A convolution's sum in another order, through BatchNorm, is a visible difference.
            tolerance=5e-3,
            drift=0.05,
            recipe=fast,
        ),
        Work(
            "gpt-small",
            "0.9 M, 8 x 128 tokens",
            lambda: models.GPT(small),
            text(8, 128, 256),
            tokens=8 * 128,
            seconds=120,
            recipe=fast,
        ),
        Work(
            "gpt-medium",
            "34 M, 2 x 128 tokens",
            lambda: models.GPT(medium),
            text(2, 128, 4096),
            tokens=2 * 128,
            seconds=180,
        ),
        Work(
            "vit",
            "2.7 M, 16 images of 32x32 in patches of 4",
            lambda: models.ViT(size=32, patch=4, width=192, heads=3, layers=6, classes=10),
            images(16, 32, 10),
            seconds=90,
        ),
        Work(
            "gpt2",
            "GPT-2 124 M, 16 x 1024 tokens, bfloat16",
            lambda: models.GPT(gpt2),
            text(16, 1024, 50304),
            bf16=True,
            tokens=16 * 1024,
            tolerance=2e-2,
            drift=0.2,
        ),
        Work(
            "resnet50",
            "ResNet-50, 64 images of 224x224, bfloat16",
            models.ResNet50,
            images(64, 224, 1000),
            flax=False,
            bf16=True,
            tolerance=3e-2,
            # Gradients of bfloat16 through 50 BatchNorms are noise in the first steps: compiled by hand, the weights
            # are off by more than their way from eager ones. So the losses and the length of the way are compared.
            drift=2.0,
        ),
    ]
    return {work.name: work for work in found}


WORKS = _works()
