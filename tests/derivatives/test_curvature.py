"""Products, eigenvalues and traces equal those of the full matrices of nets of about 100 parameters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from derivatives_cases import CROSS_ENTROPY, TinyGPT, program, text_objective, texts
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep.errors import ConfigError, StateError, StepContractError
from purestep.step import parts_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"  # torch's own, at the first use of forward mode
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def flat(params: dict[str, Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in params.values()])


def shaped(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = vector.split([p.numel() for p in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


def matrix(product: Any, params: dict[str, Tensor]) -> Tensor:
    """All products with unit vectors, mapped."""
    identity = torch.eye(sum(p.numel() for p in params.values()), dtype=torch.float64)
    return torch.func.vmap(lambda v: flat(product(shaped(v, params))))(identity)


def full_hessian(chosen: ps.Program, state: ps.TrainState, batch: Any) -> Tensor:
    parts = parts_for(chosen, "test")

    def loss(vector: Tensor) -> Tensor:
        return parts.loss(shaped(vector, state.params), state, batch, (), train=True).mean

    return torch.func.hessian(loss)(flat(state.params))


def mse_batch() -> tuple[Tensor, Tensor]:
    x, _ = vector_batch(9, dtype=torch.float64)
    return x, x[:, :3].sin()


LOSSES = {
    "cross_entropy": (CROSS_ENTROPY, lambda: vector_batch(9, dtype=torch.float64)),
    "mse": (ps.supervised(nn.MSELoss()), mse_batch),
}


@pytest.mark.parametrize("name", LOSSES)
def test_products_equal_the_full_matrices(name: str):
    objective, batch_of = LOSSES[name]
    chosen, batch = program(tiny_mlp(), objective), batch_of()
    state = chosen.init(device="cpu")
    hessian = ps.curvature.hessian(chosen)
    found = matrix(lambda v: hessian(state, batch, v), state.params)
    torch.testing.assert_close(found, full_hessian(chosen, state, batch), **EXACT)


def test_penalties_of_parameters_count():
    def objective(model: ps.Model, batch: Any) -> ps.Loss:
        penalty = sum(p.pow(4).sum() for p in model.params.values())
        return ps.Loss((model(batch[0]) - batch[1]).square().mean() + penalty, len(batch[0]))

    chosen, batch = program(nn.Linear(4, 3), objective), mse_batch()
    state = chosen.init(device="cpu")
    hessian = ps.curvature.hessian(chosen)
    exact = full_hessian(chosen, state, batch)
    torch.testing.assert_close(matrix(lambda v: hessian(state, batch, v), state.params), exact, **EXACT)


def test_a_transformer_with_dropout_has_one_mask_for_all_products():
    chosen, batch = program(TinyGPT(), text_objective), texts()
    state = chosen.init(device="cpu")
    generator = torch.Generator().manual_seed(0)
    one, two = (
        {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in state.params.items()}
        for _ in range(2)
    )
    product = ps.curvature.hessian(chosen)
    left = flat(one) @ flat(product(state, batch, two))
    right = flat(two) @ flat(product(state, batch, one))
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    still = ps.curvature.hessian(chosen, train=False)(state, batch, two)
    assert not torch.allclose(flat(still), flat(product(state, batch, two)))


@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
def test_eigenvalues_are_those_of_the_full_matrix(which: str):
    chosen, batch = program(tiny_mlp()), vector_batch(9, dtype=torch.float64)
    state = chosen.init(device="cpu")
    product = ps.curvature.hessian(chosen)
    found = ps.curvature.eigenvalues(lambda v: product(state, batch, v), state.params, k=4, which=which, tol=0)
    exact = torch.linalg.eigvalsh(full_hessian(chosen, state, batch)).flip(0)
    expected = {"LA": exact[:4], "SA": exact[-4:], "LM": exact[exact.abs().argsort()[-4:].sort().values]}[which]
    torch.testing.assert_close(found.values, expected, **EXACT)
    for i in range(4):
        vector = {name: v[i] for name, v in found.vectors.items()}
        scaled = {name: v * found.values[i] for name, v in vector.items()}
        assert_trees_close(product(state, batch, vector), scaled, rtol=0, atol=1e-9)
        assert flat(vector).norm() == pytest.approx(1)


def test_names_count_and_their_order_does_not():
    chosen, batch = program(tiny_mlp()), vector_batch(9, dtype=torch.float64)
    state = chosen.init(device="cpu")

    def backward(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(reversed(list(params.items())))

    product = ps.curvature.hessian(chosen)
    expected = product(state, batch, state.params)
    assert_trees_close(product(state, batch, backward(state.params)), expected, rtol=0, atol=0)
    find = functools.partial(ps.curvature.eigenvalues, like=state.params, k=2)
    found = find(lambda v: backward(product(state, batch, v)))
    assert torch.equal(found.values, find(lambda v: product(state, batch, v)).values)


def test_the_eigenvalues_of_a_matrix_of_zeros_are_0():
    like = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    found = ps.curvature.eigenvalues(lambda v: {name: 0 * p for name, p in v.items()}, like, k=3)
    assert found.values.tolist() == [0, 0, 0]
    vectors = torch.cat([v.flatten(1) for v in found.vectors.values()], 1)
    assert torch.equal(vectors @ vectors.T, torch.eye(3))


def test_the_trace_is_within_its_error():
    chosen, batch = program(tiny_mlp()), vector_batch(9, dtype=torch.float64)
    state = chosen.init(device="cpu")
    product = ps.curvature.hessian(chosen)
    found = ps.curvature.trace(lambda v: product(state, batch, v), state.params, samples=200)
    exact = matrix(lambda v: product(state, batch, v), state.params)
    off = exact - exact.diag().diag()
    assert abs(found.mean - exact.trace()) < 4 * found.standard_error
    torch.testing.assert_close(found.standard_error, (2 * off.square().sum() / 200).sqrt(), rtol=0.3, atol=0)
    again = ps.curvature.trace(lambda v: product(state, batch, v), state.params, samples=200)
    assert torch.equal(again.mean, found.mean)
    assert ps.curvature.trace(lambda v: product(state, batch, v), state.params, samples=1).standard_error.isnan()


def test_errors():
    chosen, batch = program(tiny_mlp()), vector_batch(9)
    state = chosen.init(device="cpu")
    product = ps.curvature.hessian(chosen)
    with pytest.raises(StateError, match="vector/0.weight: the vector has shape None"):
        product(state, batch, {})
    with pytest.raises(StateError, match=r"vector/2.bias: the vector has shape torch.Size\(\[1\]\)"):
        product(state, batch, {**state.params, "2.bias": torch.ones(1)})
    with pytest.raises(ConfigError, match="no objective"):
        ps.curvature.hessian(ps.Program(lambda state, batch: (state, {})))
    for options, match in (({"k": 67}, "k=67 must be in"), ({"k": 0}, "k=0"), ({"which": "XX"}, "which='XX'")):
        with pytest.raises(ConfigError, match=match):
            ps.curvature.eigenvalues(lambda v: v, state.params, **options)
    with pytest.raises(ConfigError, match=r"of 5 eigenvalues converged .*max_iterations"):
        ps.curvature.eigenvalues(lambda v: product(state, batch, v), state.params, k=5, tol=0, max_iterations=1)
    with pytest.raises(ConfigError, match="the product has numbers that are not finite"):
        ps.curvature.eigenvalues(lambda v: {name: p * torch.nan for name, p in v.items()}, state.params)
    for measure in (ps.curvature.eigenvalues, ps.curvature.trace):
        with pytest.raises(StateError, match="product/0.bias: the vector has shape None"):
            measure(lambda v: {"0.weight": v["0.weight"]}, state.params)
        with pytest.raises(StateError, match=r"product/2.bias: the vector has shape torch.Size\(\[1\]\)"):
            measure(lambda v: {**v, "2.bias": v["2.bias"][:1]}, state.params)
    with pytest.raises(ConfigError, match="samples=0"):
        ps.curvature.trace(lambda v: v, state.params, samples=0)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda h: self.body(h).tanh(), x, use_reentrant=False))


def test_activation_checkpointing_is_named():
    chosen, batch = program(Checkpointed()), vector_batch(8, dtype=torch.float64)
    state = chosen.init(device="cpu")
    chosen.train_step(state, batch)
    calls: dict[str, Any] = {
        "curvature.hessian": lambda: ps.curvature.hessian(chosen)(state, batch, state.params),
        "per_example": lambda: ps.per_example(chosen)(state, batch),
        "gradient_noise_scale": lambda: ps.gradient_noise_scale(chosen)(state, batch),
    }
    for where, call in calls.items():
        with pytest.raises(
            StepContractError, match=rf"{where}.*: torch.func cannot map this model: activation checkpointing"
        ):
            call()


def test_the_models_own_errors_pass():
    def wrong(model: ps.Model, batch: Any) -> ps.Loss:
        raise RuntimeError("my own")

    chosen, batch = program(nn.Linear(4, 3), wrong), vector_batch(8, dtype=torch.float64)
    state = chosen.init(device="cpu")
    with pytest.raises(RuntimeError, match="^my own$"):
        ps.curvature.hessian(chosen)(state, batch, state.params)


@pytest.mark.compile
def test_compiled_equals_eager():
    chosen, batch = program(tiny_mlp()), vector_batch(9, dtype=torch.float64)
    state = chosen.init(device="cpu")
    product = ps.curvature.hessian(chosen)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert_trees_close(compiled(state, batch, state.params), product(state, batch, state.params), **EXACT)
