"""A compiled step that cannot be compiled: `fit` goes on in eager, and no state is lost by it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor

import purestep as ps
from purestep.compile import first_run
from purestep.errors import StepContractError
from purestep.types import Program

pytestmark = pytest.mark.compile
fit = partial(ps.fit, progress=False)


def mlp(**options: Any) -> Program:
    return ps.program(
        tiny_mlp(), ps.supervised(torch.nn.CrossEntropyLoss()), ps.optim.sgd(0.1, momentum=0.9), **options
    )


def batches(count: int, rows: int = 8) -> list[Any]:
    return [vector_batch(rows, seed) for seed in range(count)]


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `compile="auto"` compiles; the state only says that it is there."""
    there = SimpleNamespace(device_of=lambda state: torch.device("cuda"))
    monkeypatch.setattr("purestep.loop.compiling.data", there)
    monkeypatch.setattr("purestep.compile.native.suits", lambda inputs, backend: False)
    monkeypatch.setattr("purestep.compile.graphs.guarded", lambda run, tensors: first_run._guarded(run))


def failing_compilers(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A compiler that fails in its own way, when a graph is made or when it is run for the first time."""

    class OwnError(Exception):
        """Of no class that anybody has a list of."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OwnError("ptxas is not there")

    def launched(run: Any) -> Any:
        def call(tensors: list[Tensor]) -> Any:
            tensors[0].fill_(7)  # what a kernel has written before the next one fails
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

        return call

    if how == "a compiler of C++":
        monkeypatch.setattr("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", broken)
        monkeypatch.setattr("torch._inductor.async_compile.AsyncCompile.wait", broken)
    elif how == "inductor":
        monkeypatch.setattr("torch._inductor.graph.GraphLowering.run", broken)
    elif how == "its launch":
        monkeypatch.setattr("purestep.compile.capture._unpacking", launched)


COMPILERS = ["a compiler of C++", "inductor", "its launch"]


@pytest.mark.parametrize("how", COMPILERS)
def test_auto_goes_on_in_eager_whatever_the_compiler_meets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """With the numbers of eager, and one warning for all functions of a program."""
    program = ps.program(torch.nn.Linear(4, 3), ps.supervised(torch.nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    data: Any = {"train": batches(2), "val": batches(1)}
    expected = fit(program.init(), data, program, epochs=1, check_every=0)
    on_cuda(monkeypatch)
    failing_compilers(monkeypatch, how)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what is found in another is not compiled
    with pytest.warns(RuntimeWarning, match="the step cannot be compiled and runs in eager") as warned:
        result = fit(program.init(), data, program, epochs=1, check_every=0)
    told = [str(each.message) for each in warned if "runs in eager" in str(each.message)]
    assert len(told) == 1, told
    assert_trees_close(result.state, expected.state, exact=True)
    assert result.history["val_loss"] == expected.history["val_loss"]


@pytest.mark.parametrize("donate", [True, "init"])
def test_a_graph_that_fails_in_its_first_run_leaves_a_state_that_lives(
    monkeypatch: pytest.MonkeyPatch, donate: Any
) -> None:
    """The second graph of a window: its state is a live one, and some of it has been written."""
    program = mlp(accumulate=2)
    monkeypatch.setattr("purestep.compile.graphs.guarded", lambda run, tensors: first_run._guarded(run))
    step = ps.compile_step(program.train_step, donate=donate, backend="aot_eager")
    state, _ = step(program.init(), batches(1)[0])
    before = ps.clone(state)
    with monkeypatch.context() as patch:
        failing_compilers(patch, "its launch")
        with pytest.raises(StepContractError, match="fails at its first run: ValueError: Pointer argument"):
            step(state, batches(1)[0])
    assert_trees_close(ps.clone(state), before)
    expected, _ = program.train_step(before, batches(1)[0])
    again = ps.compile_step(program.train_step, donate=donate, backend="aot_eager")
    assert_trees_close(ps.clone(again(state, batches(1)[0])[0]), expected)


def test_auto_raises_what_eager_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the model or the batch is no compiler's: there is no warning, which would be an error here."""
    on_cuda(monkeypatch)
    program = mlp()
    wide = [(torch.ones(4, 9), torch.zeros(4, dtype=torch.long))]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(program.init(), wide, program, epochs=1, compile="auto")
    short = ps.program(torch.nn.Linear(4, 1), lambda model, batch: model(batch).mean(), ps.optim.sgd(0.1))
    with pytest.raises(StepContractError, match="not a Loss"):
        fit(short.init(), [torch.ones(2, 4)], short, epochs=1, compile="auto")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("purestep.compile.runner.CompiledStep._stepped", full)
    with pytest.raises(torch.OutOfMemoryError):
        fit(program.init(), batches(1), program, epochs=1, compile="auto")
