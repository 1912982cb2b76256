from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import image_batch, tiny_convnet, tiny_mlp, vector_batch
from rigs.faults.plants import batch, clean, fresh
from torch import Tensor, nn

import purestep as ps
from purestep import optim, testing
from purestep.errors import ConfigError, StepContractError


class TestAssertPure:
    """What it finds, kind by kind: tests/faults/test_rows_impurity.py."""

    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (lambda s, b: clean(s, b)[0], r"step: the step returned a dict \(cure: return \(state, "),
            (lambda s, b: None, "step: the step returned a NoneType"),
            (lambda s, b: (*clean(s, b), 1), "step: the step returned a tuple"),
        ],
    )
    def test_a_step_returns_a_pair(self, step: Any, message: str):
        with pytest.raises(StepContractError, match=message):
            testing.assert_pure(step, fresh(), batch())

    def test_a_clean_step_passes_and_is_left_as_it_was(self):
        state, given = fresh(), batch()
        before = torch.get_rng_state()
        testing.assert_pure(clean, state, given)
        assert torch.equal(state["w"], torch.ones(4))
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

        with pytest.raises(StepContractError, match="context/0/w: the step writes its arguments"):
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

    def test_an_objective_may_draw_from_numpys_global_generator_and_from_no_other_of_numpys(self):
        own = np.random.default_rng(0)

        def objective(model: Any, given: Any) -> ps.Loss:
            x, y = given
            return ps.Loss(nn.functional.cross_entropy(model(x) * np.random.rand(), y), len(x), {})

        def impure(model: Any, given: Any) -> ps.Loss:
            x, y = given
            return ps.Loss(nn.functional.cross_entropy(model(x) * own.random(), y), len(x), {})

        program = ps.program(tiny_mlp(), objective, optim.sgd(0.1))
        testing.assert_pure(program.train_step, program.init(device="cpu"), vector_batch())
        program = ps.program(tiny_mlp(), impure, optim.sgd(0.1))
        with pytest.raises(StepContractError, match="the second call .* returns another value"):
            testing.assert_pure(program.train_step, program.init(device="cpu"), vector_batch())


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
            StepContractError, match=r"params/\S+: differs by \S+ from the update .*cure: return a Loss whose weight"
        ):
            testing.assert_accumulates(many, one, *self.parts(), rtol=1e-12)

    @pytest.mark.parametrize(
        ("tx", "factor", "nonfinite", "message"),
        [
            (
                optim.sgd(ps.schedules.warmup_cosine(peak=0.1, warmup=10, total=100)),
                1.0,
                "raise",
                "changes no parameter",
            ),
            (optim.sgd(0.5), math.nan, "raise", "is refused: it is not finite"),
            (optim.sgd(0.5), math.nan, "skip", "is refused: it is not finite"),
        ],
    )
    def test_an_update_that_changes_nothing_is_refused(self, tx: Any, factor: float, nonfinite: Any, message: str):
        def objective(model: Any, batch: Any) -> ps.Loss:
            return ps.Loss(nn.functional.cross_entropy(model(batch[0]), batch[1]) * factor, 1, {})

        many, one = (
            ps.program(tiny_mlp(dtype=torch.float64), objective, tx, accumulate=k, nonfinite=nonfinite) for k in (3, 1)
        )
        with pytest.raises(ConfigError, match=message):
            testing.assert_accumulates(many, one, *self.parts(), rtol=1e-12)

    def test_the_parameter_that_differs_most_is_named(self):
        many, one = self.programs(ps.supervised(nn.CrossEntropyLoss()))
        spoilt = {"0.weight": 1.0, "2.weight": math.nan, "2.bias": 2.0}

        def train_step(state: Any, batch: Any) -> Any:
            new, told = many.train_step(state, batch)
            added = {name: p + spoilt.get(name, 0.0) for name, p in new.params.items()}
            return new._replace(params=added), told

        with pytest.raises(StepContractError, match=r"params/2.weight: differs by"):
            testing.assert_accumulates(many._replace(train_step=train_step), one, *self.parts(), rtol=1e-12)
        del spoilt["2.weight"]
        with pytest.raises(StepContractError, match=r"params/2.bias: differs by"):
            testing.assert_accumulates(many._replace(train_step=train_step), one, *self.parts(), rtol=1e-12)

    def test_another_number_of_parts_is_refused(self):
        many, one = self.programs(ps.supervised(nn.CrossEntropyLoss()))
        whole, parts = self.parts()
        with pytest.raises(ConfigError, match=r"the program does not accumulate 2 .*accumulate=2"):
            testing.assert_accumulates(many, one, whole, parts[:2], rtol=1e-12)
        with pytest.raises(ConfigError, match="the program does not accumulate 1"):
            testing.assert_accumulates(many, ps.Program(one.train_step), whole, parts, rtol=1e-12)


def test_a_module_in_the_closure_of_an_objective_is_not_written():
    teacher = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).requires_grad_(False)

    def objective(model, batch):
        return ps.Loss((model(batch) - teacher(batch)).square().mean(), len(batch))

    def forward(model, x):
        return model(x) + teacher(x)

    supervised = ps.supervised(torch.nn.MSELoss(), forward=forward)
    x = torch.rand(8, 4)
    for made, rows in ((objective, x), (supervised, (x, torch.rand(8, 3)))):
        program = ps.program(torch.nn.Linear(4, 3), made, ps.optim.sgd(0.1))
        teacher.train()
        told = r"test_testing\.py:\d+: the step writes a tensor \[.* that is not in the state.*cure: call \.eval\(\)"
        with pytest.raises(StepContractError, match=told):
            ps.testing.assert_pure(program.train_step, program.init(), rows)
        with pytest.raises(StepContractError, match=told):
            ps.fit(program.init(), [rows] * 2, program, epochs=1, progress=False)
        teacher.eval()
        ps.testing.assert_pure(program.train_step, program.init(), rows)


class Holding:
    """An objective that holds its teacher."""

    def __init__(self, teacher):
        self.teacher = teacher

    def __call__(self, model, batch):
        return ps.Loss((model(batch) - self.teacher(batch)).square().mean(), len(batch))


def by_default(teacher):
    def objective(model, batch, teacher=teacher):
        return Holding(teacher)(model, batch)

    return objective


def in_a_dict(teacher):
    held = {"teacher": teacher}
    return lambda model, batch: Holding(held["teacher"])(model, batch)


def in_a_list(teacher):
    held = [None, teacher]
    return lambda model, batch: Holding(held[1])(model, batch)


def by_a_function(teacher):
    def wanted(batch):
        return teacher(batch)

    return lambda model, batch: ps.Loss((model(batch) - wanted(batch)).square().mean(), len(batch))


PLACES = {
    "an attribute": Holding,
    "deep below": lambda teacher: Holding(Holding([teacher]).teacher[0].forward),
    "a function": by_a_function,
    "a method": lambda teacher: Holding(teacher).__call__,
    "a partial": lambda teacher: functools.partial(lambda held, model, batch: Holding(held)(model, batch), teacher),
    "a default": by_default,
    "a dict": in_a_dict,
    "a list": in_a_list,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_teacher_is_not_written_wherever_it_lies(place: str):
    teacher = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).requires_grad_(False)
    program = ps.program(torch.nn.Linear(4, 3), PLACES[place](teacher), ps.optim.sgd(0.1))
    with pytest.raises(StepContractError, match=r"the step writes a tensor \[.* that is not in the state"):
        ps.testing.assert_pure(program.train_step, program.init(), torch.rand(8, 4))
    teacher.eval()
    ps.testing.assert_pure(program.train_step, program.init(), torch.rand(8, 4))


def test_a_tensor_of_the_closure_is_not_written():
    seen = torch.zeros(())

    def objective(model, batch):
        seen.add_(1)
        return ps.Loss(model(batch).square().mean(), len(batch))

    program = ps.program(torch.nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    with pytest.raises(
        StepContractError, match=r"test_testing\.py:\d+: the step writes a tensor \[\] .*write it between the calls"
    ):
        ps.testing.assert_pure(program.train_step, program.init(), torch.rand(8, 4))


def test_a_module_in_the_closure_of_a_step_of_ones_own_is_not_written():
    norm = torch.nn.BatchNorm1d(4)

    def step(state, batch):
        return state + norm(batch).mean().detach(), {}

    with pytest.raises(StepContractError, match=r"test_testing\.py:\d+: the step writes"):
        ps.testing.assert_pure(step, torch.zeros(()), torch.rand(8, 4))


def test_the_state_of_a_donated_step_is_checked_like_any_other():
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batch = torch.ones(4, 2), torch.zeros(4, 1)
    live, _ = ps.compile_step(program.train_step, donate=True, backend="aot_eager")(program.init(), batch)
    ps.testing.assert_pure(program.train_step, live, batch)
