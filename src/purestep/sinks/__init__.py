"""Sinks: callables that get the events of a run (`purestep.events`), with a ``close()``.

console       progress as lines; live_bar: as a bar, by rich
json_history  the history as JSON
row_files     CSV and JSON lines
tensorboard   event files of TensorBoard
trackers      Weights & Biases, MLflow
guarded       a wrapper that keeps a failing or hanging sink from harming the run
output        the file of a sink
"""

from .console import ProgressBar as ProgressBar
from .console import progress as progress
from .guarded import Guarded as Guarded
from .guarded import Sink as Sink
from .guarded import guarded as guarded
from .json_history import History as History
from .json_history import history_json as history_json
from .row_files import RowFile as RowFile
from .row_files import csv as csv
from .row_files import jsonl as jsonl
from .tensorboard import TensorBoard as TensorBoard
from .tensorboard import tensorboard as tensorboard
from .trackers import MLflow as MLflow
from .trackers import Wandb as Wandb
from .trackers import mlflow as mlflow
from .trackers import wandb as wandb
