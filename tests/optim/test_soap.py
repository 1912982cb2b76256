"""SOAP beside its algorithm, written with whole Kronecker products, step by step."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError
from purestep.types import Params

# No first product of a gradient has more than one eigenvalue of 0: the eigenvectors of several depend on rounding.
SHAPES = {"matrix": (4, 3), "square": (5, 5), "kernel": (3, 2, 2, 2), "vector": (5,), "scalar": ()}
STEPS = 13


class Reference:
    """Vyas et al., 2024, with the conventions of the authors' code, for one parameter: numbers in one vector."""

    def __init__(self, shape: tuple[int, ...], *, b1: float, b2: float, eps: float, beta: float, every: int, most: int):
        self.shape, self.b1, self.b2, self.eps, self.beta, self.every = shape, b1, b2, eps, beta, every
        rotates = len(shape) > 1
        self.grams = [torch.zeros(n, n).double() if rotates and n <= most else None for n in shape]
        self.bases: list[Tensor] | None = None
        self.mean = self.square = torch.zeros(math.prod(shape)).double()
        self.count = 0

    def rotation(self) -> Tensor:
        assert self.bases is not None
        return functools.reduce(torch.kron, [basis.contiguous() for basis in self.bases], torch.ones(1, 1).double())

    def direction(self, g: Tensor) -> Tensor:
        found = torch.zeros_like(g)
        if self.bases is not None:
            self.count += 1
            turn = self.rotation()
            turned = turn.T @ g.reshape(-1)
            self.mean = self.b1 * self.mean + (1 - self.b1) * turned
            self.square = self.b2 * self.square + (1 - self.b2) * turned**2
            size = (1 - self.b2**self.count) ** 0.5 / (1 - self.b1**self.count)
            found = (turn @ (self.mean / (self.square.sqrt() + self.eps)) * size).reshape(self.shape)
        for dim, gram in enumerate(self.grams):
            if gram is not None:
                others = [axis for axis in range(g.ndim) if axis != dim]
                gram.mul_(self.beta).add_(torch.tensordot(g, g, dims=(others, others)), alpha=1 - self.beta)
        if self.bases is None:
            pairs = zip(self.grams, self.shape, strict=True)
            self.bases = [torch.eye(n).double() if s is None else torch.linalg.eigh(s)[1].flip(1) for s, n in pairs]
        elif self.count % self.every == 0:
            self.refresh()
        return found

    def refresh(self) -> None:
        assert self.bases is not None
        plain, order = self.rotation() @ self.mean, torch.ones(1, 1).double()
        for dim, gram in enumerate(self.grams):
            old = self.bases[dim]
            if gram is None:
                order = torch.kron(order, torch.eye(len(old)).double())
                continue
            by_size = torch.diag(old.T @ gram @ old).argsort(descending=True)
            order = torch.kron(order, torch.eye(len(old)).double()[by_size])
            self.bases[dim] = torch.linalg.qr(gram @ old[:, by_size])[0]
        self.square, self.mean = order @ self.square, self.rotation().T @ plain


def gradient(param: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """Anisotropic, so that the eigenvectors are well separated and change their order."""
    noise = torch.randn(param.shape, generator=generator, dtype=param.dtype)
    for dim, size in enumerate(param.shape):
        scale = 1.0 + torch.arange(size, dtype=param.dtype) * (1.0 if step < STEPS // 2 else -0.3)
        noise = noise * scale.reshape([-1 if axis == dim else 1 for axis in range(param.ndim)])
    return noise + param.detach() / 3


def worst(tx: optim.Transform, *, rate: float = 2**-7, weight_decay: float = 0.0, **options: Any) -> float:
    """The largest difference over all steps in float64."""
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    given = {"b1": 0.95, "b2": 0.95, "eps": 1e-8, "beta": 0.95, "every": 10, "most": 10_000, **options}
    twins = {name: Reference(shape, **given) for name, shape in SHAPES.items()}
    theirs, state, found = dict(params), tx.init(params), 0.0
    for step in range(STEPS):
        grads = {name: gradient(p, step, generator) for name, p in params.items()}
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        for name, twin in twins.items():
            direction = twin.direction(grads[name]) + weight_decay * theirs[name]
            theirs[name] = theirs[name] - rate * direction
            found = max(found, float((params[name] - theirs[name]).abs().max()))
    return found


@pytest.mark.peer
@pytest.mark.parametrize(
    ("options", "twin"),
    [
        ({}, {}),
        ({"precondition_frequency": 1}, {"every": 1}),
        ({"precondition_frequency": 3, "b1": 0.5, "b2": 0.9}, {"every": 3, "b1": 0.5, "b2": 0.9, "beta": 0.9}),
        ({"precondition_frequency": 2, "shampoo_beta": 0.5, "eps": 0.1}, {"every": 2, "beta": 0.5, "eps": 0.1}),
        ({"precondition_frequency": 2, "max_precond_dim": 3}, {"every": 2, "most": 3}),
        ({"max_precond_dim": 1}, {"most": 1}),
        ({"weight_decay": 0.125}, {"weight_decay": 0.125}),
    ],
)
def test_every_step_is_the_papers(options: dict[str, Any], twin: dict[str, Any]) -> None:
    tx = optim.soap(2**-7, **{"weight_decay": 0.0, **options})
    assert worst(tx, **twin) < 1e-10


@pytest.mark.parametrize("fault", [{"every": 4}, {"beta": 0.9}, {"most": 3}])
def test_another_algorithm_is_told_apart(fault: dict[str, Any]) -> None:
    """The planted fault."""
    tx = optim.soap(2**-7, weight_decay=0.0, precondition_frequency=3)
    assert worst(tx, **{"every": 3}) < 1e-10 < 1e-4 < worst(tx, **{"every": 3, **fault})


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(8, n, generator=generator).double() for n in (4, 3)) for _ in range(6)]  # type: ignore[misc]


def program(tx: optim.Transform | None = None, **options: Any) -> ps.Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    tx = tx or optim.soap(0.01, precondition_frequency=2)
    return ps.program(net, ps.supervised(nn.MSELoss()), tx, **options)


def run(step: Any, state: ps.TrainState) -> ps.TrainState:
    for batch in data():
        state, _ = step(state, batch)
    return state


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_step_is_the_eager_one() -> None:
    eager = program()
    step = ps.compile_step(eager.train_step, backend="aot_eager")
    found, expected = run(step, eager.init()), run(eager.train_step, eager.init())
    assert_trees_close(found, expected, rtol=1e-8, atol=1e-10)


def test_the_step_is_pure_and_can_be_mapped() -> None:
    one = program()
    ps.testing.assert_pure(one.train_step, one.init(), data()[0])
    states = [run(one.train_step, one.init())._replace(key=one.init(seed).key) for seed in range(2)]
    stacked: Any = ps.tree.map(lambda *leaves: torch.stack(leaves), *states)
    mapped, _ = torch.func.vmap(one.train_step, in_dims=(0, None))(stacked, data()[0])
    alone, _ = one.train_step(states[0], data()[0])
    assert_trees_close(ps.tree.map(lambda leaf: leaf[0], mapped.params), alone.params, rtol=1e-8, atol=1e-10)


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing() -> None:
    one = program(nonfinite="skip")
    for state in (one.init(), run(one.train_step, one.init())):
        x, y = data()[0]
        new, metrics = one.train_step(state, (x * math.nan, y))
        assert float(metrics["applied"]) == 0.0
        assert_trees_close(new.opt_state, state.opt_state, exact=True)


def test_gradients_of_zero_give_a_step_of_zero() -> None:
    tx, params = optim.scale_by_soap(precondition_frequency=1), {"w": torch.ones(3, 2), "b": torch.ones(2)}
    state, zeros = tx.init(params), {"w": torch.zeros(3, 2), "b": torch.zeros(2)}
    for _ in range(3):
        updates, state = tx.update(zeros, state, params)
        assert all(not u.any() for u in updates.values())


def test_a_parameter_without_a_gradient_begins_at_its_first_one() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor, second: bool) -> Tensor:
            return self.b(x) if second else self.a(x)

    def objective(model: Any, batch: Any) -> ps.Loss:
        x, y, second = batch
        return ps.Loss(nn.functional.mse_loss(model(x, second), y), torch.tensor(1.0), {})

    torch.manual_seed(0)
    one = ps.program(Heads(), objective, optim.soap(0.01, precondition_frequency=2, weight_decay=0.0))
    x, y = data()[0]
    start = one.init()
    state = start
    for _ in range(3):
        state, _ = one.train_step(state, (x, y, False))
    assert_trees_close(state.params["b.weight"], start.params["b.weight"], exact=True)
    late, early = state, start
    for _ in range(4):
        late, _ = one.train_step(late, (x, y, True))
        early, _ = one.train_step(early, (x, y, True))
    assert_trees_close(late.params["b.weight"], early.params["b.weight"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precisions_keep_their_dtypes_and_rotate_in_float32(dtype: torch.dtype) -> None:
    tx, params = optim.soap(precondition_frequency=1), {"w": torch.randn(4, 3).to(dtype)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": torch.randn(4, 3).to(dtype)}, state, params)
    assert updates["w"].dtype == dtype
    assert updates["w"].isfinite().all()
    assert {basis.dtype for basis in state[0].basis["w"]} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 1.0}, r"soap: b1=1\.0"),
        ({"shampoo_beta": -0.1}, r"soap: shampoo_beta=-0\.1"),
        ({"precondition_frequency": 0}, "soap: precondition_frequency=0 must be an int of at least 1"),
        ({"max_precond_dim": 1.5}, r"soap: max_precond_dim=1\.5"),
        ({"eps": -1.0}, "soap: eps=-1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optim.soap(**options)


def test_a_basis_is_orthogonal_and_diagonalizes() -> None:
    params: Params = {"w": torch.randn(6, 4, dtype=torch.float64)}
    tx = optim.scale_by_soap(precondition_frequency=1)
    state = tx.init(params)
    g = {"w": torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    for _ in range(60):
        _, state = tx.update(g, state, params)
    for basis, gram in zip(state.basis["w"], state.gram["w"], strict=True):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)).double())
        product = basis.mT @ gram @ basis
        torch.testing.assert_close(product, torch.diag(product.diagonal()), rtol=0, atol=1e-8)
