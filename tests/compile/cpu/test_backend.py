"""What a compiled step brings itself on the CPU: products, attention, sums of rows, and the memory they work in."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, library, nn
from torch._inductor import codecache, config, cpu_vec_isa
from torch.nn import functional

import purestep as ps
from purestep.compile import inductor_fixes
from purestep.compile.cpu import (
    attention,
    backend,
    cpp_kernel,
    embedding_grad,
    gemm,
    graph_key,
    launcher,
    offset_pointers,
    workspace,
)
from purestep.compile.cpu import code_cache as kept
from purestep.errors import StepContractError

if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
    pytest.skip("the kernels are for processors with AVX2 or AVX-512", allow_module_level=True)
if not backend._KNOWN:
    pytest.skip("native code is made with torch 2.13 and later", allow_module_level=True)

wrapper: Any = importlib.import_module("purestep.compile.cpu.cpp_wrapper")  # loads inductor

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code of an earlier test or run: some of these break the kernels, and all look at what inductor is given."""
    monkeypatch.setattr(kept, "name", lambda *_: None)


def compiled(function: Callable[..., list[Tensor]], *inputs: Tensor) -> Callable[..., list[Tensor]]:
    """The function as native code, for tensors like these; called with these where it is given none."""
    with torch.no_grad():
        run, _ = backend.compiled(graph_key.record(function, list(inputs)), options=None)
    return lambda *others: list(run(list(others or inputs)))


def written(function: Callable[..., list[Tensor]], *inputs: Tensor) -> tuple[str, Callable[..., list[Tensor]]]:
    """The graph that inductor is given, as text, and its native code."""
    from torch._inductor import compile_fx

    seen: list[str] = []
    inner = compile_fx.compile_fx_inner

    def look(graph: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(graph.code)
        return inner(graph, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_fx, "compile_fx_inner", look)
        run = compiled(function, *inputs)
    return seen[0], run


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=tolerance, atol=tolerance * 10)


# --- products ---------------------------------------------------------------------------------------------------------

# m, n, k: whole blocks and panels; one of everything; a bit more and less; several times the depth of a panel; more
# rows than are taken at once; columns shared by the threads; so little of k that rows are taken a few at once
SIZES = ((24, 32, 16), (1, 1, 1), (13, 33, 7), (5, 17, 300), (37, 70, 515), (64, 10, 64), (96, 96, 96))
SIZES += ((520, 40, 300), (269, 320, 261), (301, 515, 8), (50, 130, 64))


def operands() -> list[tuple[Tensor, Tensor]]:
    """Every size with rows, columns or neither side by side."""
    found: list[tuple[Tensor, Tensor]] = []
    for m, n, k in SIZES:
        a, b = torch.randn(m, k), torch.randn(k, n)
        turned = (a.t().contiguous().t(), b.t().contiguous().t())
        apart = (torch.randn(m, 2 * k)[:, ::2], torch.randn(k, 3 * n)[:, ::3])
        found += [(a, b), (a, turned[1]), (turned[0], b), turned, apart]
    found += [
        (torch.randn(3, 20, 40), torch.randn(3, 40, 35)),
        (torch.randn(40, 3, 20).permute(1, 2, 0), torch.randn(3, 40, 9)),
    ]
    return found


def all_products(*tensors: Tensor) -> list[Tensor]:
    return [a @ b for a, b in zip(tensors[::2], tensors[1::2], strict=True)]


def test_products_of_any_size_and_strides_on_any_number_of_threads():
    pairs = operands()
    flat = [tensor for pair in pairs for tensor in pair]
    expected = [(a.double() @ b.double()) for a, b in pairs]
    # Views are made inside, so that the graph sees their strides and offsets.
    run = compiled(all_products, *flat)
    with threads(1):
        alone = run()
    with threads(2):
        together = run()
    close(alone, expected)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("at > 0", "false"), ("a += ROWS * k", "a += 0"), ("i * am", "0"), ("p * bn", "0")],
    ids=["forgets what it summed", "the first block again", "the first rows again", "the first panel again"],
)
def test_a_kernel_with_a_fault_is_seen(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch):
    assert right in gemm.KERNEL.source
    broken = gemm.KERNEL._replace(source=gemm.KERNEL.source.replace(right, wrong))
    monkeypatch.setattr(gemm, "KERNEL", broken)
    monkeypatch.setattr(gemm, "VERSION", broken.version)
    cpp_kernel.register.cache_clear()
    try:
        a, b = torch.randn(600, 300).t(), torch.randn(600, 40)
        run = compiled(all_products, a, b)
        with pytest.raises(AssertionError):
            close(run(), [a.double() @ b.double()])
    finally:
        monkeypatch.undo()
        cpp_kernel.register.cache_clear()


def test_which_products_the_kernel_takes():
    a, bias = torch.randn(8, 8), torch.randn(8)

    def function(a: Tensor, bias: Tensor) -> list[Tensor]:
        return [
            torch.addmm(bias, a, a),
            torch.addmm(bias, a, a, beta=2.0),
            a.double() @ a.double(),
            a.bfloat16() @ a.bfloat16(),
        ]

    text, run = written(function, a, bias)
    assert text.count("purestep.product") == 1  # the plain one of float32
    found, expected = run(), function(a, bias)
    close(found[:3], expected[:3])
    close(found[3:], expected[3:], 1e-2)


def test_a_product_of_nothing():
    pairs = [(torch.ones(2, m, k), torch.ones(2, k, n)) for m, k, n in ((0, 4, 5), (4, 0, 5), (4, 5, 0))]

    def function(*tensors: Tensor) -> list[Tensor]:
        given = zip(tensors[::2], tensors[1::2], strict=True)
        return [torch.ops.purestep.product(a, b, "plain", gemm.VERSION) + 1 for a, b in given]

    close(compiled(function, *(tensor for pair in pairs for tensor in pair))(), [a @ b + 1 for a, b in pairs])


def test_gradients_are_written_where_the_packed_state_has_them():
    """Two parts of a vector, and one that is used elsewhere too and has to be copied in."""
    a, b = torch.randn(9, 20), torch.randn(20, 33)

    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        once, turned, twice = a @ b, (b.t() @ a.t()).t(), (a * 2) @ b
        return [torch.cat([once.reshape(-1), turned.reshape(-1), twice.reshape(-1)]) * 3, twice.sum(0)]

    text, run = written(function, a, b)
    assert text.count("'flat'") == 1
    close(run(), function(a.double(), b.double()))


def test_the_same_products_with_narrower_vectors():
    """The kernel's blocks are of other sizes there."""
    program = (
        "from torch._inductor.cpu_vec_isa import pick_vec_isa; import test_backend as here; "
        "assert str(pick_vec_isa()).startswith('avx2'), pick_vec_isa(); "
        "here.test_products_of_any_size_and_strides_on_any_number_of_threads()"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(Path(__file__).parent)])
    narrow = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=narrow, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- attention --------------------------------------------------------------------------------------------------------


def attended(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> list[Tensor]:
    def loss(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = functional.scaled_dot_product_attention(query, key, value, **options)
        return (out * out.cos()).sum(), out

    grads, out = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)
    return [out, *grads]


def test_attention_and_its_gradients():
    # Heads inside, as a transformer has them, and another number of keys than of queries.
    tensors = [torch.randn(2, length, 3, 16).transpose(1, 2) for length in (40, 24, 24)]

    def function(*tensors: Tensor) -> list[Tensor]:
        kinds: list[dict[str, Any]] = [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}]
        return [leaf for options in kinds for leaf in attended(*tensors, **options)]

    text, run = written(function, *tensors)
    close(run(), function(*(tensor.double() for tensor in tensors)))
    assert "flash" not in text


def test_equal_layers_of_attention_are_traced_once_and_others_apart(monkeypatch: pytest.MonkeyPatch):
    """Equal ones, causal ones, one of another scale, one that lies in memory otherwise."""
    traced: list[Any] = []
    true = attention._operations
    monkeypatch.setattr(attention, "_operations", lambda *given: traced.append(given) or true(*given))
    layers = [{}, {}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True}]
    tensors = [torch.randn(2, 3, 24, 16) for _ in range(3)]
    turned = [torch.randn(2, 24, 3, 16).transpose(1, 2) for _ in range(3)]

    def function(*given: Tensor) -> list[Tensor]:
        found = [attended(*given[:3], **options) for options in layers]
        return [leaf for layer in [*found, attended(*given[3:])] for leaf in layer]

    run = compiled(function, *tensors, *turned)
    close(run(), function(*(tensor.double() for tensor in (*tensors, *turned))))
    assert len(traced) == 4 + 3  # gradients do not depend on who is causal


@pytest.mark.parametrize("kind", ["long", "masked", "double"])
def test_attention_that_stays_torchs(kind: str):
    length = attention.LONGEST + 1 if kind == "long" else 8
    query = torch.randn(1, 1, length, 8, dtype=torch.float64 if kind == "double" else torch.float32)
    options = {"attn_mask": torch.ones(length, length).tril().bool()} if kind == "masked" else {}

    def function(query: Tensor) -> list[Tensor]:
        return attended(query, query, query, **options)

    text, run = written(function, query)
    assert "flash" in text
    close(run(), attended(query, query, query, **options))


# --- sums of rows -----------------------------------------------------------------------------------------------------


def test_the_gradient_of_an_embedding():
    weight, index, factor = torch.randn(7, 24), torch.randint(7, (5, 11)), torch.randn(5, 11, 24)

    def function(weight: Tensor, index: Tensor, factor: Tensor) -> list[Tensor]:
        def loss(weight: Tensor, options: dict[str, Any]) -> Tensor:
            return (functional.embedding(index, weight, **options) * factor).sum()

        kinds: list[dict[str, Any]] = [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}]
        return [torch.func.grad(loss)(weight, options) for options in kinds]

    run = compiled(function, weight, index, factor)
    close(run(), function(weight.double(), index, factor.double()))


def test_the_gradient_of_an_embedding_whose_columns_lie_apart():
    """Inductor lays a contiguous copy out like what it is copied from."""
    weight, index, left, right = torch.randn(7, 24), torch.randint(7, (11,)), torch.randn(24, 30), torch.randn(30, 11)

    def function(weight: Tensor, index: Tensor, left: Tensor, right: Tensor) -> list[Tensor]:
        def loss(weight: Tensor, slopes: Tensor) -> Tensor:
            return (functional.embedding(index, weight) * slopes).sum()

        slopes = (left @ right, torch.sort(left[:, :11], dim=1)[0])
        return [torch.func.grad(loss)(weight, each.t()) for each in slopes]

    run = compiled(function, weight, index, left, right)
    close(run(), function(weight.double(), index, left.double(), right.double()))


def test_a_run_on_several_threads_repeats_itself_to_the_bit():
    """Many rows to few sums: atomic additions would come in another order each time."""
    index, rows_ = torch.randint(3, (4096,)), torch.randn(4096, 512)

    def function(rows_: Tensor, index: Tensor) -> list[Tensor]:
        return [torch.ops.purestep.rows_added(rows_, index, 3, embedding_grad.KERNEL.version)]

    with config.patch(backend._settings(None)):
        assert cpp_kernel.possible()
        cpp_kernel.register(embedding_grad.KERNEL)
    run = compiled(function, rows_, index)
    with threads(1):
        alone = run()[0]
    with threads(2):
        assert all(torch.equal(run()[0], alone) for _ in range(20))


def test_a_language_model_repeats_itself_to_the_bit_on_two_threads():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 256), nn.Linear(256, 11)

        def forward(self, text: Tensor) -> Tensor:
            return self.out(torch.relu(self.embed(text))).transpose(1, 2)

    torch.manual_seed(0)
    program = ps.program(Model(), ps.supervised(nn.CrossEntropyLoss()), ps.optim.adamw(1e-2))
    batch = (torch.randint(11, (16, 256)), torch.randint(11, (16, 256)))
    step = ps.compile_step(program.train_step, donate=True)
    ends: list[ps.TrainState] = []
    with threads(2):
        for _ in range(3):
            state = program.init(seed=0)
            for _ in range(4):
                state, _ = step(state, batch)
            ends.append(ps.clone(state))
    assert step.graphs == 1
    for end in ends[1:]:
        assert_trees_close(ends[0], end, exact=True)


@pytest.mark.parametrize("door", ["native", "inductor's"])
def test_a_recurrent_model_trains(monkeypatch: pytest.MonkeyPatch, door: str):
    """torch's kernel for an LSTM cannot be traced: its workspace has no size before it is called."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.LSTM(2, 3, num_layers=2, batch_first=True), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(x)[0][:, -1])

    if door != "native":
        monkeypatch.setattr(backend, "suits", lambda *_: False)
    program = ps.program(Model(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batch = (torch.randn(2, 2, 2), torch.randn(2, 1))
    step = ps.compile_step(program.train_step, capture="trace")
    eager = fast = program.init(seed=0)
    for _ in range(3):
        (eager, _), (fast, _) = program.train_step(eager, batch), step(fast, batch)
    assert_trees_close(fast.params, eager.params, rtol=1e-5, atol=1e-6)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_no_two_take_the_same_bytes():
    chance = random.Random(0)
    for _ in range(50):
        layout, held = workspace.Layout(), list[tuple[int, int]]()
        for _ in range(200):
            if held and chance.random() < 0.5:
                layout.give(*held.pop(chance.randrange(len(held))))
            else:
                size = 64 * chance.randint(1, 9)
                held.append((layout.take(size), size))
            ends = sorted(held)
            assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(ends))
            assert all(start + size <= layout.size for start, size in held)
        for place in held:
            layout.give(*place)
        assert layout.take(layout.size) == 0  # all of it came back, in one piece


def busy(x: Tensor, w: Tensor) -> list[Tensor]:
    """Products, loops, operators of torch's own, something returned twice over and a view."""
    hidden = torch.tanh(x @ w / 8)
    ranked, order = torch.sort(hidden, dim=-1)
    narrow = torch.sort(torch.sin(x @ w[:, :9]), dim=-1)[0]  # torch's sort is given a tensor in the workspace
    sums = torch.cumsum(ranked @ w, dim=0)
    joined = torch.cat([sums, hidden])
    return [joined, joined[2:5].t(), hidden.sum(), order, (sums * 2).view(-1), narrow.cos().sum(-1)]


def test_what_a_graph_returns_is_memory_of_its_own():
    x, w = torch.randn(30, 40), torch.randn(40, 40)
    run = compiled(busy, x, w)
    first = run()
    kept = [each.clone() for each in first]
    start, size, _ = workspace.header().tolist()
    assert size > 0
    for each in first:
        assert not start <= each.data_ptr() < start + size
    run()
    close(first, kept, 0)
    close(first, busy(x, w))


def test_returned_memory_that_is_not_kept_apart_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wrapper, "_returned", lambda reuses: set())
    with config.patch(fx_graph_cache=False), pytest.raises(AssertionError):
        test_what_a_graph_returns_is_memory_of_its_own()


def chain(x: Tensor, w: Tensor, length: int = 30) -> list[Tensor]:
    for _ in range(length):
        x = torch.tanh(x @ w)
    return [x]


def wrong_results_of_three_threads() -> list[int]:
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    run, wrong = compiled(chain, x, w), list[int]()

    def work(number: int) -> None:
        own = x * number
        expected = chain(own, w)
        for _ in range(1000):
            if wrong:
                return
            if not torch.allclose(run(own, w)[0], expected[0], atol=1e-3):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    return wrong


def test_threads_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch):
    assert not wrong_results_of_three_threads()
    shared = workspace.header()
    monkeypatch.setattr(workspace, "header", lambda: shared)
    assert "own_(header[2])" in workspace.HEADER
    monkeypatch.setattr(workspace, "HEADER", workspace.HEADER.replace("own_(header[2])", "own_(false)"))
    with config.patch(fx_graph_cache=False):
        assert wrong_results_of_three_threads()


INNER: list[Callable[..., list[Tensor]]] = []


@library.custom_op("test_backend::nested", mutates_args=())
def nested(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise FloatingPointError("a number that is none")
    return INNER[0](x)[0]


nested.register_fake(torch.empty_like)


@pytest.mark.parametrize("rows_", [64, 64 * 200], ids=["as much", "more"])
def test_a_graph_that_an_operator_of_another_one_calls(rows_: int):
    """With more memory than the thread has, too; and after an operator that raised."""

    def inner(x: Tensor) -> list[Tensor]:
        return [chain(torch.sort(x.repeat(rows_ // 64, 1), 0)[0], x, 3)[0][:64].clone()]

    def outer(x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        before, ordered = x.sin() @ x, torch.sort(x @ x)[0]
        return [before @ call(before / 64) + ordered]

    x = torch.randn(64, 64) / 8
    INNER[:] = [compiled(inner, x)]
    run = compiled(lambda x: outer(x, nested), x)
    expected = outer(x, lambda y: inner(y)[0])
    close(run(x), expected, 1e-4)
    with pytest.raises(Exception, match="nested"):
        run(x / 0)
    close(run(x), expected, 1e-4)
    assert workspace.header()[2] == 0


def test_the_memory_of_a_thread_is_given_back_with_it():
    freed: list[int] = []
    held = workspace._free
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "_free", lambda header: (freed.append(int(header[0])), held(header)))
        run = compiled(busy, torch.randn(30, 40), torch.randn(40, 40))
        worker = threading.Thread(target=run)
        worker.start()
        worker.join(60)
    assert freed
    assert freed[0] != 0


def test_the_memory_is_the_cpus_whatever_the_callers_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workspace, "_OWN", threading.local())
    with torch.device("meta"):
        assert workspace.header().device.type == "cpu"


def test_at_exit_no_memory_is_taken_from_threads_that_go_on(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    true = weakref.finalize
    monkeypatch.setattr(weakref, "finalize", lambda *parts: (made.append(true(*parts)), made[-1])[1])
    monkeypatch.setattr(workspace, "_OWN", threading.local())
    workspace.header()
    assert [each.atexit for each in made] == [False]


def test_no_more_memory_than_torch_would_take():
    """A chain of layers needs two of its tensors at a time, whatever its length."""
    sizes: list[int] = []
    take = workspace.Layout.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace.Layout, "take", lambda self, size: (take(self, size), sizes.append(self.size))[0])
        with config.patch(fx_graph_cache=False):  # it would give the code without laying anything out
            compiled(chain, torch.randn(64, 64), torch.randn(64, 64))
    assert 0 < sizes[-1] <= 3 * 64 * 64 * 4


# --- tanh -------------------------------------------------------------------------------------------------------------


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every graph, whether it is called with addresses."""
    seen: list[bool] = []
    true = launcher.of

    def of(*arguments: Any, **more: Any) -> launcher.Code:
        made = true(*arguments, **more)
        seen.append(made.file is not None)
        return made

    monkeypatch.setattr(launcher, "of", of)
    return seen


CONSTANT = torch.arange(24.0).reshape(4, 6)


@library.custom_op("test_backend::holding", mutates_args=())
def holding(x: Tensor) -> Tensor:
    HELD.append(x)
    return x * 2


HELD: list[Tensor] = []
holding.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: busy(x, w), True),
        (lambda x, w: [x.sum(), torch.stack([x.mean(), w.sum(), w.amax()]), x.t()[2:4].exp(), w.new_ones(())], True),
        (lambda x, w: [x[:4, :6] * CONSTANT + w[0, 0]], False),  # a constant of the graph is one more input
        (lambda x, w: [x, x @ w], False),  # the caller's tensor is returned
        (lambda x, w: [x.t(), x @ w], False),
        (lambda x, w: [torch.view_as_complex(x.view(30, 20, 2)), x @ w], False),
        (lambda x, w: [holding(x), x @ w], False),  # keeps what it is given
    ],
    ids=["plain", "scalars", "constant", "an input", "a view of an input", "an alias", "one's own"],
)
def test_which_graphs_take_addresses(function: Callable[..., list[Tensor]], expected: bool, by_address: list[bool]):
    x, w = torch.randn(30, 40), torch.randn(40, 40)
    run = compiled(function, x, w)
    assert by_address == [expected]
    close(run(x, w), function(x, w), 1e-4)
    other = torch.randn(30, 40)
    close(run(other, w), function(other, w), 1e-4)


@library.custom_op("tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_operators_without_a_function_of_c_take_views():
    """They are called by their names, and own the handles of views that they are given."""

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        normed, solved = b.exp() + 1, c.tanh() + torch.eye(4)
        return [
            tripled((a.exp() + 1).view(2, 8)) * 2,
            torch._weight_norm_interface(normed.view(2, 8), normed.amax(1)[:2].view(2, 1))[0] * 2,
            torch.linalg.solve(solved, solved[:, :2]) * 2,
            torch.linalg.det((d.tanh() + torch.eye(4)).view(1, 4, 4)) * 2,
        ]

    inputs = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
    run = compiled(function, *inputs)
    for _ in range(2):
        torch.testing.assert_close(run(), function(*inputs), rtol=1e-5, atol=1e-6)


def test_a_tensor_that_an_operator_keeps_lives_on():
    x = torch.randn(70_000)
    HELD.clear()
    run = compiled(lambda x: [holding(x)], x.clone())
    run(x.clone())
    del run
    torch.testing.assert_close(HELD[-1], x, rtol=0, atol=0)


def test_inputs_of_any_dtype_and_strides(by_address: list[bool]):
    """Also parts of larger memory, without elements, without dimensions and with a stride of zero."""
    inputs: list[Tensor] = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool):
        whole = (torch.randn(9, 8, 7) * 3).to(dtype)
        inputs += [whole[2:5, ::2].permute(2, 0, 1), whole[:0], whole[1, 1, 1], whole[0, 0, :1].expand(6)]

    def function(*inputs: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for at in range(0, len(inputs), 4):
            first, _, number, _ = each = inputs[at : at + 4]
            found += [torch.cat([one.reshape(-1).double() * 2 for one in each]), first.double() + number.double()]
        return found

    close(compiled(function, *inputs)(), function(*inputs))
    assert by_address == [True]


def test_inputs_that_are_written(by_address: list[bool]):
    x, w = torch.randn(12, 12), torch.randn(12, 12)

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        made = torch.sort(x @ w)[0]
        x.copy_(x + made)
        return [made.sum()]

    run = compiled(function, x.clone(), w)
    expected, found = x.clone(), x.clone()
    for _ in range(3):
        function(expected, w)
        run(found, w)
    close([found], [expected], 1e-4)
    assert by_address == [True]


def test_an_error_inside_a_graph_is_raised_and_the_next_call_works(by_address: list[bool]):
    table, index = torch.randn(10, 4), torch.arange(5)
    run = compiled(lambda table, index: [functional.embedding(index, table).sin()], table, index)
    assert by_address == [True]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            run(table, index + 7)
        close(run(table, index), [table[:5].sin()])
    assert workspace.header()[2] == 0


def test_graphs_by_handles_give_the_same(by_address: list[bool], monkeypatch: pytest.MonkeyPatch):
    x, w = torch.randn(30, 40), torch.randn(40, 40)
    first = compiled(busy, x, w)()
    with monkeypatch.context() as patch:  # code for addresses, called by who does not know
        patch.setattr(launcher, "ENTRY", "missing")
        close(compiled(busy, x, w)(), first, 0)
    monkeypatch.setattr(wrapper, "_by_address", lambda: False)
    with config.patch(fx_graph_cache=False):
        close(compiled(busy, x, w)(), first, 0)
    assert by_address == [True, False, False]


def test_a_tensor_without_memory_is_refused():
    run = compiled(lambda x: [x * 2], torch.randn(4, 8))
    with pytest.raises(StepContractError, match=r"\[4, 8\] torch.float32 that has no memory"):
        run(torch._efficientzerotensor((4, 8)))
    empty = torch.randn(4, 8)
    empty.untyped_storage().resize_(0)
    with pytest.raises(StepContractError, match="no memory"):
        run(empty)


def test_an_address_that_is_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch):
    true = wrapper.Wrapper._declared

    def moved(self: Any, name: str, address: str, *rest: Any) -> str:
        return true(self, name, f"(char*){address} + 4" if address == "addresses[0]" else address, *rest)

    x = torch.randn(30, 40)
    monkeypatch.setattr(wrapper.Wrapper, "_declared", moved)
    with config.patch(fx_graph_cache=False):
        (found,) = compiled(lambda x: [x[:-1] * 2], x)()
    assert found.flatten().equal(x.flatten()[1:1161] * 2)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 400])
def test_a_call_on_more_threads_than_there_were(size: int):
    """Inductor's code has room for one sum a thread; what writes past it need not crash, so the count is looked at."""
    counts: list[int] = []

    @library.custom_op(f"test_backend::looked_{size}", mutates_args=())
    def looked(x: Tensor) -> Tensor:
        counts.append(torch.get_num_threads())
        return x.clone()

    looked.register_fake(torch.empty_like)
    x = torch.randn(size, size)
    with threads(2):
        run = compiled(lambda x: [looked(torch.cos(x) @ x).sum()], x)
    expected = [(torch.cos(x.double()) @ x.double()).sum()]
    for count in (1, 2, 7):
        with threads(count):
            close(run(x), expected, 1e-4)
            assert torch.get_num_threads() == count
    assert counts == ([1, 1, 1] if size == 40 else [1, 2, 2])


# --- pieces of packed vectors -----------------------------------------------------------------------------------------


def kernels_of(function: Callable[..., list[Tensor]], *inputs: Tensor) -> list[str]:
    """The names of the kernels that inductor writes."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    found: list[str] = []
    true = PythonWrapperCodegen.define_kernel
    with pytest.MonkeyPatch.context() as patch, config.patch(fx_graph_cache=False):
        patch.setattr(
            PythonWrapperCodegen,
            "define_kernel",
            lambda self, name, *rest, **more: (found.append(name), true(self, name, *rest, **more))[1],
        )
        # The names are enough: the code is not built.
        patch.setattr(codecache.CppWrapperCodeCache, "load_pybinding", classmethod(lambda *_, **__: lambda *_: []))
        compiled(function, *inputs)
    return found


def layered(vector: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    for piece in vector.split(x.shape[1]):
        x = torch.tanh(x @ w + piece)
    return [x]


def test_equal_layers_are_one_kernel(monkeypatch: pytest.MonkeyPatch):
    def count(layers: int) -> int:
        return len(kernels_of(layered, torch.randn(48 * layers), torch.randn(8, 48), torch.randn(48, 48) / 7))

    assert count(2) == count(6)
    monkeypatch.setattr(offset_pointers, "_offset", lambda name, index: 0)
    assert count(6) > count(2)


N = 64
WHERE = torch.tensor([0, 1, 2, 3, 2 * N - 3])


def plain(vector: Tensor, other: Tensor, x: Tensor) -> list[Tensor]:
    first, last = vector.split([N // 2, N + N // 2])
    shown = [torch.tanh(x @ x.t()) @ x + first[:8], last[3:].cumsum(0), last.view(8, 12).t() @ x, vector[5:70:2].sin()]
    vector.copy_(vector * 0.5)
    other.copy_(last[:N] * 3)
    return shown


def moved(vector: Tensor, other: Tensor, x: Tensor) -> list[Tensor]:
    """Reads a piece at other places than it writes the vector."""
    first, last = vector.split([2 * N - 2, 2])
    vector.copy_(torch.roll(functional.pad(first, (2, 0)) * 0.5, 1))
    return [last.sum() + x.sum()]


def scattered(vector: Tensor, other: Tensor, x: Tensor) -> list[Tensor]:
    first, last = vector.split([N, N])
    new = torch.slice_scatter(vector, first.flip(0) * 2, 0, 5, N + 5).index_put((WHERE,), x[0, :5])
    vector.copy_(new)
    return [(first * new[:N]).exp(), last + new.sum()]


def swapped(vector: Tensor, other: Tensor, x: Tensor) -> list[Tensor]:
    first, last = vector.split([N, N])
    new, beside = torch.cat([last * 2, other * 1.0]), first * 1.0
    shown = [last[1:] + other[:-1]]
    vector.copy_(new)
    other.copy_(beside)
    return shown


def seen_as_bytes(vector: Tensor, other: Tensor, x: Tensor) -> list[Tensor]:
    """Views that inductor leaves to torch, of pieces."""
    first, last = vector.split([N, N])
    data, bits = first.view(torch.uint8), last.view(torch.int32)
    shown = [data.sum(), data.to(torch.float32) * 2, bits & 255]
    vector.copy_(vector * 0)
    return shown


Story = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def wrong_of(*stories: Story) -> list[Story]:
    """Compile all stories into one graph, each on its own tensors; return those whose numbers are not eager torch's."""

    def run_eagerly(story: Story, tensors: list[Tensor]) -> list[Tensor]:
        return [*story(*tensors), *tensors[:2]]

    def together(*tensors: Tensor) -> list[Tensor]:
        return [leaf for at, each in enumerate(stories) for leaf in each(*tensors[3 * at : 3 * at + 3])]

    groups = [[torch.randn(2 * N), torch.zeros(N), torch.randn(8, 8)] for _ in stories]
    run, wrong = compiled(together, *itertools.chain(*groups)), set[Story]()
    for _ in range(2):
        expected = [
            run_eagerly(story, [each.clone() for each in group]) for story, group in zip(stories, groups, strict=True)
        ]
        found = run(*itertools.chain(*groups))
        for story, group, right in zip(stories, groups, expected, strict=True):
            own, found = found[: len(right) - 2], found[len(right) - 2 :]
            pairs = zip([*own, *group[:2]], right, strict=True)
            if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs):
                wrong.add(story)
    return [story for story in stories if story in wrong]


def test_pieces_of_vectors_that_are_written():
    assert wrong_of(plain, moved, scattered, swapped, seen_as_bytes) == []


def test_pieces_of_vectors_that_are_called_by_handles(monkeypatch: pytest.MonkeyPatch, by_address: list[bool]):
    monkeypatch.setattr(wrapper, "_by_address", lambda: False)
    with config.patch(fx_graph_cache=False):  # it has code for addresses
        assert wrong_of(plain, seen_as_bytes) == []
    assert by_address == [False]


@pytest.mark.parametrize("one_off", [1, -1])
def test_a_piece_from_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch, one_off: int):
    true = offset_pointers._address

    def address(name: str) -> str:
        vector, _, offset = name.partition("+")
        return true(f"{vector}+{int(offset) + one_off}") if offset else true(name)

    monkeypatch.setattr(offset_pointers, "_address", address)
    with config.patch(fx_graph_cache=False):
        assert wrong_of(plain) == [plain]


def test_a_piece_that_is_returned_keeps_its_vector_alive():
    def shown(vector: Tensor, x: Tensor) -> list[Tensor]:
        first, last = vector.split([16, 48])
        return [first.view(4, 4).t(), x + last, last.view(torch.uint8)]

    vector, x = torch.randn(64), torch.randn(48)
    expected, run = shown(vector.clone(), x), compiled(shown, vector, x)
    found = run(vector, x)
    assert found[0].untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    del vector
    trash = [torch.full((64,), float(number)) for number in range(100)]  # would lie where the vector was
    close(found, expected)
    assert len(trash) == 100


# --- inputs that become something else of themselves ------------------------------------------------------------------


def are_written_whole(functions: list[Callable[[Tensor], Tensor]]) -> list[bool]:
    def write(*vectors: Tensor) -> list[Tensor]:
        for function, vector in zip(functions, vectors, strict=True):
            vector.copy_(function(vector))
        return [torch.zeros(())]

    vectors = [torch.randn(64) for _ in functions]
    expected = [function(vector.clone()) for function, vector in zip(functions, vectors, strict=True)]
    compiled(write, *vectors)(*vectors)
    return [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(vectors, expected, strict=True)]


TURNS: list[Callable[[Tensor], Tensor]] = [
    lambda v: v.view(8, 8).t().reshape(64),
    lambda v: (v.view(8, 8).t() * 2 + 1).reshape(-1),
    lambda v: v[:32].flip(0).expand(2, 32).reshape(64),
    lambda v: (v.view(8, 8) @ v.view(8, 8)).view(64),
    lambda v: v.flip(0),
]


def test_an_input_written_from_itself_through_a_view():
    assert are_written_whole(TURNS) == [True] * len(TURNS)


def test_without_memory_of_its_own_it_is_overwritten_while_it_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor_fixes.aliasing, "store_separately", lambda graph, node, reader: None)
    with config.patch(fx_graph_cache=False):  # it has the code of the test before
        assert not all(are_written_whole(TURNS))


POOLS = """
import sys
import torch
from torch.nn import functional
from torch._subclasses import FakeTensorMode
from purestep.compile.cpu import backend

assert "torch._inductor.lowering" not in sys.modules
with FakeTensorMode():
    x = torch.ones(2, 3, 4, 4)
    for pool, given in (functional.max_pool2d, x), (functional.max_pool1d, x[0]), (functional.adaptive_max_pool2d, x):
        backend._traced(lambda x: [pool(x, 2)], [given])
"""


def test_pools_that_are_traced_first_in_a_process() -> None:
    """Their decompositions read a module of inductor that they do not import."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", POOLS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- instructions -----------------------------------------------------------------------------------------------------


class Probes(NamedTuple):
    """Inductor's tests of the processor's instructions, as in a new process."""

    may_end: threading.Event
    ran_in: list[threading.Thread]
    """the threads that have run them to the end"""


@pytest.fixture
def instruction_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Probes]:
    tests = Probes(threading.Event(), [])

    def pick_vec_isa() -> None:
        assert tests.may_end.wait(60)
        tests.ran_in.append(threading.current_thread())

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", pick_vec_isa)
    backend._instruction_tests.cache_clear()
    yield tests
    backend._instruction_tests.cache_clear()


def test_instructions_are_tested_once_in_another_thread(instruction_tests: Probes):
    for _ in range(2):
        with backend._instructions_tested():
            instruction_tests.may_end.set()
        (thread,) = instruction_tests.ran_in
    assert thread is not threading.current_thread()


def test_after_an_error_the_tests_of_instructions_are_over_too(instruction_tests: Probes):
    def fails() -> None:
        with backend._instructions_tested():
            instruction_tests.may_end.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(instruction_tests.ran_in) == 1


def test_an_error_of_the_tests_of_instructions_is_left_to_inductor(
    instruction_tests: Probes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: 1 / 0)
    with backend._instructions_tested():
        pass
    assert isinstance(backend._instruction_tests().exception(), ZeroDivisionError)


def test_the_compiler_of_the_tests_is_taken_for_gcc():
    """By its name. Else its precompiled headers get a suffix that it never looks for: three seconds a compile."""
    from torch._inductor import cpp_builder

    assert cpp_builder._is_gcc(str(ROOT / "tests" / "g++"))
    assert not cpp_builder._is_gcc("tests/cxx")
