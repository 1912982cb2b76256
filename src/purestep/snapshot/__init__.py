"""Snapshots of a training state: written in the background, committed atomically, verified when read.

snapshots        `Snapshots`: save, restore, list the steps, decide when one is due
staging          the copy of a state in host memory, and its tensors as arrays
writer           one save, from the copy to the committed directory, in a thread
reader           one step of a directory back to a state; partial_restore: ``only="params"``
parts            several processes: which rows each one writes and reads, and how one waits for another
directory        the steps in a directory; manifest: the contents of one step
history          the history of a run as one array
stored_steps     the steps of a directory, for people; run_record: how the run started and ended
orbax_io         the only file that imports orbax, at first use
versions         the versions and the hardware, for the manifest
"""

from .reader import Snapshot as Snapshot
from .run_record import RunInfo as RunInfo
from .run_record import RunRecord as RunRecord
from .run_record import read_run_info as read_run_info
from .snapshots import Snapshots as Snapshots
from .stored_steps import StoredStep as StoredStep
from .stored_steps import read_history as read_history
from .stored_steps import set_aside as set_aside
from .stored_steps import size_of as size_of
from .stored_steps import stored_steps as stored_steps
from .stored_steps import verify as verify
