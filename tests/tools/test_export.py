"""Weights in files and modules: keys, ties, views, what is left out, and nothing half done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saving import file_size_limit
from torch import Tensor, nn

import purestep as ps
from purestep import errors
from purestep.ema import EmaState
from purestep.model.functional import template, tensors
from purestep.tools.export import export_weights, load_into, weights
from purestep.types import Empty, Program, Static, TrainState

OFF = Empty()


class Tied(nn.Module):
    """A tie, a frozen parameter, a buffer in and one out of the state_dict, an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("cache", torch.randn(4), persistent=False)


def made(module: nn.Module, ema: EmaState | Empty = OFF, objective: nn.Module | None = None):
    """A program as far as exports need one, and the state of this module."""
    names = template(module, objective=objective).names
    static = Static(names.params, names.frozen, names.ties, names.persistent, *[None] * (len(Static._fields) - 4))
    params, frozen, buffers = tensors(module, objective)
    empty = {field: Empty() for field in ("opt_state", "scaler", "accum", "halted")}
    zero = torch.tensor(0)
    state = TrainState(
        step=zero,
        updates=zero,
        params=params,
        frozen=frozen,
        buffers=buffers,
        ema=ema,
        key=torch.zeros(2).long(),
        **empty,
    )
    return Program(lambda state, batch: (state, {}), static=static), state


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pth"])
def test_the_file_is_the_modules_state_dict(tmp_path, suffix):
    module = Tied()
    path = tmp_path / f"weights.{suffix}"
    export_weights(path, *made(module))
    found = load_file(path) if suffix == "safetensors" else torch.load(path, weights_only=True)
    assert "head.weight" in found
    assert "cache" not in found
    assert_equal(found, dict(module.state_dict()))
    fresh = Tied()
    fresh.load_state_dict(found)
    assert_equal(dict(fresh.state_dict()), dict(module.state_dict()))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_averaged_weights_in_the_parameters_dtype(tmp_path):
    module = Tied().to(torch.bfloat16)
    params, _, buffers = tensors(module)
    shadow = {name: p.float() + 1 for name, p in params.items()}
    program, state = made(module, EmaState(shadow, Empty()))
    found = weights(program, state, "ema")
    assert found["head.weight"].dtype == torch.bfloat16
    assert torch.equal(found["head.weight"], shadow["embed.weight"].bfloat16())
    assert torch.equal(found["norm.running_mean"], module.norm.running_mean)
    averaged = {name: (b + 2).float() if b.is_floating_point() else b for name, b in buffers.items()}
    program, state = made(module, EmaState(shadow, averaged))
    assert torch.equal(weights(program, state, "ema")["norm.running_mean"], module.norm.running_mean + 2)


def test_the_objectives_own_tensors_are_left_out(tmp_path):
    module, criterion = nn.Linear(2, 1), nn.BatchNorm1d(1)
    program, state = made(module, objective=criterion)
    assert "objective.weight" in state.params
    assert weights(program, state).keys() == module.state_dict().keys()
    load_into(nn.Linear(2, 1), state)


def test_layouts_that_safetensors_refuses(tmp_path):
    module = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    export_weights(tmp_path / "a.safetensors", *made(module))
    assert_equal(load_file(tmp_path / "a.safetensors"), dict(module.state_dict()))


def test_exports_share_no_memory_with_the_state():
    module = Tied()
    program, state = made(module)
    found = weights(program, state)
    pointers = [value.data_ptr() for value in found.values()]
    assert len(set(pointers)) == len(pointers)
    assert not set(pointers) & {value.data_ptr() for value in module.state_dict().values()}


def test_a_failed_export_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    export_weights(path, *made(nn.Linear(1, 1)))
    before = path.read_bytes()
    monkeypatch.setenv("PURESTEP_FAILPOINT", "files.rename=raise:ENOSPC")
    with pytest.raises(errors.WriteFailed, match=r"a\.pt: could not be written .*No space left"):
        export_weights(path, *made(nn.Linear(9, 9)))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_disk_that_is_full(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    export_weights(path, *made(nn.Linear(1, 1)))
    before = path.read_bytes()
    with file_size_limit(1 << 16), pytest.raises(errors.WriteFailed, match=rf"a\.{suffix}: could not be written"):
        export_weights(path, *made(nn.Linear(300, 300)))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["weights", "weights.bin", "weights.ckpt"])
def test_another_suffix(tmp_path, name):
    with pytest.raises(errors.ConfigError, match=r"names no format \(cure: use the suffix \.safetensors or \.pt\)"):
        export_weights(tmp_path / name, *made(nn.Linear(1, 1)))


def test_views_that_are_not_there(tmp_path):
    program, state = made(nn.Linear(1, 1))
    with pytest.raises(errors.StateError, match="no average"):
        export_weights(tmp_path / "a.pt", program, state, view="ema")
    with pytest.raises(errors.ConfigError, match="view='best'"):
        load_into(nn.Linear(1, 1), state, view="best")
    with pytest.raises(errors.ConfigError, match="a program without static names"):
        export_weights(tmp_path / "a.pt", program._replace(static=None), state)


def test_load_into_a_module():
    source, target = Tied(), Tied()
    _, state = made(source)
    load_into(target, state)
    assert_equal(dict(target.state_dict()), dict(source.state_dict()))
    assert torch.equal(target.cache, source.cache)
    assert target.head.weight is target.embed.weight
    target.embed.weight.data.add_(1)
    assert not torch.equal(target.embed.weight, source.embed.weight)


def test_load_into_casts():
    source, target = nn.Linear(2, 2), nn.Linear(2, 2).double()
    load_into(target, made(source)[1])
    assert target.weight.dtype == torch.float64
    assert torch.equal(target.weight, source.weight.double())


def test_a_module_without_memory_is_refused_and_is_not_needed_after_init():
    module = nn.Linear(2, 1)
    program = ps.program(module, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    state = program.init()
    module.to("meta")  # frees the first weights
    new, _ = program.train_step(state, (torch.ones(4, 2), torch.ones(4, 1)))
    with pytest.raises(errors.StateError, match=r"load_into: weight of the module is on the meta device.*to_empty"):
        load_into(module, new)
    load_into(module.to_empty(device="cpu"), new)
    assert torch.equal(module.weight, new.params["weight"])


def test_load_into_another_module_changes_nothing():
    _, state = made(nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 3)}))
    target = nn.ModuleDict({"first": nn.Linear(2, 2), "list": nn.Linear(2, 3), "extra": nn.Linear(1, 1)})
    target["first"].weight = nn.Parameter(torch.zeros(4, 2))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(errors.Mismatch) as caught:
        load_into(target, state)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0] == "ModuleDict: 7 tensors differ between the state and the module"
    assert "first.weight: [2, 2] in the state, [4, 2] in the module" in lines
    assert "list.weight: in the module only (nearest name: last.weight)" in lines
    assert any(line.startswith("last.bias: in the state only (nearest name: list.bias)") for line in lines)
    assert_equal(dict(target.state_dict()), before)


class Turned(nn.Linear):
    """In version 1 its weights were kept transposed."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def tied() -> nn.Module:
    one = Turned(3, 3)
    return nn.ModuleDict({"a": one, "b": nn.Sequential(one, nn.BatchNorm1d(3))})


@pytest.mark.parametrize("make", [lambda: Turned(3, 3), lambda: nn.Sequential(nn.Linear(3, 3), Turned(3, 3)), tied])
@pytest.mark.parametrize("view", ["params", "ema"])
def test_a_module_with_a_version_takes_its_weights_as_they_are(tmp_path: Path, make: Any, view: str) -> None:
    program = ps.program(make(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1), ema=0.9)
    state = program.init()
    ps.export_weights(tmp_path / "w.pt", program, state, view)
    stored = torch.load(tmp_path / "w.pt", weights_only=True)
    versions = {name: entry.get("version") for name, entry in make().state_dict()._metadata.items()}
    assert {name: entry["version"] for name, entry in stored._metadata.items()} == versions
    module = make()
    module.load_state_dict(stored)
    assert all(torch.equal(value, state.params[name]) for name, value in module.named_parameters())
    other = make()
    ps.load_into(other, state)
    assert all(torch.equal(value, state.params[name]) for name, value in other.named_parameters())


def test_a_safetensors_file_says_the_versions_in_its_metadata(tmp_path: Path) -> None:
    from safetensors import safe_open

    program = ps.program(Turned(3, 3), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    ps.export_weights(tmp_path / "w.safetensors", program, program.init())
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert json.loads(file.metadata()["versions"]) == {"": 2}
