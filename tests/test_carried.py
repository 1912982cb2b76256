"""What has been compiled, taken to another machine: an empty cache stands for one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.compiler import _cache

import purestep as ps
from purestep.compile import carried, kept, native, recording
from purestep.errors import ConfigError
from purestep.loop import carrying

if not native._KNOWN:
    pytest.skip("native code is made with torch 2.13 and later", allow_module_level=True)


Machine = Callable[[str], Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Goes to the machine of that name: another cache, and a process that has compiled nothing."""

    def go(name: str) -> Path:
        _cache.CacheArtifactManager.clear()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        return tmp_path / name

    return go


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been compiled, not found."""
    seen, true = list[Any](), native._made
    monkeypatch.setattr(native, "_made", lambda *given, **more: seen.append(given) or true(*given, **more))
    return seen


_factors = itertools.count(1.5, 1 / 16)


@pytest.fixture
def factor() -> float:
    """Another for each test: inductor loads nothing twice in a process, wherever its cache lies."""
    return next(_factors)


def run(factor: float) -> None:
    record = recording.record(lambda x: [torch.sin(x) * factor], [torch.ones(300)])
    call, _ = native.compiled(record, options=None)
    (found,) = call([torch.full((300,), 2.0)])
    torch.testing.assert_close(found, torch.full((300,), 2.0).sin() * factor)


def compiled(*factors: float) -> bytes:
    """What is saved after each."""
    for factor in factors:
        run(factor)
        found = carried.saved()
    assert found is not None
    return found


@pytest.mark.compile
def test_code_is_found_on_another_machine(machine: Machine, made: list[Any], factor: float) -> None:
    there = machine("there")
    # Saved twice: torch's own function would take what was new the second time alone.
    artifacts = compiled(factor, -factor)
    here = machine("here")
    carried.taken(artifacts)
    run(factor), run(-factor)
    assert len(made) == 2
    names = [sorted(file.name for file in (place / "purestep").iterdir()) for place in (there, here)]
    assert names[0] == names[1]
    # And what was found is carried on.
    again = carried.saved()
    machine("further")
    assert again is not None
    carried.taken(again)
    run(factor), run(-factor)
    assert len(made) == 2


@pytest.mark.compile
def test_what_was_made_for_another_processor_or_package_is_left(
    machine: Machine, made: list[Any], factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("there")
    artifacts = compiled(factor)
    here = machine("here")
    monkeypatch.setattr(carried, "_everywhere", lambda: "another")
    carried.taken(artifacts)
    assert not here.exists() or not (here / "purestep").exists()
    run(factor)
    assert len(made) == 2


def test_where_code_may_come_from_is_told_by_processor_torch_and_texts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tell = carried._everywhere.__wrapped__
    told = {tell()}
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_processor", lambda: "another")
        told.add(tell())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.1")
        told.add(tell())
    for name in ("a.py", "b.py"):
        tmp_path.joinpath(name).write_text("same length")
    with monkeypatch.context() as patch:
        patch.setattr(carried, "__file__", str(tmp_path / "carried.py"))
        told.add(tell())
        tmp_path.joinpath("b.py").write_text("same_length")
        told.add(tell())
        os.utime(tmp_path / "a.py", (0, 0))
        assert tell() in told  # no times
    assert len(told) == 5


def _changed_library(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _another_place(data: bytes) -> bytes:
    made_for, text, _, library = data.split(b"\n", 3)
    text = json.dumps(["../outside.so", *json.loads(text)[1:]])
    return b"\n".join([made_for, text.encode(), kept._hash([text]).encode(), library])


@pytest.mark.compile
@pytest.mark.parametrize("damage", [_changed_library, _cut, _another_place])
def test_damaged_code_is_not_taken(
    damage: Callable[[bytes], bytes], machine: Machine, made: list[Any], factor: float, tmp_path: Path
) -> None:
    machine("there")
    compiled(factor)
    (artifact,) = _cache.CacheArtifactManager._seen_artifacts
    here = machine("here")
    _cache.CacheArtifactManager.record_artifact("purestep", artifact.key, damage(artifact.content))
    damaged = carried.saved()
    assert damaged is not None
    carried.taken(damaged)
    assert not here.exists() or not list(here.rglob("*.so"))
    assert not list(tmp_path.rglob("outside.so"))
    run(factor)
    assert len(made) == 2


@pytest.mark.compile
def test_a_library_that_is_in_use_is_not_written_again(machine: Machine, factor: float) -> None:
    there = machine("there")
    artifacts = compiled(factor)
    (library,) = there.rglob("*main.so") or there.rglob("*.so")
    before = library.stat()
    carried.taken(artifacts)
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# --- fit --------------------------------------------------------------------------------------------------------------

_FIT = """
import json, sys
import torch, purestep as ps
from purestep.compile import native
torch.manual_seed(0)
made, true = [], native._made
native._made = lambda *given, **more: made.append(given) or true(*given, **more)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
program = ps.program(net, ps.supervised(torch.nn.CrossEntropyLoss()), ps.optim.adamw(1e-3), ema=0.9)
x, y = torch.randn(12, 4), torch.arange(12) % 3
train, val = [(x[:8], y[:8]), (x[4:], y[4:])], [(x, y)]
options = json.loads(sys.argv[1])
compile_ = {"capture": options.pop("capture")} if "capture" in options else True
result = ps.fit(
    program.init(), {"train": train, "val": val}, program, compile=compile_, progress=False, check_every=None, **options
)
hits = 0
if "torch._dynamo.utils" in sys.modules:
    hits = sys.modules["torch._dynamo.utils"].counters["inductor"]["fxgraph_cache_hit"]
found = {
    "made": len(made), "dynamo": "torch._dynamo" in sys.modules, "hits": hits,
    "updates": int(result.state.updates), "sum": float(sum(w.double().sum() for w in result.state.params.values())),
}
print(json.dumps(found))
"""


def fit(cache: Path, **options: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _FIT, json.dumps(options)],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.compile
@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_compiles_nothing(tmp_path: Path) -> None:
    snapshots = str(tmp_path / "run")
    whole = fit(tmp_path / "there", epochs=2)
    first = fit(tmp_path / "there", epochs=1, snapshots=snapshots, compile_cache=True)
    assert whole["made"] == 2  # train and evaluation
    assert (first["made"], first["dynamo"]) == (0, False)  # found, and carried all the same
    rest = fit(tmp_path / "here", epochs=2, snapshots=snapshots, compile_cache=True)
    assert (rest["made"], rest["dynamo"]) == (0, False)
    assert (rest["updates"], rest["sum"]) == (4, whole["sum"])
    # So does one that starts from its snapshots in a directory of its own; and one that is not told to does not.
    other = {"epochs": 2, "resume": snapshots, "snapshots": str(tmp_path / "other")}
    assert fit(tmp_path / "further", **other, compile_cache=True)["made"] == 0
    assert fit(tmp_path / "last", epochs=3, snapshots=snapshots)["made"] == 2


@pytest.mark.compile
@pytest.mark.slow
def test_what_dynamo_has_captured_is_carried_by_torch(tmp_path: Path) -> None:
    options = {"snapshots": str(tmp_path / "run"), "capture": "dynamo", "compile_cache": True}
    assert fit(tmp_path / "there", epochs=1, **options)["hits"] == 0
    assert fit(tmp_path / "here", epochs=2, **options)["hits"] > 0


def small(**options: Any) -> ps.FitResult:
    torch.manual_seed(0)
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    return ps.fit(program.init(), [batch], program, epochs=1, compile=True, progress=False, check_every=None, **options)


@pytest.mark.compile
def test_a_file_that_is_none_is_told_and_replaced(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine("here")
    file = tmp_path / "run" / carrying.NAME
    file.parent.mkdir()
    file.write_bytes(b"nonsense")
    result = small(snapshots=file.parent, compile_cache=True)
    assert int(result.state.updates) == 1
    (told,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert str(file) in told.getMessage()
    assert file.read_bytes() == carried.saved()


@pytest.mark.compile
def test_a_full_disk_is_told_once_and_the_run_goes_on(
    machine: Machine,
    factor: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine("here")

    def full(path: Path, data: bytes) -> None:
        raise ps.errors.WriteFailed("could not be written", where=str(path), hint="free space")

    carrier = carrying.Carrier(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(carrying.files, "write_bytes", full)
        run(factor)
        carrier.save(), carrier.save()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "free space" in caplog.text
    run(-factor)
    carrier.save()
    assert (tmp_path / carrying.NAME).read_bytes() == carried.saved()


def test_nothing_compiled_leaves_no_file(machine: Machine, tmp_path: Path) -> None:
    machine("here")
    carrying.Carrier(tmp_path).save()
    assert list(tmp_path.iterdir()) == []


def test_without_snapshots_there_is_nowhere_to_keep_it() -> None:
    with pytest.raises(ConfigError, match="compile_cache keeps .* beside the snapshots, and there are none"):
        small(compile_cache=True)
