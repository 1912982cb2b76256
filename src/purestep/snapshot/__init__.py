"""Snapshots of a training state: written in the background, verified when read, never half there.

`store` is the only file that imports orbax, on first use; small leaves are restored without it.
"""

from .history_rows import Table as Table
from .reader import Snapshot as Snapshot
from .snapshots import Snapshots as Snapshots
