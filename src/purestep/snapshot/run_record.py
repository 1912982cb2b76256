"""How the run in a directory of snapshots was started, and how it ended: ``run.json``.

The file describes the last call of `fit`. A file without an end belongs to a run that is still going, or was killed.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..errors import first_line
from ..events import Event, FitEnd, FitStart
from ..files import read_json, write_bytes

NAME = "run.json"


class RunInfo(NamedTuple):
    """The contents of ``run.json``. Times are ISO 8601 with the offset from UTC."""

    started: str
    ended: str | None  # None: the run is still going, or was killed
    reason: str | None  # the stop reason of `FitResult`
    error: str | None  # class and first line of the exception that ended the run
    resumed: bool
    pid: int
    host: str
    settings: Mapping[str, Any]  # the fields of `FitConfig`


class RunRecord:
    """A sink that writes ``run.json`` at the start and at the end of a run.

    Args:
        directory: of the snapshots.
        settings: JSON values; others are stored as text.
    """

    writes_files = True
    foreground = True  # two small files a run
    wants = (FitStart, FitEnd)

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self._path = directory / NAME
        self._settings = dict(settings)
        self._info: RunInfo | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            here = (event.resumed, os.getpid(), socket.gethostname(), self._settings)
            self._write(RunInfo(_now(), None, None, None, *here))
        elif isinstance(event, FitEnd) and self._info is not None:
            error = None if event.error is None else first_line(event.error)
            self._write(self._info._replace(ended=_now(), reason=event.reason, error=error))

    def _write(self, info: RunInfo) -> None:
        self._info = info
        text = json.dumps(_without_secrets(json.loads(json.dumps(info._asdict(), default=str))), indent=1)
        write_bytes(self._path, f"{text}\n".encode())


def read_run_info(directory: Path) -> RunInfo | None:
    """Read ``run.json``; None if there is none, or none that can be read. An older release wrote none.

    Example:
        >>> read_run_info(Path("runs/nowhere")) is None
        True
    """
    try:
        found = read_json(directory / NAME)
        info = RunInfo(**{name: found[name] for name in RunInfo._fields})
        for time in (info.started, info.ended):
            _ = time is None or datetime.fromisoformat(time).astimezone()
        if not isinstance(cast("Any", info.settings), Mapping):
            return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return info


_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH(?!OR)", re.IGNORECASE)
"""In the name of an environment variable whose value is not for others."""


def _without_secrets(value: Any) -> Any:
    """Replace the values of secret environment variables, which an error's message may repeat, by their names: in the
    texts of a JSON value, not in its keys."""
    if isinstance(value, dict):
        return {name: _without_secrets(part) for name, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_without_secrets(part) for part in cast("list[Any]", value)]
    for name, secret in os.environ.items() if isinstance(value, str) else ():
        if _SECRET.search(name) and len(secret) >= 8:
            value = value.replace(secret, f"${name}")
    return value


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
