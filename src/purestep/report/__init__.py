"""Runs for people: ``python -m purestep show RUN`` and ``python -m purestep report RUN ... -o report.html``.

run_files  what a run has left in its directory: read without a lock and without writes, also while it trains
terminal   one run as text
page       several runs as one page, by plotly; curves: their numbers
"""

from .page import write_page as write_page
from .run_files import StoredRun as StoredRun
from .run_files import read_run as read_run
from .terminal import shown as shown
