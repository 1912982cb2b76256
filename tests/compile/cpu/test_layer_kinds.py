"""Common kinds of layers, each of which becomes native code: inductor's slower front door is for unusual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import codecache, config

import purestep as ps

pytestmark = pytest.mark.compile


class Written(BaseException):
    """The C++ of a step is complete: it need not be built to know that it can be written."""


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was given up, and why."""
    found: list[str] = []

    def stop(*_: Any, **__: Any) -> Any:
        raise Written

    def no_code(_: Any, error: Exception) -> None:
        found.append(f"native code: {error!r}")
        raise Written from error  # inductor's public entry takes a minute

    monkeypatch.setattr("purestep.compile.capture.warn_fallback", no_code)
    monkeypatch.setattr(codecache.AotCodeCompiler, "compile", stop)
    return found


class First(nn.Module):
    """The first of what a layer returns; query, key and value are one tensor."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(*[x] * self.times)
        return found[0] if isinstance(found, tuple) else found


def image(*layers: nn.Module, channels: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def line(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())


def volume(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool3d(1), nn.Flatten())


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "max pool": lambda: image(nn.MaxPool2d(2)),
    "overlapping max pool": lambda: image(nn.MaxPool2d(3, 2, 1)),
    "average pool": lambda: image(nn.AvgPool2d(2)),
    "adaptive max pool": lambda: image(nn.AdaptiveMaxPool2d(2)),
    "power pool": lambda: image(nn.LPPool2d(2, 2)),
    "batch norm": lambda: image(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)),
    "group norm": lambda: image(nn.GroupNorm(4, 8), nn.Conv2d(8, 4, 3, padding=1)),
    "instance norm": lambda: image(nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 4, 3)),
    "local response norm": lambda: image(nn.LocalResponseNorm(2)),
    "strides and groups": lambda: image(nn.Conv2d(8, 8, 3, 2, groups=4), nn.GELU(), nn.Conv2d(8, 8, 1)),
    "depthwise": lambda: image(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU(), nn.Conv2d(8, 16, 1)),
    "dilation": lambda: image(nn.Conv2d(8, 8, 3, dilation=2)),
    "padding by reflection": lambda: image(nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")),
    "padding by repetition": lambda: image(nn.ReplicationPad2d(1), nn.Conv2d(8, 8, 3)),
    "transposed": lambda: image(nn.ConvTranspose2d(8, 8, 2, 2)),
    "nearest upsampling": lambda: image(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3)),
    "bilinear upsampling": lambda: image(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 8, 3)),
    "pixel shuffle": lambda: image(nn.PixelShuffle(2), nn.Conv2d(2, 4, 3)),
    "unfolded": lambda: nn.Sequential(nn.Unfold(2), nn.Flatten(), nn.LazyLinear(4)),
    "dropout of channels": lambda: image(nn.Dropout2d(0.5), nn.Conv2d(8, 8, 3)),
    "weight norm": lambda: image(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))),
}
OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: line(nn.BatchNorm1d(8), nn.MaxPool1d(2), nn.Conv1d(8, 8, 3)), (2, 3, 12)),
    "average of 1d": (lambda: line(nn.AvgPool1d(2), nn.ConvTranspose1d(8, 4, 2)), (2, 3, 12)),
    "conv3d": (lambda: volume(nn.BatchNorm3d(8), nn.Conv3d(8, 4, 2)), (2, 3, 4, 4, 4)),
    "average of 3d": (lambda: volume(nn.AvgPool3d(2)), (2, 3, 4, 4, 4)),
    "max of 3d": (lambda: volume(nn.MaxPool3d(2)), (2, 3, 4, 4, 4)),
    "linear": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)),
        (3, 4),
    ),
    "rms norm": (lambda: nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8)), (3, 4)),
    "gated": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.PReLU()), (3, 4)),
    "bilinear": (lambda: First(nn.Bilinear(4, 4, 3), 2), (3, 4)),
    "lstm": (lambda: First(nn.LSTM(4, 5, batch_first=True)), (2, 3, 4)),
    "lstm in both directions": (lambda: First(nn.LSTM(4, 5, bidirectional=True)), (3, 2, 4)),
    "gru of two layers": (lambda: First(nn.GRU(4, 5, num_layers=2)), (3, 2, 4)),
    "rnn": (lambda: First(nn.RNN(4, 5)), (3, 2, 4)),
    "attention": (lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), 3), (2, 3, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 3, 4)),
    "encoder, norm first": (lambda: nn.TransformerEncoderLayer(4, 2, 8, norm_first=True, activation="gelu"), (2, 3, 4)),
    "decoder": (lambda: First(nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True), 2), (2, 3, 4)),
}
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2)),
    "embedding with padding": lambda: nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 2)),
    "bag": lambda: nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 2)),
    "bag of sums": lambda: nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 2)),
}

CHANNELS_LAST = {
    "max pool",
    "average pool",
    "group norm",
    "instance norm",
    "depthwise",
    "transposed",
    "bilinear upsampling",
}
"""Kinds whose batch is one image in channels last; the others have two, contiguous."""

ONE = {"conv1d", "conv3d", "lstm", "gru of two layers", "attention", "encoder"}
"""Kinds whose batch is one row, a dimension of any stride."""

BATCHES: list[Any] = [
    *[
        pytest.param(make, (1 if name in CHANNELS_LAST else 2, 3, 8, 8), name in CHANNELS_LAST, id=name)
        for name, make in IMAGES.items()
    ],
    *[
        pytest.param(make, (1, *shape[1:]) if name in ONE else shape, False, id=name)
        for name, (make, shape) in OTHERS.items()
    ],
    *[pytest.param(make, (3, 3), False, id=name) for name, make in TOKENS.items()],
]


@pytest.mark.parametrize(("make", "shape", "channels_last"), BATCHES)
def test_a_layer_becomes_native_code(
    make: Callable[[], nn.Module], shape: tuple[int, ...], channels_last: bool, given_up: list[str]
):
    x = torch.randn(shape) if len(shape) > 2 or shape[-1] != 3 else torch.randint(10, shape)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    net = make()
    net(x if x.shape[0] > 1 else torch.cat([x, x]))  # lazy layers; norms want two
    program = ps.program(net, ps.supervised(lambda y, _: y.square().mean()), ps.optim.sgd(0.1))
    with config.patch(fx_graph_cache=False), pytest.raises(Written):
        ps.compile_step(program.train_step)(program.init(), (x, torch.zeros(len(x))))
    assert given_up == []
