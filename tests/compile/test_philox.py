"""The random state that attention kernels return: inductor writes nothing into its memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep.compile.cpu import backend as backend_
from purestep.compile.inductor_fixes import philox

pytestmark = pytest.mark.compile

KEPT = torch.arange(16).reshape(4, 4)
"""Memory of an operator's own, as the CPU's is to a kernel on the GPU."""


@pytest.fixture(params=["philox_seed", "philox_offset", "rng_state"])
def attention(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An operator that returns such a state in memory that is not the graph's, and one that reads it."""
    name = f"purestep_{request.param}"
    with library._scoped_library(name, "FRAGMENT") as lib:
        lib.define(f"forward(Tensor x) -> (Tensor output, Tensor {request.param})")
        lib.define("backward(Tensor x, Tensor state) -> Tensor")
        lib.impl("forward", lambda x: (x + 1, KEPT), "CPU")
        lib.impl("backward", lambda x, state: x * state.sum(), "CPU")
        library.register_fake(
            f"{name}::forward", lambda x: (torch.empty_like(x), x.new_empty((4, 4), dtype=torch.int64)), lib=lib
        )
        library.register_fake(f"{name}::backward", lambda x, state: torch.empty_like(x), lib=lib)
        yield getattr(torch.ops, name)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_random_state_of_a_kernel_is_not_written(
    is_fixed: bool, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer of the same size that is needed later would be put where it lies. Where inductor no longer does so,
    `philox` can go."""
    monkeypatch.setattr(backend_, "suits", lambda inputs: False)  # as on the GPU
    if not is_fixed:
        monkeypatch.setattr(philox, "fix", lambda graph: None)

    def step(state: dict[str, Tensor], batch: Tensor) -> Any:
        out, random = attention.forward(state["w"] * batch)
        read = attention.backward(out, random)
        count = attention.backward(state["count"] + read.long(), state["count"])
        return {"w": read, "count": count}, {}

    before = KEPT.clone()
    state: Any = {"w": torch.ones(4, 4), "count": torch.zeros(4, 4, dtype=torch.int64)}
    expected, _ = step(state, torch.ones(4, 4))
    new, _ = ps.compile_step(step, options={"force_disable_caches": True})(state, torch.ones(4, 4))
    found = KEPT.clone()
    KEPT.copy_(before)
    assert torch.equal(found, before) == is_fixed
    assert torch.equal(new["w"], expected["w"])


def efficient(q: Tensor, mask: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, mask, True, 0.1)


def flash(q: Tensor, mask: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.1)


def cudnn(q: Tensor, mask: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.1)


@pytest.mark.parametrize(("kernel", "states"), [(efficient, 2), (flash, 2), (cudnn, 2)])
def test_every_attention_kernel_of_torch_is_known(kernel: Callable[..., Any], states: int) -> None:
    def both(q: Tensor, mask: Tensor) -> Any:
        found = [each for each in kernel(q, mask) if isinstance(each, Tensor)]
        whole = [found[0].sum(), *(each + 1 for each in found if each.dtype in (torch.int64, torch.uint64))]
        return [*whole, torch.zeros(6, device=q.device).split([2, 4])[1] + 1]  # of an operator that returns a list

    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 4, 32, 16, device="meta", dtype=torch.float16)
        graph = make_fx(both)(q, torch.empty(2, 4, 32, 32, device="meta", dtype=torch.float16))
    philox.fix(graph.graph)
    graph.graph.lint()
    apart = [node for node in graph.graph.nodes if node.target is torch.ops.purestep.never_reused.default]
    assert len(apart) == states
    for node in apart:
        assert node.args[0].target is operator.getitem
        assert list(node.args[0].users) == [node]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_runs_compiled(precision: str, masked: bool) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.view(4, 32, 4, 16).transpose(1, 2) for part in self.project(x).chunk(3, -1))
            mask = torch.zeros(4, 1, 32, 32, device=x.device, dtype=q.dtype) if masked else None
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
            return found.transpose(1, 2).reshape(4, 32, 64)

    program = ps.program(
        Attention(), ps.supervised(torch.nn.MSELoss()), ps.optim.adamw(1e-3), precision=precision, accumulate=2
    )
    step = ps.compile_step(program.train_step, donate=True)
    state, batch = program.init(device="cuda"), (torch.ones(4, 32, 64).cuda(), torch.ones(4, 32, 64).cuda())
    for _ in range(4):
        state, _ = step(state, batch)
    assert int(state.updates) == 2
