"""How a compiled step is launched: natively, on one thread, several steps at a time, as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, library, nn
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep import optim
from purestep.compile import capture, compiled_step, fx_passes, guards
from purestep.compile import cuda_graph as replay
from purestep.compile.buffers import StateBuffers
from purestep.compile.cpu import backend
from purestep.errors import ConfigError, StateError, StepContractError
from purestep.parallel import collectives  # noqa: F401  # its operators
from purestep.types import Program

CRITERION = nn.CrossEntropyLoss()
compiled = partial(ps.compile_step, backend="aot_eager")


def mlp(**options: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(CRITERION), optim.adamw(0.01), ema=0.9, **options)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [vector_batch(16, seed) for seed in range(count)]


def one_by_one(step: Callable[..., Any], state: Any, given: list[Any]) -> tuple[Any, list[Any]]:
    found = []
    for batch in given:
        state, metrics = step(state, batch)
        found.append(metrics)
    return ps.clone(state), found


# --- native -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def only_native(monkeypatch: pytest.MonkeyPatch, cpu_plugin: None) -> list[Any]:
    """The native path without the way round it; what it made is in the list."""
    made: list[Any] = []
    true = backend.compiled

    def compiled(*arguments: Any, **options: Any) -> Any:
        made.append(true(*arguments, **options))
        return made[-1]

    def no_way_round(*_: Any) -> None:
        raise AssertionError("went round the native path")

    monkeypatch.setattr(backend, "compiled", compiled)
    monkeypatch.setattr(capture, "_by_public_entry", no_way_round)
    return made


class InPlace(nn.Module):
    """Writes in place everywhere a model does: activations, residuals, views, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.relu_(self.norm(self.layer(x)))
        hidden = hidden + self.layer(hidden)
        scaled = hidden * 1.0
        scaled[:, 0] += 1.0
        scaled.view(-1)[::2].mul_(0.5)
        return self.last(scaled)


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
def test_what_a_model_writes_in_place_is_native_too(donate: bool, only_native: list[Any]) -> None:
    torch.manual_seed(0)
    program = ps.program(InPlace(), ps.supervised(CRITERION), optim.sgd(0.1))
    given = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(3)]
    expected = one_by_one(program.train_step, program.init(), given)
    found = one_by_one(ps.compile_step(program.train_step, donate=donate), program.init(), given)
    assert_trees_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert len(only_native) == 1


@pytest.mark.compile
def test_what_the_native_path_cannot_do_goes_round_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("another version of torch")

    monkeypatch.setattr(backend, "compiled", broken)
    program, given = mlp(), batches(2)
    expected = one_by_one(program.train_step, program.init(), given)
    found = one_by_one(ps.compile_step(program.train_step, donate=True), program.init(), given)
    assert_trees_close(found[0], expected[0], rtol=1e-5, atol=1e-6)


def test_a_write_in_the_middle_is_not_taken_for_functional() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def writes_and_reads(x: Tensor) -> Tensor:
        x.copy_(x + 1)
        return x * 2

    def reads_and_writes(x: Tensor) -> Tensor:
        y = x * 2
        x.copy_(x + 1)
        return y

    def writes_and_reads_a_view(x: Tensor) -> Tensor:
        _, last = x.split([1, 1])
        x.copy_(x + 1)
        return last * 2

    assert not fx_passes.is_functional(make_fx(writes_and_reads)(torch.ones(2)))
    assert not fx_passes.is_functional(make_fx(writes_and_reads_a_view)(torch.ones(2)))
    assert fx_passes.is_functional(make_fx(reads_and_writes)(torch.ones(2)))


@pytest.mark.compile
def test_a_step_that_stops_half_way_leaves_no_state_to_read() -> None:
    program, batch = mlp(), vector_batch(16, 0)
    step = compiled(program.train_step, donate=True)
    state, _ = step(program.init(), batch)

    def half(tensors: list[Tensor], *_: list[Any]) -> Any:
        tensors[2].zero_()
        raise MemoryError

    step._last = {phase: last._replace(graph=last.graph._replace(run=half)) for phase, last in step._last.items()}
    with pytest.raises(MemoryError):
        step(state, batch)
    with pytest.raises(StateError, match="this state in call 2"):
        _ = state.params


# --- what native code must not see through ----------------------------------------------------------------------------


def shifted(state: dict[str, Tensor], batch: Tensor) -> tuple[Any, Any]:
    new = {
        "a": state["b"],
        "b": state["a"],
        "m": state["n"].t(),
        "n": state["m"].t(),
        "now": state["now"] * state["rate"] + batch,
        "prev": state["now"],
        "rate": state["rate"] / 2,
    }
    return new, {"rate": ps.Mean(state["rate"], state["now"][1]), "first": ps.Mean(state["a"][0], state["m"][0, 1])}


@pytest.mark.compile
def test_leaves_moved_in_place_and_shown_are_those_of_before() -> None:
    state = {name: torch.randn(3) for name in ("a", "b", "now", "prev")}
    state |= {"m": torch.randn(3, 3), "n": torch.randn(3, 3), "rate": torch.ones(())}

    def step(given: Any, batch: Tensor) -> tuple[Any, Any]:
        square = torch.zeros(3, 3)
        new, metrics = shifted({"m": square, "n": square} | given, batch)
        return {name: new[name] for name in given}, metrics

    given = [torch.full((3,), float(number)) for number in range(4)]
    expected = one_by_one(step, state, given)
    found = one_by_one(ps.compile_step(step, donate=True), state, given)
    assert_trees_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.compile
@pytest.mark.usefixtures("cpu_plugin")
def test_the_scale_that_a_step_tells_is_the_one_it_used() -> None:
    program = ps.program(
        tiny_mlp(), ps.supervised(CRITERION), optim.sgd(0.1), precision="16-mixed", scaler=ps.scaler.dynamic(2.0**40)
    )
    _, expected = one_by_one(program.train_step, program.init(), batches(2))
    _, found = one_by_one(ps.compile_step(program.train_step, donate=True), program.init(), batches(2))
    assert float(expected[0]["scale"]) != float(expected[1]["scale"])
    assert [float(metrics["scale"]) for metrics in found] == [float(metrics["scale"]) for metrics in expected]


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
def test_numbers_that_are_equal_and_not_the_same_have_graphs_of_their_own(donate: bool) -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        x, number = batch
        halved = x * number // 2 if isinstance(number, int) else torch.copysign(x * 1.0, torch.full((3,), number))
        return {"w": state["w"] + halved.sum()}, {}

    given = [(torch.tensor([1, 3, 5]), number) for number in (1, 1.0, 0.0, -0.0, True, 1)]
    expected = one_by_one(step, {"w": torch.zeros(2)}, given)
    found = one_by_one(compiled(step, donate=donate), {"w": torch.zeros(2)}, given)
    assert_trees_close(found, expected, exact=True)


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
def test_a_negative_that_is_put_off_is_seen(donate: bool) -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        return {"w": state["w"] + batch.sum()}, {}

    wave = torch.complex(torch.arange(3.0), torch.arange(1.0, 4.0))
    given = [wave.imag, wave.conj().imag]
    assert given[1].is_neg()
    expected = one_by_one(step, {"w": torch.zeros(2)}, given)
    found = one_by_one(ps.compile_step(step, donate=donate), {"w": torch.zeros(2)}, given)
    assert_trees_close(found, expected, exact=True)


class Picking(nn.Module):
    """Multiplies with single numbers of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden * hidden[3, 1] + hidden * x.sin()[2, 3] + hidden * x.t().contiguous().view(-1)[5]


@pytest.mark.compile
@pytest.mark.parametrize("around", [False, True])
def test_one_number_of_a_tensor_is_that_number(around: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if around:
        monkeypatch.setattr(backend, "suits", lambda *_: False)
    torch.manual_seed(0)
    program = ps.program(Picking(), ps.supervised(CRITERION), optim.sgd(0.1))
    given = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(2)]
    expected = one_by_one(program.train_step, program.init(), given)
    found = one_by_one(ps.compile_step(program.train_step, donate=True), program.init(), given)
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_no_graph_can_hold_is_named() -> None:
    step = compiled(lambda state, batch: (state, {}))
    with pytest.raises(StepContractError, match="the batch has a ndarray, which no compiled graph"):
        step({"w": torch.zeros(2)}, np.ones(3))


def test_one_memory_of_two_leaves_is_not_taken_over_for_both() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        return {
            "w": state["w"] + batch,
            "target": 0.9 * state["target"] + 0.1 * state["w"],
            "e": state["e"] + batch,
        }, {}

    weights, given = torch.ones(3), [torch.arange(3.0)] * 2
    expected = one_by_one(step, {"w": weights, "target": weights, "e": torch.zeros(1).expand(3)}, given)
    state = {"w": weights, "target": weights, "e": torch.zeros(1).expand(3)}
    assert_trees_close(one_by_one(compiled(step, donate="init"), state, given), expected, exact=True)


def test_frozen_weights_that_a_step_of_ones_own_writes_are_not_the_callers() -> None:
    net = tiny_mlp()
    next(net.parameters()).requires_grad_(False)
    program = ps.program(net, ps.supervised(CRITERION), optim.sgd(0.1))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        new, metrics = program.train_step(state, batch)
        return new._replace(frozen={name: value / 2 for name, value in new.frozen.items()}), metrics

    state = program.init()
    before, expected = ps.clone(state), one_by_one(step, state, batches(2))
    assert_trees_close(one_by_one(compiled(step, donate=True), state, batches(2)), expected, exact=True)
    assert_trees_close(state, before, exact=True)


def test_threads_that_compile_wait_for_each_other() -> None:
    program, given = mlp(), batches(3)
    expected = one_by_one(program.train_step, program.init(), given)

    def run(_: int) -> Any:
        return one_by_one(compiled(program.train_step, donate=True), program.init(), given)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(4)):
            assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)


# --- threads ----------------------------------------------------------------------------------------------------------


def _threads_inside(width: int) -> int:
    """Threads that a compiled step of this width is run with, seen by what it calls."""
    seen: list[int] = []
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
    program = ps.program(net, ps.supervised(CRITERION), optim.sgd(0.1))
    batch = (torch.randn(64, width), torch.randint(0, 3, (64,)))
    true = backend._runner

    def watched(*arguments: Any) -> Any:
        run = true(*arguments)

        def call(tensors: list[Tensor]) -> Any:
            seen.append(torch.get_num_threads())
            return run(tensors)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_runner", watched)
        step = ps.compile_step(program.train_step, donate=True)
        step(program.init(), batch)
    return seen[0]


@pytest.mark.compile
@pytest.mark.usefixtures("cpu_plugin", "two_threads")
def test_a_small_step_runs_on_one_thread_and_leaves_the_others_to_the_caller() -> None:
    assert _threads_inside(16) == 1
    assert torch.get_num_threads() == 2


@pytest.mark.compile
@pytest.mark.usefixtures("cpu_plugin", "two_threads")
def test_a_large_step_keeps_its_threads() -> None:
    assert _threads_inside(768) == 2


def test_an_error_inside_gives_the_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            backend.limit_threads(lambda _: 1 / 0, 1)([])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- CUDA graphs, on a recorder that stands for the device ------------------------------------------------------------


class Recorder:
    """What torch.cuda does, on the CPU: recording leaves all memory as it was, replaying runs what was recorded."""

    def __init__(self) -> None:
        self.work: Callable[[], None] = lambda: None
        self.replays = 0
        self.pool: Any = None

    def replay(self) -> None:
        self.replays += 1
        self.work()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    made: list[Recorder] = []

    def record(self: Any, run: Any, tensors: list[Tensor], leaves: list[Any], outside: list[Tensor], pool: Any) -> None:
        self.leaves = [replay.strided_clone(leaf) for leaf in leaves]
        self.memory = [replay.memory_of(leaf) for leaf in self.leaves]
        before = [tensor.clone() for tensor in tensors]
        self.outputs = run(tensors, self.leaves, outside)
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        self.graph, held = Recorder(), weakref.ref(run)  # a CUDA graph holds kernels, no function

        def work() -> None:
            run = held()
            assert run is not None
            fresh = ps.tree.leaves(run(tensors, self.leaves, outside))
            for old, new in zip(ps.tree.leaves(self.outputs), fresh, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        self.graph.work, self.graph.pool = work, pool
        made.append(self.graph)

    monkeypatch.setattr(replay._Recording, "record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return made


def replayed(program: Program) -> Any:
    """A compiled step that takes the CPU for a device with graphs."""
    step = compiled(program.train_step, donate=True, cuda_graph=True)
    replays = step._replays
    step._run = lambda graph, *call: replays.run(graph.run, *call, compiled_step._copied)
    return step


class Elsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: (x * 2).sum(), True),
        (lambda x: torch.ops.purestep.own_copy(x), True),
        (lambda x: torch.ops.purestep.all_reduce(x, "sum", "batch"), False),
        (lambda x: torch.ops.launch_tests.own(x), False),
        (Elsewhere(), False),
    ],
)
def test_only_operators_of_torch_and_purestep_are_recorded_unasked(function: Any, expected: bool) -> None:
    traced = make_fx(function, tracing_mode="fake")(torch.ones(3))
    assert fx_passes.is_recordable(traced) == expected


@library.custom_op("launch_tests::own", mutates_args=())
def own(value: Tensor) -> Tensor:
    return value.clone()


@own.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


def test_replays_are_the_steps_themselves(recorded: list[Recorder]) -> None:
    program, given = mlp(), batches(6)
    expected, metrics = one_by_one(program.train_step, program.init(), given)
    found, read = one_by_one(replayed(program), program.init(), given)
    assert_trees_close(found, expected, exact=True)
    assert_trees_close(read, metrics, rtol=1e-6, atol=0.0)
    assert [graph.replays for graph in recorded] == [4]  # two calls warm up


@pytest.mark.parametrize(("sizes", "looked"), [
    ([16] * 8, 1),
    ([16] * 4 + [8] + [16] * 3, 2),  # two graphs: each knows what it was made for
    ([16, 8] * 4, 2),
])  # fmt: skip
def test_a_replay_looks_at_the_layout_of_a_batch_once(
    recorded: list[Recorder], monkeypatch: pytest.MonkeyPatch, sizes: list[int], looked: int
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(replay, "signature", lambda leaves: looks.append(1) or guards.signature(leaves))
    program, given = mlp(), [vector_batch(size, seed) for seed, size in enumerate(sizes)]
    expected, _ = one_by_one(program.train_step, program.init(), given)
    found, _ = one_by_one(replayed(program), program.init(), given)
    assert_trees_close(found, expected, rtol=1e-6, atol=1e-7)
    assert len(looks) == looked
    assert len(recorded) == sum(sizes.count(size) > replay._WARM for size in set(sizes))


def test_one_function_is_recorded_for_batches_of_each_size(recorded: list[Recorder]) -> None:
    replays, store = replay.CudaGraphs(required=True), StateBuffers(mlp().init(), None, None)

    def run(tensors: list[Tensor], leaves: list[Any], outside: list[Tensor]) -> Any:
        return {"sum": leaves[0].sum()}

    for _ in range(4):
        for size in (2, 3, 2):
            assert replays.run(run, store, [torch.ones(size)], [], ps.clone)["sum"].item() == size
    assert len(recorded) == 2


def test_recordings_go_with_their_function(recorded: list[Recorder]) -> None:
    """A graph that is forgotten, of a teacher of before, leaves its place and its memory to others."""
    replays, store = replay.CudaGraphs(required=True), StateBuffers(mlp().init(), None, None)
    for number in range(2 * replay._MOST):

        def run(tensors: list[Tensor], leaves: list[Any], outside: list[Tensor], number: int = number) -> Any:
            return {"sum": leaves[0].sum() + number}

        for _ in range(4):
            assert replays.run(run, store, [torch.ones(2)], [], ps.clone)["sum"].item() == 2 + number
        del run
        gc.collect()
    assert len(recorded) == 2 * replay._MOST
    assert len({id(graph.pool) for graph in recorded}) == len(recorded)  # torch gives a pool without graphs back


def test_a_batch_that_requires_a_gradient_adds_nothing_to_a_recording(recorded: list[Recorder]) -> None:
    """Such as the weights of a teacher, as the step's context."""
    replays, store = replay.CudaGraphs(required=True), StateBuffers(mlp().init(), None, None)

    def run(tensors: list[Tensor], leaves: list[Any], outside: list[Tensor]) -> Any:
        return {"sum": leaves[0].detach().sum()}

    for _ in range(4):
        replays.run(run, store, [torch.ones(2, requires_grad=True)], [], ps.clone)
    (found,) = next(iter(replays._stores.values())).all()
    assert not any(leaf.requires_grad for leaf in [*found.leaves, *found.memory])


def test_metrics_that_are_not_copied_out_would_change(recorded: list[Recorder]) -> None:
    program = mlp()
    step = replayed(program)
    replays = step._replays
    step._run = lambda graph, *call: replays.run(graph.run, *call, lambda metrics: metrics)
    _, metrics = one_by_one(program.train_step, program.init(), batches(6))
    _, read = one_by_one(step, program.init(), batches(6))
    assert float(read[3]["loss"]) != float(metrics[3]["loss"])


def test_another_state_and_another_size_are_recorded_anew(recorded: list[Recorder]) -> None:
    program = mlp()
    step = replayed(program)
    short = [(x[:5], y[:5]) for x, y in batches(4)]
    for _ in range(2):
        expected, _ = one_by_one(program.train_step, program.init(), [*batches(4), *short])
        found, _ = one_by_one(step, program.init(), [*batches(4), *short])
        assert_trees_close(found, expected, exact=True)
    assert [graph.replays for graph in recorded] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("not permitted when stream is capturing\nmore"), r"as a CUDA graph: not permitted.*_graph=False"),
        (
            torch.OutOfMemoryError("tried to allocate\nmore"),
            r"no memory is left to .*: tried to allocate .*smaller batch",
        ),
    ],
)
def test_a_step_that_cannot_be_recorded_is_named_and_keeps_its_state(
    error: RuntimeError, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> None:
            raise error

        def __exit__(self, *_: Any) -> None: ...

    ended: list[tuple[str, Any]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda _, pool, name=name: ended.append((name, pool)), raising=False)
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "its pool")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(replay, "_stream", lambda device: "another")
    program = mlp()
    step = replayed(program)
    state, _ = one_by_one(program.train_step, program.init(), batches(2))
    live, first = program.init(), batches(3)
    for batch in first[:2]:
        live, _ = step(live, batch)
    with pytest.raises(StepContractError, match=told):
        step(live, first[2])
    if "capturing" in str(error):  # the allocator does not wait for the end of a recording that was broken off
        assert ended == [("_cuda_endAllocateToPool", "its pool"), ("_cuda_releasePool", "its pool")]
    assert_trees_close(ps.clone(live), state, exact=True)
    assert set(streams) == {"the caller's"}  # torch leaves its own where the end of a recording fails


def test_every_size_is_recorded_for_itself(recorded: list[Recorder]) -> None:
    """From the third size on one compiled graph serves all of them; a recording serves one."""
    program, whole = mlp(), batches(9)
    given = [(x[:size], y[:size]) for (x, y), size in zip(whole, (8, 7, 6, 6, 6, 5, 1, 1, 1), strict=True)]
    expected, metrics = one_by_one(program.train_step, program.init(), given)
    found, read = one_by_one(replayed(program), program.init(), given)
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_trees_close(read, metrics, rtol=1e-5, atol=1e-6)
    assert [graph.replays for graph in recorded] == [1, 1]


def test_batches_of_very_many_sizes_are_not_all_recorded(
    recorded: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_MOST", 2)
    program = mlp()
    given = [(x[:size], y[:size]) for size in (8, 7, 6) for x, y in batches(3)]
    expected, _ = one_by_one(program.train_step, program.init(), given)
    found, _ = one_by_one(replayed(program), program.init(), given)
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(recorded) == 2


def test_slices_and_expanded_batches_keep_their_strides(recorded: list[Recorder]) -> None:
    program = mlp()
    wide = [(torch.cat([x, x], 1)[:, : x.shape[1]], y[:1].expand_as(y)) for x, y in batches(5)]
    expected, _ = one_by_one(program.train_step, program.init(), wide)
    found, _ = one_by_one(replayed(program), program.init(), wide)
    assert_trees_close(found, expected, exact=True)
    assert [graph.replays for graph in recorded] == [3]


def test_tensors_outside_are_read_where_they_lie(recorded: list[Recorder]) -> None:
    """Without a copy; at another place, by another recording."""
    table = torch.ones(3)

    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(CRITERION(model(batch[0]) * table, batch[1]), len(batch[1]))

    program = ps.program(tiny_mlp(), objective, optim.sgd(0.1))
    step = replayed(program)
    state = eager = program.init()
    for number, batch in enumerate(batches(9)):
        if number == 6:
            table.data = torch.full((3,), -1.0)
        table.mul_(1.5)
        state, metrics = step(state, batch)
        eager, expected = program.train_step(eager, batch)
        assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert [graph.replays for graph in recorded] == [4, 1]


def test_a_pool_belongs_to_one_state(recorded: list[Recorder]) -> None:
    """Torch gives no memory to a pool whose graphs are all gone: use_count > 0 INTERNAL ASSERT FAILED."""
    program = mlp()
    step = replayed(program)
    for _ in range(2):
        one_by_one(step, program.init(), batches(3))
    assert recorded[0].pool is not recorded[1].pool


def test_what_lies_on_another_device_is_not_recorded(recorded: list[Recorder]) -> None:
    """A number that the host has read would be a constant of the recording."""
    program = mlp()
    step = replayed(program)
    given = batches(5)
    state, _ = step(program.init(), given[0])
    state.live_store.device = torch.device("meta")  # elsewhere than its batches
    for x, y in given[1:]:
        state, _ = step(state, (x[:8], y[:8]))
    assert recorded == []


def test_a_cuda_graph_needs_donation_and_is_none_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"donate=True, cuda_graph=True"):
        ps.compile_step(mlp().train_step, cuda_graph=True)
    program = ps.program(tiny_convnet(), ps.supervised(CRITERION), optim.sgd(0.1))
    step = compiled(program.train_step, donate=True, cuda_graph=True)
    state = program.init()
    for seed in range(4):
        state, _ = step(state, image_batch(8, seed))
    assert int(state.step) == 4
