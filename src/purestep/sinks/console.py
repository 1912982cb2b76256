"""Progress of a run: a live line on a terminal or in a notebook, or plain lines if the output is neither."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TextIO

from ..data import random_state
from ..events import EpochEnd, Event, FitEnd, FitStart, Logged, Position

_REDRAWN = 4  # times per second, by the display's own thread, which reads the position: no step waits for it
_SILENCE = 60.0  # seconds without output, after which a line is printed inside an epoch
_WINDOW = 5.0  # seconds of training that the speed is a mean over
_WIDTH = 119  # of a plain line
_NOTEBOOK_WIDTH = 100
_KEPT_LINES = 200  # in a notebook
_BAR = 20  # columns of the bar; half of it in a narrow terminal
_WIDE = 100
_ENTRY = re.compile(r"(?s).+\[\d+\]")  # an entry of a vector, whose mean is shown
_LAST = ("grad_norm", "scale")


class Display(Protocol):
    """What shows the live line."""

    def print(self, line: str) -> None:
        """Print a line that stays."""

    def refresh(self) -> None:
        """Show the live line as it is now."""

    def close(self) -> None:
        """Remove the live line."""


class Progress:
    """Shows the progress of a run; see `progress`."""

    foreground = True

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._display: Display | None = None
        self._start: FitStart | None = None
        self._values: Mapping[str, float] = {}
        self._rate = 0.0  # of the last log line
        self._speed = _Speed()
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
        """Remove the live line. Printed lines stay."""
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def line(self, width: int) -> str:
        """Return the live line: epoch, bar, batches, remaining time of the epoch, and the numbers that fit.

        Args:
            width: columns. What does not fit is dropped, the least important number first.
        """
        start = self._start
        if start is None:
            return ""
        place = start.position()
        rate = self._speed(place)
        is_over = place.loader == "train" and place.epoch == start.epochs
        epoch = self._epoch(place.epoch + (not is_over))
        if place.loader != "train":
            head = f"{epoch}  {place.loader} {place.batch}"
        else:
            total = start.batches if start.batches is not None and place.batch <= start.batches else None
            done = total if is_over else place.batch
            share = None if not total else (done or 0) / total
            count = f"{done or 0}/{'?' if total is None else total}"
            room = max(width - len(epoch) - len(count) - 12, 0)
            bar = _bar(share, min(_BAR if width >= _WIDE else _BAR // 2, room))
            head = f"{epoch} {bar} {count} {self._remaining(total, done or 0, rate)}"
        return _fitted(head[:width], _entries(self._values, rate), width)

    def _remaining(self, total: int | None, done: int, rate: float) -> str:
        batches = self._speed.batches_per_second
        if total is None or not batches or not rate:
            return "-:--:--"
        left = round((total - done) / batches)
        return f"{left // 3600}:{left % 3600 // 60:02}:{left % 60:02}"

    def _begin(self, event: FitStart) -> None:
        self._start = event
        self._speed = _Speed()
        self._printed = time.monotonic()
        self._display = _display(self.stream, self.line)
        is_over = event.epochs == event.epoch or event.steps == event.updates
        if event.resumed and not is_over:
            where = f" of {'/'.join(event.directory.parts[-2:])}" if event.directory else ""
            self._print(f"resumed after epoch {event.epoch}, update {event.updates}{where}")
        if event.view == "ema":
            self._print("evaluates the averaged weights (ema), as bind, evaluate and exports do")
        elif event.view is not None:
            self._print('evaluates the raw weights: pass view="params" to bind, evaluate and exports too')

    def _log(self, event: Logged) -> None:
        self._values, self._rate = event.values, event.steps_per_second
        if self._display is None and time.monotonic() - self._printed > _SILENCE:
            head = f"{self._epoch(event.epoch + 1)}  update {event.updates}"
            self._print(_fitted(head, _entries(self._values, self._rate, prefix=""), _WIDTH))

    def _end_epoch(self, event: EpochEnd) -> None:
        epoch = int(event.record.get("epoch") or event.epoch)  # inside an epoch, one more than are completed
        hidden = {"epoch"} if epoch != event.epoch else {"epoch", "step"}
        shown = {key: value for key, value in event.record.items() if key not in hidden and value is not None}
        rate = event.steps_per_second or self._rate
        width = min(_WIDTH, getattr(self._display, "width", _WIDTH))
        self._print(_fitted(self._epoch(epoch), _entries(shown, rate, prefix=""), width))
        if event.stopping is not None and (self._start is None or event.epoch != self._start.epochs):
            self._print(f"stopped {'after' if epoch == event.epoch else 'in'} epoch {epoch}: {event.stopping}")

    def _epoch(self, epoch: int) -> str:
        epochs = self._start.epochs if self._start else None
        return f"epoch {epoch}/{epochs}" if epochs else f"epoch {epoch}"

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        if self._display is not None:
            self._display.print(line)
        else:
            print(line, file=self.stream, flush=True)


def progress(stream: TextIO | None = None) -> Progress:
    """Show a live line on a terminal or in a notebook, or else print a line per epoch.

    ``epoch 3/10 ━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌ 20/40 0:00:02  loss 0.123  accuracy 0.981  lr 3.0e-04  12.3 steps/s``

    Epoch, bar, batches and the remaining time of the epoch always stay. Numbers that do not fit into the width are
    dropped, other metrics first, then the learning rate, the speed and at last the loss. The speed is that of the last
    5 seconds of training. Lines that are printed have less than 120 characters, and stay within the width of a
    terminal.

    Args:
        stream: to print to, standard output by default.

    Example:
        >>> sink = progress()
        >>> sink(EpochEnd(None, 1, 10, {"epoch": 1, "train_loss": 0.123, "lr": 3e-4}, improved=True, stopping=None))
        epoch 1  train_loss 0.123  lr 3.0e-04
    """
    return Progress(sys.stdout if stream is None else stream)


# --- text -------------------------------------------------------------------------------------------------------------


class _Speed:
    """Updates and batches per second of the last seconds of training, from positions at any times."""

    def __init__(self) -> None:
        self.batches_per_second = 0.0
        self._rate = 0.0
        self._marks: deque[tuple[float, Position]] = deque()

    def __call__(self, place: Position) -> float:
        """Return the updates per second. During an evaluation it is that of the training before."""
        if place.loader != "train":
            self._marks.clear()
            return self._rate
        now, marks = time.monotonic(), self._marks
        if marks and place.updates < marks[-1][1].updates:  # the run went back
            marks.clear()
        marks.append((now, place))
        while len(marks) > 2 and now - marks[1][0] > _WINDOW:
            marks.popleft()
        then, first = marks[0]
        if now > then and (place.updates > first.updates or now - then > 1.0):
            self._rate = (place.updates - first.updates) / (now - then)
            if place.epoch == first.epoch:
                self.batches_per_second = (place.batch - first.batch) / (now - then)
        return self._rate


def _entries(values: Mapping[str, Any], rate: float, *, prefix: str = "train_") -> list[tuple[int, str]]:
    """Return (rank, text) of each number, in the order of display; the lowest rank is the most important."""
    entries: list[tuple[int, str]] = []
    for name, value in values.items():
        is_entry = _ENTRY.fullmatch(name) and name.rpartition("[")[0] in values
        if name == "lr" or name.startswith("lr/") or name in _LAST or is_entry:
            continue
        is_minor = name.startswith("train_")
        rank = 0 if name in ("train_loss", "val_loss") else 1 if name.endswith("_loss") else 5 if is_minor else 2
        entries.append((rank, f"{name.removeprefix(prefix)} {_shown(value)}"))
    losses = [entry for entry in entries if entry[0] == 0]
    entries = losses + [entry for entry in entries if entry not in losses]
    entries += [(8, f"{name} {_shown(values[name])}") for name in _LAST if name in values]
    rates = [name for name in values if name.startswith("lr/")] or [name for name in values if name == "lr"]
    entries += [(4, f"{name} {values[name]:.1e}") for name in rates]
    if rate:
        entries.append((3, f"{rate:.3g} steps/s" if rate < 1000 else f"{rate:.0f} steps/s"))
    return entries


def _fitted(head: str, entries: Iterable[tuple[int, str]], width: int) -> str:
    """Join as many entries as fit, in their order; the most important are chosen first."""
    listed, room = list(entries), width - len(head)
    chosen: set[int] = set()
    for index in sorted(range(len(listed)), key=lambda at: (listed[at][0], at)):
        size = len(listed[index][1]) + 2
        if size > room:
            break
        room -= size
        chosen.add(index)
    return head + "".join(f"  {text}" for index, (_, text) in enumerate(listed) if index in chosen)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0.0 or 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def _bar(share: float | None, width: int) -> str:
    full = 0 if share is None else math.floor(share * width + 1e-9)
    return "━" * full + "╌" * (width - full)


# --- displays ---------------------------------------------------------------------------------------------------------


def _display(stream: TextIO, line: Callable[[int], str]) -> Display | None:
    """Return the live display for a stream; None for a file or pipe."""
    if getattr(stream, "isatty", lambda: False)():
        return _Terminal(stream, line)
    if stream is sys.stdout and type(stream).__module__.startswith("ipykernel."):
        return _Notebook(line)
    return None


class _Terminal:
    """A live line below the printed ones, drawn by rich."""

    def __init__(self, stream: TextIO, line: Callable[[int], str]) -> None:
        with random_state.scoped(0):  # the import of rich draws a random number
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text

        console = Console(file=stream)
        self._line = line

        def text() -> Any:
            return Text(line(self.width), no_wrap=True, overflow="crop")

        self._console = console
        self._live = Live(console=console, get_renderable=text, transient=True, refresh_per_second=_REDRAWN)
        self._live.start()

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return int(self._console.width)

    def print(self, line: str) -> None:
        """Print a line above the live one."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def refresh(self) -> None:
        """Draw the live line."""
        self._live.refresh()

    def close(self) -> None:
        """Remove the live line."""
        self._live.stop()


class _Notebook:
    """One output of a notebook's cell, which is replaced: the printed lines, and the live line below them."""

    def __init__(self, line: Callable[[int], str]) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]  # a kernel has it

        self.width = _NOTEBOOK_WIDTH
        self._line: Callable[[int], str] | None = line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._shown = ""
        self._lock = threading.Lock()
        self._handle: Any = display({"text/plain": ""}, raw=True, display_id=True)
        self._ended = threading.Event()
        threading.Thread(target=self._redraw, name="purestep progress", daemon=True).start()

    def _redraw(self) -> None:
        while not self._ended.wait(1 / _REDRAWN):
            self.refresh()

    def print(self, line: str) -> None:
        """Add a line; the next refresh shows it."""
        with self._lock:
            self._lines.append(line)

    def refresh(self) -> None:
        """Replace the output, if it has changed."""
        with self._lock:
            live = [] if self._line is None else [self._line(self.width)]
            text = "\n".join([*self._lines, *live])
            if text != self._shown:
                self._shown = text
                self._handle.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        """Show the printed lines alone."""
        self._ended.set()
        with self._lock:
            self._line = None
        self.refresh()
