"""What comes before the first compiled step: C++ built beside inductor's Python, native code found again."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor, library
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep import optim
from purestep.compile import capture
from purestep.compile.cpu import backend, code_cache, graph_key
from purestep.compile.cpu import launcher as calls
from purestep.errors import StepContractError
from purestep.torch_ext import tracing

pytestmark = pytest.mark.usefixtures("own_cache")

if not backend._KNOWN:
    pytest.skip("native code is made with torch 2.13 and later", allow_module_level=True)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


# --- names ------------------------------------------------------------------------------------------------------------


def name_of(function: Callable[..., Any], *inputs: Tensor, **settings: Any) -> str | None:
    return code_cache.name(graph_key.record(function, inputs), settings)


def twice(x: Tensor) -> Tensor:
    return x * 2


OTHERS: list[tuple[Callable[..., Any], Tensor]] = [
    (lambda x: x * 3, torch.ones(4, 4)),
    (lambda x: x * 2.0, torch.ones(4, 4)),
    (lambda x: x + 2, torch.ones(4, 4)),
    (lambda x: x * 2 * 2, torch.ones(4, 4)),
    (lambda x: (x * 2).to(torch.float64), torch.ones(4, 4)),
    (twice, torch.ones(4, 5)),
    (twice, torch.ones(4, 4, dtype=torch.float64)),
    (twice, torch.ones(4, 8)[:, ::2]),
    (twice, torch.ones(20)[4:].view(4, 4)),
    (lambda x: [x * 2, x], torch.ones(4, 4)),
    (lambda x: [x, x * 2][:1], torch.ones(4, 4)),
    (lambda x: [x * 2 + 1, x * 2][1], torch.ones(4, 4)),
    (lambda x: x.mul_(2), torch.ones(4, 4)),
    (lambda x: x.mul(2).add_(0), torch.ones(4, 4)),
]
PAIRS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: x @ x.t(), lambda x: x.t() @ x),
    (lambda x: [x + 1, x + 2], lambda x: [x + 2, x + 1]),
    (lambda x: [x.exp(), x.sin()], lambda x: [x.exp(), x.sin()][::-1]),
    (lambda x: x.sub(x.exp()), lambda x: x.exp().sub(x)),
    (lambda x: torch.add(x, x, alpha=2), lambda x: torch.add(x, x, alpha=3)),
    (lambda x: torch.empty_like(x).copy_(x), lambda x: x.clone()),
    (lambda x: torch.dropout(x, 0.5, True), lambda x: torch.dropout(x, 0.25, True)),
    (lambda x: x.split([1, 3])[0], lambda x: x.split([1, 3])[1]),
    (lambda x: x.masked_fill(x > 0, float("inf")), lambda x: x.masked_fill(x > 0, float("-inf"))),
    (lambda x: torch.zeros_like(x, dtype=torch.float64), lambda x: torch.zeros_like(x, dtype=torch.int64)),
]


def test_the_same_graph_has_the_same_name():
    assert name_of(twice, torch.ones(4, 4)) == name_of(lambda y: y * 2, torch.zeros(4, 4)) is not None


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_another_graph_has_another_name(other: tuple[Callable[..., Any], Tensor]):
    names = [name_of(twice, torch.ones(4, 4)), name_of(*other)]
    assert None not in names
    assert names[0] != names[1]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=range(len(PAIRS)))
def test_functions_that_differ_have_two_names(one: Callable[..., Any], other: Callable[..., Any]):
    x = torch.ones(4, 4)
    assert name_of(one, x) == name_of(one, x) is not None
    assert name_of(other, x) not in (name_of(one, x), None)


def test_which_input_is_which_is_part_of_a_name():
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    assert name_of(lambda x, y: x - y, x, y) not in (name_of(lambda x, y: y - x, x, y), None)
    assert name_of(lambda x, y: y - x, x, y) is not None
    assert name_of(lambda x, y: x.copy_(y), x, y) not in (name_of(lambda x, y: y.copy_(x), x, y), None)
    assert name_of(lambda x, y: y.copy_(x), x, y) is not None


def test_what_autograd_does_is_part_of_a_name():
    def slope(detached: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.grad(lambda x: (x.exp() * (x.exp().detach() if detached else x.exp())).sum())(x)

    assert name_of(slope(True), torch.ones(4)) not in (name_of(slope(False), torch.ones(4)), None)


def test_equal_numbers_of_other_types_are_written_otherwise():
    assert len({graph_key.plain(1), graph_key.plain(True), graph_key.plain(1.0)}) == 3
    assert graph_key.plain(0.0) != graph_key.plain(-0.0)


def test_settings_are_part_of_a_name():
    plain = name_of(twice, torch.ones(4, 4))
    assert plain is not None
    with config.patch({"cpp.threads": 1}):
        assert name_of(twice, torch.ones(4, 4)) not in (plain, None)
    assert name_of(twice, torch.ones(4, 4), **{"cpp.threads": 1}) not in (plain, None)


def test_the_number_of_threads_is_part_of_a_name(request: pytest.FixtureRequest):
    one = name_of(twice, torch.ones(4, 4))
    request.getfixturevalue("two_threads")
    assert name_of(twice, torch.ones(4, 4)) not in (one, None)


@pytest.fixture
def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a copy of what turns a graph into a library."""
    copy = shutil.copytree(Path(code_cache.__file__).parents[1], tmp_path / "compile")
    code_cache._installed.cache_clear()
    monkeypatch.setattr(code_cache, "__file__", str(copy / "cpu" / "code_cache.py"))
    yield copy
    code_cache._installed.cache_clear()


@pytest.mark.parametrize("changed", ["fx_passes.py", "cpu/backend.py", "cpu/csrc/gemm.cpp", "another.py"])
def test_what_is_installed_is_part_of_a_name(copied_sources: Path, changed: str):
    plain = name_of(twice, torch.ones(4, 4))
    code_cache._installed.cache_clear()
    assert name_of(twice, torch.ones(4, 4)) == plain is not None
    with (copied_sources / changed).open("a") as source:
        source.write("# changed\n")
    code_cache._installed.cache_clear()
    assert name_of(twice, torch.ones(4, 4)) not in (plain, None)


@pytest.mark.compile
def test_inductors_own_cache_does_not_find_what_another_version_has_written(
    copied_sources: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(code_cache, "name", lambda *_: None)
    found = list[int]()
    for text in ("", "", "# changed\n"):
        with (copied_sources / "wrapper.py").open("a") as source:
            source.write(text)
        code_cache._installed.cache_clear()
        before = counters["inductor"]["fxgraph_cache_hit"]
        backend.compiled(graph_key.record(lambda x: [x + 2], [torch.ones(3, 5)]), options=None)
        found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
    assert found == [0, 1, 0]


def test_torch_and_the_machine_are_part_of_a_name(monkeypatch: pytest.MonkeyPatch):
    plain = name_of(twice, torch.ones(4, 4))
    for owner, value in ((torch, "__version__"), (code_cache, "_processor")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, value, "another" if owner is torch else lambda: "another")
            code_cache._installed.cache_clear()
            assert name_of(twice, torch.ones(4, 4)) not in (plain, None)
    code_cache._installed.cache_clear()
    assert name_of(twice, torch.ones(4, 4)) == plain


@library.custom_op("test_code_cache::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


@triple.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


TABLE = torch.arange(4.0)


def looks(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def draws_of_its_own(x: Tensor) -> Tensor:
    return torch.rand(4, generator=torch.Generator()) + x


def hides_it(x: Tensor) -> Tensor:
    """Goes another way where the tensor from elsewhere is refused."""
    with suppress(Exception):
        x = x + TABLE
    return x


@pytest.mark.parametrize("function", [lambda x: x + TABLE, lambda x: triple(x), looks, draws_of_its_own, hides_it])
def test_what_text_does_not_tell_has_no_name(function: Callable[..., Any]):
    assert name_of(function, torch.ones(4)) is None


@pytest.mark.parametrize(
    "settings",
    [{"post_grad_custom_post_pass": lambda graph: None}, {"force_disable_caches": True}, {"fx_graph_cache": False}],
    ids=["pass", "no caches", "no graph cache"],
)
def test_what_is_set_otherwise_has_no_name(settings: dict[str, Any]):
    with config.patch(settings):
        assert name_of(twice, torch.ones(4, 4)) is None
    assert name_of(twice, torch.ones(4, 4)) is not None


@pytest.mark.parametrize("table", ["torch._decomp.decomposition_table", "torch._inductor.lowering.lowerings"])
def test_what_the_user_makes_of_an_operator_has_no_name(table: str, monkeypatch: pytest.MonkeyPatch):
    importlib.import_module(table.rpartition(".")[0])
    assert name_of(twice, torch.ones(4, 4)) is not None
    with monkeypatch.context() as patch:
        patch.setitem(pkgutil.resolve_name(table), torch.ops.aten.mul.Tensor, lambda x, y: x + y)
        assert name_of(twice, torch.ones(4, 4)) is None
    assert name_of(twice, torch.ones(4, 4)) is not None


# --- found again ------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that went through inductor."""
    seen: list[Any] = []
    true = backend._lower

    def lowered(*arguments: Any) -> Any:
        seen.append(arguments[0])
        return true(*arguments)

    monkeypatch.setattr(backend, "_lower", lowered)
    return seen


def run(factor: float) -> Tensor:
    """``sin(x) * factor`` of native code, made or found again."""

    def function(x: Tensor) -> list[Tensor]:
        return [torch.sin(x) * factor]

    call, _ = backend.compiled(graph_key.record(function, [torch.ones(300)]), options=None)
    (found,) = call([torch.full((300,), 2.0)])
    torch.testing.assert_close(found, torch.sin(torch.full((300,), 2.0)) * factor)
    return found


@pytest.mark.compile
def test_code_is_found_again(made: list[Any]):
    first = run(1.25)
    assert len(made) == 1
    assert run(1.25).equal(first)
    assert len(made) == 1
    run(1.5)
    assert len(made) == 2


@pytest.mark.compile
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_a_step_that_is_found_again_trains_as_before(made: list[Any], rate: float):
    net = torch.nn.Sequential(*tiny_mlp(), torch.nn.Dropout(rate)) if rate else tiny_mlp()
    program = ps.program(net, ps.supervised(torch.nn.CrossEntropyLoss()), optim.sgd(0.01), ema=0.9)
    ends = []
    for _ in range(2):
        step, state = ps.compile_step(program.train_step, donate=True), program.init()
        for seed in range(3):
            state, metrics = step(state, vector_batch(16, seed))
        ends.append((ps.clone(state), {name: float(mean) for name, mean in metrics.items()}))
    assert len(made) == 1
    assert_trees_close(ends[1], ends[0], rtol=0, atol=0)


@pytest.mark.compile
def test_how_code_may_be_called_is_kept_with_it(own_cache: Path, two_threads: None):
    def of(function: Callable[[Tensor], list[Tensor]], size: int) -> list[Any]:
        backend.compiled(graph_key.record(function, [torch.ones(size)]), options=None)
        newest = max((own_cache / "purestep").iterdir(), key=lambda file: file.stat().st_mtime_ns)
        return code_cache._read(newest)[2:]

    small, large = of(lambda x: [x.sin()], 300), of(lambda x: [torch.rand_like(x)], 1 << 25)
    assert small == [False, 1]
    assert large == [True, 2]


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.1)),
    "norms": lambda: torch.nn.Sequential(
        torch.nn.BatchNorm1d(6, track_running_stats=False), torch.nn.LayerNorm(8), torch.nn.ReLU(inplace=True)
    ),
    "convolution": lambda: torch.nn.Sequential(torch.nn.Conv1d(6, 4, 3), torch.nn.MaxPool1d(2), torch.nn.Flatten()),
    "recurrent": lambda: First(torch.nn.LSTM(8, 5, batch_first=True)),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "attention": lambda: Twice(torch.nn.MultiheadAttention(8, 2, batch_first=True)),
    "checkpointed": lambda: Checkpointed(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))),
}


class First(torch.nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)[0]


class Twice(torch.nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x, x, x)[0]


class Checkpointed(torch.nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self[0], x, use_reentrant=False)


def graph_of(function: Callable[..., Any], inputs: list[Tensor]) -> list[str]:
    """What is traced: operations without names, those that show a tensor as it is left out."""
    with tracing.no_recurrent_kernel(), torch.no_grad():
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs).graph
    graph.eliminate_dead_code()
    names, lines = dict[Any, str](), list[str]()

    def text(value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"({', '.join(map(text, value))})"
        return names[value] if isinstance(value, torch.fx.Node) else repr(value)

    for node in graph.nodes:
        if node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            names[node] = text(node.args[0])
            continue
        names[node] = f"%{len(lines)}"
        lines.append(
            f"{node.op} {node.target if node.op == 'call_function' else ''} {text(node.args)} {dict(node.kwargs)}"
        )
    return lines


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mode", ["train", "eval", "autocast"])
def test_the_graph_of_what_was_recorded_is_that_of_the_function(kind: str, mode: str):
    net = LAYERS[kind]().train(mode != "eval")
    names = [name for name, _ in net.named_parameters()]

    def function(x: Tensor, *values: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(mode != "eval"), torch.autocast("cpu", enabled=mode == "autocast"):
            leaves = [value.detach().requires_grad_(mode != "eval") for value in values]
            params = dict(zip(names, leaves, strict=True))
            loss = torch.func.functional_call(net, params, (x,)).float().square().mean()
        return [loss.detach()] if mode == "eval" else [loss.detach(), *torch.autograd.grad(loss, leaves)]

    inputs = [torch.randn(4, 6, 8), *(value.detach() for value in net.parameters())]
    step = capture._traceable(function)
    with torch.no_grad(), tracing.capturing(), tracing.no_recurrent_kernel():
        record = graph_key.record(step, inputs)
    assert graph_of(record.function, inputs) == graph_of(step, inputs)


class Impure(torch.nn.Module):
    """Python that does something else at each call."""

    calls = 0  # of all of them: a program has a copy of its own

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.table = torch.nn.Linear(4, 3), kind, None
        Impure.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Impure.calls += 1
        if self.kind == "keeps" and self.table is None:
            self.table = torch.arange(3.0).cos()
        return self.layer(x) * (self.table if self.kind == "keeps" else 1.0 if self.calls == 1 else 100.0)


def first_loss(net: torch.nn.Module, *sizes: int) -> float:
    program = ps.program(net, ps.supervised(torch.nn.CrossEntropyLoss()), optim.sgd(0.01))
    step, state = ps.compile_step(program.train_step), program.init()
    losses = [float(step(state, vector_batch(size))[1]["loss"]) for size in sizes]
    return losses[0]


@pytest.mark.compile
def test_python_is_run_once_whether_code_is_made_or_found():
    """Else the code would be that of another run than the one it is named by, and found by steps that do not count."""
    found = list[float]()
    for _ in range(2):
        torch.manual_seed(0)
        found.append(first_loss(Impure("counts"), 16))
        assert Impure.calls == 1
    torch.manual_seed(0)
    x, y = vector_batch(16)
    expected = torch.nn.functional.cross_entropy(Impure("counts")(x), y).item()
    assert found == pytest.approx([expected, expected])


@pytest.mark.compile
def test_what_forward_keeps_is_part_of_the_graph_that_made_it_and_no_other_reads_it():
    torch.manual_seed(0)
    assert first_loss(Impure("keeps"), 16) > 0
    with pytest.raises(StepContractError, match="the step stored during an earlier capture"):
        first_loss(Impure("keeps"), 16, 8)


@pytest.mark.compile
def test_sizes_that_are_values_make_a_graph_that_is_not_kept(made: list[Any], own_cache: Path):
    for _ in range(2):
        record = graph_key.record(lambda x: [x[x > 0].sum()], [torch.ones(5)])
        assert record.lines is None
        run, _ = backend.compiled(record, options=None)
        assert float(run([torch.tensor([1.0, -1.0, 2.0, 0.0, 0.0])])[0]) == 3
    assert len(made) == 2
    assert not (own_cache / "purestep").exists()


def library_of(record: Path) -> Path:
    return record.parents[1] / code_cache._read(record)[0]


def _cut(library: Path, _: Path) -> None:
    whole = library.read_bytes()
    library.unlink()  # the file that is loaded stays what it is
    library.write_bytes(whole[:-1])


def _remove(library: Path, _: Path) -> None:
    library.unlink()


def _garble(_: Path, record: Path) -> None:
    record.write_text("nonsense")


def _call_otherwise(_: Path, record: Path) -> None:
    record.write_text(record.read_text().replace("false", "true"))


@pytest.mark.compile
@pytest.mark.parametrize("damage", [_cut, _remove, _garble, _call_otherwise])
def test_what_is_not_as_it_was_is_made_anew(damage: Callable[[Path, Path], None], made: list[Any], own_cache: Path):
    run(2.0)
    (record,) = (own_cache / "purestep").iterdir()
    damage(library_of(record), record)
    assert code_cache.load(record.name, 1) is None
    run(2.0)
    assert len(made) == 2


_ANOTHER_PROCESS = """
import torch
from purestep.compile.cpu import backend as native, graph_key as recording
call, _ = native.compiled(recording.record(lambda x: [torch.sin(x) * 3.25], [torch.ones(300)]), options=None)
(found,) = call([torch.full((300,), 2.0)])
print((found - torch.sin(torch.tensor(2.0)) * 3.25).abs().max() < 1e-6)
"""


@pytest.mark.compile
@pytest.mark.optimized
def test_a_damaged_library_is_no_trap_for_the_next_process(own_cache: Path):
    """Inductor loads a library that lies where it would put one: cut off, that is a SIGBUS in every process to come."""
    run(3.25)
    (record,) = (own_cache / "purestep").iterdir()
    library = library_of(record)
    _cut(library, record)
    library.write_bytes(library.read_bytes()[:5000])
    for _ in range(2):
        assert printed(_ANOTHER_PROCESS) == "tensor(True)"
    assert library.stat().st_size > 5000


_WARM = """
import torch
from purestep.compile.cpu import backend as native, graph_key as recording
native._compile = None  # nothing is compiled
call, _ = native.compiled(recording.record(lambda x: [torch.sin(x) * 3.75], [torch.ones(300)]), options=None)
print(call([torch.zeros(300)])[0].abs().max())
"""


@pytest.mark.compile
@pytest.mark.optimized
def test_code_of_an_earlier_run_is_loaded_wherever_it_has_been_moved_to(own_cache: Path):
    run(3.75)
    moved = own_cache.rename(own_cache.with_name("moved"))
    assert printed(_WARM, TORCHINDUCTOR_CACHE_DIR=str(moved)) == "tensor(0.)"


@pytest.fixture
def code(own_cache: Path) -> code_cache.Made:
    library = own_cache / "library.so"
    library.write_bytes(b"code")
    return code_cache.Made(calls.Code(lambda tensors: tensors, str(library)), draws=False, threads=1)


def test_a_record_that_cannot_be_written_leaves_nothing_behind(own_cache: Path, code: code_cache.Made):
    (own_cache / "purestep" / "name" / "in the way").mkdir(parents=True)
    code_cache.keep("name", code)
    assert [path.name for path in (own_cache / "purestep").iterdir()] == ["name"]


_FULL = """
import resource, signal, sys
from purestep.compile.cpu import launcher as calls, code_cache as kept
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
code = calls.Code(lambda tensors: tensors, sys.argv[1])
kept.keep("name", kept.Made(code, draws=False, threads=1))
"""


@pytest.mark.optimized
def test_a_record_on_a_full_disk_leaves_nothing_behind(own_cache: Path, code: code_cache.Made):
    """A limit on the size of files, which this record is longer than, fails in the middle of a write too."""
    assert printed(_FULL.replace("sys.argv[1]", repr(code.code.file))) == ""
    assert list((own_cache / "purestep").iterdir()) == []


def test_only_what_inductor_calls_with_tensors_alone_is_kept(own_cache: Path):
    code_cache.keep(
        "0" * 64, code_cache.Made(calls.of(lambda tensors: tensors, 1, in_workspace=True), draws=False, threads=1)
    )
    assert not (own_cache / "purestep").exists()


# --- in other processes -----------------------------------------------------------------------------------------------


def printed(code: str, **surroundings: str) -> str:
    """What another process prints that runs this code."""
    source = str(Path(backend.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source} | surroundings,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.strip()


_TWO_THREADS = """
import threading, torch
import purestep as ps
def train(width):
    net = torch.nn.Linear(width, 2)
    program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    step, state = ps.compile_step(program.train_step), program.init()
    state, metrics = step(state, (torch.ones(4, width), torch.ones(4, 2)))
    ends.append(bool(torch.isfinite(state.params["weight"]).all()))
ends = []
threads = [threading.Thread(target=train, args=(width,)) for width in (3, 5)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(240)
print(ends)
"""


@pytest.mark.compile
@pytest.mark.optimized
def test_two_threads_that_start_together_do_not_wait_for_one_another(own_cache: Path):
    for _ in range(2):  # made, found
        assert printed(_TWO_THREADS) == "[True, True]"


# --- what depends on size, and garbage --------------------------------------------------------------------------------


def test_only_long_steps_are_called_by_slow_code():
    with config.patch(backend._by_size(1e10)):
        assert config.aot_inductor.compile_wrapper_opt_level == "O0"
