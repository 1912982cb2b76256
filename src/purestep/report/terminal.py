"""One run as text, for a terminal."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from ..errors import printable
from .run_files import Row, StoredRun, age, number_text

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
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, text in _facts(run, verified=verified):
        facts.add_row(name, _safe(text))
    console.print(facts, highlight=False)
    if run.history:
        console.print(_rows(run, width), highlight=False)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(lines).rstrip()


def _safe(text: str) -> str:
    """A text of the run, without control characters and without rich's markup."""
    return escape(printable(text))


def _facts(run: StoredRun, *, verified: bool) -> list[tuple[str, str]]:
    intact = [summary for summary in run.snapshots if summary.problem is None]
    facts = [("state", run.how)]
    if run.newest is None:
        facts.append(("newest", "no snapshot yet" if not run.snapshots else "every snapshot is damaged"))
    else:
        facts.append(("newest", f"snapshot {run.newest.step}, {age(run.newest.saved)}"))
    if run.monitor is not None and run.best is not None:
        metric, row = run.monitor[0], run.history[run.best]
        metrics = next((found.metrics for found in run.snapshots if found.step == run.best_step), {})
        kept = f"snapshot {run.best_step}" if metrics.get(metric) == row.get(metric) else "not kept as a snapshot"
        place = f"epoch {row.get('epoch')}, update {row.get('step')}"
        facts.append(("best", f"{metric} {number_text(row.get(metric))} at {place}, {kept}"))
    steps = ", ".join(str(summary.step) for summary in intact[-8:])
    more = "..., " if len(intact) > 8 else ""
    aside = f"; set aside: {', '.join(run.set_aside)}" if run.set_aside else ""
    facts.append(("snapshots", f"{len(intact)}{': ' if intact else ''}{more}{steps}{aside}"))
    facts.append(("size", decimal(run.size)))
    facts.append(("whole", _wholeness(run, verified=verified)))
    return facts


def _wholeness(run: StoredRun, *, verified: bool) -> str:
    if run.problems:
        return "\n".join(["no:", *run.problems])
    if not run.snapshots:
        return "nothing to check"
    return "yes: every digest agrees" if verified else "yes, by files and sizes (--verify reads every digest)"


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
