"""Progress on the terminal: a live bar, or plain lines if the output is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from ..data import random_state
from ..events import EpochEnd, Event, FitEnd, FitStart, Logged, Position

_REDRAWN = 4  # times per second, by the bar's own thread, which reads the position: no step waits for it
_SILENCE = 60.0  # seconds without output, after which a line is printed inside an epoch
_LAST = ("lr", "steps/s")


class Progress:
    """Prints the progress of a run; see `progress`."""

    foreground = True

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._live = bool(getattr(stream, "isatty", lambda: False)())
        self._bar: Any = None
        self._task: Any = None  # the line of the epoch; the next one is visible during an evaluation
        self._evaluation: Any = None
        self._start: FitStart | None = None
        self._values: Mapping[str, float] = {}
        self._rate = 0.0
        self._shown = 0  # the epoch whose batches the bar counts
        self._printed = time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Logged):
            self._log(event)
        elif isinstance(event, EpochEnd):
            self._end_epoch(event)
        elif isinstance(event, FitStart):
            self._begin(event)
        elif isinstance(event, FitEnd):
            self.close()

    def close(self) -> None:
        """Remove the bar. Printed lines stay."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _begin(self, event: FitStart) -> None:
        self._start = event
        self._printed = time.monotonic()
        if event.resumed:
            self._print(f"resumed after epoch {event.epoch}, update {event.updates}")
        if event.view == "ema":
            self._print("evaluates the averaged weights (ema), the default of bind, evaluate and exports too")
        elif event.view is not None:
            self._print('evaluates the raw weights: pass view="params" to bind, evaluate and exports too')
        if self._live:
            self._bar = bar = _bar(self.stream)
            self._shown = event.epoch
            self._task = bar.add_task(self._epoch(event.epoch + 1), total=event.batches, values="")
            self._evaluation = bar.add_task("", total=None, values="", visible=False)
            bar.move = lambda: self._move(bar, event.position())
            bar.start()

    def _log(self, event: Logged) -> None:
        self._values, self._rate = event.values, event.steps_per_second
        if self._bar is not None:
            self._bar.update(self._task, values=_text(self._values, self._rate))
        elif time.monotonic() - self._printed > _SILENCE:
            self._print(f"{self._epoch(event.epoch + 1)}  update {event.updates}{_text(self._values, self._rate)}")

    def _end_epoch(self, event: EpochEnd) -> None:
        shown = {key: value for key, value in event.record.items() if key != "epoch" and value is not None}
        epoch = int(event.record.get("epoch") or event.epoch)  # inside an epoch, one more than are completed
        self._print(self._epoch(epoch) + _text(shown, self._rate))
        if event.stopping is not None and (self._start is None or event.epoch != self._start.epochs):
            self._print(f"stopped {'after' if epoch == event.epoch else 'in'} epoch {epoch}: {event.stopping}")

    def _move(self, bar: Any, place: Position) -> None:
        if place.loader != "train":
            bar.update(self._evaluation, description=place.loader, completed=place.batch, visible=True)
            return
        bar.update(self._evaluation, visible=False)
        if self._start is not None and place.epoch == self._start.epochs:
            return  # no epoch follows the last one
        if place.epoch != self._shown:
            self._shown = place.epoch
            bar.reset(self._task, description=self._epoch(place.epoch + 1))
        batches = self._start.batches if self._start is not None else None
        known = batches is not None and place.batch <= batches  # otherwise the length is wrong
        bar.update(self._task, completed=place.batch, total=batches if known else None)

    def _epoch(self, epoch: int) -> str:
        epochs = self._start.epochs if self._start else None
        return f"epoch {epoch}/{epochs}" if epochs else f"epoch {epoch}"

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, file=self.stream, flush=True)


def progress(stream: TextIO | None = None) -> Progress:
    """Show a live bar with loss, learning rate, speed and remaining time on a terminal, or else print a line per epoch.

    ``epoch 3/10  train_loss 0.123  val_loss 0.101  val_accuracy 0.981  lr 3.0e-04  12.3 steps/s``

    Args:
        stream: to print to, standard output by default.

    Example:
        >>> sink = progress()
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": 0.123, "lr": 3e-4}, improved=True, stopping=None))
        epoch 1  train_loss 0.123  lr 3.0e-04
    """
    return Progress(sys.stdout if stream is None else stream)


def _text(values: Mapping[str, Any], rate: float) -> str:
    parts = [f"{key} {_shown(value)}" for key, value in values.items() if key not in _LAST]
    if "lr" in values:
        parts.append(f"lr {values['lr']:.1e}")
    if rate:
        parts.append(f"{rate:.3g} steps/s")
    return "".join(f"  {part}" for part in parts)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0.0 or 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def _bar(stream: TextIO) -> Any:
    """Return a bar that calls its ``move`` before each redraw."""
    with random_state.scoped(0):  # the import of rich draws a random number
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

    class Moved(Bar):
        move: Callable[[], None] = staticmethod(lambda: None)

        def get_renderables(self) -> Iterable[Any]:
            self.move()
            yield from super().get_renderables()

    return Moved(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[values]}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
        refresh_per_second=_REDRAWN,
    )
