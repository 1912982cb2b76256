"""`summary`: parameters by module, and FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, StateError


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    made[0].requires_grad_(False)
    return made


def summarized(tx: Any, model: nn.Module | None = None, batch: Any = None) -> Any:
    model = model or net()
    program = ps.program(model, ps.supervised(nn.CrossEntropyLoss()), tx)
    return ps.summary(program, program.init(), batch)


IMAGES = (torch.ones(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))


def test_rows_and_totals_count_what_the_module_has() -> None:
    found = summarized(optim.adamw(1e-3))
    rows = {row.module: row[2:] for row in found.rows}
    assert rows == {"0": (0, 3 * 8 * 9 + 8), "1": (16, 0), "4": (2890, 0)}
    assert found.rows[-1].shapes == {"weight": (8, 3, 3, 3), "bias": (8,)}
    assert (found.trained, found.frozen) == (2906, 224)
    assert found.buffers == 8 + 8 + 1
    assert found.parameter_bytes == 4 * (2906 + 224)
    assert found.forward_flops is found.step_flops is None


def test_flops_are_those_of_the_layers() -> None:
    found = summarized(optim.sgd(0.1), batch=IMAGES)
    convolution, linear = 2 * 4 * 8 * 36 * 27, 2 * 4 * 288 * 10
    assert found.forward_flops == convolution + linear
    # the linear layer's weight and input; the convolution is frozen
    assert found.step_flops == found.forward_flops + 2 * linear


def test_the_table_is_aligned_and_narrow() -> None:
    model = nn.Sequential()
    inner: nn.Module = nn.Conv3d(64, 64, (3, 3, 3))
    for name in ("a_rather_long_name_of_a_module", "another_even_longer_name_within_it", "blocks", "convolution"):
        outer = nn.Sequential()
        outer.add_module(name, inner)
        inner = outer
    model.add_module("deep", inner)
    model.add_module("heads", nn.MultiheadAttention(64, 4))
    lines = str(summarized(optim.adamw(1e-3), model)).splitlines()
    assert max(map(len, lines)) < 100
    name = "deep.convolution.blocks.another_even_longer_name_within_it.a_rather_long_name_of_a_module"
    assert name in "".join(line.split(" ")[0] for line in lines[2:-3])  # over several lines
    ends = {
        line.rfind(line.split()[-1]) + len(line.split()[-1]) for line in lines if line.endswith(tuple("d0123456789"))
    }
    assert ends == {max(map(len, lines))}


def test_a_model_without_modules_has_a_row() -> None:
    program = ps.program(nn.Linear(2, 2), ps.supervised(nn.MSELoss()), optim.from_torch(torch.optim.SGD, lr=0.1))
    lines = str(ps.summary(program, program.init())).splitlines()
    assert lines[2].split() == ["(model)", "2x2,", "2", "6", "0"]


def test_counting_changes_neither_state_nor_generators() -> None:
    program = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    state = program.init()
    before, generator = ps.clone(state), torch.get_rng_state()
    ps.summary(program, state, IMAGES)
    assert all(map(torch.equal, ps.tree.leaves(state), ps.tree.leaves(before)))
    assert torch.equal(generator, torch.get_rng_state())


def test_wrong_arguments_say_what_to_pass() -> None:
    program = ps.program(net(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    state = program.init()
    with pytest.raises(StateError, match="a dict, not a TrainState"):
        ps.summary(program, {})  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"ps\.full"):
        ps.summary(program, state._replace(placement=((),)))
    with pytest.raises(StateError, match="halted"):
        ps.summary(program, state._replace(halted=state.halted + 1), IMAGES)
    with pytest.raises(ConfigError, match="compiled.*before compile_program"):
        ps.summary(ps.compile_program(program), state, IMAGES)
