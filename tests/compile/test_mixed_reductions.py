"""Sums over rows that inductor computes together with sums over columns, as parts of a concatenation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import purestep as ps
from purestep import optim
from purestep.compile.inductor_fixes import mixed_reductions

ROWS, WIDTH = 1 << 13, 768  # inductor mixes sums of 5 Mi elements or more


def layer_norm(x: Tensor, wanted: Tensor) -> Any:
    return torch.cat([(x * wanted).sum(0), wanted.sum(0)]), (x * wanted).sum(1)


def through_views(x: Tensor, wanted: Tensor) -> Any:
    return torch.stack([(x * wanted).sum(0), wanted.sum(0)]), (x + wanted).sum(1)


def products(x: Tensor, wanted: Tensor) -> Any:
    return torch.cat([(1 + x * 1e-6).prod(0), wanted[0]]), (x * wanted).sum(1)


FUNCTIONS = [layer_norm, through_views, products]


def separated(function: Callable[..., Any], *, device: str, rows: int = ROWS) -> int:
    """How many sums the pass separates."""
    from torch._inductor.decomposition import select_decomp_table

    with torch._subclasses.FakeTensorMode():
        x = torch.empty(rows, WIDTH, device=device)
        traced = make_fx(function, decomposition_table=select_decomp_table())(x, x.clone())
    mixed_reductions.fix(traced.graph)
    return sum(node.target is torch.ops.prims.inductor_force_stride_order.default for node in traced.graph.nodes)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_sums_in_concatenations_are_separated_on_a_gpu(function: Any) -> None:
    assert separated(function, device="meta") == (1 if function is products else 2)  # as on any that is no CPU
    assert separated(function, device="meta", rows=64) == 0
    assert separated(function, device="cpu") == 0


@pytest.mark.cuda
@pytest.mark.parametrize("function", FUNCTIONS[:2])  # eager products are compiled by CUDA, which the rehearsal lacks
def test_a_graph_is_right(function: Any) -> None:
    def step(state: Any, batch: Any) -> Any:
        both, rows = function(*batch)
        return {"both": both.flatten(), "rows": rows}, {}

    batch = tuple(torch.randn(2, ROWS, WIDTH, device="cuda"))
    both, rows = function(*batch)
    state = {"both": torch.zeros_like(both.flatten()), "rows": torch.zeros_like(rows)}
    compiled = ps.compile_step(step)
    for _ in range(2):
        torch.full((1 << 24,), torch.nan, device="cuda")  # what the memory has that is not written
        found, _ = compiled(state, batch)
        torch.testing.assert_close(found["both"], both.flatten(), rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(found["rows"], rows, rtol=1e-3, atol=1e-2)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.between, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.between(self.first(x)) + x))


@pytest.mark.cuda
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_of_layer_norms_are_those_of_eager(precision: str, donate: bool) -> None:
    loss = ps.supervised(lambda outputs, classes: functional.cross_entropy(outputs.float(), classes))
    program = ps.program(Norms(), loss, optim.sgd(1.0), precision=precision)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(ROWS, WIDTH, generator=generator).cuda(), (torch.arange(ROWS) % 4).cuda()
    begun = program.init(device="cuda")
    step = ps.compile_step(program.train_step, donate=donate)
    torch.full((1 << 26,), torch.nan, device="cuda")
    state, _ = step(program.init(device="cuda"), batch)
    expected, _ = program.train_step(begun, batch)
    for name, value in ps.clone(state).params.items():
        off = (value - expected.params[name]).norm()
        assert off <= 0.02 * (expected.params[name] - begun.params[name]).norm(), name
