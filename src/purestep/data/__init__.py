"""Loaders, batches and devices.

open_feed        chooses the `Feed` for a loader
shares           feeds of one of several processes
feed             `Feed`: the batches of an epoch from any start, and what a snapshot stores of it
map_style        the feed of a DataLoader over a dataset with indices
iterable         feeds of lists, iterables, iterators and loaders with ``state_dict``
workers          the DataLoader that runs, and its worker processes
random_state     torch's, numpy's and Python's generators, seeded and restored together
state_json       the state of a loader as JSON
device           batches to a device
batch_spec       checks each batch against the first one
"""

from .batch_spec import BatchCheck as BatchCheck
from .batch_spec import check_batch as check_batch
from .device import Prefetched as Prefetched
from .device import device_of as device_of
from .device import to_device as to_device
from .feed import Feed as Feed
from .iterable import held as held
from .open_feed import open_feed as open_feed
