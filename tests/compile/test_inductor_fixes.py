"""Small work-arounds: without each, the same graph does not compile, or computes a scalar again and again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

import purestep as ps
from purestep.compile import inductor_fixes
from purestep.compile.cpu import backend as backend_
from purestep.compile.inductor_fixes import permutations, scalar_views

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_random_permutation_is_an_index(is_fixed: bool) -> None:
    """As in mixup. `torch.compile` of the line alone fails with torch 2.13, too. Where no supported torch fails,
    `permutations` can go."""
    is_right = is_fixed or TorchVersion(torch.__version__) >= TorchVersion("2.14")

    def mixed(x: Tensor) -> Tensor:
        return x[torch.randperm(8)]

    graph = make_fx(mixed, tracing_mode="fake")(torch.arange(8.0))
    inductor: Any = torch._inductor
    inductor_fixes.options({})  # registers what a graph calls
    if is_fixed:
        permutations.fix(graph.graph)
        graph.recompile()
    with config.patch(fallback_random=True):
        if not is_right:
            with pytest.raises(Exception, match="inputs to pattern"):
                inductor.standalone_compile(graph, [torch.arange(8.0)])
            return
        made = inductor.standalone_compile(graph, [torch.arange(8.0)])
    assert sorted(made(torch.arange(8.0)).tolist()) == list(range(8))


@pytest.mark.parametrize("door", ["own", "front"])
def test_a_step_shuffles_its_batch(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if door == "front":
        monkeypatch.setattr(backend_, "suits", lambda inputs: False)

    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        return {"w": state["w"] + x[torch.randperm(8)]}, {"loss": x.sum()}

    state, _ = ps.compile_step(step, donate=True)({"w": torch.zeros(8)}, torch.arange(8.0))
    assert sorted(state["w"].tolist()) == list(range(8))


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_scalar_is_computed_once(is_fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the bias correction of Adam, which every parameter reads."""
    monkeypatch.setattr(backend_, "suits", lambda inputs: False)
    if not is_fixed:
        monkeypatch.setattr(scalar_views, "fix", lambda graph: None)

    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        count = state["count"] + 1
        rate = 1 - 0.9**count
        return {name: leaf @ leaf / rate if leaf.dim() else count for name, leaf in state.items()}, {"loss": x.sum()}

    state = {f"w{size}": torch.ones(size, size) for size in range(2, 8)} | {"count": torch.tensor(0.5)}
    compiled = ps.compile_step(step, options={"force_disable_caches": True, "cpp_wrapper": False})
    _, code = run_and_get_code(compiled, state, torch.ones(3))
    assert ("".join(code).count("pow(") == 1) == is_fixed


@pytest.mark.skipif(TorchVersion(torch.__version__) < TorchVersion("2.13"), reason="inductor moves draws to readers")
def test_draws_are_in_the_order_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the second one is read first."""
    monkeypatch.setattr(backend_, "suits", lambda inputs: False)

    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        first, second = torch.rand(4), torch.rand(4)
        once = state["w"] * second
        return {"w": once + first, "v": state["v"] - first}, {"loss": once.sum() + x.sum()}

    state = {"w": torch.ones(4), "v": torch.ones(4)}
    torch.manual_seed(0)
    expected, _ = step(state, torch.ones(3))
    torch.manual_seed(0)
    found, _ = ps.compile_step(step)(state, torch.ones(3))
    torch.testing.assert_close(found, expected)
