"""Weights & Biases (offline) and MLflow (a local database), through their own clients: values, resume, failures."""

from __future__ import annotations

import getpass
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import purestep as ps
from purestep.errors import ConfigError
from purestep.events import EpochEnd, FitEnd, FitStart, Logged
from purestep.sinks import guarded, mlflow, trackers, wandb

BATCH = torch.ones(4, 2), torch.ones(4, 1)


def start(directory: Path, *, updates: int = 0, resumed: bool = False) -> FitStart:
    return FitStart(None, 0, updates, 3, None, 4, directory, resumed)


def logged(updates: int) -> Logged:
    return Logged(0, updates, {"train_loss": 1 / updates, "lr": 0.1}, 5.0, 0.0)


def row(epoch: int) -> EpochEnd:
    return EpochEnd(None, epoch, 4 * epoch, {"epoch": epoch, "step": 4 * epoch, "val_loss": 0.5}, True, None)


def end(error: BaseException | None = None) -> FitEnd:
    return FitEnd(None, "epochs" if error is None else "error", {}, {"epoch": 1, "val_loss": 0.5, "step": 4}, error)


def train(sink: Any, directory: Path, epochs: int, **more: Any) -> None:
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    loaders = {"train": [BATCH] * 4, "val": [BATCH]}
    config: dict[str, Any] = {"epochs": epochs, "log_every": 2, "compile": False, **more}
    ps.fit(program.init(), loaders, program, sinks=[sink], snapshots=directory, **config)


# --- MLflow -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Any:
    client = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'purestep[mlflow]'")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return uri, client.MlflowClient(tracking_uri=uri)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow_has_the_run_and_goes_on_with_it(store: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    uri, client = store
    with caplog.at_level(logging.WARNING, "purestep"):
        for epochs in (1, 2):
            train(mlflow("digits", name="a", params={"lr": 0.1}, tracking_uri=uri), tmp_path / "run", epochs)
    assert not [record for record in caplog.records if "sink" in record.getMessage()]
    experiment = client.get_experiment_by_name("digits").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.run_id == (tmp_path / "run" / "mlflow_id.txt").read_text().strip()
    assert (run.info.status, run.data.tags["stop_reason"], run.data.params["lr"]) == ("FINISHED", "epochs", "0.1")
    history = {name: [p.step for p in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
    assert history["epoch/val_loss"] == [4, 8]
    assert history["train/loss"] == [2, 4, 6, 8]
    assert {"train/lr", "train/grad_norm", "train/steps_per_second"} <= history.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow_has_each_point_once_and_how_the_run_ended(store: Any, tmp_path: Path):
    uri, client = store
    killed = mlflow(tracking_uri=uri)
    for event in (start(tmp_path), logged(2), logged(4), row(1)):
        killed(event)
    resumed = mlflow(tracking_uri=uri)
    for event in (start(tmp_path, updates=2, resumed=True), logged(4), row(1), logged(6), end(OSError("disk"))):
        resumed(event)
    assert resumed.run_id == killed.run_id
    assert [p.step for p in client.get_metric_history(killed.run_id, "train/loss")] == [2, 4, 6]
    assert client.get_run(killed.run_id).info.status == "FAILED"
    fresh = mlflow(tracking_uri=uri)
    fresh(start(tmp_path))
    assert fresh.run_id != killed.run_id
    with pytest.raises(Exception, match="no-such-run"):
        mlflow(tracking_uri=uri, run_id="no-such-run")(start(tmp_path))


class Server:
    """A stand-in for MLflow's client: runs by id, with experiment and tags."""

    def __init__(self, **runs: tuple[str, str]) -> None:
        self.runs = {name: (place, {"mlflow.user": user}) for name, (place, user) in runs.items()}
        self.written: list[str] = []

    def get_run(self, run_id: str) -> Any:
        place, tags = self.runs[run_id]
        return SimpleNamespace(info=SimpleNamespace(experiment_id=place, user_id="x"), data=SimpleNamespace(tags=tags))

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7")

    def create_run(self, place: str, run_name: str | None) -> Any:
        self.runs["new"] = place, {}
        return SimpleNamespace(info=SimpleNamespace(run_id="new"))

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.runs[run_id][1][name] = value

    def update_run(self, run_id: str, status: str) -> None:
        self.written.append(run_id)

    def log_batch(self, run_id: str, **values: Any) -> None:
        self.written.append(run_id)


OWNERS = {"mine": ("7", getpass.getuser()), "theirs": ("7", "eve"), "elsewhere": ("8", getpass.getuser())}


@pytest.mark.parametrize("run_id", ["mine", "theirs", "elsewhere", "gone", "../x", "a b"])
def test_an_id_in_a_directory_goes_on_only_with_a_run_of_the_same_project_and_user(
    run_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    server, entities = Server(**OWNERS), SimpleNamespace(Param=lambda *pair: pair)
    sink = trackers.MLflow(server, entities, None, {"experiment": "digits", "name": None, "params": {}})
    (tmp_path / "mlflow_id.txt").write_text(run_id)
    with caplog.at_level(logging.WARNING, "purestep"):
        sink(start(tmp_path, updates=4, resumed=True))
    expected = "mine" if run_id == "mine" else "new"
    assert sink.run_id == expected == (tmp_path / "mlflow_id.txt").read_text().strip()
    assert set(server.written) <= {expected}
    assert ("begins a new run" in caplog.text) == (expected == "new")
    assert trackers.MLflow(server, entities, None, sink._settings)._found(tmp_path / "mlflow_id.txt") == expected


@pytest.mark.parametrize("user", ["me", "eve"])
def test_wandb_asks_its_server_whose_run_it_is(user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def run(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(user=SimpleNamespace(username=user))

    monkeypatch.delenv("WANDB_MODE", raising=False)
    client = SimpleNamespace(Api=lambda: SimpleNamespace(run=run, viewer=SimpleNamespace(username="me")))
    sink = trackers.Wandb(client, None, {"project": "digits", "name": None})
    (tmp_path / "wandb_id.txt").write_text("abc\n")
    assert sink._found(tmp_path / "wandb_id.txt") == ("abc" if user == "me" else None)
    assert asked == ["digits/abc"]


# --- Weights & Biases -------------------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[bytes]:
    """The records of an offline file, which has the format of LevelDB's log, in blocks of 32 KiB after a header."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def stored(folder: Path) -> tuple[list[str], list[dict[str, str]], list[int]]:
    """Run ids, rows and exit codes of the offline files below a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, rows, codes = list[str](), list[dict[str, str]](), list[int]()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in records(path):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run" and record.run.run_id not in ids[-1:]:
                ids.append(record.run.run_id)
            elif kind == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
            elif kind == "exit":
                codes.append(record.exit.exit_code)
    return ids, rows, codes


@pytest.mark.slow
def test_wandb_has_the_run_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'purestep[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for epochs in (1, 2):
        sink = wandb("digits", name="a", config={"lr": 0.1}, mode="offline", dir=str(tmp_path))
        train(guarded(sink, patience=60), tmp_path / "run", epochs)
    ids, rows, codes = stored(tmp_path)
    assert set(ids) == {(tmp_path / "run" / "wandb_id.txt").read_text().strip()}
    assert [row["updates"] for row in rows if "epoch/val_loss" in row] == ["4", "8"]
    assert [row["updates"] for row in rows if "train/loss" in row] == ["2", "4", "6", "8"]
    assert codes == [0, 0]


@pytest.mark.slow
def test_wandb_says_that_a_run_failed_and_leaves_another_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'purestep[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    mine = client.init(mode="offline", dir=str(tmp_path / "mine"))
    sink = wandb(id="abc", mode="offline", dir=str(tmp_path))
    for event in (start(tmp_path), logged(2), end(OSError("disk"))):
        sink(event)
    mine.log({"still": 1})
    mine.finish()
    ids, rows, codes = stored(tmp_path)
    assert (ids, codes, rows[0]["updates"]) == (["abc"], [1], "2")


class WandbServer:
    """The calls of W&B's client, and what its server knows of a run when it is resumed: the summary."""

    def __init__(self) -> None:
        self.summaries: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def init(self, *, id: str, **settings: Any) -> Any:
        assert settings["resume"] == "allow"
        rows, summary = self.rows.setdefault(id, []), self.summaries.setdefault(id, {})
        return SimpleNamespace(
            id=id, summary=summary, log=rows.append, define_metric=lambda *name, **how: None, finish=lambda **how: None
        )


@pytest.mark.parametrize("resumed", [0, 2], ids=["begins again", "resumed"])
def test_wandb_has_each_point_once(resumed: int, tmp_path: Path):
    """A killed run of an id that is given begins again without a snapshot, or goes on from one."""
    server = WandbServer()
    killed = ps.sinks.Wandb(server, "mine", {})
    for event in (start(tmp_path), logged(2), logged(4), row(1), logged(6)):
        killed(event)
    again = ps.sinks.Wandb(server, "mine", {})
    rest = [logged(2)] if not resumed else []
    first = start(tmp_path, updates=resumed, resumed=bool(resumed))
    for event in (first, *rest, logged(4), row(1), logged(6), logged(8), row(2), end()):
        again(event)
    rows = server.rows["mine"]
    assert [one["updates"] for one in rows if "train/loss" in one] == [2, 4, 6, 8]
    assert [one["updates"] for one in rows if "epoch/val_loss" in one] == [4, 8]


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "name"), [(wandb, "wandb"), (mlflow, "mlflow")])
def test_a_library_that_is_not_installed_is_named(make: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=f"{name} is not installed .*purestep\\[{name}\\]"):
        make()


def test_a_logger_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("no such host")

    for sink in (ps.sinks.Wandb(Broken(), None, {}), ps.sinks.MLflow(Broken(), None, None, {"experiment": "x"})):
        caplog.clear()
        train(sink, tmp_path / type(sink).__name__, 1)
        assert "no such host" in caplog.text
