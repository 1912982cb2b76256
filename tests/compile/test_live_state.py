"""What a compiled step is given beside what it has: another step than the program's, other leaves than the store's, a
flush of the user's own, a context that is part of the state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from rigs.faults.runs import fit
from torch import Tensor, nn

import purestep as ps
from purestep import events, optim
from purestep.compile import buffers, live_state
from purestep.errors import StepContractError
from purestep.types import Mean, Program, TrainState

pytestmark = pytest.mark.compile
one = torch.ones(())


def mlp(**options: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1), **options)


def clamped(made: Program) -> Callable[..., Any]:
    """A step that does more than the program's own."""

    def step(state: TrainState, batch: Any) -> Any:
        new, metrics = made.train_step(state, batch)
        params = {name: value.clamp(-0.01, 0.01) for name, value in new.params.items()}
        return new._replace(params=params), metrics | {"mine": Mean(one, one)}

    return step


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_step_that_is_compiled_is_the_one_that_was_given(donate: bool, wrapped: bool) -> None:
    made, batch = mlp(), vector_batch()
    step = functools.wraps(made.train_step)(clamped(made)) if wrapped else clamped(made)
    expected, _ = step(made.init(), batch)
    for compiled in (
        ps.compile_step(step, donate=donate, backend="aot_eager"),
        ps.compile_program(made._replace(train_step=step), donate=donate, backend="aot_eager").train_step,
    ):
        state, metrics = compiled(made.init(), batch)
        assert "mine" in metrics
        assert_trees_close(state.params, expected.params)


def test_fit_compiles_the_step_that_it_was_given() -> None:
    made = mlp()
    mine = made._replace(train_step=clamped(made))
    loaders = {"train": [vector_batch()] * 3}
    compiled = fit(made.init(), loaders, mine, epochs=1, compile={"backend": "aot_eager"})
    eager = fit(made.init(), loaders, mine, epochs=1)
    assert_trees_close(compiled.state.params, eager.state.params)
    assert list(compiled.history) == list(eager.history)


class Pair(NamedTuple):
    trained: TrainState
    target: dict[str, Tensor]


def towards(made: Program) -> Callable[..., Any]:
    """A step that measures how far the weights are from a target, which the host moves."""

    def step(state: Pair, batch: Any) -> Any:
        new, metrics = made.train_step(state.trained, batch)
        gap = torch.stack([(new.params[name] - state.target[name]).abs().sum() for name in state.target]).sum()
        return Pair(new, state.target), metrics | {"gap": Mean(gap, one)}

    return step


def gaps(step: Callable[..., Any], made: Program) -> list[float]:
    state, found = Pair(made.init(), ps.clone(made.init().params)), list[float]()
    for number in range(4):
        state, metrics = step(state, vector_batch())
        found.append(float(metrics["gap"]))
        if number == 1:
            state = state._replace(target=ps.clone(dict(state.trained.params)))
    return found


@pytest.mark.parametrize("donate", [False, True, "init"])
def test_a_tree_with_leaves_beside_its_states_is_copied(donate: Any) -> None:
    made = mlp()
    expected = gaps(towards(made), made)
    step = ps.compile_step(towards(made), donate=donate, backend="aot_eager")
    assert gaps(step, made) == pytest.approx(expected)
    state, _ = step(Pair(made.init(), ps.clone(made.init().params)), vector_batch())
    kept = ps.clone(state)
    step(state, vector_batch())
    assert_trees_close(state, kept, exact=True)


def test_such_a_tree_is_no_state_of_a_cuda_graph() -> None:
    made = mlp()
    step = ps.compile_step(towards(made), donate=True, cuda_graph=True, backend="aot_eager")
    with pytest.raises(StepContractError, match="leaves beside its TrainStates.*context, or cuda_graph=None"):
        step(Pair(made.init(), ps.clone(made.init().params)), vector_batch())


def exchanged(step: Callable[..., Any], made: Program) -> Any:
    """Two states in a dict, which change places between two calls."""
    state, _ = step({"a": made.init(0), "b": made.init(1)}, vector_batch())
    return ps.clone(step({"a": state["b"], "b": state["a"]}, vector_batch())[0])


def test_states_that_change_places_in_a_tree_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mlp()

    def step(states: dict[str, TrainState], batch: Any) -> Any:
        return {name: made.train_step(state, batch)[0] for name, state in states.items()}, {}

    expected = exchanged(step, made)
    assert_trees_close(exchanged(ps.compile_step(step, donate=True, backend="aot_eager"), made), expected)

    def first_store(state: Any) -> Any:
        return getattr(next(iter(state.values())), "live_store", None)

    monkeypatch.setattr(live_state, "store_of", first_store)
    with pytest.raises(AssertionError):
        assert_trees_close(exchanged(ps.compile_step(step, donate=True, backend="aot_eager"), made), expected)


def test_a_leaf_that_a_callback_puts_beside_live_states_is_taken() -> None:
    made = mlp()

    def follow(event: Any) -> Any:
        if isinstance(event, events.EpochEnd):
            return event.state._replace(target=ps.clone(dict(event.state.trained.params)))
        return None

    def run(**options: Any) -> Any:
        state = Pair(made.init(), ps.clone(made.init().params))
        loaders = {"train": [vector_batch()] * 3}
        return fit(state, loaders, Program(towards(made)), epochs=3, callbacks=[follow], **options).history["train_gap"]

    assert run(compile={"backend": "aot_eager"}) == pytest.approx(run())


def test_a_tree_with_another_leaf_is_entered_anew() -> None:
    made = mlp()

    def step(state: dict[str, Any], batch: Any) -> Any:
        new, metrics = made.train_step(state["trained"], batch)
        return {**{name: value + 1 for name, value in state.items() if name != "trained"}, "trained": new}, metrics

    compiled = ps.compile_step(step, donate=True, backend="aot_eager")
    state, _ = compiled({"trained": made.init(), "a": torch.zeros(())}, vector_batch())
    state, _ = compiled({**state, "b": torch.zeros(())}, vector_batch())
    assert {name: float(state[name]) for name in "ab"} == {"a": 2.0, "b": 1.0}


def own_flush(state: dict[str, Tensor]) -> Any:
    return {"sum": torch.zeros(()), "out": state["out"] + state["sum"]}, {}


def summing(state: dict[str, Tensor], batch: Tensor) -> Any:
    return {"sum": state["sum"] + batch.sum(), "out": state["out"] + 0}, {"seen": Mean(batch.sum(), one)}


@pytest.mark.parametrize("options", [None, {"donate": False}, {"donate": True}])
def test_a_flush_of_ones_own_is_called(options: Any) -> None:
    own = Program(summing, flush=own_flush)
    if options is not None:
        own = ps.compile_program(own, backend="aot_eager", **options)
    state: Any = {"sum": torch.zeros(()), "out": torch.zeros(())}
    state, _ = own.train_step(state, torch.ones(3))
    state, _ = own.flush(state)
    assert {name: float(value) for name, value in state.items()} == {"sum": 0.0, "out": 3.0}


@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}])
def test_fit_flushes_with_a_flush_of_ones_own_at_the_end_of_each_epoch(compile: Any) -> None:
    inner = mlp(accumulate=4)
    loaders = {"train": [vector_batch()] * 6}
    expected = fit(inner.init(), loaders, inner, epochs=2)
    found = fit(inner.init(), loaders, Program(inner.train_step, inner.flush), epochs=2, compile=compile)
    assert int(found.state.updates) == int(expected.state.updates) == 4
    assert_trees_close(found.state.params, expected.state.params)
    state = {"sum": torch.zeros(()), "out": torch.zeros(())}
    summed = fit(state, {"train": [torch.ones(3)] * 2}, Program(summing, flush=own_flush), epochs=2, compile=compile)
    assert {name: float(value) for name, value in summed.state.items()} == {"sum": 0.0, "out": 12.0}


def test_a_context_that_is_part_of_the_state_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(40, 50, bias=False)
    made = ps.program(net, ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    batch = (torch.randn(8, 40), torch.randn(8, 50) * 100)

    def step(state: TrainState, batch: Any, anchor: dict[str, Tensor]) -> Any:
        new, metrics = made.train_step(state, batch)
        overlap = (new.params["weight"] @ anchor["weight"].t()).square().sum()
        return new, metrics | {"overlap": Mean(overlap, one)}

    def overlaps(step: Callable[..., Any]) -> list[float]:
        state, found = made.init(), list[float]()
        for _ in range(3):
            state, metrics = step(state, batch, state.params)
            found.append(float(metrics["overlap"]))
        return found

    expected = overlaps(step)
    assert overlaps(ps.compile_step(step, donate=True)) == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr(buffers.StateBuffers, "without_aliases", lambda self, leaves: leaves)
    assert overlaps(ps.compile_step(step, donate=True)) != pytest.approx(expected, rel=1e-4)


# --- what is put into a dict of a live state --------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("alone", [True, False], ids=["one state", "several"])
def test_a_leaf_that_is_put_into_a_dict_of_a_live_state_is_taken(donate: bool, alone: bool) -> None:
    """Also where the dict was read a step ago: it is the same one."""
    made = mlp()

    def run(step: Callable[..., Any], *, late: bool = False) -> Any:
        state: Any = made.init() if alone else (made.init(), made.init(1))
        read: list[Any] = []
        for number in range(4):
            read.append((state if alone else state[0]).params)
            if number == 2:
                read[1 if late else 2]["2.bias"] = torch.ones(3)
            state, _ = step(state, vector_batch())
        return ps.clone(state)

    def both(state: Any, batch: Any) -> Any:
        first, metrics = made.train_step(state[0], batch)
        return (first, made.train_step(state[1], batch)[0]), metrics

    step = made.train_step if alone else both
    compiled = ps.compile_step(step, donate=donate, backend="aot_eager")
    assert_trees_close(run(compiled, late=donate), run(step))


def test_a_step_asks_nothing_of_a_state_that_nobody_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ps.compile_step(mlp().train_step, donate=True, backend="aot_eager")
    state, _ = step(mlp().init(), vector_batch())
    for _ in range(2):
        state, _ = step(state, vector_batch())
        assert int(state.step) == int(state.updates)
    store: Any = state.live_store
    assert store.exposed is None
    assert state.params
    assert store.exposed is not None


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, "init"])
def test_a_batch_that_is_part_of_the_state_is_read_as_it_was(donate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In compiled code one tensor of the state is written while others are computed still."""

    def step(state: TrainState, x: Tensor) -> Any:
        a, b = state.params["a"], state.params["b"]
        params = {"a": a * 0.5 + 1, "b": b + x.cumsum(1)}
        return state._replace(params=params, updates=state.updates + 1), {"sum": Mean((x @ x).sum(), one)}

    def run(step: Any) -> Any:
        state = mlp().init()._replace(params={name: torch.eye(4) for name in "ab"})
        for _ in range(3):
            state, _ = step(state, state.params["a"])
        return ps.clone(state).params

    expected = run(step)
    assert_trees_close(run(ps.compile_step(step, donate=donate)), expected)
    monkeypatch.setattr(buffers.StateBuffers, "without_aliases", lambda _, leaves: leaves)
    wrong = run(ps.compile_step(step, donate=donate))
    assert not torch.equal(wrong["b"], expected["b"])
