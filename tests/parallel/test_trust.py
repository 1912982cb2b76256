"""A program that takes the place of another process sends values, and never code."""

from __future__ import annotations

import pickle
import random
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rigs.parallel.processes import run

from purestep import tree
from purestep.errors import PurestepError, RankError, StateError
from purestep.parallel import processes

Pair = namedtuple("Pair", "x y")
VALUES: dict[str, Callable[[], Any]] = {
    "plain": lambda: [None, 3, -0.5, "text", [1, (2, {"a": None, 7: True})], [], {}],
    "tensors": lambda: {
        "x": torch.arange(6.0).view(2, 3).t(),
        "flags": torch.tensor([True, False]),
        "none": torch.ones(0, 2),
    },
    "a named tuple": lambda: Pair(torch.tensor(1.5, dtype=torch.bfloat16), [np.arange(3), np.float32(0.5)]),
    "one element": lambda: torch.ones(6, 6, dtype=torch.float64)[:, 1][:1],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_arrives_as_it_was_sent(name: str):
    value = VALUES[name]()
    found = processes._read(processes._message(value), 1)
    assert tree.paths(found) == tree.paths(value)
    for left, right in zip(tree.leaves(found), tree.leaves(value), strict=True):
        if isinstance(right, torch.Tensor):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
            assert left.numel() < 2 or left.stride() == right.stride()
        else:
            assert np.array_equal(left, right)


def test_an_object_with_known_attributes_arrives_as_a_namespace():
    found = processes._read(processes._message(SimpleNamespace(tokens=torch.tensor([1, 2]), names=["a", "b"])), 1)
    assert (found.tokens.tolist(), found.names) == ([1, 2], ["a", "b"])


def test_an_object_is_not_sent():
    with pytest.raises(StateError, match="value/0: a builtins.set cannot be stored"):
        processes._message([{1}])
    with pytest.raises(StateError, match="value/0: a sparse_coo tensor cannot be stored"):
        processes._message([torch.eye(3).to_sparse()])


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_bytes_that_are_no_value_are_refused():
    rng = random.Random(0)
    whole = processes._message({"x": torch.ones(3), "n": [1, "a"]}).numpy().tobytes()
    cut = [whole[: rng.randrange(len(whole))] for _ in range(50)]
    for text in (b"", pickle.dumps(Evil()), b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", *cut):
        with pytest.raises(RankError, match="process 1: the process sent no value of purestep"):
            processes._read(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0), 1)


@pytest.mark.parametrize("name", ["annotations", "Any", "printable", "re", "PurestepError"])
def test_the_error_of_another_process_is_one_of_purestep(name: str):
    assert type(processes.error_received((name, "what", "", "", None), rank=1)) is PurestepError


def test_what_a_stranger_pickles_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first, _ = (output.value for output in run("rigs.parallel.hostile:pickled", 2))
    assert "process 1: the process sent no value of purestep" in first
    assert not list(tmp_path.rglob("EXECUTED"))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_on_one_host_a_run_is_not_reached_from_others(address: str):
    for output in run("rigs.parallel.hostile:listening", 2, env={"MASTER_ADDR": address}):
        assert output.value
        assert set(output.value) <= {"0100007F", "00000000000000000000000001000000"}
