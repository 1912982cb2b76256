"""The live bar of a run on a terminal, by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_REDRAWN = 4  # times per second, by a thread of the bar
_OTHERS = 34  # columns of epoch, batches and remaining time


class Place(NamedTuple):
    """The position of a run, in the texts of the bar."""

    text: str  # "epoch 3/10", or the name of the loader that is evaluated
    batches: int
    trains: bool  # not in an evaluation
    numbers: str


class LiveBar(Progress):
    """A bar below the printed lines. Its thread asks for the place of the run, so that no step waits for it.

    Args:
        console: of the terminal.
        place: returns the place, with numbers of at most so many characters; called in any thread.
        total: batches of an epoch, None if they are not known.
    """

    def __init__(self, console: Console, place: Callable[[int], Place], total: int | None) -> None:
        self._bar_width = 20 if console.width >= 100 else 10
        self._place: Callable[[int], Place] | None = None  # rich asks for the bar before the tasks are made
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(self._bar_width),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            refresh_per_second=_REDRAWN,
        )
        self._training = self.add_task("", total=total, numbers="")
        self._evaluation = self.add_task("", total=None, numbers="")
        self._place = place

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar of the place where the run is now."""
        if self._place is None:
            return
        text, batches, trains, numbers = self._place(self.width - self._bar_width - _OTHERS)
        shown, hidden = (self._training, self._evaluation) if trains else (self._evaluation, self._training)
        self.update(shown, completed=batches, description=text, numbers=numbers, visible=True)
        self.update(hidden, visible=False)
        yield from super().get_renderables()

    def begin_epoch(self) -> None:
        """Measure the remaining time afresh."""
        self.reset(self._training)

    def write(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return self.console.width
