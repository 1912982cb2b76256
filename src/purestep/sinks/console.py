"""Progress of a run: a live bar on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from ..data import random_state
from ..errors import printable
from ..events import EpochEnd, Event, FitEnd, FitStart, Logged
from ..files import of_run
from ..state import vector_name

if TYPE_CHECKING:
    from .live_bar import LiveBar, Place

_SILENCE = 60.0  # seconds without output, after which a line is printed inside an epoch
_WIDTH = 119  # of a plain line


class ProgressBar:
    """Shows the progress of a run; see `progress`."""

    foreground = True

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._bar: LiveBar | None = None
        self._start: FitStart | None = None
        self._values: Mapping[str, float] = {}
        self._rate = 0.0  # of the last log line
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
        """Remove the live bar. Printed lines stay."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
        self._start = None  # its `position` holds the run, with the state and the batches

    def _place(self, room: int) -> Place:
        from .live_bar import Place

        start = self._start
        if start is None:
            return Place("", 0, True, "")
        place = start.position()
        trains = place.loader == "train"
        is_over = trains and place.epoch == start.epochs
        text = self._epoch(place.epoch + (not is_over)) if trains else place.loader
        numbers = "  ".join(_numbers(self._values, self._rate, prefix="train_", room=room))
        return Place(printable(text), (start.batches or 0) if is_over else place.batch, trains, printable(numbers))

    def _begin(self, event: FitStart) -> None:
        self._start = event
        self._printed = time.monotonic()
        self._bar = self._opened(event.batches)
        is_over = event.epochs == event.epoch or event.steps == event.updates
        if event.resumed and not is_over:
            self._print(f"resumed after epoch {event.epoch}, update {event.updates}{of_run(event.directory)}")
        if event.compiled and not is_over:
            self._print("the first calls compile the step: seconds to minutes")
        if event.view == "ema":
            self._print("evaluates the averaged weights (ema), as bind, evaluate and exports do")
        elif event.view is not None:
            self._print('evaluates the raw weights: pass view="params" to bind, evaluate and exports too')

    def _log(self, event: Logged) -> None:
        self._values, self._rate = event.values, event.steps_per_second
        if self._bar is None and time.monotonic() - self._printed > _SILENCE:
            self._print(_fitted(f"{self._epoch(event.epoch + 1)}  update {event.updates}", event.values, self._rate))

    def _end_epoch(self, event: EpochEnd) -> None:
        epoch = int(event.record.get("epoch") or event.epoch)  # inside an epoch, one more than are completed
        hidden = {"epoch"} if epoch != event.epoch else {"epoch", "step"}
        names = {"step": "update"}
        shown = {names.get(key, key): v for key, v in event.record.items() if key not in hidden and v is not None}
        rate = event.steps_per_second or self._rate
        width = _WIDTH if self._bar is None else min(_WIDTH, self._bar.width)
        self._print(_fitted(self._epoch(epoch), shown, rate, width))
        if self._bar is not None:
            self._bar.begin_epoch()
        if event.stopping is not None and (self._start is None or event.epoch != self._start.epochs):
            self._print(f"stopped {'after' if epoch == event.epoch else 'in'} epoch {epoch}: {event.stopping}")

    def _epoch(self, epoch: int) -> str:
        epochs = self._start.epochs if self._start else None
        return f"epoch {epoch}/{epochs}" if epochs else f"epoch {epoch}"

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        line = printable(line)
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, file=self.stream, flush=True)

    def _opened(self, batches: int | None) -> LiveBar | None:
        """The live bar of the stream; None if it is no terminal."""
        if not getattr(self.stream, "isatty", lambda: False)():
            return None
        with random_state.scoped(0):  # the import of rich draws a random number
            from rich.console import Console

            from .live_bar import LiveBar

        bar = LiveBar(Console(file=self.stream), self._place, batches)
        bar.start()
        return bar


def progress(stream: TextIO | None = None) -> ProgressBar:
    """Show a live bar on a terminal, or else print a line per epoch, and one a minute inside an epoch.

    Example:
        >>> sink = progress()
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": 0.123, "lr": 3e-4}, improved=True, stopping=None))
        epoch 1  train_loss 0.123  lr 3.0e-04

    ``epoch 3/10 ━━━━━━━━━━╸━━━━━━━━━ 20/40 0:00:02 loss 0.123  accuracy 0.981  lr 3.0e-04  12.3 steps/s``

    The bar shows batches and the remaining time of the epoch, and the numbers of the last log line. Lines that are
    printed have less than 120 characters. Both stay within the width of a terminal: other metrics than losses, learning
    rate and speed are dropped, those of training first. ``result.history`` has all.

    Args:
        stream: to print to, standard output by default.
    """
    return ProgressBar(sys.stdout if stream is None else stream)


# --- text -------------------------------------------------------------------------------------------------------------


def _numbers(values: Mapping[str, Any], rate: float, *, prefix: str = "", room: int | None = None) -> list[str]:
    """The numbers as texts: losses, other metrics (those of evaluations first), learning rates and speed. Other metrics
    are dropped from the last until all fit into ``room``, then the rest from the last."""
    rates = [name for name in values if name.startswith("lr/")] or [name for name in values if name == "lr"]
    losses = [name for name in ("train_loss", "val_loss") if name in values]
    placed = {*losses, *rates, "lr", "grad_norm", "scale"}
    entries = {name for name in values if vector_name(name) in values}  # the mean of the vector is shown
    other = [name for name in values if name not in placed and name not in entries]
    other.sort(key=lambda name: name.startswith("train_"))
    other += [name for name in ("grad_norm", "scale") if name in values]
    first, middle = (
        [f"{name.removeprefix(prefix)} {_shown(values[name])}" for name in names] for names in (losses, other)
    )
    last = [f"{name} {values[name]:.1e}" for name in rates]
    last += [f"{rate:.3g} steps/s" if rate < 1000 else f"{rate:.0f} steps/s"] if rate else []
    while room is not None and len("  ".join([*first, *middle, *last])) > room and (part := middle or last or first):
        part.pop()
    return [*first, *middle, *last]


def _fitted(head: str, values: Mapping[str, Any], rate: float, width: int = _WIDTH) -> str:
    return "  ".join([head, *_numbers(values, rate, room=width - len(head) - 2)])


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0.0 or 0.01 <= abs(value) < 1000 else f"{value:.3g}"
