"""Buffers that a forward pass gives another shape or dtype: a state cannot follow, and says so by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps


class Keeping(nn.Module):
    """Keeps what ``change`` makes of its buffer and its output."""

    def __init__(self, start: Tensor, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.change = nn.Linear(2, 1), change
        self.register_buffer("seen", start)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        self.seen = self.change(self.seen, y.detach())
        return y


GROWING = (torch.zeros(0), lambda seen, y: torch.cat([seen, y[:1, 0]]))
SHRINKING = (torch.zeros(3), lambda seen, y: y.mean().reshape(1))
OF_THE_BATCH = (torch.zeros(1, 1), lambda seen, y: y)
WIDER = (torch.zeros(2), lambda seen, y: seen.double())
OF_COUNTS = (torch.zeros(2, dtype=torch.int64), lambda seen, y: seen + 1.0)
NONE = (torch.zeros(2), lambda seen, y: None)


def data() -> Any:
    return [(torch.ones(4, 2), torch.ones(4, 1))] * 2


@pytest.mark.parametrize("how", ["eager", "fit", pytest.param("compiled", marks=pytest.mark.compile)])
@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (GROWING, r"seen: .*\[0\] torch.float32, into \[1\] torch.float32.*full size"),
        (SHRINKING, r"seen: .*\[3\] torch.float32, into \[1\] torch.float32"),
        (OF_THE_BATCH, r"seen: .*\[1, 1\] torch.float32, into \[4, 1\] torch.float32"),
        (WIDER, r"seen: .*\[2\] torch.float32, into \[2\] torch.float64.*value.to\(torch.float32\)"),
        (OF_COUNTS, r"seen: .*\[2\] torch.int64, into \[2\] torch.float32"),
        (NONE, r"seen: .*into a NoneType"),
    ],
)
def test_another_shape_or_dtype_is_an_error(how: str, kept: Any, told: str):
    program = ps.program(Keeping(*kept), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    calls = {
        "eager": lambda: program.train_step(program.init(), data()[0]),
        "compiled": lambda: ps.compile_step(program.train_step, backend="aot_eager")(program.init(), data()[0]),
        "fit": lambda: ps.fit(program.init(), {"train": data()}, program, epochs=1, sinks=[]),
    }
    with pytest.raises(ps.errors.StepContractError, match=told):
        calls[how]()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_a_fake_quantized_module_trains_after_one_forward_pass(backend: str):
    from torch.ao import quantization

    torch.manual_seed(0)
    net = nn.Sequential(quantization.QuantStub(), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    net.train().qconfig = quantization.get_default_qat_qconfig(backend)  # pyright: ignore
    net = quantization.prepare_qat(net)
    batches = [(torch.randn(8, 1, 4, 4), torch.randint(0, 3, (8,))) for _ in range(3)]
    objective = ps.supervised(nn.CrossEntropyLoss())
    if backend == "fbgemm":  # a scale for each channel
        program = ps.program(net, objective, ps.optim.sgd(0.1))
        with pytest.raises(ps.errors.StepContractError, match=r"fake_quant.*call model\(x\) once in train mode"):
            program.train_step(program.init(), batches[0])
    with torch.no_grad():
        net(batches[0][0])
    hand = copy.deepcopy(net)
    optimizer = torch.optim.SGD(hand.parameters(), 0.1)
    program = ps.program(net, objective, ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step, backend="aot_eager")
    eager = state = program.init()
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(hand(x), y).backward()
        optimizer.step()
        eager, _ = program.train_step(eager, (x, y))
        state, _ = step(state, (x, y))
    for found in (eager, state):
        for name, value in hand.named_parameters():
            torch.testing.assert_close(found.params[name], value.detach())
        for name, value in hand.named_buffers():
            torch.testing.assert_close(found.buffers[name], value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
@pytest.mark.compile
@pytest.mark.parametrize(("kind", "backend"), [("conv", "aot_eager"), ("linear", "aot_eager"), ("conv", "inductor")])
def test_a_compiled_step_whose_kernel_resizes_a_buffer_names_the_call_that_explains(kind: str, backend: str):
    """A trace does not see the resizing."""
    from torch.ao import quantization

    layer = {"conv": nn.Conv2d(1, 4, 3), "linear": nn.Linear(4, 8)}[kind]
    net = nn.Sequential(layer, nn.Flatten())
    net.train().qconfig = quantization.get_default_qat_qconfig("fbgemm")  # pyright: ignore
    net = quantization.prepare_qat(net)
    x = torch.randn(8, 1, 4, 4)
    program = ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    step, state = ps.compile_step(program.train_step, backend=backend), program.init()
    batch = x, torch.zeros(8, {"conv": 16, "linear": 32}[kind])
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        step(state, batch)
    assert "call the step itself, in eager mode" in caught.value.__notes__[0]
    assert int(state.step) == 0
    with pytest.raises(ps.errors.StepContractError, match=r"0\.weight_fake_quant.*call model\(x\) once in train mode"):
        program.train_step(state, batch)
