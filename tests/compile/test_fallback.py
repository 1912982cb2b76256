"""A compiled step that cannot be compiled: `fit` goes on in eager, and no state is lost by it."""

from __future__ import annotations

import random
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep.compile import as_dict, prepared
from purestep.config import FitConfig
from purestep.errors import StateError, StepContractError
from purestep.loop import train_call
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
    monkeypatch.setattr("purestep.loop.train_call.data", there)
    monkeypatch.setattr("purestep.compile.cpu.backend.suits", lambda inputs: False)


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
        monkeypatch.setattr("purestep.compile.capture._unpacked", launched)


COMPILERS = ["a compiler of C++", "inductor"]


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
def test_a_graph_that_fails_while_it_runs_ends_a_run_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, donate: Any
) -> None:
    """The second graph of a window: its state is a live one, and some of it has been written."""
    program = mlp(accumulate=2)
    step = ps.compile_step(program.train_step, donate=donate, backend="aot_eager")
    state, _ = step(program.init(), batches(1)[0])
    failing_compilers(monkeypatch, "its launch")
    with pytest.raises(ValueError, match="Pointer argument") as met:
        step(state, batches(1)[0])
    assert "in fit: compile=False" in met.value.__notes__[0]
    with pytest.raises(StateError, match="a donated step was overwriting this state in call 2, which failed"):
        _ = state.params
    on_cuda(monkeypatch)
    with pytest.raises(ValueError, match="Pointer argument") as met:
        fit(program.init(), batches(2), program, epochs=1, compile="auto", donate=donate, check_every=0)
    assert any("the state was donated" in note for note in met.value.__notes__) == (donate == "init")


@pytest.mark.parametrize("donate", [True, "init"])
def test_after_a_fallback_an_error_leaves_the_state_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, donate: Any
) -> None:
    """The eager step has written new memory, so that the run saves the state."""
    calls: list[int] = []

    def branching(model: Any, batch: Any) -> ps.Loss:
        calls.append(1)
        if float(batch[0].sum()) > 1e9:  # reads a value: there is no graph
            raise ValueError("a batch of the user's")
        return ps.Loss(model(batch[0]).square().mean(), torch.tensor(8.0))

    on_cuda(monkeypatch)
    program = ps.program(tiny_mlp(), branching, ps.optim.sgd(0.1))
    bad = (torch.full((8, 4), 1e9), torch.zeros(8, dtype=torch.long))
    how: Any = {"epochs": 1, "compile": "auto", "donate": donate, "check_every": 0, "snapshots": tmp_path}
    with pytest.warns(RuntimeWarning, match="runs in eager"), pytest.raises(ValueError, match="of the user's") as met:
        fit(program.init(), [*batches(3), bad], program, **how)
    assert not any("the state was donated" in note for note in met.value.__notes__)
    assert ps.Snapshots(tmp_path, writer=False).steps() == [3]


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

    monkeypatch.setattr("purestep.compile.compiled_step.CompiledStep._call_once", full)
    with pytest.raises(torch.OutOfMemoryError):
        fit(program.init(), batches(1), program, epochs=1, compile="auto")


def _by_closure(factor: list[float]) -> Any:
    return lambda model, batch: ps.Loss((model(batch[0]) * factor[0]).square().mean(), 1.0)


def _by_batch(factor: list[float]) -> Any:
    return lambda model, batch: ps.Loss((model(batch[0]) * batch[1]).square().mean(), 1.0)


def _by_text(factor: list[float]) -> Any:
    return lambda model, batch: ps.Loss((model(batch[0]) * float(batch[2])).square().mean(), 1.0)


@pytest.mark.parametrize("is_evaluation", [False, True])
@pytest.mark.parametrize("read", [_by_closure, _by_batch, _by_text])
def test_auto_goes_on_in_eager_where_a_value_changes_with_each_batch(
    monkeypatch: pytest.MonkeyPatch, read: Any, is_evaluation: bool
) -> None:
    """compile=True raises instead, with the cure."""
    monkeypatch.setattr("purestep.compile.as_settings.compile_program", partial(ps.compile_program, backend="eager"))
    factor, said = [0.0], list[str]()
    program = ps.program(torch.nn.Linear(4, 3), read(factor), ps.optim.sgd(0.1))

    def metrics(made: Program) -> list[float]:
        assert made.init is not None
        state, found = made.init(), list[float]()
        for number in range(20):
            factor[0] = number / 20
            batch = torch.ones(2, 4), number / 20, str(number / 20)
            if is_evaluation:
                assert made.eval_step is not None
                found.append(float(made.eval_step(state, batch)["loss"]))
            else:
                state, row = made.train_step(state, batch)
                found.append(float(as_dict(row)["loss"]))
        return found

    device: Any = SimpleNamespace(type="cuda")
    chosen = prepared(program, device, wanted="auto", donated=False, say=said.append)
    assert metrics(chosen) == pytest.approx(metrics(program))
    assert len(said) == 1
    with pytest.raises(StepContractError, match="changed 17 times.*as a tensor|reads text of the batch"):
        metrics(prepared(program, device, wanted=True, donated=False, say=said.append))


# --- code that depends on values --------------------------------------------------------------------------------------


class Branching(torch.nn.Linear):
    """An `.item()` in an `if`."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return 2 * hidden if hidden.sum().item() > 0 else hidden


class Indexing(torch.nn.Linear):
    """A list indexed by a drawn number, as transforms of detection do."""

    def forward(self, x: Tensor) -> Tensor:
        at = int(torch.empty(1).uniform_(0.0, 2.0).item())
        return super().forward(x) * (0.5, 1.0)[at]


def _ctc(model: Any, batch: Any) -> ps.Loss:
    scores = model(batch[0]).log_softmax(-1).unsqueeze(1).expand(-1, 2, -1)
    lengths = torch.full((2,), len(batch[0])), torch.full((2,), 2)
    return ps.Loss(torch.nn.functional.ctc_loss(scores, torch.ones(2, 2, dtype=torch.long), *lengths), 2.0)


def _gaussian(model: Any, batch: Any) -> ps.Loss:
    mean = model(batch[0])
    return ps.Loss(torch.nn.functional.gaussian_nll_loss(mean, torch.zeros_like(mean), mean.exp()), 1.0)


def _matched(model: Any, batch: Any) -> ps.Loss:
    """DETR's kind: pairs of predictions and targets are found by scipy, on the host."""
    optimize = pytest.importorskip("scipy.optimize")
    predicted, targets = model(batch[0]), torch.eye(3)
    with torch.no_grad():
        rows, columns = optimize.linear_sum_assignment(torch.cdist(predicted, targets).cpu().numpy())
    return ps.Loss((predicted[rows] - targets[columns]).abs().mean(), 1.0)


def _looked_at(name: str) -> Program:
    entropy = ps.supervised(torch.nn.CrossEntropyLoss())
    kinds: dict[str, tuple[type[torch.nn.Module], Any]] = {
        "an if": (Branching, entropy),
        "a drawn index": (Indexing, entropy),
        "ctc_loss": (torch.nn.Linear, _ctc),
        "gaussian_nll_loss": (torch.nn.Linear, _gaussian),
        "a matcher": (torch.nn.Linear, _matched),
    }
    made, objective = kinds[name]
    return ps.program(made(4, 3), objective, ps.optim.sgd(0.1))


LOOKS = ["an if", "a drawn index", "ctc_loss", "gaussian_nll_loss", "a matcher"]


@pytest.mark.parametrize("name", LOOKS)
def test_auto_trains_what_looks_at_values_in_eager_and_says_so_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    program, data = _looked_at(name), batches(3)
    expected = fit(program.init(), data, program, epochs=1, compile=False)
    on_cuda(monkeypatch)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        found = fit(program.init(), data, program, epochs=1, compile="auto")
    told = [str(each.message) for each in met if "runs in eager" in str(each.message)]
    assert [each.count("\n") for each in told] == [0], told
    assert_trees_close(found.state, expected.state, exact=True)


@pytest.mark.parametrize("name", LOOKS)
def test_an_explicit_compile_of_what_looks_at_values_is_our_error_with_a_way_out(name: str) -> None:
    program = _looked_at(name)
    with pytest.raises(StepContractError) as met:
        fit(program.init(), batches(1), program, epochs=1, compile={"backend": "aot_eager"})
    assert "eager mode" in met.value.hint
    assert "torch.compile(program.train_step)" in met.value.hint
    if name == "gaussian_nll_loss":
        assert "torch's gaussian_nll_loss" in met.value.hint
        assert "instead of if" not in met.value.hint


def _branch(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.new_tensor(1.0 if outputs.mean().item() > 0 else 2.0)


def _listed(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.new_tensor(max(outputs.detach().flatten().tolist()))


def _written(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.new_tensor(float(f"{outputs.mean():.3f}"))


def _by_numpy(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.tensor((outputs.detach().numpy() > 0).mean())


def _resized(outputs: Tensor, targets: Tensor) -> Tensor:
    size = int(outputs.abs().sum().item()) + 1
    return torch.nn.functional.interpolate(outputs[None, None], size=(size, 2)).mean()


@pytest.mark.parametrize("metric", [_branch, _listed, _written, _by_numpy, _resized])
def test_a_metric_that_reads_values_is_refused_at_its_line_with_a_cure_that_works(metric: Any) -> None:
    """Whatever torch calls it, and whether its words are those of a read or not."""
    objective = ps.supervised(torch.nn.CrossEntropyLoss(), metrics={"own": metric})
    program = ps.program(torch.nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    state, batch = program.init(), batches(1)[0]
    with pytest.raises(StepContractError) as met:
        ps.compile_step(program.train_step, backend="aot_eager")(state, batch)
    assert "eager mode" in met.value.hint
    assert "torch.compile(program.train_step)" in met.value.hint
    first = metric.__code__.co_firstlineno
    assert met.value.where in [f"{__file__}:{line}" for line in range(first, first + 3)]
    assert "SymIntArrayRef" not in str(met.value)
    program.train_step(state, batch)


def test_an_error_of_torch_in_a_trace_is_ours_with_its_place() -> None:
    program = mlp()
    with pytest.raises(StepContractError, match=r"^a Linear: .* RuntimeError: .*\[4, 9\].*eager mode") as met:
        ps.compile_step(program.train_step, backend="aot_eager")(
            program.init(), (torch.ones(4, 9), torch.zeros(4, dtype=torch.long))
        )
    assert type(met.value.__cause__) is RuntimeError


@pytest.mark.parametrize("kind", ["a wrong shape", "a value that is read", "a size that is read"])
def test_a_failed_capture_leaves_activation_checkpointing_as_it_was(kind: str) -> None:
    """Torch forbids hooks of saved tensors inside `torch.func.grad`."""

    class Net(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if kind == "a value that is read" and x.sum().item() > 1e9:
                return x
            scores = super().forward(x)
            return scores + _resized(scores, scores) if kind == "a size that is read" else scores

    program = ps.program(Net(4, 3), ps.supervised(torch.nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step, backend="aot_eager")
    batch = torch.ones(4, 9 if kind == "a wrong shape" else 4), torch.zeros(4, dtype=torch.long)
    with pytest.raises((StepContractError, RuntimeError)):
        step(program.init(), batch)
    x = torch.ones(3, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3).cos())


def _without_metrics(model: Any, batch: Any) -> ps.Loss:
    return ps.Loss(model(batch[0]).square().mean(), torch.tensor(1.0))


def _more_metrics(model: Any, batch: Any) -> ps.Loss:
    loss = _without_metrics(model, batch)
    return loss._replace(metrics={**loss.metrics, "more": ps.Mean(loss.mean.detach(), torch.tensor(1.0))})


def _counted_metrics(model: Any, batch: Any) -> ps.Loss:
    loss = _without_metrics(model, batch)
    count = torch.tensor(float(len(dict(loss.metrics.items()))))
    return loss._replace(metrics={"count": ps.Mean(count, torch.tensor(1.0))})


@pytest.mark.parametrize("objective", [_without_metrics, _more_metrics, _counted_metrics])
def test_a_loss_without_metrics_is_captured(objective: Any) -> None:
    program = ps.program(torch.nn.Linear(4, 3), objective, ps.optim.sgd(0.1))
    state, batch = program.init(), batches(1)[0]
    new, metrics = ps.compile_step(program.train_step, backend="aot_eager")(state, batch)
    expected, own = program.train_step(state, batch)
    assert_trees_close(ps.clone(new), expected)
    assert metrics.keys() == own.keys()
    assert ps.metrics.compute(metrics) == pytest.approx(ps.metrics.compute(own))


class NumpyMask(torch.nn.Linear):
    """SpecAugment's kind: what is masked is drawn by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        masked = np.random.random(tuple(x.shape)) < 0.3
        return super().forward(x.masked_fill(torch.from_numpy(masked), 0.0))


class LayerDrop(torch.nn.Linear):
    """A layer is left out by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if random.random() < 0.5 else x + 1)


class OneOfNumpys(torch.nn.Linear):
    """A factor is drawn by numpy and used as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(np.random.uniform(0.5, 1.0))


@pytest.mark.parametrize(("made", "whose"), [(NumpyMask, "numpy's"), (LayerDrop, "Python's"), (OneOfNumpys, "numpy's")])
def test_draws_on_the_host_are_never_frozen_in_a_graph(
    monkeypatch: pytest.MonkeyPatch, made: type[torch.nn.Linear], whose: str
) -> None:
    """A compiled step would repeat the mask of its capture at every call, without a word."""
    program, data = ps.program(made(4, 3), ps.supervised(torch.nn.CrossEntropyLoss()), ps.optim.sgd(0.1)), batches(3)
    step = ps.compile_step(program.train_step, backend="aot_eager")
    with pytest.raises(StepContractError, match=f"draws from {whose} global generator.*in eager mode"):
        step(program.init(), data[0])

    on_cuda(monkeypatch)
    ready = train_call.ready_program(program, program.init(), FitConfig(epochs=1))
    with pytest.warns(RuntimeWarning, match=f"runs in eager: .*draws from {whose} global generator"):
        found, _ = ready.train_step(program.init(), data[0])

    def next_with(seed: int, call: int) -> Tensor:
        np.random.seed(seed)
        random.seed(seed)
        at = found._replace(key=ps.rng.advance(found.key, call))
        return ready.train_step(at, data[1])[0].params["weight"]

    weights = [next_with(0, call) for call in range(4)]
    assert torch.equal(weights[0], next_with(1, 0))  # of the state's key alone
    assert any(not torch.equal(weights[0], other) for other in weights[1:])  # each call draws


class Enlarged(torch.nn.Module):
    """By each way that torch decomposes and inductor does not lower."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        super().__init__()
        self.linear, self.modes = torch.nn.Linear(2, 2), modes

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        shaped = {mode: x.unsqueeze(-2) if mode == "trilinear" else x for mode in self.modes}
        larger = [torch.nn.functional.interpolate(each, scale_factor=2, mode=mode) for mode, each in shaped.items()]
        return torch.stack([each.square().mean() for each in larger])


def test_the_variable_ci_does_not_keep_an_operator_from_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor raises for an operator that torch decomposes and it does not lower, where this variable is set."""
    from torch._inductor import config, lowering

    for name in ("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"):
        lowering.lowerings.pop(getattr(torch.ops.aten, name).default, None)  # as in a new process
    monkeypatch.setenv("CI", "1")
    loss = ps.supervised(lambda y, _: y.sum())
    program = ps.program(
        Enlarged(("bilinear", "bicubic", "trilinear")).double(), loss, ps.optim.sgd(0.1), precision="64-true"
    )
    batch = (torch.randn(1, 1, 2, 2, dtype=torch.float64), torch.zeros(1))
    with config.patch(fx_graph_cache=False):
        new, _ = ps.compile_step(program.train_step)(program.init(), batch)
    assert_trees_close(new.params, program.train_step(program.init(), batch)[0].params)
