"""The sinks of a run that names none."""

from __future__ import annotations

from pathlib import Path

from .console import progress as progress_sink
from .guarded import Sink
from .json_history import history_json


def default_sinks(directory: Path | str | None, *, progress: bool = True) -> list[Sink]:
    """Return the sinks of a run that names none.

    Example:
        >>> [type(sink).__name__ for sink in default_sinks("runs/digits")]
        ['ProgressBar', 'History']

    Args:
        directory: of the run, for ``training_history.json``. None: no file.
        progress: a bar on a terminal, plain lines elsewhere.
    """
    sinks: list[Sink] = [progress_sink()] if progress else []
    if directory is not None:
        sinks.append(history_json(Path(directory) / "training_history.json"))
    return sinks
