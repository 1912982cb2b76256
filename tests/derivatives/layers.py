"""What `torch.func` maps and differentiates: layers of `torch.nn` under `per_example`, `curvature` and a train step.

    PYTHONPATH=src python tests/derivatives/layers.py --write # writes tests/derivatives/layers.md

Each layer stands in a small net on the CPU, in float64. Columns:

example    `ps.per_example`, equal to single rows to 1e-10
hessian    `ps.curvature.hessian`, equal to differences of gradients to 1e-6
vmap       `torch.func.vmap` of a train step over two states, equal to two steps to 1e-10
meta       `torch.func.grad` through a train step, equal to differences of losses to 1e-6

"yes", "looped" (right, but torch loops over the examples: it has no rule for the operator, and warns), or the reason.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import purestep as ps

PAGE = Path(__file__).with_name("layers.md")
ROWS = 3


class Around(nn.Module):
    """A layer between two that make its input depend on parameters and its output a vector."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, shape[-1]))
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x * self.scale if x.is_floating_point() else x).flatten(1).sin()


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


def attention(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x, need_weights=False)[0]


VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (5, 6), (4, 6, 6), (2, 4, 4, 4)
LINE = (4, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], Tensor]]] = {
    "Linear": (lambda: nn.Linear(6, 4), VECTOR, plain),
    "Bilinear": (lambda: nn.Bilinear(6, 6, 4), VECTOR, lambda layer, x: layer(x, x.cos())),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 3), LINE, plain),
    "Conv2d": (lambda: nn.Conv2d(4, 3, 3), IMAGE, plain),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), IMAGE, plain),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 3), VOLUME, plain),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3), IMAGE, plain),
    "Fold": (lambda: nn.Fold((4, 4), 2), (4, 9), plain),
    "Unfold": (lambda: nn.Unfold(2), IMAGE, plain),
    "Embedding": (lambda: nn.Embedding(7, 4), (-5,), plain),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 4), (-5,), plain),
    "RNN": (lambda: nn.RNN(6, 4, batch_first=True), SEQUENCE, first),
    "LSTM": (lambda: nn.LSTM(6, 4, batch_first=True), SEQUENCE, first),
    "GRU": (lambda: nn.GRU(6, 4, batch_first=True), SEQUENCE, first),
    "LSTMCell": (lambda: nn.LSTMCell(6, 4), VECTOR, first),
    "GRUCell": (lambda: nn.GRUCell(6, 4), VECTOR, plain),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), SEQUENCE, attention),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        SEQUENCE,
        plain,
    ),
    "BatchNorm1d, train": (lambda: nn.BatchNorm1d(6), VECTOR, plain),
    "BatchNorm1d, keep_eval": (lambda: nn.BatchNorm1d(6), VECTOR, plain),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE, plain),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE, plain),
    "LayerNorm": (lambda: nn.LayerNorm(6), SEQUENCE, plain),
    "RMSNorm": (lambda: nn.RMSNorm(6), SEQUENCE, plain),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE, plain),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), VECTOR, plain),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), VECTOR, plain),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)), VECTOR, plain),
    "ReLU": (nn.ReLU, VECTOR, plain),
    "GELU": (nn.GELU, VECTOR, plain),
    "SiLU": (nn.SiLU, VECTOR, plain),
    "Softplus": (nn.Softplus, VECTOR, plain),
    "PReLU": (nn.PReLU, VECTOR, plain),
    "Hardswish": (nn.Hardswish, VECTOR, plain),
    "Softmax": (lambda: nn.Softmax(-1), VECTOR, plain),
    "LogSigmoid": (nn.LogSigmoid, VECTOR, plain),
    "GLU": (nn.GLU, VECTOR, plain),
    "RReLU": (nn.RReLU, VECTOR, plain),
    "Dropout": (nn.Dropout, VECTOR, plain),
    "Dropout2d": (nn.Dropout2d, IMAGE, plain),
    "AlphaDropout": (nn.AlphaDropout, VECTOR, plain),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE, plain),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), VOLUME, plain),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE, plain),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), IMAGE, plain),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(2), IMAGE, plain),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_size=3), IMAGE, plain),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), IMAGE, plain),
    "Upsample, bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE, plain),
    "Upsample, bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE, plain),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGE, plain),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), IMAGE, plain),
    "ReplicationPad3d": (lambda: nn.ReplicationPad3d(1), VOLUME, plain),
    "grid_sample": (
        nn.Identity,
        IMAGE,
        lambda layer, x: nn.functional.grid_sample(x, x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=False),
    ),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), VECTOR, lambda layer, x: layer(x, x.cos()).unsqueeze(1)),
    "cdist": (nn.Identity, SEQUENCE, lambda layer, x: torch.cdist(x, x.cos())),
}
RANDOM = {"RReLU", "Dropout", "Dropout2d", "AlphaDropout", "FractionalMaxPool2d"}
COLUMNS = ("example", "hessian", "vmap", "meta")


def pointwise(out: Tensor) -> Tensor:
    return out + out.square().cos() + out.abs().pow(3) / 5


def objective(model: ps.Model, batch: Tensor) -> ps.Loss:
    return ps.Loss(pointwise(model(batch)).mean(), len(batch))


def case(name: str) -> tuple[ps.Program, ps.TrainState, Tensor]:
    build, shape, call = LAYERS[name]
    with ps.rng.scoped(0):
        keep = ("layer",) if name.endswith("keep_eval") else ()
        size = shape if shape[0] > 0 else (-shape[0],)
        net = Around(build(), size, call)
        program = ps.program(net, objective, ps.optim.sgd(0.1), precision="64-true", keep_eval=keep)
        batch = torch.randn(ROWS, *size, dtype=torch.float64)
        if shape[0] < 0:
            batch = torch.randint(7, (ROWS, *size))
    state = program.init(device="cpu")
    return program, moved(state, direction(state), 0.1), batch


def direction(state: ps.TrainState) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in state.params.items()}


def moved(state: ps.TrainState, by: dict[str, Tensor], size: float) -> ps.TrainState:
    return state._replace(params={name: p + size * by[name] for name, p in state.params.items()})


def gradient(program: ps.Program, state: ps.TrainState, batch: Tensor) -> dict[str, Tensor]:
    new, _ = program.train_step(state, batch)
    return {name: (p - new.params[name]) / 0.1 for name, p in state.params.items()}


def close(found: Any, expected: Any, tolerance: float) -> None:
    for (path, one), two in zip(ps.tree.with_paths(found), ps.tree.leaves(expected), strict=True):
        gap = float((one - two).abs().max() / two.abs().max().clamp(min=1.0))
        if not gap < tolerance:
            raise ArithmeticError(f"differs by {gap:.1e} in {path}")


def example(program: ps.Program, state: ps.TrainState, batch: Tensor, name: str) -> None:
    found = ps.per_example(program)(state, batch).grads
    if name not in RANDOM:
        rows = [gradient(program, state, row) for row in batch.split(1)]
        close(found, {name: torch.stack([row[name] for row in rows]) for name in found}, 1e-10)


def hessian(program: ps.Program, state: ps.TrainState, batch: Tensor, name: str) -> None:
    by = direction(state)
    found = ps.curvature.hessian(program)(state, batch, by)
    up, down = (gradient(program, moved(state, by, h), batch) for h in (1e-5, -1e-5))
    close(found, {name: (up[name] - down[name]) / 2e-5 for name in found}, 1e-6)


def vmap(program: ps.Program, state: ps.TrainState, batch: Tensor, name: str) -> None:
    states = [moved(state, direction(state), h) for h in (0.0, 0.1)]
    stacked = ps.tree.map(lambda *leaves: torch.stack(leaves), *states)
    found, _ = torch.func.vmap(program.train_step, in_dims=(0, None), randomness="different")(stacked, batch)
    if name not in RANDOM:
        expected = [program.train_step(each, batch)[0].params for each in states]
        close(found.params, ps.tree.map(lambda *leaves: torch.stack(leaves), *expected), 1e-10)


def meta(program: ps.Program, state: ps.TrainState, batch: Tensor, name: str) -> None:
    by = direction(state)

    def loss(size: Tensor) -> Tensor:
        new, _ = program.train_step(moved(state, by, size), batch)
        return sum((p.square() * by[name]).sum() for name, p in new.params.items())

    found = torch.func.grad(loss)(torch.zeros((), dtype=torch.float64))
    close(found, (loss(torch.tensor(1e-5)) - loss(torch.tensor(-1e-5))) / 2e-5, 1e-6)


def verdict(column: str, name: str) -> str:
    program, state, batch = case(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            globals()[column](program, state, batch, name)
        except Exception as error:
            return reason(str(error))
    return "looped" if any("performance drop" in str(each.message) for each in caught) else "yes"


def reason(text: str) -> str:
    """A few words of torch's message."""
    known = (
        ("uses statistics of the whole batch", "refused: statistics of the batch"),
        ("in-place", "writes in place"),
        ("inplace", "writes in place"),
        ("data-dependent", "depends on values"),
        ("Batching rule", "no rule for vmap"),
        ("batching rule", "no rule for vmap"),
        ("do not yet support", "no rule for vmap"),
        ("is not implemented", "no second derivative"),
        ("differs by", text.partition(" in ")[0]),
    )
    return next((said for part, said in known if part in text), text.strip().splitlines()[0][:60])


NOTES = """
- Recurrent layers: `per_example` maps their weights too, as views. A mapped function of your own does the same.
- Attention: torch's fused kernel for the CPU has no rule for vmap, and no fused kernel has a second derivative.
  `per_example` and `curvature` switch it off; around a step write
  `with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):`.
- weight_norm: the second derivative of torch's fused operator is wrong, in plain autograd too. First derivatives are
  right.
- spectral_norm: the vectors of its power iteration are constants to autograd, so derivatives of second order leave out
  how they follow the weight.
- cdist, EmbeddingBag: torch has no second derivative; write `(a[:, None] - b).norm(dim=-1)`, `Embedding` and a mean.
- Models of transformers: leave `attention_mask` out where no token is padding. The library reads its values, which vmap
  does not allow.
- No torch.func transform takes activation checkpointing, autograd Functions without `setup_context`, nested or sparse
  tensors, or code that reads a tensor's value.
""".splitlines()


def table() -> str:
    lines = [
        "# What torch maps and differentiates",
        "",
        f"torch {torch.__version__.split('+')[0]}, CPU, float64. Written by",
        "`PYTHONPATH=src python tests/derivatives/layers.py --write`; the columns are explained there.",
        "",
        f"| layer | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    lines += [f"| {name} | {' | '.join(verdict(column, name) for column in COLUMNS)} |" for name in LAYERS]
    return "\n".join([*lines, *NOTES]) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = table()
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    print(text)
