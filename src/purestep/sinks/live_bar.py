"""The live bar of a run, by rich: on a terminal, or as one output of a notebook's cell."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_REDRAWN = 4  # times per second, by a thread of the bar
_OTHERS = 34  # columns of epoch, batches and remaining time
_NOTEBOOK_WIDTH = 100
_KEPT_LINES = 200  # in a notebook


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


class NotebookBar(LiveBar):
    """One output of a notebook's cell, which is replaced: the printed lines, and the bar below them."""

    def __init__(self, place: Callable[[int], Place], total: int | None) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]  # a kernel has it

        text_only = Console(file=io.StringIO(), width=_NOTEBOOK_WIDTH, force_jupyter=False, color_system=None)
        super().__init__(text_only, place, total)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._text = ""  # of the output
        self._output: Any = display({"text/plain": ""}, raw=True, display_id=True)
        self._ended = threading.Event()
        self._writing = threading.Lock()

    def start(self) -> None:
        """Start the thread that replaces the output."""
        threading.Thread(target=self._redraw, name="purestep progress", daemon=True).start()

    def _redraw(self) -> None:
        while not self._ended.wait(1 / _REDRAWN):
            self._replace()

    def _replace(self) -> None:
        with self._writing:
            bar = "" if self._ended.is_set() else self._drawn()
            text = "\n".join([*self._lines, *filter(None, [bar])])
            if text != self._text:
                self._text = text
                self._output.update({"text/plain": text}, raw=True)

    def _drawn(self) -> str:
        with self.console.capture() as text:
            self.console.print(*self.get_renderables())
        return text.get().rstrip()

    def write(self, line: str) -> None:
        """Add a line; the next refresh shows it."""
        with self._writing:
            self._lines.append(line)

    def stop(self) -> None:
        """Show the printed lines alone."""
        self._ended.set()
        self._replace()


def live_bar(stream: TextIO, place: Callable[[int], Place], total: int | None, *, notebook: bool) -> LiveBar:
    """Start the bar of a stream."""
    bar = NotebookBar(place, total) if notebook else LiveBar(Console(file=stream), place, total)
    bar.start()
    return bar
