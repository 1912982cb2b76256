"""Where a run reports to: each sink is a callable of the events of `purestep.events`, with a ``close()``.

``bar.py``: the terminal. ``history.py``: the history as JSON. ``rows.py``: CSV and JSON lines. ``board.py``:
TensorBoard. ``output.py``: files, pipes and devices. ``guard.py``: what keeps a sink that fails or hangs from harming
the run.
"""

from .bar import Progress as Progress
from .bar import progress as progress
from .board import TensorBoard as TensorBoard
from .board import tensorboard as tensorboard
from .defaults import default_sinks as default_sinks
from .guard import Guarded as Guarded
from .guard import Sink as Sink
from .guard import guarded as guarded
from .history import History as History
from .history import history_json as history_json
from .rows import Rows as Rows
from .rows import csv as csv
from .rows import jsonl as jsonl
