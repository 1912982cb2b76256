"""One run as text, for a terminal."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import printable
from .run_files import Row, StoredRun, facts, number_text

_ROWS = 8  # of the history


def shown(run: StoredRun, *, width: int = 80, color: bool = False, verified: bool = False) -> str:
    """The run as text of a width: its state, snapshots, last rows and size.

    Args:
        run: see `read_run`.
        width: in characters, at least 40.
        color: with the terminal's colors.
        verified: every digest was compared.
    """
    console = Console(file=io.StringIO(), width=width, force_terminal=color, color_system="auto" if color else None)
    console.print(f"[bold]{_safe(str(run.directory))}[/]", soft_wrap=True, highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name, text in facts(run, verified=verified).items():
        grid.add_row(name, _safe(text))
    console.print(grid, highlight=False)
    if run.history:
        console.print(_rows(run, width), highlight=False)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(lines).rstrip()


def _safe(text: str) -> str:
    """A text of the run, without control characters and without rich's markup."""
    return escape(printable(text))


def _rows(run: StoredRun, width: int) -> Table:
    """The last rows. Columns that do not fit are left out: the losses and the monitored metric come first."""
    rows = run.history[-_ROWS:]
    names = list(dict.fromkeys(name for row in run.history for name in row))
    monitor = run.monitor[0] if run.monitor else ""
    names.sort(key=lambda name: _importance(name, monitor))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    room = width - 2
    for name in names:
        cells = [_cell(run, row, name) for row in rows]
        room -= max(map(len, [name, *cells])) + 3
        if room < 0 and len(table.columns):
            break
        table.add_column("update" if name == "step" else _safe(name), justify="right", no_wrap=True)
    shown = names[: len(table.columns)]
    for row in rows:
        table.add_row(*(_safe(_cell(run, row, name)) for name in shown))
    return table


def _cell(run: StoredRun, row: Row, name: str) -> str:
    is_best = run.best is not None and run.monitor is not None and row is run.history[run.best]
    return number_text(row.get(name)) + (" *" if is_best and run.monitor and name == run.monitor[0] else "")


def _importance(name: str, monitor: str) -> int:
    if name in ("epoch", "step"):
        return 0
    if name == monitor or name in ("train_loss", "val_loss"):
        return 1
    return 4 if name in ("grad_norm", "lr") else 3 if name.startswith("train_") else 2
