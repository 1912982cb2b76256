"""Where tensors begin that outlined functions and kernels of purestep's own are given, and what such functions return:
views of larger buffers, which inductor hands over in boxes where a dimension has one element."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.nn import functional

import purestep as ps
from purestep.compile.cpu import backend, code_cache, cpp_kernel, graph_key, outline

pytestmark = pytest.mark.compile

if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
    pytest.skip("graphs are written in C++ on processors with AVX2 or AVX-512", allow_module_level=True)
if not backend._KNOWN:
    pytest.skip("native code is made with torch 2.13 and later", allow_module_level=True)

wrapper: Any = importlib.import_module("purestep.compile.cpu.cpp_wrapper")  # loads inductor


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch, no_fallback: None) -> list[Any]:
    """The functions that are written. No code of an earlier run is used, and none is given up."""
    found: list[Any] = []
    true = wrapper.Wrapper.write_function

    def written(self: Any, function: Any) -> None:
        found.append(function)
        true(self, function)

    monkeypatch.setattr(wrapper.Wrapper, "write_function", written)
    monkeypatch.setattr(code_cache, "name", lambda *_: None)
    return found


# --- layers, with every dimension of size one in turn -----------------------------------------------------------------


class Attention(nn.Module):
    """Query, key and value are views of one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        parts = self.inner(self.norm(x)).view(rows, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.outer(found.transpose(1, 2).reshape(x.shape))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def net_of(kind: str, width: int, heads: int) -> nn.Module:
    """Layers, or steps in time, that are alike: enough of them for calls of one function."""
    if kind == "gru":
        return Recurrent(nn.GRU(width, width, batch_first=True))
    if kind == "lstm":
        return Recurrent(nn.LSTM(width, width, num_layers=2))
    if kind == "attention":
        return nn.Sequential(*[Attention(width, heads) for _ in range(4)])
    layers = [nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers)


ONE_OF = {  # rows, time, width, heads
    "batch": (1, 5, 4, 2),
    "time": (3, 1, 4, 2),
    "heads": (2, 3, 4, 1),
    "width of a head": (2, 3, 2, 2),
    "features": (2, 5, 1, 1),
}
CASES = {
    torch.float32: [
        *[("attention", one) for one in ONE_OF],
        *[("gru", one) for one in ("batch", "features")],
        *[("lstm", "time"), ("encoder", "time")],
    ],
    torch.float64: [("attention", "batch"), ("attention", "heads"), ("attention", "features"), ("gru", "batch")],
}


OFTEN = [
    (torch.float32, "attention", "batch"),
    (torch.float32, "gru", "features"),
    (torch.float32, "encoder", "time"),
    (torch.float64, "attention", "heads"),
]
"""Each kind and each dtype once; the others are soak tests."""


@pytest.mark.parametrize(
    ("dtype", "kind", "one"),
    [
        pytest.param(dtype, kind, one, marks=pytest.mark.optimized if (dtype, kind, one) in OFTEN else pytest.mark.soak)
        for dtype, cases in CASES.items()
        for kind, one in cases
    ],
)
def test_gradients_are_those_of_eager_with_a_dimension_of_size_one(
    dtype: torch.dtype, kind: str, one: str, functions: list[Any]
):
    rows, time, width, heads = ONE_OF[one]
    torch.manual_seed(0)
    precision: Any = "32-true" if dtype is torch.float32 else "64-true"
    donate = dtype is torch.float64 or kind == "gru"  # it is one graph, so each case is compiled in one way
    net = net_of(kind, width, heads).to(dtype)
    program = ps.program(net, ps.supervised(nn.MSELoss()), ps.optim.sgd(1.0), precision=precision)
    batch = torch.randn(rows, time, width, dtype=dtype), torch.randn(rows, time, width, dtype=dtype)

    def trained(step: Any) -> tuple[dict[str, Tensor], float]:
        state, metrics = step(program.init(), batch)
        before = program.init().params
        return {name: before[name] - new for name, new in state.params.items()}, float(metrics["loss"])

    with config.patch(fx_graph_cache=False):
        found, loss = trained(ps.compile_step(program.train_step, donate=donate))
    assert functions
    expected, eager = trained(program.train_step)
    assert loss == pytest.approx(eager, rel=1e-5)
    tight = 1e-4 if dtype is torch.float32 else 1e-12
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=tight, atol=tight, msg=lambda text, n=name: f"{n}: {text}"
        )


# --- what a function returns ------------------------------------------------------------------------------------------


def pieces_of_a_buffer(x: Tensor, w: Tensor) -> list[Tensor]:
    """Layers that return parts of what they compute: its end, columns of its beginning, and its sum."""
    found: list[Tensor] = []
    for _ in range(4):
        y = torch.tanh(x @ w)
        for _ in range(10):
            y = torch.sin(y) * 1.1 + 0.1
        y = (y @ w.T).unsqueeze(0).expand(2, -1, -1) * w[:2, :1, None]
        x = y[1]
        found += [y.sum(), y[0, :, 3:9], y[1, :, 1:2]]
    return [x, *found]


@pytest.mark.parametrize("rows", [3, 1])
def test_a_result_that_is_part_of_a_buffer_is_copied(rows: int, functions: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Usually functions return whole buffers, and views of them are taken outside. Inductor may return a view of a
    larger one all the same: its place has no room for all of it."""
    monkeypatch.setattr(outline, "_base", lambda node: node)
    x, w = torch.randn(rows, 16), torch.randn(16, 32) / 4
    with torch.no_grad(), config.patch(fx_graph_cache=False):
        run, _ = backend.compiled(graph_key.record(pieces_of_a_buffer, [x, w]), options=None)
    for found, expected in zip(run([x, w]), pieces_of_a_buffer(x, w), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert any(cpp_kernel.is_view(result) for function in functions for result in function.graph_outputs)


# --- addresses --------------------------------------------------------------------------------------------------------


def test_the_address_of_a_view_has_its_offset_in_any_box():
    from torch._inductor import ir

    kinds: Any = ir
    whole = kinds.FixedLayout(torch.device("cpu"), torch.float64, [4, 3], [3, 1])
    part = kinds.FixedLayout(torch.device("cpu"), torch.float64, [1, 3], [3, 1], 6)
    buffer = kinds.InputBuffer(name="weights", layout=whole)
    view = kinds.ReinterpretView(data=kinds.StorageBox(buffer), layout=part)
    for boxed in (view, kinds.StorageBox(view), kinds.TensorBox(kinds.StorageBox(view)), kinds.TensorBox(view)):
        assert cpp_kernel.is_view(boxed)
        assert cpp_kernel.address(boxed) == "(char*)weights.data_ptr() + 48"
    for boxed in (buffer, kinds.StorageBox(buffer), kinds.TensorBox(kinds.StorageBox(buffer))):
        assert not cpp_kernel.is_view(boxed)
        assert cpp_kernel.address(boxed) == "weights.data_ptr()"


def test_what_has_no_memory_has_no_address():
    from torch._inductor import ir

    kinds: Any = ir
    whole = kinds.FixedLayout(torch.device("cpu"), torch.float32, [4, 3], [3, 1])
    buffer = kinds.StorageBox(kinds.InputBuffer(name="weights", layout=whole))
    with pytest.raises(TypeError, match="a PermuteView has no memory"):
        cpp_kernel.address(kinds.TensorBox(kinds.PermuteView(data=buffer, dims=[1, 0])))
