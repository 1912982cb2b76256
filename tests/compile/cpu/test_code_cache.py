"""Native code of an earlier run: what it is found by, and what becomes of foreign and simultaneous entries."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor, library
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep import optim
from purestep.compile import code_directory, lower
from purestep.compile.cpu import aot, backend, code_cache, graph_key
from purestep.errors import StepContractError

pytestmark = pytest.mark.usefixtures("own_cache", "no_fallback")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path


# --- names ------------------------------------------------------------------------------------------------------------


def name_of(function: Callable[..., Any], *inputs: Tensor, **settings: Any) -> str | None:
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    return code_cache.key(graph, backend.settings(settings))


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
    assert len({graph_key.text(1), graph_key.text(True), graph_key.text(1.0)}) == 3
    assert graph_key.text(0.0) != graph_key.text(-0.0)


def test_settings_are_part_of_a_name():
    plain = name_of(twice, torch.ones(4, 4))
    assert plain is not None
    with config.patch({"cpp.threads": 1}):
        assert name_of(twice, torch.ones(4, 4)) not in (plain, None)
    assert name_of(twice, torch.ones(4, 4), **{"cpp.threads": 1}) not in (plain, None)
    assert name_of(twice, torch.ones(4, 4)) == plain


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


TABLES = [torch.arange(4.0), torch.ones(4), torch.ones(4, dtype=torch.float64), torch.ones(4, 4)]


def test_a_users_operator_and_the_kind_of_a_constant_are_part_of_a_name():
    x = torch.ones(4)
    names = [name_of(partial(torch.add, table), x) for table in TABLES]
    assert names[0] == names[1] is not None
    assert len({*names, name_of(lambda x: triple(x), x), name_of(lambda x: x * 3, x)}) == 5


def draws_of_its_own(x: Tensor) -> Tensor:
    return torch.rand(4, generator=torch.Generator()) + x


@pytest.mark.parametrize("function", [lambda x: x[x > 0].sum(), draws_of_its_own], ids=["sizes", "generator"])
def test_operations_without_a_text_have_no_name(function: Callable[..., Any]):
    assert name_of(function, torch.ones(4)) is None


@pytest.mark.parametrize(
    "settings",
    [{"post_grad_custom_post_pass": lambda graph: None}, {"force_disable_caches": True}, {"fx_graph_cache": False}],
    ids=["pass", "no caches", "no graph cache"],
)
def test_settings_without_a_text_and_settings_against_caches_leave_no_name(settings: dict[str, Any]):
    with config.patch(settings):
        assert name_of(twice, torch.ones(4, 4)) is None
    assert name_of(twice, torch.ones(4, 4), **settings) is None
    assert name_of(twice, torch.ones(4, 4)) is not None


@pytest.mark.parametrize("table", ["torch._decomp.decomposition_table", "torch._inductor.lowering.lowerings"])
def test_what_the_user_makes_of_an_operator_has_no_name(table: str, monkeypatch: pytest.MonkeyPatch):
    importlib.import_module(table.rpartition(".")[0])
    assert name_of(twice, torch.ones(4, 4)) is not None
    with monkeypatch.context() as patch:
        patch.setitem(pkgutil.resolve_name(table), torch.ops.aten.mul.Tensor, lambda x, y: x + y)
        assert name_of(twice, torch.ones(4, 4)) is None
    assert name_of(twice, torch.ones(4, 4)) is not None


# --- entries ----------------------------------------------------------------------------------------------------------

NAME = "0" * 64


def builder(text: str = "code", calls: str = "") -> Callable[[str], None]:
    """A builder that leaves files as inductor does."""

    def build(library: str) -> None:
        Path(library).write_text(text)
        (Path(library).parent / "kernels").mkdir()
        if calls:
            Path(library).with_name("c123.wrapper.json").write_text(calls)

    return build


def fails(_: str) -> None:
    raise AssertionError("built once more")


def read(name: str | None, build: Callable[[str], None]) -> str:
    return Path(code_cache.obtained(name, build)).read_text()


def test_an_entry_is_found_again(own_cache: Path):
    before = os.umask(0)
    made = code_cache.obtained(NAME, builder(calls="calls"))
    os.umask(before)
    assert code_cache.obtained(NAME, fails) == made
    modes = {path.name: path.stat().st_mode & 0o77 for path in (own_cache / "purestep").iterdir()}
    assert modes == {f"{NAME}.so": 0, f"{NAME}.json": 0}


def test_a_library_without_a_name_is_no_entry():
    made = [code_cache.obtained(None, builder()) for _ in range(2)]
    assert len(set(made)) == 2
    assert all(Path(each).read_text() == "code" for each in made)


def test_of_two_that_build_one_entry_the_last_stays():
    def late(library: str) -> None:
        assert read(NAME, builder("first")) == "first"
        builder("second")(library)

    assert read(NAME, late) == "second"
    assert read(NAME, fails) == "second"


def test_a_build_that_fails_leaves_no_entry(own_cache: Path):
    with pytest.raises(AssertionError):
        code_cache.obtained(NAME, fails)
    assert not list((own_cache / "purestep").iterdir())
    assert read(NAME, builder()) == "code"


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def _open(file: Path) -> None:
    file.chmod(0o722)


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("change", [_link, _open])
def test_an_entry_that_others_may_have_written_is_not_loaded(change: Any, suffix: str, own_cache: Path):
    code_cache.obtained(NAME, builder("foreign", calls="calls"))
    change(own_cache / "purestep" / f"{NAME}{suffix}")
    assert read(NAME, builder("own", calls="calls")) == "own"


@pytest.mark.parametrize("mode", [0o770, 0o702], ids=["of a group", "of everybody"])
def test_in_a_directory_that_others_may_write_nothing_is_loaded_or_stored(own_cache: Path, mode: int):
    foreign = code_cache.obtained(NAME, builder("foreign"))
    own_cache.chmod(0o755)  # others can enter it
    (own_cache / "purestep").chmod(mode)
    code_directory._chosen.cache_clear()  # as in another process
    made = Path(code_cache.obtained(NAME, builder("own")))
    assert made.read_text() == "own"
    assert Path(foreign).read_text() == "foreign"
    assert made.parents[1].name == f"purestep_{os.getuid()}"
    assert made.parents[1].stat().st_mode & 0o777 == 0o700
    assert code_cache.obtained(NAME, fails) == str(made)


def test_a_directory_of_another_user_is_not_used(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    code_cache.obtained(NAME, builder("foreign"))
    if os.getuid() == 0:
        os.chown(own_cache / "purestep", 65534, -1)
        assert read(NAME, builder("own")) == "own"
    else:
        monkeypatch.setattr(os, "getuid", lambda: 65534)
        with pytest.raises(ps.errors.ConfigError):
            code_cache.obtained(NAME, fails)


def test_a_cache_that_cannot_be_written_is_read(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    """By a user who is not root, whom modes do not stop."""
    old = code_cache.obtained(NAME, builder("old"))
    code_directory._chosen.cache_clear()  # as in another process
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != own_cache)
    assert code_cache.obtained(NAME, fails) == old
    made = Path(code_cache.obtained("1" * 64, builder("new")))
    assert not made.is_relative_to(own_cache / "purestep")
    assert made.read_text() == "new"


# --- code -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that went through inductor."""
    seen: list[Any] = []
    true = lower.compiled

    def lowered(*arguments: Any, **options: Any) -> Any:
        seen.append(arguments[0])
        return true(*arguments, **options)

    monkeypatch.setattr(lower, "compiled", lowered)
    return seen


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
def test_a_damaged_library_is_built_again(made: list[Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    program = ps.program(tiny_mlp(), ps.supervised(torch.nn.CrossEntropyLoss()), optim.sgd(0.01))

    def trained() -> Any:
        return ps.compile_step(program.train_step)(program.init(), vector_batch(16, 0))[0].params

    whole = trained()
    damaged = own_cache / "damaged"  # the linker loads no path twice
    shutil.copytree(own_cache / "purestep", damaged / "purestep")
    libraries = list((damaged / "purestep").glob("*.so"))
    for library_ in libraries:
        library_.write_bytes(library_.read_bytes()[:100])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(damaged))
    assert_trees_close(trained(), whole, rtol=0, atol=0)
    assert libraries
    assert len(made) == 2


SPY = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void spy(void) { fclose(fopen(getenv("SPY"), "w")); }
"""


@pytest.mark.compile
def test_the_library_of_another_user_is_not_loaded(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Libraries whose constructor leaves a file, in the place of those of a step."""
    program = ps.program(tiny_mlp(), ps.supervised(torch.nn.CrossEntropyLoss()), optim.sgd(0.01))
    monkeypatch.setenv("SPY", str(own_cache / "ran"))
    (own_cache / "spy.c").write_text(SPY)
    built = own_cache / "spy.so"
    subprocess.run(["gcc", "-shared", "-fPIC", own_cache / "spy.c", "-o", built], check=True)

    def trained() -> None:
        ps.compile_step(program.train_step)(program.init(), vector_batch(16, 0))

    def ran(mode: int) -> bool:
        cache = own_cache / f"{mode:o}"  # the linker loads no path twice
        shutil.copytree(own_cache / "purestep", cache / "purestep")
        libraries = list((cache / "purestep").glob("*.so"))
        assert libraries
        for library_ in libraries:
            shutil.copy(built, library_)
            library_.chmod(mode)
            if os.getuid() == 0 and mode != 0o700:
                os.chown(library_, 65534, 65534)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        with suppress(Exception):  # the library has no function to call
            trained()
        return (own_cache / "ran").exists()

    trained()
    assert not ran(0o777)
    assert ran(0o700)


@pytest.mark.parametrize(
    ("function", "size", "threads", "is_fast"),
    [
        (lambda x: [x.sin()], 300, 1, True),
        (lambda x: [x.sin(), x.sort()], 1 << 23, 2, True),
        (lambda x: [triple(x)], 300, 1, False),
        (lambda x: [x @ x.t()], 1 << 12, 1, True),
    ],
)
def test_how_code_may_be_called_follows_from_its_graph(
    function: Callable[[Tensor], Any], size: int, threads: int, is_fast: bool, two_threads: None
):
    graph = make_fx(function, tracing_mode="fake")(torch.ones(1, size))
    assert aot.threads(graph) == threads
    assert aot.may_be_fast(graph) is is_fast


def test_a_product_of_halves_may_use_any_number_of_threads():
    graph = make_fx(lambda x: [x @ x.t()], tracing_mode="fake")(torch.ones(4, 4, dtype=torch.bfloat16))
    assert aot.threads(graph) == 0


CALLS = [0]  # of all modules: a program has a copy of its own, whose counters are refused


class Impure(torch.nn.Module):
    """Python that does something else at each call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.table = torch.nn.Linear(4, 3), kind, None
        CALLS[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        if self.kind == "keeps" and self.table is None:
            self.table = torch.arange(3.0).cos()
        return self.layer(x) * (self.table if self.kind == "keeps" else 1.0 if CALLS[0] == 1 else 100.0)


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
        assert CALLS[0] == 1
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


# --- in other processes -----------------------------------------------------------------------------------------------


def started_process(code: str, **surroundings: str) -> subprocess.Popen[str]:
    """Another process that runs this code."""
    variables = os.environ | {"PYTHONPATH": str(Path(backend.__file__).parents[3])} | surroundings
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=pipe, stderr=pipe, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    """Wait for a process; return its output."""
    out, errors = process.communicate(timeout=300)
    assert not process.returncode, errors[-2000:]
    return out.strip()


def printed(code: str, **surroundings: str) -> str:
    """Run the code in another process; return its output."""
    return finished(started_process(code, **surroundings))


_WARM = """
import sys, torch
import purestep as ps
from purestep.compile import capture
run, *_ = capture.compile_graph(lambda x: [torch.sin(x) * 3.75], [torch.ones(300)], backend="inductor", options=None)
assert torch.equal(run([torch.zeros(300)])[0], torch.zeros(300))
print("torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.compile
def test_a_process_that_finds_code_loads_no_compiler_wherever_the_cache_has_moved_to(own_cache: Path):
    assert printed(_WARM) == "True"
    moved = own_cache.rename(own_cache.with_name("moved"))
    assert printed(_WARM, TORCHINDUCTOR_CACHE_DIR=str(moved)) == "False"


@pytest.mark.compile
def test_processes_that_compile_one_step_together_leave_one_whole_entry(own_cache: Path):
    started = [started_process(_WARM) for _ in range(2)]
    assert [finished(process) for process in started] == ["True"] * 2
    assert len(list((own_cache / "purestep").glob("*.so"))) == 2  # the step, and the kernels
    assert printed(_WARM) == "False"


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
def test_two_threads_that_start_together_do_not_wait_for_one_another(own_cache: Path):
    for _ in range(2):  # made, found
        assert printed(_TWO_THREADS) == "[True, True]"
