"""Norms of tensors that have more than one memory format, as they have with a dimension of size one.

torch's `native_batch_norm_backward` is wrong on the CPU (torch 2.13) for some pairs of layouts, in a loop by hand too:

    import torch

    x = torch.randn(4, 2, 6, dtype=torch.float64).transpose(1, 2).unsqueeze(-1).requires_grad_()
    assert x.shape == (4, 6, 2, 1) and x.stride() == (12, 1, 6, 1)  # channels last, which torch takes for contiguous
    weight, bias = torch.ones(2, 6, dtype=torch.float64).requires_grad_()
    normal = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    given = torch.randn(4, 6, 2, 1, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(normal, bias, given)[0], given.sum((0, 2, 3)))  # fails

Inductor's code computes what that should be. The eager step, which calls this operator, is compared with
`fuzz.compare.OneLayout` around it; `backend="aot_eager"` calls it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from rigs.fuzz import compare
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps

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
ONCE = ("turned", "added")
"""Each operator once."""


class Together(nn.Module):
    """Several modules, each with its own input, in one program: they are compiled once."""

    def __init__(self, nets: dict[str, nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleDict(nets)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {name: net(inputs[name]) for name, net in self.nets.items()}


def squared_errors(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return sum((functional.mse_loss(outputs[name], targets[name]) for name in targets), torch.zeros(()))


def assert_compiled_trains_as_eager(nets: dict[str, nn.Module], batch: Any, keep_eval: tuple[str, ...] = ()) -> None:
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
    found, _ = ps.compile_step(program.train_step)(program.init(), batch)
    assert_trees_close(found.params, expected.params, rtol=0.0, atol=1e-12)


@pytest.mark.soak  # inductor's own code; purestep's part is the test below
@pytest.mark.parametrize("chosen", [ONCE, [name for name in NORMS if name not in ONCE]])
def test_gradients_of_norms(chosen: Sequence[str]) -> None:
    torch.manual_seed(0)
    kinds = {name: NORMS[name] for name in chosen}
    nets: dict[str, nn.Module] = {name: make().double() for name, (make, _) in kinds.items()}
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, (_, shape) in kinds.items()}
    with torch.no_grad():
        targets = {name: torch.randn_like(net(inputs[name])) for name, net in nets.items()}
    kept = ("nets.in evaluation.norm",) if "in evaluation" in kinds else ()
    assert_compiled_trains_as_eager(nets, (inputs, targets), keep_eval=kept)


def photos() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.Flatten())
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    return net.to(memory_format=torch.channels_last), x


class Turned(nn.Module):
    """The gradient of this norm has another layout than a trace says, and is viewed as rows of the linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("made", [photos, lambda: (Turned(), torch.randn(3, 2, 6))], ids=["photos", "turned"])
def test_operators_that_run_one_by_one_keep_the_bits_of_eager_mode(
    made: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    torch.manual_seed(0)
    net, x = made()
    program = ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batch = x, torch.randn_like(net(x))
    expected, _ = program.train_step(program.init(), batch)
    found, _ = ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch)
    assert all(torch.equal(found.params[name], leaf) for name, leaf in expected.params.items())
