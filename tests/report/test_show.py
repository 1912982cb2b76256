"""``python -m purestep show``: what it says of runs that train, ended, were killed, or are damaged."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.faults.planting import forge

import purestep as ps
from purestep.__main__ import main
from purestep.errors import NotFound
from purestep.events import EpochEnd, FitEnd, FitStart
from purestep.files import DirectoryLock
from purestep.report import read_run, shown
from purestep.snapshot import RunRecord

BATCH = torch.ones(4, 2), torch.ones(4, 1)


def train(directory: Path, epochs: int = 3, *, callbacks: Any = (), **more: Any) -> None:
    torch.manual_seed(0)
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.01))
    rows = [ps.sinks.history_json(directory / "training_history.json"), ps.sinks.jsonl(directory / "metrics.jsonl")]
    loaders = {"train": [BATCH] * 2, "val": [BATCH]}
    config: dict[str, Any] = {"epochs": epochs, "log_every": 1, "compile": False, "sinks": rows} | more
    ps.fit(program.init(), loaders, program, snapshots=directory, callbacks=callbacks, **config)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    train(directory)
    return directory


def copied(source: Path, target: Path) -> Path:
    return shutil.copytree(source, target)


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_run_that_ended(ended: Path, capsys: pytest.CaptureFixture[str]):
    before = contents(ended)
    assert main(["show", str(ended), "--verify"]) == 0
    said = capsys.readouterr().out
    for part in (
        "ended at",
        "all epochs are done",
        "snapshot 6",
        "at epoch 3",
        "yes: every digest agrees",
        "3: 2, 4, 6",
    ):
        assert part in said, said
    assert "train_loss" in said
    assert "val_loss" in said
    assert contents(ended) == before
    run = read_run(ended)
    assert (run.state, run.best, run.best_step, len(run.history), len(run.lines)) == ("ended", 2, 6, 3, 6)
    assert run.info is not None
    assert run.info.settings["epochs"] == 3


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_its_width(ended: Path, width: int):
    lines = shown(read_run(ended), width=width).splitlines()[1:]  # the first one is the path, to copy
    assert max(map(len, lines)) <= width
    assert any("epoch" in line for line in lines)


def test_a_live_run_goes_on_undisturbed(tmp_path: Path):
    seen: list[Any] = []

    def look(event: Any) -> None:
        if isinstance(event, EpochEnd):
            seen.append(read_run(tmp_path, verify=True))

    train(tmp_path, 3, callbacks=[look])
    assert [run.state for run in seen] == ["running"] * 3
    assert f"process {os.getpid()}" in seen[0].how
    assert [run.problems for run in seen] == [[]] * 3
    assert read_run(tmp_path).state == "ended"
    assert len(read_run(tmp_path).history) == 3


@pytest.mark.parametrize(
    ("reason", "error", "state", "said"),
    [
        ("early_stopping", None, "ended", "early stopping"),
        ("interrupted", KeyboardInterrupt(), "interrupted", "by a signal"),
        ("error", ValueError("bad\nbatch"), "failed", "ValueError: bad"),
        ("accurate enough", None, "ended", "accurate enough"),
    ],
)
def test_how_it_ended(tmp_path: Path, reason: str, error: BaseException | None, state: str, said: str):
    record = RunRecord(tmp_path, {"epochs": 3})
    record(FitStart(None, 0, 0, 3, None, 4, tmp_path, False))
    record(FitEnd(None, reason, {}, None, error))
    run = read_run(tmp_path)
    assert run.state == state
    assert said in run.how


def lock(directory: Path, **entries: Any) -> None:
    signed = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2020-01-01T00:00:00+00:00"} | entries
    (directory / ".lock").write_text(json.dumps(signed))


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ({"pid": 2**22 + 1}, "killed"),  # no such process
        ({}, "killed"),  # this number belonged to an earlier process
        ({"host": "elsewhere"}, "unknown"),
        ({"pid": "x"}, "killed"),  # of its record, which has no end
    ],
)
def test_a_run_that_did_not_end(tmp_path: Path, entries: dict[str, Any], state: str):
    RunRecord(tmp_path, {})(FitStart(None, 0, 0, 3, None, 4, tmp_path, False))
    lock(tmp_path, **entries)
    assert read_run(tmp_path).state == state


def test_a_newer_run_that_has_not_written_its_record(tmp_path: Path):
    record = RunRecord(tmp_path, {})
    record(FitStart(None, 0, 0, 3, None, 4, tmp_path, False))
    record(FitEnd(None, "epochs", {}, None))
    info = json.loads((tmp_path / "run.json").read_text()) | {
        "started": "2020-01-01T00:00:00+00:00",
        "ended": "2020-01-01T01:00:00+00:00",
    }
    (tmp_path / "run.json").write_text(json.dumps(info))
    with DirectoryLock(tmp_path):
        assert read_run(tmp_path).state == "running"
    assert read_run(tmp_path).state == "ended"


def test_damage_is_named(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flipped = tmp_path / "flipped"
    with ps.Snapshots(flipped) as snapshots:
        snapshots.save(4, {"w": torch.randn(4096)})  # values of less than 100 bytes are in files that have a digest
    for values in (flipped / "4").rglob("ocdbt.process_*/d/*"):
        data = bytearray(values.read_bytes())
        data[len(data) // 2] ^= 255
        values.write_bytes(data)
    assert main(["show", str(flipped)]) == 0  # the size is right
    assert main(["show", str(flipped), "--verify"]) == 1
    assert "/4" in capsys.readouterr().out.partition("no:")[2].replace("\n", "")
    lost = copied(ended, tmp_path / "lost")
    (lost / "6" / "manifest.sha256").unlink()
    run = read_run(lost)
    assert [summary.step for summary in run.snapshots if summary.problem] == [6]
    assert run.newest is not None
    assert run.newest.step == 4
    assert len(run.history) == 3  # of training_history.json


def test_rows_that_are_being_written(ended: Path, tmp_path: Path):
    run = copied(ended, tmp_path / "run")
    lines, history = ((run / name).read_text() for name in ("metrics.jsonl", "training_history.json"))
    (run / "metrics.jsonl").write_text(lines[:-30])
    found = read_run(run)
    assert (len(found.history), len(found.lines), found.problems) == (3, 6, [])
    for damaged in (history[:-20], "nonsense"):  # the sink writes the whole file, and renames it
        (run / "training_history.json").write_text(damaged)
        found = read_run(run)
        assert len(found.history) == 3  # of the snapshot
        assert "not a list of rows" in found.problems[0]


def test_a_history_in_a_snapshot_and_rows_as_csv(tmp_path: Path):
    train(tmp_path, 40, sinks=[ps.sinks.csv(tmp_path / "metrics.csv")])
    run = read_run(tmp_path, verify=True)
    assert (len(run.history), len(run.lines), run.problems) == (40, 80, [])
    assert run.lines[-1]["step"] == 80
    file = tmp_path / str(run.snapshots[-1].step) / "history.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert read_run(tmp_path).problems == []
    assert "history.npy: the file is not what was written" in " ".join(read_run(tmp_path, verify=True).problems)
    file.unlink()
    assert "history.npy: missing" in " ".join(read_run(tmp_path).problems)


def test_wrong_directories_are_named(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "notes.txt").write_text("x")
    for path, said in (
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path, "no snapshots of a run in it"),
        (tmp_path / "notes.txt", "is a file"),
    ):
        assert main(["show", str(path)]) == 2
        assert said in capsys.readouterr().err
        with pytest.raises(NotFound, match=said):
            read_run(path)
    with pytest.raises(SystemExit):
        main(["shwo"])


# --- files of somebody else -------------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;x\x07\x1b[2J\u202e[/]"


def test_names_of_others_do_not_act_on_the_terminal(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = copied(ended, tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(
        json.dumps({**info, "reason": None, "error": ESCAPE, "started": "2026-01-01T00:00:00"})
    )
    rows = json.loads((run / "training_history.json").read_text())
    (run / "training_history.json").write_text(json.dumps([{**row, ESCAPE: ESCAPE} for row in rows] * 2))
    (run / f"9.corrupt.{ESCAPE.replace('/', '')}").mkdir()
    (run / ".lock").write_text(json.dumps({"pid": 1, "host": ESCAPE, "since": "2026-01-01T00:00:00"}))
    assert main(["show", str(run)]) == 0
    said = capsys.readouterr().out
    assert r"\x1b]0;x\x07" in said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)


@pytest.mark.parametrize("name", ["training_history.json", "run.json", ".lock", "metrics.jsonl", "6/manifest.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a link"])
def test_only_regular_files_are_read(ended: Path, tmp_path: Path, capsys: Any, kind: str, name: str):
    run = copied(ended, tmp_path / "run")
    secret = [{"kind": "epoch", "step": number, "epoch": number, "secret": 1.0} for number in range(99)]
    (tmp_path / "secret").write_text(json.dumps(secret))
    (run / name).unlink()
    if kind == "a pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero" if kind == "a device" else tmp_path / "secret")
    main(["show", str(run), "--verify"])
    assert "secret" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("training_history.json", "[" * 100_000),
        ("training_history.json", json.dumps([{"epoch": 1, "val_loss": 10**400}] * 9)),
        ("metrics.jsonl", '{"a":' * 100_000),
        ("run.json", "[" * 100_000),
    ],
)
def test_nonsense_is_no_traceback(ended: Path, tmp_path: Path, name: str, text: str):
    run = copied(ended, tmp_path / "run")
    (run / name).write_text(text)
    os.utime(run / "6" / "manifest.json", (3e11, 3e11)) if name == "run.json" else None
    assert main(["show", str(run)]) in (0, 1)


def test_bytes_that_a_manifest_claims_are_on_the_disk(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = copied(ended, tmp_path / "run")
    forge(run / "6", lambda record: record["leaves"]["params/weight"].update(shape=[10**7, 2]))
    assert main(["show", str(run), "--verify"]) == 1
    assert "80,000,000 bytes of values in files of" in " ".join(capsys.readouterr().out.split())


def test_secrets_of_the_environment_are_not_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HUB_TOKEN", 'abc"def ghi')
    record = RunRecord(tmp_path, {"note": 'abc"def ghi'})
    record(FitStart(None, 0, 0, 3, None, 2, tmp_path, False))
    record(FitEnd(None, "error", {}, None, ValueError('https://x:abc"def ghi@host')))
    text = (tmp_path / "run.json").read_text()
    assert "def ghi" not in text
    assert "https://x:$HUB_TOKEN@host" in json.loads(text)["error"]
