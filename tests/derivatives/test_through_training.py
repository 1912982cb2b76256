"""Derivatives through train steps: the meta-gradient of the guide, and hypergradients, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from derivatives_cases import CROSS_ENTROPY
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import StepContractError

EXACT = {"rtol": 1e-12, "atol": 1e-13}
Params = dict[str, Tensor]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [vector_batch(8, seed=seed, dtype=torch.float64) for seed in range(count)]


def after_a_step(chosen: ps.Program, state: ps.TrainState) -> Callable[[Params], Tensor]:
    """The function of the guide: the loss of another batch after one step, as a function of the weights before it."""
    one, (x, y) = batches(2)

    def loss(params: Params) -> Tensor:
        adapted, _ = chosen.train_step(state._replace(params=params), one)
        return nn.functional.cross_entropy(chosen.bind(adapted, train=True)(x), y)

    return loss


@pytest.mark.compile
def test_a_meta_gradient_compiles():
    chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, optim.adam(0.01), precision="64-true")
    state = chosen.init(device="cpu")
    meta_gradient = torch.func.grad(after_a_step(chosen, state))
    compiled = torch.compile(meta_gradient, fullgraph=True, backend="aot_eager")
    assert_trees_close(compiled(state.params), meta_gradient(state.params), **EXACT)


@pytest.mark.compile
def test_steps_of_several_programs_compile():
    batch = batches(1)[0]
    for _ in range(2):
        chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, optim.sgd(0.1), precision="64-true")
        state = chosen.init(device="cpu")
        compiled = torch.compile(copy.deepcopy(chosen).train_step, fullgraph=True, backend="aot_eager")
        assert_trees_close(compiled(state, batch)[0].params, chosen.train_step(state, batch)[0].params, **EXACT)


def test_a_meta_gradient_needs_the_engine_of_torch_func():
    chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, optim.sgd(0.1), precision="64-true", engine="autograd")
    state = chosen.init(device="cpu")
    with pytest.raises(StepContractError, match='engine="auto"'):
        torch.func.grad(after_a_step(chosen, state))(state.params)


class Learner(NamedTuple):
    inner: ps.TrainState
    log_rate: Tensor


def learner() -> tuple[ps.Program, Callable[..., Any], Learner]:
    """A step of one's own: three steps with a rate, then a step of the rate by the loss after them."""
    tx = optim.inject(optim.sgd)(learning_rate=0.1, momentum=0.9)
    chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, tx, precision="64-true")

    def train_step(state: Learner, batch: Any) -> tuple[Learner, Any]:
        *train, (x, y) = batch

        def loss(log_rate: Tensor) -> tuple[Tensor, Any]:
            opt_state = optim.set_hyperparams(state.inner.opt_state, learning_rate=log_rate.exp())
            inner = state.inner._replace(opt_state=opt_state)
            for rows in train:
                inner, _ = chosen.train_step(inner, rows)
            after = nn.functional.cross_entropy(chosen.bind(inner, train=True)(x), y)
            return after, (inner, after.detach())

        gradient, (inner, after) = torch.func.grad(loss, has_aux=True)(state.log_rate)
        metrics = {"loss": ps.metrics.as_mean(after, 1), "gradient": ps.metrics.as_mean(gradient, 1)}
        return Learner(inner, state.log_rate - 0.5 * gradient), metrics

    return chosen, train_step, Learner(chosen.init(device="cpu"), torch.tensor(0.1).log())


def test_a_hypergradient_is_the_slope_of_the_loss():
    _, step, state = learner()
    given = batches(4)
    gradient = float(step(state, given)[1]["gradient"])
    losses = [float(step(state._replace(log_rate=state.log_rate + h), given)[1]["loss"]) for h in (1e-2, -1e-2)]
    assert gradient == pytest.approx((losses[0] - losses[1]) / 2e-2, rel=1e-2)


@pytest.mark.compile
def test_a_step_with_a_hypergradient_is_one_graph():
    _, step, state = learner()
    compiled = ps.compile_step(step, backend="aot_eager", donate=True)
    found, live = state, state
    for _ in range(3):
        found, metrics = step(found, batches(4))
        live, measured = compiled(live, batches(4))
        assert float(measured["gradient"]) == pytest.approx(float(metrics["gradient"]), rel=1e-5)
    assert_trees_close(dict(live.inner.params), found.inner.params, rtol=1e-6, atol=1e-7)
