"""Compiled steps that leave their state as it was: what they hand out, and what they make of it when it comes back."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import optim, tree
from purestep.compile import CompiledStep, copied_state
from purestep.types import Program, TrainState

pytestmark = pytest.mark.compile


def program(net: nn.Module | None = None, **options: Any) -> Program:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.01))
    return ps.program(net or tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), tx, ema=0.9, **options)


def compiled(made: Program, **options: Any) -> Any:
    return ps.compile_step(made.train_step, backend="aot_eager", **options)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The states that were packed leaf by leaf."""
    found: list[Any] = []
    enter = CompiledStep._copy_in  # pyright: ignore[reportPrivateUsage]

    def noted(self: Any, state: Any) -> Any:
        found.append(state)
        return enter(self, state)

    monkeypatch.setattr(CompiledStep, "_copy_in", noted)
    return found


def memory(state: TrainState) -> set[int]:
    """Where the leaves of a state lie."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(state)}


def close(found: Any, expected: Any) -> None:
    assert type(found) is TrainState
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_state_that_comes_back_is_copied_whole(entered: list[Any]) -> None:
    made = program()
    step, state, eager = compiled(made), made.init(), made.init()
    for seed in range(4):
        state, metrics = step(state, vector_batch(seed=seed))
        eager, expected = made.train_step(eager, vector_batch(seed=seed))
        close(state, eager)
        assert_trees_close(metrics, expected, rtol=1e-4, atol=1e-5)
    assert len(entered) == 1
    assert step.graphs == 1


def test_every_state_stays_as_it_was() -> None:
    made = program(tiny_convnet(), accumulate=2)  # batch statistics, an open window
    step, states = compiled(made), [made.init()]
    for seed in range(5):
        states.append(step(states[-1], image_batch(8, seed))[0])
    copies = [tree.clone(state) for state in states]
    step(states[2], image_batch(8, 9))
    again, _ = step(states[3], image_batch(8, 3))
    assert_trees_close(states, copies, exact=True)
    assert_trees_close(again, states[4], exact=True)
    assert not memory(states[3]) & memory(states[4])


def replaced(state: TrainState) -> TrainState:
    return state._replace(params={**state.params, "0.bias": torch.ones_like(state.params["0.bias"])})


def written(state: TrainState) -> TrainState:
    state.params["0.bias"].fill_(1.0)
    return state


def through_numpy(state: TrainState) -> TrainState:
    state.params["0.bias"].numpy()[:] = 1.0
    return state


def by_data(state: TrainState) -> TrainState:
    state.params["0.bias"].data = torch.ones_like(state.params["0.bias"])
    return state


def turned_by_data(state: TrainState) -> TrainState:
    """Of the same memory, and no write."""
    state.params["0.weight"].data = state.params["0.weight"].data.T
    return state


def assigned(state: TrainState) -> TrainState:
    state.params["0.bias"] = torch.ones_like(state.params["0.bias"])
    return state


def swapped(state: TrainState) -> TrainState:
    """The same tensors, elsewhere."""
    names = {"0.bias": "2.bias", "2.bias": "0.bias"}
    return state._replace(params={name: state.params[names.get(name, name)] for name in state.params})


def turned(state: TrainState) -> TrainState:
    """In place, where the shape tells nothing."""
    state.params["0.weight"].t_()
    return state


def rekeyed(state: TrainState) -> TrainState:
    return state._replace(key=ps.rng.key(9))


CHANGES = [replaced, written, through_numpy, by_data, turned_by_data, assigned, swapped, turned, rekeyed]


@pytest.mark.parametrize("layers", [2, 7])
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_was_changed_is_taken_as_it_is(change: Callable[[TrainState], TrainState], layers: int) -> None:
    torch.manual_seed(0)
    # Of four leaves of one shape that lie one behind the other, views are made together.
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), *[nn.Linear(6, 6) for _ in range(layers - 1)])
    made = program(net)
    batch = (torch.randn(5, 6), torch.arange(5))
    step, state = compiled(made), made.init()
    state, _ = step(state, batch)
    eager = tree.clone(state)
    state, _ = step(change(state), batch)
    eager, _ = made.train_step(change(eager), batch)
    close(state, eager)


def test_who_does_not_look_takes_an_old_state_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above, with its check planted out."""
    monkeypatch.setattr(copied_state._Returned, "is_unmodified", lambda found, state: True)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError):
        test_a_state_that_was_changed_is_taken_as_it_is(replaced, 2)


def test_who_mixes_up_leaves_takes_one_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = copied_state._reordering  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(copied_state, "_reordering", lambda *known: lambda made: ordered(*known)(made)[::-1])
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        test_a_state_that_was_changed_is_taken_as_it_is(rekeyed, 7)


def test_a_live_state_goes_into_a_pure_step_and_lives_on(entered: list[Any]) -> None:
    made = program()
    pure, donated = compiled(made), compiled(made, donate=True)
    live, _ = donated(made.init(), vector_batch())
    kept = ps.clone(live)
    entered.clear()
    for _ in range(2):
        state, _ = pure(live, vector_batch(seed=1))
    assert_trees_close(ps.clone(live), kept, exact=True)
    expected, _ = made.train_step(kept, vector_batch(seed=1))
    close(state, expected)
    # And back: the state of a pure step is nobody's to take.
    copied = tree.clone(state)
    after, _ = donated(state, vector_batch())
    donated(after, vector_batch())
    assert_trees_close(state, copied, exact=True)


def test_train_step_and_flush_of_a_program_know_each_others_states(entered: list[Any]) -> None:
    made = program(accumulate=3)
    fast = ps.compile_program(made, backend="aot_eager")
    state, eager = fast.init(), made.init()
    for seed in range(7):
        state, _ = fast.train_step(state, vector_batch(seed=seed))
        eager, _ = made.train_step(eager, vector_batch(seed=seed))
        if seed == 4:
            state, _ = fast.flush(state)
            eager, _ = made.flush(eager)
        close(state, eager)
    assert len(entered) == 1


@pytest.mark.parametrize("write", [lambda left: left.data.fill_(1), lambda left: left.numpy().fill(1)])
def test_a_window_that_was_cut_short_is_seen(write: Callable[[Tensor], Any]) -> None:
    made = program(accumulate=3)
    step, eager = compiled(made), made.train_step
    ends = []
    for one in (step, eager):
        state, _ = one(made.init(), vector_batch())
        write(state.accum.left)
        for _ in range(4):
            state, _ = one(state, vector_batch())
        ends.append(state)
    close(*ends)


def test_frozen_weights_are_shared_and_all_others_are_not() -> None:
    net = tiny_mlp()
    net[0].requires_grad_(False)
    made = program(net)
    step, first = compiled(made), made.init()
    second, _ = step(first, vector_batch())
    third, _ = step(second, vector_batch())
    assert third.frozen["0.weight"].data_ptr() == first.frozen["0.weight"].data_ptr()
    own = [state._replace(frozen={}) for state in (first, second, third)]
    assert not memory(own[0]) & memory(own[1])
    assert not memory(own[1]) & memory(own[2])


def test_a_frozen_scalar_lies_beside_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_mlp()
            self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    made = program(Scaled())
    step, state, eager = compiled(made), made.init(), made.init()
    for seed in range(3):
        state, _ = step(state, vector_batch(seed=seed))
        eager, _ = made.train_step(eager, vector_batch(seed=seed))
    close(state, eager)
    assert state.frozen["scale"].item() == 2.0


def as_graph(state: TrainState) -> Any:
    weight = state.params["0.weight"].detach().requires_grad_()
    return (weight * weight).sum()  # keeps the weight for its gradient


def total(held: Any) -> float:
    return float(sum(torch.as_tensor(leaf).double().sum() for leaf in tree.leaves(held)))


HOLDERS: dict[str, tuple[Callable[[TrainState], Any], Callable[[Any], Any]]] = {
    "the state": (lambda state: state, total),
    "a leaf": (lambda state: state.params["0.weight"], total),
    "a scalar": (lambda state: state.updates, total),
    "statistics": (lambda state: state.buffers["1.running_mean"], total),
    "a view": (lambda state: state.params["0.weight"][:, 1:].T, total),
    "a base": (lambda state: state.params["0.weight"]._base, total),
    "detached": (lambda state: state.opt_state[1][0].mu["0.weight"].detach(), total),
    "numpy": (lambda state: state.params["0.weight"].numpy(), total),
    "dlpack": (lambda state: state.params["0.weight"].__dlpack__(), lambda held: total(torch.from_dlpack(held))),
    "a storage": (lambda state: state.params["0.weight"].untyped_storage(), bytes),
    "a graph": (as_graph, lambda held: torch.autograd.grad(held, held.grad_fn.next_functions[0][0]._saved_self)),
    "a functional": (
        lambda state: torch.func.vjp(lambda weight: weight * weight, state.params["0.weight"])[1],
        lambda held: total(held(torch.ones(5, 4))[0]),
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_holds_is_left_alone(holder: str) -> None:
    torch.manual_seed(0)
    hold, read = HOLDERS[holder]
    once = holder in ("dlpack", "a graph")  # can be read only once
    made = program(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    step = compiled(made)
    state, _ = step(made.init(), vector_batch())
    before, held = read(hold(tree.clone(state) if once else state)), hold(state)
    for seed in range(4):
        state, _ = step(state, vector_batch(seed=seed))
    after = read(held)
    if holder == "a graph":
        before, after = total(before), total(after)
    assert after == before


def test_memory_that_another_process_may_see_is_left_alone() -> None:
    made = program()
    step = compiled(made)
    first, _ = step(made.init(), vector_batch())
    second, _ = step(first, vector_batch())
    first.params["0.weight"].share_memory_()  # as sending it does
    shared = first.params["0.weight"].untyped_storage().data_ptr()
    del first
    for _ in range(4):
        second, _ = step(second, vector_batch())
        assert shared not in memory(second)


def test_threads_do_not_get_the_same_memory() -> None:
    made = program(nn.Linear(4, 3))
    step = compiled(made)
    first, _ = step(made.init(), vector_batch())
    eager = tree.clone(first)
    for _ in range(60):
        eager, _ = made.train_step(eager, vector_batch(seed=1))

    def run(_: int) -> TrainState:
        state = first
        for _ in range(60):
            state, _ = step(state, vector_batch(seed=1))
        return state

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, range(4)))
    finally:
        sys.setswitchinterval(old)
    for state in found:
        close(state, eager)
        assert_trees_close(state, found[0], exact=True)


def test_memory_that_was_written_into_a_graph_is_left_alone() -> None:
    made = program()
    step = compiled(made)
    first, _ = step(made.init(), vector_batch())
    second, _ = step(first, vector_batch())
    with torch.enable_grad():
        first.params["0.weight"].add_(torch.ones_like(first.params["0.weight"]).requires_grad_())
    del first
    third, _ = step(second, vector_batch())
    assert not any(leaf.requires_grad for leaf in tree.leaves(third))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state)), ps.clone])
def test_a_copy_goes_on_to_the_same_bits(way: Callable[[TrainState], TrainState]) -> None:
    made = program(tiny_convnet())
    step = compiled(made)
    state, _ = step(made.init(), image_batch())
    expected, _ = step(state, image_batch(8, 1))
    found, _ = step(way(state), image_batch(8, 1))
    assert_trees_close(found, expected, exact=True)


def test_inference_mode_and_tensors_that_do_not_count_are_no_obstacle() -> None:
    made = program()
    step, state, eager = compiled(made), made.init(), made.init()
    state, _ = step(state, vector_batch())
    with torch.inference_mode():
        state, _ = step(state, vector_batch())
    state, _ = step(state, vector_batch())
    for _ in range(3):
        eager, _ = made.train_step(eager, vector_batch())
    close(state, eager)


def test_several_steps_a_call() -> None:
    made = program()
    step, state, eager = compiled(made, unroll=3), made.init(), made.init()
    for start in (0, 3):
        state, _ = step(state, [vector_batch(seed=seed) for seed in range(start, start + 3)])
    for seed in range(6):
        eager, _ = made.train_step(eager, vector_batch(seed=seed))
    close(state, eager)
    assert int(state.key[1]) == 6


def test_channels_last_and_empty_tensors() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.nothing = nn.Parameter(torch.zeros(0))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).mean((2, 3))) + self.nothing.sum()

    made = program(Odd().to(memory_format=torch.channels_last))
    step, state, eager = compiled(made), made.init(), made.init()
    for seed in range(3):
        state, _ = step(state, image_batch(8, seed))
        eager, _ = made.train_step(eager, image_batch(8, seed))
    close(state, eager)
    assert state.params["conv.weight"].stride() == eager.params["conv.weight"].stride()
