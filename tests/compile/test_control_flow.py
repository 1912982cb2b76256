"""`torch.cond` and `torch.while_loop` in a step, and captures that fail: torch works afterwards as it did before."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import purestep as ps
from purestep import compile as compile_
from purestep.torch_ext import tracing

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Batch = tuple[Tensor, Tensor]


class Operand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.linear(x) + self.other(x),))


class ClosedOver(Operand):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.linear(y).sin(), lambda y: self.other(y).cos(), (x,))


class Several(Operand):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.linear(x), self.other(x)
        first, second = torch.cond(y.sum() > 0, lambda y, z: (y * z, y + z), lambda y, z: (y - z, y * 2), (y, z))
        return first + second


class Loop(Operand):
    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64), self.linear(x) + self.other(x)
        return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.5 + y.sin()), start)[1]


class Loose(Operand):
    """Without a gradient through the loop, whose length depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64), x.clone()
        with torch.no_grad():
            _, y = torch.while_loop(lambda i, y: (i < 9) & (y.norm() < 30), lambda i, y: (i + 1, y * 1.5), start)
        return self.linear(y) + self.other(y)


class Dropping(Operand):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, nn.functional.dropout, torch.cos, (self.linear(x) + self.other(x),))


def program_of(net: nn.Module) -> ps.Program:
    return ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.sgd(1.0))


def batch_of(sign: int = 1) -> Batch:
    return torch.rand(4, 3) * sign, torch.randn(4, 3)


def works() -> None:
    """The operators outside of any capture, in a plain `torch.compile` too, and torch's own modes and switches."""
    ones = torch.ones(2)
    torch.testing.assert_close(torch.cond(ones.sum() > 0, torch.sin, torch.cos, (ones,)), ones.sin())
    _, looped = torch.while_loop(
        lambda i, y: i < 2, lambda i, y: (i + 1, y * 2), (torch.zeros((), dtype=torch.int64), ones)
    )
    torch.testing.assert_close(looped, ones * 4)
    compiled: Any = torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend="eager")
    torch.testing.assert_close(compiled(-ones), ones.cos())


def around() -> tuple[Any, ...]:
    """What a capture changes while it runs."""
    functions: Any = importlib.import_module("torch.overrides")
    operators: Any = importlib.import_module("torch.utils._python_dispatch")
    tracer: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
    flags: Any = importlib.import_module("torch.fx._symbolic_trace")
    settings: Any = importlib.import_module("torch._dynamo.config")
    guards: Any = importlib.import_module("torch._guards")
    return (
        list(functions._get_current_function_mode_stack()),
        list(operators._get_current_dispatch_mode_stack()),
        tracer._CURRENT_MAKE_FX_TRACER,
        guards.TracingContext.try_get(),
        getattr(flags, "_is_fx_tracing_flag", None),
        settings.get_config_copy(),
        torch.is_grad_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.get_rng_state().tolist(),
        torch.compile,
    )


@pytest.mark.parametrize(
    "net",
    [Operand, ClosedOver, Several, Loop, Loose],
)
def test_a_step_with_branches_is_the_eager_step(net: type[Operand]):
    program = program_of(net())
    step = ps.compile_step(program.train_step, backend="aot_eager")
    for sign in (1, -1):
        batch = batch_of(sign)
        expected, _ = program.train_step(program.init(), batch)
        found, _ = step(program.init(), batch)
        for name, value in expected.params.items():
            torch.testing.assert_close(found.params[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert step.graphs == 1
    works()


def test_inductor_compiles_branches_and_loops_without_a_gradient():
    """Operands that are views of one vector, that are taken twice, that a branch returns as they are."""

    class Together(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList([ClosedOver(), Several(), Loose()])

        def forward(self, x: Tensor) -> Tensor:
            return sum((net(x) for net in self.nets), torch.zeros(()))

    program = program_of(Together())
    step = ps.compile_step(program.train_step)
    for sign in (1, -1):
        batch = batch_of(sign)
        expected, _ = program.train_step(program.init(), batch)
        found, _ = step(program.init(), batch)
        for name, value in expected.params.items():
            torch.testing.assert_close(found.params[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert step.graphs == 1
    works()


def test_a_loop_with_a_gradient_under_inductor_is_refused_with_ways_that_work():
    program, batch = program_of(Loop()), batch_of()
    with pytest.raises(compile_.Uncaptured, match=r'while_loop.*backend="aot_eager".*fixed number of passes'):
        ps.compile_step(program.train_step)(program.init(), batch)
    works()
    ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch)


def test_fit_trains_what_no_compiler_takes_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    program, batch = program_of(Loop()), batch_of()
    wanted = ps.fit(program.init(), [batch] * 3, program, epochs=1, compile=False, sinks=[], progress=False)
    there = SimpleNamespace(device_of=lambda state: torch.device("cuda"))  # where `compile="auto"` compiles
    monkeypatch.setattr("purestep.loop.train_call.data", there)
    with pytest.warns(RuntimeWarning, match="runs in eager") as met:
        found = ps.fit(program.init(), [batch] * 3, program, epochs=1, compile="auto", sinks=[], progress=False)
    assert found.history == wanted.history
    assert len([each for each in met if "runs in eager" in str(each.message)]) == 1
    works()


def modes(kind: type[Any] = TorchDispatchMode) -> list[type[Any]]:
    below = [each for part in kind.__subclasses__() for each in (part, *modes(part))]
    return [each for each in below if each.__module__.startswith("purestep.")]


@pytest.mark.parametrize("mode", modes(), ids=lambda mode: mode.__name__)
def test_every_mode_lets_these_operators_and_dynamo_through(mode: Any):
    """Dynamo skips what it meets below another mode, for the rest of the process."""
    assert mode.supports_higher_order_operators
    assert mode.is_infra_mode()


def test_rounding_is_seen_beside_a_branch():
    class Rounding(Operand):
        def forward(self, x: Tensor) -> Tensor:
            low = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.linear(x).bfloat16(),))
            return low.float() + self.other(x).bfloat16().float()

    program, batch = program_of(Rounding()), batch_of()
    expected, _ = program.train_step(program.init(), batch)
    found, _ = ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_one_graph_takes_either_branch():
    program = program_of(ClosedOver())
    step = ps.compile_step(program.train_step, backend="aot_eager", donate=True)
    compiled, eager = program.init(), program.init()
    for sign in (1, -1, 1):
        batch = batch_of(sign)
        compiled, _ = step(compiled, batch)
        eager, _ = program.train_step(eager, batch)
    assert step.graphs == 1
    for name, value in eager.params.items():
        torch.testing.assert_close(compiled.params[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_draws_in_a_branch_are_refused():
    program = program_of(Dropping())
    with pytest.raises(ps.errors.StepContractError, match="random numbers are drawn inside cond"):
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch_of())
    works()


class Failing(Operand):
    """Fails in a capture and not in eager mode, by an error of any class."""

    kind: type[BaseException] = AssertionError

    def forward(self, x: Tensor) -> Tensor:
        if tracing.in_graph() and type(x) is not Tensor:
            raise self.kind("not here")
        return super().forward(x)


@pytest.mark.parametrize(
    "kind",
    [AssertionError, RuntimeError, KeyError, NotImplementedError, RecursionError],
)
def test_a_failed_capture_is_an_error_of_purestep_and_leaves_torch_alone(kind: type[Exception]):
    net = Failing()
    net.kind = kind
    program, batch = program_of(net), batch_of()
    program.train_step(program.init(), batch)
    works()
    before = around()
    with pytest.raises(ps.errors.PurestepError):
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch)
    assert around() == before
    works()
    program.train_step(program.init(), batch)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_ends_a_program_ends_a_capture(kind: type[BaseException]):
    net = Failing()
    net.kind = kind
    program, batch = program_of(net), batch_of()
    with pytest.raises(kind):
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch)
    works()


class Broken(Operand):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("nothing to look up")


def test_an_error_of_the_step_itself_is_told_with_its_line():
    program = program_of(Broken())
    with pytest.raises(
        ps.errors.StepContractError, match=r"test_control_flow.py:\d+: .*LookupError: nothing to look up"
    ):
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch_of())
    works()
