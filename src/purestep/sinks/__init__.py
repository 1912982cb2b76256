"""Where a run reports to: each sink is a callable of the events of `purestep.events`, with a ``close()``.

``bar.py``: the terminal. ``history.py``: the history as JSON. ``rows.py``: CSV and JSON lines. ``board.py``:
TensorBoard. ``output.py``: files, pipes and devices. ``guard.py``: what keeps a sink that fails or hangs from harming
the run.
"""

from .console import Progress as Progress
from .console import progress as progress
from .default import default_sinks as default_sinks
from .guarded import Guarded as Guarded
from .guarded import Sink as Sink
from .guarded import guarded as guarded
from .json_history import History as History
from .json_history import history_json as history_json
from .row_files import Rows as Rows
from .row_files import csv as csv
from .row_files import jsonl as jsonl
from .tensorboard import TensorBoard as TensorBoard
from .tensorboard import tensorboard as tensorboard
