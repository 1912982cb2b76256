"""What a seed stands for: a module, a batch, and how they are trained."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

FEATURES = 6
"""Of the last dimension, wherever a layer begins and ends."""


class Case(NamedTuple):
    """One module and how it is trained; equal for equal seeds."""

    seed: int
    sizes: tuple[int, int]  # examples, positions
    layers: tuple[str, ...]
    layout: str
    optimizer: str
    precision: str
    ema: float | None
    accumulate: int
    way: str  # one of `WAYS`
    donate: bool

    def __str__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self._asdict().items() if name != "seed"]
        return f"seed {self.seed}: {', '.join(parts)}"


DRAWING = {
    *("linear", "adapter", "turned", "sliced", "twice", "alpha", "features", "unread", "noise", "permuted"),
    *("attention", "fused", "batchnorm", "gru", "encoder"),
}
"""Layers that draw: on CUDA the numbers of compiled steps are not those of eager ones."""


def case(seed: int, *, quiet: bool = False) -> Case:
    """The case of a seed; ``quiet``: without layers that draw."""
    draw = random.Random(seed)
    # Rounding of bfloat16 takes another course under adaptive optimizers, and through several layers.
    precision = draw.choices(("64-true", "32-true", "bf16-mixed"), (5, 4, 1))[0]
    known = sorted(LAYERS.keys() - DRAWING if quiet else LAYERS)
    made = Case(
        seed=seed,
        sizes=(draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 5))),
        layers=tuple(draw.choice(known) for _ in range(1 if precision == "bf16-mixed" else draw.choice((2, 3)))),
        layout=draw.choice(sorted(LAYOUTS)),
        optimizer="sgd" if precision == "bf16-mixed" else draw.choice(("sgd", "momentum", "adamw", "rmsprop")),
        precision=precision,
        ema=draw.choice((None, None, 0.9)),
        accumulate=draw.choices((1, 2), (3, 1))[0],
        way=draw.choices(tuple(WAYS), tuple(WAYS.values()))[0],
        donate=draw.random() < 0.5,
    )
    made = made._replace(layers=tuple(sorted(made.layers, key=UNKNOWN_STRIDES.__contains__)))
    if "groups" in made.layers and made.sizes[0] == 1:  # torch's kernel refuses the strides that a trace gives it
        made = made._replace(way=made.way.replace("aot_eager", "inductor"))
    # BatchNorm of one value is an error of its own.
    return made._replace(sizes=(1, 2)) if made.sizes == (1, 1) and set(made.layers) & BATCH_NORMS else made


BATCH_NORMS = {"batchnorm", "batchnorm1d", "solid"}

UNKNOWN_STRIDES = BATCH_NORMS
"""Layers whose result may have other strides in a trace than in eager mode. They come last: what is drawn like such a
result is drawn in another order."""

WAYS = {"inductor": 28, "aot_eager": 9, "front": 2}
"""How a step is compiled, by how often. "front" goes through inductor's front door, which takes five times as long as
the native code; `aot_eager` compiles nothing.
"""


# --- layers: (examples, positions, features) to the same --------------------------------------------------------------


class Layer(nn.Module):
    """A function of the input and the parts that it uses."""

    def __init__(self, does: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.does, self.parts = does, nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x, **dict(self.parts.items()))


def _attention(x: Tensor, inside: nn.Module, outside: nn.Module) -> Tensor:
    heads = [part.view(*x.shape[:2], 2, 3).transpose(1, 2) for part in inside(x).chunk(3, -1)]
    weights = functional.dropout((heads[0] @ heads[1].transpose(-1, -2)).softmax(-1), 0.2)
    return outside((weights @ heads[2]).transpose(1, 2).reshape(x.shape))


def _fused(x: Tensor, inside: nn.Module) -> Tensor:
    heads = [part.view(*x.shape[:2], 2, 3).transpose(1, 2) for part in inside(x).chunk(3, -1)]
    return functional.scaled_dot_product_attention(*heads, dropout_p=0.2).transpose(1, 2).reshape(x.shape)


def _adapted(x: Tensor, frozen: nn.Module, down: nn.Module) -> Tensor:
    return frozen(x) + down(functional.dropout(x, 0.1)[..., :2])


def _picture(x: Tensor) -> Tensor:
    """Features as channels, positions as rows of one pixel: strides of more than one memory format."""
    return x.transpose(1, 2).unsqueeze(-1)


def _pictured(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    return functional.dropout2d(torch.tanh(norm(conv(_picture(x)))), 0.2).squeeze(-1).transpose(1, 2)


def _solid(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    solid = _picture(x).unsqueeze(2)
    return torch.relu(norm(conv(solid))).flatten(2).transpose(1, 2)


def _one_channel(x: Tensor, conv: nn.Module, norm: nn.Module, back: nn.Module) -> Tensor:
    return x + back(torch.tanh(norm(conv(x.unsqueeze(1))))).squeeze(1)


def _added(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    turned = x.transpose(1, 2).reshape(len(x), 6, 1, x.shape[1])
    return functional.silu(norm(turned + conv(_picture(x)).transpose(2, 3))).squeeze(2).transpose(1, 2)


def _two_wide(x: Tensor, norm: nn.Module) -> Tensor:
    picture = _picture(x)
    return norm(torch.cat([picture, picture.sin()], -1)).mean(-1).transpose(1, 2)


def _pooled(x: Tensor, conv: nn.Module) -> Tensor:
    picture = conv(_picture(x))
    most = functional.max_pool2d(picture, (3, 1), 1, (1, 0))
    return (most + functional.avg_pool2d(picture, 3, 1, 1)).squeeze(-1).transpose(1, 2)


def _enlarged(x: Tensor, conv: nn.Module) -> Tensor:
    large = functional.interpolate(_picture(x), scale_factor=2, mode="bilinear")
    large = conv(large + functional.interpolate(_picture(x), scale_factor=2))
    return functional.adaptive_avg_pool2d(large, (x.shape[1], 1)).squeeze(-1).transpose(1, 2)


def _shuffled(x: Tensor, conv: nn.Module) -> Tensor:
    return functional.max_pool2d(functional.pixel_shuffle(conv(_picture(x)), 2), 2).squeeze(-1).transpose(1, 2)


def _sampled(x: Tensor) -> Tensor:
    where = torch.linspace(-0.9, 0.9, 2 * len(x) * x.shape[1], dtype=x.dtype, device=x.device)
    where = where.view(len(x), x.shape[1], 1, 2)
    return x + functional.grid_sample(_picture(x), where, align_corners=False).squeeze(-1).transpose(1, 2)


def _causal(x: Tensor, inside: nn.Module) -> Tensor:
    q, k, v = (part.view(*x.shape[:2], 2, 3).transpose(1, 2) for part in inside(x).chunk(3, -1))
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    hidden = torch.zeros(seen.shape, dtype=q.dtype, device=x.device).masked_fill(~seen, float("-inf"))
    both = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (both + functional.scaled_dot_product_attention(q, k, v, hidden)).transpose(1, 2).reshape(x.shape)


def _rolled(x: Tensor) -> Tensor:
    moved = torch.roll(x, 1, 1) + x.flip(-1) + functional.pad(x, (1, 0))[..., :-1]
    return functional.glu(torch.cat([moved, x.cumsum(1) * 0.2], -1), -1)


def _statistics(x: Tensor) -> Tensor:
    centred = (x - x.mean((0, 1), keepdim=True)) / (1 + x.std(-1, keepdim=True))
    alike = torch.einsum("bif,bjf->bi", x, x).unsqueeze(-1)
    return centred + x.amax(1, keepdim=True) + torch.tanh(alike * 0.1)


def _indexed(x: Tensor, table: Tensor | nn.Module) -> Tensor:
    order = x.detach().sum(-1).argsort(1)
    sorted_ = x.gather(1, order.unsqueeze(-1).expand_as(x))
    third = torch.arange(x.shape[1], device=x.device) % 3
    summed = torch.zeros_like(x[:, :1].expand(-1, 3, -1)).index_add(1, third, x)
    return sorted_ + summed[:, third] * 0.5 + table(order % 4)  # type: ignore[operator]


def _unread(x: Tensor) -> Tensor:
    functional.dropout(x, 0.3), torch.rand(3), torch.randn_like(x), torch.randperm(4)
    return functional.dropout(x, 0.1)


def _noisy(x: Tensor) -> Tensor:
    noise = torch.randn_like(x.transpose(0, 1)).transpose(0, 1) + torch.rand(x.shape[-1]).to(x.dtype)
    coins = torch.bernoulli(torch.full_like(x.transpose(1, 2), 0.7)).transpose(1, 2)
    return x * coins + 0.1 * noise


def _permuted(x: Tensor) -> Tensor:
    return x[..., torch.randperm(FEATURES)] + torch.empty_like(x).exponential_() * 0.1


_EPS = 0.1
"""Of a norm over few values: with a small one, these are -1 and 1, and the gradient is rounding alone."""

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(0.2)),
    "adapter": lambda: Layer(_adapted, frozen=nn.Linear(6, 6).requires_grad_(False), down=nn.Linear(2, 6)),
    "turned": lambda: Layer(lambda x: functional.dropout(x.transpose(1, 2), 0.3).transpose(1, 2)),
    "sliced": lambda: Layer(lambda x: functional.dropout(torch.cat([x, x], -1)[..., ::2], 0.3)),
    "twice": lambda: Layer(lambda x: functional.dropout(x, 0.3) + functional.dropout(x, 0.3)),
    "alpha": lambda: Layer(lambda x: functional.alpha_dropout(x.transpose(0, 1), 0.2, True).transpose(0, 1)),
    "features": lambda: Layer(lambda x: functional.dropout1d(x, 0.2) + functional.feature_alpha_dropout(x, 0.1, True)),
    "unread": lambda: Layer(_unread),
    "noise": lambda: Layer(_noisy),
    "permuted": lambda: Layer(_permuted),
    "attention": lambda: Layer(_attention, inside=nn.Linear(6, 18), outside=nn.Linear(6, 6)),
    "fused": lambda: Layer(_fused, inside=nn.Linear(6, 18)),
    "norm": lambda: nn.LayerNorm(FEATURES),
    "batchnorm": lambda: Layer(_pictured, conv=nn.Conv2d(6, 6, (3, 1), padding=(1, 0)), norm=nn.BatchNorm2d(6, _EPS)),
    "batchnorm1d": lambda: Layer(lambda x, norm: norm(x.transpose(1, 2)).transpose(1, 2), norm=nn.BatchNorm1d(6, _EPS)),
    "solid": lambda: Layer(
        _solid, conv=nn.Conv3d(6, 6, (1, 3, 1), padding=(0, 1, 0)), norm=nn.BatchNorm3d(6, _EPS, affine=False)
    ),
    "one channel": lambda: Layer(
        _one_channel, conv=nn.Conv2d(1, 3, 3, padding=1), norm=nn.BatchNorm2d(3, _EPS), back=nn.Conv2d(3, 1, 1)
    ),
    "groups": lambda: Layer(_added, conv=nn.Conv2d(6, 6, 1), norm=nn.GroupNorm(2, 6, _EPS)),
    "instances": lambda: Layer(_two_wide, norm=nn.InstanceNorm2d(6, _EPS, affine=True)),
    "row": lambda: Layer(
        lambda x, conv: torch.tanh(conv(x.transpose(1, 2))).transpose(1, 2),
        conv=nn.Sequential(nn.Conv1d(6, 6, 3, padding=1, groups=6), nn.ConvTranspose1d(6, 6, 3, padding=1)),
    ),
    "pooled": lambda: Layer(_pooled, conv=nn.Conv2d(6, 6, 1)),
    "enlarged": lambda: Layer(_enlarged, conv=nn.Conv2d(6, 6, 1)),
    "shuffled": lambda: Layer(_shuffled, conv=nn.Conv2d(6, 24, 1)),
    "sampled": lambda: Layer(_sampled),
    "causal": lambda: Layer(_causal, inside=nn.Linear(6, 18)),
    "rolled": lambda: Layer(_rolled),
    "statistics": lambda: Layer(_statistics),
    "indexed": lambda: Layer(_indexed, table=nn.Embedding(4, 6)),
    "rms": lambda: nn.Sequential(nn.RMSNorm(FEATURES), nn.GELU(), weight_norm(nn.Linear(6, 6))),
    "gru": lambda: Layer(lambda x, gru: gru(x)[0], gru=nn.GRU(6, 6, num_layers=2, dropout=0.2, batch_first=True)),
    "lstm": lambda: Layer(lambda x, lstm: lstm(x)[0], lstm=nn.LSTM(6, 6, batch_first=True)),
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.2, batch_first=True),
    "gathered": lambda: Layer(
        lambda x, table: x + table(torch.arange(x.shape[1], device=x.device) % 3)[..., :6] * 0.5,
        table=nn.Embedding(3, 8),
    ),
}


class Net(nn.Module):
    """The layers of a case one behind the other, then a linear one."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            self.first = nn.Linear(FEATURES, FEATURES)
            self.layers = nn.ModuleList(LAYERS[name]() for name in case.layers)
            self.last = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


# --- batches ----------------------------------------------------------------------------------------------------------


def _channels_last(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).contiguous(memory_format=torch.channels_last).squeeze(-1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": _channels_last,
    "sliced": lambda x: torch.cat([x, x], -1)[..., ::2],
    "offset": lambda x: torch.cat([x, x])[len(x) :],
}


def batches(case: Case, count: int) -> list[Any]:
    """``count`` batches of a case, laid out as it says."""
    source = torch.Generator().manual_seed(case.seed)
    made = list[Any]()
    for _ in range(count):
        x = LAYOUTS[case.layout](torch.randn(*case.sizes, FEATURES, generator=source))
        made.append((x, torch.randn(*case.sizes, 2, generator=source)))
    return made
