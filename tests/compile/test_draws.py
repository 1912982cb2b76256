"""Random numbers of compiled steps: those of the eager step, whatever the layout, read or not.

Inductor itself compiles them: a backend that runs operators one by one hides what it does to draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import purestep as ps
from purestep.compile import lower
from purestep.compile.cpu import backend as backend_
from purestep.compile.cpu import graph_key
from purestep.errors import StepContractError
from purestep.torch_ext import draws

pytestmark = pytest.mark.compile

WAYS = ("native", "front")
"""Purestep's door to inductor, and inductor's own."""

Net = Callable[[Tensor], Tensor]


class Around(nn.Module):
    """A function between two layers, and dropout after it, whose mask tells whether the draws before were all made."""

    def __init__(self, function: Net) -> None:
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.dropout(self.function(self.first(x)), 0.3))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "front":
        monkeypatch.setattr(backend_, "suits", lambda inputs: False)
    else:
        monkeypatch.setattr("purestep.compile.capture.warn_fallback", lambda _, error: pytest.fail(repr(error)))
    return request.param


def same_as_eager(module: nn.Module, way: str, *sizes: tuple[int, ...]) -> None:
    program = ps.program(module, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step)
    state, batch = program.init(3), tuple(torch.randn(size) for size in sizes or ((4, 8), (4, 1)))
    for _ in range(2):
        expected, wanted = program.train_step(state, batch)
        state, found = step(state, batch)
        torch.testing.assert_close(found["loss"].total, wanted["loss"].total, rtol=1e-4, atol=1e-5)
        for name, leaf in expected.params.items():
            torch.testing.assert_close(
                state.params[name], leaf, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def dropped(x: Tensor) -> Tensor:
    """Dropout of every kind, of tensors in every layout; twice of the same one."""
    turned = functional.dropout(x.t().tanh(), 0.5).t() + functional.dropout(x.repeat(1, 2)[:, ::2], 0.3)
    viewed = functional.dropout(x.view(4, 2, 3).transpose(0, 1), 0.3).transpose(0, 1).reshape(4, 6)
    alpha = functional.alpha_dropout(x.t(), 0.4, True).t() + functional.feature_alpha_dropout(x[None], 0.5, True)[0]
    other = functional.dropout(x.double().t(), 0.5).t().float() + functional.dropout(x.t() * 2, 0.5, inplace=True).t()
    heads = x[None, None]
    attended = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)[0, 0]
    twice = functional.dropout(x, 0.5) + functional.dropout(x, 0.5)
    return turned + viewed + alpha + other + attended + twice + functional.dropout1d(x[None], 0.5)[0]


def drawn(x: Tensor) -> Tensor:
    """Numbers of every distribution that a step may draw from."""
    fixed, turned = x.detach(), x.detach().t()
    x = x * torch.rand(4, 6) + torch.randn(6) + torch.randint(5, (4, 6)) + torch.randint(-3, 5, (6,))
    x = (
        x
        + torch.rand_like(turned).t()
        + torch.randn_like(fixed[:, ::2]).repeat(1, 2)
        + torch.randint_like(turned, 7).t()
    )
    x = (
        x * torch.bernoulli(turned.sigmoid()).t()
        + torch.bernoulli(torch.full((4, 6), 0.3, dtype=torch.float64)).float()
    )
    x = x + torch.normal(turned, 1.0).t() + torch.normal(0.0, 2.0, (4, 6)) + torch.normal(0.0, turned.abs()).t()
    x = x + torch.empty(6, 4).t().bernoulli_(fixed.sigmoid()) + torch.empty(6, 4).t().uniform_(-1, 2)
    x = x + turned.clone().exponential_().t() + torch.empty(4, 6).geometric_(0.3)
    x = x + functional.gumbel_softmax(x.t()).t() + functional.rrelu(x.t(), training=False).t()
    return x[:, torch.randperm(6)]


def unread(x: Tensor) -> Tensor:
    functional.dropout(x, 0.5), torch.rand(3), torch.randn_like(x), torch.bernoulli(x.detach().sigmoid())
    torch.randperm(7), torch.normal(x.detach(), 1.0), torch.empty(3).cauchy_(), torch.randint(9, (5,))
    return x


@pytest.mark.optimized
@pytest.mark.parametrize("function", [dropped, drawn, unread])
def test_draws_are_those_of_the_eager_step(function: Net, way: str) -> None:
    same_as_eager(Around(function), way)


class Adapter(nn.Module):
    """Loops of two ranges read one mask; as low-rank adapters do, with dropout, on the layers of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.b = nn.LayerNorm(32), nn.Linear(4, 96, bias=False)
        self.w, self.head = nn.Linear(32, 96).requires_grad_(False), nn.Linear(32, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (self.w(h) + self.b(functional.dropout(h, 0.1)[..., :4])).chunk(3, -1)
        return self.head(q * k + v)


def test_a_mask_is_drawn_before_it_is_read() -> None:
    same_as_eager(Adapter(), "native", (3, 10, 32), (3, 10, 5))


class Turned(nn.Module):
    """Dropout of a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.layer(x).t(), 0.5).t()


def test_both_engines_drop_out_the_same() -> None:
    batch, states = (torch.randn(4, 8), torch.randn(4, 6)), list[Any]()
    module = Turned()
    for engine in ("func", "autograd"):
        program = ps.program(module, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1), engine=engine)
        states.append(program.train_step(program.init(3), batch)[0])
    assert torch.equal(states[0].params["layer.weight"], states[1].params["layer.weight"])


def test_a_step_compiled_by_torch_compile_drops_out_in_batches_of_several_sizes() -> None:
    """Torch's own dropout under `torch.func` refuses sizes that are symbols."""
    program = ps.program(Turned(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    step, state = torch.compile(program.train_step, backend="aot_eager"), program.init()
    for rows in (4, 3, 5, 6):
        state, metrics = step(state, (torch.randn(rows, 8), torch.randn(rows, 6)))
        assert bool(metrics["loss"].total.isfinite())
    assert int(state.updates) == 4


class Encoder(nn.Module):
    """Its dropout runs on transposed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


def test_an_encoder_layer_drops_what_it_drops_in_eager_mode() -> None:
    same_as_eager(Encoder(), "native", (3, 5, 8), (3, 5, 1))


# --- every operator ---------------------------------------------------------------------------------------------------

CALLS: dict[str, Net] = {
    "rand": lambda x: torch.rand(3, 4),
    "rand, float64": lambda x: torch.rand((2, 3), dtype=torch.float64),
    "rand, no generator": lambda x: torch.rand(3, generator=None),
    "randn": lambda x: torch.randn(3, 4),
    "randn, bfloat16": lambda x: torch.randn(9, dtype=torch.bfloat16),
    "randint": lambda x: torch.randint(50, (3, 4)),
    "randint, low": lambda x: torch.randint(-3, 2**40, (5,)),
    "randint, large": lambda x: torch.randint(2**62 + 1, 2**63 - 1, (5,)),
    "randint, uint8": lambda x: torch.randint(0, 9, (5,), dtype=torch.uint8),
    "randint, no generator": lambda x: torch.randint(5, (2,), generator=None),
    "randperm": lambda x: torch.randperm(7),
    "randperm, int32": lambda x: torch.randperm(7, dtype=torch.int32),
    "rand_like": torch.rand_like,
    "rand_like, contiguous": lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randint_like, low": lambda x: torch.randint_like(x, -2, 7, dtype=torch.int64),
    "normal": lambda x: torch.normal(1.0, 2.0, (3, 4)),
    "normal, mean": lambda x: torch.normal(x),
    "normal, deviation": lambda x: torch.normal(0.5, x.abs()),
    "normal, both": lambda x: torch.normal(x, x[0].abs()),
    "normal, a wide deviation": lambda x: torch.normal(x, x.double().abs()),
    "normal, a wide mean": lambda x: torch.normal(x.double(), x.abs()),
    "bernoulli": torch.bernoulli,
    "bernoulli, p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(),
    "bernoulli_, p": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_, tensor": lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int16).random_(),
    "random_, to": lambda x: torch.empty_like(x).random_(9),
    "random_, from": lambda x: torch.empty_like(x).random_(-4, 9),
    "exponential_": lambda x: torch.empty_like(x).exponential_(0.5),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "gumbel": lambda x: functional.gumbel_softmax(x.contiguous()),
}


def assert_as_in_eager_mode(call: Net) -> None:
    """A trace draws by purestep's operators alone; its result is eager mode's, number by number."""
    x = torch.linspace(0.1, 0.9, 24).view(2, 3, 4).permute(2, 0, 1)
    with draws.Draws():
        graph = make_fx(call, tracing_mode="fake")(x)
    random = [node.target for node in graph.graph.nodes if torch.Tag.nondeterministic_seeded in _tags(node)]
    assert random
    assert all(operator.namespace == "purestep" for operator in random), random
    results = list[Tensor]()
    for function in (call, graph):
        torch.manual_seed(4)
        results += [function(x), torch.rand(2)]
    for expected, found in zip(results[:2], results[2:], strict=True):
        for name in ("dtype", "shape", "device", "layout"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _tags(node: Any) -> Any:
    return getattr(node.target, "tags", ())


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_returns_what_it_returns_in_eager_mode(name: str) -> None:
    assert_as_in_eager_mode(CALLS[name])


Described = list[tuple[Any, ...]]


def drawn_by(way: str, names: Sequence[str] = tuple(CALLS)) -> tuple[Described, list[float]]:
    """Dtype, shape, strides, device and layout of the result of every operator in a step, and a number for its values.
    Of an ensemble, of its second member."""
    described: Described = []

    def objective(model: Any, batch: Tensor) -> ps.Loss:
        x = model(batch).detach().sigmoid().view(2, 3, 4).permute(2, 0, 1)
        described.clear()
        found = dict[str, ps.Mean]()
        for name in names:
            value = CALLS[name](x)
            described.append((name, value.dtype, value.shape, value.stride(), value.device, value.layout))
            places = torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape)
            digest = (value.double() / (1 + value.double().abs()) * places).sum().float()
            found[name] = ps.Mean(digest, torch.ones(()))
        return ps.Loss(model(batch).square().mean(), len(batch), found)

    torch.manual_seed(0)
    whole, kind, graph = ps.program, way.split()[0], way.endswith("graph")
    program = whole(nn.Linear(8, 12), objective, ps.optim.sgd(0.0), microbatches=2 if kind == "microbatches" else 1)
    batch = torch.linspace(-1, 1, 32).view(4, 8) if kind == "microbatches" else torch.linspace(-1, 1, 16).view(2, 8)
    state: Any = program.init(5)
    if kind == "ensemble":
        program = ps.ensemble(program, 2)
        state = program.init(seeds=[4, 5])
    program = ps.compile_program(program, backend="eager") if graph else program
    assert program.eval_step is not None
    metrics = program.eval_step(state, batch) if kind == "evaluation" else program.train_step(state, batch)[1]
    totals = [metrics[name].total for name in names]
    return described, [float(total[1] if kind == "ensemble" else total) for total in totals]


@pytest.mark.parametrize("kind", ["step", "microbatches", "evaluation"])
def test_every_draw_of_a_graph_is_that_of_eager_mode(kind: str) -> None:
    expected, numbers = drawn_by(kind)
    found, others = drawn_by(f"{kind} graph")
    assert found == expected
    assert others == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("way", ["ensemble", "ensemble graph"])
def test_every_draw_of_a_member_is_that_of_the_member_alone(way: str) -> None:
    names = [name for name in CALLS if "randperm" not in name]
    expected, numbers = drawn_by("step", names)
    found, others = drawn_by(way, names)
    assert [each[:3] + each[4:] for each in found] == [each[:3] + each[4:] for each in expected]
    assert others == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("fault", ["another dtype", "another order", "no rule"])
def test_a_fault_in_the_table_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true: Any = draws.DRAWN
    if fault == "another dtype":
        monkeypatch.setattr(
            draws, "_bound", lambda func, args, kwargs: {**true_bound(func, args, kwargs), "dtype": None}
        )
    elif fault == "another order":
        monkeypatch.setattr(draws, "DRAWN", lambda fill, size, stride, *given: true(fill, size, stride[::-1], *given))
    else:
        monkeypatch.setattr(draws, "_NEW", {})
    with pytest.raises(AssertionError):
        assert_as_in_eager_mode(CALLS["randint"])


true_bound = draws._bound

SAMPLERS: dict[str, Net] = {
    "multinomial": lambda x: x + torch.multinomial(x.detach().abs(), 2)[:, :1],
    "poisson": lambda x: torch.poisson(x.detach().abs()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5.0), x.detach().sigmoid()),
    "_standard_gamma": lambda x: torch.distributions.Gamma(x.abs() + 1, x.abs() + 1, validate_args=False).rsample(),
    "_sample_dirichlet": lambda x: torch.distributions.Dirichlet(x.detach().abs() + 1, validate_args=False).sample(),
    "rrelu_with_noise": lambda x: functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_sampler_is_refused_with_the_line_and_the_cure(name: str) -> None:
    program = ps.program(Around(SAMPLERS[name]), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batch = torch.randn(4, 8), torch.randn(4, 1)
    program.train_step(program.init(), batch)
    with pytest.raises(ps.errors.StepContractError, match=f"draws with aten::{name}.*draw in the loader") as caught:
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), batch)
    assert "test_draws.py:" in caught.value.where


def test_a_sampler_of_an_ensemble_is_refused_too() -> None:
    program = ps.ensemble(ps.program(Around(SAMPLERS["poisson"]), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1)), 2)
    with pytest.raises(ps.errors.StepContractError, match="draws with aten::poisson"):
        ps.compile_step(program.train_step, backend="aot_eager")(program.init(), (torch.randn(4, 8), torch.randn(4, 1)))


def test_fit_trains_a_model_with_another_sampler_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purestep.loop.train_call.data", SimpleNamespace(device_of=lambda state: torch.device("cuda")))
    program = ps.program(nn.Sequential(nn.Linear(8, 1), nn.RReLU()), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="aten::rrelu_with_noise") as caught:
        found = ps.fit(program.init(), batches, program, epochs=1, compile="auto", progress=False)
    assert len(caught) == 1
    expected = ps.fit(program.init(), batches, program, epochs=1, compile=False, progress=False)
    assert torch.equal(found.state.params["0.weight"], expected.state.params["0.weight"])


def test_code_of_a_faulty_step_is_not_found_again() -> None:
    """The key of the code is the text of its operations: purestep's draws change it."""
    x = torch.randn(4, 6)

    def function(value: Tensor) -> list[Tensor]:
        return [functional.dropout(value, 0.5)]

    def replaced(value: Tensor) -> list[Tensor]:
        with draws.Draws():
            return function(value)

    before, after = (graph_key.lines(make_fx(each, tracing_mode="fake")(x)) for each in (function, replaced))
    assert "aten::bernoulli_" in "".join(before)
    assert "purestep::drawn" in "".join(after)
    assert "aten::bernoulli_" not in "".join(after)


# --- rounding ---------------------------------------------------------------------------------------------------------


def _into_a_slice(w: Tensor) -> Tensor:
    low = torch.zeros(64, dtype=torch.bfloat16)
    low[8:40] = w[8:40]
    return (low * 1.3).float()


def _equal_layers(w: Tensor) -> Tensor:
    for _ in range(4):
        w = (w.bfloat16() * 1.01 * 1.03).float() * 1.1
    return w


ROUNDED: dict[str, Net] = {
    "bfloat16": lambda w: w.bfloat16().float(),
    "float16": lambda w: w.half().float(),
    "float64 and back": lambda w: w.double().bfloat16().double().float(),
    "a view between": lambda w: w.bfloat16().view(8, 8).t().contiguous().t().reshape(-1).float(),
    "arithmetic between": lambda w: (w.bfloat16() * 3).abs().float(),
    "promoted": lambda w: torch.zeros_like(w) + w.bfloat16(),
    "float8": lambda w: w.to(torch.float8_e4m3fn).float(),
    "in place": lambda w: w.bfloat16().mul_(1.7).mul_(1.3).relu_().float(),
    "into a slice": _into_a_slice,
    "parts": lambda w: torch.stack(w.half().view(2, 32).mul(1.1).unbind(0), 1).reshape(-1).flip(0).float(),
    "an operator without torch's tag": lambda w: functional.hardswish(w.bfloat16()).float(),
    "a gradient": lambda w: torch.func.grad(lambda x: ((x.bfloat16() * 1.7).sigmoid().float() ** 2).sum())(w),
    "equal layers": _equal_layers,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_cast_down_and_up_is_rounded(name: str, way: str) -> None:
    if way == "front" and name not in ("bfloat16", "arithmetic between"):
        pytest.skip("the same settings as the others")
    w = torch.randn(64)

    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        return {"w": state["w"] + ROUNDED[name](x)}, {}

    found, _ = ps.compile_step(step)({"w": torch.zeros(64)}, w)
    assert torch.equal(found["w"], ROUNDED[name](w))


def test_a_setting_of_the_caller_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round everywhere, or nowhere, whatever the step casts."""
    w, low = torch.randn(64), torch.randn(64).bfloat16()

    def casts(state: dict[str, Tensor], x: Tensor) -> Any:
        return {"w": state["w"] + (x.bfloat16() * 3).abs().float()}, {}

    def stays(state: dict[str, Tensor], x: Tensor) -> Any:
        return {"w": state["w"] + (x * 1.7 * 1.3)}, {}

    for step, x, rounds in ((casts, w, False), (stays, low, True)):
        options = {"emulate_precision_casts": rounds}
        found, _ = ps.compile_step(step, options=options)({"w": torch.zeros_like(x)}, x)
        assert torch.equal(found["w"], step({"w": torch.zeros_like(x)}, x)[0]["w"]) == rounds


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_precision_of_the_program_keeps_inductors_way_with_casts(
    precision: str, monkeypatch: pytest.MonkeyPatch, cpu_plugin: None
) -> None:
    seen = list[bool]()

    class Enough(BaseException):
        """The way is chosen: the graph need not be compiled."""

    def made_of(*_: Any, **__: Any) -> Any:
        seen.append(inductor_config.emulate_precision_casts)
        raise Enough

    monkeypatch.setattr(lower, "compiled", made_of)
    net = nn.Sequential(
        nn.Linear(8, 8),
        nn.GELU(),
        nn.LayerNorm(8),
        nn.Dropout(0.1),
        nn.TransformerEncoderLayer(8, 2, 8),
        nn.Linear(8, 2),
    )
    program = ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.adamw(1e-2), precision=precision, ema=0.9)
    step = ps.compile_step(program.train_step, options={"force_disable_caches": True})
    with pytest.raises(Enough):
        step(program.init(), (torch.randn(4, 3, 8), torch.randn(4, 3, 2)))
    assert seen == [False]


def test_a_distribution_that_looks_at_its_arguments_is_refused_with_the_cure_that_works() -> None:
    def objective(checks: bool) -> Any:
        def compute(model: Any, x: torch.Tensor) -> ps.Loss:
            drawn = torch.distributions.Normal(model(x), 1.0, validate_args=checks).rsample()
            return ps.Loss(drawn.square().mean(), len(x))

        return compute

    for checks in (True, False):  # Dynamo, once it is loaded, changes torch's default to False.
        program = ps.program(torch.nn.Linear(4, 3), objective(checks), ps.optim.sgd(0.1))
        step = ps.compile_step(program.train_step, backend="aot_eager")
        if checks:
            with pytest.raises(StepContractError, match=r"reads the value .*cure: pass validate_args=False"):
                step(program.init(), torch.rand(8, 4))
            continue
        eager, compiled = (
            f(program.init(), torch.rand(8, 4).fill_(0.5))[1]["loss"] for f in (program.train_step, step)
        )
        assert float(eager) == pytest.approx(float(compiled), rel=1e-6)
