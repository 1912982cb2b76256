"""Tensors that a step reads besides its state and its batch: every call reads them as they are."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import events
from purestep.compile import Uncaptured
from purestep.compile.cpu import backend as backend_
from purestep.errors import StepContractError
from purestep.types import Program

pytestmark = pytest.mark.compile

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
FORMS = [pytest.param(False, id="pure"), pytest.param(True, id="donated")]


class Teacher(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 3)
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x)).tanh())


def distilled(holder: Any) -> Program:
    """A student of ``holder.teacher``, whose scores are centred by ``holder.center``."""

    def objective(model: Any, x: Tensor) -> ps.Loss:
        with torch.no_grad():
            wanted = holder.teacher(x) - holder.center
        return ps.Loss(functional.mse_loss(model(x), wanted) * holder.weight, x.shape[0], {})

    torch.manual_seed(0)
    return ps.program(nn.Linear(4, 3), objective, ps.optim.sgd(0.1, momentum=0.9))


def holding() -> SimpleNamespace:
    return SimpleNamespace(teacher=Teacher(), center=torch.zeros(3), weight=1.0)


def follows(program: Program, step: Any, changes: list[Callable[[], Any]], batch: Any = X) -> None:
    """Two calls after each change, equal to the eager step and different from the call before."""
    state = eager = program.init()
    last = float("inf")
    for change in (lambda: None, *changes):
        change()
        for at in range(2):
            state, metrics = step(state, batch)
            eager, expected = program.train_step(eager, batch)
            loss = float(expected["loss"])
            assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
            assert at == 1 or abs(loss - last) > 1e-3
            last = loss
    assert_trees_close(ps.clone(state), eager, rtol=1e-4, atol=1e-5)


def doubled(holder: Any) -> None:
    for each in holder.teacher.parameters():
        each.mul_(2)


def by_data(holder: Any) -> None:
    for each in holder.teacher.parameters():
        each.data.copy_(each.data + 0.5)


def other_data(holder: Any) -> None:
    for each in holder.teacher.parameters():
        each.data = each.data * -1.5


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "in place": doubled,
    "by data": by_data,
    "other data": other_data,
    "load_state_dict": lambda h: h.teacher.load_state_dict(Teacher(2).state_dict()),
    "a buffer": lambda h: h.teacher.norm.running_mean.add_(1.0),
    "a tensor": lambda h: h.center.fill_(3.0),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("donate", FORMS)
def test_what_is_written_outside_is_read_by_the_next_call(donate: bool, backend: str) -> None:
    holder = holding()
    program = distilled(holder)
    step = ps.compile_step(program.train_step, donate=donate, backend=backend)
    follows(program, step, [lambda change=change: change(holder) for change in IN_PLACE.values()])
    assert step.graphs == 1


def test_by_inductors_front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_, "suits", lambda inputs: False)
    test_what_is_written_outside_is_read_by_the_next_call(True, "inductor")


def test_a_constant_of_a_graph_is_seen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tensors are no inputs."""

    def frozen(graph: Any) -> Any:
        for node in graph.graph.find_nodes(op="get_attr"):
            leaf = getattr(graph, node.target)
            setattr(
                graph, node.target, nn.Parameter(leaf.clone(), leaf.requires_grad) if leaf.is_floating_point() else leaf
            )
        return graph, []

    monkeypatch.setattr("purestep.compile.capture.lifted", frozen)
    with pytest.raises(AssertionError):
        test_what_is_written_outside_is_read_by_the_next_call(True, "aot_eager")


def another_teacher(holder: Any) -> None:
    holder.teacher = Teacher(2)


def another_layer(holder: Any) -> None:
    holder.teacher.outer = nn.Linear(6, 3).requires_grad_(False)


ASSIGNED: dict[str, Callable[[Any], Any]] = {
    "a module": another_teacher,
    "a copy of a module": lambda h: setattr(h, "teacher", doubled_copy(h.teacher)),
    "a layer": another_layer,
    "a weight": lambda h: setattr(h.teacher.outer, "weight", nn.Parameter(torch.ones(3, 6), requires_grad=False)),
    "a state dict, assigned": lambda h: h.teacher.load_state_dict(Teacher(3).state_dict(), assign=True),
    "a tensor": lambda h: setattr(h, "center", torch.full((3,), 2.0)),
    "a number": lambda h: setattr(h, "weight", 0.5),
    "another shape": lambda h: setattr(h, "center", torch.tensor(1.0)),
    "train mode": lambda h: setattr(h.teacher, "norm", nn.Identity()),
}


def doubled_copy(teacher: nn.Module) -> nn.Module:
    made = SimpleNamespace(teacher=copy.deepcopy(teacher))
    doubled(made)
    return made.teacher


@pytest.mark.parametrize("donate", FORMS)
def test_what_is_assigned_outside_is_traced_and_said_once(donate: bool, caplog: pytest.LogCaptureFixture) -> None:
    holder = holding()
    program = distilled(holder)
    step = ps.compile_step(program.train_step, donate=donate, backend="aot_eager")
    follows(program, step, [lambda change=change: change(holder) for change in ASSIGNED.values()])
    assert step.graphs == 1 + len(ASSIGNED)
    assert len([each for each in caplog.records if "recompiled" in each.getMessage()]) == 1
    assert "load_state_dict" in caplog.text


def loss_of(model: Any, x: Tensor, wanted: Tensor) -> ps.Loss:
    return ps.Loss(functional.mse_loss(model(x), wanted), x.shape[0], {})


def in_a_variable() -> tuple[Any, Callable[[], None]]:
    teacher = Teacher()

    def change() -> None:
        nonlocal teacher
        teacher = Teacher(2)

    return (lambda model, x: loss_of(model, x, teacher(x))), change


def in_a_dict() -> tuple[Any, Callable[[], None]]:
    held = {"teacher": Teacher()}
    return (lambda model, x: loss_of(model, x, held["teacher"](x))), lambda: held.update(teacher=Teacher(2))


def in_a_list() -> tuple[Any, Callable[[], None]]:
    held = [Teacher()]
    return (lambda model, x: loss_of(model, x, held[-1](x))), lambda: held.append(Teacher(2))


TEACHER: Any = None


def in_a_global() -> tuple[Any, Callable[[], None]]:
    globals().update(TEACHER=Teacher())
    return (lambda model, x: loss_of(model, x, TEACHER(x))), lambda: globals().update(TEACHER=Teacher(2))


class Distilling:
    """An objective with attributes, one of which another method reads."""

    def __init__(self) -> None:
        self.teacher = Teacher()

    def wanted(self, x: Tensor) -> Tensor:
        return self.teacher(x)

    def __call__(self, model: Any, x: Tensor) -> ps.Loss:
        return loss_of(model, x, self.wanted(x))


def in_an_object() -> tuple[Any, Callable[[], None]]:
    made = Distilling()
    return made, lambda: setattr(made, "teacher", Teacher(2))


def in_a_method() -> tuple[Any, Callable[[], None]]:
    made = Distilling()
    return made.__call__, lambda: setattr(made, "teacher", Teacher(2))


def in_a_step() -> tuple[Any, Callable[[], None]]:
    """A user-defined step, which calls that of a program."""
    return in_a_variable()


PLACES = [in_a_variable, in_a_dict, in_a_list, in_a_global, in_an_object, in_a_method, in_a_step]


@pytest.mark.parametrize("make", PLACES)
def test_another_module_is_found_wherever_the_objective_reads_it(make: Callable[[], Any]) -> None:
    objective, change = make()
    program = ps.program(nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    step = program.train_step
    if make is in_a_step:
        step = lambda state, batch: program.train_step(state, batch)  # noqa: E731
    follows(program, ps.compile_step(step, backend="aot_eager"), [change])


def test_fit_follows_a_teacher_that_a_callback_moves() -> None:
    """A mean teacher, and a centre that is replaced after each epoch."""
    found = []
    for compiled in (False, {"backend": "aot_eager"}):
        holder = holding()

        def follow(event: Any, holder: Any = holder) -> None:
            if isinstance(event, events.StepEnd):
                for each in holder.teacher.parameters():
                    each.lerp_(torch.full_like(each, 0.3), 0.1)
            if isinstance(event, events.EpochEnd):
                holder.center = holder.center + 0.5

        program = distilled(holder)
        result = ps.fit(
            program.init(),
            [X, X + 1],
            program,
            epochs=3,
            compile=compiled,
            callbacks=[follow],
            sinks=[],
            progress=False,
        )
        found.append(result.history["train_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_evaluation_reads_them_too() -> None:
    holder = holding()
    program = distilled(holder)
    evaluate: Any = ps.compile_program(program, backend="aot_eager").eval_step
    for change in (lambda _: None, doubled, another_teacher, by_data):
        change(holder)
        assert program.eval_step is not None
        expected = float(program.eval_step(program.init(), X)["loss"])
        assert float(evaluate(program.init(), X)["loss"]) == pytest.approx(expected, rel=1e-5)
    assert evaluate.graphs == 2


def test_the_graph_for_all_sizes_reads_them_too() -> None:
    holder = holding()
    program = distilled(holder)
    step, state = ps.compile_step(program.train_step, backend="aot_eager"), program.init()
    for rows in (8, 7, 6, 5, 4):
        doubled(holder)
        found, expected = step(state, X[:rows])[1], program.train_step(state, X[:rows])[1]
        assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert step.graphs == 3


def test_another_layout_is_traced() -> None:
    table = torch.randn(4, 3, dtype=torch.float64)

    def objective(model: Any, x: Tensor) -> ps.Loss:
        return ps.Loss((model(x) - (x.to(table.dtype) @ table).float()).square().mean(), x.shape[0], {})

    program = ps.program(nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")

    def turned() -> None:
        table.data = torch.randn(3, 4, dtype=torch.float64).t()

    def halved() -> None:
        table.data = torch.randn(4, 3)

    follows(program, step, [lambda: table.mul_(2), turned, halved])
    assert step.graphs == 3


def test_a_tensor_of_the_state_before_is_read_as_it_was() -> None:
    """It lies in the memory that a donated step writes."""
    anchor = {"weight": torch.zeros(3, 4)}

    def step(state: ps.TrainState, x: Tensor) -> Any:
        new = {name: weight - 0.1 * x.mean() for name, weight in state.params.items()}
        gap = (anchor["weight"] - 3 * new["weight"]).abs().sum()
        return state._replace(params=new), {"gap": ps.Mean(gap, torch.ones(()))}

    def gaps(call: Any) -> list[float]:
        anchor["weight"] = torch.zeros(3, 4)
        state, _ = call(distilled(holding()).init(), X)
        anchor["weight"] = state.params["weight"]
        return [float(call(state, X)[1]["gap"])]

    expected = gaps(step)
    assert gaps(ps.compile_step(step, donate=True)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["statistics", "without a gradient", "a count", "a view", "a list", "a part", "out="])
def test_a_step_that_writes_them_is_refused(how: str, backend: str) -> None:
    teacher, count = Teacher(), torch.zeros(2)
    teacher.train(how in ("statistics", "without a gradient"))
    before = copy.deepcopy(teacher.state_dict())

    def objective(model: Any, x: Tensor) -> ps.Loss:
        with torch.set_grad_enabled(how == "statistics"):
            wanted = teacher(x).detach()
        if how == "a count":
            count.add_(1)
        if how == "a view":
            count[1:].mul_(x.mean())
        if how == "a list":
            torch._foreach_add_([count], 1.0)  # pyright: ignore[reportPrivateUsage]
        if how == "a part":
            count.unbind()[1].add_(1)
        if how == "out=":
            torch.add(count, 1, out=count)
        return ps.Loss(functional.mse_loss(model(x), wanted), x.shape[0], {})

    program = ps.program(nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    with pytest.raises(
        StepContractError, match=r"test_outside\.py:\d+: the step writes a tensor .* not in the state.*\.eval\(\)"
    ):
        ps.compile_step(program.train_step, backend=backend)(program.init(), X)
    assert_trees_close(dict(teacher.state_dict()), dict(before), exact=True)
    assert count.tolist() == [0, 0]


@pytest.mark.parametrize("how", ["a number", "a branch", "of a view"])
def test_a_step_that_reads_the_value_of_one_is_refused(how: str) -> None:
    """A graph would hold the number of the first call."""
    scale = torch.tensor([2.0])

    def objective(model: Any, x: Tensor) -> ps.Loss:
        factor = 1.0 if how == "a branch" and scale else float(scale[0] if how == "of a view" else scale)
        return ps.Loss(factor * model(x).square().mean(), x.shape[0], {})

    program = ps.program(nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    program.train_step(program.init(), X)
    with pytest.raises(Uncaptured, match=r"test_outside\.py:\d+: the step reads the value of a tensor"):
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), X)


class Remembers(nn.Linear):
    """Assigns where others write in place."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.mean = torch.zeros(3)

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        self.calls = self.calls + 1
        self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
        return found - self.mean


def test_a_step_that_stores_a_tensor_beside_the_state_is_refused_and_leaves_what_was_there() -> None:
    teacher, seen = Remembers(), dict[str, Tensor]()

    def objective(model: Any, x: Tensor) -> ps.Loss:
        with torch.no_grad():
            wanted = teacher(x)
        return ps.Loss(functional.mse_loss(model(x), wanted), x.shape[0], {})

    def storing(model: Any, x: Tensor) -> ps.Loss:
        seen["last"] = model(x)
        return ps.Loss(seen["last"].square().mean(), x.shape[0], {})

    for each, place in ((objective, r"teacher\.calls"), (storing, r"seen\['last'\]")):
        program = ps.program(nn.Linear(4, 3), each, ps.optim.sgd(0.1))
        step = ps.compile_step(program.train_step, backend="aot_eager")
        for _ in range(2):
            with pytest.raises(Uncaptured, match=rf"{place}: the step stores a tensor here"):
                step(program.init(), X)
    assert type(teacher.calls) is Tensor
    assert teacher.calls.item() == 0


def test_a_model_that_assigns_a_tensor_that_is_no_buffer_is_refused() -> None:
    program = ps.program(Remembers(), lambda model, x: ps.Loss(model(x).square().mean(), 8, {}), ps.optim.sgd(0.1))
    with pytest.raises(
        StepContractError, match=r"^mean: the forward pass assigns another tensor.*register_buffer\('mean'"
    ):
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), X)


@pytest.mark.slow
def test_literals_stay_constants() -> None:
    def objective(model: Any, x: Tensor) -> ps.Loss:
        weights = torch.tensor([0.5, 1.0, 2.0])
        return ps.Loss((model(x).square() * weights).mean() * torch.tensor(3.0), x.shape[0], {})

    program = ps.program(nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step, donate=True)
    state = eager = program.init()
    for _ in range(3):
        (state, _), (eager, _) = step(state, X), program.train_step(eager, X)
    assert_trees_close(ps.clone(state), eager, rtol=1e-4, atol=1e-5)


CHILD = """
import sys, torch, purestep as ps
from torch import nn
torch.manual_seed(0)
scale, value = torch.full((3,), float(sys.argv[1])), torch.full((4096,), float(sys.argv[1]))
net, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
with torch.no_grad():
    teacher.weight.mul_(float(sys.argv[1]))
def objective(model, x):
    return ps.Loss((model(x) - teacher(x).detach() * scale + value.sum()).square().mean(), 8.0)
program = ps.program(net, objective, ps.optim.sgd(0.1))
x = torch.randn(8, 4)
state, metrics = ps.compile_step(program.train_step, donate=True)(program.init(), x)
eager, expected = program.train_step(program.init(), x)
assert abs(float(metrics["loss"]) / float(expected["loss"]) - 1) < 1e-5, (metrics, expected)
torch.testing.assert_close(state.params["weight"], eager.params["weight"], rtol=1e-4, atol=1e-4)
print(float(metrics["loss"]))
"""


@pytest.mark.slow
def test_code_of_an_earlier_process_reads_this_ones_values(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = [
        float(
            subprocess.run(
                [sys.executable, "-c", CHILD, value], env=environment, check=True, capture_output=True
            ).stdout
        )
        for value in ("1.0", "-3.0")  # made, found
    ]
    assert len(set(found)) == 2
