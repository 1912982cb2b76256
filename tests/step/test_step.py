from __future__ import annotations

import math
import warnings
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import optim, rng, schedules, tree
from purestep.errors import ConfigError, DataError, StateError, StepContractError
from purestep.scaler import ScalerState
from purestep.step import IDENTITY, Accum, Adding, Closing
from purestep.step.loss_checks import check_loss
from purestep.torch_ext import tracing
from purestep.types import Empty

LR = 0.5
CROSS_ENTROPY = ps.supervised(nn.CrossEntropyLoss())


def program(net: nn.Module | None = None, objective: Any = CROSS_ENTROPY, tx: Any = None, **kwargs: Any) -> ps.Program:
    return ps.program(net or tiny_mlp(), objective, tx or optim.sgd(LR), **kwargs)


def init(chosen: ps.Program, seed: int = 0) -> ps.TrainState:
    assert chosen.init is not None
    return chosen.init(seed, device="cpu")


def run(chosen: ps.Program, batches: list[Any], state: ps.TrainState | None = None) -> ps.TrainState:
    state = init(chosen) if state is None else state
    for batch in batches:
        state, _ = chosen.train_step(state, batch)
    return state


def cut(batch: Any, sizes: list[int]) -> list[Any]:
    """A batch in parts of these sizes."""
    leaves, treedef = tree.flatten(batch)
    return [tree.unflatten(treedef, part) for part in zip(*(leaf.split(sizes) for leaf in leaves), strict=True)]


def without(state: ps.TrainState, *names: str) -> ps.TrainState:
    return state._replace(**dict.fromkeys(names, Empty()))


class TestInit:
    """The lines of the contract under "State"."""

    def test_with_everything_off(self):
        net = tiny_convnet()
        net[0].requires_grad_(False)
        state = init(program(net, nonfinite="skip"), seed=7)
        for name in ("step", "updates"):
            value = getattr(state, name)
            assert (value.dtype, value.shape, int(value)) == (torch.int64, (), 0)
        assert (state.key.tolist(), state.key.dtype, state.key.device.type) == ([7, 0], torch.int64, "cpu")
        assert (state.ema, state.scaler, state.accum, state.halted) == (Empty(),) * 4
        assert list(state.params) == ["1.weight", "1.bias", "6.weight", "6.bias"]
        assert list(state.frozen) == ["0.weight"]
        assert list(state.buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]

    def test_with_everything_on(self):
        chosen = program(ema=0.9, precision="16-mixed", accumulate=3)
        state = init(chosen)
        assert (state.halted.dtype, state.halted.shape, int(state.halted)) == (torch.int64, (), 0)
        assert isinstance(state.scaler, ScalerState)
        assert isinstance(state.accum, Accum)
        assert (state.accum.left.dtype, int(state.accum.left)) == (torch.int64, 3)
        assert (state.accum.weight.dtype, state.accum.weight.shape, float(state.accum.weight)) == (torch.float32, (), 0)
        for named in (state.accum.grads, state.ema.params):
            assert {n: p.shape for n, p in named.items()} == {n: p.shape for n, p in state.params.items()}
        assert not any(g.any() for g in state.accum.grads.values())
        assert_trees_close(state.ema.params, state.params, exact=True)
        # tx.init's state is the transform's own.
        assert_trees_close(state.opt_state, optim.sgd(LR).init(state.params), exact=True)

    @pytest.mark.parametrize("name", ["bf16-true", "16-true"])
    def test_sums_are_float32_at_least(self, name: str):
        state = init(program(precision=name, accumulate=2, ema=0.9))
        assert {leaf.dtype for leaf in (*state.accum.grads.values(), *state.ema.params.values())} == {torch.float32}

    def test_no_two_leaves_share_memory(self):
        """A shared zero would be two names of one tensor once a step is donated."""
        state = init(program(tiny_convnet(), tx=optim.adamw(0.1), ema=0.9, precision="16-mixed", accumulate=2))
        places = [leaf.data_ptr() for leaf in tree.leaves(state) if leaf.numel()]
        assert len(places) == len(set(places))
        assert not any(leaf.requires_grad for leaf in tree.leaves(state))

    def test_weights_are_the_modules_as_they_are_and_the_seed_is_of_the_key_alone(self):
        net = tiny_convnet()
        chosen = program(net)
        first, second = init(chosen, 1), init(chosen, 2)
        assert_trees_close(without(first, "key"), without(second, "key"), exact=True)
        assert first.key.tolist() != second.key.tolist()
        assert_trees_close(first.params, {n: p.detach() for n, p in net.named_parameters()}, exact=True)
        assert first.params["6.weight"].data_ptr() != net[6].weight.data_ptr()

    def test_layouts_are_kept(self):
        net = tiny_convnet()
        net[0] = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        assert init(program(net)).params["0.weight"].is_contiguous(memory_format=torch.channels_last)

    def test_an_expanded_buffer_gets_memory_of_its_own(self):
        net = tiny_mlp()
        net.register_buffer("wide", torch.ones(1).expand(5))
        state = init(program(net))
        state.buffers["wide"][0] = 7
        assert state.buffers["wide"].tolist() == [7, 1, 1, 1, 1]

    def test_without_a_device_the_modules_own_is_taken(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        chosen = program(accumulate=2, ema=0.9)
        state = chosen.init()
        assert {leaf.device.type for _, leaf in tree.with_paths(state)} == {"cpu"}
        assert float(chosen.train_step(state, vector_batch())[1]["loss"]) > 0  # the batch is where the user made it
        assert {leaf.device.type for path, leaf in tree.with_paths(chosen.init(device="meta"))} == {"meta", "cpu"}

    def test_a_module_on_meta_has_nothing_to_start_from(self):
        with pytest.raises(
            StateError, match=r"weight: the tensor is on the meta device and has no values \(cure: load weights"
        ):
            program(nn.Linear(4, 3, device="meta")).init(device="cpu")
        for precision in ("32-true", "bf16-mixed"):
            with pytest.raises(StateError, match="weight: the tensor is on the meta device"):
                program(nn.Linear(4, 3, device="meta"), precision=precision).init()

    def test_a_module_that_is_partly_on_the_meta_device_needs_values(self):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, device="meta"))
        with pytest.raises(
            StateError, match=r"1\.weight: the tensor is on the meta device .*\(cure: load weights before"
        ):
            program(net).init()

    def test_a_module_that_has_changed_since_needs_a_new_program(self):
        more, less, tied = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
        programs = [program(net) for net in (more, less, tied)]
        more.append(nn.Linear(4, 3))
        del less[1], less[0]
        tied[1].weight = tied[0].weight
        told = ("2.bias is new, 2.weight is new", "0.bias is gone, .* and 1 more", "1.weight is gone")
        for chosen, message in zip(programs, told, strict=True):
            with pytest.raises(StateError, match=rf"other tensors than ps.program .*: {message} \(cure: call ps.pr"):
                chosen.init()

    def test_a_clone_is_independent(self):
        state = init(program(tiny_convnet(), ema=0.9, accumulate=2))
        copy = ps.clone(state)
        assert_trees_close(copy, state, exact=True)
        for leaf in tree.leaves(copy):
            leaf.zero_() if leaf.dtype != torch.int64 else leaf.add_(1)
        assert int(state.step) == 0
        assert state.params["6.weight"].any()


def test_a_program_trains_what_required_a_gradient_when_it_was_built():
    """Two programs of one module, head first: `init` of the first one comes after the second one's flags."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    head = ps.program(module, ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    module.requires_grad_(True)
    whole = ps.program(module, ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    state = head.init()
    assert set(state.params) == {"1.weight", "1.bias"}
    assert set(state.frozen) == {"0.weight", "0.bias"}
    new, _ = head.train_step(state, (torch.ones(4, 2), torch.zeros(4, 2)))
    assert torch.equal(new.frozen["0.weight"], module[0].weight)
    assert set(whole.init().params) == {"0.weight", "0.bias", "1.weight", "1.bias"}


class TestPurity:
    @pytest.mark.parametrize("engine", ["autograd", "func"])
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_state_batch_and_generators_keep_their_bits(self, engine: str, accumulate: int):
        chosen = program(
            tiny_convnet(), tx=optim.adamw(0.1), ema=0.9, precision="16-mixed", engine=engine, accumulate=accumulate
        )
        state, batch = init(chosen), image_batch()
        kept, kept_batch, generator = ps.clone(state), ps.clone(batch), torch.get_rng_state()
        new = run(chosen, [batch] * 3, state)
        chosen.flush(new)
        chosen.eval_step(new, batch)
        assert_trees_close(state, kept, exact=True)
        assert_trees_close(batch, kept_batch, exact=True)
        assert torch.equal(torch.get_rng_state(), generator)
        assert not torch.equal(new.buffers["1.running_mean"], state.buffers["1.running_mean"])
        assert not any(leaf.requires_grad for leaf in tree.leaves(new))

    def test_dropout_depends_on_seed_and_call_and_on_nothing_else(self):
        chosen = program(tiny_convnet())
        state, batch = init(chosen), image_batch()
        first, _ = chosen.train_step(state, batch)
        torch.rand(5)
        again, _ = chosen.train_step(state, batch)
        assert_trees_close(first, again, exact=True)
        for key in ([0, 1], [1, 0]):
            other, _ = chosen.train_step(state._replace(key=torch.tensor(key)), batch)
            assert not torch.equal(other.params["6.weight"], first.params["6.weight"])

    def test_the_key_counts_calls(self):
        chosen = program(accumulate=3)
        state = run(chosen, [vector_batch()] * 4, init(chosen, 5))
        assert state.key.tolist() == [5, 4]
        assert (int(state.step), int(state.updates)) == (4, 1)
        flushed, _ = chosen.flush(state)
        assert flushed.key.tolist() == [5, 5]
        assert (int(flushed.step), int(flushed.updates)) == (5, 2)

    def test_the_callers_grad_mode_makes_no_difference(self):
        chosen = program()
        state, batch = init(chosen), vector_batch()
        expected, _ = chosen.train_step(state, batch)
        for engine in ("autograd", "func"):
            other = program(engine=engine)
            with torch.no_grad():
                found, _ = other.train_step(state, batch)
                assert not torch.is_grad_enabled()
            assert_trees_close(found, expected, exact=True)

    def test_a_graph_that_comes_with_the_batch_is_not_kept(self):
        x, y = vector_batch()
        weight = torch.ones(4, requires_grad=True)
        chosen = program()
        new, metrics = chosen.train_step(init(chosen), (x * weight, y))
        assert not any(leaf.requires_grad for leaf in tree.leaves((new, metrics)))
        assert weight.grad is None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_convnet()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Reentrant(nn.Module):
    """As a model with frozen embeddings after ``enable_input_require_grads``."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x.detach().requires_grad_(), use_reentrant=True))


class Foreign(torch.autograd.Function):
    """Written before torch.func: one ``forward`` with ctx, no ``setup_context``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class TestEngines:
    @pytest.mark.parametrize("kwargs", [{}, {"precision": "16-mixed"}, {"accumulate": 2}, {"microbatches": 2}], ids=str)
    def test_both_give_the_same_bits(self, kwargs: dict[str, Any]):
        states = [
            run(
                program(tiny_convnet(), engine=engine, tx=optim.sgd(LR, momentum=0.9), ema=0.9, **kwargs),
                [image_batch(seed=seed) for seed in range(4)],
            )
            for engine in ("autograd", "func", "auto")
        ]
        assert_trees_close(states[0], states[1], exact=True)
        assert_trees_close(states[0], states[2], exact=True)

    @pytest.mark.parametrize("engine", ["autograd", "auto"])
    def test_activation_checkpointing_goes_through_autograd(self, engine: str):
        net = Checkpointed()
        batches = [image_batch(seed=seed) for seed in range(2)]
        found, plain = run(program(net, engine=engine), batches), run(program(net.inner), batches)
        for ours, theirs in ((found.params, plain.params), (found.buffers, plain.buffers)):
            assert_trees_close({name.removeprefix("inner."): value for name, value in ours.items()}, theirs)
        # What runs again in the backward pass is not another forward pass: torch alone would count 4.
        assert int(found.buffers["inner.1.num_batches_tracked"]) == 2

    @pytest.mark.parametrize("head", [nn.Linear(4, 3), nn.Identity()], ids=["some", "all"])
    def test_checkpointing_that_gives_no_gradient_is_refused(self, head: nn.Module):
        """Autograd does not enter a reentrant block if no wanted weight lies before it."""
        with pytest.raises(StepContractError, match="use_reentrant=True gives .* no gradient .*use_reentrant=False"):
            run(program(Reentrant(head)), [vector_batch()])

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_functions_without_setup_context_go_through_autograd(self):
        def objective(model: Any, batch: Any) -> ps.Loss:
            return ps.Loss(functional.cross_entropy(Foreign.apply(model(batch[0])), batch[1]), len(batch[1]), {})

        found = run(program(objective=objective, engine="autograd"), [vector_batch()])
        doubled = ps.supervised(nn.CrossEntropyLoss(), forward=lambda m, x: 2 * m(x))
        assert_trees_close(found, run(program(objective=doubled), [vector_batch()]))
        cure = 'has no setup_context.*engine="autograd"'
        with pytest.raises(StepContractError, match=cure):
            run(program(objective=objective, engine="func"), [vector_batch()])
        step = program(objective=objective, engine="func").train_step
        with pytest.raises(StepContractError, match=cure):
            ps.compile_step(step, backend="aot_eager")(program().init(), vector_batch())

    @pytest.mark.parametrize("engine", ["autograd", "func"])
    def test_parameters_that_a_loss_does_not_reach_get_zeros(self, engine: str):
        net = tiny_mlp()
        net.register_parameter("unused", nn.Parameter(torch.ones(2)))
        new = run(program(net, tx=optim.adamw(0.1, weight_decay=0.0), engine=engine), [vector_batch()] * 2)
        assert new.params["unused"].tolist() == [1, 1]


def spying() -> tuple[Any, list[dict[str, Tensor]]]:
    """SGD that notes the gradients it is given."""
    seen: list[dict[str, Tensor]] = []
    tx = optim.sgd(LR)

    def update(grads: Any, state: Any, params: Any) -> Any:
        seen.append(grads)
        return tx.update(grads, state, params)

    return tx._replace(update=update), seen


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names, values = zip(*net.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(functional.cross_entropy(net(x), y), values), strict=True))


class TestOrder:
    @pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
    @pytest.mark.parametrize("sizes", [[16], [10, 5, 1]])
    def test_the_transform_gets_the_mean_gradient_after_scale_and_weight(self, precision: str, sizes: list[int]):
        tx, seen = spying()
        chosen = program(tx=tx, precision=precision, accumulate=len(sizes))
        x, y = vector_batch(16)
        run(chosen, cut((x, y), sizes))
        assert len(seen) == 1
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "32-true" else {"rtol": 1e-2, "atol": 1e-3}
        assert_trees_close(seen[0], gradient(tiny_mlp(), x, y), **tolerance)

    def test_clipping_sees_the_whole_window(self):
        """Clipping each micro-batch by itself would be another update: this one is of norm 0.01 exactly."""
        tx = optim.chain(optim.clip_by_global_norm(0.01), optim.sgd(1.0))
        state = init(program(tx=tx, accumulate=2))
        new = run(program(tx=tx, accumulate=2), cut(vector_batch(16), [13, 3]))
        moved = optim.global_norm({name: new.params[name] - p for name, p in state.params.items()})
        assert moved.item() == pytest.approx(0.01, rel=1e-4)

    def test_the_average_is_of_the_new_weights(self):
        new = run(program(ema=0.5), [vector_batch()])
        assert_trees_close(new.ema.params, new.params, exact=True)
        later = run(program(ema=0.5), [vector_batch()], new)
        expected = {name: (p + later.params[name]) / 2 for name, p in new.params.items()}
        assert_trees_close(later.ema.params, expected, rtol=1e-6, atol=1e-7)

    def test_the_average_of_buffers_is_of_those_after_the_forward_pass(self):
        new = run(program(tiny_convnet(), ema=ps.ema.average(0.5, buffers="average")), [image_batch()])
        assert_trees_close(new.ema.buffers, new.buffers, exact=True)

    def test_a_schedule_counts_updates_and_not_calls(self):
        rates = schedules.linear(1.0, 0.0, transition_steps=4)
        chosen = program(tx=optim.sgd(rates), accumulate=2, objective=poisoned, nonfinite="skip")
        state, found = init(chosen), []
        for poison in ("", "", "", "loss nan", "", ""):
            state, metrics = chosen.train_step(state, vector_batch(), poison)
            if metrics["lr"].weight:
                found.append(float(metrics["lr"]))
        assert found == [1.0, 0.75]
        assert int(state.updates) == 2


def poisoned(model: Any, batch: Any, poison: str = "") -> ps.Loss:
    """Cross entropy, and what can go wrong with it."""
    x, y = batch
    mean = functional.cross_entropy(model(x), y)
    if poison in ("loss inf", "loss nan"):
        mean = mean + float(poison[-3:])
    elif poison == "loss times nan":
        mean = mean * math.nan
    elif poison == "gradient":  # the square root of 0 has a finite value
        mean = mean + (0 * next(iter(model.params.values()))).sqrt().sum()
    elif poison == "large gradient":  # finite, but its square is not
        mean = mean + 1e30 * (
            next(iter(model.params.values())).sum() - next(iter(model.params.values())).sum().detach()
        )
    weight = {"weight 0": 0.0, "weight 0, nan": 0.0, "weight nan": math.nan}.get(poison, float(len(x)))
    if poison == "weight 0, nan":  # as cross entropy of nothing
        mean = mean * math.nan
    return ps.Loss(mean, weight, {"share": ps.Mean(mean.detach() * 0 + 3.0, torch.tensor(4.0))})


POISONS = ["loss inf", "loss nan", "loss times nan", "gradient", "large gradient", "weight nan"]


def images(index: int) -> tuple[Tensor, Tensor]:
    return image_batch(8, index)


@cache
def fragile(nonfinite: str, accumulate: int = 1, engine: str = "autograd", tail: str = "step") -> ps.Program:
    return program(
        tiny_convnet(dropout=0.0),
        poisoned,
        optim.adamw(0.05),
        ema=0.9,
        nonfinite=nonfinite,
        accumulate=accumulate,
        engine=engine,
        tail=tail,
    )


class TestNonFinite:
    @pytest.mark.parametrize("poison", POISONS)
    @pytest.mark.parametrize("engine", ["autograd", "func"])
    def test_a_bad_call_leaves_the_state_bit_for_bit(self, poison: str, engine: str):
        chosen = fragile("skip", engine=engine)
        state = run(chosen, [images(0), images(1)])
        new, metrics = chosen.train_step(state, images(2), poison)
        assert_trees_close(without(new, "step", "key"), without(state, "step", "key"), exact=True)
        assert (int(new.step), new.key.tolist()) == (3, [0, 3])
        assert (float(metrics["applied"].total), float(metrics["applied"].weight)) == (0, 1)

    @pytest.mark.parametrize("poison", POISONS)
    def test_metrics_are_not_poisoned(self, poison: str):
        chosen = fragile("skip")
        state = init(chosen)
        _, good = chosen.train_step(state, images(0))
        _, bad = chosen.train_step(state, images(0), poison)
        total = ps.metrics.merge(good, bad)
        values = {name: float(mean) for name, mean in total.items()}
        assert all(math.isfinite(value) for value in values.values())
        assert values["applied"] == 0.5
        for name in ("lr", "grad_norm"):
            assert values[name] == float(good[name])
            assert float(bad[name].weight) == 0
        if poison not in ("gradient", "large gradient"):
            assert values["loss"] == float(good["loss"])

    @pytest.mark.parametrize("poison", POISONS)
    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_in_a_window_it_empties_the_window(self, poison: str, position: int):
        chosen = fragile("skip", accumulate=3)
        start = run(chosen, [images(9)] * 3)
        assert int(start.updates) == 1
        state = start
        for index in range(3):
            state, metrics = chosen.train_step(state, images(index), poison if index == position else "")
        assert_trees_close(
            without(state, "step", "key", "buffers"), without(start, "step", "key", "buffers"), exact=True
        )
        assert (int(state.step), int(state.updates), state.key.tolist()) == (6, 1, [0, 6])
        assert (float(metrics["applied"].total), float(metrics["applied"].weight)) == (0, 1)
        # The next window starts from nothing.
        fresh = start._replace(step=state.step, key=state.key, buffers=state.buffers)
        after = [images(index) for index in (5, 6, 7)]
        assert_trees_close(run(chosen, after, state), run(chosen, after, fresh), exact=True)

    @pytest.mark.parametrize("position", [0, 1, 2])
    @pytest.mark.parametrize("poison", ["loss nan", "gradient"])
    def test_the_buffers_of_the_bad_micro_batch_alone_are_rolled_back(self, poison: str, position: int):
        chosen = fragile("skip", accumulate=3)
        state, healthy = init(chosen), init(chosen)
        for index in range(3):
            state, _ = chosen.train_step(state, images(index), poison if index == position else "")
            if index != position:
                healthy, _ = chosen.train_step(healthy, images(index))
            assert_trees_close(state.buffers, healthy.buffers, exact=True)
        assert int(state.buffers["1.num_batches_tracked"]) == 2

    @pytest.mark.parametrize("poison", POISONS)
    def test_raise_halts_at_the_call_and_freezes_what_follows(self, poison: str):
        chosen = fragile("raise")
        before = run(chosen, [images(0), images(1)])
        state, _ = chosen.train_step(before, images(2), poison)
        assert (int(state.halted), state.halted.dtype) == (3, torch.int64)
        names = ("step", "key", "halted")
        assert_trees_close(without(state, *names), without(before, *names), exact=True)
        for index in range(4):
            later, metrics = chosen.train_step(state, images(index), poison if index == 2 else "")
            # The key is the host's, which has not looked yet.
            assert_trees_close(without(later, "key"), without(state, "key"), exact=True)
            assert (float(metrics["applied"].total), float(metrics["applied"].weight)) == (0, 1)
            state = later

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_raise_in_a_window_halts_where_the_window_closes(self, position: int):
        chosen = fragile("raise", accumulate=3)
        state = init(chosen)
        for index in range(3):
            assert int(state.halted) == 0
            state, _ = chosen.train_step(state, images(index), "loss inf" if index == position else "")
        assert int(state.halted) == 3
        for index in range(4):
            later, _ = chosen.train_step(state, images(index))
            assert_trees_close(without(later, "key"), without(state, "key"), exact=True)
            state = later
        flushed, _ = chosen.flush(state)
        assert_trees_close(without(flushed, "key"), without(state, "key"), exact=True)

    def test_a_state_that_was_looked_at_goes_on(self):
        """What the host does after a halt: the state without the flag is the state before the bad call."""
        chosen = fragile("raise")
        before = run(chosen, [images(0)])
        halted, _ = chosen.train_step(before, images(1), "loss nan")
        thawed = halted._replace(halted=torch.zeros_like(halted.halted), step=before.step, key=before.key)
        assert_trees_close(thawed, before, exact=True)
        assert int(run(chosen, [images(1)], thawed).updates) == 2

    def test_skip_goes_on(self):
        chosen = fragile("skip")
        state = init(chosen)
        for index in range(6):
            state, _ = chosen.train_step(state, images(index), "loss nan" if index in (1, 2) else "")
        assert (int(state.step), int(state.updates), state.halted) == (6, 4, Empty())

    def test_a_partial_window_that_went_bad_is_refused_at_its_flush(self):
        for nonfinite, halted in (("skip", Empty()), ("raise", 3)):
            chosen = fragile(nonfinite, accumulate=3)
            start = init(chosen)
            state, _ = chosen.train_step(start, images(0), "loss nan")
            state, _ = chosen.train_step(state, images(1))
            state, metrics = chosen.flush(state)
            assert float(metrics["applied"]) == 0
            names = ("step", "key", "halted", "buffers")
            assert_trees_close(without(state, *names), without(start, *names), exact=True)
            assert (state.halted if isinstance(halted, Empty) else int(state.halted)) == halted

    def test_a_dropped_window_is_not_judged(self):
        chosen = fragile("raise", accumulate=3, tail="drop")
        state, _ = chosen.train_step(init(chosen), images(0), "gradient")
        state, _ = chosen.flush(state)
        assert (int(state.halted), int(state.updates)) == (0, 0)
        assert int(run(chosen, [images(1)] * 3, state).updates) == 1

    def test_inside_one_call_the_whole_batch_is_refused(self):
        chosen = program(tiny_convnet(dropout=0.0), tx=optim.adamw(0.1), microbatches=4, ema=0.9, nonfinite="skip")
        state, (x, y) = init(chosen), image_batch(16)
        x[5] = math.inf
        new, metrics = chosen.train_step(state, (x, y))
        assert_trees_close(without(new, "step", "key"), without(state, "step", "key"), exact=True)
        assert float(metrics["applied"]) == 0

    def test_the_planted_fault_a_check_of_the_loss_alone(self):
        """The loss is finite where the gradient is not: only the norm of the gradients tells."""
        chosen = fragile("skip")
        _, metrics = chosen.train_step(init(chosen), images(0), "gradient")
        assert math.isfinite(float(metrics["loss"]))
        assert float(metrics["applied"]) == 0


class TestNothingToCount:
    """Weight 0: no update, no trace, no alarm, whatever the mean is."""

    pytestmark = pytest.mark.parametrize("empty", ["weight 0", "weight 0, nan"])

    @pytest.mark.parametrize("nonfinite", ["skip", "raise"])
    def test_a_call_without_weight_changes_nothing(self, nonfinite: str, empty: str):
        chosen = fragile(nonfinite)
        state = run(chosen, [images(0)])
        new, metrics = chosen.train_step(state, images(1), empty)
        assert_trees_close(without(new, "step", "key"), without(state, "step", "key"), exact=True)
        assert float(metrics["loss"].weight) == 0
        assert float(metrics["applied"]) == 0
        assert int(run(chosen, [images(1)], new).updates) == 2

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_in_a_window_it_does_not_poison_the_others(self, position: int, empty: str):
        chosen = fragile("raise", accumulate=3)
        two = fragile("raise", accumulate=2)
        state, expected = init(chosen), init(two)
        for index in range(3):
            state, metrics = chosen.train_step(state, images(index), empty if index == position else "")
            if index != position:
                expected, _ = two.train_step(expected, images(index))
        assert float(metrics["applied"]) == 1
        for name in ("params", "opt_state", "ema", "buffers", "updates", "halted"):
            assert_trees_close(getattr(state, name), getattr(expected, name), exact=True)

    def test_a_window_without_weight_is_closed_without_an_update(self, empty: str):
        chosen = fragile("raise", accumulate=2)
        state = init(chosen)
        for index in range(2):
            state, metrics = chosen.train_step(state, images(index), empty)
        assert (int(state.updates), int(state.halted), int(state.accum.left)) == (0, 0, 2)
        assert float(metrics["applied"]) == 0


class Masked(NamedTuple):
    """Rows of tokens with targets, some of them ignored."""

    inputs: Tensor
    targets: Tensor


def masked_batch(sizes: list[int], ignored: list[bool], seed: int) -> Masked:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (rows,), generator=generator)
    return Masked(x, torch.where(torch.tensor(ignored[:rows]), -100, y))


@cache
def exact(accumulate: int = 1, microbatches: int = 1, tail: str = "step", engine: str = "autograd") -> ps.Program:
    return program(
        tiny_mlp(), precision="64-true", accumulate=accumulate, microbatches=microbatches, tail=tail, engine=engine
    )


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
IGNORED = st.lists(st.booleans(), min_size=25, max_size=25)


class TestAccumulation:
    @settings(deadline=None, max_examples=60)
    @given(SIZES, IGNORED, st.integers(0, 99))
    def test_micro_batches_of_any_sizes_equal_the_big_batch(self, sizes: list[int], ignored: list[bool], seed: int):
        """SGD in float64: any wrong divisor shows, where Adam would hide it. Some labels, or all of a part, ignored."""
        batch = masked_batch(sizes, ignored, seed)
        whole = run(exact(), [batch])
        parts = run(exact(len(sizes)), cut(batch, sizes))
        assert int(parts.updates) == int(whole.updates) == int((batch.targets != -100).any())
        assert int(parts.halted) == 0
        assert_trees_close(parts.params, whole.params, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("wrong", ["mean of means", "rows"])
    def test_the_planted_fault_another_divisor(self, wrong: str):
        def objective(model: Any, batch: Masked) -> ps.Loss:
            mean = functional.cross_entropy(model(batch.inputs), batch.targets)
            return ps.Loss(mean, 1 if wrong == "mean of means" else len(batch.inputs), {})

        sizes, ignored = [5, 2], [True] + [False] * 24
        batch = masked_batch(sizes, ignored, 0)
        whole, parts = (
            run(program(objective=objective, precision="64-true", accumulate=k), batches)
            for k, batches in ((1, [batch]), (2, cut(batch, sizes)))
        )
        with pytest.raises(AssertionError, match="not close"):
            assert_trees_close(parts.params, whole.params, rtol=1e-12, atol=1e-12)

    @settings(deadline=None, max_examples=60)
    @given(SIZES, st.integers(0, 99))
    def test_one_batch_split_inside_a_call_is_the_same(self, sizes: list[int], seed: int):
        batch = masked_batch([*sizes, 4], [False, True, False, False, False] * 6, seed)
        whole = run(exact(), [batch])
        assert_trees_close(run(exact(microbatches=4), [batch]).params, whole.params, rtol=1e-12, atol=1e-12)
        rows = [len(part) for part in torch.arange(len(batch.inputs)).tensor_split(4)]
        assert_trees_close(run(exact(4), cut(batch, rows)).params, whole.params, rtol=1e-12, atol=1e-12)

    def test_a_part_without_labels_does_not_poison_the_call(self):
        batch = masked_batch([8], [True] * 4 + [False] * 4, 0)
        whole, split = run(exact(), [batch]), run(exact(microbatches=2), [batch])
        assert int(split.updates) == 1
        assert_trees_close(split.params, whole.params, rtol=1e-12, atol=1e-12)

    def test_a_call_without_labels_makes_no_update(self):
        batch = masked_batch([8], [True] * 8, 0)
        for chosen in (exact(), exact(microbatches=2)):
            new, metrics = chosen.train_step(init(chosen), batch)
            assert (int(new.updates), int(new.halted), float(metrics["loss"].weight)) == (0, 0, 0)

    def test_both_kinds_of_accumulation_together(self):
        batch = masked_batch([12], [False] * 12, 0)
        whole = run(exact(), [batch])
        found = run(exact(2, microbatches=3), cut(batch, [5, 7]))
        assert_trees_close(found.params, whole.params, rtol=1e-12, atol=1e-12)

    def test_class_weights_are_part_of_the_divisor(self):
        objective = ps.supervised(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 8.0])))
        batch = masked_batch([9], [False] * 9, 3)
        whole, parts = (
            run(program(objective=objective, precision="64-true", accumulate=k), batches)
            for k, batches in ((1, [batch]), (3, cut(batch, [1, 5, 3])))
        )
        assert_trees_close(parts.params, whole.params, rtol=1e-12, atol=1e-12)

    def test_metrics_of_a_window_merge_to_those_of_the_whole(self):
        objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})
        batch = vector_batch(16)
        _, whole = program(objective=objective).train_step(init(program()), batch)
        chosen = program(objective=objective, accumulate=3)
        state, total = init(chosen), ps.metrics.empty()
        for part in cut(batch, [3, 12, 1]):
            state, metrics = chosen.train_step(state, part)
            assert set(metrics) == set(whole)
            total = ps.metrics.merge(total, metrics)
        for name in ("loss", "accuracy", "grad_norm", "lr"):
            assert float(total[name]) == pytest.approx(float(whole[name]), rel=1e-6), name
        assert (float(total["applied"].total), float(total["applied"].weight)) == (1, 3)

    def test_an_open_window_changes_nothing_but_itself(self):
        chosen = fragile("raise", accumulate=3)
        start = init(chosen)
        state, metrics = chosen.train_step(start, images(0))
        names = ("step", "key", "accum", "buffers")
        assert_trees_close(without(state, *names), without(start, *names), exact=True)
        assert (int(state.accum.left), float(state.accum.weight)) == (2, 8)
        assert type(state.accum) is Accum
        assert float(metrics["lr"].weight) == 0

    def test_b2_six_batches_in_windows_of_four_are_two_full_batch_steps(self):
        """Four batches, then the two that are left, divided by their own size: 2/4 of it would be half the update."""
        batches = [masked_batch([4], [False] * 4, seed) for seed in range(6)]
        chosen = exact(4)
        state = run(chosen, batches)
        assert (int(state.updates), int(state.accum.left)) == (1, 2)
        state, metrics = chosen.flush(state)
        assert float(metrics["applied"]) == 1
        joined = [Masked(*map(torch.cat, zip(*part, strict=True))) for part in (batches[:4], batches[4:])]
        expected = run(exact(), joined)
        assert int(state.updates) == int(expected.updates) == 2
        assert_trees_close(state.params, expected.params, rtol=1e-12, atol=1e-12)


class TestTail:
    BATCHES = tuple(masked_batch([3], [False] * 3, seed) for seed in range(5))

    def test_carry_keeps_the_window_for_the_next_epoch(self):
        chosen = exact(4, tail="carry")
        state = run(chosen, [*self.BATCHES[:2]])
        same, metrics = chosen.flush(state)
        assert same is state
        assert metrics == {}
        joined = Masked(*map(torch.cat, zip(*self.BATCHES[:4], strict=True)))
        found = run(chosen, [*self.BATCHES[2:4]], same)
        assert_trees_close(found.params, run(exact(), [joined]).params, rtol=1e-12, atol=1e-12)

    def test_drop_forgets_it(self):
        chosen = exact(4, tail="drop")
        start = init(chosen)
        state, metrics = chosen.flush(run(chosen, [*self.BATCHES[:2]]))
        assert_trees_close(without(state, "step", "key"), without(start, "step", "key"), exact=True)
        assert float(metrics["applied"]) == 0
        found = run(chosen, [*self.BATCHES[:4]], state)
        assert_trees_close(found.params, run(exact(4), [*self.BATCHES[:4]]).params, exact=True)

    @pytest.mark.parametrize("tail", ["step", "drop"])
    def test_flush_of_an_empty_window_changes_nothing(self, tail: str):
        chosen = program(tx=optim.adamw(0.1), accumulate=2, tail=tail, ema=0.9, precision="16-mixed")
        state = run(chosen, [vector_batch()] * 2)
        new, metrics = chosen.flush(state)
        assert_trees_close(without(new, "step", "key"), without(state, "step", "key"), exact=True)
        assert float(metrics["applied"]) == 0
        assert float(metrics["lr"].weight) == float(metrics["grad_norm"].weight) == 0

    @pytest.mark.parametrize("tail", ["step", "carry", "drop"])
    def test_without_accumulation_there_is_nothing_to_flush(self, tail: str):
        chosen = exact(tail=tail)
        state = run(chosen, [self.BATCHES[0]])
        assert chosen.flush(state) == (state, {})


class TestWhereTheWindowStands:
    """The host knows in eager steps, is told by the type, or, inside somebody's graph, both ways are computed."""

    def test_the_type_of_the_window_is_taken_at_its_word(self):
        chosen = exact(2)
        state, batch = init(chosen), TestTail.BATCHES[0]
        adding = state._replace(accum=Adding(*state.accum._replace(left=torch.tensor(1))))
        opened, _ = chosen.train_step(adding, batch)
        assert int(opened.updates) == 0
        closed, _ = chosen.train_step(state._replace(accum=Closing(*state.accum)), batch)
        assert int(closed.updates) == 1
        assert type(opened.accum) is type(closed.accum) is Accum

    @pytest.mark.parametrize("poison", ["", "loss nan", "weight 0, nan"])
    def test_inside_a_graph_both_are_computed_and_one_is_kept(self, poison: str):
        chosen = fragile("raise", accumulate=2)
        state = inside = init(chosen)
        for index in range(5):
            state, metrics = chosen.train_step(state, images(index), poison if index == 1 else "")
            with tracing.capturing():
                inside, found = chosen.train_step(inside, images(index), poison if index == 1 else "")
            # Eager steps use torch's fused kernel, which rounds in another order.
            assert_trees_close(without(inside, "key"), without(state, "key"))
            assert_trees_close(found, metrics)
        assert inside.key.tolist() == [0, 0]  # the host's business
        assert int(state.updates) == (0 if poison == "loss nan" else 2)


class TestSplittingABatch:
    def test_context_is_not_split_and_other_leaves_go_to_each_part(self):
        seen = []

        def objective(model: Any, batch: Any, teacher: Tensor) -> ps.Loss:
            seen.append((len(batch["x"]), batch["name"], float(batch["rate"]), len(teacher)))
            return ps.Loss(functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["x"]), {})

        chosen = program(objective=objective, microbatches=3)
        x, y = vector_batch(8)
        chosen.train_step(init(chosen), {"x": x, "y": y, "name": "a", "rate": torch.tensor(0.5)}, torch.ones(7))
        assert seen == [(3, "a", 0.5, 7), (3, "a", 0.5, 7), (2, "a", 0.5, 7)]

    def test_buffers_go_from_part_to_part(self):
        chosen = program(tiny_convnet(dropout=0.0), microbatches=4)
        state = run(chosen, [image_batch(16)])
        assert int(state.buffers["1.num_batches_tracked"]) == 4
        streamed = program(tiny_convnet(dropout=0.0), accumulate=4)
        assert_trees_close(state.buffers, run(streamed, cut(image_batch(16), [4] * 4)).buffers, exact=True)

    def test_a_part_in_which_nothing_counts_leaves_the_buffers(self):
        """It may be nothing but padding; and of a call of its own they roll back too."""

        def objective(model: Any, batch: Any) -> ps.Loss:
            x, y = batch
            weight = (y >= 0).sum()
            return ps.Loss(functional.cross_entropy(model(x), y, ignore_index=-1, reduction="sum") / weight, weight, {})

        x, y = image_batch(16)
        x[8:], y[8:] = math.nan, -1
        kwargs = {"objective": objective, "nonfinite": "skip"}
        state = run(program(tiny_convnet(dropout=0.0), microbatches=4, **kwargs), [(x, y)])
        assert int(state.buffers["1.num_batches_tracked"]) == 2
        assert all(buffer.isfinite().all() for buffer in state.buffers.values())
        streamed = program(tiny_convnet(dropout=0.0), accumulate=4, **kwargs)
        assert_trees_close(state.buffers, run(streamed, cut((x, y), [4] * 4)).buffers, exact=True)

    @pytest.mark.parametrize(
        ("batch", "found"),
        [
            ((torch.ones(4, 4), torch.ones(5)), r"4 rows in 0 and 5 rows in 1; 3 parts need.*context"),
            ((torch.ones(4, 4), {"a": np.ones(2)}), r"4 rows in 0 and 2 rows in 1/a; 3 parts"),
            (
                (torch.ones(2, 4), torch.ones(2)),
                r"the batch has 2 rows, too few for 3 micro-batches .cure: set drop_last=True",
            ),
            ((), r"the batch holds no tensor to split into 3 parts \(cure: pass values"),
        ],
    )
    def test_what_cannot_be_split_is_an_error(self, batch: Any, found: str):
        chosen = program(microbatches=3)
        with pytest.raises(DataError, match=rf"^batch: {found}"):
            chosen.train_step(init(chosen), batch)

    def test_arrays_and_lists_of_one_entry_a_row_are_split_too(self):
        """As a DataLoader leaves strings: a list, or a tuple where they are a field of a tuple."""
        seen: list[Any] = []

        def objective(model: Any, batch: Any) -> ps.Loss:
            seen.append((batch["ids"].tolist(), batch["names"], batch["more"], batch["classes"]))
            x, y = torch.from_numpy(batch["x"]), batch["y"]
            return ps.Loss(functional.cross_entropy(model(x), y), len(x), {})

        x, y = vector_batch(5)
        batch = {"x": x.numpy(), "y": y, "ids": np.arange(5), "names": list("abcde"), "classes": ["cat", "dog"]}
        batch["more"] = tuple({"file": name} for name in "abcde")
        chosen = program(objective=objective, microbatches=2)
        found, _ = chosen.train_step(init(chosen), batch)
        assert [(ids, names) for ids, names, _, _ in seen] == [([0, 1, 2], list("abc")), ([3, 4], list("de"))]
        assert [[entry["file"] for entry in more] for _, _, more, _ in seen] == [list("abc"), list("de")]
        assert all(classes == ["cat", "dog"] for *_, classes in seen)
        whole, _ = program().train_step(init(program()), (x, y))
        assert_trees_close(found.params, whole.params, rtol=1e-5, atol=1e-6)


class TestMetrics:
    def test_names_dtypes_and_no_graph(self):
        chosen = program(precision="16-mixed", objective=poisoned)
        _, metrics = chosen.train_step(init(chosen), vector_batch())
        assert set(metrics) == {"loss", "lr", "grad_norm", "applied", "scale", "share"}
        for mean in metrics.values():
            assert type(mean) is ps.Mean
            assert all(part.dtype == torch.float32 and part.shape == () and not part.requires_grad for part in mean)
        assert float(metrics["share"]) == 0.75

    def test_the_norm_is_that_of_the_mean_gradient_before_clipping(self):
        tx = optim.chain(optim.clip_by_global_norm(1e-3), optim.sgd(LR))
        x, y = vector_batch()
        _, metrics = program(tx=tx).train_step(init(program(tx=tx)), (x, y))
        expected = torch.cat([g.flatten() for g in gradient(tiny_mlp(), x, y).values()]).norm()
        assert float(metrics["grad_norm"]) == pytest.approx(expected.item(), rel=1e-6)

    def test_the_loss_is_of_the_weights_before_the_update(self):
        x, y = vector_batch()
        _, metrics = program().train_step(init(program()), (x, y))
        assert float(metrics["loss"]) == pytest.approx(functional.cross_entropy(tiny_mlp()(x), y).item(), rel=1e-6)
        assert float(metrics["loss"].weight) == 16

    def test_the_rate_is_the_one_that_was_used(self):
        chosen = program(tx=optim.sgd(schedules.linear(1.0, 0.0, transition_steps=4)))
        state, found = init(chosen), []
        for _ in range(3):
            state, metrics = chosen.train_step(state, vector_batch())
            found.append(float(metrics["lr"]))
        assert found == [1.0, 0.75, 0.5]

    def test_groups_report_their_own(self):
        tx = optim.partition({"slow": optim.sgd(0.25), "fast": optim.sgd(0.5)}, [("bias", "slow"), ("", "fast")])
        _, metrics = program(tx=tx).train_step(init(program(tx=tx)), vector_batch())
        rates = {name: float(mean) for name, mean in metrics.items() if name.startswith("lr")}
        assert rates == {"lr": 0.25, "lr/slow": 0.25, "lr/fast": 0.5}

    def test_a_transform_without_a_rate_has_none(self):
        _, metrics = program(tx=optim.scale(-0.1)).train_step(init(program(tx=optim.scale(-0.1))), vector_batch())
        assert math.isnan(float(metrics["lr"]))


class Noisy(nn.Module):
    """Draws in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.inner(x)) + torch.randn(3))


class TestEvaluation:
    def test_it_repeats_by_index_and_moves_nothing(self):
        chosen = program(Noisy())
        state = init(chosen)
        kept, before = ps.clone(state), torch.get_rng_state()
        losses = [float(chosen.eval_step(state, vector_batch(), index=index)["loss"]) for index in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]
        assert_trees_close(state, kept, exact=True)
        assert torch.equal(before, torch.get_rng_state())

    def test_its_stream_is_not_that_of_training_and_does_not_follow_the_calls(self):
        chosen = program(Noisy())
        state = init(chosen)
        later = state._replace(key=rng.advance(state.key, 5))
        assert_trees_close(chosen.eval_step(state, vector_batch()), chosen.eval_step(later, vector_batch()), exact=True)
        other = chosen.eval_step(init(chosen, 1), vector_batch())
        assert float(other["loss"]) != float(chosen.eval_step(state, vector_batch())["loss"])

    def test_it_runs_in_eval_mode_without_gradients(self):
        modes = []

        def objective(model: Any, batch: Any) -> ps.Loss:
            mean = functional.cross_entropy(model(batch[0]), batch[1])
            modes.append((model.training, torch.is_grad_enabled(), mean.requires_grad))
            return ps.Loss(mean, 1, {})

        chosen = program(objective=objective)
        chosen.eval_step(init(chosen), vector_batch())
        chosen.train_step(init(chosen), vector_batch())
        assert modes == [(False, False, False), (True, True, True)]
        assert torch.is_grad_enabled()

    def test_the_loss_is_that_of_the_module_in_eval_mode(self):
        net, (x, y) = tiny_convnet(), image_batch()
        metrics = program(net).eval_step(init(program(net)), (x, y))
        assert float(metrics["loss"]) == pytest.approx(functional.cross_entropy(net.eval()(x), y).item(), rel=1e-6)
        assert float(metrics["loss"].weight) == 16

    def test_uneven_batches_merge_to_the_loss_of_all(self):
        chosen, batch = program(), vector_batch(16)
        state = init(chosen)
        total = ps.metrics.empty()
        for part in cut(batch, [1, 12, 3]):
            total = ps.metrics.merge(total, chosen.eval_step(state, part))
        assert float(total["loss"]) == pytest.approx(float(chosen.eval_step(state, batch)["loss"]), rel=1e-6)

    def test_nothing_to_count_is_no_nan(self):
        chosen, batch = exact(), masked_batch([4], [True] * 4, 0)
        loss = chosen.eval_step(init(chosen), batch)["loss"]
        assert (float(loss.total), float(loss.weight)) == (0, 0)

    def test_a_context_is_handed_on(self):
        chosen = program(objective=poisoned)
        assert float(chosen.eval_step(init(chosen), vector_batch(), "weight 0", index=3)["loss"].weight) == 0


class TestBind:
    def test_it_is_the_module_with_these_weights(self):
        net, (x, _) = tiny_convnet(), image_batch()
        chosen = program(net, ema=0.5)
        state = run(chosen, [image_batch()] * 2)
        for view, params in (("params", state.params), ("ema", state.ema.params)):
            twin = tiny_convnet()
            twin.load_state_dict({**params, **state.buffers})
            assert torch.allclose(chosen.bind(state, view=view)(x), twin.eval()(x), atol=1e-6)
        assert torch.equal(chosen.bind(state)(x), chosen.bind(state, view="ema")(x))
        assert not torch.equal(chosen.bind(state)(x), chosen.bind(state, view="params")(x))

    def test_it_has_no_gradients_but_in_train_mode(self):
        x = image_batch()[0].requires_grad_()
        chosen = program(tiny_convnet())
        state = init(chosen)
        assert not chosen.bind(state)(x).requires_grad
        assert chosen.bind(state, train=True)(x).requires_grad
        assert torch.is_grad_enabled()

    def test_train_mode_draws_from_the_caller_and_keeps_the_buffers(self):
        chosen = program(tiny_convnet())
        state = init(chosen)
        kept = ps.clone(state)
        predict = chosen.bind(state, train=True)
        assert not torch.equal(predict(image_batch()[0]), predict(image_batch()[0]))
        assert_trees_close(state, kept, exact=True)

    def test_keyword_arguments_go_through(self):
        class Net(nn.Linear):
            def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
                return super().forward(x) * scale

        chosen = program(Net(4, 3))
        state, x = init(chosen), torch.ones(1, 4)
        assert torch.equal(chosen.bind(state)(x=x, scale=2.0), chosen.bind(state)(x) * 2)


def loss_of(fn: Any) -> Any:
    return lambda model, batch: fn(model(batch[0]))


L = ps.Loss
BROKEN = {
    "vector": (loss_of(lambda y: L(y.sum(1), 1, {})), r"objective: the loss has shape \[16\] and dtype torch.float32"),
    "one element": (loss_of(lambda y: L(y.sum().view(1), 1, {})), r"the loss has shape \[1\].*cure: set reduction="),
    "complex": (loss_of(lambda y: L(y.sum() * 1j, 1, {})), r"shape \[\] and dtype torch.complex64.*loss.real"),
    "integer": (loss_of(lambda y: L(y.sum().long(), 1, {})), r"shape \[\] and dtype torch.int64"),
    "bool": (loss_of(lambda y: L(y.sum() > 0, 1, {})), r"dtype torch.bool"),
    "float": (loss_of(lambda y: L(y.sum().item(), 1, {})), "objective: the loss is a float, not a tensor"),
    "None": (loss_of(lambda y: L(None, 1, {})), "the loss is a NoneType, not a tensor"),
    "detached": (loss_of(lambda y: L(y.sum().detach(), 1, {})), "does not depend on the parameters.*remove .detach"),
    "constant": (loss_of(lambda y: L(torch.ones(()), 1, {})), "does not depend on the parameters"),
    "meta": (loss_of(lambda y: L(y.sum().to("meta"), 1, {})), "the loss is on meta, the state on cpu.*ps.to_device"),
    "tensor alone": (loss_of(lambda y: y.sum()), r"the objective returned a Tensor, not a Loss \(cure: return ps.L"),
    "tuple": (loss_of(lambda y: (y.sum(), 1, {})), "returned a tuple, not a Loss"),
    "nothing": (loss_of(lambda y: None), "returned a NoneType, not a Loss"),
    "weight vector": (loss_of(lambda y: L(y.sum(), torch.ones(3), {})), r"the weight of the loss is of shape \[3\]"),
    "weight negative": (loss_of(lambda y: L(y.sum(), -1.0, {})), "the weight of the loss is -1.0 .*multiply `mean`"),
    "weight None": (loss_of(lambda y: L(y.sum(), None, {})), "the weight of the loss is a NoneType; a scalar is"),
    "weight complex": (loss_of(lambda y: L(y.sum(), torch.ones(()) * 1j, {})), "the weight of the loss is"),
    "metrics None": (loss_of(lambda y: L(y.sum(), 1, None)), r"metrics: the metric is a NoneType, not a Mean .cure"),
    "metric float": (loss_of(lambda y: L(y.sum(), 1, {"a": 1.0})), "metrics/a: the metric is a float, not a Mean"),
    "metric named loss": (
        loss_of(lambda y: L(y.sum(), 1, {"loss": ps.Mean(y.sum(), y.sum())})),
        r"metrics/loss: the step itself has a metric of this name \(cure: choose another name\)",
    ),
    "metric tensor": (loss_of(lambda y: L(y.sum(), 1, {"a": y.sum()})), "metrics/a: the metric is a Tensor, not"),
}  # fmt: skip


class TestContract:
    @pytest.mark.parametrize("engine", ["autograd", "func"])
    @pytest.mark.parametrize("fault", BROKEN)
    def test_an_objective_that_breaks_it_is_told_how(self, fault: str, engine: str):
        objective, message = BROKEN[fault]
        chosen = program(objective=objective, engine=engine)
        state = init(chosen)
        kept, before = ps.clone(state), torch.get_rng_state()
        with pytest.raises(StepContractError, match=message):
            chosen.train_step(state, vector_batch())
        assert_trees_close(state, kept, exact=True)
        assert torch.equal(before, torch.get_rng_state())

    def test_a_tensor_is_no_negative_weight_either_where_the_host_may_read_it(self):
        objective = loss_of(lambda y: ps.Loss(y.sum(), -y.detach().abs().sum()))
        for call in (program(objective=objective).train_step, program(objective=objective).eval_step):
            with pytest.raises(StepContractError, match="the weight of the loss is -.*multiply `mean`"):
                call(init(program()), vector_batch())

    @pytest.mark.parametrize("fault", [name for name in BROKEN if name not in ("detached", "constant")])
    def test_evaluation_asks_the_same(self, fault: str):
        objective, message = BROKEN[fault]
        with pytest.raises(StepContractError, match=message):
            program(objective=objective).eval_step(init(program()), vector_batch())

    def test_a_loss_that_depends_on_something_else_alone(self):
        """It has a graph, only not to the parameters: a teacher with requires_grad, say."""
        teacher = nn.Linear(4, 3)

        def objective(model: Any, batch: Any) -> ps.Loss:
            return ps.Loss(functional.cross_entropy(teacher(batch[0]), batch[1]), 16, {})

        with pytest.raises(StepContractError, match="does not depend on the parameters"):
            program(objective=objective).train_step(init(program()), vector_batch())

    @pytest.mark.parametrize(("place", "path"), [(0, "batch/0"), (1, "batch/1")])
    def test_a_batch_on_another_device_is_named(self, place: int, path: str):
        batch = list(vector_batch())
        batch[place] = batch[place].to("meta")
        with pytest.raises(
            DataError, match=rf"{path}: the tensor is not on cpu, where the state is .cure: call batch = ps"
        ):
            program().train_step(init(program()), tuple(batch))

    def test_errors_of_the_model_are_its_own(self):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            program().train_step(init(program()), (torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)))

    @pytest.mark.parametrize("weight", [4, 4.0, torch.tensor(4), torch.tensor(4.0, dtype=torch.float64)])
    def test_a_weight_may_be_a_number_or_a_0d_tensor(self, weight: Any):
        chosen = program(objective=loss_of(lambda y: L(y.mean(), weight, {})))
        _, metrics = chosen.train_step(init(chosen), vector_batch())
        assert (float(metrics["loss"].weight), metrics["loss"].weight.dtype) == (4, torch.float32)

    @pytest.mark.parametrize("part", [3, 3.0, torch.tensor(3), torch.tensor([3.0, 3.0])])
    def test_a_metric_may_be_of_numbers_or_tensors(self, part: Any):
        chosen = program(objective=loss_of(lambda y: L(y.mean(), 4, {"found": ps.Mean(part, part)})))
        _, metrics = chosen.train_step(init(chosen), vector_batch())
        assert (float(metrics["found"]), metrics["found"].total.dtype) == (1, torch.float32)

    def test_a_metric_of_something_else_is_named(self):
        chosen = program(objective=loss_of(lambda y: L(y.mean(), 4, {"found": ps.Mean(y.mean(), None)})))  # type: ignore[arg-type]
        with pytest.raises(StepContractError, match="metrics/found: the metric is a Mean of a NoneType"):
            chosen.train_step(init(chosen), vector_batch())

    @pytest.mark.parametrize("part", [torch.tensor(3), torch.tensor([3.0, 3.0])])
    def test_what_the_objective_leaves_on_the_host_goes_to_the_device(self, part: Tensor):
        device = torch.device("meta")  # stands in for a GPU
        loss = check_loss(
            L(torch.zeros((), device=device), torch.tensor(8.0), {"found": ps.Mean(part, part)}), device, train=True
        )
        assert {leaf.device for leaf in (loss.weight, *loss.metrics["found"])} == {device}


class TestSettings:
    @pytest.mark.parametrize("name", ["accumulate", "microbatches"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
    def test_counts_are_whole_numbers_from_1(self, name: str, value: Any):
        with pytest.raises(
            ConfigError, match=rf"program: {name}=.* must be an int of at least 1 \(cure: 1 is the default\)"
        ):
            program(**{name: value})

    @pytest.mark.parametrize(
        ("name", "value", "known"),
        [("tail", "keep", "step"), ("engine", "jax", "func"), ("nonfinite", "ignore", "raise"), ("tail", None, "step")],
    )
    def test_choices_are_listed(self, name: str, value: Any, known: str):
        with pytest.raises(ConfigError, match=rf'program: {name}={value!r} is unknown \(cure: "{known}"'):
            program(**{name: value})

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ((lambda x: x, CROSS_ENTROPY, optim.sgd(0.1)), "the model is a function .cure: pass a torch.nn.Module"),
            (
                (tiny_mlp(), nn.CrossEntropyLoss(), optim.sgd(0.1)),
                "the objective is a CrossEntropyLoss .cure: pass ps.su",
            ),
            ((tiny_mlp(), None, optim.sgd(0.1)), "the objective is a NoneType"),
            (
                (tiny_mlp(), CROSS_ENTROPY, torch.optim.SGD(tiny_mlp().parameters())),
                "tx is of type SGD, not a Transform .*from_to",
            ),
            ((tiny_mlp(), CROSS_ENTROPY, 0.1), "tx is of type float"),
        ],
    )
    def test_each_part_has_its_kind(self, parts: Any, message: str):
        with pytest.raises(ConfigError, match=f"program: {message}"):
            ps.program(*parts)

    def test_static_says_what_packing_and_export_need(self):
        net = tiny_convnet()
        net[0].requires_grad_(False)
        static = program(net, ema=0.9, accumulate=2, tail="carry").static
        assert static.trained == ("1.weight", "1.bias", "6.weight", "6.bias")
        assert static.frozen == ("0.weight",)
        assert static.persistent == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert (static.ties, static.accumulate, static.tail, static.has_ema) == ({}, 2, "carry", True)
        assert program(net).static.has_ema is False
        assert program(net, ema=ps.ema.none()).static.has_ema is False


class Pair(NamedTuple):
    """The state of a user's own step."""

    maker: ps.TrainState
    judge: ps.TrainState


def gan() -> tuple[Any, Pair]:
    """Two programs, each given the other's state as context, which is neither split nor differentiated."""
    made, judged = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def fool(model: Any, noise: Tensor, judge: ps.TrainState) -> ps.Loss:
        return ps.Loss(functional.softplus(-judge_program.bind(judge, train=True)(model(noise))).mean(), len(noise), {})

    def tell(model: Any, batch: Any, maker: ps.TrainState) -> ps.Loss:
        real, noise = batch
        made = maker_program.bind(maker)(noise)
        loss = functional.softplus(-model(real)).mean() + functional.softplus(model(made)).mean()
        return ps.Loss(loss, len(real), {})

    maker_program = ps.program(made, fool, optim.adam(0.01))
    judge_program = ps.program(judged, tell, optim.adam(0.01))

    def train_step(state: Pair, batch: Any) -> tuple[Pair, dict[str, ps.Mean]]:
        judge, told = judge_program.train_step(state.judge, batch, state.maker)
        maker, fooled = maker_program.train_step(state.maker, batch[1], judge)
        return Pair(maker, judge), {"told": told["loss"], "fooled": fooled["loss"]}

    return train_step, Pair(init(maker_program, 1), init(judge_program, 2))


class TestAStepOfOnesOwn:
    def test_two_programs_in_one_step(self):
        step, state = gan()
        kept = ps.clone(state)
        batch = torch.randn(8, 4), torch.randn(8, 2)
        new, metrics = step(state, batch)
        assert_trees_close(state, kept, exact=True)
        assert (int(new.maker.updates), int(new.judge.updates)) == (1, 1)
        # Real and made ones go through the judge's norm in its own step; the maker's step leaves it alone.
        assert int(new.judge.buffers["1.num_batches_tracked"]) == 2
        assert set(metrics) == {"told", "fooled"}
        assert not torch.equal(new.maker.params["weight"], state.maker.params["weight"])

    @pytest.mark.parametrize("train", [True, False])
    def test_a_teacher_of_the_same_program_keeps_to_its_own_weights(self, train: bool):
        """Both run through one weightless module, the teacher in the middle of the student's pass."""

        def objective(model: Any, batch: Any, teacher: ps.TrainState) -> ps.Loss:
            first = model(batch)
            with torch.no_grad():
                target = chosen.bind(teacher, train=train)(batch)
            loss = functional.mse_loss(first, target) + functional.mse_loss(model(2 * batch), target)
            return ps.Loss(loss, len(batch), {})

        net, other = tiny_convnet(dropout=0.0), tiny_convnet(1, dropout=0.0).train(train)
        chosen = program(net, objective)
        x, _ = image_batch()
        new, _ = chosen.train_step(init(chosen), x, init(program(other)))
        target = other(x).detach()
        optimizer = torch.optim.SGD(net.parameters(), LR)
        (functional.mse_loss(net(x), target) + functional.mse_loss(net(2 * x), target)).backward()
        optimizer.step()
        assert_trees_close(new.params, {n: p.detach() for n, p in net.named_parameters()}, rtol=1e-5, atol=1e-6)
        assert_trees_close(new.buffers, dict(net.named_buffers()), rtol=1e-5, atol=1e-6)

    def test_it_is_pure(self):
        step, state = gan()
        ps.testing.assert_pure(step, state, (torch.randn(8, 4), torch.randn(8, 2)))


def test_an_update_that_float16_cannot_hold_is_refused_like_a_gradient() -> None:
    batch = (torch.ones(1, 2), torch.ones(1, 1))

    def made(factor: float) -> ps.Program:
        tx = optim.chain(optim.scale(factor), optim.sgd(LR))
        return program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), tx, precision="16-true")

    state = init(made(1e6))
    new, metrics = made(1e6).train_step(state, batch)
    assert math.isfinite(float(metrics["loss"]))
    assert (float(metrics["applied"]), int(new.halted)) == (0.0, 1)
    assert_trees_close(new.params, state.params, exact=True)
    assert float(made(1.0).train_step(state, batch)[1]["applied"]) == 1.0


# --- a step is a function ---------------------------------------------------------------------------------------------

MAPPED = {
    "sgd with momentum": {"tx": optim.sgd(LR, momentum=0.9)},
    "adamw, clipped": {"tx": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2)), "ema": 0.9},
    "a window": {"tx": optim.adamw(1e-2), "accumulate": 2},
    "float16": {"tx": optim.sgd(LR), "precision": "16-mixed"},
}


def stacked(members: list[Any]) -> Any:
    return tree.map(lambda *leaves: torch.stack(leaves), *members)


@pytest.mark.parametrize("settings", MAPPED.values(), ids=MAPPED)
def test_vmap_over_batches_and_over_states(settings: dict[str, Any]):
    chosen = program(**settings)
    close = {"rtol": 1e-3, "atol": 1e-3} if "precision" in settings else {"rtol": 1e-5, "atol": 1e-6}
    batches = [vector_batch(seed=seed) for seed in range(3)]
    state = init(chosen)
    several = torch.func.vmap(chosen.train_step, in_dims=(None, 0))(state, stacked(batches))
    alone = [chosen.train_step(state, batch) for batch in batches]
    assert_trees_close(several, stacked(alone), **close)
    again = torch.func.vmap(chosen.train_step)(several[0], stacked(batches))
    each = [chosen.train_step(one, batch) for (one, _), batch in zip(alone, batches, strict=True)]
    assert_trees_close(again, stacked(each), **close)


def test_vmap_over_a_convnet_with_batchnorm_and_dropout():
    chosen, batches = program(tiny_convnet()), [image_batch(seed=seed) for seed in range(2)]
    states = stacked([init(chosen, seed) for seed in range(2)])
    mapped = torch.func.vmap(chosen.train_step, randomness="different")
    (new, told), (again, _), (other, _) = (
        mapped(given, stacked(batches)) for given in (states, states, states._replace(key=states.key + 1))
    )
    assert new.key.tolist() == [[0, 1], [1, 1]]
    assert new.buffers["1.num_batches_tracked"].tolist() == [1, 1]
    assert not torch.equal(new.params["6.weight"][0], new.params["6.weight"][1])
    assert torch.isfinite(told["loss"].total).all()
    assert_trees_close(new, again, rtol=0, atol=0)
    assert not torch.equal(new.params["6.weight"], other.params["6.weight"])  # other keys, other dropout


def test_vmap_refuses_what_is_not_finite_one_by_one():
    chosen, batches = program(ema=0.9), [vector_batch(seed=seed) for seed in range(2)]
    batches[1][0][0, 0] = torch.inf
    state = init(chosen)
    new, _ = torch.func.vmap(chosen.train_step, in_dims=(None, 0))(state, stacked(batches))
    assert new.updates.tolist() == [1, 0]
    assert new.halted.tolist() == [0, 1]
    assert repr(new).startswith("TrainState(step=[1, 1], updates=[1, 0], ")
    assert "HALTED at call [0, 1], not finite, seed=[0, 0]" in repr(new)
    assert all(torch.equal(new.params[name][1], value) for name, value in state.params.items())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine": "autograd"}, r'program: engine="autograd" inside of torch.func.vmap.*engine="auto"'),
        ({"tx": optim.from_torch(torch.optim.SGD, lr=0.1)}, r"cannot run inside of .*optim.adamw"),
    ],
    ids=["engine", "optimizer"],
)
def test_what_cannot_be_mapped_says_so(settings: dict[str, Any], told: str):
    chosen = program(**settings)
    with pytest.raises(StepContractError, match=told):
        torch.func.vmap(chosen.train_step, in_dims=(None, 0))(init(chosen), stacked([vector_batch()] * 2))


THROUGH = {
    "sgd": {"tx": optim.sgd(LR, momentum=0.9)},
    "adamw": {"tx": optim.adamw(1e-2, eps=1e-2)},
    "clipped": {"tx": optim.chain(optim.clip_by_global_norm(0.1), optim.adam(1e-2, eps=1e-2)), "ema": 0.9},
    "nadam": {"tx": optim.nadam(1e-2, eps=1e-2)},
    "radam": {"tx": optim.radam(1e-2, eps=1e-2)},
    "rmsprop": {"tx": optim.rmsprop(1e-2, eps=1e-2, centered=True)},
    "adagrad": {"tx": optim.adagrad(1e-2, eps=1e-2)},
    "parts of a batch": {"tx": optim.adamw(1e-2, eps=1e-2), "microbatches": 2},
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of its forward mode
@pytest.mark.parametrize("way", ["torch.func", "autograd", "forward"])
@pytest.mark.parametrize("settings", THROUGH.values(), ids=THROUGH)
def test_the_derivative_through_a_step_is_that_of_finite_differences(settings: dict[str, Any], way: str):
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net[2].weight.data[:, 0] = 0  # the first unit has no gradient: a mean square of 0, where a root has no derivative
    chosen = program(net, precision="64-true", **settings)
    state, first, second = init(chosen), vector_batch(dtype=torch.float64), vector_batch(seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    direction = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) for name, value in state.params.items()
    }

    def after(params: dict[str, Tensor]) -> Tensor:
        adapted, _ = chosen.train_step(state._replace(params=params), first)
        return functional.cross_entropy(chosen.bind(adapted, train=True)(second[0]), second[1])

    def along(grads: dict[str, Tensor]) -> float:
        return sum((grads[name] * value).sum().item() for name, value in direction.items())

    if way == "torch.func":
        found = along(torch.func.grad(after)(state.params))
    elif way == "autograd":
        leaves = {name: value.clone().requires_grad_() for name, value in state.params.items()}
        grads = torch.autograd.grad(after(leaves), list(leaves.values()))
        found = along(dict(zip(leaves, grads, strict=True)))
    else:
        with torch.autograd.forward_ad.dual_level():
            make_dual = torch.autograd.forward_ad.make_dual
            duals = {name: make_dual(value, direction[name]) for name, value in state.params.items()}
            tangent = torch.autograd.forward_ad.unpack_dual(after(duals)).tangent
            assert tangent is not None
            found = tangent.item()
    size = 1e-7
    up, down = (
        after({name: value + sign * size * direction[name] for name, value in state.params.items()}) for sign in (1, -1)
    )
    assert found == pytest.approx((up - down).item() / (2 * size), rel=1e-4, abs=1e-7)


def test_a_tensor_as_a_hyperparameter_can_be_differentiated_too():
    eps = torch.tensor(1e-2, requires_grad=True)
    tx, params = optim.adam(0.1, eps=eps), {"w": torch.ones(2)}
    updates, _ = tx.update({"w": torch.tensor([0.1, 0.2])}, tx.init(params), params)
    (found,) = torch.autograd.grad(updates["w"].sum(), eps)
    assert found.item() == pytest.approx(0.1 * (0.1 / 0.11**2 + 0.2 / 0.21**2), rel=1e-4)


class Counting(NamedTuple):
    name: str
    size: int
    calls: float


def test_what_is_no_tensor_in_a_state_is_no_error():
    def update(updates: Any, state: Counting, params: Any) -> tuple[Any, Counting]:
        return updates, state._replace(calls=state.calls + 1.0)

    chosen = program(tx=optim.Transform(lambda params: Counting("mine", 3, 0.0), update))
    new, _ = chosen.train_step(init(chosen), vector_batch())
    assert new.opt_state == ("mine", 3, 1.0)


class Assigning(nn.Linear):
    """Leaves in its buffers what is not its own: the batch, a weight, a view."""

    def __init__(self):
        super().__init__(4, 3)
        for name, shape in (("last", (16, 4)), ("again", (16, 4)), ("seen", (3, 4)), ("wide", (3, 4))):
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.again = x
        self.seen = self.weight.detach()
        self.wide = torch.ones(1, 4).expand(3, 4)
        return super().forward(x)


def keeping() -> optim.Transform:
    """Keeps what it was given in its state, as it is."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        kept = {"old": dict(params), "last": dict(updates), "again": dict(updates)}
        return {name: -LR * update for name, update in updates.items()}, kept

    return optim.Transform(lambda params: {"old": params, "last": params, "again": params}, update)


@pytest.mark.parametrize("finite", [True, False])
def test_no_two_leaves_of_old_and_new_state_and_batch_share_memory(finite: bool):
    chosen = program(Assigning(), tx=keeping(), ema=0.9)
    state = chosen.train_step(init(chosen), vector_batch(seed=1))[0]
    batch = vector_batch()
    if not finite:
        batch[0][0] = torch.inf
    new, _ = chosen.train_step(state, batch)
    assert int(new.updates) == 1 + finite
    written = [leaf for leaf in tree.leaves(new) if leaf.dim()]
    for leaf in written:
        leaf.fill_(7)
    assert all(bool((leaf == 7).all()) for leaf in written)
    assert not any(bool((leaf == 7).any()) for leaf in [*tree.leaves(state), *batch] if leaf.dim())
    pointers = [leaf.data_ptr() for leaf in tree.leaves((new, state)) if leaf.dim()]
    shared = [pointer for pointer in pointers if pointers.count(pointer) > 1]
    assert not shared


def test_a_step_can_be_traced_and_tried_on_fake_tensors():
    chosen, (inputs, targets) = program(tx=optim.adamw(1e-2), ema=0.9), vector_batch()
    state = init(chosen)
    expected, _ = chosen.train_step(state, (inputs, targets))
    traced = make_fx(lambda x: chosen.train_step(state, (x, targets))[0].params)(inputs)
    assert_trees_close(traced(inputs), expected.params, rtol=1e-6, atol=1e-7)
    with FakeTensorMode(allow_non_fake_inputs=True):
        new, _ = chosen.train_step(state, (torch.empty(16, 4), torch.empty(16, dtype=torch.int64)))
    assert {name: value.shape for name, value in new.params.items()} == {n: v.shape for n, v in state.params.items()}


class Centering(nn.Linear):
    """Keeps two averages in buffers, one of its inputs and one of its weights, and uses what it keeps."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.center = 0.5 * self.center + 0.5 * x.mean(0)
        self.size = 0.5 * self.size + self.weight.square().mean()
        return super().forward(x - self.center) * self.size


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("way", ["torch.func", "autograd"])
def test_a_derivative_goes_through_the_new_buffers_too(way: str, microbatches: int):
    chosen = program(Centering(), precision="64-true", microbatches=microbatches)
    state, batch = init(chosen), vector_batch(dtype=torch.float64)

    def after(weight: Tensor, center: Tensor) -> Tensor:
        params, buffers = {**state.params, "weight": weight}, {**state.buffers, "center": center}
        new, _ = chosen.train_step(state._replace(params=params, buffers=buffers), batch)
        return new.buffers["center"].square().sum() + new.buffers["size"] * new.params["weight"].sum()

    at = state.params["weight"], state.buffers["center"]
    if way == "torch.func":
        found = torch.func.grad(after, argnums=(0, 1))(*at)
    else:
        leaves = [value.clone().requires_grad_() for value in at]
        found = torch.autograd.grad(after(*leaves), leaves)
    for place, (value, gradient) in enumerate(zip(at, found, strict=True)):
        step = torch.zeros_like(value)
        step.view(-1)[1] = 1e-6
        there, back = ([*at[:place], value + sign * step, *at[place + 1 :]] for sign in (1, -1))
        expected = (after(*there) - after(*back)) / 2e-6
        assert gradient.view(-1)[1].item() == pytest.approx(expected.item(), rel=1e-5)
    new, _ = chosen.train_step(state, batch)
    assert not any(value.requires_grad for value in new.buffers.values())


def test_a_derivative_goes_through_frozen_weights_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
            self.first.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    chosen = program(Net(), precision="64-true")
    state, first, second = init(chosen), vector_batch(dtype=torch.float64), vector_batch(seed=1, dtype=torch.float64)

    def after(frozen: dict[str, Tensor]) -> Tensor:
        adapted, _ = chosen.train_step(state._replace(frozen=frozen), first)
        return functional.cross_entropy(chosen.bind(adapted, train=True)(second[0]), second[1])

    leaves = {name: value.clone().requires_grad_() for name, value in state.frozen.items()}
    found = torch.autograd.grad(after(leaves), list(leaves.values()))
    expected = torch.func.grad(after)(state.frozen)
    assert_trees_close(dict(zip(leaves, found, strict=True)), expected, rtol=1e-9, atol=1e-12)


SUMS = [
    ps.supervised(nn.MSELoss(reduction="sum")),
    ps.supervised(partial(functional.mse_loss, reduction="sum")),
    ps.masked_reconstruction("sse", reduction="sum"),
]


@pytest.mark.parametrize("objective", SUMS)
@pytest.mark.parametrize("parts", ["accumulate", "microbatches"])
def test_a_sum_of_errors_is_not_divided_into_parts(objective: Any, parts: str):
    """Every part would count as one, so that the step trains on the mean of their sums."""
    with pytest.raises(
        ConfigError,
        match=rf'"sum", and the program has {parts}=2: .*cure: reduction="mean"; with SGD .* with Adam keep it',
    ):
        ps.program(tiny_mlp(), objective, optim.sgd(LR), **{parts: 2})
    whole = ps.program(tiny_mlp(), objective, optim.sgd(LR)).static
    assert whole is not None
    with pytest.raises(ConfigError, match='reduction="sum", and the program has several processes'):
        whole.made.steps(IDENTITY._replace(exchange=object()))  # pyright: ignore[reportArgumentType]  # as `distribute` does
    chosen = ps.program(tiny_mlp(), objective, optim.sgd(LR))
    for function in (
        ps.per_example,
        ps.gradient_noise_scale,
        partial(ps.privacy.dp_sgd, max_norm=1.0, noise_multiplier=1.0),
    ):
        with pytest.raises(ConfigError, match=r'reduction="sum", and the gradient .*cure: reduction="mean"'):
            function(chosen)


OTHERS = (
    r"depends on 2 tensors in the objective's closure that require a gradient, which no step trains: "
    r"\[3, 3\], \[3\] \(cure: make"
)


def of_a_head(head: nn.Module) -> Any:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(nn.functional.cross_entropy(head(model(batch[0])), batch[1]), len(batch[1]))

    return objective


def of_loss_weights(weights: list[Tensor]) -> Any:
    def objective(model: Any, batch: Any) -> ps.Loss:
        loss = nn.functional.cross_entropy(model(batch[0]) + weights[1], batch[1])
        return ps.Loss(loss * weights[0].exp().mean(), len(batch[1]))

    return objective


@pytest.mark.compile
@pytest.mark.parametrize("how", ["eager", "microbatches", "compiled", "donated"])
@pytest.mark.parametrize("kind", ["a head", "weights"])
def test_tensors_of_others_in_the_loss_are_said_once(kind: str, how: str):
    head, weights = nn.Linear(3, 3), [torch.zeros(3, 3, requires_grad=True), torch.zeros(3, requires_grad=True)]
    objective = of_a_head(head) if kind == "a head" else of_loss_weights(weights)

    def made() -> tuple[Any, Any]:
        chosen = program(objective=objective, microbatches=2 if how == "microbatches" else 1)
        step = chosen.train_step
        if how in ("compiled", "donated"):
            step = ps.compile_step(step, backend="aot_eager", donate=how == "donated")
        return init(chosen), step

    state, step = made()
    if kind == "weights" and how == "eager":  # a tensor that is no parameter may be one of this call alone
        state, _ = step(state, vector_batch())
    with pytest.warns(UserWarning, match=OTHERS):
        state, _ = step(state, vector_batch())
    for _ in range(2):
        state, _ = step(state, vector_batch())  # a second warning would be an error
    assert not any(leaf.requires_grad for leaf in state.params.values())
    for other in (*head.parameters(), *weights):
        other.requires_grad_(False)
    state, step = made()
    for _ in range(3):
        state, _ = step(state, vector_batch())


@pytest.mark.parametrize("how", ["func", "ensemble"])
def test_tensors_of_others_are_refused_under_torch_func(how: str):
    """Each state would hold the graphs of all steps before."""
    chosen = program(objective=of_a_head(nn.Linear(3, 3)), engine="func" if how == "func" else "auto")
    chosen = ps.ensemble(chosen, 2) if how == "ensemble" else chosen
    with pytest.raises(StepContractError, match=f"^objective: the loss {OTHERS}"):
        chosen.train_step(init(chosen), vector_batch())


@pytest.mark.parametrize("how", ["func", "ensemble"])
def test_a_term_of_others_alone_is_said_under_torch_func_too(how: str):
    """No gradient of the model depends on it."""
    weight = nn.Parameter(torch.zeros(3, 3))

    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(nn.functional.cross_entropy(model(batch[0]), batch[1]) + weight.sum(), len(batch[1]))

    chosen = program(objective=objective, engine="func" if how == "func" else "auto")
    chosen = ps.ensemble(chosen, 2) if how == "ensemble" else chosen
    state = init(chosen)
    with pytest.warns(UserWarning, match=r"depends on a tensor in the objective's closure.*\[3, 3\]"):
        state, _ = chosen.train_step(state, vector_batch())
    for _ in range(2):
        state, _ = chosen.train_step(state, vector_batch())
    weight.requires_grad_(False)
    chosen.train_step(init(chosen), vector_batch())


def test_a_batch_that_requires_a_gradient_is_no_tensor_of_others_in_its_parts_either():
    def objective(model: Any, x: Tensor) -> ps.Loss:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ps.Loss(slope.square().mean() + x.mean(), len(x))

    for parts in (1, 2):
        chosen = program(objective=objective, microbatches=parts)
        x = vector_batch()[0].requires_grad_()
        for _ in range(3):
            chosen.train_step(init(chosen), x)  # a warning would be an error


def test_tensors_that_the_objective_creates_are_not_those_of_others():
    """A gradient penalty."""

    def objective(model: Any, batch: Any) -> ps.Loss:
        x = batch[0].detach().requires_grad_()
        scores = model(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = nn.functional.cross_entropy(scores, batch[1]) + slope.square().mean() + x.mean()
        return ps.Loss(loss, len(batch[1]))

    chosen = program(objective=objective)
    state, batch = init(chosen), vector_batch()
    for _ in range(3):
        state, _ = chosen.train_step(state, batch)
    of_batch = (batch[0].requires_grad_(), batch[1])  # it is the batch's own
    other = program()
    state = init(other)
    for _ in range(3):
        state, _ = other.train_step(state, of_batch)


@pytest.mark.compile
def test_a_graph_names_the_cure_for_a_derivative_by_the_batch():
    def objective(model: Any, x: Tensor) -> ps.Loss:
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return ps.Loss((du - u.mean()).square().mean(), len(x))

    def cured(model: Any, x: Tensor) -> ps.Loss:
        return objective(model, x.detach().requires_grad_())

    x = torch.rand(8, 4, requires_grad=True)
    results = []
    for made in (objective, cured):
        torch.manual_seed(0)
        chosen = program(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), objective=made)
        results.append(chosen.train_step(init(chosen), x))
        step = ps.compile_step(chosen.train_step, backend="aot_eager")
        if made is objective:
            told = r"^objective: .*differentiates by a tensor that requires no gradient.*cure: call x = x\.detach"
            with pytest.raises(StepContractError, match=told):
                step(init(chosen), x)
        else:
            results.append(step(init(chosen), x))
    for other in results[1:]:
        assert_trees_close(other, results[0])


class Agent(nn.Module):
    """A module whose methods are its interface: it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def value(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.head(self.body(x))


def valued(model: Any, x: Tensor) -> ps.Loss:
    return ps.Loss(model.call("value", x).mean(), len(x))


def test_a_bound_model_calls_other_methods_and_submodules() -> None:
    chosen = ps.program(Agent(), valued, ps.optim.sgd(0.1), ema=0.5)
    state, x = chosen.init(), torch.ones(4, 2)
    for _ in range(3):
        state, _ = chosen.train_step(state, x)
    for view in ("params", "ema"):
        twin = Agent()
        ps.load_into(twin, state, view=view)
        predict = chosen.bind(state, view=view)
        assert torch.equal(predict.call("value", x, scale=2.0), twin.value(x, scale=2.0))
        assert torch.equal(predict.call("body", x), twin.body(x))
    followed = state._replace(params={name: weight.clone().requires_grad_() for name, weight in state.params.items()})
    assert chosen.bind(followed, train=True).call("value", x).requires_grad
    assert not chosen.bind(followed).call("value", x).requires_grad


def test_a_module_without_forward_has_torchs_error() -> None:
    chosen = ps.program(Agent(), valued, ps.optim.sgd(0.1))
    with pytest.raises(NotImplementedError, match=r'Agent\] is missing the required "forward"'):
        chosen.bind(chosen.init())(torch.ones(1, 2))


# --- float64 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_metrics_have_the_dtype_of_the_loss(precision: str, accumulate: int) -> None:
    wide = precision == "64-true"
    dtype = torch.float64 if wide else torch.float32
    net = nn.Linear(3, 1).to(dtype)
    objective = ps.supervised(
        nn.MSELoss(),
        metrics={
            "mae": ps.metrics.mean_absolute_error,
            "own": lambda o, y: (o - y).square().mean(),
            "pair": lambda o, y: ((o - y).square().sum(), o.numel()),
            "mean": lambda o, y: ps.metrics.as_mean((o - y).square().mean(), len(y)),
        },
    )
    chosen = ps.program(net, objective, ps.optim.sgd(0.1), precision=precision, accumulate=accumulate)
    batch = torch.rand(7, 3, dtype=dtype), torch.rand(7, 1, dtype=dtype)
    state, expected = chosen.init(), functional.mse_loss(net(batch[0]), batch[1]).item()
    compiled = ps.compile_program(chosen, backend="aot_eager")
    for each in (chosen, compiled):
        new, trained = each.train_step(state, batch)
        assert each.eval_step is not None
        evaluated = each.eval_step(state, batch)
        for metrics in (trained, evaluated, each.flush(new)[1]):
            assert {part.dtype for mean in metrics.values() for part in mean} <= {dtype}
        for metrics in (trained, evaluated):
            for name in ("loss", "own", "pair", "mean"):
                assert abs(float(metrics[name]) - expected) < (1e-15 if wide else 1e-6)
    _, epoch = ps.run_epoch(state, [batch], chosen.train_step)
    assert epoch["loss"].total.dtype == torch.float64  # sums of many batches, on the host
    if wide:
        assert abs(float(epoch["loss"]) - expected) < 1e-15
        assert abs(ps.evaluate(state, [batch], chosen.eval_step)["own"] - expected) < 1e-15


def test_a_count_of_an_evaluation_stays_an_integer() -> None:
    """float32 would round a sum above 2**24."""

    def objective(model: Any, x: Tensor) -> ps.Loss:
        return ps.Loss(model(x).mean(), len(x), {"seen": ps.Mean(torch.tensor(2**24 + 1), torch.tensor(1))})

    chosen = ps.program(nn.Linear(3, 1), objective, ps.optim.sgd(0.1))
    assert chosen.init is not None
    assert chosen.eval_step is not None
    assert int(chosen.eval_step(chosen.init(), torch.rand(7, 3))["seen"].total) == 2**24 + 1


# --- derivatives by the inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_evaluation_of_a_derivative_by_the_inputs_names_its_cure(is_compiled: bool) -> None:
    def residual(model: Any, x: Tensor) -> ps.Loss:
        x = x.detach().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        return ps.Loss((slope - y).square().mean(), len(x))

    def enabled(model: Any, x: Tensor) -> ps.Loss:
        with torch.enable_grad():
            return residual(model, x)

    net, x = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), torch.rand(8, 1)

    def evaluated(objective: Any) -> float:
        chosen = ps.program(net, objective, ps.optim.sgd(0.1))
        chosen = ps.compile_program(chosen, backend="aot_eager") if is_compiled else chosen
        assert chosen.init is not None
        assert chosen.eval_step is not None
        return float(chosen.eval_step(chosen.init(), x)["loss"])

    with pytest.raises(StepContractError, match=r"follows no gradients .*with torch\.enable_grad\(\):"):
        evaluated(residual)
    expected = float(ps.program(net, residual, ps.optim.sgd(0.1)).train_step(program(net).init(), x)[1]["loss"])
    assert abs(evaluated(enabled) - expected) < 1e-6


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_error_of_the_objective_itself_is_no_missing_derivative(is_compiled: bool) -> None:
    def objective(model: Any, x: Tensor) -> ps.Loss:
        raise RuntimeError("my adapter does not require grad, check the config")

    chosen = ps.program(nn.Linear(1, 1), objective, ps.optim.sgd(0.1))
    chosen = ps.compile_program(chosen, backend="aot_eager") if is_compiled else chosen
    assert chosen.init is not None
    assert chosen.eval_step is not None
    kind, where = (StepContractError, r"test_step.py:\d+: .*RuntimeError: ") if is_compiled else (RuntimeError, "^")
    for call in (chosen.eval_step, chosen.train_step):
        with pytest.raises(kind, match=f"{where}my adapter does not require grad"):
            call(chosen.init(), torch.ones(2, 1))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("carry", [(), ("hidden",)])
def test_an_evaluation_warns_of_the_buffer_that_is_written(is_compiled: bool, carry: tuple[str, ...]) -> None:
    class Net(nn.Linear):
        first: Tensor
        hidden: Tensor

        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("first", torch.zeros(2))
            self.register_buffer("hidden", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) + self.hidden + self.first
            self.hidden.copy_(y.detach().mean(0))
            return y

    chosen = ps.program(Net(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1), carry=carry)
    chosen = ps.compile_program(chosen, backend="aot_eager") if is_compiled else chosen
    assert chosen.init is not None
    assert chosen.eval_step is not None
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        chosen.eval_step(chosen.init(), (torch.ones(3, 2), torch.ones(3, 2)))
    found = [str(each.message) for each in met if "writes the buffer" in str(each.message)]
    assert [text.split()[5] for text in found] == ([] if carry else ["hidden"])
