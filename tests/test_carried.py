"""What has been compiled, taken to another machine: an empty cache stands for one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import clear_caches
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
        clear_caches()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        return tmp_path / name

    return go


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been compiled, not found."""
    seen, true = list[Any](), native._made
    monkeypatch.setattr(native, "_made", lambda *given, **more: seen.append(given) or true(*given, **more))
    return seen


def run(factor: float) -> None:
    record = recording.record(lambda x: [torch.sin(x) * factor], [torch.ones(300)])
    call, _ = native.compiled(record, options=None)
    (found,) = call([torch.full((300,), 2.0)])
    torch.testing.assert_close(found, torch.full((300,), 2.0).sin() * factor)


def compiled(*factors: float) -> bytes:
    """What is saved after the last, where it was saved after each."""
    found = b""
    for factor in factors:
        run(factor)
        found = saved()
    return found


def saved() -> bytes:
    found = carried.saved()
    assert found is not None
    return found


@pytest.mark.compile
def test_code_is_found_on_another_machine(machine: Machine, made: list[Any]) -> None:
    there = machine("there")
    # Saved twice: torch's own function would take what was new the second time alone.
    artifacts = compiled(2.0, 3.0)
    here = machine("here")
    carried.taken(artifacts)
    run(2.0), run(3.0)
    assert len(made) == 2
    names = [sorted(file.name for file in (place / "purestep").iterdir()) for place in (there, here)]
    assert names[0] == names[1]
    # And what was found is carried on.
    again = saved()
    machine("further")
    carried.taken(again)
    run(2.0), run(3.0)
    assert len(made) == 2


@pytest.mark.compile
def test_code_is_read_when_it_is_saved(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("there")
    read, true = list[str](), kept.stored
    monkeypatch.setattr(kept, "stored", lambda file: (read.append(file.name), true(file))[1])
    run(2.0), run(2.0)
    assert not read
    assert saved()
    assert len(read) == 1


@pytest.mark.compile
def test_code_that_is_gone_when_it_is_saved_is_left_out(machine: Machine, made: list[Any]) -> None:
    there = machine("there")
    run(2.0), run(3.0)
    (gone, _) = (there / "purestep").iterdir()
    gone.unlink()
    artifacts = saved()
    machine("here")
    carried.taken(artifacts)
    run(2.0), run(3.0)
    assert len(made) == 3


@pytest.mark.compile
def test_what_was_made_for_another_processor_or_package_is_left(
    machine: Machine, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("there")
    artifacts = compiled(2.0)
    here = machine("here")
    monkeypatch.setattr(carried, "_everywhere", lambda: "another")
    carried.taken(artifacts)
    assert not here.exists() or not (here / "purestep").exists()
    run(2.0)
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
    damage: Callable[[bytes], bytes], machine: Machine, made: list[Any], tmp_path: Path
) -> None:
    machine("there")
    compiled(2.0)
    (artifact,) = _cache.CacheArtifactManager._seen_artifacts
    here = machine("here")
    _cache.CacheArtifactManager.record_artifact("purestep", artifact.key, damage(artifact.content))
    carried.taken(saved())
    assert not here.exists() or not list(here.rglob("*.so"))
    assert not list(tmp_path.rglob("outside.so"))
    run(2.0)
    assert len(made) == 2


@pytest.mark.compile
def test_code_that_cannot_be_loaded_here_does_not_stay(machine: Machine) -> None:
    """As of a newer C library: it is all as it was, and lies where inductor would take it from without a look."""
    machine("there")
    compiled(2.0)
    (artifact,) = _cache.CacheArtifactManager._seen_artifacts
    here = machine("here")
    _, text, _, library = artifact.content.split(b"\n", 3)
    foreign = library[:4] + bytes(60) + library[64:]  # no header that says for what it is
    place, _, *rest = json.loads(text)
    line = json.dumps([place, hashlib.sha256(foreign).hexdigest(), *rest])
    kept.store(artifact.key, f"{line}\n{kept._hash([line])}\n".encode() + foreign)
    (record,) = (here / "purestep").iterdir()
    assert (here / place).exists()
    assert kept.load(record.name) is None
    assert not (here / place).exists()


@pytest.mark.compile
def test_one_that_cannot_be_taken_leaves_the_others(
    machine: Machine, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("there")
    artifacts = compiled(2.0, 3.0)
    here = machine("here")
    kind = _cache.CacheArtifactFactory._get_artifact_type("purestep")
    true, seen = kind.populate_cache, list[str]()

    def first_fails(self: Any) -> None:
        seen.append(self.key)
        if len(seen) == 1:
            raise OSError("no room")
        true(self)

    monkeypatch.setattr(kind, "populate_cache", first_fails)
    with pytest.raises(OSError, match="no room"):
        carried.taken(artifacts)
    assert len(list((here / "purestep").iterdir())) == 1
    run(2.0), run(3.0)
    assert len(made) == 3


def test_a_name_is_no_path(machine: Machine, tmp_path: Path) -> None:
    machine("here")
    digest = hashlib.sha256(b"library").hexdigest()
    line = json.dumps(["a/b.so", digest, False, True, 1])
    data = f"{line}\n{kept._hash([line])}\n".encode() + b"library"
    kept.store("0" * 64, data)
    with pytest.raises(ValueError, match="not a name"):
        kept.store("../../outside", data)
    assert not list(tmp_path.glob("outside*"))


@pytest.mark.compile
def test_what_was_taken_and_is_not_used_is_carried_on(machine: Machine) -> None:
    machine("there")
    artifacts = compiled(2.0, 3.0)
    machine("here")
    carried.taken(artifacts)
    run(2.0)
    again = saved()
    assert sum(len(group) for _, group in carried._parsed(again)) == 2


@pytest.mark.compile
def test_a_library_that_is_in_use_is_not_written_again(machine: Machine) -> None:
    there = machine("there")
    artifacts = compiled(2.0)
    (library,) = there.rglob("*.so")
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
program = ps.program(torch.nn.Linear(4, 3), ps.supervised(torch.nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
batch = (torch.randn(8, 4), torch.arange(8) % 3)
options = json.loads(sys.argv[1])
result = ps.fit(program.init(), [batch] * 2, program, progress=False, check_every=None, **options)
weights = [weight.tolist() for weight in result.state.params.values()]
print(json.dumps({"made": len(made), "dynamo": "torch._dynamo" in sys.modules, "weights": weights}))
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
    kept = {"snapshots": str(tmp_path / "run"), "compile": True, "compile_cache": True}
    assert fit(tmp_path / "there", epochs=1, **kept)["made"] == 1
    rest = fit(tmp_path / "here", epochs=2, **kept)
    assert (rest["made"], rest["dynamo"]) == (0, False)
    # So does one that only starts from there; what was found is carried all the same.
    other = kept | {"resume": kept["snapshots"], "snapshots": str(tmp_path / "other")}
    assert fit(tmp_path / "further", epochs=3, **other)["made"] == 0
    assert tmp_path.joinpath("other", carrying.NAME).exists()
    whole = fit(tmp_path / "there", epochs=2, compile=True)
    assert (whole["made"], whole["weights"]) == (0, rest["weights"])


@pytest.mark.compile
def test_what_dynamo_has_captured_is_carried_too(machine: Machine) -> None:
    from torch._dynamo.utils import counters

    program = ps.program(torch.nn.Linear(4, 3), ps.supervised(torch.nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    batch = (torch.randn(8, 4), torch.arange(8) % 3)

    def hits() -> int:
        torch._dynamo.reset()
        before = counters["inductor"]["fxgraph_cache_hit"]
        ps.compile_step(program.train_step, capture="dynamo")(program.init(), batch)
        return counters["inductor"]["fxgraph_cache_hit"] - before

    machine("there")
    assert hits() == 0
    artifacts = saved()
    machine("elsewhere")
    assert hits() == 0
    machine("here")
    carried.taken(artifacts)
    assert hits() == 1


@pytest.mark.compile
def test_nothing_is_kept_or_read_where_it_is_not_asked_for(machine: Machine, tmp_path: Path) -> None:
    machine("here")
    file = tmp_path / "run" / carrying.NAME
    file.parent.mkdir()
    file.write_bytes(b"nonsense")
    small(2.0, snapshots=file.parent)
    assert file.read_bytes() == b"nonsense"


def small(rate: float, **options: Any) -> ps.FitResult:
    torch.manual_seed(0)
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(rate))
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
    result = small(2.0, snapshots=file.parent, compile_cache=True)
    assert int(result.state.updates) == 1
    (told,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert str(file) in told.getMessage()
    assert file.read_bytes() == carried.saved()


@pytest.mark.compile
def test_a_full_disk_is_told_once_and_the_run_goes_on(
    machine: Machine,
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
        run(2.0)
        carrier.save(), carrier.save()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "free space" in caplog.text
    run(3.0)
    carrier.save()
    assert (tmp_path / carrying.NAME).read_bytes() == carried.saved()


def test_nothing_compiled_leaves_no_file(machine: Machine, tmp_path: Path) -> None:
    machine("here")
    carrying.Carrier(tmp_path).save()
    assert list(tmp_path.iterdir()) == []


def test_without_snapshots_there_is_nowhere_to_keep_it() -> None:
    with pytest.raises(ConfigError, match="compile_cache keeps .* beside the snapshots, and there are none"):
        small(0.1, compile_cache=True)
