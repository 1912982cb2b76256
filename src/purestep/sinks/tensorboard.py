"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..events import EpochEnd, Event, FitEnd, FitStart, Logged
from ..files import local_path
from .trackers import points


class TensorBoard:
    """Scalars by update; see `tensorboard`."""

    writes_files = True
    wants = (FitStart, Logged, EpochEnd, FitEnd)

    def __init__(self, directory: Path, writer: Any) -> None:
        self.directory = directory.absolute()  # a callback may call os.chdir
        self._make = writer
        self._writer: Any = None
        self._written: dict[str, int] = {}  # tag -> update of its last point

    def __call__(self, event: Event) -> None:
        if isinstance(event, FitStart):
            self.close()
            # TensorBoard ignores the points that a killed run wrote after its last snapshot, or without one.
            purge_step = event.updates + 1 if event.resumed else 0
            self._writer = self._make(str(self.directory), purge_step=purge_step)
            self._written = {}
        elif isinstance(event, (Logged, EpochEnd)):
            for tag, value in points(event).items():
                last, self._written[tag] = self._written.get(tag, -1), event.updates
                if last < event.updates:  # two rows of the history may have the same update
                    self._writer.add_scalar(tag, value, event.updates)
        elif isinstance(event, FitEnd):
            self.close()

    def close(self) -> None:
        """Flush and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def tensorboard(directory: Path | str) -> TensorBoard:
    """Write scalars for TensorBoard: one point per tag and update, in order.

    Example:
        >>> import purestep as ps
        >>> def curves(state, loaders, program, directory):
        ...     return ps.fit(state, loaders, program, epochs=3, sinks=[tensorboard(directory)])

    There are two groups of tags. ``train/loss``, ``train/lr``, ``train/grad_norm``, ``train/steps_per_second``, ...: a
    point every ``log_every`` updates, the mean since the last one. ``epoch/train_loss``, ``epoch/val_loss``, ...: a
    point for every row of the history, under the names of the history. The horizontal axis of both is the number of
    optimizer updates, so that curves of training and evaluation lie over each other.

    A run that resumes from a snapshot begins an event file that voids the points to be repeated. A fresh run voids all
    earlier points of its directory: give each run one.

    Args:
        directory: of the event files of one run.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard is not installed", where="sinks.tensorboard", hint="pip install 'purestep[tensorboard]'"
        ) from error
    return TensorBoard(local_path("sinks.tensorboard", directory=directory), SummaryWriter)
