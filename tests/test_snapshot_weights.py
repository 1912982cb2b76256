"""Weights out of a snapshot: `only="params"`, between states that train different parts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.errors import Mismatch
from purestep.snapshot import Snapshots

BATCHES = [(5 * torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) + 3, torch.ones(8, 1)) for n in range(6)]


def program(*, ema: Any = 0.9, frozen: bool = False, width: int = 6) -> ps.Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))
    net[0].requires_grad_(not frozen)
    return ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.adam(0.01), ema=ema)


def trained(one: ps.Program, state: Any = None) -> Any:
    state = one.init() if state is None else state
    for batch in BATCHES:
        state, _ = one.train_step(state, batch)
    return state


def saved(root: Path, state: Any) -> Snapshots:
    with Snapshots(root) as snapshots:
        snapshots.save(1, state)
    return Snapshots(root, writer=False)


def weights(state: Any) -> dict[str, torch.Tensor]:
    return {**state.params, **state.frozen, **state.buffers}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_the_model_is_all_that_evaluation_needs(tmp_path: Path, buffers: Any) -> None:
    one = program(ema=ps.ema.average(0.9, buffers=buffers))
    state, fresh = trained(one), one.init()
    found = saved(tmp_path, state).restore(fresh, only="params").state
    for view in ("params", "ema"):
        wanted, got = (ps.evaluate(ps.view(s, view), BATCHES, one.eval_step) for s in (state, found))
        assert wanted == got
    assert (int(found.step), int(found.updates)) == (0, 0)
    assert ps.tree.paths(found) == ps.tree.paths(fresh)
    assert all(map(torch.equal, ps.tree.leaves(found.opt_state), ps.tree.leaves(fresh.opt_state)))


@pytest.mark.parametrize("first", [False, True])
def test_from_a_frozen_stage_to_another_and_back(tmp_path: Path, first: bool) -> None:
    one, other = program(frozen=first), program(frozen=not first)
    state = trained(one)
    there = saved(tmp_path / "1", state).restore(other.init(), only="params").state
    assert same(weights(there), weights(state))
    expected = {**state.params, **state.frozen, **state.ema.params}  # what was not averaged is its own average
    assert same(there.ema.params, {name: expected[name] for name in there.params})
    assert len({leaf.data_ptr() for leaf in ps.tree.leaves(there) if leaf.numel()}) == len(ps.tree.leaves(there))
    there = trained(other, there)
    back = saved(tmp_path / "2", there).restore(one.init(), only="params").state
    assert same(weights(back), weights(there))
    trained(one, back)


@pytest.mark.parametrize("stored", [None, 0.9])
def test_a_state_with_an_average_and_one_without(tmp_path: Path, stored: Any) -> None:
    one, other = program(ema=stored), program(ema=None if stored else 0.9)
    state = trained(one)
    found = saved(tmp_path, state).restore(other.init(), only="params").state
    assert same(weights(found), weights(state))
    if not stored:
        assert same(found.ema.params, state.params)


@pytest.mark.parametrize("only", ["params/", {"params/0", "params/1", "params/3"}])
def test_the_trained_parameters_alone(tmp_path: Path, only: Any) -> None:
    one = program()
    state, fresh = trained(one), one.init()
    found = saved(tmp_path, state).restore(fresh, only=only).state
    assert same(found.params, state.params)
    assert same(found.buffers, fresh.buffers)
    assert same(found.ema.params, fresh.ema.params)
    with pytest.raises(Mismatch, match="params/0"):  # another state has none of these trained
        saved(tmp_path / "1", state).restore(program(frozen=True).init(), only="params/")


@pytest.mark.parametrize("only", ["params", {"params"}, {"params", "opt_state"}])
def test_the_word_means_the_same_in_a_set(tmp_path: Path, only: Any) -> None:
    one = program()
    state = trained(one)
    found = saved(tmp_path, state).restore(one.init(), only=only).state
    assert same(weights(found), weights(state))
    assert same(found.ema.params, state.ema.params)


def test_part_of_a_tree(tmp_path: Path) -> None:
    class Both(NamedTuple):
        one: Any
        other: Any

    program_, second = program(), program(frozen=True)
    snapshots = saved(tmp_path, Both(trained(program_), {"deep": trained(second)}))
    template = Both(program_.init(), {"deep": program().init()})
    found = snapshots.restore(template, only={"other/deep/params", "one/opt_state"}).state
    stored = snapshots.restore(Both(program_.init(), {"deep": second.init()})).state
    assert same(weights(found.other["deep"]), weights(stored.other["deep"]))
    assert same(weights(found.one), weights(template.one))
    assert all(map(torch.equal, ps.tree.leaves(found.one.opt_state), ps.tree.leaves(stored.one.opt_state)))


def test_in_a_tree_without_a_train_state_it_is_a_path(tmp_path: Path) -> None:
    state = {"params": torch.ones(2), "rest": torch.ones(2)}
    found = saved(tmp_path, state).restore({key: torch.zeros(2) for key in state}, only="params").state
    assert (found["params"].sum(), found["rest"].sum()) == (2, 0)


def test_another_model_is_told_leaf_by_leaf(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, trained(program()))
    with pytest.raises(Mismatch, match=r"params/0\.weight: float32 \[6, 4\] in the snapshot, float32 \[7, 4\] in the"):
        snapshots.restore(program(width=7).init(), only="params")
    with pytest.raises(Mismatch, match="no leaf is under 'params'"):
        snapshots.restore({"w": torch.ones(1)}, only="params")


def test_parameters_alone_are_not_taken_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = program()
    snapshots = saved(tmp_path, trained(one))
    with caplog.at_level(logging.WARNING, "purestep"):
        snapshots.restore(one.init(), only="params")
        snapshots.restore(one.init(), only={"params", "buffers", "ema"})
        snapshots.restore(one.init(), only={"opt_state"})
        assert not caplog.records
        snapshots.restore(one.init(), only="params/")
    assert caplog.messages == [
        'only trained params are restored; buffers and ema are the template\'s (cure: pass only="params")'
    ]
