"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..events import EpochEnd, Event, FitEnd, FitStart, Logged


class TensorBoard:
    """Scalars by update; see `tensorboard`."""

    writes_files = True
    wants = (FitStart, Logged, EpochEnd, FitEnd)

    def __init__(self, directory: Path, writer: Any) -> None:
        self.directory = directory
        self._make = writer
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            self.close()
            # What an interrupted run wrote after its last snapshot is struck out: TensorBoard ignores those steps.
            self._writer = self._make(str(self.directory), purge_step=event.updates + 1 if event.resumed else None)
        elif isinstance(event, Logged):
            self._scalars({**event.values, "steps_per_second": event.steps_per_second}, event.updates)
        elif isinstance(event, EpochEnd):
            self._scalars({**event.record}, event.updates)
        elif isinstance(event, FitEnd):
            self.close()

    def _scalars(self, values: dict[str, Any], updates: int) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, updates)

    def close(self) -> None:
        """Flush and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def tensorboard(directory: Path | str) -> TensorBoard:
    """Scalars for TensorBoard, by optimizer update.

    Args:
        directory: where the event files go.

    Raises:
        ConfigError: tensorboard is not installed.

    Example:
        >>> import purestep as ps
        >>> def curves(state, loaders, program, directory):
        ...     return ps.fit(state, loaders, program, epochs=3, sinks=[tensorboard(directory)])
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard is not installed", where="sinks.tensorboard", hint="pip install 'purestep[tensorboard]'"
        ) from error
    return TensorBoard(Path(directory), SummaryWriter)
