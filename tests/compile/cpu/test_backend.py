"""Native code of graphs on the CPU: products, attention, sums of rows, and the memory it works in."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, library, nn
from torch._inductor import config, cpu_vec_isa
from torch.nn import functional

import purestep as ps
from purestep.compile import capture, inductor_fixes
from purestep.compile.cpu import attention, backend, cpp_library

pytestmark = pytest.mark.usefixtures("no_fallback")

ROOT = Path(__file__).resolve().parents[3]


def compiled(function: Callable[..., list[Tensor]], *inputs: Tensor) -> Callable[..., list[Tensor]]:
    """The function as native code, for tensors like these; called with these where it is given none."""
    run, _, outside = capture.compile_graph(function, list(inputs), backend="inductor", options=None)
    return lambda *others: list(run([*(others or inputs), *outside]))


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


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, which has kept no memory yet; return its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(300)
    return found[0]


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0.0"])
def test_another_torch_is_left_to_inductors_public_entry(version: str, monkeypatch: pytest.MonkeyPatch):
    assert backend.suits([torch.zeros(1)])
    monkeypatch.setattr(torch, "__version__", version)
    assert not backend.suits([torch.zeros(1)])


def test_a_graph_on_another_device_is_left_to_inductors_public_entry():
    assert not backend.suits([torch.zeros(1), torch.zeros(1, device="meta")])


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
        *((torch.ones(2, m, k), torch.ones(2, k, n)) for m, k, n in ((0, 4, 5), (4, 0, 5), (4, 5, 0))),
    ]
    return found


def product(a: Tensor, b: Tensor, kernel: Any = None, bias: Tensor | None = None) -> Tensor:
    """``a @ b``, or ``a @ b + bias``, by the kernel."""
    made = torch.full((*a.shape[:-1], b.shape[-1]), torch.nan)
    (ah, am, ak), (bh, bk, bn), (ch, cm, _) = ((0, *each.stride())[-3:] for each in (a, b, made))
    heads = a.shape[0] if a.dim() == 3 else 1
    plan = [heads, *made.shape[-2:], a.shape[-1], ah, am, ak, bh, bk, bn, ch, cm]
    call = (kernel or cpp_library.loaded()).purestep_product
    pointers = (None if each is None else ctypes.c_void_p(each.data_ptr()) for each in (a, b, made, bias))
    call(*pointers, (ctypes.c_int64 * len(plan))(*plan))
    return made


def test_products_of_any_size_and_strides_on_any_number_of_threads():
    for a, b in operands():
        for bias in (None, torch.randn(b.shape[-1])):
            with threads(1):
                alone = product(a, b, bias=bias)
            with threads(2):
                together = product(a, b, bias=bias)
            close([alone], [a.double() @ b.double() + (0 if bias is None else bias)])
            assert torch.equal(alone, together)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("at ? c : bias", "bias", id="forgets what it summed"),
        pytest.param("at ? c : bias", "at ? c : nullptr", id="forgets the bias"),
        pytest.param("add ? add + p", "add ? add", id="the first columns of the bias again"),
        pytest.param("a += ROWS * k", "a += 0", id="the first block again"),
        pytest.param("i * am", "0", id="the first rows again"),
        pytest.param("p * bn", "0", id="the first panel again"),
    ],
)
def test_a_kernel_with_a_fault_is_seen(right: str, wrong: str, tmp_path: Path):
    source = cpp_library.source("gemm.cpp")
    assert right in source
    cpp_library._build(source.replace(right, wrong), str(tmp_path / "step.so"))
    a, b, bias = torch.randn(600, 300).t(), torch.randn(600, 40), torch.randn(40)
    close([product(a, b, bias=bias)], [a.double() @ b.double() + bias])
    with pytest.raises(AssertionError):
        close([product(a, b, ctypes.CDLL(str(tmp_path / "step.so")), bias)], [a.double() @ b.double() + bias])


def test_the_library_is_built_without_torchs_test_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each takes seconds of g++, and torch itself uses these instructions."""
    pick, found = cpu_vec_isa.pick_vec_isa, list[Any]()

    def picked() -> Any:
        found.append(config.cpp.vec_isa_ok)
        return pick()

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", picked)
    cpp_library._build("", str(tmp_path / "step.so"))
    assert found == [True]


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


def of_two_kinds(a: Tensor, b: Tensor, bias: Tensor) -> list[Tensor]:
    """A product that the kernel takes, and one that it does not."""
    return [torch.addmm(bias, a, b), a.double() @ b.double()]


def of_every_kind(a: Tensor, b: Tensor, bias: Tensor) -> list[Tensor]:
    """Products that the kernel takes, and others: a result whose columns lie apart, other factors, other dtypes."""
    return [
        a @ b,
        a.view(2, 30, 50) @ b,
        torch.bmm(a.view(2, 30, 50), b.t().expand(2, 70, 50).transpose(1, 2)),
        torch.addmm(bias, a, b),
        torch.addmm(bias, a, b, beta=2.0),
        torch.addmm(bias[:1], a, b),
        torch.addmm(bias.expand(60, 70), a, b),
        a.double() @ b.double(),
        a.bfloat16() @ b.bfloat16(),
    ]


SEVENS = """
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) c[h * ch + i * cm + j] = 7;
  return;
"""
WHICH = """
import sys
import torch
import test_backend as here
from purestep.compile.cpu import cpp_library
true, line = cpp_library.source, "  if (heads * m * n == 0) return;"
assert line in true("gemm.cpp")
cpp_library.source = lambda name: true(name).replace(line, here.SEVENS)
tensors, function = (torch.randn(60, 50), torch.randn(50, 70), torch.zeros(70)), getattr(here, sys.argv[1])
found, expected = here.compiled(function, *tensors)(), function(*tensors)
print([bool((one == 7).all()) for one in found])
here.close(*zip(*[pair for pair in zip(found, expected) if not (pair[0] == 7).all()]), 1e-2)
"""


@pytest.mark.parametrize(
    ("products", "switch", "own"),
    [
        pytest.param(of_two_kinds, "", [True, False], id="two kinds"),
        pytest.param(of_every_kind, "", [True] * 4 + [False] * 5, id="every kind"),
        pytest.param(of_two_kinds, "-fast", [False, False], id="switched off"),
    ],
)
def test_the_code_of_a_step_calls_the_kernel(products: Callable[..., Any], switch: str, own: list[bool]):
    """A kernel that makes sevens tells which products are its own; those of torch are what they were."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(Path(__file__).parent)])
    variables = os.environ | {"PURESTEP_CPU": switch, "PYTHONPATH": paths}
    command = [sys.executable, "-c", WHICH, products.__name__]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(own)
    assert "dlsym" not in done.stderr  # torch's runner finds each function that it looks for


# --- attention --------------------------------------------------------------------------------------------------------


def attended(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> list[Tensor]:
    def loss(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = functional.scaled_dot_product_attention(query, key, value, **options)
        return (out * out.cos()).sum(), out

    grads, out = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)
    return [out, *grads]


def operators(function: Callable[..., list[Tensor]], *inputs: Tensor) -> str:
    from torch.fx.experimental.proxy_tensor import make_fx

    with attention.AsProducts():
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs).code


def test_short_attention_and_its_gradients():
    # Heads inside, as a transformer has them, and another number of keys than of queries.
    tensors = [torch.randn(2, length, 3, 16).transpose(1, 2) for length in (40, 24, 24)]
    kinds: list[dict[str, Any]] = [{"is_causal": True, "scale": 0.3}, {"attn_mask": torch.rand(40, 24) > 0.2}]

    def function(*tensors: Tensor) -> list[Tensor]:
        return [leaf for options in kinds for leaf in attended(*tensors, **options)]

    assert "flash" not in operators(function, *tensors)
    close(compiled(function, *tensors)(), function(*(tensor.double() for tensor in tensors)))


@pytest.mark.parametrize("kind", ["long", "double"])
def test_attention_that_stays_torchs(kind: str):
    length = attention.LONGEST + (kind == "long")
    query = torch.randn(1, 1, length, 8, dtype=torch.float64 if kind == "double" else torch.float32)
    assert "flash" in operators(lambda query: attended(query, query, query), query)


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
    step = ps.compile_step(program.train_step)
    eager = fast = program.init(seed=0)
    for _ in range(3):
        (eager, _), (fast, _) = program.train_step(eager, batch), step(fast, batch)
    assert_trees_close(fast.params, eager.params, rtol=1e-5, atol=1e-6)


# --- memory -----------------------------------------------------------------------------------------------------------


def busy(x: Tensor, w: Tensor) -> list[Tensor]:
    """Products, loops, operators of torch's own, something returned twice over and a view."""
    hidden = torch.tanh(x @ w / 8)
    ranked, order = torch.sort(hidden, dim=-1)
    narrow = torch.sort(torch.sin(x @ w[:, :9]), dim=-1)[0]  # torch's sort is given a tensor in the workspace
    sums = torch.cumsum(ranked @ w, dim=0)
    joined = torch.cat([sums, hidden])
    return [joined, joined[2:5].t(), hidden.sum(), order, (sums * 2).view(-1), narrow.cos().sum(-1)]


def held() -> int:
    """Bytes of this thread's memory for intermediates."""
    return cpp_library.loaded().purestep_held()


def test_what_a_graph_returns_is_memory_of_its_own():
    x, w = torch.randn(30, 40), torch.randn(40, 40)
    run = compiled(busy, x, w)
    first = run()
    kept = [each.clone() for each in first]
    run(x + 1, w)
    close(first, kept, 0)
    close(first, busy(x, w))


def chain(x: Tensor, w: Tensor, length: int = 30) -> list[Tensor]:
    for _ in range(length):
        x = torch.tanh(x @ w)
    return [x]


def test_no_more_memory_than_torch_would_take_and_a_thread_gives_it_back():
    """A chain of layers needs two of its tensors at a time, whatever its length."""
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    run = compiled(chain, x, w)
    before = held()

    def many() -> int:
        for _ in range(50):
            run()
        return held()

    assert 0 < in_a_thread(many) <= 3 * (64 * 64 * 4 + 64)
    assert held() == before


def test_graphs_of_several_sizes_share_the_memory():
    """The blocks of the larger batch make room for those of the smaller one."""
    w = torch.randn(64, 64) / 8
    sizes = [torch.randn(rows, 64) for rows in (256, 192)]
    runs = [compiled(chain, x, w) for x in sizes]

    def both() -> list[int]:
        return [(run(), held())[1] for run in (*runs, *runs)]

    first, second, *again = in_a_thread(both)
    assert second <= first
    assert max(again) <= first


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


def test_threads_have_memory_of_their_own():
    assert not wrong_results_of_three_threads()


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


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_a_tensor_from_elsewhere_is_an_input():
    """The code is that of another tensor of its kind, too, and sees what is written to it."""
    tables = [torch.arange(24.0).reshape(4, 6), torch.ones(4, 6)]
    x = torch.randn(4, 6)
    for table in tables:
        run = compiled(lambda x, table=table: [x * table + torch.tensor(2.0)], x)
        close(run(), [x * table + 2])
        table.add_(1)
        close(run(), [x * table + 2])


def test_a_returned_input_or_view_is_the_callers_memory():
    x = torch.randn(30, 40)
    run = compiled(lambda x: [x, x.t()[2:4], x.exp()[1:], x.view(torch.int32)], x)
    found = run()
    close(found, [x, x.t()[2:4], x.exp()[1:], x.view(torch.int32)])
    memory = {each.untyped_storage().data_ptr() for each in (found[0], found[1], found[3])}
    assert memory == {x.untyped_storage().data_ptr()}


HELD: list[Tensor] = []


@library.custom_op("test_backend::holding", mutates_args=())
def holding(x: Tensor) -> Tensor:
    HELD.append(x)
    return x * 2


holding.register_fake(torch.empty_like)


def test_a_tensor_that_an_operator_keeps_stays_what_it_is():
    """An operator may keep tensors of the caller, and of the graph, which must not reuse their memory."""
    HELD.clear()
    x = torch.randn(700)
    run = compiled(lambda x: [holding(x), holding(x.sin() + 1).exp()], x)
    run(x.clone())
    run(x.clone() + 1)
    close(HELD, [x, x.sin() + 1, x + 1, (x + 1).sin() + 1])


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


def test_inputs_of_any_dtype_and_strides():
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


def test_inputs_that_are_written():
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


def test_an_error_inside_a_graph_is_raised_and_the_next_call_works():
    table, index = torch.randn(10, 4), torch.arange(5)
    run = compiled(lambda table, index: [functional.embedding(index, table).sin()], table, index)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            run(table, index + 7)
        close(run(table, index), [table[:5].sin()])


def test_a_tensor_without_memory_is_refused():
    run, empty = compiled(lambda x: [x * 2], torch.randn(4, 8)), torch.randn(4, 8)
    empty.untyped_storage().resize_(0)
    for tensor in (torch._efficientzerotensor((4, 8)), empty):
        with pytest.raises(RuntimeError, match="a tensor without memory"):
            run(tensor)


class Ticks(threading.Thread):
    """Counts as fast as Python lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.on = 0, True

    def run(self) -> None:
        while self.on:
            self.count += 1


def test_other_threads_of_python_run_during_a_call():
    x, w = torch.randn(600, 600), torch.randn(600, 600) / 30
    run, ticks = compiled(lambda x, w: chain(x, w, 60), x, w), Ticks()
    ticks.start()
    try:
        before = ticks.count
        run()
        assert ticks.count - before > 1000
    finally:
        ticks.on = False
        ticks.join()


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
    with config.patch(fx_graph_cache=False):  # the cache has the code of the test before
        assert not all(are_written_whole(TURNS))


POOLS = """
import sys
import torch
from torch.nn import functional
from torch._subclasses import FakeTensorMode
from purestep.compile import lower

assert "torch._inductor.lowering" not in sys.modules
with FakeTensorMode():
    x = torch.ones(2, 3, 4, 4)
    for pool, given in (functional.max_pool2d, x), (functional.max_pool1d, x[0]), (functional.adaptive_max_pool2d, x):
        lower.traced(lambda x: [pool(x, 2)], [given])
"""


def test_pools_that_are_traced_first_in_a_process() -> None:
    """Their decompositions read a module of inductor that they do not import."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", POOLS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_compiler_of_the_tests_is_taken_for_gcc():
    """By its name. Else its precompiled headers get a suffix that it never looks for: three seconds a compile."""
    from torch._inductor import cpp_builder

    assert cpp_builder._is_gcc(str(ROOT / "tests" / "g++"))
    assert not cpp_builder._is_gcc("tests/cxx")
