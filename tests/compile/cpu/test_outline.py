"""Stretches of a graph that come again are compiled once; what a step computes stays the same but for rounding."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config, graph
from torch.nn import functional

import purestep as ps
from purestep.compile import fx_passes
from purestep.compile.cpu import backend, graph_key, outline
from purestep.compile.cpu import code_cache as kept

pytestmark = pytest.mark.compile

if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
    pytest.skip("graphs are written in C++ on processors with AVX2 or AVX-512", allow_module_level=True)
if not backend._KNOWN:
    pytest.skip("native code is made with torch 2.13 and later", allow_module_level=True)

wrapper: Any = importlib.import_module("purestep.compile.cpu.cpp_wrapper")  # loads inductor

Function = Callable[..., list[Tensor]]


@pytest.fixture(autouse=True)
def made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code of an earlier test or run."""
    monkeypatch.setattr(kept, "name", lambda *_: None)


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch, no_fallback: None) -> list[str]:
    """The functions that are written, by name; a graph that is compiled without them after all is an error."""
    found: list[str] = []
    true = wrapper.Wrapper.write_function
    monkeypatch.setattr(
        wrapper.Wrapper,
        "write_function",
        lambda self, function: (found.append(function.name), true(self, function))[1],
    )

    return found


def compiled(function: Function, *inputs: Tensor) -> Function:
    """The function as native code."""
    with torch.no_grad(), config.patch(fx_graph_cache=False):
        run, _ = backend.compiled(graph_key.record(function, list(inputs)), options=None)
    return lambda *others: list(run(list(others)))


def written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "outlined", lambda graph: None)


def same(found: list[Tensor], expected: list[Tensor], rounding: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


# --- models -----------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked, self.told = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.asked(self.first(x)).chunk(3, -1))
        x = x + self.told(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.second(x))))


class Convolving(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class Remembering(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            hidden, cell = self.cell(step, (hidden, cell))
        return hidden


class Experts(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(width, 4), nn.LayerNorm(width)
        self.experts = nn.Parameter(torch.randn(4, width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        found = torch.einsum("bti,eio->bteo", self.norm(x), self.experts)
        found = found.gather(2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return x + (weights[..., None] * torch.tanh(found)).sum(2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "attention": (lambda: nn.Sequential(nn.Linear(5, 16), *[Attending() for _ in range(4)]), torch.randn(3, 7, 5), 2),
    "experts": (lambda: nn.Sequential(*[Experts() for _ in range(4)]), torch.randn(3, 7, 16), 2),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), *[Convolving() for _ in range(4)]),
        torch.randn(2, 3, 6, 6),
        1,
    ),
    "dropout": (
        lambda: nn.Sequential(*[nn.Sequential(Attending(), nn.Dropout(0.2)) for _ in range(4)]),
        torch.randn(3, 7, 16),
        2,
    ),
    "memory": (lambda: Remembering(), torch.randn(3, 9, 16), 2),
}
"""A model, a batch for it, and how many functions its step has, at least."""


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_calls_is_the_eager_step(name: str, functions: list[str]):
    make, x, least = MODELS[name]
    torch.manual_seed(0)
    program = ps.program(
        make(),
        ps.supervised(lambda y, _: (y**2).mean()),
        ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.sgd(0.1, momentum=0.9)),
        ema=0.9,
    )
    batches = [(x * (1 + i), torch.zeros(len(x))) for i in range(3)]

    def trained(step: Any) -> list[Tensor]:
        state = program.init()
        for batch in batches:
            state, metrics = step(state, batch)
        return ps.tree.leaves((state, dict(metrics)))

    with config.patch(fx_graph_cache=False):
        found = trained(ps.compile_step(program.train_step, donate=True))
    assert len(functions) >= least
    same(found, trained(program.train_step), rounding=1e-4)


# --- anything that layers may do --------------------------------------------------------------------------------------


def layer_of(seed: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, list[Tensor]]]:
    """A layer of random operations on ``x`` (6, 8), its own vector (32,) and a matrix (8, 8) of all layers: what goes
    on, and what is kept for later, views and several of one tensor among it."""
    choose = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=choose))]

    steps: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        pick(
            lambda x, v, w: torch.tanh(x @ w + v[:8]),
            lambda x, v, w: x * v[8:16].sigmoid() + w[:6],
            lambda x, v, w: torch.softmax(x + v[16:17], -1) @ w.t(),
            lambda x, v, w: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1) * v[3:11],
            lambda x, v, w: torch.where(x > v[0], x.sin(), x.flip(0)),
            lambda x, v, w: torch.cumsum(x, 0) * 0.3 + v.view(4, 8)[1],
            lambda x, v, w: x.sort(-1)[0] + x.amax(0),
            lambda x, v, w: x.gather(-1, x.argsort(-1)) * 0.9,
        )
        for _ in range(9)
    ]
    kept = [
        (
            pick(*range(9)),
            pick(
                lambda x: x,
                lambda x: x.t(),
                lambda x: x[1:3, 2:],
                lambda x: x.sum(),
                lambda x: x.sum(0),
                lambda x: x.sum(0, keepdim=True).expand(6, 8),
                lambda x: x.reshape(-1),
                lambda x: x > 0,
                lambda x: x.argmax(-1),
                lambda x: x.split(4, -1)[1],
                lambda x: x.double().mean(-1),
            ),
        )
        for _ in range(5)
    ]

    def layer(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []
        for step in steps:
            x = step(x, v, w)
            seen.append(x)
        return x, [view(seen[at]) for at, view in kept] + [v[5:9], w.t()]

    return layer


def function_of(seed: int, layers: int = 4) -> Function:
    layer = layer_of(seed)

    def function(x: Tensor, vector: Tensor, w: Tensor) -> list[Tensor]:
        kept: list[list[Tensor]] = []
        for piece in vector.split(32):
            x, found = layer(x, piece, w)
            kept.append(found)
        total = x.sum()
        for found in reversed(kept):  # as a backward pass reads what a forward pass has left
            total = total * 0.5 + sum((each.double().cos().sum() for each in found), torch.zeros(())).float()
        joined = torch.cat([found[0].reshape(-1).double() for found in kept])
        vector.copy_(vector * 0.5 + total)
        return [x, total, joined, *kept[0][:5], kept[1][0], *kept[-1]]

    return function


@pytest.mark.parametrize("seed", [1, 88])  # every step and all but one of the views, in two compiles of ten seconds
def test_calls_of_whatever_layers_do(seed: int, functions: list[str], monkeypatch: pytest.MonkeyPatch):
    x, vector, w = torch.randn(6, 8), torch.randn(4 * 32), torch.randn(8, 8)
    inputs = [x, vector.clone(), w]
    run = compiled(function_of(seed), *inputs)
    assert functions
    found = run(*inputs)
    again = [x, vector.clone(), w]
    repeated = run(*again)
    same([*found, *inputs], [*repeated, *again])
    written_out(monkeypatch)
    others = [x, vector.clone(), w]
    # Other loops are joined: what is computed in vectors of a loop here may be computed one by one there.
    same([*found, *inputs], [*compiled(function_of(seed), *others)(*others), *others], rounding=1e-5)


def twofold(x: Tensor, beside: Tensor, w: Tensor) -> Tensor:
    for _ in range(7):
        x = torch.tanh(x @ w + beside).flip(0) * 0.7
    return x


def wired(layers: int, odd: int) -> Function:
    """Layers that read the first input too, but one, which reads its own twice."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        first = x
        for at in range(layers):
            x = twofold(x, x if at == odd else first, w)
        return [x]

    return function


@pytest.mark.parametrize("odd", [-1, 0, 3, 5])
def test_layers_that_are_wired_otherwise_are_written_out(
    odd: int, functions: list[str], monkeypatch: pytest.MonkeyPatch
):
    inputs = torch.randn(6, 8), torch.randn(8, 8) / 3
    found = compiled(wired(6, odd), *inputs)(*inputs)
    assert len(functions) == 1
    same(found, wired(6, odd)(*inputs), rounding=1e-5)
    monkeypatch.setattr(outline, "_most_common", lambda forms: forms)
    wrong = compiled(wired(6, odd), *inputs)(*inputs)
    assert not torch.allclose(found[0], wrong[0], atol=1e-4)  # the first layer reads its own twice in any case


def test_layers_whose_weights_lie_otherwise_are_written_out(functions: list[str]):
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        first, turned = x, w.t()
        for at in range(9):
            x = twofold(x, first, turned if at > 5 else w)
        return [x]

    inputs = torch.randn(6, 8), torch.randn(8, 8) / 3
    same(compiled(function, *inputs)(*inputs), function(*inputs), rounding=1e-5)
    assert len(functions) == 1


def test_more_layers_are_no_more_functions_or_kernels(functions: list[str], monkeypatch: pytest.MonkeyPatch):
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    kernels: list[str] = []
    true = PythonWrapperCodegen.define_kernel
    monkeypatch.setattr(
        PythonWrapperCodegen,
        "define_kernel",
        lambda self, name, *rest, **more: (kernels.append(name), true(self, name, *rest, **more))[1],
    )
    counts: list[tuple[int, int]] = []  # of functions and of kernels
    for layers in (4, 9):
        kernels.clear()
        functions.clear()
        vector = torch.randn(layers * 32)
        compiled(function_of(0, layers), torch.randn(6, 8), vector, torch.randn(8, 8))
        counts.append((len(functions), len(kernels)))
    assert counts[0] == counts[1]
    assert all(map(all, counts))


def test_functions_are_written_before_the_rest_is_scheduled(functions: list[str], monkeypatch: pytest.MonkeyPatch):
    written: list[list[str]] = []  # when a graph begins to be
    kind: Any = graph.GraphLowering
    true = kind.codegen
    monkeypatch.setattr(kind, "codegen", lambda self: (written.append(list(functions)), true(self))[1])
    x, w = torch.randn(6, 8), torch.randn(8, 8) / 3
    run = compiled(wired(5, -1), x, w)
    same(run(x, w), wired(5, -1)(x, w), rounding=1e-5)
    assert written == [functions]
    assert len(functions) == len(set(functions)) >= 1


def test_a_graph_with_functions_may_hold_constants(functions: list[str], monkeypatch: pytest.MonkeyPatch):
    """The code tells them apart by a hash of each, whether it comes before the layers or after them."""
    texts: list[str] = []
    hashes: list[str] = []
    kind: Any = graph.GraphLowering
    true = kind.codegen
    monkeypatch.setattr(kind, "save_output_code", staticmethod(texts.append))
    monkeypatch.setattr(kind, "codegen", lambda self: (hashes.extend(self.constant_reprs.values()), true(self))[1])
    x, w = torch.randn(6, 8), torch.randn(8, 8) / 3
    for factor in (2.0, 3.0):
        held = factor * torch.arange(96.0).view(2, 6, 8)  # shorter ones are written into the code
        before, after = held[0].clone(), held[1].clone()

        def function(x: Tensor, w: Tensor, before: Tensor = before, after: Tensor = after) -> list[Tensor]:
            return [wired(5, -1)(x * before, w)[0] + after]

        same(compiled(function, x, w)(x, w), function(x, w), rounding=1e-5)
        assert [texts[-1].count(told) for told in hashes[-2:]] == [1, 1]
    assert len(set(hashes)) == 4
    assert functions


def test_the_same_layers_in_two_places_are_one_function(functions: list[str]):
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        (first,) = wired(4, -1)(x, w)
        return wired(4, -1)(first.cumsum(0).sin().cumsum(1), w)

    x, w = torch.randn(6, 8), torch.randn(8, 8) / 3
    same(compiled(function, x, w)(x, w), function(x, w), rounding=1e-5)
    assert len(functions) == len(set(functions)) == 1


def test_few_layers_and_short_ones_are_written_out(functions: list[str]):
    x, w = torch.randn(6, 8), torch.randn(8, 8) / 3
    compiled(wired(2, -1), x, w)
    assert not functions
    compiled(lambda x, w: [twofold(x, x.cos(), w)], x, w)
    assert not functions


def test_an_update_by_large_leaves_is_written_out(functions: list[str], monkeypatch: pytest.MonkeyPatch):
    """Loops alone: each writes the state where it lies; what a function returns is made elsewhere first."""
    tx = ps.optim.adamw(0.1)
    weights = nn.ParameterDict({f"w{at}": torch.randn(4, 4) for at in range(16)})
    start = ps.program(weights, ps.supervised(nn.MSELoss()), tx, ema=0.9).init()
    average = ps.ema.average(0.9)

    def step(state: ps.TrainState, gradients: dict[str, Tensor]) -> tuple[ps.TrainState, ps.Metrics]:
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        params = ps.optim.apply_updates(state.params, updates)
        shadow = average.update(state.ema, params, {}, state.updates)
        return state._replace(params=params, opt_state=opt_state, ema=shadow, updates=state.updates + 1), {}

    gradients = {name: torch.randn(4, 4) for name in weights}

    def updated() -> list[Tensor]:
        with config.patch(fx_graph_cache=False):
            return moved(ps.compile_step(step, donate=True)(start, gradients)[0])

    def moved(state: ps.TrainState) -> list[Tensor]:
        return ps.tree.leaves((state.params, state.opt_state, state.ema))

    expected = moved(step(start, gradients)[0])
    same(updated(), expected, rounding=1e-5)
    assert functions
    functions.clear()
    monkeypatch.setattr(outline, "_MAX_BYTES", 4 * 4 * 4 - 1)
    same(updated(), expected, rounding=1e-5)
    assert not functions


def drawing(kind: str) -> Function:
    """Layers that drop out; one of them may draw by numbers that are computed."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        first = torch.zeros_like(x) + 1.0
        for at in range(7):
            x = twofold(x + torch.rand(6, 8), functional.dropout(first, 0.3), w) * torch.randn(6, 8)
            if kind == "by what was computed" and at == 3:
                x = x + torch.poisson(x.abs())
        return [x, torch.rand(3)]

    return function


@pytest.mark.parametrize("kind", ["by nothing", "by what was computed"])
def test_draws_of_layers_are_given_to_them_in_the_order_of_the_program(
    kind: str, functions: list[str], monkeypatch: pytest.MonkeyPatch
):
    inputs = torch.randn(6, 8), torch.randn(8, 8) / 3

    def drawn(run: Function) -> list[Tensor]:
        torch.manual_seed(1)
        return run(*inputs)

    run, expected = compiled(drawing(kind), *inputs), drawn(drawing(kind))
    assert functions
    same(drawn(run), expected, rounding=1e-5)
    # All of them first, whatever comes between:
    monkeypatch.setattr(outline, "_leading_draws", lambda nodes: dict.fromkeys(without_an_end(nodes)))
    wrong = drawn(compiled(drawing(kind), *inputs))
    assert torch.allclose(wrong[0], expected[0], atol=1e-4) == (kind == "by nothing")


def without_an_end(nodes: Any) -> list[Any]:
    """Every draw that can be made first, those after one that cannot too."""
    true = [
        node for node in nodes if fx_passes.is_draw(node) and not any(s.all_input_nodes for s in node.all_input_nodes)
    ]
    return [each for node in true for each in (*(s for s in node.all_input_nodes if s.op == "call_function"), node)]


def test_what_cannot_be_compiled_in_calls_is_compiled_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(wrapper.Wrapper, "write_call", lambda self, call: 1 / 0)
    inputs = torch.randn(6, 8), torch.randn(8, 8) / 3
    with caplog.at_level("DEBUG", logger="purestep"):
        same(compiled(wired(5, -1), *inputs)(*inputs), wired(5, -1)(*inputs), rounding=1e-5)
    assert "equal layers are compiled one by one" in caplog.text


def test_a_result_that_is_not_where_it_belongs_is_seen(monkeypatch: pytest.MonkeyPatch, functions: list[str]):
    """Whatever keeps results from being made in their places has them copied there."""
    x, vector, w = torch.randn(6, 8), torch.randn(4 * 32), torch.randn(8, 8)
    kind = wrapper.Wrapper
    monkeypatch.setattr(kind, "_destination", lambda self, name: None)
    inputs = [x, vector.clone(), w]
    found = compiled(function_of(1), *inputs)(*inputs)
    assert functions
    written_out(monkeypatch)
    others = [x, vector.clone(), w]
    same([*found, *inputs], [*compiled(function_of(1), *others)(*others), *others], rounding=1e-5)


def test_a_place_in_the_memory_around_a_piece_is_left_alone(functions: list[str]):
    """By `as_strided`, which counts from where the whole begins: a function knows the piece alone."""

    def function(vector: Tensor, x: Tensor) -> list[Tensor]:
        for piece in vector.split(8):
            for step in range(5):
                x = torch.tanh(x + piece).flip(0) * (0.5 + step) + torch.as_strided(piece, (8,), (1,), 3)
        return [x]

    vector, x = torch.randn(6 * 8), torch.randn(3, 8)
    same(compiled(function, vector, x)(vector, x), function(vector, x), rounding=1e-5)
    assert not functions
