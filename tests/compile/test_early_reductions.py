"""Losses and metrics come before the backward pass: what they are made of does not live through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import purestep as ps
from purestep.compile import fx_passes
from purestep.compile.cpu import backend as backend_
from purestep.compile.inductor_fixes import early_reductions, inplace_reuse
from purestep.torch_ext import tracing
from purestep.types import Loss, Program

pytestmark = pytest.mark.compile

ROWS, CLASSES = 64, 2048


def own(model: Any, batch: Any, *context: Any) -> Loss:
    inputs, classes = batch
    out = model(inputs)
    losses = functional.cross_entropy(out, classes, reduction="none")
    kept = (classes != 3).float()
    entropy = -(out.softmax(1) * out.log_softmax(1)).sum().detach()
    return Loss((losses * kept).sum() / kept.sum(), kept.sum(), {"entropy": ps.metrics.as_mean(entropy, len(out))})


def squares(out: Tensor, classes: Tensor) -> Tensor:
    return functional.mse_loss(out, functional.one_hot(classes, CLASSES).to(out.dtype))


def logistic(out: Tensor, classes: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(out, functional.one_hot(classes, CLASSES).to(out.dtype))


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "cross entropy": lambda: ps.supervised(nn.CrossEntropyLoss()),
    "and accuracy": lambda: ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy}),
    "smoothed": lambda: ps.supervised(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "squares": lambda: ps.supervised(squares),
    "logistic": lambda: ps.supervised(logistic),
    "own": lambda: own,
}


def program(objective: str, **options: Any) -> Program:
    torch.manual_seed(0)
    tx = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.sgd(0.1))
    return ps.program(nn.Linear(16, CLASSES, bias=False), OBJECTIVES[objective](), tx, **options)


def batch() -> Any:
    return torch.randn(ROWS, 16), torch.arange(ROWS)


def logits_of(graph: torch.fx.Graph) -> Any:
    """The forward product."""
    return next(node for node in graph.nodes if node.target is torch.ops.aten.mm.default)


def backward_of(graph: torch.fx.Graph) -> Any:
    """The product that makes a gradient."""
    return [node for node in graph.nodes if node.target is torch.ops.aten.mm.default][1]


def readers(node: Any) -> Iterator[Any]:
    """What reads a tensor from memory: what is not computed in a loop of its reader."""
    seen, waiting = set[Any](), [node]
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if early_reductions._is_fused(user) and fx_passes.size(user) > 1:
                waiting.append(user)
            yield user


def traced(made: Program) -> torch.fx.Graph:
    state, (inputs, classes) = made.init(), batch()
    leaves, treedef = ps.tree.flatten(state)

    def step(*given: Tensor) -> Any:
        new, metrics = made.train_step(ps.tree.unflatten(treedef, list(given[:-2])), given[-2:])
        return ps.tree.leaves((new, metrics))

    with tracing.capturing(), torch.no_grad():
        graph = make_fx(step, decomposition_table=select_decomp_table(), tracing_mode="fake")(*leaves, inputs, classes)
    graph.graph.eliminate_dead_code()
    return graph.graph


@pytest.mark.parametrize("objective", list(OBJECTIVES))
@pytest.mark.parametrize("late", [False, True], ids=["as traced", "as late as can be"])
def test_nothing_reads_the_logits_once_their_gradient_is_there(objective: str, late: bool) -> None:
    graph = traced(program(objective))
    if late:  # as a partitioner of torch leaves it: every node right before its first reader
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and node.users:
                order = {each: index for index, each in enumerate(graph.nodes)}
                min(node.users, key=lambda user: order[user]).prepend(node)
        graph.lint()
    early_reductions.fix(graph)
    graph.lint()
    at = {node: index for index, node in enumerate(graph.nodes)}
    gradient = at[backward_of(graph)]
    read = list(readers(logits_of(graph)))
    reduced = [node for node in read if early_reductions._is_a_loop(node) or fx_passes.size(node) == 1]
    scalars = [node for node in reduced if fx_passes.size(node) == 1]
    assert scalars or objective == "smoothed"  # it adds up sums of rows
    assert all(at[node] < gradient for node in reduced)
    held = [node for node in graph.nodes if node.target is torch.ops.purestep.computed_after.default]
    assert held, "the gradient does not wait for the loss"
    assert all(fx_passes.size(node.args[1]) == 1 for node in held)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["native code", "the front door"])
@pytest.mark.parametrize("objective", ["and accuracy"])
def test_numbers_are_those_of_eager(objective: str, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if through == "the front door":
        monkeypatch.setattr(backend_, "suits", lambda inputs: False)
    made = program(objective)
    step, state, given = ps.compile_step(made.train_step, donate=True), made.init(), batch()
    other = made.init()
    for _ in range(3):
        state, metrics = step(state, given)
        other, expected = made.train_step(other, given)
    for name, mean in expected.items():
        torch.testing.assert_close(metrics[name].compute(), mean.compute(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.params["weight"], other.params["weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_fixed", [True, False])
def test_without_it_a_metric_of_the_logits_takes_memory_of_their_size(
    is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where inductor no longer lets the metric wait, `early_reductions` can go."""
    monkeypatch.setattr(backend_, "suits", lambda inputs: False)
    if not is_fixed:
        monkeypatch.setattr(early_reductions, "fix", lambda graph: None)
    made = program("own")
    options = {"force_disable_caches": True, "cpp_wrapper": False}
    step = ps.compile_step(made.train_step, donate=True, options=options)
    _, code = run_and_get_code(step, made.init(), batch())
    assert "".join(code).count(f"empty_strided_cpu(({ROWS}, {CLASSES})") == (2 if is_fixed else 3)


def test_a_norm_that_its_gradient_waits_for_stays_where_it_is() -> None:
    """Fused with what makes the gradient; and a small step is not changed at all."""
    graph = traced(program("cross entropy"))
    before = [node.name for node in graph.nodes if "linalg_vector_norm" in node.name or "pow" in node.name]
    early_reductions.fix(graph)
    after = [node for node in graph.nodes if node.target is torch.ops.purestep.computed_after.default]
    assert all(node.args[1].name not in before for node in after)
    made = ps.program(nn.Linear(16, 4), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    small = traced(made)
    nodes = [node.name for node in small.nodes]
    early_reductions.fix(small)
    assert [node.name for node in small.nodes] == nodes


@pytest.mark.cuda
@pytest.mark.skipif(not inplace_reuse.option(None), reason="inductor of torch 2.11 has no passes over its schedule")
def test_the_peak_is_no_higher_than_by_hand() -> None:
    def peak(call: Callable[[], Any]) -> int:
        call()
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    logits, rows = 2**25, 2**11
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, logits // rows, bias=False)).cuda()
    given = torch.zeros(rows, 64, device="cuda"), torch.zeros(rows, dtype=torch.long, device="cuda")
    before = torch.cuda.memory_allocated()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    @torch.compile
    def loss(inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(model(inputs), classes)

    def by_hand() -> None:
        loss(*given).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    hand = peak(by_hand) - before
    made = ps.program(model, ps.supervised(nn.CrossEntropyLoss()), ps.optim.adamw(1e-3))
    # The rehearsal holds all memory of what it records, to compute it again.
    step = ps.compile_step(made.train_step, donate="init", cuda_graph=False)
    states = [made.init(device="cuda")]
    before = torch.cuda.memory_allocated()
    whole = peak(lambda: states.append(step(states.pop(), given)[0])) - before
    assert whole < hand + logits * 4 // 2
