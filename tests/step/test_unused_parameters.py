"""Parameters without a gradient in an update: torch's optimizers skip them, and so does every step here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.optim import Transform


class Heads(nn.Module):
    """A layer for both tasks, a head for each, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.one, self.other = nn.Linear(2, 1), nn.Linear(2, 1)
        self.unused = nn.Linear(2, 3)

    def forward(self, x: Tensor, is_one: bool) -> Tensor:
        return (self.one if is_one else self.other)(self.body(x).tanh())


def objective(model: Any, batch: Any) -> ps.Loss:
    x, y, is_one = batch
    return ps.Loss((model(x, is_one) - y).square().mean(), torch.tensor(4.0), {})


def task_batches(count: int = 9) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [(draw(4, 2), draw(4, 1), index % 3 == 0) for index in range(count)]


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads()


TWINS: dict[str, tuple[Callable[[], Transform], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        lambda: ps.optim.sgd(0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    ),
    "adamw": (
        lambda: ps.optim.adamw(0.01, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.5),
    ),
    "radam": (lambda: ps.optim.radam(0.01), lambda p: torch.optim.RAdam(p, 0.01)),
    "adamax": (lambda: ps.optim.adamax(0.01), lambda p: torch.optim.Adamax(p, 0.01)),
    "adagrad": (
        lambda: ps.optim.adagrad(0.1, lr_decay=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1),
    ),
    "adafactor": (lambda: ps.optim.adafactor(0.01), lambda p: torch.optim.Adafactor(p, 0.01)),
    "from_torch": (
        lambda: ps.optim.from_torch(torch.optim.AdamW, lr=0.01, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.5),
    ),
}


def by_hand(make: Callable[..., torch.optim.Optimizer], accumulate: int) -> dict[str, Tensor]:
    net = heads()
    optimizer = make(net.parameters())
    for index, (x, y, is_one) in enumerate(task_batches()):
        ((net(x, is_one) - y).square().mean() / accumulate).backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in net.named_parameters()}


def assert_follows(state: ps.TrainState, wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def run(step: Any, program: ps.Program) -> ps.TrainState:
    state = program.init()
    for batch in task_batches():
        state, _ = step(state, batch)
    return state


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", TWINS)
def test_an_eager_step_skips_what_torch_skips(name: str, accumulate: int):
    tx, twin = TWINS[name]
    program = ps.program(heads(), objective, tx(), accumulate=accumulate)
    assert_follows(run(program.train_step, program), by_hand(twin, accumulate))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "accumulate"), [("sgd", 1), ("adamw", 1), ("adamw", 3), ("adafactor", 1), ("from_torch", 1)]
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_compiled_step_skips_what_torch_skips(name: str, accumulate: int, donate: bool):
    tx, twin = TWINS[name]
    program = ps.program(heads(), objective, tx(), accumulate=accumulate)
    step = ps.compile_step(program.train_step, backend="aot_eager", donate=donate)
    assert_follows(run(step, program), by_hand(twin, accumulate))


def test_the_engine_of_functions_skips_as_well():
    tx, twin = TWINS["adamw"]
    program = ps.program(heads(), objective, tx(), engine="func")
    assert_follows(run(program.train_step, program), by_hand(twin, 1))


def test_micro_batches_inside_a_step_are_one_update():
    """Reached in one part of the batch is reached."""

    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.even, self.odd, self.unused = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.odd if float(x[0, 0]) > 0 else self.even)(x)

    net = Signed()
    program = ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1, weight_decay=0.5), microbatches=2)
    x = torch.randn(4, 2).abs() * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    new, _ = program.train_step(program.init(), (x, torch.randn(4, 1)))
    moved = {name for name, value in net.named_parameters() if not torch.equal(new.params[name], value)}
    assert moved == {"even.weight", "even.bias", "odd.weight", "odd.bias"}


def test_groups_masks_and_injected_rates_keep_what_is_skipped():
    """Labels and hyperparameters may have a parameter's name."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learning_rate, self.slow = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.learning_rate

    groups = {"slow": ps.optim.inject(ps.optim.adamw)(learning_rate=0.1), "fast": ps.optim.sgd(0.1, momentum=0.9)}
    tx = ps.optim.partition(groups, [("slow", "slow"), ("", "fast")])
    program = ps.program(Named(), ps.supervised(nn.MSELoss()), tx)
    state = program.init()
    for _ in range(2):
        state, _ = program.train_step(state, (torch.ones(4, 2), torch.zeros(4, 2)))
    assert state.params["slow"].tolist() == [1.0, 1.0]
    assert state.params["learning_rate"].tolist() != [1.0, 1.0]
    inner = state.opt_state.groups["slow"].inner
    assert int(inner.step) == 2
    assert inner.inner[0].missed.counts.tolist() == [2]


def test_a_flush_leaves_what_no_call_has_reached():
    program = ps.program(heads(), objective, ps.optim.sgd(0.1, weight_decay=0.5), accumulate=4)
    state = program.init()
    for batch in task_batches(2):
        state, _ = program.train_step(state, batch)
    new, _ = program.flush(state)
    assert int(new.updates) == 1
    assert torch.equal(new.params["unused.weight"], state.params["unused.weight"])
    assert not torch.equal(new.params["other.weight"], state.params["other.weight"])


def test_a_gradient_of_zeros_is_a_gradient():
    """As in torch: a path leads there, and the update decays the weight."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    net = Adapter()
    for accumulate in (1, 2):
        program = ps.program(
            net, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1, weight_decay=0.5), accumulate=accumulate
        )
        state = program.init()
        for _ in range(accumulate):
            state, _ = program.train_step(state, (torch.ones(4, 2), torch.ones(4, 1)))
        torch.testing.assert_close(state.params["a.weight"], net.a.weight.detach() * 0.95)


def test_fit_names_what_no_path_leads_to_and_nothing_else(caplog: pytest.LogCaptureFixture):
    class Relu(nn.Module):  # a dead unit: a path with a gradient of exactly 0
        def __init__(self) -> None:
            super().__init__()
            self.dead, self.live, self.unused = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
            nn.init.constant_(self.dead.bias, -100.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.dead(x).relu() + self.live(x)

    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(4)]
    program = ps.program(Relu(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    ps.fit(program.init(), {"train": batches}, program, epochs=1, sinks=[])
    told = [record.getMessage() for record in caplog.records if "no gradient reaches" in record.getMessage()]
    assert len(told) == 1
    assert "2 of 6 parameters: unused.weight, unused.bias" in told[0]


def test_a_run_goes_on_from_a_snapshot_with_the_counts(tmp_path: Any):
    tx, _ = TWINS["adamw"]
    program = ps.program(heads(), objective, tx())
    state = run(program.train_step, program)
    with ps.Snapshots(tmp_path) as snapshots:
        snapshots.save(9, state)
        found = snapshots.restore(program.init()).state
    step = ps.compile_step(program.train_step, backend="aot_eager")
    for batch in task_batches(3):
        state, _ = program.train_step(state, batch)
        found, _ = step(found, batch)
    assert_follows(found, state.params)


class Reversible(torch.autograd.Function):
    """Computes its layer again in the backward pass, which leaves the gradients of the layer's weights in .grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        with torch.no_grad():
            return x + layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(x + ctx.layer(x), gradient)
        return x.grad, None


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_gradients_that_a_backward_pass_leaves_in_grad_count(compiled: bool, accumulate: int, is_shared: bool):
    """Also of a weight that the loss reaches on another way, too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = Reversible.apply(self.first(x), self.inner)
            return self.last(self.inner(y) if is_shared else y)

    net, (x, y) = Net(), (torch.randn(8, 4), torch.randn(8, 1))
    hand = copy.deepcopy(net)
    optimizer = torch.optim.SGD(hand.parameters(), 0.1)
    nn.functional.mse_loss(hand(x), y).backward()
    optimizer.step()
    program = ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1), accumulate=accumulate)
    step = ps.compile_step(program.train_step, backend="aot_eager") if compiled else program.train_step
    state = program.init()
    for _ in range(accumulate):
        state, _ = step(state, (x, y))
    for name, value in hand.named_parameters():
        torch.testing.assert_close(state.params[name], value.detach())
