"""A compiled step computes what the eager one does, whatever its caller has set around it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import purestep as ps
from purestep.errors import StepContractError
from purestep.torch_ext import global_rng

pytestmark = pytest.mark.compile

Pair = tuple[Tensor]
BACKENDS = ("inductor", "aot_eager")


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# --- autocast ---------------------------------------------------------------------------------------------------------


def exact_inside(state: Pair, batch: Pair) -> tuple[Pair, Any]:
    """A product of float32 inside somebody else's autocast, and one that is cast."""
    (w,), (x,) = state, batch
    with torch.autocast("cpu", enabled=False):
        exact = x @ w
    return (w - 0.1 * exact.float(),), {"loss": ps.Mean((x @ w).float().square().sum(), torch.ones(()))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("no_fallback")
def test_what_autocast_leaves_alone_is_cast_by_nobody(backend: str):
    state, batch = (torch.randn(24, 24),), (torch.randn(24, 24),)
    plain, _ = exact_inside(state, batch)
    compiled = ps.compile_step(exact_inside, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager, loss = exact_inside(state, batch)
        found, same_loss = compiled(state, batch)
    close(found[0], eager[0])
    close(found[0], plain[0])  # the product was exact
    torch.testing.assert_close(same_loss["loss"].total, loss["loss"].total, rtol=1e-2, atol=0)
    assert not torch.equal(exact_inside(state, batch)[1]["loss"].total, loss["loss"].total)  # the other one was not
    close(compiled(state, batch)[0][0], plain[0])


@pytest.mark.usefixtures("no_fallback")
def test_code_that_was_made_under_autocast_is_what_it_is_named_by(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """Without a cast in it, it has the name of the same step called without autocast, which takes it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def step(state: Pair, batch: Pair) -> tuple[Pair, Any]:
        with torch.autocast("cpu", enabled=False):
            return (state[0] - 0.3 * batch[0] @ state[0],), {}

    state, batch = (torch.randn(24, 24),), (torch.randn(24, 24),)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(ps.compile_step(step)(state, batch)[0][0], step(state, batch)[0][0])
    close(ps.compile_step(step)(state, batch)[0][0], step(state, batch)[0][0])


def test_a_replay_that_is_cast_again_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("purestep.compile.capture.autocast_disabled", nullcontext)
    with pytest.raises(AssertionError):
        test_what_autocast_leaves_alone_is_cast_by_nobody("aot_eager")


# --- modes and classes of tensors -------------------------------------------------------------------------------------


class OfFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made + 1 if getattr(func, "__name__", "").partition(".")[0] == "sin" else made


@pytest.mark.parametrize("switch", ["", "0"])
def test_a_mode_of_functions_acts_once(switch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PURESTEP_CPU", switch)

    def step(state: Pair, batch: Pair) -> tuple[Pair, Any]:
        return (state[0] + torch.sin(batch[0]),), {}

    state, batch = (torch.zeros(5),), (torch.randn(5),)
    with OfFunctions():
        found, _ = ps.compile_step(step)(state, batch)
    close(found[0], batch[0].sin() + 1)


class Scaled(Tensor):
    """Numbers and a scale, as quantized weights have."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        make: Any = Tensor
        return make._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, strides=numbers.stride())

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, *_: Any) -> Scaled:
        return Scaled(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(Scaled, lambda one: one.numbers * one.scale, args), **(kwargs or {}))


def test_tensors_of_another_class_made_on_the_way():
    def step(state: Pair, batch: Pair) -> tuple[Pair, Any]:
        (w,), (x,) = state, batch
        return (w - 0.1 * torch.mm(x, Scaled(w, w.abs().max())),), {}

    state, batch = (torch.randn(8, 8),), (torch.randn(8, 8),)
    with torch.no_grad():
        found, _ = ps.compile_step(step)(state, batch)
        close(found[0], step(state, batch)[0][0])


# --- random numbers ---------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws that are used in another order than they come in, and of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        half = torch.full_like(x, 0.5)
        first, second, third = torch.bernoulli(half), torch.rand_like(x), torch.randn(x.shape)
        fourth, fifth = torch.randperm(16), torch.bernoulli(half)
        for layer, drawn in zip(self.layers, (fifth, third, second), strict=True):
            x = torch.tanh(layer(x)) * drawn
        return x[:, fourth] * first


@pytest.mark.usefixtures("no_fallback")
def test_draws_are_those_of_the_eager_step_in_its_order():
    program = ps.program(Drawing(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batch = (torch.randn(4, 16), torch.randn(4, 16))
    state = program.init()
    step = ps.compile_step(program.train_step)
    for _ in range(2):
        expected, _ = program.train_step(state, batch)
        state, _ = step(state, batch)
        for name, leaf in expected.params.items():
            close(state.params[name], leaf)


def turned(x: Tensor) -> Tensor:
    """Draws into turned tensors and slices, of which the layout is left to whoever reads them."""
    dropped = functional.dropout(torch.tanh(x).t()) * functional.dropout(torch.tanh(x).t())
    coins = torch.empty(6, 9).t().bernoulli_(0.5) + (x * 2).t()[:, ::2].bernoulli_(0.3).sum()
    others = torch.empty(6, 9).t().normal_() + torch.rand_like(x.t()) + torch.bernoulli(x.t(), 0.5)
    return dropped.cos().t().reshape(-1).cumsum(0).view(6, 9).t() + coins + others


@pytest.mark.usefixtures("no_fallback")
def test_draws_into_turned_tensors_are_those_of_the_eager_step():
    def step(state: Pair, batch: Pair) -> tuple[Pair, Any]:
        return (state[0] + turned(batch[0]),), {}

    state, batch = (torch.zeros(9, 6),), (torch.randn(6, 9),)
    torch.manual_seed(1)
    expected, _ = step(state, batch)
    torch.manual_seed(1)
    found, _ = ps.compile_step(step)(state, batch)
    close(found[0], expected[0])


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("draw", [Tensor.uniform_, Tensor.normal_, lambda x: x.bernoulli_(torch.full_like(x, 0.3))])
def test_draws_into_a_slice_in_place_are_those_of_the_eager_step(draw: Any):
    def step(state: Pair, batch: Pair) -> tuple[Pair, Any]:
        return (state[0] + draw((batch[0] * 2)[:, ::2]),), {}

    state, batch = (torch.zeros(6, 4),), (torch.randn(6, 8),)
    torch.manual_seed(1)
    expected, _ = step(state, batch)
    torch.manual_seed(1)
    found, _ = ps.compile_step(step)(state, batch)
    close(found[0], expected[0])


def scoped_inside() -> None:
    global_rng.seed_cpu(ps.rng.mix(3, "noise"))


@pytest.mark.parametrize("seed", [lambda: torch.manual_seed(3), scoped_inside], ids=["torch", "purestep"])
def test_a_seed_inside_a_step_is_refused(seed: Any):
    def step(state: Pair, batch: Pair) -> tuple[Pair, Any]:
        seed()
        return (state[0] + torch.rand(3),), {}

    with pytest.raises(StepContractError, match=r"seeds torch's generator with \d+.*neither torch.manual_seed.*key"):
        ps.compile_step(step, backend="aot_eager")((torch.zeros(3),), (torch.zeros(3),))


def test_a_generator_that_is_put_back_inside_a_step_draws_again():
    def step(state: Pair, batch: Pair) -> tuple[Pair, Any]:
        with torch.random.fork_rng(devices=[]):
            first = torch.rand(3)
        return (state[0] + first + 2 * torch.rand(3) + 4 * torch.rand(3),), {}

    torch.manual_seed(1)
    expected, _ = step((torch.zeros(3),), (torch.zeros(3),))
    torch.manual_seed(1)
    found, _ = ps.compile_step(step, backend="aot_eager")((torch.zeros(3),), (torch.zeros(3),))
    assert torch.equal(found[0], expected[0])
