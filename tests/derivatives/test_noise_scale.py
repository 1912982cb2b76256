"""The noise scale of a quadratic is known; estimates are unbiased, and equal the formulas on the loop's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivatives_cases import TinyGPT, program, text_objective, texts
from helpers import tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep.errors import ConfigError

CURVATURE = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
SPREAD = torch.tensor([0.5, 1.0, 0.2], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(WEIGHTS.clone())

    def forward(self, x: Tensor) -> Tensor:
        return ((self.w - x).square() * CURVATURE).sum(-1) / 2


def quadratic() -> ps.Program:
    """Gradients h (w - x) for x ~ N(0, s^2): the true one is h w, and the covariance has the trace sum(h^2 s^2)."""
    return program(Point(), lambda model, batch: ps.Loss(model(batch).mean(), len(batch)))


def batches(count: int, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list((torch.randn(count, rows, 3, generator=generator, dtype=torch.float64) * SPREAD).unbind())


def test_the_closed_form_of_a_quadratic():
    chosen, count = quadratic(), 400
    found = ps.gradient_noise_scale(chosen)(chosen.init(device="cpu"), *batches(count, 32))
    trace, squared = (CURVATURE * SPREAD).square().sum(), (CURVATURE * WEIGHTS).square().sum()
    spread = (2 / (count * 31)) ** 0.5  # relative, of the sample variance of normal numbers
    torch.testing.assert_close(found.trace, trace, rtol=3 * spread, atol=0)
    torch.testing.assert_close(found.squared_norm, squared, rtol=0.05, atol=0)
    torch.testing.assert_close(found.noise_scale, trace / squared, rtol=0.05 + 3 * spread, atol=0)


def test_estimates_are_unbiased():
    """Averaged over all batches of 2 from a population of 6 with equal shares, they are exactly those of it."""
    chosen = quadratic()
    state, population = chosen.init(device="cpu"), batches(1, 6)[0]
    pairs = [population[[i, j]] for i in range(6) for j in range(6)]
    found = ps.gradient_noise_scale(chosen)(state, *pairs)
    gradients = CURVATURE * (WEIGHTS - population)
    mean = gradients.mean(0)
    torch.testing.assert_close(found.trace, (gradients - mean).square().sum() / 6, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.squared_norm, mean.square().sum(), rtol=1e-12, atol=0)


def test_chunks_equal_the_whole_batch():
    chosen, batch = program(tiny_mlp()), vector_batch(7, dtype=torch.float64)
    state = chosen.init(device="cpu")
    estimates = [ps.gradient_noise_scale(chosen, chunk_size=size)(state, batch) for size in (3, 7)]
    for one, other in zip(*estimates, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)


def test_weights_of_the_objective_count():
    chosen, (x, y) = program(TinyGPT(lambda: nn.Dropout(0.0)), text_objective), texts(6)
    y[0, 2:], y[1] = -100, -100
    state = chosen.init(device="cpu")
    found = ps.gradient_noise_scale(chosen)(state, (x, y))
    each = ps.per_example(chosen)(state, (x, y))
    weights = each.weights.double()[[0, 2, 3, 4, 5]]  # a row that counts nothing is no example
    flat = torch.cat([grad.flatten(1) for grad in each.grads.values()], 1)[[0, 2, 3, 4, 5]]
    rows = flat * (weights / weights.mean())[:, None]
    variance = rows.var(0).sum()
    torch.testing.assert_close(found.trace, variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.squared_norm, rows.mean(0).square().sum() - variance / 5, rtol=1e-10, atol=0)


def test_a_batch_that_counts_less_than_twice_is_left_out():
    net = nn.Sequential(nn.Linear(4, 3, dtype=torch.float64))
    chosen = ps.program(net, ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1), precision="64-true")
    estimate, state = ps.gradient_noise_scale(chosen), chosen.init(device="cpu")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    good, once, never = ((x, torch.tensor(y)) for y in ([0, 1, 2], [1, -100, -100], [-100] * 3))
    found = estimate(state, good)
    assert found.noise_scale.isfinite()
    assert estimate(state, once, good, never) == found
    assert all(value.isnan() for value in estimate(state, once, never))


@pytest.mark.parametrize(
    ("options", "rows", "match"),
    [
        ({"chunk_size": 0}, 4, "chunk_size=0"),
        ({}, 1, "a batch of one row has no spread"),
    ],
)
def test_errors(options: dict[str, Any], rows: int, match: str):
    chosen = quadratic()
    with pytest.raises(ConfigError, match=match):
        ps.gradient_noise_scale(chosen, **options)(chosen.init(device="cpu"), *batches(1, rows))
    with pytest.raises(ConfigError, match="no batch"):
        ps.gradient_noise_scale(chosen)(chosen.init(device="cpu"))
