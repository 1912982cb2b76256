"""`ps.Sam` beside the algorithm of its paper, as the usual implementation for torch writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, NonFiniteError, StepContractError

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [tuple(torch.randn(8, n, generator=GENERATOR, dtype=torch.float64) for n in (3, 2)) for _ in range(6)]


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)
    return nn.Sequential(*layers).double()


def made(sam: Any, **options: Any) -> ps.Program:
    tx = options.pop("tx", optim.sgd(0.1, 0.9, weight_decay=0.01))
    return ps.program(options.pop("net", net)(), ps.supervised(nn.MSELoss()), tx, sam=sam, **options)


def by_paper(
    rho: float, *, adaptive: bool, twin: Callable[[Any], torch.optim.Optimizer]
) -> tuple[nn.Module, list[float]]:
    """Both passes in a loop of torch. BatchNorm's statistics are those of the first one: momentum 0 in the second."""
    model, losses = net(), []
    optimizer, norm = twin(model.parameters()), model[1]
    for x, y in BATCHES:
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        with torch.no_grad():
            params = list(model.parameters())
            before = [p.clone() for p in params]
            sizes = [p.abs() if adaptive else torch.ones_like(p) for p in params]
            length = torch.stack([(s * p.grad).norm() for s, p in zip(sizes, params, strict=True)]).norm()
            for p, s in zip(params, sizes, strict=True):
                p.add_(s**2 * p.grad * (rho / (length + 1e-12)))
        optimizer.zero_grad()
        count, momentum, norm.momentum = norm.num_batches_tracked.clone(), norm.momentum, 0.0
        nn.functional.mse_loss(model(x), y).backward()
        norm.momentum = momentum
        with torch.no_grad():
            norm.num_batches_tracked.copy_(count)
            for p, old in zip(params, before, strict=True):
                p.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def run(program: ps.Program, batches: Any = BATCHES) -> tuple[ps.TrainState, list[float]]:
    state, losses = program.init(), []
    for batch in batches:
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.peer
@pytest.mark.parametrize(("rho", "adaptive"), [(0.05, False), (1.0, False), (0.5, True)])
@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_every_step_is_the_papers(rho: float, adaptive: bool, engine: Any) -> None:
    sgd = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)  # noqa: E731  # one line
    twin, expected = by_paper(rho, adaptive=adaptive, twin=sgd)
    state, losses = run(made(ps.Sam(rho, adaptive), engine=engine))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_trees_close(state.params, {n: p.detach() for n, p in twin.named_parameters()}, rtol=1e-10, atol=1e-12)
    assert_trees_close(state.buffers, dict(twin.named_buffers()), rtol=1e-10, atol=1e-12)
    plain, _ = run(made(None, engine=engine))
    assert not torch.allclose(plain.params["0.weight"], state.params["0.weight"], rtol=1e-4), "the planted fault"


def test_a_number_is_rho_and_adamw_gets_the_second_gradient() -> None:
    twin, _ = by_paper(0.1, adaptive=False, twin=lambda params: torch.optim.AdamW(params, lr=0.01))
    state, _ = run(made(0.1, tx=optim.adamw(0.01)))
    assert_trees_close(state.params, {n: p.detach() for n, p in twin.named_parameters()}, rtol=1e-9, atol=1e-11)


def test_micro_batches_give_the_gradients_of_the_whole_batch() -> None:
    smooth = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()  # noqa: E731  # no statistics

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return smooth()

    whole, _ = run(made(0.3, net=seeded))
    parts, _ = run(made(0.3, net=seeded, microbatches=4))
    assert_trees_close(parts.params, whole.params, rtol=1e-10, atol=1e-12)


def test_the_step_is_pure_and_draws_the_same_again() -> None:
    program = made(0.1, net=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double())
    ps.testing.assert_pure(program.train_step, program.init(), BATCHES[0])


@pytest.mark.compile
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_compiled_step_is_the_eager_one(adaptive: bool) -> None:
    program = made(ps.Sam(0.5, adaptive), ema=0.9)
    step, state, expected = ps.compile_step(program.train_step, backend="aot_eager"), program.init(), program.init()
    for batch in BATCHES[:3]:
        state, metrics = step(state, batch)
        expected, wanted = program.train_step(expected, batch)
        assert float(metrics["grad_norm"]) == pytest.approx(float(wanted["grad_norm"]), rel=1e-6)
    assert_trees_close(state, expected, rtol=1e-10, atol=1e-12)


def test_a_gradient_of_zero_moves_nothing_and_one_that_overflows_is_refused() -> None:
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1), sam=0.5)
    state = program.init()
    state = state._replace(params={name: torch.zeros_like(p) for name, p in state.params.items()})
    new, metrics = program.train_step(state, (torch.ones(4, 2), torch.zeros(4, 1)))
    assert_trees_close(new.params, state.params, exact=True)
    assert float(metrics["applied"]) == 1.0
    huge = torch.full((4, 2), 1e30), torch.zeros(4, 1)
    with pytest.raises(NonFiniteError):
        ps.fit(program.init(), [huge], program, epochs=1, progress=False, compile=False, device="cpu")


def test_a_loss_scale_does_not_change_the_neighbourhood() -> None:
    small = made(0.3, scaler=ps.scaler.dynamic(2.0))
    large = made(0.3, scaler=ps.scaler.dynamic(2.0**20))
    assert_trees_close(run(small)[0].params, run(large)[0].params, rtol=1e-10, atol=1e-12)


def test_a_batch_without_weight_changes_nothing() -> None:
    objective = ps.supervised(nn.CrossEntropyLoss(ignore_index=-1))
    program = ps.program(nn.Linear(2, 3), objective, optim.sgd(0.1), sam=0.1)
    state = program.init()
    new, metrics = program.train_step(state, (torch.ones(4, 2), torch.full((4,), -1)))
    assert_trees_close(new.params, state.params, exact=True)
    assert float(metrics["applied"]) == 0.0


def test_a_step_can_be_mapped_over_states() -> None:
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1), sam=0.1)
    states = [program.init(seed) for seed in range(2)]
    states[1] = states[1]._replace(params={name: 2 * p for name, p in states[1].params.items()})
    stacked: Any = ps.tree.map(lambda *leaves: torch.stack(leaves), *states)
    batch = torch.ones(4, 2), torch.zeros(4, 1)
    mapped, _ = torch.func.vmap(program.train_step, in_dims=(0, None))(stacked, batch)
    for index, state in enumerate(states):
        one, _ = program.train_step(state, batch)
        for name, param in one.params.items():
            torch.testing.assert_close(mapped.params[name][index], param)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sam": 0.0}, r"sam: rho=0\.0 must be a finite number greater than 0 \(cure: ps\.Sam\(0\.05\)\)"),
        ({"sam": ps.Sam(float("inf"))}, "sam: rho=inf"),
        ({"sam": ps.Sam(0.1, adaptive=1)}, "sam: adaptive=1"),  # pyright: ignore[reportArgumentType]  # the point
        ({"sam": True}, "program: sam is a bool"),
        ({"sam": "0.05"}, "program: sam is a str"),
        ({"sam": 0.1, "accumulate": 4}, r"sam with accumulate=4: .*cure: pass microbatches=4 and the whole batch"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_a_scheduled_value_that_there_is_not_is_named() -> None:
    def objective(model: Any, batch: Tensor) -> ps.Loss:
        return ps.Loss(model(batch).square().mean() * model.values["lk"], 1)

    for values, known in ({"kl": ps.schedules.constant(1.0)}, "kl"), ({}, "none"):
        program = ps.program(nn.Linear(2, 1), objective, optim.sgd(0.1), values=values)
        with pytest.raises(StepContractError, match=rf"model.values/lk: .* it has {known} \(cure: ps.program"):
            program.train_step(program.init(), torch.ones(4, 2))


def test_values_of_a_schedule_are_in_both_passes() -> None:
    seen: list[float] = []

    def objective(model: Any, batch: Tensor) -> ps.Loss:
        seen.append(float(model.values["kl"]))
        return ps.Loss(model(batch).square().mean() * model.values["kl"], torch.tensor(1.0), {})

    schedule = ps.schedules.linear(1.0, 3.0, transition_steps=2)
    program = ps.program(nn.Linear(2, 1), objective, optim.sgd(0.1), sam=0.1, values={"kl": schedule})
    state, _ = program.train_step(program.init(), torch.ones(4, 2))
    seen.clear()
    program.train_step(state, torch.ones(4, 2))
    assert seen[-2:] == [2.0, 2.0]
