"""What comes before the first compiled step: C++ built beside inductor's Python, native code found again."""

from __future__ import annotations

import builtins
import gc
import importlib
import itertools
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor, library
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep import optim, rng
from purestep.compile import apart, calls, capture, kept, kernels, native, products, recording, shortcuts, toolchain
from purestep.compile.alone import alone
from purestep.errors import StepContractError

pytestmark = pytest.mark.usefixtures("own_cache")

if not native._KNOWN:
    pytest.skip("native code is made with torch 2.13 and later", allow_module_level=True)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


# --- names ------------------------------------------------------------------------------------------------------------


def name_of(function: Callable[..., Any], *inputs: Tensor, **settings: Any) -> str | None:
    return kept.name(recording.record(function, inputs), settings)


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
    assert len({recording.plain(1), recording.plain(True), recording.plain(1.0)}) == 3
    assert recording.plain(0.0) != recording.plain(-0.0)


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
    copy = shutil.copytree(Path(kept.__file__).parent, tmp_path / "compile")
    kept._installed.cache_clear()
    monkeypatch.setattr(kept, "__file__", str(copy / "kept.py"))
    yield copy
    kept._installed.cache_clear()


@pytest.mark.parametrize("changed", ["native.py", "kernels.py", "another.py"])
def test_what_is_installed_is_part_of_a_name(copied_sources: Path, changed: str):
    plain = name_of(twice, torch.ones(4, 4))
    kept._installed.cache_clear()
    assert name_of(twice, torch.ones(4, 4)) == plain is not None
    with (copied_sources / changed).open("a") as source:
        source.write("# changed\n")
    kept._installed.cache_clear()
    assert name_of(twice, torch.ones(4, 4)) not in (plain, None)


@pytest.mark.compile
def test_inductors_own_cache_does_not_find_what_another_version_has_written(
    copied_sources: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept, "name", lambda *_: None)
    found = list[int]()
    for text in ("", "", "# changed\n"):
        with (copied_sources / "wrapper.py").open("a") as source:
            source.write(text)
        kept._installed.cache_clear()
        before = counters["inductor"]["fxgraph_cache_hit"]
        native.compiled(recording.record(lambda x: [x + 2], [torch.ones(3, 5)]), options=None)
        found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
    assert found == [0, 1, 0]


def test_torch_and_the_machine_are_part_of_a_name(monkeypatch: pytest.MonkeyPatch):
    plain = name_of(twice, torch.ones(4, 4))
    for owner, value in ((torch, "__version__"), (kept, "_processor")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, value, "another" if owner is torch else lambda: "another")
            kept._installed.cache_clear()
            assert name_of(twice, torch.ones(4, 4)) not in (plain, None)
    kept._installed.cache_clear()
    assert name_of(twice, torch.ones(4, 4)) == plain


@library.custom_op("test_first_step::triple", mutates_args=())
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
    true = native._lowered

    def lowered(*arguments: Any) -> Any:
        seen.append(arguments[0])
        return true(*arguments)

    monkeypatch.setattr(native, "_lowered", lowered)
    return seen


def run(factor: float) -> Tensor:
    """``sin(x) * factor`` of native code, made or found again."""

    def function(x: Tensor) -> list[Tensor]:
        return [torch.sin(x) * factor]

    call, _ = native.compiled(recording.record(function, [torch.ones(300)]), options=None)
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
        native.compiled(recording.record(function, [torch.ones(size)]), options=None)
        newest = max((own_cache / "purestep").iterdir(), key=lambda file: file.stat().st_mtime_ns)
        return kept._read(newest)[2:]

    small, large = of(lambda x: [x.sin()], 300), of(lambda x: [torch.rand_like(x)], 1 << 25)
    assert small == [False, True, 1]
    assert large == [True, True, 2]


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
    with native.no_recurrent_kernel(), torch.no_grad():
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
    step = capture._recorded(function)
    with torch.no_grad(), rng.capturing(), native.no_recurrent_kernel():
        record = recording.record(step, inputs)
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
    with pytest.raises(StepContractError, match="an earlier capture of the step has left behind"):
        first_loss(Impure("keeps"), 16, 8)


@pytest.mark.compile
def test_sizes_that_are_values_make_a_graph_that_is_not_kept(made: list[Any], own_cache: Path):
    for _ in range(2):
        record = recording.record(lambda x: [x[x > 0].sum()], [torch.ones(5)])
        assert record.lines is None
        run, _ = native.compiled(record, options=None)
        assert float(run([torch.tensor([1.0, -1.0, 2.0, 0.0, 0.0])])[0]) == 3
    assert len(made) == 2
    assert not (own_cache / "purestep").exists()


def library_of(record: Path) -> Path:
    return record.parents[1] / kept._read(record)[0]


def _cut(library: Path, _: Path) -> None:
    whole = library.read_bytes()
    library.unlink()  # the file that is loaded stays what it is
    library.write_bytes(whole[:-1])


def _remove(library: Path, _: Path) -> None:
    library.unlink()


def _garble(_: Path, record: Path) -> None:
    record.write_text("nonsense")


def _call_otherwise(_: Path, record: Path) -> None:
    record.write_text(record.read_text().replace("true", "false"))


@pytest.mark.compile
@pytest.mark.parametrize("damage", [_cut, _remove, _garble, _call_otherwise])
def test_what_is_not_as_it_was_is_made_anew(damage: Callable[[Path, Path], None], made: list[Any], own_cache: Path):
    run(2.0)
    (record,) = (own_cache / "purestep").iterdir()
    damage(library_of(record), record)
    assert kept.load(record.name) is None
    run(2.0)
    assert len(made) == 2


_ANOTHER_PROCESS = """
import torch
from purestep.compile import native, recording
call, _ = native.compiled(recording.record(lambda x: [torch.sin(x) * 3.25], [torch.ones(300)]), options=None)
(found,) = call([torch.full((300,), 2.0)])
print((found - torch.sin(torch.tensor(2.0)) * 3.25).abs().max() < 1e-6)
"""


@pytest.mark.compile
@pytest.mark.slow
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
import sys
import torch
from purestep.compile import native, recording
call, _ = native.compiled(recording.record(lambda x: [torch.sin(x) * 3.75], [torch.ones(300)]), options=None)
call([torch.ones(300)])
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.compile
@pytest.mark.slow
def test_code_of_an_earlier_run_is_loaded_without_the_compiler_wherever_it_has_been_moved_to(own_cache: Path):
    run(3.75)
    moved = own_cache.rename(own_cache.with_name("moved"))
    assert printed(_WARM, TORCHINDUCTOR_CACHE_DIR=str(moved)) == "[]"


@pytest.fixture
def code(own_cache: Path) -> kept.Made:
    library = own_cache / "library.so"
    library.write_bytes(b"code")
    return kept.Made(calls.Code(lambda tensors: tensors, str(library)), draws=False, in_arena=True, threads=1)


def test_a_record_that_cannot_be_written_leaves_nothing_behind(own_cache: Path, code: kept.Made):
    (own_cache / "purestep" / "name" / "in the way").mkdir(parents=True)
    kept.keep("name", code)
    assert [path.name for path in (own_cache / "purestep").iterdir()] == ["name"]


_FULL = """
import resource, signal, sys
from purestep.compile import calls, kept
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
code = calls.Code(lambda tensors: tensors, sys.argv[1])
kept.keep("name", kept.Made(code, draws=False, in_arena=True, threads=1))
"""


@pytest.mark.slow
def test_a_record_on_a_full_disk_leaves_nothing_behind(own_cache: Path, code: kept.Made):
    """A limit on the size of files, which this record is longer than, fails in the middle of a write too."""
    assert printed(_FULL.replace("sys.argv[1]", repr(code.code.file))) == ""
    assert list((own_cache / "purestep").iterdir()) == []


def test_only_what_inductor_calls_with_tensors_alone_is_kept(own_cache: Path):
    kept.keep("0" * 64, kept.Made(calls.of(lambda tensors: tensors), draws=False, in_arena=True, threads=1))
    assert not (own_cache / "purestep").exists()


# --- without the compiler ---------------------------------------------------------------------------------------------


def printed(code: str, **surroundings: str) -> str:
    """What another process prints that runs this code."""
    source = str(Path(native.__file__).parents[2])
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


_SETTINGS = """
import sys, torch
from purestep.compile import apart
def told():
    settings = apart.module("torch._inductor.config")
    whole = settings.save_config_portable(ignore_private_configs=False)
    return whole, settings._save_config_ignore, settings.cpp.min_chunk_size
def place():
    return apart.module("torch._inductor.runtime.cache_dir_utils").cache_dir()
apart_, there = told(), place()
assert "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules
import torch._inductor.config as settings
assert apart.module("torch._inductor.config") is settings
print(told() == apart_, place() == there, len(apart_[0]) > 300, apart_[2])
"""


def test_settings_are_the_same_before_the_compiler_is_loaded():
    assert printed(_SETTINGS, TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE="128") == "True True True 128"
    assert printed(_SETTINGS, TORCHINDUCTOR_FREEZING="1", TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE="64") == "True True True 64"


_FAKES = """
import sys, torch
from purestep.compile import apart
from torch._subclasses import FakeTensorMode
leaves = [torch.ones(4, 8)[:, ::2], torch.ones(20)[4:].view(4, 4), torch.ones(0, 3), torch.ones(3).requires_grad_(),
          torch.ones(5, dtype=torch.int64), torch.tensor(2.0), torch.ones(1).expand(4), torch.ones(6, 0)[2:]]
def layout(leaf):
    return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.requires_grad
with apart.unloaded():
    mode = FakeTensorMode()
    made = [layout(leaf) for leaf in apart.fakes(mode, leaves)]
assert "torch._dynamo" not in sys.modules
true = FakeTensorMode()
print(made == [layout(true.from_tensor(leaf)) for leaf in leaves] == [layout(leaf) for leaf in leaves])
print({name for name in vars(true) if isinstance(vars(true)[name], bool) and vars(true)[name] != vars(mode)[name]})
"""


def test_tensors_without_memory_are_made_as_by_torch():
    assert printed(_FAKES).split() == ["True", "set()"]


def _patches() -> tuple[Any, Any]:
    return builtins.__import__, vars(fake_tensor)["torch"]


def test_torch_is_left_as_it_was():
    before = _patches()

    def fails() -> None:
        with apart.unloaded():
            assert all(now is not then for now, then in zip(_patches(), before, strict=True))
            with apart.unloaded():
                pass
            assert all(now is not then for now, then in zip(_patches(), before, strict=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert _patches() == before


_DISABLED = """
import torch
from purestep.compile import apart
from torch.utils._python_dispatch import TorchDispatchMode
seen = []
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        return func(*args, **(kwargs or {}))
with apart.unloaded(), Mode():
    torch.ones(2)
import sys
assert "torch._dynamo" not in sys.modules
import torch._dynamo
true, told = torch._dynamo.disable, []
def disable(function, *rest, **more):
    told.append(function.__name__)
    return true(function, *rest, **more)
torch._dynamo.disable = disable
for _ in range(2):
    with Mode():
        torch.ones(2)
print(len(seen), told)
"""


def test_dynamo_is_told_what_to_leave_alone_once_it_is_loaded():
    assert printed(_DISABLED) == "3 ['__torch_dispatch__']"


_FOR_OTHERS = """
import sys, torch
from purestep.compile import apart
with apart.unloaded():
    import torch._dynamo.config as settings
    assert settings is sys.modules["torch._dynamo.config"] is sys.modules["torch._dynamo"].config
print(torch._dynamo.config is settings)
"""


def test_whoever_else_names_the_compiler_gets_it():
    assert printed(_FOR_OTHERS) == "True"


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
@pytest.mark.slow
def test_two_threads_that_start_together_do_not_wait_for_one_another(own_cache: Path):
    for _ in range(2):  # made, found
        assert printed(_TWO_THREADS) == "[True, True]"


_ANOTHER_THREAD = """
import threading, time, torch
from purestep.compile import apart
ends = []
def other():
    import torch._inductor.compile_fx
    ends.append(torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.zeros(3)).tolist())
with apart.unloaded():
    thread = threading.Thread(target=other)
    thread.start()
    thread.join(240)
print(ends)
"""


@pytest.mark.compile
@pytest.mark.slow
def test_another_thread_loads_the_compiler_as_ever():
    assert printed(_ANOTHER_THREAD) == "[[1.0, 1.0, 1.0]]"


# --- built beside -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The C++ files that a compiler was started for."""
    seen: list[str] = []
    true = subprocess.run

    def watched(command: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(command, list):
            seen.extend(Path(word).name for word in command if str(word).endswith(".cpp"))
        return true(command, *arguments, **options)

    monkeypatch.setattr(subprocess, "run", watched)
    return seen


def two_kernels(shift: float) -> None:
    """A product between two kernels of C++."""

    def function(x: Tensor) -> list[Tensor]:
        return [torch.sin(torch.cos(x + shift) @ x)]

    x = torch.rand(40, 40)
    call, _ = native.compiled(recording.record(function, [x]), options=None)
    torch.testing.assert_close(call([x.clone()])[0], function(x)[0], rtol=1e-4, atol=1e-4)


known = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="no kernels of purestep's own"
)


@known
@pytest.mark.compile
def test_kernels_are_compiled_apart_and_ahead(monkeypatch: pytest.MonkeyPatch, compiled_files: list[str]):
    monkeypatch.setattr(toolchain, "_FIRST", 1)
    monkeypatch.setattr(toolchain, "_PART", 1)
    submitted: list[str] = []  # threads of a pool take them in this order, and may start a compiler in another
    true = toolchain._Build._submit

    def submit(build: Any, task: Callable[..., Any], *arguments: Any) -> Any:
        submitted.extend(arguments[:1])
        return true(build, task, *arguments)

    monkeypatch.setattr(toolchain._Build, "_submit", submit)
    two_kernels(0.25)
    parts = [name for name in compiled_files if name.startswith("part")]
    assert len(parts) >= 2  # the kernel before the product, and what follows
    assert compiled_files.count("ahead0.cpp") == 1  # the product, whose text is known
    assert submitted[0] == "ahead0"
    assert not any(name.endswith("optimized.cpp") for name in compiled_files)


@known
@pytest.mark.compile
def test_a_kernel_that_never_comes_does_no_harm(monkeypatch: pytest.MonkeyPatch, compiled_files: list[str]):
    true = kernels.called
    other = products.KERNEL._replace(source='extern "C" int purestep_never() { return 0; }')
    monkeypatch.setattr(kernels, "called", lambda graph: [*true(graph), other])
    two_kernels(2.75)
    assert [name for name in compiled_files if name.startswith("ahead")] == ["ahead0.cpp"]
    assert not any(name.endswith("optimized.cpp") for name in compiled_files)


def _lost(build: Any) -> None:
    build._kernels.pop()


def _flags(build: Any) -> None:
    build._parts[:] = [build._submit(lambda: ("", "g++ -Ofast"))]


@pytest.mark.compile
@pytest.mark.parametrize(("fault", "shift"), [(_lost, 0.5), (_flags, 0.75)])
def test_what_inductor_would_make_otherwise_it_makes_itself(
    fault: Callable[[Any], None], shift: float, monkeypatch: pytest.MonkeyPatch, compiled_files: list[str]
):
    true = toolchain._Build._build_objects

    def with_fault(build: Any, *arguments: Any) -> None:
        fault(build)
        true(build, *arguments)

    monkeypatch.setattr(toolchain._Build, "_build_objects", with_fault)
    two_kernels(shift)
    assert any(name.endswith("optimized.cpp") for name in compiled_files)


@pytest.mark.compile
def test_a_compiler_that_fails_ahead_costs_time_alone(monkeypatch: pytest.MonkeyPatch, compiled_files: list[str]):
    def broken(*_: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(toolchain._Build, "_compiled_part", broken)
    two_kernels(1.25)
    assert any(name.endswith("optimized.cpp") for name in compiled_files)


def _patched() -> dict[str, Any]:
    """All that is in the modules and classes of inductor's that something is replaced in."""
    from torch._inductor import codecache, cpu_vec_isa, dtype_propagation, scheduler
    from torch._inductor.codegen import common, cpp, wrapper
    from torch._inductor.fx_passes import fuse_attention, joint_graph

    owners: tuple[Any, ...] = (
        codecache,
        fuse_attention,
        joint_graph,
        wrapper.PythonWrapperCodegen,
        cpu_vec_isa.VecISA,
        common.KernelTemplate,
        dtype_propagation.DtypePropagationOpsHandler,
        cpp,
        scheduler.SchedulerNode,
    )
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


PATCHES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "built beside": (
        toolchain.beside,
        {"_precompile_header", "_worker_compile_cpp", "define_kernel", "check_build"},
    ),
    "loaded": (shortcuts.while_loading, {"_template_from_string"}),
    "less work": (shortcuts.taken, {"__init__", "stride_at_vec_range", "codegen"}),
    "no attention": (lambda: shortcuts.patterns_for(torch.fx.symbolic_trace(twice)), {"lazy_init"}),
}


@pytest.mark.parametrize("kind", PATCHES)
def test_inductor_is_left_as_it_was(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain._Build, "start", lambda _: None)
    patches, names = PATCHES[kind]
    before, inside = _patched(), dict[str, Any]()

    def fails() -> None:
        with patches():
            inside.update(_patched())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert {name.rpartition(".")[2] for name in before if inside[name] is not before[name]} == names
    after = _patched()
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name]] == []


def test_instructions_that_torch_has_found_and_the_compiler_knows_are_not_tried_out():
    from torch._inductor.cpu_vec_isa import VecAMX, VecAVX512, VecAVX512VNNI

    asked: list[str] = []
    check = toolchain._unless_known(lambda isa, code: bool(asked.append(code)))
    assert check(VecAVX512(), VecAVX512._avx512_bf16_code)
    assert check(VecAVX512VNNI(), VecAVX512VNNI._avx512_vnni_code)
    assert check(VecAMX(), VecAMX._amx_code)
    assert not asked
    assert not check(VecAVX512(), "other instructions")
    later = VecAMX()
    later._arch_flags += " -mof-a-later-compiler"
    assert not check(later, VecAMX._amx_fp16_code)
    assert asked == ["other instructions", VecAMX._amx_fp16_code]


class _There:
    """Stands for a builder whose object has been made."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_target_file_path(self) -> str:
        return str(self._path)


@pytest.mark.parametrize("cores", [2, 3])
def test_a_core_is_left_to_inductor_until_it_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int):
    at_work, together = threading.Semaphore(0), threading.Barrier(cores)

    def build(_: Any) -> None:
        at_work.release()
        together.wait(timeout=20)  # for as many parts as there are cores

    monkeypatch.setattr(toolchain, "_cores", lambda: cores)
    monkeypatch.setattr(toolchain, "_link", lambda _: None)
    monkeypatch.setattr(toolchain._Build, "_compiled_header", lambda *_, **__: "")
    monkeypatch.setattr("torch._inductor.cpp_builder.CppBuilder.build", build)
    (tmp_path / "made").touch()
    with toolchain.beside() as ahead:
        for number in range(cores):
            ahead([f"int kernel_{number}() {{ return {number}; }}"])
        assert all(at_work.acquire(timeout=60) for _ in range(cores - 1))
        assert not at_work.acquire(timeout=0.5)
        made = _There(tmp_path / "made")
        ahead.__self__._build_objects(str(tmp_path / "lock"), made, made, _There(tmp_path / "whole"))
        assert at_work.acquire(timeout=60)
    assert not together.broken


def test_another_torch_is_no_error(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import codecache

    header = codecache._precompile_header
    monkeypatch.delattr(codecache, "_worker_compile_cpp")
    _enter_and_leave()
    assert not hasattr(codecache, "_worker_compile_cpp")
    assert codecache._precompile_header is header


def test_a_start_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch):
    def broken(_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(toolchain._Build, "start", broken)
    before = _patched()
    _enter_and_leave(lambda: _patched() == before)


def _enter_and_leave(holds: Callable[[], bool] = lambda: True) -> None:
    """Where nothing can be made ahead, a kernel that is to be, and the end, wait for nothing."""
    found: list[bool] = []

    def ahead() -> None:
        with toolchain.beside() as ahead:
            ahead(["int f();"])
            found.append(holds())

    thread = threading.Thread(target=ahead, daemon=True)
    thread.start()
    thread.join(60)
    assert found == [True]
    assert not thread.is_alive()


# --- what depends on size, and garbage --------------------------------------------------------------------------------


def test_only_long_steps_are_called_by_slow_code():
    with config.patch(native._by_size(1e10)):
        assert config.aot_inductor.compile_wrapper_opt_level == "O0"


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_afterwards_as_it_was_before(on: bool):
    def fails() -> None:
        with alone():
            assert not gc.isenabled()
            raise ZeroDivisionError

    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            fails()
        assert gc.isenabled() is on
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_on else gc.disable)()


def test_what_the_caller_has_frozen_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with alone():
            pass
        assert frozen / 2 < gc.get_freeze_count() <= frozen  # one that is let go is not counted any more
    finally:
        gc.unfreeze()


# --- less work for the same C++ ---------------------------------------------------------------------------------------


def normed(x: Tensor) -> list[Tensor]:
    return [torch.softmax(x * 3 + 1, -1), (x - x.mean(-1, keepdim=True)) / x.std(0)]


def turned(x: Tensor) -> list[Tensor]:
    return [x.t().contiguous() + 1, x.flip(0)[::2, 1:].exp(), torch.where(x > 0, x.roll(1, 1), 0.0)]


def tiled(x: Tensor) -> list[Tensor]:
    """Sums over tiles; of eight rows, all in the outer loop's tail."""
    some = x.flatten()[:16]
    backwards = torch.gather(some, 0, torch.arange(16).flip(0))
    return [x @ part.expand(4, 16).reshape(64) for part in (some, backwards)]


def folded(x: Tensor) -> list[Tensor]:
    return [x.reshape(-1, 4).sum(1), x.half().tanh() + 1, torch.arange(x.shape[1]) // 3 % 5, x.argmax(-1), x.cumsum(0)]


def text_of(function: Callable[..., Any], x: Tensor) -> str:
    """All the C++ that inductor compiles."""
    from torch._inductor import codecache

    texts: list[str] = []
    true = codecache.CppWrapperCodeCache.load_pybinding_async
    with pytest.MonkeyPatch.context() as patch, config.patch(fx_graph_cache=False):
        patch.setattr(kept, "name", lambda *_: None)
        patch.setattr(
            codecache.CppWrapperCodeCache,
            "load_pybinding_async",
            lambda *args, **more: (texts.append(repr((args, more))), true(*args, **more))[1],
        )
        native.compiled(recording.record(function, [x]), options=None)
    (text,) = texts
    return text


SIZES = [(16, 64), (13, 36), (3, 5), (40, 32)]


def differs(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], size: tuple[int, int]) -> bool:
    x = torch.randn(size) if function is not folded else torch.randn(size[0], size[1] * 4)
    with monkeypatch.context() as patch:
        patch.setattr(shortcuts, "taken", nullcontext)
        expected = text_of(function, x)
    return text_of(function, x) != expected


@pytest.mark.compile
@pytest.mark.parametrize(
    ("function", "size"),
    [*itertools.product((normed, turned, folded), SIZES), *((tiled, (rows, 64)) for rows in (8, 16, 20))],
)
def test_the_same_code_in_less_work(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], size: tuple[int, int]
) -> None:
    assert not differs(monkeypatch, function, size)


@pytest.mark.compile
def test_a_shortcut_that_changes_the_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shortcuts, "_stride", lambda otherwise, index, var, vec_length=None: otherwise(index, var) * 2)
        assert differs(monkeypatch, turned, (16, 64))
    monkeypatch.setattr(shortcuts, "_is_empty", lambda kernel: getattr(kernel, "tail_size", None) is not None)
    assert differs(monkeypatch, normed, (13, 36))
    monkeypatch.setattr(shortcuts, "_is_empty", lambda kernel: getattr(kernel, "inner_tail_size", None) == 0)
    assert differs(monkeypatch, tiled, (8, 64))


@pytest.mark.compile
def test_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import dtype_propagation, loop_body, sizevars

    def work() -> Counter[str]:
        counts = Counter[str]()
        with monkeypatch.context() as patch:
            for owner, name in (
                (sizevars, "simplify_index_in_vec_range"),
                (dtype_propagation.DtypePropagationOpsHandler, "__init__"),
                (loop_body.LoopBody, "__call__"),
            ):
                true = getattr(owner, name)
                patch.setattr(owner, name, _counting(counts, name, true))
            text_of(normed, torch.randn(16, 80))
        return counts

    short = work()
    monkeypatch.setattr(shortcuts, "taken", nullcontext)
    long = work()
    assert (short["simplify_index_in_vec_range"], short["__init__"]) == (0, 1)
    assert all(short[name] < long[name] for name in long)
    assert len(long) == 3


def _counting(counts: Counter[str], name: str, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        counts[name] += 1
        return true(*args, **more)

    return call


TEMPLATES = """
import jinja2, torch
from purestep.compile import native, recording
made, true = [], jinja2.Environment.from_string
jinja2.Environment.from_string = lambda self, *args, **more: (made.append(1), true(self, *args, **more))[1]
native.compiled(recording.record(lambda x: [x * 2], [torch.ones(4)]), options=None)
from torch._inductor.kernel.mm import mm_template
print(len(made), callable(mm_template.template.render), len(made))
"""


@pytest.mark.compile
def test_templates_of_kernels_for_gpus_wait_until_they_are_asked_for() -> None:
    assert printed(TEMPLATES).split() == ["0", "True", "1"]


ATTENTION = """
import os, torch, purestep as ps
from contextlib import nullcontext
from torch._dynamo.utils import counters
from purestep.compile import native, recording, shortcuts
def attention(x):
    return torch.softmax(x @ x.transpose(-1, -2) / 4.0, -1) @ x
def patterns(function):
    native.compiled(recording.record(lambda x: [function(x)], [torch.randn(2, 4, 8, 16)]), options=None)
    from torch._inductor.fx_passes.fuse_attention import _sfdp_init
    return _sfdp_init.cache_info().currsize
if os.environ["FAULT"]:
    shortcuts._has_batched_products = lambda graph: False
without = patterns(lambda x: x * 2)
print(without, patterns(attention), counters["inductor"]["fuse_attention"], end=" ")
from torch._inductor.fx_passes import joint_graph
before = sum(map(len, joint_graph.patterns.patterns.values()))
patterns(lambda x: x * 3)
joint_graph.lazy_init(torch.device("cpu"))
print(before == sum(map(len, joint_graph.patterns.patterns.values())))
"""


@pytest.mark.compile
@pytest.mark.slow
def test_attention_is_looked_for_where_it_can_be(own_cache: Path) -> None:
    assert printed(ATTENTION, FAULT="").split() == ["0", "1", "1", "True"]
    assert printed(ATTENTION, FAULT="planted").split() == ["0", "0", "0", "False"]


def test_batched_products_are_found_in_branches_too() -> None:
    def either(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.exp, lambda x: x @ x, (x,))

    for function, found in ((either, True), (lambda x: x[0] @ x[0], False)):
        graph = make_fx(function, tracing_mode="fake")(torch.ones(2, 4, 4))
        assert shortcuts._has_batched_products(graph) is found


def test_every_pattern_of_attention_has_a_batched_product() -> None:
    from torch._inductor.fx_passes import serialized_patterns
    from torch._inductor.pattern_matcher import PatternExpr, PatternPrettyPrinter

    whole = 0
    for path in sorted(Path(str(serialized_patterns.__file__)).parent.glob("_sfdp_pattern_*.py")):
        module = importlib.import_module(f"{serialized_patterns.__name__}.{path.stem}")
        found = {name: value for name, value in vars(module).items() if name.startswith("_sfdp_pattern_")}
        whole += len(found)
        for name, pattern in found.items():
            assert isinstance(pattern, PatternExpr)
            assert "aten.bmm.default" in PatternPrettyPrinter.run(pattern), name
    assert whole > 100
