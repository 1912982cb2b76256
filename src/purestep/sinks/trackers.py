"""Loggers of other projects, each through its own client library: Weights & Biases and MLflow.

Both get the same values: ``train/loss``, ``train/lr``, ... from log lines, ``epoch/val_loss``, ... from rows of the
history, over optimizer updates. A run that resumes goes on in the logger's run, whose id is in the run's directory, if
the logger has it in the same project, of the same user.
"""

from __future__ import annotations

import getpass
import importlib
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..events import EpochEnd, Event, FitEnd, FitStart, Logged
from ..files import read_regular, write_bytes

_log = logging.getLogger("purestep")
_ID = re.compile("[A-Za-z0-9_-]{1,64}")
_USER = "mlflow.user"  # MLflow's tag, which its client does not set


def points(event: Logged | EpochEnd) -> dict[str, float]:
    """The numbers of an event under their names in a logger.

    Example:
        >>> points(EpochEnd(None, 1, 10, {"epoch": 1, "step": 10, "val_loss": 0.5}, improved=True, stopping=None))
        {'epoch/val_loss': 0.5}
    """
    if isinstance(event, Logged):
        values = {**event.values, "steps_per_second": event.steps_per_second}
        named = {f"train/{name.removeprefix('train_')}": value for name, value in values.items()}
    else:
        named = {f"epoch/{name}": value for name, value in event.record.items() if name not in ("epoch", "step")}
    return {name: float(value) for name, value in named.items() if isinstance(value, (int, float))}


class Tracker:
    """A sink for a logger; see `wandb` and `mlflow`."""

    writes_files = True
    wants = (FitStart, Logged, EpochEnd, FitEnd)
    file = ""  # in the directory of the snapshots: the id of the logger's run

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self._is_fixed = run_id is not None

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            path = None if event.directory is None else event.directory / self.file
            if not self._is_fixed:
                self.run_id = self._found(path) if event.resumed and path is not None else None
            self.run_id = self._open(event, self.run_id)
            if path is not None:
                write_bytes(path, f"{self.run_id}\n".encode())
        elif isinstance(event, (Logged, EpochEnd)):
            new = {name: value for name, value in points(event).items() if event.updates > self._last(name)}
            if new:
                self._log(new, event.updates)
        elif isinstance(event, FitEnd):
            self._end(event)

    def _found(self, path: Path) -> str | None:
        """The id in the directory, which others may have written: of a run of the same project and user, or None."""
        try:
            run_id = read_regular(path, 1 << 10).decode().strip()
            if not _ID.fullmatch(run_id):
                raise ValueError("not an id")
            if not self._is_own(run_id):
                raise ValueError(f"run {run_id} belongs to another project or user")
        except FileNotFoundError:
            return None
        except Exception as error:  # of the logger's client too
            _log.warning("%s: %s; begins a new run (cure: to go on with that one, pass its id)", path, error)
            return None
        return run_id

    def _is_own(self, run_id: str) -> bool:
        """True if the logger has this run in the project of this sink, begun by this user."""
        raise NotImplementedError

    def _open(self, event: FitStart, run_id: str | None) -> str:
        """Begin a run of the logger, or go on with the one of this id; return its id."""
        raise NotImplementedError

    def _last(self, name: str) -> int:
        """The last update for which the logger's run had a point of this name when this run began; -1 without one. A
        run that goes on there repeats the same values."""
        raise NotImplementedError

    def _log(self, values: Mapping[str, float], updates: int) -> None:
        raise NotImplementedError

    def _end(self, event: FitEnd) -> None:
        raise NotImplementedError


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a number without a name, in a container
        return f"uid_{os.getuid()}"


def _limits(event: FitStart) -> dict[str, Any]:
    return {name: value for name in ("epochs", "steps", "batches") if (value := getattr(event, name)) is not None}


def _best(event: FitEnd) -> dict[str, float]:
    best = event.best or {}
    return {f"best/{name}": value for name, value in best.items() if isinstance(value, (int, float))}


class Wandb(Tracker):
    """A run of Weights & Biases; see `wandb`."""

    file = "wandb_id.txt"

    def __init__(self, client: Any, run_id: str | None, settings: dict[str, Any]) -> None:
        super().__init__(run_id)
        self._client = client
        self._settings = settings
        self._run: Any = None
        self._known: dict[str, int] = {}  # group -> last update stored before this run

    def _is_own(self, run_id: str) -> bool:
        if (self._settings.get("mode") or os.environ.get("WANDB_MODE", "online")) != "online":
            local = Path(self._settings.get("dir") or os.environ.get("WANDB_DIR") or ".", "wandb")
            return any(found.lstat().st_uid == os.getuid() for found in local.glob(f"*run-*-{run_id}"))
        api = self._client.Api()
        place = [self._settings.get("entity"), self._settings.get("project"), run_id]
        return api.run("/".join(filter(None, place))).user.username == api.viewer.username

    def _open(self, event: FitStart, run_id: str | None) -> str:
        self._finish(0)
        config = {**_limits(event), **self._settings.get("config", {})}
        settings = {"reinit": "create_new", "resume": "allow", **self._settings, "config": config}
        self._run = self._client.init(id=run_id or uuid.uuid4().hex[:8], **settings)
        self._run.define_metric("updates", hidden=True)
        for group in ("train/*", "epoch/*"):
            self._run.define_metric(group, step_metric="updates")
        found = {group: self._run.summary.get(f"last_update_{group}") for group in ("train", "epoch")}
        self._known = {group: int(last) for group, last in found.items() if last is not None}
        return self._run.id

    def _last(self, name: str) -> int:
        return self._known.get(name.partition("/")[0], -1)

    def _log(self, values: Mapping[str, float], updates: int) -> None:
        if self._run is not None:
            self._run.log({**values, "updates": updates})
            group = next(iter(values)).partition("/")[0]
            self._run.summary[f"last_update_{group}"] = updates

    def _end(self, event: FitEnd) -> None:
        if self._run is not None:
            self._run.summary.update({"stop_reason": event.reason, **_best(event)})
        self._finish(0 if event.error is None else 1)

    def _finish(self, status: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=status)

    def close(self) -> None:
        """End the run of the logger, if `FitEnd` has not."""
        self._finish(1)


class MLflow(Tracker):
    """A run of MLflow; see `mlflow`."""

    file = "mlflow_id.txt"

    def __init__(self, client: Any, entities: Any, run_id: str | None, settings: dict[str, Any]) -> None:
        super().__init__(run_id)
        self._client = client
        self._entities = entities
        self._settings = settings
        self._known: dict[str, int] | None = None  # name -> last update stored before a resume

    def _is_own(self, run_id: str) -> bool:
        run = self._client.get_run(run_id)
        user = run.data.tags.get(_USER) or run.info.user_id
        return (str(run.info.experiment_id), user) == (self._experiment(), _user())

    def _open(self, event: FitStart, run_id: str | None) -> str:
        self._known = None if run_id is None else {}
        if run_id is None:
            run_id = str(self._client.create_run(self._experiment(), run_name=self._settings["name"]).info.run_id)
            self._client.set_tag(run_id, _USER, _user())
            params = {**_limits(event), **self._settings["params"]}
            entries = [self._entities.Param(str(name), str(value)) for name, value in params.items()]
            for start in range(0, len(entries), 100):  # the most that a server takes
                self._client.log_batch(run_id, params=entries[start : start + 100])
        else:
            self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _experiment(self) -> str:
        name = self._settings["experiment"]
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _log(self, values: Mapping[str, float], updates: int) -> None:
        if self.run_id is not None:
            now = int(time.time() * 1000)
            metrics = [self._entities.Metric(name, value, now, updates) for name, value in values.items()]
            self._client.log_batch(self.run_id, metrics=metrics)

    def _last(self, name: str) -> int:
        if self._known is None or self.run_id is None:
            return -1
        if name not in self._known:
            history = self._client.get_metric_history(self.run_id, name)
            self._known[name] = max((point.step for point in history), default=-1)
        return self._known[name]

    def _end(self, event: FitEnd) -> None:
        if self.run_id is None:
            return
        for name, value in {"stop_reason": event.reason, **_best(event)}.items():
            self._client.set_tag(self.run_id, name, str(value))
        stopped = "KILLED" if event.reason == "interrupted" else "FAILED"
        self._client.set_terminated(self.run_id, "FINISHED" if event.error is None else stopped)


def wandb(
    project: str | None = None,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    id: str | None = None,
    **settings: Any,
) -> Wandb:
    """Log to Weights & Biases: ``train/...`` by log line and ``epoch/...`` by row, over ``updates``.

    Example:
        >>> import purestep as ps
        >>> def logged(state, loaders, program):
        ...     return ps.fit(state, loaders, program, epochs=3, sinks=[wandb("digits", config={"lr": 1e-3})])

    The run has its own object, so that a ``wandb.run`` of yours stays as it is. The summary gets ``stop_reason`` and
    ``best/...``. A resumed `fit` goes on in the same run of the logger, whose id is in ``wandb_id.txt`` beside the
    snapshots. Points that this run has already are not logged again; with ``mode="offline"`` the client does not know
    them, and those after the last snapshot of a killed run come twice, with equal values.

    Args:
        project: of the run. None: the client's default.
        name: of the run. None: the client invents one.
        config: your settings, for the page of the run; the limits of `fit` are added.
        id: of a run to go on with. None: a new one, or that of the run that `fit` resumes.
        settings: further arguments of ``wandb.init``: ``mode="offline"``, ``dir=...``, ``group=...``, ``tags=...``.

    Raises:
        ConfigError: wandb is not installed.
    """
    client = _client("wandb", "wandb")
    given = {"project": project, "name": name, **settings}
    return Wandb(client, id, {**given, "config": dict(config or {})})


def mlflow(
    experiment: str = "Default",
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    tracking_uri: str | None = None,
    run_id: str | None = None,
) -> MLflow:
    """Log to MLflow: ``train/...`` by log line and ``epoch/...`` by row, over optimizer updates.

    Example:
        >>> import purestep as ps
        >>> def logged(state, loaders, program):
        ...     return ps.fit(state, loaders, program, epochs=3, sinks=[mlflow("digits", params={"lr": 1e-3})])

    The active run of ``mlflow.start_run`` is not touched. The run gets the tags ``stop_reason`` and ``best/...``, and
    ends as FINISHED, FAILED or KILLED (by a signal). A resumed `fit` goes on in the same run of the logger, whose id is
    in ``mlflow_id.txt`` in the directory of the snapshots; points that it has already are not repeated.

    Args:
        experiment: the name of the experiment, which is created if there is none.
        name: of the run. None: the server invents one.
        params: your settings; the limits of `fit` are added.
        tracking_uri: ``"sqlite:///mlflow.db"``, ``"http://host:5000"``. None: as MLflow is set.
        run_id: of a run to go on with. None: a new one, or that of the run that `fit` resumes.

    Raises:
        ConfigError: mlflow is not installed.
    """
    client = _client("mlflow", "mlflow").MlflowClient(tracking_uri=tracking_uri)
    settings = {"experiment": experiment, "name": name, "params": dict(params or {})}
    return MLflow(client, importlib.import_module("mlflow.entities"), run_id, settings)


def _client(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"pip install 'purestep[{extra}]'"
        raise ConfigError(f"{module} is not installed", where=f"sinks.{module}", hint=hint) from error
