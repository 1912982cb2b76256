"""`ps.donate`: eager steps over memory of their own, and what can go wrong with it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim, tree
from purestep.errors import ConfigError, StateError

BATCH = torch.ones(4, 3), torch.zeros(4, 2)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))


def program(model: nn.Module | None = None, tx: optim.Transform | None = None, **options: Any) -> ps.Program:
    return ps.program(model or net(), ps.supervised(nn.MSELoss()), tx or optim.adamw(1e-2), **{"ema": 0.9, **options})


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


OPTIONS: dict[str, Any] = {
    "plain": {},
    "accumulating": {"accumulate": 3},
    "micro-batches": {"microbatches": 2},
    "no kernel": {"tx": optim.lion(1e-3)},
    "average with buffers": {"ema": ps.ema.average(0.9, buffers="average")},
    "no average": {"ema": None},
    "scaled": {"scaler": ps.scaler.dynamic(init_scale=8.0)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits_as_the_pure_step(name: str) -> None:
    pure = program(**OPTIONS[name])
    fast = ps.donate(pure)
    state = start = pure.init()
    live, before = start, tree.clone(start)
    for index in range(7):
        state, expected = pure.train_step(state, data(index))
        live, found = fast.train_step(live, data(index))
        assert_trees_close(found, expected, exact=True)
    state, live = pure.flush(state)[0], fast.flush(live)[0]
    assert_trees_close(ps.TrainState(*live), ps.TrainState(*state), exact=True)
    assert_trees_close(start, before, exact=True)


def test_the_memory_is_that_of_the_state_before() -> None:
    step = ps.donate(program()).train_step
    state, _ = step(program().init(), BATCH)
    leaves = [*state.params.values(), *tree.leaves(state.opt_state[0].mu), *state.ema.params.values()]
    places = [leaf.data_ptr() for leaf in leaves]
    state, _ = step(state, BATCH)
    after = [*state.params.values(), *tree.leaves(state.opt_state[0].mu), *state.ema.params.values()]
    assert [leaf.data_ptr() for leaf in after] == places


def test_a_donated_state_says_so() -> None:
    step = ps.donate(program()).train_step
    first, _ = step(program().init(), BATCH)
    kept = ps.clone(first)
    second, _ = step(first, BATCH)
    for read in (
        lambda: first.params,
        lambda: step(first, BATCH),
        lambda: ps.clone(first),
        lambda: pickle.dumps(first),
    ):
        with pytest.raises(StateError, match="this state in call 2.*ps.clone"):
            read()
    assert int(kept.step) == 1
    assert int(second.step) == 2


def test_a_step_that_fails_before_it_writes_leaves_its_state_alive() -> None:
    step = ps.donate(program()).train_step
    state, _ = step(program().init(), BATCH)
    before = ps.clone(state)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(state, (torch.ones(4, 7), torch.zeros(4, 2)))
    assert_trees_close(ps.TrainState(*state), before, exact=True)
    assert int(step(state, BATCH)[0].step) == 2


def test_a_step_that_fails_while_it_writes_says_that_the_state_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ps.donate(program()).train_step
    state, _ = step(program().init(), BATCH)

    def broken(*given: Any, in_place: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("purestep.torch_ext.foreach.lerp", broken)
        with pytest.raises(KeyboardInterrupt):
            step(state, BATCH)
    with pytest.raises(StateError, match="which failed and may have written half of it"):
        _ = state.params


def test_what_the_caller_put_into_a_dict_is_not_written() -> None:
    chosen = program()
    step = ps.donate(chosen).train_step
    state, _ = step(chosen.init(), BATCH)
    mine = torch.full((2,), 7.0)
    state.params["3.bias"] = mine
    new, _ = step(state, BATCH)
    assert mine.tolist() == [7.0, 7.0]
    assert not torch.equal(new.params["3.bias"], mine)


def test_a_state_of_another_program_or_a_changed_one_is_copied() -> None:
    chosen = program()
    one, two = ps.donate(chosen).train_step, ps.donate(chosen).train_step
    state, _ = one(chosen.init(), BATCH)
    before = ps.clone(state)
    two(state, BATCH)
    assert_trees_close(ps.TrainState(*state), before, exact=True)
    changed = state._replace(params={**state.params, "3.bias": torch.zeros(2)})
    one(changed, BATCH)
    assert_trees_close(changed.params["3.bias"], torch.zeros(2), exact=True)
    assert_trees_close(ps.TrainState(*state), before, exact=True)


def test_autograd_gets_the_pure_step() -> None:
    program = ps.program(nn.Linear(4, 3), ps.supervised(nn.CrossEntropyLoss()), optim.adamw(1e-2))
    state, grads = program.init(), []
    for step in (program.train_step, ps.donate(program).train_step):
        leaf = state.params["weight"].clone().requires_grad_()
        new = state._replace(params={**state.params, "weight": leaf})
        for _ in range(3):
            new, _ = step(new, (torch.ones(4, 4), torch.tensor([0, 1, 2, 0])))
        grads.append(torch.autograd.grad(new.params["bias"].square().sum(), leaf)[0])
    assert torch.equal(*grads)
    assert grads[0].abs().sum() > 0


def test_inside_a_transform_or_a_graph_it_is_the_pure_step() -> None:
    chosen = program(nn.Linear(3, 2))
    step = ps.donate(chosen).train_step
    batches = tuple(torch.stack([part, part]) for part in BATCH)
    both, _ = torch.func.vmap(step, in_dims=(None, 0))(chosen.init(), batches)
    assert both.params["weight"].shape == (2, 2, 3)


def test_what_cannot_be_donated() -> None:
    chosen = program()
    with pytest.raises(ConfigError, match="not one of ps.program"):
        ps.donate(ps.Program(lambda state, batch: (state, {})))
    with pytest.raises(ConfigError, match="not one of ps.program"):
        ps.donate(chosen.train_step)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not one of ps.program"):
        ps.donate(ps.donate(chosen))
    with pytest.raises(ConfigError, match="not one of ps.program.*compile_program"):
        ps.donate(ps.compile_program(chosen, backend="aot_eager"))


@pytest.mark.compile
def test_compiling_a_donated_program_compiles_the_program() -> None:
    chosen = program(nn.Linear(3, 2))
    fast = ps.compile_program(ps.donate(chosen), backend="aot_eager")
    state, _ = fast.train_step(chosen.init(), BATCH)
    assert_trees_close(state.params, chosen.train_step(chosen.init(), BATCH)[0].params)


def test_fit_donates_and_gives_the_same_bits() -> None:
    chosen, batches = program(), [data(index) for index in range(5)]
    seen = []
    loaders = {"train": batches, "val": batches[:2]}
    quiet: Any = {"epochs": 2, "progress": False}
    fast = ps.fit(
        chosen.init(), loaders, chosen, callbacks=[lambda event: seen.append(getattr(event, "state", None))], **quiet
    )
    slow = ps.fit(chosen.init(), loaders, chosen, donate=False, **quiet)
    assert type(fast.state) is ps.TrainState
    assert_trees_close(fast.state, slow.state, exact=True)
    assert fast.history == slow.history
    with pytest.raises(StateError, match="donated"):
        _ = next(state for state in seen if "donated" in repr(state)).params


def test_a_state_made_of_a_live_one_is_copied() -> None:
    chosen = program()
    step = ps.donate(chosen).train_step
    state, _ = step(chosen.init(), BATCH)
    before = ps.clone(state)
    step(state._replace(updates=state.updates.clone()), BATCH)
    assert_trees_close(ps.clone(state), before, exact=True)
    assert_trees_close(ps.clone(step(state, BATCH)[0]), chosen.train_step(before, BATCH)[0], exact=True)
