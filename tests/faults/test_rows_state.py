"""Rows 44 and 49 to 51 of the fault matrix: what a state may be made of. Each guard has a control."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp
from rigs.faults.runs import batches, fails, fit, mlp, refused
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import StateError
from purestep.loop import inputs
from purestep.types import Program

KEEP = Program(lambda state, batch: (state, {}))  # a step that leaves every state as it is


def trained(state: Any, folder: Path | None = None) -> Any:
    return fit(state, batches(1), KEEP, epochs=1, snapshots=folder)


# --- row 44 -----------------------------------------------------------------------------------------------------------


def inside_itself(kind: type) -> Any:
    node: Any = kind()
    node.update(again=node) if kind is dict else node.append(node)
    return node


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "set": (lambda: {1}, "x: set is not a tensor"),
    "lambda": (lambda: lambda: 0, "x: function is not a tensor"),
    "module": (tiny_mlp, "x: Sequential is not a tensor"),
    "file": (lambda: sys.__stdin__, "x: TextIOWrapper is not a tensor"),
    "generator": (lambda: (i for i in ()), "x: generator is not a tensor"),
    "object": (object, "x: object is not a tensor"),
    "number": (lambda: 1.0, "x: float is not a tensor"),
    "array": (lambda: torch.ones(2).numpy(), "x: ndarray is not a tensor"),
    "nothing but None": (lambda: None, "there is no tensor in it"),
}


@pytest.mark.row("F44")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_row_44_an_unsupported_leaf(kind: str) -> None:
    make, message = UNSUPPORTED[kind]
    state = {"x": make()} if kind == "nothing but None" else {"w": torch.ones(1), "x": make()}
    refused(StateError, rf"^init_state: {message} \(cure: program.init", lambda: trained(state))


@pytest.mark.row("F44")
def test_row_44_all_bad_paths_in_one_message() -> None:
    bad = {"a": 1, "b": torch.ones(1), "c": {"d": "text"}, "e": (torch.ones(1), {2})}
    refused(
        StateError,
        "^init_state: a: int is not a tensor; c/d: str is not a tensor; e/1: set is not a tensor ",
        lambda: trained(bad),
    )
    for node in (dict, list):
        nested = "^f/.*: the tree contains itself here .cure: pass no dict or list that contains itself"
        refused(StateError, nested, lambda node=node: trained({**bad, "f": inside_itself(node)}))
    deep: Any = torch.ones(1)
    for _ in range(5000):
        deep = [deep]
    refused(StateError, "nested too deeply", lambda: trained(deep))


@pytest.mark.row("F44")
@pytest.mark.parametrize("state", [{}, None, [], tiny_mlp(), 3, "state"], ids=lambda state: type(state).__name__)
def test_row_44_no_state_at_all(state: Any) -> None:
    refused(StateError, r"^init_state: .*program.init\(seed=0\)", lambda: trained(state))


def test_row_44_fails_where_leaves_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_unfit", lambda leaf: "")
    for kind in ("set", "module", "generator", "number"):
        fails(lambda kind=kind: test_row_44_an_unsupported_leaf(kind), AttributeError)


# --- row 49 -----------------------------------------------------------------------------------------------------------


def fit_leaves() -> dict[str, Tensor]:
    grid = torch.arange(6.0).reshape(2, 3)
    return {
        "transposed": grid.t(),
        "every other": torch.arange(6.0)[::2],
        "zero size": torch.ones(0, 3),
        "0-d": torch.tensor(3.5),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "bf16": torch.randn(3).bfloat16(),
        "fp16": torch.randn(3).half(),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "fp8 wide": torch.randn(3).to(torch.float8_e5m2),
        "bool": torch.tensor([True, False]),
        "uint8": torch.tensor([0, 255], dtype=torch.uint8),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "not finite": torch.tensor([torch.nan, torch.inf, -0.0]),
        "parameter": nn.Parameter(torch.randn(2)),
    }


class Tagged(torch.Tensor):
    """A subclass."""


def unfit_leaves() -> dict[str, tuple[Tensor, str]]:
    with warnings.catch_warnings(action="ignore"):  # of torch's, about kinds that it still works on
        return {
            "expanded": (torch.ones(1).expand(3), r"several of its numbers share memory \(strides \[0\]\); .clone\(\)"),
            "overlapping": (torch.ones(5).as_strided((3, 2), (1, 1)), "several of its numbers share memory"),
            "sparse": (torch.eye(2).to_sparse(), "a sparse_coo tensor; dense ones are needed"),
            "rows of a sparse matrix": (torch.eye(2).to_sparse_csr(), "a sparse_csr tensor; dense ones are needed"),
            "quantized": (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized tensor; dense"),
            "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor; dense ones"),
        }


@pytest.mark.row("F49")
def test_row_49_leaves_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    state = fit_leaves()
    assert trained(state, tmp_path).stop_reason == "epochs"
    found = ps.Snapshots(tmp_path, writer=False, strict=True).restore(fit_leaves()).state
    for name, leaf in state.items():
        expected, restored = leaf.detach().resolve_conj(), found[name].detach().resolve_conj()
        assert (restored.dtype, restored.shape, restored.stride()) == (leaf.dtype, leaf.shape, _dense_stride(leaf))
        assert _bytes(restored).equal(_bytes(expected)), name


def _bytes(leaf: Tensor) -> Tensor:
    plain = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _dense_stride(leaf: Tensor) -> tuple[int, ...]:
    """What a tensor of its own like this one has."""
    return torch.empty_like(leaf, device="meta").stride()


@pytest.mark.row("F49")
@pytest.mark.parametrize("kind", list(unfit_leaves()))
def test_row_49_or_are_refused_at_entry(kind: str) -> None:
    leaf, message = unfit_leaves()[kind]
    refused(StateError, f"^init_state: x: {message}", lambda: trained({"w": torch.ones(1), "x": leaf}))


@pytest.mark.row("F49")
def test_row_49_a_subclass_is_refused_where_there_are_snapshots(tmp_path: Path) -> None:
    state, heard = {"w": torch.ones(1), "x": torch.ones(2).as_subclass(Tagged)}, []

    def run() -> None:
        fit(state, batches(1), KEEP, epochs=1, snapshots=tmp_path, callbacks=[heard.append])

    refused(StateError, "^x: a Tagged cannot be stored.*a plain tensor", run)
    assert not heard  # before the first step


@pytest.mark.row("F49")
def test_row_49_a_leaf_on_meta_has_no_values() -> None:
    state = {"w": torch.ones(1, device="meta"), "x": torch.ones(2, device="meta")}
    refused(StateError, "^w: the tensor is on the meta device and has no values", lambda: trained(state))


def test_row_49_fails_where_tensors_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_unfit", lambda leaf: "")
    for kind in unfit_leaves():
        fails(lambda kind=kind: test_row_49_or_are_refused_at_entry(kind), RuntimeError, NotImplementedError)


# --- row 50 -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("F50")
def test_row_50_one_tensor_at_two_paths_is_an_error() -> None:
    shared = torch.ones(3)
    message = "^init_state: target/w and online/w are one tensor .*ps.clone"
    refused(StateError, message, lambda: trained({"online": {"w": shared}, "target": {"w": shared}}))
    refused(StateError, "b and a are one tensor", lambda: trained({"a": shared, "b": shared[:2]}))
    refused(StateError, "two leaves have the path a/b", lambda: trained({"a/b": shared, "a": {"b": shared.clone()}}))
    assert trained({"online": {"w": shared}, "target": {"w": shared.clone()}}).epochs == 1
    assert trained({"a": torch.ones(0), "b": torch.ones(0)}).epochs == 1  # without numbers there is nothing to share


class Tied(nn.Module):
    """An embedding and a head that are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@pytest.mark.row("F50")
def test_row_50_weights_that_a_module_ties_are_saved_once_and_restored_tied(tmp_path: Path) -> None:
    program = ps.program(Tied(), ps.supervised(nn.CrossEntropyLoss()), optim.adamw(0.1))
    tokens = torch.arange(5)
    result = fit(program.init(), [(tokens, tokens)] * 3, program, epochs=1, snapshots=tmp_path)
    stored = ps.Snapshots(tmp_path, writer=False).restore(program.init()).state
    assert list(stored.params) == ["embedding.weight"]
    assert_trees_close(stored, result.state, exact=True)
    module = Tied()
    ps.load_into(module, stored)
    assert module.head.weight is module.embedding.weight
    assert_trees_close(module(tokens), program.bind(result.state)(tokens), exact=True)


def test_row_50_fails_where_nobody_looks_for_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_check_ties", lambda leaves: None)
    fails(test_row_50_one_tensor_at_two_paths_is_an_error)


# --- row 51 -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("F51")
def test_row_51_mixed_devices() -> None:
    """meta stands for a second device."""
    state = mlp().init()
    moved = state._replace(params={**state.params, "2.bias": state.params["2.bias"].to("meta")})
    message = r"^init_state: leaves are on several devices: step on cpu, params/2.bias on meta.*device=\"cuda\""
    refused(StateError, message, lambda: trained(moved))


def test_row_51_fails_where_devices_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_check_devices", lambda leaves: None)
    fails(test_row_51_mixed_devices, NotImplementedError)  # of comparing tensors that hold nothing
