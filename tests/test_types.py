from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import tiny_convnet, tiny_mlp, vector_batch
from torch import nn

import purestep as ps
from purestep import optim, tree
from purestep.types import Empty, Mean, Program


def mean(total: float | list[float], weight: float | list[float]) -> Mean:
    return Mean(torch.tensor(total), torch.tensor(weight))


def test_a_mean_is_its_total_over_its_weight():
    assert mean(6.0, 4.0).compute().item() == 1.5
    assert float(mean(6.0, 4.0)) == 1.5


def test_nothing_counted_is_nan_and_not_zero():
    assert math.isnan(float(mean(0.0, 0.0)))
    assert math.isnan(mean(0.0, 0.0).compute().item())


def test_a_vector_as_a_number_is_the_mean_over_the_classes_that_were_counted():
    of_classes = mean([1.0, 0.0, 3.0], [2.0, 0.0, 4.0])
    assert float(of_classes) == (0.5 + 0.75) / 2
    assert of_classes.compute().tolist()[0] == 0.5
    assert math.isnan(of_classes.compute()[1])


def test_means_are_compared_and_formatted_as_numbers():
    """As tuples, 5.6 / 8 would be less than 16 / 32: the sums are."""
    small, large = mean(16.0, 32.0), mean(5.6, 8.0)
    assert small < large
    assert large > small
    assert small <= 0.5 <= small
    assert large >= torch.tensor(0.5)
    assert sorted([large, small]) == [small, large]
    assert f"{small:.3f}" == "0.500"
    assert f"{small}" == str(small)
    with pytest.raises(TypeError, match=r"metrics.merge\(first, second\)"):
        small + large
    with pytest.raises(TypeError, match="compared with a Mean or a number, not with a str"):
        bool(small < "0.7")


def test_the_repr_says_that_a_state_has_halted():
    program = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    inputs, targets = vector_batch()
    state, _ = program.train_step(program.init(), (inputs * math.nan, targets))
    assert "HALTED at call 1, not finite" in repr(state)
    assert "HALTED" not in repr(state._replace(halted=torch.zeros_like(state.halted)))


def test_what_is_off_has_no_leaves_in_either_kind_of_tree():
    assert tree.leaves(Empty()) == []
    assert torch.utils._pytree.tree_leaves(Empty()) == []
    assert Empty() == Empty()


def test_the_repr_of_a_state_is_a_line_and_no_dump():
    net = tiny_convnet()
    net[0].requires_grad_(False)
    program = ps.program(
        net, ps.supervised(nn.CrossEntropyLoss()), optim.adamw(1e-3), ema=0.9, accumulate=2, precision="16-mixed"
    )
    assert repr(program.init(seed=7, device="cpu")) == (
        "TrainState(step=0, updates=0, params=4 (59 numbers), frozen=1, buffers=3, ema, scaler, accum, seed=7, "
        "device=cpu)"
    )


def test_the_repr_leaves_out_what_is_off():
    state = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1)).init(device="cpu")
    assert repr(state) == (
        "TrainState(step=0, updates=0, params=4 (67 numbers), frozen=0, buffers=0, seed=0, device=cpu)"
    )


def test_a_program_of_ones_own_needs_a_train_step_alone():
    program = Program(lambda state, batch: (state + batch, {}))
    assert program.train_step(1, 2) == (3, {})
    assert program.flush("any state") == ("any state", {})
    assert program[2:6] == (None, None, None, None)
    assert program.begin("any state") == "any state"


def test_the_default_metrics_of_a_loss_are_shared_and_cannot_be_written():
    loss = ps.Loss(torch.tensor(1.0), torch.tensor(2.0))
    metrics: Any = loss.metrics
    writes: list[Callable[[], Any]] = [
        lambda: metrics.__setitem__("a", mean(1.0, 1.0)),
        lambda: metrics.update(a=mean(1.0, 1.0)),
        lambda: metrics.setdefault("a", mean(1.0, 1.0)),
        lambda: operator.ior(metrics, {"a": mean(1.0, 1.0)}),
    ]
    for write in writes:
        with pytest.raises(TypeError, match=r"shared default: pass ps.Loss\(mean, weight, {name: mean}\)"):
            write()
    assert ps.Loss(torch.tensor(1.0), torch.tensor(2.0)).metrics == {}


def test_a_loss_without_metrics_is_copied_and_pickled():
    loss = ps.Loss(torch.tensor(1.0), torch.tensor(2.0))
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert copied == loss


@pytest.mark.parametrize("name", ["TrainState", "Mean", "Loss", "Empty", "Program"])
def test_the_vocabulary_is_at_the_top(name: str):
    assert getattr(ps, name) is getattr(ps.types, name)


def test_what_a_transform_stands_in_for_is_told_as_unknown():
    state = ps.program(tiny_mlp(), ps.supervised(nn.MSELoss()), optim.sgd(0.1)).init(seed=0)
    told: list[str] = []

    def look(step: torch.Tensor) -> torch.Tensor:
        told.append(repr(state._replace(step=step)))
        return step

    torch.func.vmap(look)(torch.arange(2))
    assert told[0].startswith("TrainState(step=?, updates=")


def own_step(state, batch):
    return state, {}


def test_a_program_of_ones_own_is_pickled():
    own = ps.Program(own_step)
    assert pickle.loads(pickle.dumps(own)) == own
