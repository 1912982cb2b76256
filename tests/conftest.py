"""Every test starts from the same random numbers and, where it compiles, from an empty cache of graphs."""

from __future__ import annotations

import gc
import getpass
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from rigs.faults import failpoints

# The peers that want a model hub or a GPU allocator must not look for one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Kernels this small gain nothing from a second thread and wait for it on a busy machine; the same in child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# One cache of compiled code, which is inductor's own, also for child processes that have another TMPDIR.
CACHE = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))


def quick_compiler() -> str:
    """A copy of the script g++ beside this file, in the cache: keys of compiled code name the compiler by its path, and
    so all checkouts and runs share what is compiled, and the precompiled headers of 150 MB."""
    script = Path(__file__).with_name("g++").read_bytes()
    place = CACHE / "purestep_tests" / hashlib.sha256(script).hexdigest()[:16] / "g++"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place.with_name(f"{os.getpid()}")
        made.write_bytes(script)
        made.chmod(0o700)
        made.replace(place)
    return str(place)


# Tests that are marked optimized undo this, where `-m` names the mark.
if sys.platform == "linux":
    os.environ.setdefault("CXX", quick_compiler())
# The same examples in every run, which may take any time: a busy machine is no failure. Others are looked for with
# --hypothesis-profile=default.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
failpoints.install()
# A shell starts what it puts in the background with Ctrl-C ignored, and an ignored signal stays ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def optimized_as_for_users(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a run that selects them by this mark, as `.ci/nightly` does, those tests have g++ itself, at -O3.

    Inductor reads the variable once, and child processes read it again.
    """
    is_chosen = request.node.get_closest_marker("optimized") and "optimized" in request.config.option.markexpr
    if sys.platform != "linux" or not is_chosen:
        yield
        return
    from torch._inductor import config

    monkeypatch.setenv("CXX", "g++")
    with config.patch({"cpp.cxx": (None, "g++")}):
        yield


@pytest.fixture(autouse=True)
def fresh_compilers() -> Iterator[None]:
    """What one test compiles does not count in the next. Nothing is imported for it: Dynamo alone takes a second."""
    yield
    dynamo, inductor = (sys.modules.get(name) for name in ("torch._dynamo", "torch._inductor.utils"))
    if dynamo is not None:
        dynamo.reset()
    if inductor is not None:  # which loads equal code once, wherever its cache lies
        inductor.clear_caches()


@pytest.fixture
def cpu_plugin() -> None:
    """Skip the test where the plug-in for the CPU does not compile graphs."""
    from purestep.compile import backends  # imported late: it loads inductor

    if backends.plugin([torch.zeros(1)]) is None:
        pytest.skip("compile/cpu is switched off by PURESTEP_CPU=0, or does not know this torch")


@pytest.fixture(autouse=True)
def _tests_of_the_plugin_need_it(request: pytest.FixtureRequest) -> None:
    if request.path.parent.name == "cpu":
        request.getfixturevalue("cpu_plugin")


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch, cpu_plugin: None) -> None:
    """A graph that the plug-in for the CPU cannot compile is an error."""

    def raised(*found: Any) -> None:
        raise AssertionError(found[-1])

    monkeypatch.setattr("purestep.compile.capture.warn_fallback", raised)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fit_stays_on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU too, where it would move a state: those that are about that are marked cuda."""
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr("purestep.loop.inputs.auto_device", lambda: torch.device("cpu"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that this machine has."""
    return torch.device(request.param)


NOT_QUICK = {"compile", "slow", "soak", "peer", "cuda"}
"""Marks of tests that compile, take long, or need a peer or a GPU."""

QUICK = ("config", "files", "loop", "metrics", "model", "objective", "optim", "report", "sinks", "step")
"""Folders whose other tests are quick, as are those in no folder."""

OF_PROGRAMS = ("test_benchmarks.py", "test_examples.py", "test_first.py", "test_guides.py", "test_huggingface.py")
"""Files in those folders whose tests run whole programs."""

SLOW = (
    "compile",
    "compile/cpu",
    "faults/test_rows_around.py",
    "faults/test_rows_data.py",
    "faults/test_rows_restoring.py",
    "faults/test_rows_saving.py",
    "faults/test_rows_signals.py",
    "parallel/test_failures.py",
    "parallel/test_fit.py",
    "parallel/test_hostile.py",
    "parallel/test_layers.py",
    "parallel/test_snapshots.py",
    "parallel/test_tools.py",
    "test_benchmarks.py",
    "test_examples.py",
    "test_first.py",
    "test_zoo.py",
)
"""Folders and files whose tests compile or wait for other processes, as do those marked compile, but for the laws."""


def is_quick(item: pytest.Item) -> bool:
    tests = Path(__file__).parent
    if tests not in item.path.parents or any(item.get_closest_marker(name) for name in NOT_QUICK):
        return False
    return (item.path.parent == tests or item.path.parent.name in QUICK) and item.path.name not in OF_PROGRAMS


def is_slow(item: pytest.Item) -> bool:
    tests = Path(__file__).parent
    if any(tests / name in (item.path, item.path.parent) for name in SLOW) or "inductor" in item.name:
        return True
    is_law = item.path.parent == tests / "laws" and item.get_closest_marker("optimized") is None
    return item.get_closest_marker("compile") is not None and not is_law


def soak_names() -> frozenset[str]:
    """Names of tests, from soak.txt."""
    lines = Path(__file__).with_name("soak.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak, known = soak_names(), {name for item in items for name in (item.nodeid, item.nodeid.partition("[")[0])}
    files = {name.partition("::")[0] for name in known if not any("::" in arg for arg in config.args)}
    for name in soak:
        if name not in known and name.partition("::")[0] in files:
            raise pytest.UsageError(f"tests/soak.txt names a test that is not there: {name}")
    for item in items:
        if item.nodeid in soak or item.nodeid.partition("[")[0] in soak:
            item.add_marker(pytest.mark.soak)
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.path.name != "test_on_cuda.py")  # what teaches most, while a GPU is lent
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Garbage collections pass over thousands of tests and modules, which stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps by the transforms' own formulas, without torch's fused kernels, which round in another order: for
    tests that compare bits with a graph of the same operations."""
    from purestep.optim import base, fused

    monkeypatch.setattr(fused, "plan", lambda tx, updates, state, params: None)
    monkeypatch.setattr(base, "_leaf_norms", lambda leaves, dtype: [base.leaf_norm(leaf, dtype) for leaf in leaves])


@pytest.fixture(autouse=True)
def _graphs_are_compared_with_formulas(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("compile") or "compile" in request.path.parts:
        request.getfixturevalue("formulas")
