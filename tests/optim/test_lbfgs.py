"""`optim.lbfgs` against `torch.optim.LBFGS`, and the rule for transforms that evaluate the loss again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, StepContractError
from purestep.types import Empty, Params

MSE = ps.supervised(nn.MSELoss())


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(40, 2, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x, (x[:, :1] * x[:, 1:]).sin()


def torchs(module: nn.Module, data: Any, steps: int, **options: Any) -> tuple[torch.optim.LBFGS, list[float]]:
    """Train by the plain loop; the losses at the start of each step."""
    optimizer, losses = torch.optim.LBFGS(module.parameters(), **options), []
    x, y = data

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(float(optimizer.step(closure).detach()))
    return optimizer, losses


@pytest.mark.parametrize("search", ["strong_wolfe", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torch_to_the_bit(dtype: torch.dtype, search: Any) -> None:
    options = {"max_iter": 7, "history_size": 5, "line_search_fn": search}
    module = network(dtype)
    optimizer, losses = torchs(module, batch(dtype), 8, lr=0.8, **options)
    program = ps.program(network(dtype), MSE, optim.lbfgs(0.8, **options))
    state, found = program.init(), []
    for _ in range(8):
        state, metrics = program.train_step(state, batch(dtype))
        found.append(float(metrics["loss"]))
    assert_trees_close(state.params, {name: p.detach() for name, p in module.named_parameters()}, exact=True)
    assert found == pytest.approx(losses, rel=1e-6)
    own = optimizer.state[next(module.parameters())]
    memory = state.opt_state
    assert (int(memory.evaluations), int(memory.iterations)) == (own["func_evals"], own["n_iter"])
    assert int(state.updates) == 8
    assert float(metrics["lr"]) == pytest.approx(0.8)


def test_an_update_ends_at_a_small_gradient_as_in_torch() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4, 1)
    module = nn.Linear(2, 1)
    nn.init.zeros_(module.bias)
    program = ps.program(module, MSE, optim.lbfgs())
    state, _ = program.train_step(program.init(), (x, y))
    assert_trees_close(state.params, program.init().params, exact=True)
    assert (int(state.opt_state.evaluations), int(state.opt_state.iterations)) == (1, 0)
    assert_trees_close(program.train_step(state, (x, y + 1))[0].params["bias"], torch.ones(1))


def test_a_layer_that_the_loss_does_not_reach_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = network(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    program = ps.program(Two(), MSE, optim.lbfgs(max_iter=3))
    state = program.init()
    new, _ = program.train_step(state, batch())
    assert torch.equal(new.params["unused.weight"], state.params["unused.weight"])
    alone = ps.program(network(), MSE, optim.lbfgs(max_iter=3))
    other, _ = alone.train_step(alone.init(), batch())
    assert torch.equal(new.params["used.0.weight"], other.params["0.weight"])


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    program = ps.program(network(), MSE, optim.lbfgs(max_iter=3), ema=0.5)
    whole = ps.fit(program.init(), [batch()] * 2, program, epochs=3, progress=False)
    ps.fit(program.init(), [batch()] * 2, program, epochs=1, snapshots=tmp_path, progress=False)
    later = ps.fit(program.init(), [batch()] * 2, program, epochs=3, snapshots=tmp_path, progress=False)
    assert_trees_close(later.state, whole.state, exact=True)


def test_micro_batches_are_the_whole_batch() -> None:
    programs = [ps.program(network(torch.float64), MSE, optim.lbfgs(), microbatches=n) for n in (1, 4)]
    one, other = (program.train_step(program.init(), batch(torch.float64))[0] for program in programs)
    assert_trees_close(one.params, other.params, rtol=1e-6, atol=1e-9)


def test_a_schedule_gives_the_rate_of_each_update() -> None:
    program = ps.program(network(), MSE, optim.lbfgs(ps.schedules.linear(1.0, 0.0, transition_steps=2), max_iter=1))
    state, rates = program.init(), []
    for _ in range(2):
        state, metrics = program.train_step(state, batch())
        rates.append(float(metrics["lr"]))
    assert rates == [1.0, 0.5]


def test_accepted_parameters_that_are_not_finite_are_refused() -> None:
    def falling(model: Any, rows: Tensor) -> ps.Loss:  # without a least value
        return ps.Loss(model(rows).mean(), len(rows))

    tx = optim.lbfgs(1e38, max_iter=3, line_search_fn=None)
    program = ps.program(nn.Linear(1, 1), falling, tx, nonfinite="skip")
    state = program.init()
    new, metrics = program.train_step(state, torch.full((4, 1), 8.0))
    assert float(metrics["applied"]) == 0.0
    assert_trees_close((new.params, new.opt_state), (state.params, state.opt_state), exact=True)


# --- transforms that evaluate -----------------------------------------------------------------------------------------


def probing(seen: list[Any]) -> optim.Transform:
    """Evaluates at its parameters, at others and again at the first ones, and halves the parameters."""

    def update(updates: Params, state: Empty, params: Params, *, value_and_grad: Any) -> Any:
        half = {name: param / 2 for name, param in params.items()}
        copies = {name: param.clone() for name, param in params.items()}
        seen.extend([(updates, value_and_grad(params)), value_and_grad(half), value_and_grad(copies)])
        return half, state

    return optim.Transform(lambda params: Empty(), update, elementwise=False, evaluates=True)


class Noisy(nn.Module):
    """Dropout and batch statistics: each pass draws, and writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_each_evaluation_draws_the_same_numbers_from_the_same_buffers() -> None:
    seen: list[Any] = []
    program = ps.program(Noisy(), MSE, probing(seen))
    _, metrics = program.train_step(program.init(), batch())
    (given, first), other, again = seen
    assert_trees_close(given, first[1], exact=True)
    assert_trees_close(again, first, exact=True)
    assert float(first[0]) == pytest.approx(float(metrics["loss"]))
    assert float(other[0]) != float(first[0])


def test_buffers_are_those_of_a_pass_at_the_accepted_parameters() -> None:
    program = ps.program(Noisy(), MSE, probing([]))
    state = program.init()
    new, _ = program.train_step(state, batch())
    half = state._replace(params={name: param / 2 for name, param in state.params.items()})
    plain = ps.program(Noisy(), MSE, optim.sgd(0.0))
    expected, _ = plain.train_step(plain.init()._replace(params=half.params), batch())
    assert_trees_close(new.params, half.params, exact=True)
    assert_trees_close(new.buffers, expected.buffers, exact=True)
    assert int(new.buffers["body.1.num_batches_tracked"]) == 1


def test_a_part_of_another_transform_is_refused() -> None:
    whole = {
        "chain": lambda tx: optim.chain(optim.clip_by_global_norm(1.0), tx),
        "masked": lambda tx: optim.masked(tx, "weight"),
        "partition": lambda tx: optim.partition({"a": tx}, [("", "a")]),
        "lookahead": optim.lookahead,
    }
    for make in whole.values():
        program = ps.program(network(), MSE, make(optim.lbfgs()))
        with pytest.raises(ConfigError, match=r"evaluates the loss again.*pass it alone"):
            program.train_step(program.init(), batch())


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"accumulate": 2}, "microbatches="),
        ({"sam": 0.1}, "sam=None"),
        ({"precision": "16-mixed"}, "bf16-mixed"),
        ({"scaler": ps.scaler.dynamic()}, "no scaler"),
    ],
)
def test_a_loss_that_is_not_that_of_one_call_is_refused(settings: Any, cure: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluates the loss of a call again.*{cure}"):
        ps.program(network(), MSE, optim.lbfgs(), **settings)


def test_a_graph_and_a_map_are_refused() -> None:
    program = ps.program(network(), MSE, optim.lbfgs())
    with pytest.raises(ConfigError, match="compile=False"):
        ps.compile_step(program.train_step)
    with pytest.raises(ConfigError, match="compile=False"):
        ps.fit(program.init(), [batch()], program, epochs=1, compile=True, progress=False)
    both = ps.ensemble(program, 2)
    with pytest.raises(StepContractError, match=r"no torch.func transform.*optim.adamw"):
        both.train_step(both.init(seeds=[0, 1]), batch())

    def steps(state: Any, data: Any) -> Any:  # a step of the user's own
        return program.train_step(state, data)

    with pytest.raises(StepContractError, match="no graph of it"):
        ps.compile_step(steps, backend="aot_eager")(program.init(), batch())


def test_a_run_on_a_gpu_stays_eager_by_itself() -> None:
    from purestep.compile import prepared

    program = ps.program(network(), MSE, optim.lbfgs())
    said: list[str] = []
    found = prepared(program, torch.device("cuda"), wanted="auto", donated=False, say=said.append)
    assert found.train_step is program.train_step
    assert not said


def test_a_derivative_through_it_is_refused() -> None:
    program = ps.program(network(), MSE, optim.lbfgs())
    state = program.init()
    state = state._replace(params={name: param.requires_grad_() for name, param in state.params.items()})
    with pytest.raises(StepContractError, match="derivative through its line search"):
        program.train_step(state, batch())


def test_torchs_class_names_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"needs a closure.*optim\.lbfgs"):
        optim.from_torch(torch.optim.LBFGS, lr=1.0)


@pytest.mark.parametrize(
    "wrong", [{"max_iter": 0}, {"history_size": 0}, {"line_search_fn": "armijo"}, {"tolerance_grad": -1.0}]
)
def test_arguments_out_of_range_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        optim.lbfgs(**wrong)
