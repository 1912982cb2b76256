"""Fused kernels of eager steps: the numbers of `Transform.update`, and nothing written that must not be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import purestep as ps
from purestep import optim, schedules, tree
from purestep.optim import fused
from purestep.types import Empty

Make = Callable[[], optim.Transform]


def no_kernel(tx: optim.Transform) -> optim.Transform:
    return tx._replace(kind=None)


def has_plan(tx: optim.Transform) -> bool:
    params = {name: p.detach() for name, p in net().named_parameters()}
    return fused.plan(tx, params, tx.init(params), params) is not None


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator).to(dtype), torch.randint(3, (6,), generator=generator)


WARMUP = schedules.warmup_cosine(peak=1e-2, warmup=3, total=9)
TRANSFORMS: dict[str, Make] = {
    "adamw": lambda: optim.adamw(1e-2),
    "adamw, mask": lambda: optim.adamw(1e-2, mask="weight", weight_decay=0.5),
    "adamw, schedule": lambda: optim.adamw(WARMUP, 0.8, 0.95),
    "adamw, no decay": lambda: optim.adamw(1e-2, weight_decay=0.0),
    "adamw, a tensor": lambda: optim.adamw(torch.tensor(1e-2)),
    "adam, coupled": lambda: optim.adam(1e-2, weight_decay=0.1),
    "adam, mask": lambda: optim.adam(1e-2, weight_decay=0.1, mask="bias"),
    "sgd": lambda: optim.sgd(0.1),
    "sgd, momentum": lambda: optim.sgd(0.1, 0.9, weight_decay=0.01),
    "sgd, nesterov": lambda: optim.sgd(WARMUP, 0.9, True),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2)),
    "scaled": lambda: optim.chain(optim.scale(0.5), optim.clip_by_global_norm(0.05), optim.sgd(0.1, 0.9)),
    "nested": lambda: optim.chain(optim.chain(optim.clip_by_global_norm(0.05), optim.adam(1e-2))),
    "partition": lambda: optim.partition(
        {"slow": optim.adamw(1e-3), "fast": optim.sgd(WARMUP, 0.9)}, [(r"^0\.", "slow"), ("", "fast")]
    ),
    "injected": lambda: optim.inject(optim.adamw)(learning_rate=WARMUP),
    "by parts": lambda: optim.chain(
        optim.clip_by_global_norm(0.05),
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.1, mask="weight"),
        optim.scale_by_learning_rate(1e-2),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("donate", [False, True])
def test_a_kernel_computes_what_update_computes(name: str, donate: bool) -> None:
    tx = TRANSFORMS[name]()
    assert has_plan(tx)
    fast = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), tx, ema=0.9)
    slow = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), no_kernel(tx), ema=0.9)
    step = (ps.donate(fast) if donate else fast).train_step
    state, expected = fast.init(), slow.init()
    start, first = tree.clone(state), state
    for index in range(7):
        state, found = step(state, batch(index))
        expected, metrics = slow.train_step(expected, batch(index))
        assert_trees_close(found, metrics, rtol=1e-6, atol=1e-9)
    assert_trees_close(state._replace(step=state.step), expected, rtol=1e-6, atol=1e-9)
    assert_trees_close(first, start, exact=True)


def test_some_transforms_have_no_kernel() -> None:
    own = optim.stateless(lambda updates, params: updates)
    for tx in (
        optim.adamw(1e-2, amsgrad=True),
        optim.adam(1e-2, mu_dtype=torch.bfloat16),
        optim.sgd(0.1, 0.9, dampening=0.5),
        optim.adamw(1e-2, weight_decay=torch.tensor(0.1)),
        optim.chain(own, optim.adamw(1e-2)),  # it may store what it gets
        optim.chain(optim.adamw(1e-2), optim.scale(0.5)),
        optim.partition({"a": optim.adamw(1e-2), "b": optim.lion(1e-3)}, [("weight", "a"), ("", "b")]),
        optim.lion(1e-3),
        optim.rmsprop(1e-3, momentum=0.9),
        optim.lamb(1e-3),
        optim.chain(optim.trace(0.9), optim.add_decayed_weights(0.1), optim.scale_by_learning_rate(0.1)),  # decoupled
        optim.chain(optim.masked(optim.clip_by_global_norm(1.0), "weight"), optim.sgd(0.1)),  # no decay
    ):
        assert not has_plan(tx)


def test_an_update_of_the_users_own_is_the_one_that_runs() -> None:
    """A transform whose ``update`` was replaced has no kernel any more, nor has a chain or a group with it."""
    own = optim.adamw(1e-2)
    halved = own._replace(update=lambda updates, state, params: own.update(updates, state, params))
    clip = optim.clip_by_global_norm(1.0)
    kept = clip._replace(update=lambda updates, state, params: (updates, state))
    for tx in (halved, optim.chain(clip, halved), optim.chain(kept, own), optim.partition({"a": halved}, [("", "a")])):
        assert not has_plan(tx)


REFUSED: dict[str, Any] = {
    "nan": lambda x, y: (x * torch.nan, y),
    "inf": lambda x, y: (x * torch.inf, y),
    "weight 0": lambda x, y: (x, torch.full_like(y, -100)),
}


@pytest.mark.parametrize("name", ["adamw", "sgd, momentum", "clipped", "partition", "injected"])
@pytest.mark.parametrize("spoil", REFUSED)
@pytest.mark.parametrize("donate", [False, True])
def test_a_refused_update_writes_nothing(name: str, spoil: str, donate: bool) -> None:
    program = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), TRANSFORMS[name](), ema=0.9, nonfinite="skip")
    step = (ps.donate(program) if donate else program).train_step
    state, _ = step(program.init(), batch())
    before = tree.clone(state)
    state, metrics = step(state, REFUSED[spoil](*batch(1)))
    assert float(metrics["applied"]) == 0
    fields = ("params", "opt_state", "ema", "updates")
    for field in fields:
        assert_trees_close(getattr(state, field), getattr(before, field), exact=True)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "is_third", [lambda count: count == 2, lambda count: int(count) == 2], ids=["tensor", "number"]
)
def test_one_invalid_rate_stops_every_group(is_third: Any, donate: bool) -> None:
    """The rate of the second group is negative at the third update: the first group must not move then."""
    groups = {"a": optim.sgd(0.1, 0.9), "b": optim.adamw(lambda count: 0.1 - 0.2 * is_third(count))}
    tx = optim.partition(groups, [("weight", "a"), ("", "b")])
    program = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), tx)
    step = (ps.donate(program) if donate else program).train_step
    state = program.init()
    for index in range(2):
        state, _ = step(state, batch(index))
    before = tree.clone(state)
    state, metrics = step(state, batch(2))
    assert float(metrics["applied"]) == 0
    assert int(state.halted) == 3
    assert_trees_close((state.params, state.opt_state), (before.params, before.opt_state), exact=True)


def test_without_a_read_of_the_host_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernel itself keeps the old numbers of a refused update."""
    program = ps.program(
        net(), ps.supervised(nn.CrossEntropyLoss()), TRANSFORMS["clipped"](), ema=0.9, nonfinite="skip"
    )
    state = other = program.init()
    for index in range(5):
        given = batch(index) if index != 2 else REFUSED["nan"](*batch(index))
        state, metrics = program.train_step(state, given)
        with monkeypatch.context() as patch:
            patch.setattr("purestep.torch_ext.tracing.may_read", lambda value: False)
            other, expected = program.train_step(other, given)
        one, two = ps.clone(other), ps.clone(state)
        assert_trees_close(one._replace(ema=Empty()), two._replace(ema=Empty()), exact=True)
        assert_trees_close(one.ema, two.ema, rtol=1e-13, atol=1e-15)  # averaged by other operations
        assert_trees_close(expected, metrics, exact=True)


def test_two_parameters_with_one_gradient() -> None:
    """Autograd hands out one tensor for both; the clipping in place must not scale it twice."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a + self.b) * x

    tx = optim.chain(optim.clip_by_global_norm(1e-2), optim.sgd(1.0))
    results = []
    for one in (tx, no_kernel(tx)):
        program = ps.program(Sum(), lambda model, x: ps.Loss(model(x).sum(), torch.tensor(1.0)), one)
        state, _ = program.train_step(program.init(), torch.arange(3.0))
        results.append(state.params)
    assert_trees_close(results[0], results[1])


def test_a_gradient_that_a_function_keeps_is_not_written() -> None:
    class Keeping(torch.autograd.Function):
        kept: Tensor

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            Keeping.kept = grads[0] * 1
            return Keeping.kept

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, Keeping.apply(self.weight), self.bias)

    tx = optim.chain(optim.clip_by_global_norm(1e-3), optim.sgd(1.0))
    program = ps.program(Net(3, 2), ps.supervised(nn.MSELoss()), tx)
    program.train_step(program.init(), (torch.ones(4, 3), torch.ones(4, 2)))
    assert Keeping.kept.norm() > 1e-2  # not clipped


@pytest.mark.parametrize("strided", ["channels_last", "transposed", "expanded"])
def test_layouts(strided: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    if strided == "channels_last":
        model.to(memory_format=torch.channels_last)
    elif strided == "transposed":
        model[2].weight.data = torch.randn(64, 3).t()
    else:
        model[2].bias.data = torch.ones(1).expand(3)
    data = torch.randn(2, 3, 6, 6), torch.tensor([0, 2])
    states = []
    for tx in (optim.adamw(1e-2), no_kernel(optim.adamw(1e-2))):
        program = ps.program(model, ps.supervised(nn.CrossEntropyLoss()), tx, ema=0.5)
        state = program.init()
        for _ in range(3):
            state, _ = program.train_step(state, data)
        states.append(state)
    assert_trees_close(states[0], states[1], rtol=1e-4, atol=1e-6)
    if strided == "channels_last":
        assert states[0].params["0.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("read", [True, False])
def test_an_unused_layer_is_left_alone_and_its_own_count_goes_on(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Linear(4, 3), nn.Linear(4, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.other(x) if torch.nan_to_num(x[1, 0]) > 100 else self.used(x)

    class Blind(TorchDispatchMode):
        """Under a mode the host does not read, as on a GPU."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    calls, launch = [], fused.foreach.fused_
    monkeypatch.setattr(
        fused.foreach,
        "fused_",
        lambda kernel, lists, *more: calls.append(len(lists[0])) or launch(kernel, lists, *more),
    )
    states = []
    for tx in (optim.adamw(1e-2), no_kernel(optim.adamw(1e-2))):
        torch.manual_seed(0)
        program = ps.program(Two(), ps.supervised(nn.CrossEntropyLoss()), tx, nonfinite="skip")
        step, state = ps.donate(program).train_step, program.init()
        for index in range(6):
            x, y = batch(index)
            x[1, 0] = 1000.0 if index % 2 else 0.0
            if index == 3:
                x[0, 0] = torch.nan  # neither layer changes, nor does what the first one has missed
            with nullcontext() if read else Blind():
                state, _ = step(state, (x, y))
        states.append(ps.clone(state))
    assert_trees_close(states[0], states[1], rtol=1e-7, atol=1e-10)
    assert calls == [2] * 6  # of one layer; the kernel skips the fourth call


def test_dtypes_that_the_kernel_does_not_have_take_the_formula() -> None:
    program = ps.program(
        net(torch.float32), ps.supervised(nn.CrossEntropyLoss()), optim.adamw(1e-2), precision="bf16-true"
    )
    state, metrics = program.train_step(program.init(), (batch()[0].bfloat16(), batch()[1]))
    assert float(metrics["applied"]) == 1
    assert state.params["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("size", [0.5, 0.9, 2.0])
def test_a_tiny_bound_clips_as_in_its_formula(size: float) -> None:
    """Beside the 1e-6 that is added to a norm, a bound of 1e-6 is small: a smaller norm is scaled too."""
    tx = optim.chain(optim.clip_by_global_norm(1e-6), optim.sgd(1.0))
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    program = ps.program(net, lambda model, batch: ps.Loss(model(batch).sum(), torch.ones(()), {}), tx)
    new, _ = program.train_step(program.init(), torch.full((1, 1), size * 1e-6))
    assert float(new.params["weight"]) == pytest.approx(-size * 1e-6 * min(1, 1 / (size + 1)), rel=1e-5, abs=0)


def test_the_norm_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = optim.base._leaf_norms
    monkeypatch.setattr(optim.base, "_leaf_norms", lambda *given: calls.append(1) or own(*given))
    program = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), TRANSFORMS["clipped"]())
    program.train_step(program.init(), batch())
    assert len(calls) == 1


def test_a_derivative_through_a_step_takes_the_formula() -> None:
    program = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), optim.adamw(1e-2))
    state = program.init()

    def after(params: Any) -> Tensor:
        return program.train_step(state._replace(params=params), batch())[0].params["0.weight"].sum()

    grads = torch.func.grad(after)(state.params)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert grads["0.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", ["rate", "context", "value"])
@pytest.mark.parametrize("make", [optim.adamw, optim.sgd])
def test_autograd_follows_what_a_step_is_given_like_torch_func(make: Any, name: str) -> None:
    def objective(model: Any, data: Any, weight: Any = 1.0) -> ps.Loss:
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="none")
        return ps.Loss((loss * weight).mean() * model.values["share"], len(data[0]))

    module, chosen = net(), torch.tensor(0.3, dtype=torch.float64)

    def after(value: Tensor) -> Tensor:
        given = {**{"rate": torch.tensor(0.1), "context": torch.ones(()), "value": torch.ones(())}, name: value}
        tx = make(lambda count: given["rate"] / (1 + count))
        program = ps.program(module, objective, tx, values={"share": lambda count: given["value"]})
        state = program.init()
        for index in range(2):
            state, _ = ps.donate(program).train_step(state, batch(index), given["context"])
        return nn.functional.cross_entropy(program.bind(state, train=True)(batch(5)[0]), batch(5)[1])

    leaf = chosen.clone().requires_grad_()
    (found,) = torch.autograd.grad(after(leaf), leaf)
    assert found.abs() > 1e-8
    torch.testing.assert_close(found, torch.func.grad(after)(chosen), rtol=1e-6, atol=0)


def test_a_masked_decay_of_other_parameters_is_refused() -> None:
    tx = optim.sgd(0.1, weight_decay=0.5, mask="weight")
    params, other = {"weight": torch.ones(3)}, {"renamed.weight": torch.ones(3)}
    state = tx.init(other)
    assert fused.plan(tx, params, state, params) is None
    with pytest.raises(ps.errors.StateError):
        tx.update(params, state, params)


def test_a_sparse_gradient_has_no_kernel() -> None:
    tx = optim.adamw(1e-2)
    params = {"w": torch.ones(3, 2)}
    assert fused.plan(tx, params, tx.init(params), params) is not None
    assert fused.plan(tx, {"w": torch.ones(3, 2).to_sparse()}, tx.init(params), params) is None
