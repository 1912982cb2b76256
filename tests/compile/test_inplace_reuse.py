"""The gradient of a large intermediate result is computed in its memory, though the step also writes the weights."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import codecache
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.virtualized import V
from torch.nn import functional

import purestep as ps
from purestep.compile.cpu import backend, cpp_library
from purestep.compile.inductor_fixes import inplace_reuse

pytestmark = pytest.mark.compile

ROWS, WIDTH = 128, 2048
LARGE = ROWS * WIDTH


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, WIDTH))


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 16, generator=generator), torch.randint(WIDTH, (rows,), generator=generator)


def _smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs.sigmoid(), targets[:, None].expand_as(outputs) / WIDTH)


def _binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, (targets[:, None] % 2).expand_as(outputs).float())


LOSSES = [functional.cross_entropy, _smoothed, _squares, _binary]


def program(loss: Any = functional.cross_entropy) -> ps.Program:
    return ps.program(net(), ps.supervised(loss), ps.optim.adamw(1e-2))


class Written(BaseException):
    """The C++ of a step is complete."""


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The large buffers that are computed in the memory of another one."""
    true, found = KernelArgs.make_inplace, list[str]()

    def made(self: Any, source: str, target: str) -> None:
        if V.graph.get_numel(target) == LARGE:
            found.append(target)
        true(self, source, target)

    monkeypatch.setattr(KernelArgs, "make_inplace", made)
    return found


@pytest.mark.usefixtures("cpu_plugin")
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_in_the_memory_of_the_logits(
    loss: Any, donate: bool, in_place: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise Written

    monkeypatch.setattr(codecache.AotCodeCompiler, "compile", stop)
    made = program(loss)
    with pytest.raises(Written), torch._inductor.config.patch(fx_graph_cache=False):
        ps.compile_step(made.train_step, donate=donate)(made.init(), batch())
    assert in_place


@pytest.mark.usefixtures("cpu_plugin")
@pytest.mark.slow
def test_a_step_needs_the_memory_of_one_tensor_of_logits(in_place: list[str]) -> None:
    """In a thread of its own, whose memory is new; and the numbers are those of the eager step."""
    made = program()
    states, bytes_ = [made.init()], list[int]()

    def train() -> None:
        step = ps.compile_step(made.train_step, donate=True, options={"fx_graph_cache": False})
        for _ in range(3):
            states.append(step(states.pop(), batch())[0])
        bytes_.append(cpp_library.loaded().purestep_held())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert in_place
    assert 0 < bytes_[0] < 2 * LARGE * 4
    expected = made.init()
    for _ in range(3):
        expected, _ = made.train_step(expected, batch())
    for name, value in expected.params.items():
        torch.testing.assert_close(states[0].params[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not inplace_reuse.option(None), reason="inductor of torch 2.11 has no passes over its schedule")
@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_public_entry_of_inductor_has_the_pass_too(
    is_fixed: bool, in_place: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where inductor uses this memory without the pass, `inplace_reuse` can go."""
    monkeypatch.setattr(backend, "suits", lambda inputs: False)
    if not is_fixed:
        monkeypatch.setattr(inplace_reuse, "option", lambda options: {})
    made = program()
    step = ps.compile_step(made.train_step, donate=True, options={"force_disable_caches": True})
    state, expected = made.init(), made.init()
    for _ in range(3):
        state, _ = step(state, batch())
        expected, _ = made.train_step(expected, batch())
    assert bool(in_place) == is_fixed
    for name, value in expected.params.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-4, atol=1e-5)


# --- users ------------------------------------------------------------------------------------------------------------


def dependency(name: str, **fields: bool) -> Any:
    return SimpleNamespace(name=name, **fields)


def left(reads: list[Any], *, is_weak: bool) -> bool:
    """True if a user with these dependencies stays."""
    user = SimpleNamespace(is_weak=is_weak, node=SimpleNamespace(read_writes=SimpleNamespace(reads=reads)))
    buffer: Any = SimpleNamespace(users=[user], get_name=lambda: "a")
    inplace_reuse.without_ordering_users([SimpleNamespace(get_outputs=lambda: [buffer])])
    return bool(buffer.users)


ORDERS, KEEPS, READS = dependency("a", is_fake=True), dependency("a", is_fake=False), dependency("a")


@pytest.mark.parametrize(
    ("reads", "is_weak", "stays"),
    [
        ([ORDERS], True, False),
        ([ORDERS, dependency("b")], True, False),
        ([ORDERS, READS], True, True),
        ([KEEPS], True, True),
        ([ORDERS, KEEPS], True, True),
        ([dependency("b", is_fake=True)], True, True),
        ([], True, True),
        ([READS], False, True),
    ],
)
def test_a_user_that_reads_a_buffer_or_a_view_of_it_stays(reads: list[Any], is_weak: bool, stays: bool) -> None:
    assert left(reads, is_weak=is_weak) is stays


def test_a_pass_of_the_users_own_is_left() -> None:
    own: Callable[[list[Any]], list[Any]] = lambda nodes: nodes  # noqa: E731
    assert inplace_reuse.option({inplace_reuse.OPTION: own}) == {}
    with torch._inductor.config.patch({inplace_reuse.OPTION: own}):
        assert inplace_reuse.option(None) == {}


def test_inductors_cache_knows_the_pass() -> None:
    """It pickles its configuration, and stores no graph compiled with a pass that has no key or cannot be pickled."""
    made = inplace_reuse.option(None)[inplace_reuse.OPTION]
    assert made.uuid()
    assert pickle.loads(pickle.dumps(made)) is made
