"""``python -m purestep``: look at runs from a terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from . import report
from .errors import PurestepError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 for a damaged run, 2 for wrong arguments.

    Example:
        >>> main(["show", "runs/nowhere"])
        2
    """
    parser = argparse.ArgumentParser(
        prog="python -m purestep", description="Look at runs. Live runs go on undisturbed."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="show | report")
    show = commands.add_parser("show", help="print the state of a run", description="Print the state of a run.")
    show.add_argument("run", metavar="RUN", help="the directory of its snapshots")
    show.add_argument("--verify", action="store_true", help="read every value and compare its digest")
    page = commands.add_parser("report", help="write a page with curves", description="Write one page about runs.")
    page.add_argument("runs", metavar="RUN", nargs="+", help="the directory of a run's snapshots")
    page.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the page (default: report.html)")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "report":
            size = report.write_page([report.read_run(run) for run in chosen.runs], chosen.output)
            print(f"{chosen.output}: {size / 1e6:.1f} MB")
            return 0
        run = report.read_run(chosen.run, verify=chosen.verify)
    except PurestepError as error:
        print(f"purestep: {error}", file=sys.stderr)
        return 2
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 100
    print(report.shown(run, width=max(width, 40), color=is_terminal, verified=chosen.verify))
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
