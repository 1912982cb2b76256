"""Budgets of a step on CUDA, as assertions: launches, copies, and no wait of the host; and faults that they find.

``run.py --table`` prints today's counts. A change of torch or of purestep that exceeds a budget is examined; the budget
is raised with a reason, or kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from purestep import optim
from purestep.loop import metric_queue
from purestep.step import counting

from . import device
from .counting import counted
from .programs import PROGRAMS, mlp, plain

EAGER = {
    **{"mlp": 120, "norms": 100, "gpt": 190, "adamw": 73, "sgd": 67, "lion": 101, "groups": 82, "from torch": 126},
    **{"16-mixed": 165, "bf16-true": 156, "accumulate": 70, "microbatches": 340},
}  # not of Hugging Face's: in eager transformers itself looks at the attention mask on the host
CLOSING, EITHER = 173, 217  # of accumulation: the last micro-batch of a window; a call that no loop counts


@pytest.mark.parametrize("name", EAGER)
def test_an_eager_step_stays_in_its_budget_and_waits_for_nothing(name: str):
    program, batch = PROGRAMS[name]()
    assert program.init is not None
    seen, _ = counted(counting(program.train_step), program.init(device="cuda"), batch)
    assert seen.syncs == 0
    assert not [copy for copy in seen.copies if not copy.startswith("D->D")]
    assert 0 < seen.launches <= EAGER[name]


def test_buffers_are_copied_together_and_norms_of_gradients_computed_together():
    """However many there are: BatchNorm's three a layer, and weights of any size."""

    def launches(layers: int) -> device.Seen:
        blocks = [nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)) for _ in range(layers)]
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
        program = ps.program(nn.Sequential(*blocks), ps.supervised(nn.MSELoss()), tx)
        assert program.init is not None
        batch = torch.randn(4, 300, device="cuda"), torch.randn(4, 300, device="cuda")
        return counted(program.train_step, program.init(device="cuda"), batch)[0]

    few, many = launches(2), launches(6)
    assert len(many.copies) == len(few.copies) <= 2
    # For a layer more, of the passes themselves: products, normalizations, sums of gradients.
    assert many.launches - few.launches <= 4 * 10


@pytest.mark.usefixtures("emulated")
def test_accumulation_in_eager_computes_what_a_micro_batch_needs():
    program, batch = PROGRAMS["accumulate"]()
    assert program.init is not None
    step, state = counting(program.train_step), program.init(device="cuda")
    state, _ = step(state, batch)  # which reads where the window stands
    for budget in (EAGER["accumulate"], EAGER["accumulate"], CLOSING, EAGER["accumulate"]):
        seen, state = counted(step, state, batch, warm=0)
        assert seen.syncs == 0
        assert budget // 2 < seen.launches <= budget
    alone, _ = counted(program.train_step, state, batch)
    assert (alone.syncs, alone.launches <= EITHER) == (0, True)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("loop", ["run_epoch", "fit"])
def test_a_loop_over_eager_steps_reads_a_window_once(loop: str):
    def run(windows: int) -> device.Seen:
        program, _ = mlp(accumulate=4)
        assert program.init is not None
        data = [(torch.zeros(16, 64), torch.zeros(16, dtype=torch.long))] * (4 * windows)
        state = program.init(device="cuda")
        device.reset()
        if loop == "run_epoch":
            ps.run_epoch(state, data, program.train_step)
        else:
            quiet: Any = {"progress": False, "log_every": 0, "check_every": None, "compile": False}
            ps.fit(state, {"train": data}, program, epochs=1, **quiet)
        return device.seen()

    run(1)
    short, long = run(2), run(3)
    assert long.syncs == short.syncs
    assert long.launches - short.launches <= 3 * EAGER["accumulate"] + CLOSING


# --- fit --------------------------------------------------------------------------------------------------------------

REPLAYED = {"donate": True, "cuda_graph": True}


def _fitted(batches: int, **fields: Any) -> device.Seen:
    """The calls of a run of two epochs with `batches` in each."""
    program, _ = mlp()
    assert program.init is not None
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 64, generator=generator), torch.arange(16) % 10) for _ in range(batches)]
    program.init()
    device.reset()
    loaders = {"train": data, "val": data[:2]}
    ps.fit(program.init(), loaders, program, epochs=2, progress=False, log_every=0, check_every=None, **fields)
    return device.seen()


@pytest.mark.parametrize("how", [False, "auto", REPLAYED], ids=["eager", "auto", "replayed"])
@pytest.mark.usefixtures("emulated")
def test_fit_waits_once_in_many_steps_for_metrics_of_earlier_ones(how: Any):
    short, long = _fitted(12, compile=how), _fitted(24, compile=how)
    assert long.launches > short.launches
    reads = 2 * (24 // metric_queue.EVERY - 12 // metric_queue.EVERY)  # of two epochs
    assert long.syncs == short.syncs + reads
    to_the_host = [sum("D->H" in copy for copy in seen.copies) for seen in (short, long)]
    assert to_the_host[1] == to_the_host[0] + reads
    from_the_host = [sum(copy.startswith("H") for copy in seen.copies) for seen in (short, long)]
    assert from_the_host[1] - from_the_host[0] == 2 * 12 * 2  # two epochs, twelve batches more, two tensors in each


@pytest.mark.parametrize("how", [False, REPLAYED], ids=["eager", "replayed"])
@pytest.mark.usefixtures("emulated")
def test_the_numbers_of_fit_do_not_depend_on_how_late_copies_are_made(how: Any):
    def losses() -> list[float]:
        generator = torch.Generator().manual_seed(0)
        data = [(torch.randn(16, 64, generator=generator), torch.arange(16) % 10) for _ in range(8)]
        torch.manual_seed(0)
        program, _ = plain()
        assert program.init is not None
        result = ps.fit(program.init(), {"train": data, "val": data}, program, epochs=3, progress=False, compile=how)
        return [*result.history["train_loss"], *result.history["val_loss"]]

    expected = losses()
    with device.late_copies():
        assert losses() == expected


# --- faults that the budgets find -------------------------------------------------------------------------------------


def _planted(change: Callable[[Any, dict[str, Any]], Any]) -> tuple[Any, Any, Any]:
    """A step with a fault behind it, its state and a batch."""
    program, batch = plain()
    assert program.init is not None

    def step(state: Any, batch: Any) -> Any:
        new, metrics = program.train_step(state, batch)
        return change(new, metrics) or new, metrics

    return step, program.init(device="cuda"), batch


def test_a_number_read_inside_a_step_is_a_wait():
    step, state, batch = _planted(lambda new, metrics: metrics["loss"].total.item() and None)
    seen, _ = counted(step, state, batch)
    assert seen.syncs == 1
    assert [copy for copy in seen.copies if copy.startswith("D->H")]


def test_a_launch_more_is_counted():
    step, state, batch = _planted(lambda new, metrics: new._replace(updates=new.updates + 0))
    clean, _, _ = _planted(lambda new, metrics: None)
    more, fewer = (counted(one, state, batch)[0] for one in (step, clean))
    assert more.launches == fewer.launches + 1


def test_a_table_copied_to_the_device_at_each_step_is_counted():
    step, state, batch = _planted(
        lambda new, metrics: torch.arange(3).pin_memory().to("cuda", non_blocking=True) is None
    )
    seen, _ = counted(step, state, batch)
    assert seen.copies == ("Hpinned->D 24",)


@pytest.mark.usefixtures("emulated")
def test_a_wait_in_every_step_of_a_run_is_counted(monkeypatch: pytest.MonkeyPatch):
    def sgd(rate: float) -> optim.Transform:
        tx = optim.sgd(rate)

        def update(grads: Any, state: Any, params: Any) -> Any:
            next(iter(grads.values())).sum().item()
            return tx.update(grads, state, params)

        return tx._replace(update=update)

    monkeypatch.setattr(f"{__name__}.mlp", lambda: plain(sgd(0.1)))
    short, long = _fitted(12, compile=False), _fitted(24, compile=False)
    assert long.syncs - short.syncs >= 24


@pytest.mark.breaks_rules
class TestTheStandIn:
    """What CUDA forbids is refused and written down."""

    def test_a_call_that_it_does_not_have_is_an_error(self):
        assert device.stand_in().cudaDeviceGetGraphMemAttribute() != 0
        assert device.seen().forbidden == ("UNKNOWN cudaDeviceGetGraphMemAttribute",)

    def test_a_wait_inside_a_capture(self):
        cuda, stream, graph = device.stand_in(), ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cudaStreamCreate(ctypes.byref(stream)) == 0
        assert cuda.cudaStreamBeginCapture(stream, 0) == 0
        assert cuda.cudaStreamSynchronize(stream) == 900
        assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 901
        cuda.cudaGetLastError()
        assert device.seen().forbidden == ("ILLEGAL cudaStreamSynchronize of a stream that is captured",)

    def test_work_that_a_capture_does_not_hold(self):
        x = torch.ones(3, device="cuda")
        other = torch.cuda.Stream()
        x + 1
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x + 1
            with torch.cuda.stream(other):
                x.add_(1)
        assert any("ESCAPED" in line for line in device.seen().forbidden)

    def test_a_copy_that_nobody_waits_for_may_come_late(self):
        with device.late_copies():
            x = torch.arange(4, device="cuda")
            host = torch.zeros(4, dtype=torch.long).pin_memory()
            x.copy_(torch.arange(4) + 5)
            host.copy_(x, non_blocking=True)
            assert host.tolist() == [0, 0, 0, 0]
            torch.cuda.synchronize()
            assert host.tolist() == [5, 6, 7, 8]


def test_a_module_of_torchs_own_gives_the_numbers_of_the_cpu(emulated: None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 3))
    x = torch.randn(2, 1, 8, 8)
    expected = net(x)
    expected.sum().backward()
    gradients = [p.grad for p in net.parameters()]
    net.zero_grad()
    moved = net.cuda()
    found = moved(x.cuda())
    found.sum().backward()
    assert torch.allclose(found.cpu(), expected, atol=1e-5)
    for parameter, gradient in zip(moved.parameters(), gradients, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-4)
