"""Steps that are not pure, one a kind, and what has to be said of each."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import purestep as ps

State = dict[str, Any]
Batch = dict[str, Tensor]
Step = Callable[[Any, Any], Any]


def fresh() -> State:
    return {"w": torch.ones(4), "opt": (torch.arange(4.0), torch.zeros((), dtype=torch.int64))}


def batch() -> Batch:
    return {"x": torch.arange(4.0), "extra": torch.ones(())}


def clean(state: State, batch: Batch) -> tuple[State, ps.Metrics]:
    momentum, count = state["opt"]
    momentum = 0.9 * momentum + batch["x"]
    new = {"w": state["w"] - momentum, "opt": (momentum, count + 1)}
    return new, {"loss": ps.Mean(momentum.sum(), torch.ones(()))}


class Call(NamedTuple):
    """One call of the clean step, any part of which a fault may change."""

    state: State
    batch: Batch
    new: State
    metrics: dict[str, Any]


def changed(change: Callable[[Call], Any]) -> Callable[[], Step]:
    """Makes clean steps with a fault."""

    def make() -> Step:
        def step(state: State, batch: Batch) -> Any:
            new, metrics = clean(state, batch)
            change(Call(state, batch, new, metrics))
            return new, metrics

        return step

    return make


def put(tree: Any, key: Any, value: Any) -> None:
    tree[key] = value


def reverse(leaf: Tensor) -> None:
    """The same numbers in another order, which a sum or XOR of them would not show."""
    leaf.data.copy_(leaf.flip(0))


def normalized(call: Call) -> None:
    """What BatchNorm does to the running mean that it is lent: no version moves."""
    norm = nn.BatchNorm1d(4, affine=False)
    buffers = {"running_mean": call.state["w"], "running_var": torch.ones(4)}
    torch.func.functional_call(norm, buffers, (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),))


def torch_optimizer(call: Call) -> None:
    weight = call.state["opt"][0].detach().requires_grad_()
    weight.grad = torch.ones(4)
    torch.optim.SGD([weight], lr=0.1).step()


def counting() -> Step:
    calls = itertools.count()
    return changed(lambda call: call.new["opt"][1].add_(next(calls)))()


def remembering() -> Step:
    seen: list[int] = []
    return changed(lambda call: seen.append(1) or put(call.metrics, f"call {len(seen)}", call.metrics["loss"]))()


def hoarding() -> Step:
    kept: list[Tensor] = []

    def step(state: State, batch: Batch) -> Any:
        weight = state["w"].detach().requires_grad_()
        kept.append((weight * batch["x"]).sum())
        return clean(state, batch)

    return step


def momentum_outside() -> Step:
    """An optimizer's state that is not in the state."""
    held = {"momentum": torch.zeros(4)}

    def step(state: State, batch: Batch) -> Any:
        new, metrics = clean(state, batch)
        held["momentum"] = 0.9 * held["momentum"] + batch["x"]
        return {**new, "w": state["w"] - held["momentum"]}, metrics

    return step


def one_buffer() -> Step:
    """Returns the same memory at every call."""
    buffer = torch.zeros(4)

    def step(state: State, batch: Batch) -> Any:
        new, metrics = clean(state, batch)
        buffer.copy_(new["w"])
        return {**new, "w": buffer}, metrics

    return step


def drawn_once() -> Step:
    """A mask that is cached: from the second call on nothing is drawn."""
    cache: dict[str, Tensor] = {}

    def step(state: State, batch: Batch) -> Any:
        if "mask" not in cache:
            cache["mask"] = torch.rand(4)
        new, metrics = clean(state, batch)
        return {**new, "w": new["w"] * cache["mask"]}, metrics

    return step


def later() -> Step:
    """Impure from its second batch on."""

    def step(state: State, batch: Batch) -> Any:
        if state["opt"][1] == 1:
            state["w"].add_(1)
        return clean(state, batch)

    return step


def clock(call: Call) -> None:
    call.new["w"].add_(time.perf_counter_ns() % 1000)  # float32 does not see a microsecond beside an hour


class Plant(NamedTuple):
    """A kind of impurity."""

    make: Callable[[], Step]
    where: str  # the leaf, or "" where it is the step as a whole
    what: str  # pattern


WRITES = "the step writes its arguments"
DIFFERS = "the second call with the same state and batch returns another"

PLANTS = {
    "add_ on a parameter": Plant(changed(lambda call: call.state["w"].add_(1)), "state/w", f"{WRITES}, in place"),
    "a write through .data": Plant(
        changed(lambda call: call.state["opt"][0].data.fill_(7)), "state/opt/0", f"{WRITES}, past autograd"
    ),
    "an order through .data": Plant(
        changed(lambda call: reverse(call.state["opt"][0])), "state/opt/0", f"{WRITES}, past autograd"
    ),
    "a write through numpy": Plant(
        changed(lambda call: put(call.state["w"].numpy(), 0, 5)), "state/w", f"{WRITES}, past autograd"
    ),
    "BatchNorm's running mean": Plant(changed(normalized), "state/w", WRITES),
    "the optimizer's count": Plant(changed(lambda call: call.state["opt"][1].add_(1)), "state/opt/1", WRITES),
    "a torch optimizer's step": Plant(changed(torch_optimizer), "state/opt/0", f"{WRITES}, in place"),
    "the batch": Plant(changed(lambda call: call.batch["x"].mul_(2)), "batch/x", f"{WRITES}, in place"),
    "a key of the batch": Plant(
        changed(lambda call: call.batch.pop("extra")), "batch/extra", f"{WRITES}: a leaf was removed"
    ),
    "a key in the state": Plant(
        changed(lambda call: put(call.state, "seen", torch.ones(()))), "state/seen", f"{WRITES}: a leaf was added"
    ),
    "torch's generator": Plant(changed(lambda call: torch.rand(1)), "", "the step draws from torch's global generator"),
    "numpy's generator": Plant(
        changed(lambda call: np.random.rand()), "", "the step draws from numpy's global generator"
    ),
    "Python's generator": Plant(
        changed(lambda call: random.random()), "", "the step draws from Python's global generator"
    ),
    "a mask that is drawn once": Plant(drawn_once, "", "the step draws from torch's global generator"),
    "the clock": Plant(changed(clock), "state/w", f"{DIFFERS} value"),
    "a counter": Plant(counting, "state/opt/1", f"{DIFFERS} value"),
    "a list that grows": Plant(remembering, "", f"{DIFFERS} structure"),
    "momentum outside of the state": Plant(momentum_outside, "state/w", f"{DIFFERS} value"),
    "one buffer for every result": Plant(one_buffer, "state/w", "the next call overwrites the result of this one"),
    "a graph in the state": Plant(
        changed(lambda call: call.new["w"].requires_grad_()),
        "state/w",
        "has an autograd graph, which keeps the whole step",
    ),
    "a graph in the metrics": Plant(
        changed(lambda call: call.metrics["loss"].total.requires_grad_()), "metrics/loss/total", "has an autograd graph"
    ),
    "graphs in a list": Plant(hoarding, "", r"every call keeps \d+ tensors alive, one of them .* with its graph"),
}
"""Row 45: what a step may not do to what it is given, and what it may not depend on."""

CHANGES = {
    "a shape": Plant(
        changed(lambda call: put(call.new, "w", call.new["w"][None])),
        "state/w",
        r"\[4\] torch.float32 became \[1, 4\] torch.float32",
    ),
    "a dtype": Plant(
        changed(lambda call: put(call.new, "w", call.new["w"].double())),
        "state/w",
        r"\[4\] torch.float32 became \[4\] torch.float64",
    ),
    "a device": Plant(
        changed(lambda call: put(call.new, "w", call.new["w"].to("meta"))),
        "state/w",
        r"\[4\] torch.float32 became \[4\] torch.float32 on meta",
    ),
    "a Python type": Plant(
        changed(lambda call: put(call.new, "w", 3.0)), "state/w", r"\[4\] torch.float32 became float 3.0"
    ),
    "a leaf less": Plant(changed(lambda call: call.new.pop("opt")), "state/opt/0", "became nothing"),
    "a leaf more": Plant(changed(lambda call: put(call.new, "v", torch.ones(1))), "state/v", "nothing became"),
    "a node": Plant(changed(lambda call: put(call.new, "opt", list(call.new["opt"]))), "state", "other node types"),
}
"""Row 46: a state of another kind comes out than went in."""
