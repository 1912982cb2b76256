"""Norms of tensors that have more than one memory format, as they have with a dimension of size one.

torch's `native_batch_norm_backward` is wrong on the CPU (torch 2.13) for some pairs of layouts, in a loop by hand too:

    import torch

    x = torch.randn(4, 2, 6, dtype=torch.float64).transpose(1, 2).unsqueeze(-1).requires_grad_()
    assert x.shape == (4, 6, 2, 1) and x.stride() == (12, 1, 6, 1)  # channels last, which torch takes for contiguous
    weight, bias = torch.ones(2, 6, dtype=torch.float64).requires_grad_()
    normal = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    given = torch.randn(4, 6, 2, 1, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(normal, bias, given)[0], given.sum((0, 2, 3)))  # fails

Compiled steps compute what that should be. The eager step, which calls this operator, is compared with
`fuzz.compare.OneLayout` around it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fuzz import compare
from helpers import assert_trees_close
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import purestep as ps
from purestep.compile import formats, random_ops

pytestmark = pytest.mark.compile


class Net(nn.Module):
    """``does(x, first, norm)`` of two layers, and a linear one."""

    def __init__(self, does: Callable[..., Tensor], first: nn.Module, norm: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.does, self.first, self.norm, self.last = does, first, norm, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.does(x, self.first, self.norm))


def turned(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """(4, 2, 6) -> (4, 6, 2, 1) with strides (12, 1, 6, 1) -> (4, 2, 6)."""
    return torch.tanh(norm(conv(x.transpose(1, 2).unsqueeze(-1)))).squeeze(-1).transpose(1, 2)


def one_photo(x: Tensor, layer: nn.Module, norm: nn.Module) -> Tensor:
    """(2, 3, 6), channels last -> (1, 6, 2, 3) with strides (6, 1, 18, 6) -> (1, 36)."""
    return torch.tanh(norm(layer(x).permute(2, 0, 1).unsqueeze(0))).flatten(1)


def one_column(x: Tensor, layer: nn.Module, norm: nn.Module) -> Tensor:
    """(2, 3, 6) -> (2, 6, 3, 1, 1) -> (2, 18)."""
    return torch.tanh(norm(layer(x).transpose(1, 2).unsqueeze(-1).unsqueeze(-1))).flatten(1)


def one_row(x: Tensor, layer: nn.Module, norm: nn.Module) -> Tensor:
    """(3, 4, 6) -> (3, 6, 1, 4) -> (3, 24)."""
    return torch.tanh(norm(layer(x).transpose(1, 2).unsqueeze(-2))).flatten(1)


def crossed(x: Tensor, layer: nn.Module, norm: nn.Module) -> Tensor:
    """(3, 2, 6) -> (2, 6, 3, 1), examples as positions -> (2, 18)."""
    return torch.tanh(norm(layer(x).permute(1, 2, 0).unsqueeze(-1))).flatten(1)


def added(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """(1, 5, 6): a picture and its turned copy, the sum of which has other strides in a trace."""
    turned = x.transpose(1, 2).reshape(len(x), 6, 1, x.shape[1])
    picture = turned + conv(x.transpose(1, 2).unsqueeze(-1)).transpose(2, 3)
    return functional.silu(norm(picture)).squeeze(2).transpose(1, 2)


def attended(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """(1, 6, 4, 4): attention over pixels, as in a U-Net of diffusion models, with one picture."""
    picture = conv(x)
    pixels = norm(picture.flatten(2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    seen = functional.scaled_dot_product_attention(*(pixels.unsqueeze(1),) * 3).squeeze(1)
    return torch.sigmoid(norm(seen.transpose(-1, -2).reshape(picture.shape) + picture)).flatten(2).transpose(1, 2)


def by_rows(x: Tensor, layer: nn.Module, norm: nn.Module) -> Tensor:
    """(1, 4, 5, 6), channels last: a group norm of a picture and of its rows."""
    picture = layer(x).permute(0, 3, 1, 2)
    return norm(picture + picture.transpose(2, 3).reshape(picture.shape)).permute(0, 2, 3, 1)


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def pixelwise() -> nn.Module:
    return nn.Conv2d(6, 6, 1)


BATCH_NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "turned": (lambda: Net(turned, nn.Conv2d(6, 6, (3, 1), padding=(1, 0)), nn.BatchNorm2d(6)), (4, 2, 6)),
    "one photo": (lambda: Net(one_photo, linear(), nn.BatchNorm2d(6), 36), (2, 3, 6)),
    "3d": (lambda: Net(one_column, linear(), nn.BatchNorm3d(6), 18), (2, 3, 6)),
    "one row": (lambda: Net(one_row, linear(), nn.BatchNorm2d(6), 24), (3, 4, 6)),
    "crossed": (lambda: Net(crossed, linear(), nn.BatchNorm2d(6), 18), (3, 2, 6)),
    "in evaluation": (lambda: Net(one_photo, linear(), nn.BatchNorm2d(6), 36), (2, 3, 6)),
    "instances": (lambda: Net(one_column, linear(), nn.InstanceNorm3d(6, affine=True), 18), (2, 3, 6)),
}
GROUP_NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "added": (lambda: Net(added, pixelwise(), nn.GroupNorm(2, 6)), (1, 5, 6)),
    "one group": (lambda: Net(added, pixelwise(), nn.GroupNorm(1, 6, affine=False)), (1, 3, 6)),
    "attended": (lambda: Net(attended, nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(3, 6)), (1, 6, 4, 4)),
    "rows": (lambda: Net(by_rows, linear(), nn.GroupNorm(2, 6)), (1, 4, 5, 6)),
}
NORMS = BATCH_NORMS | GROUP_NORMS
ONCE = ("turned", "3d", "in evaluation", "added", "rows")
"""Each operator and rank once: the other layouts are those of the same trace, which all three ways begin with."""

WAYS = ["aot_eager", "inductor"]


class Together(nn.Module):
    """Several modules, each with its own input, in one program: they are compiled once."""

    def __init__(self, nets: dict[str, nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleDict(nets)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {name: net(inputs[name]) for name, net in self.nets.items()}


def squared_errors(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return sum((functional.mse_loss(outputs[name], targets[name]) for name in targets), torch.zeros(()))


def assert_compiled_trains_as_eager(
    nets: dict[str, nn.Module], batch: Any, backend: str, keep_eval: tuple[str, ...] = ()
) -> None:
    """The weights of one step, of each net."""
    program = ps.program(
        Together(nets),
        ps.supervised(squared_errors),
        ps.optim.sgd(1.0),
        precision="64-true",
        keep_eval=keep_eval,
    )
    with compare.OneLayout():
        expected, _ = program.train_step(program.init(), batch)
    found, _ = ps.compile_step(program.train_step, backend=backend)(program.init(), batch)
    assert_trees_close(found.params, expected.params, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        ("aot_eager", NORMS),
        ("inductor", ONCE),
        pytest.param("inductor", [name for name in NORMS if name not in ONCE], marks=pytest.mark.soak),
    ],
)
def test_gradients_of_norms(backend: str, chosen: Sequence[str]) -> None:
    torch.manual_seed(0)
    kinds = {name: NORMS[name] for name in chosen}
    nets: dict[str, nn.Module] = {name: make().double() for name, (make, _) in kinds.items()}
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, (_, shape) in kinds.items()}
    with torch.no_grad():
        targets = {name: torch.randn_like(net(inputs[name])) for name, net in nets.items()}
    kept = ("nets.in evaluation.norm",) if "in evaluation" in kinds else ()
    assert_compiled_trains_as_eager(nets, (inputs, targets), backend, keep_eval=kept)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, x.shape[2:]),
    "one of a list": lambda x: torch.stack([*x.permute(0, 2, 3, 1)])[:1].permute(0, 3, 1, 2).expand_as(x),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("shape", [(4, 6, 2, 1), (4, 6, 1, 2), (1, 6, 2, 3), (1, 2, 1, 1), (3, 2, 1, 3), (2, 1, 2, 2)])
@pytest.mark.parametrize("is_training", [True, False])
def test_the_backward_pass_of_batch_norm_with_every_pair_of_layouts(shape: tuple[int, ...], is_training: bool) -> None:
    torch.manual_seed(0)
    eps, channels = 0.1, shape[1]
    picture, given = torch.randn(2, *shape, dtype=torch.float64)
    weight, mean, variance = torch.rand(3, channels, dtype=torch.float64)
    for laid_out in LAYOUTS.values():
        for given_out in LAYOUTS.values():
            x, grad = laid_out(picture).requires_grad_(), given_out(given)
            leaf, bias = weight.clone().requires_grad_(), weight.clone().requires_grad_()
            if is_training:
                mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            inverse = (variance + eps).rsqrt()
            normal = (x - mean[:, None, None]) * (inverse * leaf)[:, None, None] + bias[:, None, None]
            expected = torch.autograd.grad(normal, (x, leaf, bias), grad)
            found = torch.ops.aten.native_batch_norm_backward(
                formats.as_other(grad, x),
                *(x.detach(), weight, mean.detach(), variance.detach(), mean.detach(), inverse.detach()),
                *(is_training, eps, [True, True, True]),
            )
            torch.testing.assert_close(found, expected)


def test_other_devices_and_layouts_without_a_doubt_are_left_alone() -> None:
    picture, meta = torch.randn(2, 3, 4, 5), torch.empty(2, 3, 4, 1, device="meta").transpose(0, 1)
    last = picture.contiguous(memory_format=torch.channels_last)
    assert formats.as_other(last, picture) is last  # torch takes the slow path, which is right
    assert formats.as_other(meta, meta) is meta


NOISY: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.transpose(1, 2),  # (4, 6, 5): contiguous
    "turned, one pixel": lambda x: x.transpose(1, 2).unsqueeze(-1),  # channels last, as the input
    "every other": lambda x: x.unsqueeze(1).permute(0, 3, 1, 2)[..., ::2],  # channels last, without gaps
    "first last": lambda x: x.permute(1, 0, 2),
}


class Noisy(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.view = NOISY[name]
        shape = self.view(torch.empty(4, 5, 6)).shape
        self.norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](shape[1])

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(self.view(x))
        return functional.dropout(normal, 0.3) + torch.randn_like(normal)


@pytest.mark.parametrize("backend", WAYS)
def test_what_is_drawn_after_batch_norm_is_drawn_in_its_layout(backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    batch = dict.fromkeys(NOISY, x), {name: view(x).cos() for name, view in NOISY.items()}
    assert_compiled_trains_as_eager({name: Noisy(name) for name in NOISY}, batch, backend)


LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "logsigmoid": lambda x: functional.logsigmoid(x.transpose(1, 2)),
    "logsigmoid of pixels": lambda x: functional.logsigmoid(x.permute(0, 3, 1, 2)),
    "roll": lambda x: torch.roll(x.permute(0, 3, 1, 2), 1, 1),
    "roll of three": lambda x: torch.roll(x.permute(0, 3, 1, 2), (1, 2, 1), (1, 2, 3)),
    "roll of rows": lambda x: torch.roll(x.transpose(1, 2), 2, -1),
    "channel_shuffle": lambda x: functional.channel_shuffle(x.permute(0, 3, 1, 2), 2),
    "channel_shuffle of a part": lambda x: functional.channel_shuffle(x.permute(0, 3, 1, 2)[:, :4], 2),
    # A dimension of size one, whose stride is another in a trace, decides on the memory format.
    "group norm of one row": lambda x: functional.group_norm(x[:1, :1].permute(0, 3, 1, 2).reshape(1, 6, 1, -1), 1),
    "group norm of a large picture": lambda x: functional.interpolate(
        functional.group_norm(enlarged(x[:1]).contiguous(memory_format=torch.channels_last), 1), scale_factor=2
    ),
    "group norm of a sum": lambda x: summed(x[:1, 0]).transpose(0, 1),
    "columns": lambda x: functional.unfold(x[:, :, :1].transpose(0, 1), 1).unsqueeze(2),
}


def summed(x: Tensor) -> Tensor:
    """(1, 5, 6), transposed: the sum of a picture and its turned copy, normalized, as the sequence that it was."""
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    picture = x.transpose(1, 2).reshape(1, 6, 1, 5) + pixelwise_copy(x)
    return functional.silu(functional.group_norm(picture, 2)).squeeze(2).transpose(1, 2)


def pixelwise_copy(x: Tensor) -> Tensor:
    kernel = torch.eye(6, dtype=x.dtype).view(6, 6, 1, 1)
    return functional.conv2d(x.transpose(1, 2).unsqueeze(-1), kernel).transpose(2, 3)


def enlarged(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2)


class Dropping(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.view, self.linear = LIKE[name], nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.view(self.linear(x)), 0.3)


@pytest.mark.parametrize("backend", WAYS[:1])
def test_what_is_drawn_like_other_results_is_drawn_in_their_layout(backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    batch = dict.fromkeys(LIKE, x), {name: view(x).cos() for name, view in LIKE.items()}
    assert_compiled_trains_as_eager({name: Dropping(name) for name in LIKE}, batch, backend)


CHAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda x: x.permute(0, 3, 1, 2),
    "transpose": lambda x: x.transpose(1, 2),
    "turn": lambda x: x.transpose(2, 3),
    "swap": lambda x: x.transpose(0, 1),
    "flatten": lambda x: x.reshape(x.shape[0], x.shape[1], 1, -1),
    "sum": lambda x: x + x.transpose(2, 3).reshape(x.shape),
    "cosine": torch.cos,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(),
    "sum of formats": lambda x: x + x.contiguous(memory_format=torch.channels_last),
    "concatenation": lambda x: torch.cat([x, x], 1),
    "slice": lambda x: x[..., ::2],
    "mean": lambda x: x.mean(2, keepdim=True),
    "group norm": lambda x: functional.group_norm(x, 1),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "max pool": lambda x: functional.max_pool2d(x, 1),
    "enlarge": lambda x: functional.interpolate(x, scale_factor=2),
    "convolution": lambda x: functional.conv2d(x, torch.ones(3, x.shape[1], 1, 1)),
    "unfold": lambda x: functional.unfold(x, 1).unsqueeze(2),
    "roll": lambda x: x.roll(1, 1),
    "rounded quotient": lambda x: x.div(torch.tensor(0.3), rounding_mode="floor"),
    "log with a row": lambda x: torch.xlogy(x.abs(), x[0].abs()),
    "log of sigmoid": functional.logsigmoid,
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x: functional.dropout(x, 0.3),
}


def test_chains_of_operators_have_the_order_of_real_tensors_in_a_trace() -> None:
    def in_order(value: Tensor) -> list[int]:
        return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]

    draw, count = random.Random(0), 0
    for _ in range(400):
        shape = draw.choice([(1, 4, 5, 6), (1, 4, 1, 6), (2, 1, 5, 6), (2, 4, 1, 6), (1, 1, 5, 6), (2, 3, 4, 5)])
        names = [draw.choice(list(CHAIN)) for _ in range(draw.choice((2, 3, 4)))]
        real = torch.randn(shape)
        fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(real)
        try:
            for name in names:
                real = CHAIN[name](real)
        except (RuntimeError, ValueError):  # the shapes do not fit
            continue
        count += 1
        with fake.fake_mode, random_ops.AsInEager():
            for name in names:
                fake = CHAIN[name](fake)
        assert in_order(fake) == in_order(real), (shape, names)
    assert count > 300


@pytest.mark.parametrize("name", ["batch norm", "logsigmoid", "roll"])
def test_one_graph_for_many_sizes_draws_in_the_order_of_eager_mode(name: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            turned = self.linear(x).transpose(1, 2)
            made = {"batch norm": self.norm, "logsigmoid": functional.logsigmoid, "roll": lambda x: x.roll(1, 1)}
            return functional.dropout(made[name](turned), 0.3).mean(2)

    torch.manual_seed(0)
    program = ps.program(Noisy(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.5))
    step = ps.compile_step(program.train_step, backend="aot_eager")
    found = expected = program.init()
    for rows in (4, 3, 5, 6, 7, 4):
        batch = torch.randn(rows, 5, 6), torch.ones(rows, 6)
        (found, _), (expected, _) = step(found, batch), program.train_step(expected, batch)
    assert_trees_close(found.params, expected.params, rtol=0.0, atol=1e-5)
    assert step.graphs == 3  # one for each of the first two sizes


def test_operators_that_run_one_by_one_keep_the_bits_of_eager_mode() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.Flatten())
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    program = ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batch = x, torch.randn(2, 128)
    expected, _ = program.train_step(program.init(), batch)
    found, _ = ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch)
    assert all(torch.equal(found.params[name], leaf) for name, leaf in expected.params.items())
