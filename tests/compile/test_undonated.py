"""Compiled steps without donation: the input state stays what it was, and the returned one is independent of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import optim, tree
from purestep.compile import buffers
from purestep.types import Program, TrainState

pytestmark = pytest.mark.compile


def program(net: nn.Module | None = None, **options: Any) -> Program:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.01))
    return ps.program(net or tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), tx, ema=0.9, **options)


def compiled(step: Any) -> Any:
    return ps.compile_step(step, backend="aot_eager")


def memory(state: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(state)}


def test_every_state_stays_as_it_was() -> None:
    made = program(tiny_convnet(), accumulate=2)  # batch statistics, an open window
    step, states, eager = compiled(made.train_step), [made.init()], made.init()
    for seed in range(5):
        states.append(step(states[-1], image_batch(8, seed))[0])
        eager, _ = made.train_step(eager, image_batch(8, seed))
    assert_trees_close(states[-1], eager, rtol=1e-4, atol=1e-5)
    copies = [tree.clone(state) for state in states]
    step(states[2], image_batch(8, 9))
    again, _ = step(states[3], image_batch(8, 3))
    assert_trees_close(states, copies, exact=True)
    assert_trees_close(again, states[4], exact=True)
    assert not memory(states[3]) & memory(states[4])
    assert [type(state) for state in states] == [TrainState] * 6
    assert step.graphs == 2


def test_a_state_that_is_not_copied_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees it."""
    true = buffers.StateBuffers.__init__
    monkeypatch.setattr(
        buffers.StateBuffers, "__init__", lambda *args, **named: true(*args, **(named | {"adopt": True}))
    )
    made = program()
    state = made.init()
    before = tree.clone(state)
    compiled(own(made))(state, vector_batch())
    with pytest.raises(AssertionError):
        assert_trees_close(state, before, exact=True)


def own(made: Program) -> Callable[..., Any]:
    """A user-defined step, whose state keeps its tree."""
    return lambda state, batch: made.train_step(state, batch)


CHANGES: dict[str, Callable[[TrainState], Any]] = {
    "replaced": lambda s: s._replace(params={**s.params, "0.bias": torch.ones_like(s.params["0.bias"])}),
    "written": lambda s: (s.params["0.bias"].fill_(1.0), s)[1],
    "by data": lambda s: (setattr(s.params["0.bias"], "data", torch.ones(8)), s)[1],
    "assigned": lambda s: (s.params.update({"0.bias": torch.ones(8)}), s)[1],
    "another key": lambda s: s._replace(key=ps.rng.key(9)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_that_was_changed_is_taken_as_it_is(change: Callable[[TrainState], TrainState]) -> None:
    made = program()
    step, state = compiled(made.train_step), made.init()
    state, _ = step(state, vector_batch())
    eager = tree.clone(state)
    state, _ = step(change(state), vector_batch())
    eager, _ = made.train_step(change(eager), vector_batch())
    assert_trees_close(state, eager, rtol=1e-4, atol=1e-5)


def test_a_live_state_is_copied_and_lives_on() -> None:
    made = program()
    live, _ = ps.compile_step(made.train_step, donate=True, backend="aot_eager")(made.init(), vector_batch())
    kept = ps.clone(live)
    found, _ = compiled(made.train_step)(live, vector_batch())
    assert type(found) is TrainState
    assert_trees_close(ps.clone(live), kept, exact=True)


def test_trees_of_any_kind_are_copied() -> None:
    made = program()

    def step(state: dict[str, Any], batch: Any) -> tuple[Any, Any]:
        new, metrics = made.train_step(state["model"], batch)
        return {"model": new, "count": state["count"] + 1, "seen": state["seen"] + batch[0].double().sum()}, metrics

    start = {"model": made.init(), "count": torch.zeros(3), "seen": torch.zeros((), dtype=torch.float64)}
    state: Any = start
    eager: Any = start
    before = tree.clone(start)
    for seed in range(3):
        state, _ = compiled(step)(state, vector_batch(seed=seed))
        eager, _ = step(eager, vector_batch(seed=seed))
    assert_trees_close(state, eager, rtol=1e-4, atol=1e-5)
    assert_trees_close(start, before, exact=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_double_that_is_a_number_is_written(backend: str) -> None:
    def add(state: dict[str, Tensor], batch: Tensor) -> tuple[Any, Any]:
        return {"sum": state["sum"] + batch.double().sum()}, {}

    step = ps.compile_step(add, backend=backend)
    state: Any = {"sum": torch.zeros((), dtype=torch.float64)}
    for size in range(1, 5):
        state, _ = step(state, torch.ones(size))
    assert state["sum"].item() == 10
