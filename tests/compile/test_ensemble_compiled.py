"""A compiled ensemble: one graph, donated or not, with the numbers of the eager one; and a step that the user maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import nn

import purestep as ps
from purestep import optim
from purestep.state import stacked

MEMBERS = 3
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def net() -> nn.Module:
    layers = (nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3))
    return nn.Sequential(*layers).double()


def batch(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 3, (6,), generator=generator)


def program(model: nn.Module | None = None, **settings: Any) -> ps.Program:
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.inject(optim.adamw)(learning_rate=1e-2, weight_decay=0.1))
    return ps.program(model or net(), ps.supervised(nn.CrossEntropyLoss()), tx, precision="64-true", **settings)


def states(several: ps.Program) -> ps.TrainState:
    assert several.init is not None
    return several.init(factory=net, seeds=[3, -4, 2**40], vary={"learning_rate": [1e-3, 1e-2, 1e-1]})


@pytest.mark.compile
@pytest.mark.parametrize(
    ("backend", "settings", "graphs", "donate"),
    [
        ("inductor", {}, 1, True),
        ("aot_eager", {"accumulate": 2, "ema": 0.9}, 2, True),
        ("aot_eager", {"accumulate": 2, "ema": 0.9}, 2, False),
    ],
    ids=["inductor", "window, donated", "window, pure"],
)
def test_compiled_members_are_those_of_the_eager_ensemble(
    backend: str, settings: dict[str, Any], graphs: int, donate: bool
):
    several = ps.ensemble(program(**settings), MEMBERS)
    fast = ps.compile_program(several, donate=donate, backend=backend)
    first = states(several)
    eager, new = first, first
    for number in range(5):
        eager, expected = several.train_step(eager, batch(number))
        new, found = fast.train_step(new, batch(number))
        assert_trees_close(found, expected, rtol=1e-6, atol=1e-6)
    assert_trees_close(ps.clone(new), eager, **CLOSE)
    assert_trees_close(ps.clone(fast.flush(new)[0]), several.flush(eager)[0], **CLOSE)
    assert fast.train_step.graphs == graphs
    assert first.key.tolist() == [[3, 0], [-4, 0], [2**40, 0]], "the first state is the caller's"
    alone = ps.member(first, 2)
    one = program(**settings)
    for number in range(5):
        alone, _ = one.train_step(alone, batch(number))
    assert_trees_close(ps.member(eager, 2), alone, **CLOSE)


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
def test_compiled_members_at_different_positions_close_their_own_windows(donate: bool):
    one = program(accumulate=2)
    several = ps.ensemble(one, 2)
    fast = ps.compile_program(several, donate=donate, backend="aot_eager")
    assert one.init is not None
    each = [one.init(0), one.train_step(one.init(1), batch(9))[0]]
    state = ps.stack(each)
    for number in range(3):
        state, _ = fast.train_step(state, batch(number))
        each = [one.train_step(part, batch(number))[0] for part in each]
    assert_trees_close(ps.clone(state), ps.stack(each), **CLOSE)
    assert state.updates.tolist() == [1, 2]


@pytest.mark.compile
def test_a_donated_ensemble_is_evaluated_and_trained_on_its_own_batches():
    several = ps.ensemble(program(nonfinite="raise"), MEMBERS, batches="own")
    fast = ps.compile_program(several, donate=True, backend="aot_eager")
    eager, new = states(several), states(several)
    for number in range(4):
        own = ps.stack([batch(10 * number + index) for index in range(MEMBERS)])
        if number == 2:
            own[0][1, 0, 0] = torch.nan
        before = new
        eager, _ = several.train_step(eager, own)
        new, _ = fast.train_step(new, own)
        if number:
            with pytest.raises(ps.errors.StateError, match=f"this state in call {number + 1}"):
                _ = before.params
        found, expected = fast.eval_step(new, own, index=1), several.eval_step(eager, own, index=1)
        assert_trees_close(found, expected, rtol=1e-6, atol=1e-6)
    assert new.halted.tolist() == [0, 3, 0]
    assert new.updates.tolist() == [4, 2, 4]
    assert_trees_close(ps.clone(new), eager, **CLOSE)
    assert_trees_close(ps.member(new, 1), ps.member(eager, 1), **CLOSE)


@pytest.mark.compile
@pytest.mark.parametrize("donate", [True, False])
def test_a_step_that_is_mapped_by_hand_compiles(donate: bool):
    one = program(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 3)).double(), accumulate=2)
    mapped = torch.func.vmap(one.train_step, in_dims=(0, None), randomness="different")
    fast = ps.compile_step(mapped, donate=donate, backend="aot_eager")
    eager = new = ps.stack([one.init(seed) for seed in (3, -4, 2**40)])
    for number in range(4):
        eager, _ = mapped(eager, batch(number))
        new, _ = fast(new, batch(number))
    assert_trees_close(ps.clone(new), eager, **CLOSE)
    assert new.key.tolist() == [[3, 4], [-4, 4], [2**40, 4]]
    assert fast.graphs == 1


@pytest.mark.compile
def test_fit_compiles_an_ensemble():
    several = ps.ensemble(program(), MEMBERS)
    loaders = {"train": [batch(number) for number in range(4)], "val": [batch(9)]}
    settings: dict[str, Any] = {"epochs": 2, "sinks": []}
    eager = ps.fit(states(several), loaders, several, **settings)
    fast = ps.fit(states(several), loaders, several, compile={"backend": "aot_eager", "donate": True}, **settings)
    assert_trees_close(ps.clone(fast.state), eager.state, **CLOSE)
    assert fast.history == {name: pytest.approx(column, rel=1e-6) for name, column in eager.history.items()}
    assert stacked.size(fast.state) == MEMBERS
