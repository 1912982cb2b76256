from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import optim, testing
from purestep.errors import StepContractError

State = dict[str, Any]


def fresh() -> State:
    return {"w": torch.ones(3), "opt": (torch.zeros(3), torch.zeros((), dtype=torch.int64))}


def clean(state: State, batch: dict[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
    momentum, count = state["opt"]
    momentum = 0.9 * momentum + batch["x"]
    return {"w": state["w"] - momentum, "opt": (momentum, count + 1)}, {"loss": momentum.sum()}


def changed(change: Callable[[State, Any, State, dict[str, Tensor]], Any]) -> Callable[..., Any]:
    """A clean step with a fault: ``change(state, batch, new, metrics)`` may write any of them."""

    def step(state: State, batch: dict[str, Tensor]) -> Any:
        new, metrics = clean(state, batch)
        change(state, batch, new, metrics)
        return new, metrics

    return step


def set_item(tree: Any, key: Any, value: Any) -> None:
    tree[key] = value


counter = itertools.count()
seen: list[Any] = []

IMPURE = {
    "writes the state": (changed(lambda s, b, n, m: s["w"].add_(1)), "state/w: the step writes what it was"),
    "writes through .data": (
        changed(lambda s, b, n, m: s["opt"][0].data.fill_(7)),
        "state/opt/0: the step writes what it was given",
    ),
    "writes through numpy": (
        changed(lambda s, b, n, m: set_item(s["w"].numpy(), 0, 5)),
        "state/w: the step writes what it was given",
    ),
    "writes the batch": (changed(lambda s, b, n, m: b["x"].mul_(2)), "batch/x: the step writes what it was"),
    "drops a key of the batch": (changed(lambda s, b, n, m: b.pop("extra")), "batch/extra: the step writes"),
    "adds a key to the state": (
        changed(lambda s, b, n, m: set_item(s, "seen", torch.ones(()))),
        "state/seen: the step writes what it was given",
    ),
    "draws": (changed(lambda s, b, n, m: torch.rand(1)), "step: draws from the caller's generator"),
    "uses what it draws from numpy": (
        changed(lambda s, b, n, m: n["w"].add_(float(np.random.rand()))),
        "state/w: the second call on the same state and batch gives another value",
    ),
    "uses what it draws from random": (
        changed(lambda s, b, n, m: n["w"].add_(random.random())),
        "state/w: the second call on the same state and batch gives another value",
    ),
    "counts its calls": (
        changed(lambda s, b, n, m: n["opt"][1].add_(next(counter))),
        "state/opt/1: the second call .* no counters, clocks or global generators",
    ),
    "reads the clock": (
        changed(lambda s, b, n, m: set_item(m, "loss", torch.tensor(time.perf_counter(), dtype=torch.float64))),
        "metrics/loss: the second call",
    ),
    "remembers": (
        changed(lambda s, b, n, m: seen.append(1) or set_item(m, f"call {len(seen)}", torch.ones(()))),
        "step: the second call on the same state and batch gives another structure",
    ),
    "changes a shape": (
        changed(lambda s, b, n, m: set_item(n, "w", n["w"][None])),
        r"state/w: was \(torch.Size\(\[3\]\).* and is \(torch.Size\(\[1, 3\]\).*keep shape, dtype and device",
    ),
    "changes a dtype": (changed(lambda s, b, n, m: set_item(n, "w", n["w"].double())), "state/w: was .*float64"),
    "changes a device": (changed(lambda s, b, n, m: set_item(n, "w", n["w"].to("meta"))), "state/w: was .*meta"),
    "changes a type": (changed(lambda s, b, n, m: set_item(n, "w", 3.0)), "state/w: was .* and is <class 'float'>"),
    "loses a leaf": (changed(lambda s, b, n, m: n.pop("opt")), "state: the structure of the state changes"),
    "adds a leaf": (changed(lambda s, b, n, m: set_item(n, "v", 1)), "state: the structure of the state changes"),
    "keeps a graph in the state": (
        changed(lambda s, b, n, m: n["w"].requires_grad_()),
        r"state/w: carries a graph, which keeps its whole step in memory \(cure: .detach\(\)\)",
    ),
    "keeps a graph in the metrics": (
        changed(lambda s, b, n, m: m["loss"].requires_grad_()),
        "metrics/loss: carries a graph",
    ),
    "returns the state alone": (lambda s, b: clean(s, b)[0], r"step: returned a dict \(cure: return \(state, metrics"),
    "returns nothing": (lambda s, b: None, "step: returned a NoneType"),
    "returns three": (lambda s, b: (*clean(s, b), 1), "step: returned a tuple"),
}


def batch() -> dict[str, Tensor]:
    return {"x": torch.arange(3.0), "extra": torch.ones(())}


class TestAssertPure:
    @pytest.mark.parametrize("fault", IMPURE)
    def test_each_fault_is_found_and_named(self, fault: str):
        step, message = IMPURE[fault]
        with pytest.raises(StepContractError, match=message):
            testing.assert_pure(step, fresh(), batch())

    def test_a_clean_step_passes_and_is_left_as_it_was(self):
        state, given = fresh(), batch()
        before = torch.get_rng_state()
        testing.assert_pure(clean, state, given)
        assert torch.equal(state["w"], torch.ones(3))
        assert set(given) == {"x", "extra"}
        assert torch.equal(before, torch.get_rng_state())

    def test_nan_is_itself(self):
        testing.assert_pure(lambda s, b: (s * torch.nan, {"loss": torch.tensor(torch.nan)}), torch.ones(2), None)

    def test_a_scope_is_allowed(self):
        def step(state: Tensor, batch: None) -> tuple[Tensor, dict[str, Tensor]]:
            with ps.rng.scoped(3):
                return state + torch.rand(2), {}

        testing.assert_pure(step, torch.ones(2), None)

    def test_context_is_watched_too(self):
        def step(state: Tensor, batch: Tensor, teacher: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            teacher["w"].add_(1)
            return state + batch, {}

        with pytest.raises(StepContractError, match="context/0/w: the step writes what it was given"):
            testing.assert_pure(step, torch.ones(2), torch.ones(2), {"w": torch.ones(2)})

    @pytest.mark.parametrize("engine", ["autograd", "func"])
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_program_steps_with_norms_and_dropout_pass(self, engine: Any, accumulate: int):
        program = ps.program(
            tiny_convnet(),
            ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy}),
            optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.01)),
            ema=0.9,
            precision="16-mixed",
            engine=engine,
            accumulate=accumulate,
        )
        state = program.init(device="cpu")
        for _ in range(accumulate):
            testing.assert_pure(program.train_step, state, image_batch())
            state, _ = program.train_step(state, image_batch())
        testing.assert_pure(lambda s, b: (s, program.eval_step(s, b)), state, image_batch())
        testing.assert_pure(lambda s, b: program.flush(s), state, None)

    def test_an_objective_that_draws_from_numpy_is_found(self):
        def objective(model: Any, given: Any) -> ps.Loss:
            x, y = given
            return ps.Loss(nn.functional.cross_entropy(model(x) * np.random.rand(), y), len(x), {})

        program = ps.program(tiny_mlp(), objective, optim.sgd(0.1))
        with pytest.raises(StepContractError, match=r"state/params/\d\.\w+: the second call"):
            testing.assert_pure(program.train_step, program.init(device="cpu"), vector_batch())


class TestAssertResumes:
    BATCHES = [image_batch(seed=seed) for seed in range(4)]  # noqa: RUF012  # read only

    def test_a_program_resumes_anywhere(self):
        program = ps.program(
            tiny_convnet(), ps.supervised(nn.CrossEntropyLoss()), optim.adamw(0.01), ema=0.9, accumulate=3
        )
        for at in (None, 0, 1, 4):
            testing.assert_resumes(program, program.init(device="cpu"), self.BATCHES, at=at)

    def test_what_is_not_in_the_state_is_lost_at_the_break(self):
        """A momentum that is kept on the state's identity: any copy starts it anew."""
        momentum: dict[int, Tensor] = {}

        def step(state: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            kept = momentum.pop(id(state), torch.zeros(())) + x
            new = state - kept
            momentum[id(new)] = kept
            return new, {}

        program = ps.Program(step)
        with pytest.raises(StepContractError, match="state: the second call .* gives another value"):
            testing.assert_resumes(program, torch.zeros(()), [torch.ones(())] * 4)


class TestAssertAccumulates:
    def programs(self, objective: Any) -> tuple[ps.Program, ps.Program]:
        many, one = (ps.program(tiny_mlp(dtype=torch.float64), objective, optim.sgd(0.5), accumulate=k) for k in (3, 1))
        return many, one

    def parts(self) -> tuple[Any, list[Any]]:
        x, y = vector_batch(16, dtype=torch.float64)
        cuts = [(0, 3), (3, 4), (4, 16)]
        return (x, y), [(x[a:b], y[a:b]) for a, b in cuts]

    def test_right_weights_pass(self):
        many, one = self.programs(ps.supervised(nn.CrossEntropyLoss()))
        testing.assert_accumulates(many, one, *self.parts(), rtol=1e-12)

    def test_a_weight_of_1_is_found(self):
        def objective(model: Any, batch: Any) -> ps.Loss:
            return ps.Loss(nn.functional.cross_entropy(model(batch[0]), batch[1]), 1, {})

        many, one = self.programs(objective)
        with pytest.raises(
            StepContractError, match=r"params/\S+: differs by \S+ from the update .*cure: the weight of a"
        ):
            testing.assert_accumulates(many, one, *self.parts(), rtol=1e-12)
